"""Growth is evidence: bytes that each step, or each evaluation batch, leaves alive.

Compared are the same points of successive steps. Grown is what is alive at the later point and not
at the earlier, by the line that made it, where that happens in every interval looked at.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from vramlint.memory.history import BUFFER, GRADIENT, PARAMETER, STATE, WORKSPACE, History
from vramlint.trace.model import Holder, Mark, Site

_STEADY = {PARAMETER, GRADIENT, STATE, BUFFER, WORKSPACE}
_KEEPERS = ("append", "extend", "appendleft", "add", "insert", "update", "setdefault")


@dataclass(frozen=True, slots=True)
class Growth:
    """``per`` is ``step`` or ``evaluation batch``; ``bytes_each`` is what one leaves behind.

    ``site`` is the line that made most of it; ``holder`` the container that was found to hold
    tensors of several steps, ``held_at`` the line that puts them there. ``projected`` is the total
    for one pass of the loader where its length is known (evaluation only).
    """

    per: str
    bytes_each: int
    site: Site | None
    lines: tuple[tuple[Site, int], ...]
    holder: str = ""
    held_at: Site | None = None
    repeats: int | None = None

    @property
    def projected(self) -> int | None:
        """Bytes after all repeats, where their number is known."""
        return None if self.repeats is None else self.bytes_each * self.repeats


def growths(history: History) -> tuple[Growth, ...]:
    """All growth found on a device, largest first."""
    found = [g for g in (_per_step(history), *_per_batch(history)) if g is not None]
    return tuple(sorted(found, key=lambda g: -g.bytes_each))


def _per_step(history: History) -> Growth | None:
    marks = [m for m in history.trace.marks if m.kind == "step"]
    ends = [m for m in history.trace.marks if m.kind == "loader-end" and m.training]
    if ends:  # steps after a loader's end follow an evaluation: another point of the program
        marks = [m for m in marks if m.operation <= ends[0].operation] or marks
    if len(marks) < 3:
        return None
    return _between(history, marks[-3:] if len(marks) < 5 else marks[-4:], "step", None)


def _per_batch(history: History) -> list[Growth]:
    operations = history.trace.operations
    found = []
    batches = (m for m in history.trace.marks if m.kind == "batch")
    for _, group in groupby(batches, key=lambda m: m.label):
        marks = _last_pass(list(group))
        if len(marks) < 3:
            continue
        window = operations[marks[0].operation : marks[-1].operation]
        if any(op.phase in ("backward", "optimizer") for op in window):
            continue
        growth = _between(history, marks[-3:], "evaluation batch", marks[-1].length)
        if growth is not None:
            found.append(growth)
    return found[:3]


def _last_pass(marks: list[Mark]) -> list[Mark]:
    """The marks of one pass over a loader (indices count up from 1)."""
    start = 0
    for i, mark in enumerate(marks):
        if mark.index == 1 and len(marks) - i >= 3:
            start = i
    chosen = marks[start : start + 1]
    for mark in marks[start + 1 :]:
        if mark.index != chosen[-1].index + 1:
            break
        chosen.append(mark)
    return chosen


def _between(history: History, marks: list[Mark], per: str, repeats: int | None) -> Growth | None:
    """Growth by line that occurs in each interval between ``marks``."""
    alive = [_alive_by_line(history, mark) for mark in marks]
    grown: Counter[Site | None] = Counter()
    for site in alive[-1]:
        steps = [later[site] - earlier[site] for earlier, later in pairwise(alive)]
        if all(n > 0 for n in steps):
            grown[site] = steps[-1]
    total = sum(grown.values())
    whole = [sum(later.values()) - sum(earlier.values()) for earlier, later in pairwise(alive)]
    if total <= 0 or any(n <= 0 for n in whole):
        return None
    lines = tuple((site, n) for site, n in grown.most_common() if site is not None)
    holder, held_at = _held(history.trace.holders)
    site = lines[0][0] if lines else None
    return Growth(per, total, site, lines, holder, held_at, repeats)


def _alive_by_line(history: History, mark: Mark) -> Counter[Site | None]:
    counted: Counter[Site | None] = Counter()
    event = history.event_before(mark.operation)
    for allocation in history.replay.alive(event):
        piece = history.piece(allocation)
        if piece.category not in _STEADY:
            counted[piece.site] += piece.size
    return counted


def _held(holders: tuple[Holder, ...]) -> tuple[str, Site | None]:
    """The container with most tensors, and the line of the script that fills it."""
    for holder in sorted(holders, key=lambda h: -h.tensors):
        if holder.site is None:
            continue
        line = filling_line(Path(holder.site.path), holder.expression)
        if line is not None:
            return holder.expression, Site(holder.site.path, line)
    return "", None


def filling_line(path: Path, expression: str) -> int | None:
    """The line on which ``expression`` (``losses``, ``self.outputs``) is given one more item."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    last = expression.rpartition(".")[2]

    def is_it(node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id == last
        return isinstance(node, ast.Attribute) and node.attr == last

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _KEEPERS and is_it(node.func.value):
                return node.lineno
        elif isinstance(node, ast.AugAssign) and is_it(node.target):
            return node.lineno
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and is_it(target.value):
                    return node.lineno
    return None
