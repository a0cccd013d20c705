"""What a pre-flight had to assume, collected while the script runs.

Anything that makes the phantom run differ from the real one is said here, once, in words that the
report prints: a data set that was not on disk, a workspace size that only cuDNN knows, a value
that was not computed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assumption:
    """``kind`` is a stable slug for JSON and tests; ``text`` is one sentence for a person."""

    kind: str
    text: str


_noted: dict[tuple[str, str], Assumption] = {}


def assume(kind: str, text: str) -> None:
    """Note an assumption; saying the same twice is saying it once."""
    _noted.setdefault((kind, text), Assumption(kind, text))


def assumptions() -> tuple[Assumption, ...]:
    """Everything assumed so far in this process, in the order noted."""
    return tuple(_noted.values())
