"""Replay a recorded memory history: what each allocation really took, and when.

The history gives requested sizes; what counts as *allocated* is the block: the request rounded up
to 512 bytes, plus a rest too small to be split off. Since every event carries its address, the
replay follows the recorded placement and only has to redo rounding, splitting and merging
(CUDACachingAllocator.cpp, ``should_split``, ``try_merge_blocks``; facts hold for 2.0-2.14). The
result is checked against PyTorch's own peak counters by whoever uses it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

from vramlint.trace.model import Event

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
SMALL_BUFFER = 2 << 20


@dataclass(slots=True)
class Allocation:
    """One tensor's memory. ``size`` is the block's bytes, ``requested`` what was asked for.

    ``born`` and ``died`` are indices into the event list; ``died`` is None while alive.
    """

    address: int
    requested: int
    size: int
    stream: int
    operation: int
    born: int
    died: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Allocator settings that decide block sizes (``PYTORCH_ALLOC_CONF``)."""

    max_split_size: int | None = None
    roundup_power2_divisions: tuple[int, ...] = ()

    @staticmethod
    def parse(text: str) -> Options:
        """From ``PYTORCH_ALLOC_CONF``; keys that do not matter for block sizes are skipped."""
        split = None
        divisions: tuple[int, ...] = ()
        for item in _items(text):
            key, _, value = item.partition(":")
            if key == "max_split_size_mb" and value.isdigit():
                split = int(value) << 20
            elif key == "roundup_power2_divisions":
                divisions = _divisions(value)
        return Options(split, divisions)


def _items(text: str) -> list[str]:
    """Comma-separated items, where a bracketed list is one item."""
    items, depth, current = [], 0, ""
    for c in text.replace(" ", ""):
        if c == "," and depth == 0:
            items.append(current)
            current = ""
            continue
        depth += (c == "[") - (c == "]")
        current += c
    return [*items, current] if current else items


def _divisions(value: str) -> tuple[int, ...]:
    """Sixteen divisions, by floor(log2(MiB)), from ``8`` or ``[256:1,512:2,>:8]``."""
    if value.isdigit():
        return (int(value),) * 16
    table = [0] * 16
    last = 0
    for part in value.strip("[]").split(","):
        key, _, number = part.partition(":")
        if not number.isdigit():
            continue
        if key == ">":
            for i in range(last, 16):
                table[i] = int(number)
        elif key.isdigit():
            index = max(0, int(key).bit_length() - 1)
            for i in range(last if last == 0 else index, index + 1):
                if i < 16:
                    table[i] = int(number)
            last = index + 1
    return tuple(table)


def round_size(requested: int, options: Options) -> int:
    """The block size that a request is rounded to, in bytes."""
    if requested < MIN_BLOCK:
        return MIN_BLOCK
    if options.roundup_power2_divisions:
        index = min(15, max(0, requested.bit_length() - 1 - 20))
        divisions = options.roundup_power2_divisions[index]
        if divisions > 1 and requested > MIN_BLOCK * divisions:
            if requested & (requested - 1) == 0:
                return requested
            floor = 1 << (requested.bit_length() - 1)
            step = floor // divisions
            return requested if step == 0 else -(-requested // step) * step
    return -(-requested // MIN_BLOCK) * MIN_BLOCK


@dataclass(slots=True)
class Replay:
    """The history with sizes. ``allocated[i]`` and ``reserved[i]`` hold after event ``i``."""

    allocations: list[Allocation]
    allocated: list[int]
    reserved: list[int]
    unknown: int = 0

    @property
    def peak_allocated(self) -> int:
        """Largest allocated bytes."""
        return max(self.allocated, default=0)

    @property
    def peak_reserved(self) -> int:
        """Largest reserved bytes."""
        return max(self.reserved, default=0)

    @property
    def peak_event(self) -> int:
        """Index of the first event at the allocated peak; -1 without events."""
        return self.allocated.index(self.peak_allocated) if self.allocated else -1

    def alive(self, event: int) -> list[Allocation]:
        """Allocations that count as allocated just after event ``event``."""
        return [
            a for a in self.allocations if a.born <= event and (a.died is None or a.died > event)
        ]


class _Space:
    """Free ranges, ordered by address, of all segments of a device."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: dict[int, int] = {}

    def add(self, start: int, end: int) -> None:
        insort(self.starts, start)
        self.ends[start] = end

    def take(self, start: int) -> int:
        end = self.ends.pop(start)
        del self.starts[bisect_right(self.starts, start) - 1]
        return end

    def containing(self, address: int) -> int | None:
        i = bisect_right(self.starts, address) - 1
        if i < 0 or self.ends[self.starts[i]] <= address:
            return None
        return self.starts[i]


def replay(events: Sequence[Event], options: Options = Options()) -> Replay:
    """Follow a device's history from its first event. Events must begin with an empty allocator."""
    space = _Space()
    segments: dict[int, int] = {}  # start -> end, of cudaMalloc'ed segments
    segment_starts: list[int] = []
    mapped = _Space()  # ranges of expandable segments
    live: dict[int, Allocation] = {}
    pending: dict[int, Allocation] = {}
    allocations: list[Allocation] = []
    allocated_curve: list[int] = []
    reserved_curve: list[int] = []
    allocated = reserved = unknown = 0

    def boundary(address: int) -> tuple[int, int]:
        """The segment around an address; blocks never merge across it."""
        i = bisect_right(segment_starts, address) - 1
        if i >= 0 and address < segments[segment_starts[i]]:
            return segment_starts[i], segments[segment_starts[i]]
        start = mapped.containing(address)
        return (start, mapped.ends[start]) if start is not None else (address, address)

    def release(start: int, end: int) -> None:
        low, high = boundary(start)
        if end < high and end in space.ends:
            end = space.take(end)
        if start > low:
            before = space.containing(start - 1)
            if before is not None and space.ends[before] == start:
                space.take(before)
                start = before
        space.add(start, end)

    for index, event in enumerate(events):
        action, address, size = event.action, event.address, event.size
        if action == "alloc":
            rounded = round_size(size, options)
            start = space.containing(address)
            if start is None:
                unknown += 1
                end = address + rounded
            else:
                end = space.take(start)
                if start < address:
                    space.add(start, address)
            low, high = boundary(address)
            expandable = low not in segments
            small = rounded <= SMALL_SIZE
            rest = end - address - rounded
            split = rest >= MIN_BLOCK if small or expandable else rest > SMALL_SIZE
            if not (small or expandable) and options.max_split_size is not None:
                split = split and rounded < options.max_split_size
            if split:
                space.add(address + rounded, end)
                end = address + rounded
            a = Allocation(address, size, end - address, event.stream, event.operation, index)
            live[address] = a
            allocations.append(a)
            allocated += a.size
        elif action == "free_requested":
            freed = live.pop(address, None)
            if freed is None:
                unknown += 1
            else:
                freed.died = index
                allocated -= freed.size
                pending[address] = freed
        elif action in ("free", "free_completed"):
            freed = pending.pop(address, None)
            if freed is None and (freed := live.pop(address, None)) is not None:
                freed.died = index
                allocated -= freed.size
            if freed is None:
                unknown += 1
            else:
                release(freed.address, freed.address + freed.size)
        elif action == "segment_alloc":
            segments[address] = address + size
            insort(segment_starts, address)
            space.add(address, address + size)
            reserved += size
        elif action == "segment_free":
            if segments.pop(address, None) is None:
                unknown += 1
            else:
                segment_starts.remove(address)
                if address in space.ends:
                    space.take(address)
            reserved -= size
        elif action == "segment_map":
            reserved += size
            end = address + size
            start = address
            if end in mapped.ends:
                end = mapped.take(end)
            before = mapped.containing(start - 1)
            if before is not None and mapped.ends[before] == start:
                mapped.take(before)
                start = before
            mapped.add(start, end)
            release(address, address + size)
        elif action == "segment_unmap":
            reserved -= size
            _cut(space, address, address + size)
            _cut(mapped, address, address + size)
        allocated_curve.append(allocated)
        reserved_curve.append(reserved)
    return Replay(allocations, allocated_curve, reserved_curve, unknown)


def _cut(space: _Space, start: int, end: int) -> None:
    """Take ``[start, end)`` out of the range that contains it."""
    found = space.containing(start)
    if found is None:
        return
    stop = space.take(found)
    if found < start:
        space.add(found, start)
    if end < stop:
        space.add(end, stop)
