r"""The empirical neural tangent kernel K(x, x') = ∇θ s(x) · ∇θ s(x') of a network, s a scalar of its outputs.

Its modes say what the network can learn next and how fast; `ntk.predict` turns it into the embeddings that
self-supervised training is predicted to end with.
"""

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stairwise.checks import InputError, number, one_of
from stairwise.distributed import rank, world
from stairwise.ntk.capture import Capture, RulesChanged, Scalar
from stairwise.ntk.factors import AbstractFactor, Contraction, Direct
from stairwise.ntk.guards import products_in, unchanged

__all__ = ["PRECISIONS", "empirical_ntk", "ntk_error"]

PRECISIONS = ("float32", "tf32", "float16", "float64")
SLICE = 2.5e8  # bytes of explicit gradients at a time on a CPU
SMALL = 4096  # elements of a parameter whose inner products are a matter of launches
PEAK = 1.5  # memory at the height of the two passes, in units of the factors: most activations are factors


def empirical_ntk(
    model: nn.Module,
    x: Tensor,
    y: Tensor | None = None,
    *,
    output: str | Scalar = "mean",
    precision: str = "float32",
    memory: float | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Tensor:
    r"""K (N, M) between samples x and y, or (N, N) among x.

    Arguments:
        model: (N, …) → (N, d), in evaluation mode; gradients are with respect to its trainable parameters.
        x, y: samples along the first axis, on the model's device.
        output: "mean": s = √d · mean of the outputs, one backward pass, which in the limit of infinite width equals
            "trace": (1/d) Σ_k ∇f_k·∇f_k', d passes; or a function (N, d) → (N,).
        precision: "float32"; "float16": passes in float32, inner products of gradients in float16, each sample's scaled
            to its range; "tf32": the passes, too, with the 11 bits that TF32 and float16 have, on a GPU; "float64".
        memory: bytes to work in; default: nine tenths of what is free on the GPU, three tenths on a CPU.
        progress: called with tiles done and in all; for "trace", with outputs.

    The kernel is float64 for "float64" and for a model in double precision, else float32. Buffers and attributes of the
    model are as before afterwards, whatever its forward pass writes there.

    Under torchrun the tiles are shared among the processes, and each gets the whole kernel.

    Example:
        >>> net = nn.Linear(3, 2, bias=False)
        >>> x = torch.randn(5, 3)
        >>> torch.allclose(empirical_ntk(net, x), x @ x.T, atol=1e-6)  # whatever its weights
        True
    """
    one_of(precision, "precision", PRECISIONS)
    if not isinstance(model, nn.Module):
        raise InputError("model", "must be a torch module", type(model).__name__, "wrap the function in one")
    for name, samples in (("x", x), ("y", y)):
        if samples is None and name == "y":
            continue
        if not isinstance(samples, Tensor):
            raise InputError(name, "must be a tensor", type(samples).__name__, "torch.as_tensor, or torch.stack")
        if samples.ndim < 1 or len(samples) == 0:
            raise InputError(name, "must hold samples", tuple(samples.shape))
    if y is not None and (y.dtype, y.device) != (x.dtype, x.device):
        raise InputError("y", f"must be like x, {x.dtype} on {x.device}", f"{y.dtype} on {y.device}")
    if isinstance(output, str):
        one_of(output, "output", ("mean", "trace"))
    elif not callable(output):
        raise InputError("output", "must be 'mean', 'trace' or a function of the outputs", repr(output))
    if memory is not None:
        memory = number(memory, "memory", above=0)
    # whatever the caller has switched off or on
    modes = torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False)
    with modes[0], modes[1], modes[2], products_in(precision), unchanged(model):
        x, y = (None if samples is None else _prepared(samples, precision) for samples in (x, y))
        if precision == "float64":
            model = _doubled(model)
        if output == "trace":
            d = _dimension(model, x)
            K: Tensor | None = None
            for k in range(d):
                part = _ntk(model, x, y, _coordinate(k), precision, memory)
                K = part if K is None else K.add_(part)
                progress(k + 1, d)
            assert K is not None
            return K / d
        scalar = _mean if isinstance(output, str) else output
        return _ntk(model, x, y, scalar, precision, memory, progress)


def ntk_error(model: nn.Module, x: Tensor, kernel: Tensor, samples: int = 16, output: str | Scalar = "mean") -> float:
    """Largest |ΔK_ij| / √(K_ii K_jj) of a kernel among a few of its samples, against float64."""
    chosen = torch.linspace(0, len(x) - 1, min(samples, len(x)), device=x.device).long()
    exact = empirical_ntk(model, x[chosen], output=output, precision="float64")
    size = exact.diagonal().clamp_min(1e-300).sqrt()
    part = kernel[chosen][:, chosen].to(exact)
    return float(((part - exact) / torch.outer(size, size)).abs().max())


def _ntk(
    model: nn.Module,
    x: Tensor,
    y: Tensor | None,
    scalar: Scalar,
    precision: str,
    memory: float | None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Tensor:
    # TF32's tensor cores make cuDNN's convolutions the faster ones
    capture = Capture(model, scalar, x, by_products=x.is_cuda and precision in ("float32", "float16"))
    budget = memory or _least(_free(x.device), x.device)
    while True:
        failure: InputError | None = None
        try:
            K, changed = _by_tiles(capture, x, y, precision, budget, progress), False
        except RulesChanged:
            K, changed = None, True
        except InputError as error:
            K, changed, failure = None, True, error
        if world() > 1:
            changed, failure = _agree(capture, changed, failure, x.device)
        if failure is not None:
            raise failure
        if K is not None and not changed:
            break
    if world() > 1:
        dist.all_reduce(K)
    if not bool(torch.isfinite(K).all()):
        raise InputError("the kernel", "must be finite", None, "gradients overflow: scale the network, or use float64")
    return K


def _by_tiles(
    capture: Capture,
    x: Tensor,
    y: Tensor | None,
    precision: str,
    budget: float,
    progress: Callable[[int, int], None],
) -> Tensor:
    chunk = _chunk(capture, budget, max(len(x), 0 if y is None else len(y)))
    how = Contraction(
        precision == "float16" or (precision == "tf32" and x.is_cuda),
        min(max(budget / 8, 1e6), 1e12 if x.is_cuda else SLICE),
    )
    rows = x.split(chunk)
    columns = rows if y is None else y.split(chunk)
    double = any(p.dtype == torch.float64 for p in capture.parameters.values())
    kind = torch.float64 if double else torch.float32
    K = torch.zeros(len(x), len(x if y is None else y), dtype=kind, device=x.device)
    tiles = _tiles(len(rows), None if y is None else len(columns))
    kept: tuple[int, dict[str, AbstractFactor]] = (-1, {})
    theirs: dict[str, AbstractFactor] | None = None
    last = -1
    for done, (i, j) in enumerate(tiles):
        if done % world() != rank():
            continue
        if kept[0] != i:
            # the last column of a row is the next row
            kept = (i, theirs if y is None and theirs is not None and last == i else capture.factors(rows[i]))
        itself = y is None and i == j
        theirs, last = None if itself else capture.factors(columns[j]), j
        block = _total(kept[1], theirs, how)
        here, there = slice(i * chunk, i * chunk + len(rows[i])), slice(j * chunk, j * chunk + len(columns[j]))
        if itself:
            K[here, here] = (block + block.T) / 2  # rounding
        else:
            K[here, there] = block
            if y is None:
                K[there, here] = block.T
        progress(done + 1, len(tiles))
    return K


def _least(value: float, device: torch.device) -> float:
    """The least of all processes, whose tiles must be the same."""
    if world() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MIN)
    return float(shared)


def _agree(
    capture: Capture, changed: bool, failure: InputError | None, device: torch.device
) -> tuple[bool, InputError | None]:
    """Whether the rules have changed in any process, and what is wrong with the input; afterwards all have the same
    rules, and none waits for one that has given up."""
    names = list(capture.parameters)
    flags = [failure is None, not changed, *(name in capture.by_rule for name in names)]
    shared = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MIN)
    fine, unchanged, *kept = shared.tolist()
    capture.by_rule = {name for name, keep in zip(names, kept, strict=True) if keep}
    if not fine and failure is None:
        failure = InputError("the input of another process", "cannot be used", None, "see its message")
    return not unchanged, failure


def _free(device: torch.device) -> float:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's, to be used again
        return 0.9 * (torch.cuda.mem_get_info(device)[0] + unused)
    try:
        return 0.3 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not told everywhere
        return 2e9


def _tiles(rows: int, columns: int | None) -> list[tuple[int, int]]:
    """Pairs of chunks, row by row; of a symmetric kernel the upper half, with the column that follows the row last."""
    if columns is not None:
        return [(i, j) for i in range(rows) for j in range(columns)]
    return [(i, j) for i in range(rows) for j in (i, *range(rows - 1, i, -1))]


def _total(mine: dict[str, AbstractFactor], theirs: dict[str, AbstractFactor] | None, how: Contraction) -> Tensor:
    """Sum over parameters; a parameter that no sample uses on one side adds nothing."""
    names = [name for name in mine if theirs is None or name in theirs]
    pairs = [(mine[name], None if theirs is None else theirs[name]) for name in names]
    grams = (one.gram(other, how) for one, other in _together(pairs))
    total = next(grams)
    for gram in grams:
        total += gram
    return total


def _together(pairs: list[tuple[AbstractFactor, Any]]) -> Iterator[tuple[AbstractFactor, Any]]:
    """Pairs of factors; of all small parameters, biases and those of norms, one."""
    small = []
    for mine, theirs in pairs:
        if isinstance(mine, Direct) and mine.values.shape[1] <= SMALL:
            small.append((mine.values, None if theirs is None else theirs.values))
        else:
            yield mine, theirs
    if small:
        values, others = zip(*small, strict=True)
        yield Direct(torch.cat(values, dim=1)), None if others[0] is None else Direct(torch.cat(others, dim=1))


def _chunk(capture: Capture, budget: float, n: int) -> int:
    """Samples a tile, in nine tenths of the budget: all, or two sets of factors of which one is being made."""
    others = sum(
        float(p.element_size()) * p.numel() for name, p in capture.parameters.items() if name not in capture.by_rule
    )
    sample = capture.sample_bytes + 2 * others
    room = 0.9 * budget / max(sample, 1.0)
    if n * PEAK <= room:
        return n
    chunk = int(room / (1 + PEAK))
    if chunk < 1:
        needed = f"{(1 + PEAK) * sample / 0.9:.3g} bytes, for one sample at a time"
        raise InputError("memory", f"must be at least {needed}", f"{budget:.3g}")
    pieces = -(-n // chunk)
    return -(-n // pieces)


def _mean(outputs: Tensor) -> Tensor:
    return outputs.sum(dim=1) / outputs.shape[1] ** 0.5


def _coordinate(k: int) -> Scalar:
    return lambda outputs: outputs[:, k]


def _dimension(model: nn.Module, x: Tensor) -> int:
    out = model(x[:1])
    if not isinstance(out, Tensor) or out.ndim != 2:
        found = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise InputError("the model's output", "must be 2-D, (samples, d)", found, "wrap the model")
    return out.shape[1]


def _doubled(model: nn.Module) -> nn.Module:
    try:
        return deepcopy(model).double()
    except (RuntimeError, TypeError) as error:  # it keeps a lock, say, or a tensor that belongs to a graph
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        rule, remedy = "must be possible to copy, for float64", "pass model.double() and x.double() with float32"
        raise InputError("model", rule, reason, remedy) from error


def _prepared(x: Tensor, precision: str) -> Tensor:
    if x.is_inference():  # may not take part in gradients
        x = x.clone()
    if not x.is_cuda:  # torch 2.13 crashes on a CPU in the backward pass of batch norm on channels-last images
        x = x.contiguous()
    return x.double() if precision == "float64" and x.is_floating_point() else x
