"""What `sw.Muon` accepts: settings and learning rates of its groups, parameters, and states to continue from."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, bfloat16, float32, float64

from stairwise.checks import InputError, flag, number, one_of, positive_int
from stairwise.training.newton_schulz import LARGEST, SCALINGS, check_rate, largest_rate, start_lengths
from stairwise.training.vectors import as_matrix

RULES = ("muon", "sgd", "adamw")
STATES = {"muon": ("momentum_buffer", "length"), "sgd": ("momentum_buffer",)}
STATES["adamw"] = ("exp_avg", "exp_avg_sq", "step")
SIGNED = ("momentum_buffer", "exp_avg")  # the other numbers of a state are not negative
SHAPED = (*SIGNED, "exp_avg_sq")  # of the shape of their parameter; the others are single numbers
SETTINGS = (
    "rule",
    "scaling",
    "rest",
    "momentum",
    "betas",
    "weight_decay",
    "eps",
    "nesterov",
    "steps",
    "dtype",
    "foreach",
)
OTHER_STATE = "begin with a new state, or use the optimizer that the state is from"
DTYPES = (float32, float64, bfloat16)
MOST_DECAY = 1 + 1e-6  # share of the weights that decays in a step, with room for rounding in float32


def check_settings(group: dict[str, Any]) -> None:
    """Settings of a group but the learning rate."""
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InputError("betas", "must be two numbers", repr(betas), "give (0.9, 0.999)")
    for name, value in (("momentum", group["momentum"]), ("betas", betas[0]), ("betas", betas[1])):
        number(value, name, least=0, below=1)
    number(group["weight_decay"], "weight_decay", least=0)
    one_of(group["rule"], "rule", RULES)
    number(group["eps"], "eps", least=_least_eps(*betas) if group["rule"] == "adamw" else 0)
    one_of(group["scaling"], "scaling", SCALINGS)
    one_of(group["rest"], "rest", RULES[1:])
    flag(group["nesterov"], "nesterov")
    flag(group["foreach"], "foreach")
    positive_int(group["steps"], "steps", most=99)
    if group["dtype"] not in (None, *DTYPES):
        raise InputError("dtype", "must be float32, float64 or bfloat16", group["dtype"], "leave it out")


def _least_eps(beta_1: float, beta_2: float) -> float:
    """The least eps with which AdamW's weights stay finite, although small squares are 0 in float32. If the average of
    squares forgets sooner than the average of gradients, their quotient is bounded by eps alone."""
    return 1e-30 if beta_1**2 <= beta_2 else 1e-8


def check_start(rule: str, params: list[Tensor]) -> None:
    """Parameters that move for the first time."""
    if rule == "muon":
        start_lengths([as_matrix(p) for p in params])
        return
    for p in params:
        if not p.isfinite().all():
            raise InputError(f"parameter of shape {tuple(p.shape)}", "must be finite at the start")


def check_state(state: Any, p: Tensor, rule: str) -> None:
    """What an earlier step has left for a parameter: complete, of its shape and finite; averages of squares ≥ 0."""
    if not state:
        return
    what = f"state of the parameter of shape {tuple(p.shape)}"
    for name in STATES[rule]:
        value = state.get(name) if isinstance(state, dict) else None
        if not isinstance(value, Tensor):
            raise InputError(what, f"must hold the tensor {name}", type(value).__name__, OTHER_STATE)
        if value.shape != (p.shape if name in SHAPED else ()):
            raise InputError(f"{what}, {name},", "must fit it", f"shape {tuple(value.shape)}", OTHER_STATE)
        if not value.isfinite().all() or (name not in SIGNED and (value < 0).any()):
            raise InputError(
                f"{what}, {name},",
                "must be finite" + (name not in SIGNED) * " and not negative",
                None,
                "load an earlier state",
            )


def check_parameter(p: Tensor, rule: str) -> None:
    what = f"parameter of shape {tuple(p.shape)}"
    if p.dtype not in DTYPES:
        remedy = "keep float32 weights, and compute in half precision with torch.autocast"
        raise InputError(what, "must be float32, float64 or bfloat16", p.dtype, remedy)
    if p.is_sparse:
        raise InputError(what, "must not be sparse", p.layout, "convert it with .to_dense()")
    if rule != "muon":
        return
    if p.ndim < 2:
        raise InputError(
            what, "must have two or more axes for muon", p.ndim, 'give its group the rule "sgd" or "adamw"'
        )
    dense = p.ndim == 2 or p.is_contiguous() or p.movedim(1, -1).is_contiguous()
    if not dense:
        raise InputError(what, "must be contiguous or channels-last", p.stride(), "call .contiguous() on it")


def _most(group: dict[str, Any]) -> float:
    return largest_rate(group["scaling"]) if group["rule"] == "muon" else LARGEST


def rate_of(group: dict[str, Any], name: str = "lr") -> float | Tensor:
    """The learning rate of a group. The value of a tensor is checked by `rates_in_range`, which does not wait for the
    device."""
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        lr = check_rate(lr, name, _most(group))
        if lr * group["weight_decay"] > MOST_DECAY:
            remedy = f"weight_decay at most {1 / lr:.3g}"
            raise InputError(f"{name} × weight_decay", "must be at most 1", lr * group["weight_decay"], remedy)
        return lr
    if lr.numel() != 1:
        raise InputError(name, "must have one element", f"shape {tuple(lr.shape)}")
    return lr


def rates_in_range(groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    """One flag per learning rate that is a tensor: would `rate_of` accept its value as a number?"""
    most: dict[int, tuple[Tensor, float]] = {}
    for group in groups:
        if isinstance(lr := rate_of(group), Tensor):
            decay = group["weight_decay"]
            bound = min(_most(group), MOST_DECAY / decay if decay else LARGEST)
            value = lr.reshape(()).to(torch.promote_types(lr.dtype, torch.float32))  # 1e6 overflows in float16
            most[id(lr)] = value, min(bound, most.get(id(lr), (lr, bound))[1])
    return [lr.clamp(0.0, bound) == lr for lr, bound in most.values()]  # false for NaN
