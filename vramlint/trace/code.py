"""Which line of a person's code is running: frames, told apart from libraries' frames.

A *user frame* belongs to the script or to modules beside it: not to an installed package, not to
the standard library, not to vramlint. Frames' locals are never read: on Python < 3.13 that makes a
snapshot which keeps tensors alive.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType, TracebackType

_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = tuple(
    os.path.realpath(p) + os.sep for p in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")} if p
)

_is_user: dict[str, bool] = {}


def is_user_file(path: str) -> bool:
    """Whether a code object's file name is the person's own code."""
    known = _is_user.get(path)
    if known is None:
        known = _is_user[path] = _decide(path)
    return known


def _decide(path: str) -> bool:
    if not path or path.startswith("<"):
        return False
    if any(part in path for part in _PACKAGES):
        return False
    full = os.path.realpath(path)
    return not full.startswith((_OURS, *_STANDARD))


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost user frame at or outside ``frame``."""
    known = _is_user
    while frame is not None:
        path = frame.f_code.co_filename
        if known.get(path) or (path not in known and is_user_file(path)):
            return frame
        frame = frame.f_back
    return None


def here(depth: int = 1) -> tuple[str, int, str] | None:
    """(path, line, function) of the innermost user frame of the caller."""
    frame = user_frame(sys._getframe(depth))
    if frame is None:
        return None
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def of_traceback(traceback: TracebackType | None) -> tuple[str, int, str] | None:
    """(path, line, function) of the innermost user frame of an exception's traceback."""
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        if is_user_file(frame.f_code.co_filename):
            found = frame.f_code.co_filename, traceback.tb_lineno, frame.f_code.co_name
        traceback = traceback.tb_next
    return found
