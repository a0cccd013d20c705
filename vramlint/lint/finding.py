"""What the linter reports: a Finding, with an optional Fix made of text edits."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class Severity(str, Enum):
    """How bad: an error breaks or leaks without bound, a warning wastes, info is worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def rank(self) -> int:
        """0 for info, 1 for warning, 2 for error."""
        return {"info": 0, "warning": 1, "error": 2}[self.value]


class Safety(str, Enum):
    """``safe``: the program means the same. ``unsafe``: a person should look."""

    SAFE = "safe"
    UNSAFE = "unsafe"


@dataclass(frozen=True, slots=True)
class Span:
    """Where in a file: 1-based lines, 0-based columns in characters, end exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace ``source[start:end]`` (character offsets in the decoded file) by ``text``."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Fix:
    """Edits that remove a finding together; ``title`` is an imperative for an editor's menu."""

    title: str
    edits: tuple[Edit, ...]
    safety: Safety


@dataclass(frozen=True, slots=True)
class Saving:
    """What a fix was measured to save at the peak, in bytes (negative: it costs)."""

    allocated: int
    reserved: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault at one place of one file."""

    code: str
    name: str
    severity: Severity
    path: Path
    span: Span
    message: str
    why: str
    fix: Fix | None = None
    saving: Saving | None = None
    about: str = "bytes"  # "bytes" (worth is measured), "speed", or "correctness"
    related: tuple[tuple[Span, str], ...] = field(default=())
