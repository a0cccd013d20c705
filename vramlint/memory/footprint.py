"""From a trace to an answer: how much, what is alive at the peak, what grows, does it fit.

Three numbers are always told apart: peak *allocated* (bytes of tensors' blocks), peak *reserved*
(what PyTorch's allocator holds of the device), and *process* bytes (reserved plus the CUDA context
and loaded kernels: what nvidia-smi shows).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from vramlint.memory.growth import Growth, growths
from vramlint.memory.history import History, Piece
from vramlint.trace.model import DeviceRecord, Operation, Site, Trace

TIMELINE_POINTS = 2000


@dataclass(frozen=True, slots=True)
class Part:
    """A share of the bytes alive at a moment."""

    label: str
    bytes: int
    count: int
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class StepPeak:
    """Largest allocated and reserved bytes within one step (0: before the first step's end)."""

    step: int
    allocated: int
    reserved: int
    end_allocated: int


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of the timeline, at an allocator event."""

    event: int
    allocated: int
    reserved: int
    phase: str
    step: int


@dataclass(frozen=True, slots=True)
class Breakdown:
    """What is alive at one event, by category, module and line, each largest first."""

    event: int
    allocated: int
    phase: str
    step: int
    site: Site | None
    module: str
    operation: str
    categories: tuple[Part, ...]
    modules: tuple[Part, ...]
    lines: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """The allocation that a GPU could not give. ``segment_bytes`` is what the driver was asked."""

    segment_bytes: int
    site: Site | None
    module: str
    operation: str
    alive: Breakdown


@dataclass(frozen=True, slots=True)
class Footprint:
    """One device's memory over a run. Bytes throughout; ``context_bytes`` None: not known."""

    device: int
    name: str
    total_bytes: int
    peak_allocated: int
    peak_reserved: int
    context_bytes: int | None
    pinned_bytes: int
    retries: int
    peak: Breakdown
    steps: tuple[StepPeak, ...]
    timeline: tuple[Moment, ...]
    growth: tuple[Growth, ...]
    failure: Failure | None
    consistent: bool

    @property
    def process_bytes(self) -> int:
        """Reserved plus the context where it is known."""
        return self.peak_reserved + (self.context_bytes or 0)


def footprints(trace: Trace, context_bytes: int | None) -> tuple[Footprint, ...]:
    """The footprint of each device that the run used (of the first, where it used none)."""
    used = [d for d in trace.devices if d.events or d.peak_reserved]
    return tuple(footprint(trace, d, context_bytes) for d in used)


def footprint(trace: Trace, device: DeviceRecord, context_bytes: int | None) -> Footprint:
    """The footprint of one device."""
    history = History(trace, device)
    replayed = history.replay
    return Footprint(
        device=device.index,
        name=device.name,
        total_bytes=device.total_bytes,
        peak_allocated=device.peak_allocated,
        peak_reserved=device.peak_reserved,
        context_bytes=context_bytes,
        pinned_bytes=trace.pinned_peak_bytes,
        retries=device.retries,
        peak=breakdown(history, replayed.peak_event),
        steps=_steps(history),
        timeline=_timeline(history),
        growth=growths(history),
        failure=_failure(history),
        consistent=(replayed.peak_allocated, replayed.peak_reserved)
        == (device.peak_allocated, device.peak_reserved),
    )


def breakdown(history: History, event: int) -> Breakdown:
    """What is alive just after ``event``."""
    pieces = [history.piece(a, at=event) for a in history.replay.alive(event)]
    operation = history.operation(history.operation_at(event))
    trace = history.trace
    return Breakdown(
        event=event,
        allocated=history.replay.allocated[event] if event >= 0 else 0,
        phase=operation.phase if operation else "",
        step=operation.step if operation else 0,
        site=trace.site(operation.site) if operation else None,
        module=trace.module(operation.module) if operation else "",
        operation=operation.name if operation else "",
        categories=_parts((p.category, None, p) for p in pieces),
        modules=_parts((p.module or "(outside modules)", None, p) for p in pieces),
        lines=_parts((str(p.site) if p.site else "(no line)", p.site, p) for p in pieces),
    )


def _parts(pieces: Iterable[tuple[str, Site | None, Piece]]) -> tuple[Part, ...]:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    sites: dict[str, Site | None] = {}
    for label, site, piece in pieces:
        sizes[label] += piece.size
        counts[label] += 1
        sites.setdefault(label, site)
    ordered = sorted(sizes, key=lambda label: (-sizes[label], label))
    return tuple(Part(label, sizes[label], counts[label], sites[label]) for label in ordered)


def _steps(history: History) -> tuple[StepPeak, ...]:
    marks = [m for m in history.trace.marks if m.kind == "step"]
    allocated, reserved = history.replay.allocated, history.replay.reserved
    result, begin = [], 0
    for mark in marks:
        end = history.event_before(mark.operation) + 1
        if end > begin:
            result.append(
                StepPeak(
                    mark.index, max(allocated[begin:end]), max(reserved[begin:end]), allocated[end - 1]
                )
            )
        begin = end
    return tuple(result)


def _timeline(history: History) -> tuple[Moment, ...]:
    """The curve, thinned to the highest point of each of at most TIMELINE_POINTS stretches."""
    allocated, reserved = history.replay.allocated, history.replay.reserved
    total = len(allocated)
    width = max(1, -(-total // TIMELINE_POINTS))
    moments = []
    for begin in range(0, total, width):
        event = max(range(begin, min(begin + width, total)), key=allocated.__getitem__)
        operation = history.operation(history.operation_at(event))
        phase, step = (operation.phase, operation.step) if operation else ("setup", 0)
        moments.append(Moment(event, allocated[event], reserved[event], phase, step))
    return tuple(moments)


def _failure(history: History) -> Failure | None:
    """The last out-of-memory event, where the script ended by it."""
    if history.trace.outcome.kind != "out-of-memory":
        return None
    events = history.device.events
    for index in range(len(events) - 1, -1, -1):
        if events[index].action == "oom":
            break
    else:
        return None
    operation: Operation | None = history.operation(history.operation_at(index))
    trace = history.trace
    return Failure(
        segment_bytes=events[index].size,
        site=(trace.site(operation.site) if operation else None) or trace.outcome.site,
        module=trace.module(operation.module) if operation else "",
        operation=operation.name if operation else "",
        alive=breakdown(history, index),
    )
