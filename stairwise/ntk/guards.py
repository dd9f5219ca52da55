"""What is set for the time of a computation, and what is as before after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["products_in", "state", "unchanged"]

EVERY_MODULE = frozenset(vars(nn.Module()))


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
    special = (torch.jit.ScriptModule, nn.modules.lazy.LazyModuleMixin)
    modules = [m for m in model.modules() if not isinstance(m, special)]
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


def state(model: nn.Module) -> object:
    """Which objects and versions of tensors a model holds in buffers and attributes: another one after a forward pass
    that leaves something there."""
    found: list[Any] = []
    for module in model.modules():
        for value in (*module._buffers.values(), *_own(module).values()):
            inside = value if isinstance(value, list | set) else value.values() if isinstance(value, dict) else ()
            for one in (value, *inside):
                found.append((id(one), one._version if isinstance(one, Tensor) and not one.is_inference() else 0))
    return found


def _own(module: nn.Module) -> dict[str, Any]:
    """What is in a module beside what every module has."""
    return {name: value for name, value in vars(module).items() if name not in EVERY_MODULE}


def _copies(module: nn.Module) -> dict[str, Any]:
    return {name: value.copy() for name, value in _own(module).items() if type(value) in (list, dict, set)}
