"""Host work that a pre-flight need not do: filling and copying large CPU tensors.

A model's weights start on the CPU. Their values do not matter here, so ``nn.init`` on them is
skipped, and large float fills, clones and casts touch no memory: a 70-billion-parameter model can
be built on a laptop because untouched pages cost nothing. Integer tensors are always computed:
they are indices, lengths and labels, and a wrong one breaks the script.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

# Elements of a parameter from which initialisation is skipped: below, doing it is as fast.
PARAMETER_ELEMENTS = 1 << 14
# Bytes of any other float tensor from which fills and copies are skipped.
LARGE_BYTES = 64 << 20

_torch: Any = None
_fills: frozenset[Any] = frozenset()
_copies: frozenset[Any] = frozenset()
_factories: dict[Any, Any] = {}

_RANDOM_FILLS = ("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_")


def install(torch: ModuleType) -> None:
    """Learn torch's operators and make ``nn.init`` leave large host tensors alone."""
    global _torch, _fills, _copies
    _torch = torch
    aten = torch.ops.aten
    _fills = frozenset(
        overload
        for name in (*_RANDOM_FILLS, "fill_", "zero_", "mul_", "add_", "div_", "sub_", "clamp_")
        for overload in _overloads(getattr(aten, name, None))
    )
    _copies = frozenset([*_overloads(aten._to_copy), *_overloads(aten.clone), *_overloads(aten.copy_)])
    for name in ("zeros", "ones", "full", "rand", "randn"):
        for overload in _overloads(getattr(aten, name)):
            _factories[overload] = name
    for name in ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like"):
        for overload in _overloads(getattr(aten, name)):
            _factories[overload] = name
    _patch_init(torch.nn.init)


def _overloads(packet: Any) -> list[Any]:
    return [] if packet is None else [getattr(packet, name) for name in packet.overloads()]


def _patch_init(init: ModuleType) -> None:
    """Wrap each in-place initialiser: large float CPU tensors come back as they are."""
    for name in dir(init):
        function = getattr(init, name)
        if name.endswith("_") and not name.startswith("_") and callable(function):
            setattr(init, name, _skipping(function))


def _skipping(function: Any) -> Any:
    import functools

    @functools.wraps(function)
    def initialise(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            isinstance(tensor, _torch.Tensor)
            and tensor.device.type == "cpu"
            and tensor.is_floating_point()
            and tensor.numel() >= PARAMETER_ELEMENTS
        ):
            return tensor
        return function(tensor, *args, **kwargs)

    return initialise


def skip_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(True, result) where ``func`` is a large fill or copy on the host that can be left out."""
    if func in _fills:
        target = args[0]
        if _large(target):
            return True, target
    elif func in _copies:
        source = args[0]
        if not _large(source):
            return False, None
        device = kwargs.get("device")
        if device is not None and device.type != "cpu":
            return False, None
        if func is _torch.ops.aten.copy_.default:
            return True, source
        if kwargs.get("pin_memory"):
            return False, None
        options = {k: kwargs[k] for k in ("dtype", "memory_format") if kwargs.get(k) is not None}
        if options.get("dtype") is not None and not options["dtype"].is_floating_point:
            return False, None
        return True, _torch.ops.aten.empty_like.default(source, **options)
    elif func in _factories:
        return _factory(func, args, kwargs)
    return False, None


def _large(tensor: Any) -> bool:
    if not isinstance(tensor, _torch.Tensor) or tensor.device.type != "cpu":
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if isinstance(tensor, _torch.nn.Parameter):
        return tensor.numel() >= PARAMETER_ELEMENTS
    return tensor.numel() * tensor.element_size() >= LARGE_BYTES


def _factory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if device is not None and device.type != "cpu" or kwargs.get("pin_memory"):
        return False, None
    if dtype is not None and not dtype.is_floating_point:
        return False, None
    name = _factories[func]
    if name.endswith("_like"):
        if not _large(args[0]):
            return False, None
        options = {k: kwargs[k] for k in ("dtype", "memory_format") if kwargs.get(k) is not None}
        return True, _torch.ops.aten.empty_like.default(args[0], **options)
    size = args[0]
    elements = 1
    for n in size:
        elements *= n
    bits = dtype.itemsize if dtype is not None else _torch.get_default_dtype().itemsize
    if elements * bits < LARGE_BYTES:
        return False, None
    if name == "full" and dtype is None and not isinstance(args[1], float):
        return False, None
    return True, _torch.ops.aten.empty.memory_format(list(size), dtype=dtype)
