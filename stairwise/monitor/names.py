"""Modules to hook, found by their names in a model: a loss, projectors, a backbone."""

import re
from fnmatch import fnmatch
from operator import attrgetter
from typing import Any

from torch import nn

from stairwise.checks import InputError, flag, positive_int
from stairwise.monitor.attachable import Modules, check_names, checked_views
from stairwise.monitor.spectrum import SpectrumMonitor
from stairwise.monitor.views import Lines

Names = tuple[str, ...]
LOSSES: Names = ("criterion", "loss", "loss_fn", "*_loss", "*criterion", "criterion_*")
PROJECTORS: Names = ("projection_head", "projector", "student_head", "head", "*projection_head*", "*projector*")
PROJECTORS += ("*_head", "student", "*encoder_q")
ON_TOP: Names = ("proj", "projection", "*_projection")  # projectors too, but inside a backbone they are not
BACKBONES: Names = ("backbone", "encoder", "student_backbone", "*backbone*", "*encoder*")
# words in the names of modules that give no z: copies that follow the trained one, predictors, classifiers
OTHERS = {"momentum", "teacher", "target", "ema", "predictor", "prediction", "probe", "classifier", "local", "decoder"}
OTHERS |= {"key", "k", "knn"}
DEEPEST = 3  # levels that are searched


def named(module: nn.Module, names: dict[str, str | None], call: str) -> Modules:
    """Modules by the names that a user gave by role; what was not named is searched for.

    call: how the user names things, for warnings, such as `SpectrumCallback`.
    """
    parts = {role: _part(module, name, role) for role, name in names.items() if name is not None}
    loss, projector, backbone = (parts.get(role) for role in ("loss", "projector", "backbone"))
    found, losses = found_projectors(module), _matches(module, LOSSES)
    lines = _lines(module, call, next(iter(found), None), losses[0][0] if losses else "NAME")
    if loss is not None or projector is not None:
        projectors = {} if projector is None else {str(names["projector"]): projector}
        return Modules(loss, projectors, backbone, lines=lines)
    if not parts:
        backbone = _first(module, BACKBONES)
    return Modules(losses[0][1] if losses else None, found, backbone, automatic=True, lines=lines)


def _lines(module: nn.Module, call: str, projector: str | None, loss: str) -> Lines:
    by_hand = "callback.watch.update(z_a, z_b)"
    line = f'{call}(projector="{projector or "NAME"}", …)'
    if projector is None:
        line += f", with the module whose output is z, one of {[name for name, _ in module.named_children()]}"
    return Lines(f"{line}, or {by_hand}", f'{call}(loss="{loss}", views=…)', by_hand)


def checked_settings(
    names: dict[str, Any], every: int, joined: bool, views: Any, monitor: SpectrumMonitor | None
) -> tuple[dict[str, Any], SpectrumMonitor]:
    """Settings of a callback: arguments of an `Attachment`, and its monitor."""
    check_names(names)
    if monitor is not None and not isinstance(monitor, SpectrumMonitor):
        raise InputError("monitor", "must be a SpectrumMonitor", repr(monitor), "write sw.SpectrumMonitor(…)")
    every = positive_int(every, "every", remedy="write every=50")
    options = {"every": every, "joined": flag(joined, "joined"), "views": checked_views(views)}
    return options, monitor or SpectrumMonitor()


def found_projectors(module: nn.Module) -> dict[str, nn.Module]:
    """Modules that may be projectors, by name, the likeliest first."""
    inside = [name for name, _ in _candidates(module) if _fits(name, BACKBONES[:3])]
    outer = [(name, part) for name, part in _matches(module, ON_TOP) if "." not in name.removeprefix("model.")]
    return {
        name: part
        for name, part in (*_matches(module, PROJECTORS), *outer)
        if not any(name == one or name.startswith(f"{one}.") for one in inside)
    }


def _first(module: nn.Module, patterns: Names) -> nn.Module | None:
    return next((part for _, part in _matches(module, patterns)), None)


def _matches(module: nn.Module, patterns: Names) -> list[tuple[str, nn.Module]]:
    """Modules whose name fits, in the order of the patterns; of a wrapper of student and teacher, the student."""
    matches: dict[str, nn.Module] = {}
    for pattern in patterns:
        for name, part in _candidates(module):
            if _fits(name, (pattern,)):
                student = getattr(part, "student", None)
                if isinstance(student, nn.Module):
                    matches.setdefault(f"{name}.student", student)
                else:
                    matches.setdefault(name, part)
    return list(matches.items())


def _candidates(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Submodules by name, those on top first, without those that give no z."""
    names = [(name, part) for name, part in module.named_modules() if name and name.count(".") < DEEPEST]
    names = [(name, part) for name, part in names if not OTHERS & set(re.split("[._]", name.lower()))]
    return sorted(names, key=lambda one: one[0].count("."))


def _fits(name: str, patterns: Names) -> bool:
    return any(fnmatch(name.rpartition(".")[2], pattern) for pattern in patterns)


def _part(module: nn.Module, name: str, role: str) -> nn.Module:
    try:
        part = attrgetter(name)(module)
    except AttributeError:
        known = [n for n, _ in module.named_children()]
        raise InputError(role, f"must name a submodule of {type(module).__name__}", name, f"it has {known}") from None
    if not isinstance(part, nn.Module):
        raise InputError(role, "must name a module", f"{name}, a {type(part).__name__}", "hook the projector instead")
    return part
