"""Compile the two small C libraries that a pre-flight preloads.

A compiler is looked for in this order: ``$CC``, ``cc``, ``gcc``, ``clang`` on the PATH, then the
``ziglang`` wheel (a C compiler that pip can install). The result is cached under a name made of
the sources, the flags and the compiler, so a changed source is always rebuilt and two versions of
vramlint never share a library.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


class NoCompiler(RuntimeError):
    """No C compiler was found, or it failed; the message says what to install."""


HOW_TO_GET_A_COMPILER = (
    "vramlint needs a C compiler once, to build its phantom GPU. Install one with "
    "`pip install ziglang` (no root needed), or `apt-get install gcc`."
)


def compiler() -> list[str]:
    """The command that compiles C here, as an argument list. Raises NoCompiler."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and (words := name.split()) and shutil.which(words[0]):
            return words
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NoCompiler(HOW_TO_GET_A_COMPILER)


def cache_directory() -> Path:
    """Where built libraries live: ``$VRAMLINT_CACHE``, else the user's cache folder."""
    if chosen := os.environ.get("VRAMLINT_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vramlint"


def shared_library(
    name: str,
    sources: Sequence[Path],
    *,
    headers: Sequence[Path] = (),
    flags: Sequence[str] = (),
    built: Path | None = None,
) -> Path:
    """Build ``lib<name>.so`` from C sources, or return the cached one.

    ``built`` is a folder that may hold a library made at install time, named like the cached one.
    Raises NoCompiler when it must be built and cannot be.
    """
    digest = hashlib.sha256()
    for path in sorted([*sources, *headers], key=lambda p: p.name):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("\0".join([*flags, platform.machine()]).encode())
    file_name = f"lib{name}-{digest.hexdigest()[:12]}.so"
    if built is not None and (built / file_name).exists():
        return built / file_name
    target = cache_directory() / file_name
    if target.exists():
        return target
    compile_shared(target, sources, flags)
    return target


def compile_shared(target: Path, sources: Sequence[Path], flags: Sequence[str]) -> None:
    """Compile to ``target`` atomically: two processes may build the same library at once."""
    command = compiler()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(suffix=".so", dir=target.parent)
    except OSError as error:
        raise NoCompiler(f"cannot write {target.parent}: {error.strerror}; set VRAMLINT_CACHE") from error
    os.close(handle)
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD",)}
    run = subprocess.run(
        [*command, "-O1", "-fPIC", "-shared", "-o", scratch, *map(str, sources), *flags],
        capture_output=True,
        text=True,
        env=environment,
    )
    if run.returncode != 0:
        os.unlink(scratch)
        raise NoCompiler(f"{' '.join(command)} could not build {target.name}:\n{run.stderr.strip()[:2000]}")
    os.chmod(scratch, 0o755)
    os.replace(scratch, target)
