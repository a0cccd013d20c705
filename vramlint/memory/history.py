"""A device's allocations with their meaning: which operation, phase, step, line, module, category.

Categories are the field's: parameter, gradient, optimizer state, saved activation, temporary,
workspace, input, buffer, autocast copy, communication, kept by the script. What a storage *is*
comes first from tags (an address that was a parameter, a gradient, a state at some moment of the
allocation's life); the rest follows from who made it and how long it lived.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from vramlint.memory.blocks import Allocation, Options, Replay, replay
from vramlint.trace.model import DeviceRecord, Operation, Site, Tag, Trace

PARAMETER = "parameter"
GRADIENT = "gradient"
STATE = "optimizer state"
ACTIVATION = "saved activation"
TEMPORARY = "temporary"
WORKSPACE = "workspace"
INPUT = "input"
BUFFER = "buffer"
AUTOCAST = "autocast copy"
COMMUNICATION = "communication"
KEPT = "kept by the script"
OTHER = "other"

_TAG_ORDER = {PARAMETER: 0, GRADIENT: 1, STATE: 2, BUFFER: 3}


@dataclass(frozen=True, slots=True)
class Piece:
    """One allocation with its meaning."""

    allocation: Allocation
    category: str
    operation: Operation | None
    site: Site | None
    module: str
    name: str = ""

    @property
    def size(self) -> int:
        """Bytes that the allocation counts as allocated."""
        return self.allocation.size


class History:
    """Answers questions about one device of a trace."""

    def __init__(self, trace: Trace, device: DeviceRecord) -> None:
        self.trace = trace
        self.device = device
        self.replay: Replay = replay(device.events, Options.parse(trace.environment.allocator))
        # Latest operation begun when an event happened: events outside operations inherit it.
        self._operation_at = list(accumulate((e.operation for e in device.events), max))
        self._tags: dict[int, list[Tag]] = defaultdict(list)
        for tag in trace.tags:
            if tag.device == device.index:
                self._tags[tag.address].append(tag)
        self._module_by_path: dict[str, str] = {}
        for module in trace.modules:
            self._module_by_path.setdefault(module.partition(".")[2], module)
        self._backward = [
            i for i, op in enumerate(trace.operations) if op.phase in ("backward", "recompute")
        ]

    # -- moments ------------------------------------------------------------------------------

    def event_before(self, operation: int) -> int:
        """Index of the last event before operation number ``operation`` began; -1 for none."""
        return bisect_left(self._operation_at, operation) - 1

    def operation_at(self, event: int) -> int:
        """Number of the latest operation begun when ``event`` happened; -1 before the first."""
        return self._operation_at[event] if 0 <= event < len(self._operation_at) else -1

    def operation(self, number: int) -> Operation | None:
        """The operation with this number."""
        operations = self.trace.operations
        return operations[number] if 0 <= number < len(operations) else None

    # -- meaning ------------------------------------------------------------------------------

    def tag_of(self, allocation: Allocation) -> Tag | None:
        """What the allocation was tagged as in its life, the most telling tag first."""
        tags = self._tags.get(allocation.address)
        if not tags:
            return None
        born = max(self.operation_at(allocation.born), allocation.operation)
        died = None if allocation.died is None else self.operation_at(allocation.died)
        within = [t for t in tags if t.operation > born and (died is None or t.operation <= died + 1)]
        if died is not None:
            # A tag set right after the operation that freed the block belongs to its successor.
            within = [t for t in within if t.operation <= died or self._still_alive(allocation, t)]
        return min(within, key=lambda t: _TAG_ORDER.get(t.category, 9), default=None)

    def _still_alive(self, allocation: Allocation, tag: Tag) -> bool:
        event = self.event_before(tag.operation)
        return allocation.died is not None and allocation.died > event

    def piece(self, allocation: Allocation, at: int | None = None) -> Piece:
        """The meaning of an allocation, seen at event ``at`` (or over its whole life)."""
        operation = self.operation(allocation.operation)
        tag = self.tag_of(allocation)
        site = self.trace.site(operation.site) if operation else None
        module = self.trace.module(operation.module) if operation else ""
        name = ""
        if tag is not None:
            category, name = tag.category, tag.name
            if not module:
                module = self._owner(name.partition(":")[0])
        else:
            category = self._category(allocation, operation, at)
        return Piece(allocation, category, operation, site, module, name)

    def _owner(self, parameter: str) -> str:
        """The path of the module that a parameter named from its root belongs to."""
        path = parameter.rpartition(".")[0]
        return self._module_by_path.get(path, path)

    def _category(self, a: Allocation, operation: Operation | None, at: int | None) -> str:
        if operation is None:
            return OTHER
        died = None if a.died is None else self.operation_at(a.died)
        if a.address not in {t.storage for t in operation.outputs}:
            outlives = died is None or died > a.operation
            return WORKSPACE if outlives else TEMPORARY
        if operation.name.startswith(("c10d", "_c10d")):
            return COMMUNICATION
        if at is not None and self._kept(operation, at):
            return KEPT
        if operation.phase in ("optimizer", "backward"):
            return TEMPORARY
        if operation.phase in ("forward", "setup", "eval") and operation.module < 0 and not operation.inputs:
            return INPUT
        if operation.phase == "eval":
            return TEMPORARY
        if operation.name.startswith("aten._to_copy") and self._reads_parameter(operation):
            return AUTOCAST
        following = bisect_right(self._backward, a.operation)
        if following == len(self._backward):
            return ACTIVATION if died is None else TEMPORARY
        if died is None or died >= self._backward[following]:
            return ACTIVATION
        return TEMPORARY

    def _kept(self, operation: Operation, at: int) -> bool:
        """Alive in a later step than the one that made it (after the first: set-up is no leak)."""
        now = self.operation(self.operation_at(at))
        return now is not None and operation.phase != "setup" and now.step > operation.step

    def _reads_parameter(self, operation: Operation) -> bool:
        return any(
            tag.category == PARAMETER
            for t in operation.inputs
            for tag in self._tags.get(t.storage, ())
        )
