"""Momentum SGD and AdamW for lists of parameters, as parts of `sw.Muon`: they do not wait for the device, and an
unusable gradient, given as zeros, changes nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def move_by_sgd(
    params: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[dict[str, Tensor]],
    rate: Tensor,
    usable: Tensor,
    group: dict[str, Any],
) -> None:
    """v ← m v + g + weight_decay · w, w ← w − rate · v: torch.optim.SGD."""
    momenta = [state["momentum_buffer"] for state in states]
    if group["weight_decay"]:
        torch._foreach_add_(gradients, torch._foreach_mul(params, group["weight_decay"] * usable))
    torch._foreach_mul_(momenta, torch.where(usable, group["momentum"], 1.0))
    torch._foreach_add_(momenta, gradients)
    torch._foreach_sub_(params, torch._foreach_mul(momenta, rate))


def move_by_adamw(
    params: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[dict[str, Tensor]],
    rate: Tensor,
    usable: Tensor,
    group: dict[str, Any],
) -> None:
    """torch.optim.AdamW."""
    means, squares = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
    counts = [state["step"] for state in states]
    torch._foreach_add_(counts, [usable.to(counts[0].dtype)] * len(counts))  # a single tensor would be read on the CPU
    corrections = []
    news = (gradients, list(torch._foreach_mul(gradients, gradients)))
    for beta, averages, new in zip(group["betas"], (means, squares), news, strict=True):
        torch._foreach_mul_(averages, torch.where(usable, beta, 1.0))
        torch._foreach_add_(averages, new, alpha=1 - beta)
        # at least one step, because a first step may be unusable
        powers = torch._foreach_pow(beta, torch._foreach_clamp_min(counts, 1.0))
        corrections.append(torch._foreach_add(torch._foreach_neg(powers), 1.0))
    if group["weight_decay"]:
        torch._foreach_mul_(params, 1 - group["weight_decay"] * rate)
    lengths = torch._foreach_sqrt(torch._foreach_div(squares, corrections[1]))
    torch._foreach_add_(lengths, group["eps"])
    moves = torch._foreach_div(torch._foreach_div(means, corrections[0]), lengths)
    torch._foreach_sub_(params, torch._foreach_mul(moves, rate))
