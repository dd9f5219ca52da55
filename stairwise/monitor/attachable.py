"""Checks of what `SpectrumMonitor.attach` is given: modules that can be hooked, an optimizer with a learning rate."""

import warnings
from typing import Any

from torch import nn

from stairwise.checks import InputError, RunWarning


def check_modules(loss: Any, projector: Any, backbone: Any) -> None:
    """Refuse anything that cannot be hooked, and say what to write instead."""
    if loss is not None and projector is not None:
        raise InputError("loss and projector", "must not both be given", None, "prefer the loss")
    for name, given in {"loss": loss, "projector": projector, "backbone": backbone}.items():
        if given is None or isinstance(given, nn.Module):
            continue
        if isinstance(given, str):
            raise InputError(
                name, "must be a torch module", repr(given), f"give the module itself, such as model.{name}"
            )
        if isinstance(given, type):
            raise InputError(name, "must be a torch module", f"the class {given.__name__}", "give an instance of it")
        value = f"the function {given.__name__}" if hasattr(given, "__name__") else repr(given)
        if callable(given) and name == "loss":
            rule = "must be a torch module: a function cannot be hooked"
            remedy = "attach without loss=, and call watch.update(z_a, z_b, loss=…) once per step"
            raise InputError(name, rule, value, remedy)
        raise InputError(name, "must be a torch module", value, "give the nn.Module, or leave it out")


def check_optimizer(optimizer: Any) -> None:
    """Refuse anything whose learning rate cannot be read."""
    if optimizer is None:
        return
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list | tuple) or not groups or "lr" not in groups[0]:
        rule = 'must have param_groups with an "lr", like torch\'s optimizers'
        remedy = "give the optimizer itself, or leave it out to count calls"
        raise InputError("optimizer", rule, f"a {type(optimizer).__name__}", remedy)


def warn_if_compiled(module: nn.Module | None) -> None:
    """Warn about a module whose compiled code may leave out hooks."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    if module is not None and (compiled or type(module).__name__ == "OptimizedModule"):
        warnings.warn(
            f"{type(module).__name__} is already compiled and may not call its hooks: attach before torch.compile",
            RunWarning,
            stacklevel=5,
        )
