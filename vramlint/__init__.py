"""vramlint: how much GPU memory a training script takes, why, and which line to change."""

from __future__ import annotations

__version__ = "0.1.0"
