"""What `SpectrumMonitor.attach` is given: modules that can be hooked, an optimizer with a learning rate, views.

Also how a monitor speaks: warnings that cannot stop a training.
"""

import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from stairwise.checks import InputError, RunWarning, positive_int
from stairwise.distributed import rank
from stairwise.monitor.views import Lines, Views

MOST = 20  # number of different warnings of one monitor


@dataclass(frozen=True)
class Modules:
    """Modules to hook.

    Attributes:
        projectors: by name, in order of preference.
        automatic: they were found by their names, and whether z comes from the loss or from a projector is decided when
            they are called.
        lines: what warnings tell the user to write.
    """

    loss: nn.Module | None = None
    projectors: dict[str, nn.Module] = field(default_factory=dict)
    backbone: nn.Module | None = None
    automatic: bool = False
    lines: Lines = field(default_factory=Lines)

    @classmethod
    def given(cls, loss: Any, projector: Any, backbone: Any) -> "Modules":
        """Refuse anything that cannot be hooked, and say what to write instead."""
        for name, module in {"loss": loss, "projector": projector, "backbone": backbone}.items():
            _check_module(name, module)
        return cls(loss, {} if projector is None else {"projector": projector}, backbone)

    def all(self) -> list[nn.Module]:
        return [m for m in (self.loss, *self.projectors.values(), self.backbone) if m is not None]


def _check_module(name: str, given: Any) -> None:
    if given is None or isinstance(given, nn.Module):
        return
    if isinstance(given, str):
        raise InputError(name, "must be a torch module", repr(given), f"give the module itself, such as model.{name}")
    if isinstance(given, type):
        raise InputError(name, "must be a torch module", f"the class {given.__name__}", "give an instance of it")
    value = f"the function {given.__name__}" if hasattr(given, "__name__") else repr(given)
    if callable(given) and name == "loss":
        rule = "must be a torch module: a function cannot be hooked"
        remedy = "attach without loss=, and call watch.update(z_a, z_b, loss=…) once per step"
        raise InputError(name, rule, value, remedy)
    raise InputError(name, "must be a torch module", value, "give the nn.Module, or leave it out")


def check_names(names: dict[str, Any]) -> None:
    """Refuse names of submodules that are no text."""
    for role, name in names.items():
        if name is not None and not isinstance(name, str):
            rule, remedy = "must be the name of a submodule", f'write {role}="{role}", as in self.{role}'
            raise InputError(role, rule, f"a {type(name).__name__}", remedy)


def checked_optimizer(optimizer: Any) -> Any:
    """Refuse anything whose learning rate cannot be read; of a wrapper, such as accelerate's, the optimizer inside."""
    if optimizer is None:
        return None
    while not isinstance(optimizer, nn.Module) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list | tuple) or not groups or "lr" not in groups[0]:
        rule = 'must have param_groups with an "lr", like torch\'s optimizers'
        remedy = "give the optimizer itself, or leave it out to count calls"
        raise InputError("optimizer", rule, f"a {type(optimizer).__name__}", remedy)
    return optimizer


def checked_views(views: Any) -> Views:
    """None, a number of at least 2, or a function."""
    if views is None or callable(views):
        return views
    remedy = "write views=2, or give a function that returns (z_a, z_b)"
    number = positive_int(views, "views", remedy=remedy)
    if number < 2:
        raise InputError("views", "must be at least 2", number, remedy)
    return number


def warn_if_compiled(modules: list[nn.Module], tell: "Teller") -> None:
    """Warn about modules whose compiled code may leave out hooks."""
    for module in modules:
        name = type(module).__name__
        if getattr(module, "_compiled_call_impl", None) is not None or name == "OptimizedModule":
            tell(f"{name} is already compiled and may not call its hooks: attach before torch.compile")


class Teller:
    """Warns once per message, and never raises: where warnings are errors, the message goes to stderr.

    Of several processes the first one speaks, unless something is to be said in `every_process`.
    """

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, message: str, every_process: bool = False) -> None:
        if message in self.said or len(self.said) >= MOST:
            return
        self.said.append(message)
        if rank() > 0 and not every_process:
            return
        try:
            warnings.warn(message, RunWarning, stacklevel=4)
        except Warning:
            print(f"stairwise: {message}", file=sys.stderr)
