"""The stop rule: enough of a training run to know its memory, and no more.

Three optimizer steps show it: state appears in the first, the second is steady, the third tells
whether anything grows (then three more are taken). After that, loaders come to their end, so the
script goes on as after a short epoch: evaluation, schedulers, checkpoints. The next training step,
with whatever the evaluation left alive, is the last.

Nothing is taken from the script but time: loaders give their first batches, in this process rather
than in workers, and an evaluation ends after a few batches.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vramlint.trace import code
from vramlint.trace.assumptions import assume
from vramlint.trace.model import Mark
from vramlint.trace.recorder import Recorder


class EndOfTrace(BaseException):
    """Raised inside the script when enough was seen. Not an Exception: ``except Exception`` in
    the script must not take it for a failure of its own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``steps``: optimizer steps before loaders end. ``evaluation_batches``: batches without a
    backward pass before a loader ends. ``growing_steps``: steps where memory grows."""

    steps: int = 3
    growing_steps: int = 6
    evaluation_batches: int = 3


class Pace:
    """Counts steps and batches, sets marks, and ends the run."""

    def __init__(self, recorder: Recorder, limits: Limits) -> None:
        self.recorder = recorder
        self.limits = limits
        self.marks: list[Mark] = []
        self.steps = 0  # finished steps of the optimizer that steps first
        self.ending = False
        self.ended = False
        self._torch: Any = None
        self._leader: Any = None
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._ended_loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._raised = 0
        self._names: dict[int, str] = {}
        recorder.on_backward_end = self.backward_ended

    # -- optimizers ---------------------------------------------------------------------------

    def install_optimizers(self, module: ModuleType) -> None:
        """Hook every optimizer's step (``torch.optim.optimizer``)."""
        module.register_optimizer_step_pre_hook(self._before_step)
        module.register_optimizer_step_post_hook(self._after_step)
        original = module.Optimizer.__init__
        counts = self._counts

        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            counts.setdefault(optimizer, 0)

        module.Optimizer.__init__ = __init__

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self.recorder
        names = recorder.parameter_names()
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"parameter {number}")
                if self._counts.get(optimizer, 0) == 0:
                    recorder.tag(parameter, "parameter", name)
                if parameter.grad is not None:
                    recorder.tag(parameter.grad, "gradient", name)
        recorder.in_optimizer = True

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self.recorder
        recorder.in_optimizer = False
        self.tag_state(optimizer)
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(optimizer)
            count = max(count, self.steps + 1)
        if self._leader() is optimizer:
            self._step_done(type(optimizer).__name__)

    def tag_state(self, optimizer: Any) -> None:
        """Tag the tensors of an optimizer's state, as ``parameter:key``."""
        names = self.recorder.parameter_names()
        for parameter, state in optimizer.state.items():
            if isinstance(state, dict):
                for key, value in state.items():
                    if hasattr(value, "is_cuda"):
                        name = f"{names.get(id(parameter), '')}:{key}"
                        self.recorder.tag(value, "optimizer state", name)

    def backward_ended(self) -> None:
        """A backward pass is over. Without any optimizer this is what a step is."""
        if not self._counts and self._torch is not None:
            self._step_done("backward")

    def _step_done(self, label: str) -> None:
        self.steps += 1
        self.recorder.step = self.steps
        self._mark("step", self.steps, label)
        if self.ending:
            self.end()
        if self.steps >= self._wanted() and self._others_ready():
            self.ending = True

    def _wanted(self) -> int:
        limits = self.limits
        if self.steps < limits.steps:
            return limits.steps
        seen = [m.allocated for m in self.marks if m.kind == "step"][-2:]
        growing = len(seen) == 2 and seen[1] > seen[0]
        return max(limits.growing_steps, limits.steps) if growing else limits.steps

    def _others_ready(self) -> bool:
        """Whether every optimizer has made two steps, or will not (20 times the wanted steps)."""
        if self.steps >= 20 * self.limits.steps:
            return True
        return all(n >= 2 for n in self._counts.values() if n > 0) and (
            self.steps >= 2 * self.limits.steps or all(n > 0 for n in self._counts.values())
        )

    # -- loaders -------------------------------------------------------------------------------

    def install_loaders(self, module: ModuleType) -> None:
        """Make loaders load here and end early (``torch.utils.data.dataloader``)."""
        pace = self
        get_iterator = module.DataLoader._get_iterator
        fetch = module._BaseDataLoaderIter.__next__

        def _get_iterator(loader: Any) -> Any:
            workers, timeout = loader.num_workers, loader.timeout
            if workers == 0:
                return get_iterator(loader)
            assume(
                "loading-in-process",
                "data was loaded in the training process; DataLoader workers use host memory only",
            )
            prefetch = loader.prefetch_factor
            loader.num_workers, loader.timeout = 0, 0
            try:
                return get_iterator(loader)
            finally:
                loader.num_workers, loader.timeout = workers, timeout
                loader.prefetch_factor = prefetch

        def __next__(iterator: Any) -> Any:
            pace.before_batch(iterator)
            batch = fetch(iterator)
            pace.after_batch(iterator)
            return batch

        module.DataLoader._get_iterator = _get_iterator
        module._BaseDataLoaderIter.__next__ = __next__

    def before_batch(self, iterator: Any) -> None:
        """Raise StopIteration where this loader has given enough."""
        state = iterator.__dict__.setdefault("_vramlint", [0, self.recorder.backward_passes, 0])
        backward = self.recorder.backward_passes
        if backward != state[1]:
            state[1], state[2] = backward, 0
        over = self.ending and state[0] > 0 and iterator not in self._ended_loaders
        idle = state[2] >= self.limits.evaluation_batches
        if over or idle:
            if idle:
                assume(
                    "short-evaluation",
                    f"loops without a backward pass were ended after {state[2]} batches",
                )
            self._ended_loaders.add(iterator)
            self._mark("loader-end", state[0], self._where(), training=not idle)
            raise StopIteration

    def after_batch(self, iterator: Any) -> None:
        """Count a batch and mark it."""
        state = iterator.__dict__["_vramlint"]
        state[0] += 1
        state[2] += 1
        try:
            length = len(iterator)
        except (TypeError, NotImplementedError):
            length = None
        self._mark("batch", state[0], self._where(), length=length, training=state[2] <= 1)

    # -- end -----------------------------------------------------------------------------------

    def end(self) -> None:
        """Leave the script. It may swallow the exception; then it is raised again."""
        self.ended = True
        self._raised += 1
        raise EndOfTrace

    def install_memory(self, torch: ModuleType) -> None:
        """Remember torch, whose allocator is asked at each mark."""
        self._torch = torch

    def _where(self) -> str:
        place = code.here(3)
        return f"{place[0]}:{place[1]}" if place else ""

    def _mark(
        self, kind: str, index: int, label: str, length: int | None = None, training: bool = True
    ) -> None:
        allocated = 0
        torch = self._torch
        if torch is not None and torch.cuda.is_initialized():
            allocated = torch.cuda.memory_allocated()
        self.marks.append(
            Mark(kind, index, len(self.recorder.operations), label, length, training, allocated)
        )


def live_optimizers() -> list[Any]:
    """Optimizers alive at the end of a run (a run that broke off has untagged state)."""
    import torch

    return [o for o in gc.get_objects() if isinstance(o, torch.optim.Optimizer)]
