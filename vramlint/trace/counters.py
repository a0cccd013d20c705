"""PyTorch's own memory counters over a whole run, even where the script resets them."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

RESETS = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")


@dataclass(slots=True)
class Peaks:
    """Largest values seen before a reset, by device index, in bytes."""

    allocated: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)


def install(peaks: Peaks, torch: ModuleType) -> None:
    """Read the peaks just before the script resets them, and start the memory history."""
    memory = torch.cuda.memory
    for name in RESETS:
        original = getattr(memory, name, None)
        if original is None:
            continue

        @functools.wraps(original)
        def reset(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if torch.cuda.is_initialized():
                keep(peaks, torch)
            return _original(*args, **kwargs)

        setattr(memory, name, reset)
        setattr(torch.cuda, name, reset)
    torch.cuda._lazy_call(lambda: start_history(torch))


def start_history(torch: ModuleType) -> None:
    """Record every allocator event from the first on, without frames: operations have the line."""
    torch.cuda.memory._record_memory_history(
        enabled="all", context=None, stacks="python", max_entries=sys.maxsize
    )


def keep(peaks: Peaks, torch: ModuleType) -> None:
    """Fold the current peaks into ``peaks``."""
    for device in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(device)
        allocated = stats.get("allocated_bytes.all.peak", 0)
        reserved = stats.get("reserved_bytes.all.peak", 0)
        peaks.allocated[device] = max(peaks.allocated.get(device, 0), allocated)
        peaks.reserved[device] = max(peaks.reserved.get(device, 0), reserved)
