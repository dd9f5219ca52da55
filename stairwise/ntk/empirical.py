r"""The empirical neural tangent kernel K(x, x') = ∇θ s(x) · ∇θ s(x') of a network, where s is a scalar of its outputs.

Its modes say what the network can learn next and how fast; `ntk.predict` turns it into the embeddings that
self-supervised training is predicted to end with.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stairwise.checks import InputError, number, one_of, shown
from stairwise.distributed import rank, world
from stairwise.kernel.precision import float32_products
from stairwise.ntk import fast
from stairwise.ntk.capture import Capture, RulesChanged, Scalar, check_output
from stairwise.ntk.factors import AbstractFactor, Contraction
from stairwise.ntk.state import restored
from stairwise.progress import Progress, silent

Part = Mapping[str, float | Tensor]  # lengths by name of parameter: one number, or one per row of the parameter
PRECISIONS = ("float32", "tf32", "float16", "float64")
SLICE = 2.5e8  # bytes of explicit gradients at a time on a CPU
PEAK = 1.5  # peak memory of the two passes, relative to the factors: most activations are factors


def empirical_ntk(
    model: nn.Module,
    x: Tensor,
    y: Tensor | None = None,
    *,
    output: str | Scalar = "mean",
    precision: str = "float32",
    memory: float | None = None,
    progress: Progress = silent,
) -> Tensor:
    r"""Tangent kernel (N, M) between samples x and y, or (N, N) among x.

    Arguments:
        model: (N, …) → (N, d), in evaluation mode; gradients are with respect to its trainable parameters.
        x, y: samples along the first axis, on the model's device.
        output: "mean": s = √d · mean of the outputs, one backward pass. "trace": (1/d) Σ_k ∇f_k·∇f_k', d passes; both
            agree in the limit of infinite width. Or a function (N, d) → (N,).
        precision: "float32"; "float16": passes in float32, inner products of gradients in float16, each sample scaled
            to its range; "tf32": as float16, and passes in TF32, on a GPU; "float64".
        memory: bytes to work in; default: nine tenths of what is free on the GPU, three tenths on a CPU.
        progress: called with the number of tiles done, of all tiles, and "tiles"; for "trace", of outputs.

    The kernel is float64 for "float64" and for a model in double precision, else float32. Buffers and attributes of the
    model are restored afterwards. Under torchrun the processes share the tiles, and each gets the whole kernel.

    Example:
        >>> net = nn.Linear(3, 2, bias=False)
        >>> x = torch.randn(5, 3)
        >>> torch.allclose(empirical_ntk(net, x), x @ x.T, atol=1e-6)  # whatever its weights
        True
    """
    _check_arguments(model, x, y, output, precision)
    if memory is not None:
        memory = number(memory, "memory", above=0)
    with _ready(model, x, precision), _blaming(model, x, y):
        rows, columns = _prepared(x, precision), None if y is None else _prepared(y, precision)
        if precision == "float64":
            model = _in_double(model)
        if output != "trace":
            scalar = _mean if isinstance(output, str) else output
            return _kernel(model, rows, columns, scalar, precision, memory, progress)[0]
        d = check_output(model(rows[:1]), 1).shape[1]
        total: Tensor | None = None
        for k in range(d):
            part = _kernel(model, rows, columns, _coordinate(k), precision, memory)[0]
            total = part if total is None else total.add_(part)
            progress(k + 1, d, "outputs")
        assert total is not None
        return total / d


@contextmanager
def _blaming(model: nn.Module, x: Tensor, y: Tensor | None) -> Iterator[None]:
    """If the block fails because the model does not take x or y, say so."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        for name, samples in (("x", x), ("y", x if y is None else y)):
            try:
                model(samples[:1])
            except Exception as own:
                reason = f"{type(own).__name__}: {own}".splitlines()[0]
                raise InputError(
                    name, "must be samples that the model takes", reason, "check their shape and dtype"
                ) from error
        raise


def ntk_parts(
    model: nn.Module,
    x: Tensor,
    parts: Mapping[str, Part],
    *,
    precision: str = "float32",
    memory: float | None = None,
    progress: Progress = silent,
) -> dict[str, Tensor]:
    r"""Several kernels (N, N) in one pass: each is that of some parameters, with their gradients times given lengths.

    Arguments:
        parts: for each kernel the lengths c by parameter: K = Σ c² K_parameter; a tensor has one length per row (output
            channel) of the parameter. Parameters that are not named are left out.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> x = torch.randn(5, 3)
        >>> K = ntk_parts(net, x, {"weight": {"weight": 1.0}, "bias, tenfold": {"bias": 10.0}})
        >>> torch.allclose(K["weight"], x @ x.T, atol=1e-6), round(float(K["bias, tenfold"][0, 1]), 3)
        (True, 100.0)
    """
    _check_arguments(model, x, None, "mean", precision)
    known = {name for name, p in model.named_parameters() if p.requires_grad}
    for part in parts.values():
        for name in part:
            one_of(name, "parts", known)
        if not part:
            raise InputError("parts", "must each name parameters", list(parts), "leave out those that name none")
    with _ready(model, x, precision):
        within = _in_double(model) if precision == "float64" else model
        chosen = list(parts.values())
        K = _kernel(within, _prepared(x, precision), None, _mean, precision, memory, progress, chosen)
    return dict(zip(parts, K, strict=True))


@contextmanager
def _ready(model: nn.Module, x: Tensor, precision: str) -> Iterator[None]:
    """The caller's modes must not matter, and the model is restored."""
    modes = torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False)
    with modes[0], modes[1], modes[2], float32_products(tf32=precision == "tf32"), restored(model):
        yield


def ntk_error(model: nn.Module, x: Tensor, kernel: Tensor, samples: int = 16, output: str | Scalar = "mean") -> float:
    """Largest |ΔK_ij| / √(K_ii K_jj) of a kernel among a few of its samples, against float64."""
    chosen = torch.linspace(0, len(x) - 1, min(samples, len(x)), device=x.device).long()
    exact = empirical_ntk(model, x[chosen], output=output, precision="float64")
    size = exact.diagonal().clamp_min(1e-300).sqrt()
    part = kernel[chosen][:, chosen].to(exact)
    return float(((part - exact) / torch.outer(size, size)).abs().max())


def _check_arguments(model: object, x: Tensor, y: Tensor | None, output: object, precision: str) -> None:
    one_of(precision, "precision", PRECISIONS)
    if not isinstance(model, nn.Module):
        raise InputError("model", "must be a torch module", type(model).__name__, "wrap the function in one")
    for name, samples in (("x", x), ("y", x if y is None else y)):
        if not isinstance(samples, Tensor):
            raise InputError(name, "must be a tensor", type(samples).__name__, "torch.as_tensor, or torch.stack")
        if samples.ndim < 1 or len(samples) == 0:
            raise InputError(name, "must hold samples", tuple(samples.shape))
        if samples.layout != torch.strided or samples.is_meta:
            raise InputError(name, "must be a dense tensor", f"{samples.layout} on {samples.device}")
        if (samples.dtype, samples.device) != (x.dtype, x.device):
            raise InputError(name, f"must be like x, {x.dtype} on {x.device}", f"{samples.dtype} on {samples.device}")
    if isinstance(output, str):
        one_of(output, "output", ("mean", "trace"))
    elif not callable(output):
        raise InputError("output", "must be 'mean', 'trace' or a function of the outputs", shown(output))


def _kernel(
    model: nn.Module,
    x: Tensor,
    y: Tensor | None,
    scalar: Scalar,
    precision: str,
    memory: float | None,
    progress: Progress = silent,
    parts: Sequence[Part | None] = (None,),
) -> Tensor:
    """Kernels (parts, N, M); None: that of all parameters."""
    paths = fast.choose(x.device, precision)
    capture = Capture(model, scalar, x, paths.convolutions, paths.second_stream)
    budget = memory or _least(_free(x.device), x.device)
    how = replace(paths.contraction, slice_bytes=min(max(budget / 8, 1e6), 1e12 if x.is_cuda else SLICE))
    K: Tensor | None = None
    while K is None:
        failure: InputError | None = None
        try:
            K = _by_tiles(capture, x, y, how, budget, progress, parts)
        except RulesChanged:
            pass
        except InputError as error:
            failure = error
        if world() > 1:
            again, failure = _agree(capture, K is None, failure, x.device)
            K = None if again else K
        if failure is not None:
            raise failure
    if world() > 1:
        dist.all_reduce(K)
    if not bool(torch.isfinite(K).all()):
        raise InputError("the kernel", "must be finite", None, "gradients overflow: scale the network, or use float64")
    return K


def _by_tiles(
    capture: Capture,
    x: Tensor,
    y: Tensor | None,
    how: Contraction,
    budget: float,
    progress: Progress,
    parts: Sequence[Part | None],
) -> Tensor:
    """This process's tiles of the kernels; all others are zero."""
    chunk = _chunk(capture, budget, max(len(x), 0 if y is None else len(y)))
    rows = x.split(chunk)
    columns = rows if y is None else y.split(chunk)
    double = any(p.dtype == torch.float64 for p in capture.parameters.values())
    shape = len(parts), len(x), len(x if y is None else y)
    K = torch.zeros(shape, dtype=torch.float64 if double else torch.float32).to(x.device)
    tiles = _tiles(len(rows), None if y is None else len(columns))
    kept: dict[int, dict[str, AbstractFactor]] = {}  # factors of chunks of x
    for done, (i, j) in enumerate(tiles):
        if done % world() != rank():
            continue
        mine = kept[i] if i in kept else capture.factors(rows[i])
        kept = {i: mine}
        theirs = None if y is None and i == j else capture.factors(columns[j])
        block = _totals(mine, theirs, how, parts)
        here, there = slice(i * chunk, i * chunk + len(rows[i])), slice(j * chunk, j * chunk + len(columns[j]))
        K[:, here, there] = block if theirs is not None else (block + block.mT) / 2  # rounding is not symmetric
        if y is None and theirs is not None:
            K[:, there, here] = block.mT
            kept[j] = theirs  # the last column of a row is the next row
        theirs = None  # else these factors would stay while the next are made
        progress(done + 1, len(tiles), "tiles")
    return K


def _tiles(rows: int, columns: int | None) -> list[tuple[int, int]]:
    """Pairs of chunks, row by row. Of a symmetric kernel the upper half; each row ends with the column that is next."""
    if columns is not None:
        return [(i, j) for i in range(rows) for j in range(columns)]
    return [(i, j) for i in range(rows) for j in (i, *range(rows - 1, i, -1))]


def _totals(
    mine: dict[str, AbstractFactor],
    theirs: dict[str, AbstractFactor] | None,
    how: Contraction,
    parts: Sequence[Part | None],
) -> Tensor:
    """Sums of the inner products over the parameters of each part, (parts, N, M)."""
    totals: list[Tensor | None] = [None] * len(parts)
    for name, factor in mine.items():
        other = None if theirs is None else theirs[name]
        plain: Tensor | None = None
        for i, part in enumerate(parts):
            length = 1.0 if part is None else part.get(name, 0.0)
            if isinstance(length, Tensor):
                gram = factor.times(length).gram(None if other is None else other.times(length), how)
            elif length == 0:
                continue
            else:
                plain = factor.gram(other, how) if plain is None else plain
                gram = plain if length == 1 else plain * length**2
            before = totals[i]
            totals[i] = gram.clone() if before is None else before.add_(gram)
    known = next(total for total in totals if total is not None)
    return torch.stack([torch.zeros_like(known) if total is None else total for total in totals])


def _chunk(capture: Capture, budget: float, n: int) -> int:
    """Samples per tile: all if they fit into nine tenths of the budget, else as many as fit twice, once in passes."""
    explicit = [p for name, p in capture.parameters.items() if name not in capture.by_rule]
    sample = capture.sample_bytes + 2 * sum(float(p.element_size()) * p.numel() for p in explicit)
    room = 0.9 * budget / max(sample, 1.0)
    if n * PEAK <= room:
        return n
    chunk = int(room / (1 + PEAK))
    if chunk < 1:
        needed = f"{(1 + PEAK) * sample / 0.9:.3g} bytes, for one sample at a time"
        raise InputError("memory", f"must be at least {needed}", f"{budget:.3g}")
    pieces = -(-n // chunk)
    return -(-n // pieces)


def _free(device: torch.device) -> float:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch will use it again
        return 0.9 * (torch.cuda.mem_get_info(device)[0] + unused)
    try:
        return 0.3 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system says
        return 2e9


def _least(value: float, device: torch.device) -> float:
    """The least value of all processes, so that their tiles are the same."""
    if world() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MIN)
    return float(shared)


def _agree(
    capture: Capture, again: bool, failure: InputError | None, device: torch.device
) -> tuple[bool, InputError | None]:
    """Whether any process must start again, and the failure of any. Afterwards all processes have the same rules, and
    none waits for one that has given up."""
    names = list(capture.parameters)
    flags = [failure is None, not again, *(name in capture.by_rule for name in names)]
    shared = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MIN)
    fine, complete, *kept = shared.tolist()
    capture.by_rule = {name for name, keep in zip(names, kept, strict=True) if keep}
    if not fine and failure is None:
        failure = InputError("the input of another process", "cannot be used", None, "see its message")
    return not complete, failure


def _mean(outputs: Tensor) -> Tensor:
    return outputs.sum(dim=1) / outputs.shape[1] ** 0.5


def _coordinate(k: int) -> Scalar:
    return lambda outputs: outputs[:, k]


def _in_double(model: nn.Module) -> nn.Module:
    try:
        return deepcopy(model).double()
    except (RuntimeError, TypeError) as error:  # it holds a lock, say, or a tensor that belongs to a graph
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        rule, remedy = "must be possible to copy, for float64", "pass model.double() and x.double() with float32"
        raise InputError("model", rule, reason, remedy) from error


def _prepared(x: Tensor, precision: str) -> Tensor:
    if x.is_inference():  # such tensors cannot take part in gradients
        x = x.clone()
    if not x.is_cuda:  # torch 2.13 crashes on a CPU in the backward pass of batch norm on channels-last images
        x = x.contiguous()
    return x.double() if precision == "float64" and x.is_floating_point() else x
