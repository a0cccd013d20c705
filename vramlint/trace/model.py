"""What a pre-flight records: plain data, readable without torch.

All sizes are bytes. Order is the order in which things happened: ``events`` of one device are in
the allocator's own order, ``operations`` in dispatch order; an operation's number is its index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramlint.trace.assumptions import Assumption

if TYPE_CHECKING:
    import torch.fx


@dataclass(frozen=True, slots=True)
class Site:
    """A line of a person's code."""

    path: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A CUDA tensor as an operation saw it: where its data starts, and its shape and type."""

    address: int
    storage: int
    shape: tuple[int, ...]
    dtype: str
    device: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """One ATen call that read or made a CUDA tensor.

    ``site`` and ``module`` of a backward call are those of the forward call that it belongs to.
    ``phase`` is one of ``setup``, ``forward``, ``recompute``, ``backward``, ``optimizer``,
    ``eval``; ``step`` counts optimizer steps finished before it.
    ``arguments`` is a JSON-like structure in which ``{"t": i}`` stands for ``inputs[i]``; it is
    None where the recorder no longer kept arguments.
    """

    name: str
    site: int
    module: int
    phase: str
    step: int
    inputs: tuple[TensorRef, ...] = ()
    outputs: tuple[TensorRef, ...] = ()
    arguments: Any = None


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of PyTorch's own memory history.

    ``action`` is torch's word (alloc, free_requested, free_completed, segment_alloc,
    segment_free, segment_map, segment_unmap, oom, snapshot). ``size`` is the *requested* size
    for alloc and free, the segment's for segment_*. ``operation`` is -1 outside any ATen call.
    """

    action: str
    address: int
    size: int
    stream: int
    operation: int
    pool: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: ``kind`` is ``step`` (an optimizer step ended), ``batch`` (a loader gave one),
    ``loader-end``; ``operation`` is the next operation's number; ``label`` names the loader or
    optimizer, ``length`` is the loader's own length where it has one."""

    kind: str
    index: int
    operation: int
    label: str = ""
    length: int | None = None
    training: bool = True
    allocated: int = 0


@dataclass(frozen=True, slots=True)
class Tag:
    """At the moment before ``operation``, the storage at ``address`` was ``category`` ``name``."""

    operation: int
    device: int
    address: int
    category: str
    name: str


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """One (phantom) GPU of the run. Peaks are PyTorch's own counters, over the whole run."""

    index: int
    name: str
    total_bytes: int
    peak_allocated: int
    peak_reserved: int
    allocated: int
    reserved: int
    retries: int = 0
    ooms: int = 0
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Holder:
    """A container of the script's in which tensors of several steps were found alive."""

    expression: str
    kind: str
    tensors: int
    site: Site | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended.

    ``kind``: ``stopped`` (enough was seen), ``finished`` (the script ended by itself),
    ``exited`` (``sys.exit`` with a code), ``crashed`` (an exception of the script's),
    ``out-of-memory``, ``time-limit``, ``memory-limit``, ``killed`` (the process died).
    """

    kind: str
    message: str = ""
    site: Site | None = None
    exit_code: int = 0
    exception: str = ""
    traceback: str = ""
    requested: int = 0

    @property
    def complete(self) -> bool:
        """True where the trace covers what the stop rule wanted, or all of the script."""
        return self.kind in ("stopped", "finished")


@dataclass(frozen=True, slots=True)
class Environment:
    """With what the numbers were made."""

    engine: str
    python: str
    torch: str
    cuda: str
    script: str
    arguments: tuple[str, ...] = ()
    gpu: str = ""
    belts: tuple[str, ...] = ()
    allocator: str = ""


@dataclass(frozen=True)
class Trace:
    """A recorded run: operations, allocations and what was assumed. See the module's docstring."""

    environment: Environment
    outcome: Outcome
    operations: tuple[Operation, ...] = ()
    sites: tuple[Site, ...] = ()
    modules: tuple[str, ...] = ()
    devices: tuple[DeviceRecord, ...] = ()
    marks: tuple[Mark, ...] = ()
    tags: tuple[Tag, ...] = ()
    holders: tuple[Holder, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    pinned_peak_bytes: int = 0
    steps: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    output_tail: str = ""

    @cached_property
    def graph(self) -> torch.fx.Graph:
        """The traced operations as a ``torch.fx.Graph`` at ATen level (imports torch)."""
        from vramlint.trace.graph import build

        return build(self)

    def site(self, number: int) -> Site | None:
        """The site with this number; None for -1."""
        return self.sites[number] if 0 <= number < len(self.sites) else None

    def module(self, number: int) -> str:
        """The module path with this number; empty for -1."""
        return self.modules[number] if 0 <= number < len(self.modules) else ""

    def save(self, path: Path) -> None:
        """Write as gzip JSON lines."""
        from vramlint.trace.store import save

        save(self, path)

    @staticmethod
    def load(path: Path) -> Trace:
        """Read a saved trace. Raises ValueError on anything else."""
        from vramlint.trace.store import load

        return load(path)
