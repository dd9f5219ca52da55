"""What is set for the time of a computation, and what is as before after it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["products_in", "unchanged", "watched"]

EVERY_MODULE = frozenset(vars(nn.Module()))
SPECIAL = (torch.jit.ScriptModule, nn.modules.lazy.LazyModuleMixin)  # whose contents are not where others have them
FUNCTIONS = (type, FunctionType, BuiltinFunctionType)
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, nn.Module, *FUNCTIONS)
FEW = 1000  # objects in a module that are looked at


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Float32 products are exact to rounding unless TF32 was asked for, whatever the user's settings."""
    fast, cudnn, cpu = precision == "tf32", torch.backends.cudnn, torch.backends.mkldnn
    finer: list[tuple[Any, Any]] = []  # settings that newer versions of torch have for each kind of operation
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        places = [(torch.backends.cuda.matmul, torch.backends), (cudnn.conv, cudnn), (cudnn.rnn, cudnn)]
        for place, above in [*places, (cpu.matmul, cpu)]:
            value = place.fp32_precision
            finer.append((place, "none" if value == above.fp32_precision else value))  # that was not set
    try:
        older = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # the user has set the newer ones, in a way that these cannot express
        older = None
    try:
        if older is None:
            for place, _ in finer:
                place.fp32_precision = "tf32" if fast else "ieee"
        else:
            torch.set_float32_matmul_precision("high" if fast else "highest")
            cudnn.allow_tf32 = fast
        if finer:  # TF32 is for GPUs
            cpu.matmul.fp32_precision = "ieee"
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            cudnn.allow_tf32 = older[1]
        for place, before in finer:
            place.fp32_precision = before


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Buffers, and what a forward pass leaves in the attributes of a module, are as before afterwards.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> model.register_buffer("calls", torch.zeros(()))
        >>> with unchanged(model):
        ...     model.calls += 1
        ...     model.last = torch.ones(3)
        >>> float(model.calls), hasattr(model, "last")
        (0.0, False)
    """
    modules = [m for m in model.modules() if not isinstance(m, SPECIAL)]
    before = [(m, dict(m._buffers), _own(m), _copies(m)) for m in modules]
    # batch norm in evaluation mode does not write to its own
    written = [m for m in modules if not isinstance(m, nn.modules.batchnorm._BatchNorm)]
    kept = [t for m in written for t in (*m._buffers.values(), *_own(m).values()) if isinstance(t, Tensor)]
    values = [(t, t._version, t.detach().clone()) for t in kept if not t.is_inference()]
    try:
        yield
    finally:
        for tensor, version, value in values:
            if tensor._version != version:
                tensor.data = value
        for module, buffers, attributes, copies in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            for name in _own(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            for name, copy in copies.items():
                attributes[name].clear()
                attributes[name].extend(copy) if isinstance(copy, list) else attributes[name].update(copy)


def watched(model: nn.Module) -> Callable[[], bool]:
    """Tells whether a model holds something else than now in parameters, buffers or attributes, or may: not all
    objects can be looked into. What forward passes leave outside of it, or write to `.data`, is not seen.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> changed = watched(model)
        >>> changed()
        False
        >>> model.last = torch.ones(3)
        >>> changed()
        True
    """
    before = list(_held(model))

    def changed() -> bool:
        after = list(_held(model))
        pairs = zip(before, after, strict=False)
        return len(before) != len(after) or any(a is not b or v != w for (a, v), (b, w) in pairs)

    return changed


def _held(model: nn.Module) -> Iterator[tuple[object, int]]:
    for module in model.modules():
        if isinstance(module, SPECIAL):
            yield object(), 0
        else:
            for values in (module._parameters, module._buffers, _own(module)):
                yield from _inside(values)


def _inside(value: object) -> Iterator[tuple[object, int]]:
    """Objects, and their versions; an object that is never the same for what cannot be looked into, or is too much."""
    waiting = [value]
    for _ in range(FEW):
        if not waiting:
            return
        one = waiting.pop()
        if isinstance(one, Tensor) and not nn.parameter.is_lazy(one):
            yield one, 0 if one.is_inference() else one._version
        elif isinstance(one, list | tuple | set | frozenset | dict) and len(one) <= FEW:
            yield None, len(one)  # the object itself may be new each time it is asked for
            waiting.extend(one)
            waiting.extend(one.values() if isinstance(one, dict) else ())
        elif one is None or isinstance(one, PLAIN):
            yield one, 0
        else:
            yield object(), 0
    yield object(), 0


def _own(module: nn.Module) -> dict[str, Any]:
    """What is in a module beside what every module has."""
    return {name: value for name, value in vars(module).items() if name not in EVERY_MODULE}


def _copies(module: nn.Module) -> dict[str, Any]:
    return {name: value.copy() for name, value in _own(module).items() if type(value) in (list, dict, set)}
