"""What two samples, passed through a model alone, show: whether rules hold, and whether samples are independent."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from stairwise.checks import InputError
from stairwise.ntk.factors import AbstractFactor

Call = tuple[str, Tensor]  # name of the module, its input
Gradients = Sequence[Tensor | None]  # None: not used
Tensors = Sequence[Tensor]

EXACT, EXACT_DOUBLE = 1e-3, 1e-9  # relative error of gradients by rules, in single and double precision
SAME = 0.03  # relative difference that rounding may cause
JUMP = 0.5  # the same for one sample, in which rounding may turn a unit on or off; real errors show in all samples
RANDOM = 0.1  # relative difference of outputs between two calls
TINY = 1e-30
MIXES = "must treat samples one by one: its output for one depends on the others"
REMEDY = "take out what is summed or normalized over the batch"


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass without its graph: outputs (N, d), calls of modules with rules, whether all scalars are finite,
    and on a GPU an event that says that all of this is computed."""

    outputs: Tensor
    calls: list[Call]
    finite: Tensor
    done: Any


def right_rules(
    by_rule: dict[str, AbstractFactor], exact: dict[str, Tensor], outputs: Tensor, again: Tensor, at_samples: Tensors
) -> set[str]:
    """Parameters whose rules give each sample its exact gradient (n, size), if that is not zero for all samples.
    Refuses a model whose outputs differ between two calls, or have gradients `at_samples` (n, …) of other samples."""
    gradients = {name: g for name, factor in by_rule.items() if (g := _gradients(factor)) is not None and g.numel()}
    names = [name for name, g in gradients.items() if g.shape == exact[name].shape]
    wholes = [exact[name] for name in names]
    tables = [norms([outputs], [again]), norms([outputs])]
    tables += [norms(at_samples)] if at_samples else []
    tables += [norms([gradients[name] for name in names], wholes), norms(wholes)] if names else []
    rows = iter(torch.cat(tables).tolist())  # one transfer from the device, because each would wait for it
    differ = max(off / max(size, TINY) for off, size in zip(next(rows), next(rows), strict=True))
    if differ > RANDOM:
        rule = "must give the same outputs twice: it draws random numbers, or counts its calls"
        raise InputError("model", rule, f"outputs that differ by {differ:.0%}", "model.eval(), if it was not")
    for i, sizes in enumerate(islice(rows, len(at_samples))):
        if sum(sizes) - sizes[i] > EXACT * sizes[i]:
            raise InputError("model", MIXES, None, REMEDY)
    right = set()
    for name, off, size in zip(names, list(islice(rows, len(names))), rows, strict=True):
        tolerance = EXACT_DOUBLE if exact[name].dtype == torch.float64 else EXACT
        if max(size) > 0 and all(error <= tolerance * max(size) for error in off):  # false for nan
            right.add(name)
    return right


def check_rows(batch: Pass, alone: Pass, rows: slice) -> set[str]:
    """Names of modules that got these rows of the batch as when they were alone. Refuses a model that mixes samples."""
    by_name = dict(alone.calls)
    pairs = {name: (given[rows], by_name[name]) for name, given in batch.calls if name in by_name}
    names = [name for name, (one, other) in pairs.items() if one.shape == other.shape]
    ones, others = zip((batch.outputs[rows], alone.outputs), *(pairs[name] for name in names), strict=True)
    if ones[0].shape != others[0].shape or not bool(alone.finite):
        raise InputError("model", MIXES, None, "its output must not depend on their number")
    # rows may differ by a tenth of the distance of two rows, or by rounding
    between = norms([other[:1] for other in others], [other[-1:] for other in others])
    allowed = torch.maximum(0.1 * between, SAME * norms(others)).clamp_min(TINY)
    if alone.calls and alone.calls[-1][1].is_floating_point():
        # outputs may cancel to rounding error, whose size comes from the last layer's input
        allowed[0] = torch.maximum(allowed[0], 1e-4 * at_least_single(alone.calls[-1][1]).norm())
    of_outputs, *shares = (norms(ones, others) / allowed).amax(1).tolist()
    if of_outputs > 1:
        raise InputError("model", MIXES, None, REMEDY)
    return {name for name, share in zip(names, shares, strict=True) if share <= 1}


def agree(calls: list[Call], b: Gradients, plain: list[Call], plain_b: Gradients) -> bool:
    """Whether inputs and gradients of calls are those of a plain pass, up to rounding."""
    if [(name, given.shape) for name, given in calls] != [(name, given.shape) for name, given in plain]:
        return False
    if [g is None for g in b] != [g is None for g in plain_b]:
        return False
    inputs, their_inputs = [given for _, given in calls], [given for _, given in plain]
    ones, others = (given + [g for g in gs if g is not None] for given, gs in ((inputs, b), (their_inputs, plain_b)))
    shares = (norms(ones, others) / norms(others).clamp_min(TINY)).tolist() if ones else []
    same = all(max(share) <= SAME for share in shares[: len(calls)])
    return same and all(min(share) <= SAME and max(share) <= JUMP for share in shares[len(calls) :])


def check_finite(finite: Tensor) -> None:
    """Waits for the device."""
    if not bool(finite):
        raise InputError("the model's output", "must be finite", None, "check the weights and the inputs")


def check_mode(model: nn.Module) -> None:
    """Refuse a model in training mode, and batch norm without running statistics."""
    mixes = "must be in evaluation mode: in training mode batch norm mixes samples, which then have no own gradient"
    draws = "must be in evaluation mode: dropout draws other weights each time"
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.training:
                raise InputError("model", mixes, name, "model.eval()")
            if module.running_mean is None:
                rule = "must not have batch norm without running statistics"
                raise InputError("model", rule, name, "track_running_stats=True")
        share = getattr(module, "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout", 0.0)
        if module.training and isinstance(share, float) and share > 0:
            raise InputError("model", draws, name, "model.eval()")


def norms(tensors: Tensors, minus: Tensors | None = None) -> Tensor:
    """Norms of the rows of tensors, or of differences of tensors, (tensors, rows), computed all at once: one by one,
    Python would take longer than the GPU. Integers count as different or not. A last norm may be repeated.

    Example:
        >>> norms([torch.ones(2, 4), torch.ones(1, 1)], [torch.zeros(2, 4), torch.ones(1, 1)]).tolist()
        [[2.0, 2.0], [0.0, 0.0]]
    """
    others: Sequence[Tensor | None] = [None] * len(tensors) if minus is None else minus
    pairs = [_comparable(one, other) for one, other in zip(tensors, others, strict=True)]
    rows = [row for one, _ in pairs for row in one.unbind()]
    if minus is not None:
        rows = list(torch._foreach_sub(rows, [row for _, other in pairs for row in other.unbind()]))
    each, table, most = iter(torch._foreach_norm(rows)), list[Tensor](), max(len(one) for one, _ in pairs)
    for one, _ in pairs:
        own = list(islice(each, len(one)))
        table += own + own[-1:] * (most - len(own))
    return torch.stack(table).view(len(tensors), -1)


def at_least_single(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _comparable(one: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor]:
    other = one if other is None else other
    if not one.numel():
        return torch.zeros(1, 1, device=one.device), torch.zeros(1, 1, device=one.device)
    if not one.is_floating_point():
        return (one != other).float(), torch.zeros(other.shape, device=other.device)
    return at_least_single(one), at_least_single(other)


def _gradients(factor: AbstractFactor) -> Tensor | None:
    try:
        return factor.gradients()
    except RuntimeError:  # shapes that no rule expects
        return None
