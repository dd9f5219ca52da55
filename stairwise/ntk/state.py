"""Set torch state temporarily and restore it; restore what a forward pass leaves in a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
OPAQUE = (torch.jit.ScriptModule, nn.modules.lazy.LazyModuleMixin)  # modules that keep their contents elsewhere


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers and attributes of a model afterwards.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> model.register_buffer("calls", torch.zeros(()))
        >>> with restored(model):
        ...     model.calls += 1
        ...     model.last = torch.ones(3)
        >>> float(model.calls), hasattr(model, "last")
        (0.0, False)
    """
    modules = [m for m in model.modules() if not isinstance(m, OPAQUE)]
    before = [(m, dict(m._buffers), _attributes(m), _copies(m)) for m in modules]
    # batch norm in evaluation mode does not write to its buffers, so they need no copy
    written = [m for m in modules if not isinstance(m, nn.modules.batchnorm._BatchNorm)]
    kept = [t for m in written for t in (*m._buffers.values(), *_attributes(m).values()) if isinstance(t, Tensor)]
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
            for name in _attributes(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            for name, copy in copies.items():
                attributes[name].clear()
                attributes[name].extend(copy) if isinstance(copy, list) else attributes[name].update(copy)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes that not every module has."""
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


def _copies(module: nn.Module) -> dict[str, Any]:
    return {name: value.copy() for name, value in _attributes(module).items() if type(value) in (list, dict, set)}
