"""The recorder: every ATen call on CUDA tensors, with its line, module and phase.

A TorchDispatchMode sits below autograd, so it sees what the device would be asked to do, in the
forward pass and, since the mode follows the engine's device thread, in the backward pass. Around
each call it puts the operation's number into the allocator's user metadata: PyTorch's own memory
history then says for each allocation which call made it, temporaries included.

The recorder must not change one byte of what it observes. It keeps no tensor, no frame and no
locals; it remembers addresses, shapes and line numbers. What it remembers is turned into the
dataclasses of ``model`` only when the run is over.
"""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType
from typing import Any

from vramlint.trace import code
from vramlint.trace.model import Holder, Operation, Site, TensorRef

# After so many operations the arguments are no longer kept: a trace stays of bounded size.
ARGUMENTS_KEPT = 60_000


class Recorder:
    """State of one recording. One exists in a traced process."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self.started: list[int] = []  # time_us, kept only where metadata cannot be set
        self.tags: list[tuple[int, int, int, str, str]] = []
        self.step = 0
        self.in_optimizer = False
        self.backward_passes = 0
        self.seen_forward = False
        self._graph_task = -1
        self._sites: dict[tuple[str, int, str], int] = {}
        self._modules: dict[str, int] = {}
        self._module_names: dict[int, int] = {}
        self._roots: list[Any] = []
        self._forward: dict[int, tuple[int, int]] = {}
        self._last = (-1, -1)
        self._local = threading.local()
        self._dtypes: dict[Any, str] = {}
        self.mode: Any = None
        self.on_backward_end: Any = None
        self.holders: tuple[Holder, ...] = ()

    # -- places ---------------------------------------------------------------------------

    def site(self, depth: int = 1) -> int:
        """The number of the innermost user line, or -1."""
        frame = code.user_frame(sys._getframe(depth))
        if frame is None:
            return -1
        key = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        number = self._sites.get(key)
        if number is None:
            number = self._sites[key] = len(self._sites)
        return number

    def module_stack(self) -> list[int]:
        """Numbers of the modules whose forward is running in this thread, outermost first."""
        try:
            return self._local.stack
        except AttributeError:
            stack = self._local.stack = []
            return stack

    def enter_module(self, module: Any) -> None:
        """A module's forward begins (a global forward pre-hook)."""
        stack = self.module_stack()
        number = self._module_names.get(id(module))
        if number is None:
            self._name(module, "" if not stack else self.module_name(stack[-1]) + ".?")
            number = self._module_names[id(module)]
        stack.append(number)
        self.seen_forward = True

    def leave_module(self) -> None:
        """A module's forward is over, by return or by exception."""
        stack = self.module_stack()
        if stack:
            stack.pop()

    def module_name(self, number: int) -> str:
        """The path of module ``number``: the root's class, then attribute names."""
        for name, known in self._modules.items():
            if known == number:
                return name
        return ""

    def _name(self, root: Any, prefix: str) -> None:
        """Name a module that is called for the first time, and all that it contains."""
        self._roots.append(root)  # keeps ids valid; the script's own model lives as long anyway
        base = f"{prefix}{type(root).__name__}" if prefix else type(root).__name__
        for path, child in root.named_modules():
            name = f"{base}.{path}" if path else base
            if id(child) not in self._module_names:
                self._module_names[id(child)] = self._modules.setdefault(name, len(self._modules))
        for path, parameter in root.named_parameters():
            self.tag(parameter, "parameter", path)
        for path, buffer in root.named_buffers():
            self.tag(buffer, "buffer", path)

    # -- what a storage is ----------------------------------------------------------------

    def tag(self, tensor: Any, category: str, name: str) -> None:
        """Say what the storage of a CUDA tensor is for, from now on."""
        if tensor is None or not tensor.is_cuda:
            return
        try:
            address = tensor.untyped_storage().data_ptr()
            device = tensor.get_device()
        except (RuntimeError, NotImplementedError):
            return  # a wrapper subclass: its parts are seen as tensors of their own
        if address:
            self.tags.append((len(self.operations), device, address, category, name))

    def tag_gradients(self) -> None:
        """Tag the gradients of all known modules' parameters (used when a run breaks off)."""
        for root in self._roots:
            for name, parameter in root.named_parameters():
                if parameter.grad is not None:
                    self.tag(parameter.grad, "gradient", name)

    def parameter_names(self) -> dict[int, str]:
        """Name by ``id`` of each parameter of the modules seen."""
        return {id(p): n for root in self._roots for n, p in root.named_parameters()}

    # -- result -----------------------------------------------------------------------------

    def finished_operations(self) -> tuple[Operation, ...]:
        """The operations as dataclasses."""
        return tuple(
            Operation(
                name=name,
                site=site,
                module=module,
                phase=phase,
                step=step,
                inputs=tuple(map(self._ref, inputs)),
                outputs=tuple(map(self._ref, outputs)),
                arguments=arguments,
            )
            for name, site, module, phase, step, inputs, outputs, arguments in self.operations
        )

    def sites(self) -> tuple[Site, ...]:
        """All lines seen, by number."""
        return tuple(Site(*key) for key in self._sites)

    def modules(self) -> tuple[str, ...]:
        """All module paths, by number."""
        return tuple(self._modules)

    def _ref(self, raw: tuple[int, int, Any, Any, int]) -> TensorRef:
        address, storage, shape, dtype, device = raw
        name = self._dtypes.get(dtype)
        if name is None:
            name = self._dtypes[dtype] = str(dtype).removeprefix("torch.")
        return TensorRef(address, storage, tuple(shape), name, device)


def install(recorder: Recorder, torch: ModuleType) -> None:
    """Start recording in this thread: enter the mode and hook modules. ``torch`` is just loaded."""
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )

    register_module_forward_pre_hook(lambda module, _: recorder.enter_module(module))
    register_module_forward_hook(lambda module, *_: recorder.leave_module(), always_call=True)
    recorder.mode = _mode(recorder, torch)
    recorder.mode.__enter__()


def _mode(recorder: Recorder, torch: ModuleType) -> Any:
    """The dispatch mode, closed over what it needs at every call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from vramlint.trace.host import skip_on_host

    tensor_type = torch.Tensor
    c = torch._C
    graph_task_id = c._current_graph_task_id
    current_node = c._current_autograd_node
    sequence_number = torch.autograd._get_sequence_nr
    grad_enabled = torch.is_grad_enabled
    set_metadata = getattr(c, "_cuda_setMemoryMetadata", None)
    operations, forward_of, started = recorder.operations, recorder._forward, recorder.started
    scalars = (int, float, bool, str, type(None))
    names: dict[Any, str] = {}

    def ref(t: Any) -> tuple[int, int, Any, Any, int]:
        try:
            return t.data_ptr(), t.untyped_storage().data_ptr(), t.shape, t.dtype, t.get_device()
        except (RuntimeError, NotImplementedError):
            return 0, 0, t.shape, t.dtype, t.get_device()

    def encode(x: Any, refs: list[Any]) -> Any:
        if isinstance(x, tensor_type):
            if x.is_cuda:
                refs.append(ref(x))
                return {"t": len(refs) - 1}
            return {"host": list(x.shape)}
        if isinstance(x, scalars):
            return x
        if isinstance(x, (list, tuple)):
            return [encode(y, refs) for y in x]
        return {"s": str(x)}

    def has_cuda(x: Any) -> bool:
        if isinstance(x, tensor_type):
            return x.is_cuda
        if isinstance(x, (list, tuple)):
            return any(map(has_cuda, x))
        return False

    class Recording(TorchDispatchMode):
        """See the module's docstring."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for kind in types:
                if kind.__torch_dispatch__ is not tensor_type.__torch_dispatch__:
                    return NotImplemented  # let the subclass become plain tensors first
            kwargs = kwargs or {}
            on_cuda = any(map(has_cuda, args)) or bool(kwargs) and any(map(has_cuda, kwargs.values()))
            if not on_cuda:
                done, result = skip_on_host(func, args, kwargs)
                if done:
                    return result
                device = kwargs.get("device")
                if device is None or getattr(device, "type", "") != "cuda":
                    return func(*args, **kwargs)

            task = graph_task_id()
            stack = recorder.module_stack()
            module = stack[-1] if stack else -1
            if task >= 0:
                if task != recorder._graph_task:
                    recorder._graph_task = task
                    recorder.backward_passes += 1
                if stack:
                    phase, site = "recompute", recorder.site()
                else:
                    phase = "backward"
                    node = current_node()
                    known = forward_of.get(node._sequence_nr()) if node is not None else None
                    site, module = known or recorder._last
                    recorder._last = (site, module)
            else:
                if recorder._graph_task >= 0:
                    recorder._graph_task = -1
                    if recorder.on_backward_end is not None:
                        recorder.on_backward_end()
                site = recorder.site()
                if recorder.in_optimizer:
                    phase = "optimizer"
                elif not grad_enabled():
                    phase = "eval" if recorder.seen_forward else "setup"
                else:
                    phase = "forward" if recorder.seen_forward else "setup"
            if phase in ("forward", "recompute"):
                forward_of.setdefault(sequence_number() - 1, (site, module))

            number = len(operations)
            inputs: list[Any] = []
            arguments: Any = None
            if number < ARGUMENTS_KEPT:
                arguments = [encode(args, inputs), {k: encode(v, inputs) for k, v in kwargs.items()}]
            name = names.get(func)
            if name is None:
                name = names[func] = str(func)
            outputs: list[Any] = []
            operations.append((name, site, module, phase, recorder.step, inputs, outputs, arguments))
            if set_metadata is None:
                started.append(time.time_ns() // 1000)
                result = func(*args, **kwargs)
            else:
                set_metadata(str(number))
                try:
                    result = func(*args, **kwargs)
                finally:
                    set_metadata("")
            if isinstance(result, tensor_type):
                if result.is_cuda:
                    outputs.append(ref(result))
            elif isinstance(result, (list, tuple)):
                encode(result, outputs)
            return result

        @classmethod
        def is_infra_mode(cls) -> bool:
            return True

    return Recording()
