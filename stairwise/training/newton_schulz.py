r"""Polar factors of many matrices at once, by the Newton–Schulz iteration.

A polar factor of G = U S Vᵀ is U Vᵀ: the same singular vectors, all singular values 1. Five steps of

    X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X,        X₀ = G / ‖G‖_F,

bring all singular values of G above 0.0015 ‖G‖_F to between 0.68 and 1.21, with nothing but products of matrices.
Matrices of equal shape are stacked; those of similar shape are padded with zeros and stacked too, because zero rows and
columns stay zero and leave the rest as it is, and a few large products take less time than many small ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from stairwise.checks import InputError, number
from stairwise.training.graph import in_parallel

QUINTIC = (3.4445, -4.7750, 2.0315)  # a, b, c of Keller Jordan: the steepest at 0 among those that stay near 1
STEPS = 5
SHORTEST = 1e-18  # matrices with a smaller Frobenius norm count as zero; their squares vanish in float32
LONGEST = 1e18  # a step is skipped if the gradient is longer or not finite, because its squares may overflow
LARGEST = 1e6  # learning rate; with gradients up to LONGEST, weights stay finite
TO_LENGTHS = ("relative", "fixed")  # scalings of steps that refer to the length of the weights at the start
SCALINGS = (*TO_LENGTHS, "keller", "moonshot")
PADDING = 1e9  # operations that padding one matrix may add on a GPU; its product then starts with those of others


@dataclass(frozen=True, eq=False)
class Stack:
    """Matrices stacked for one iteration.

    Attributes:
        members: their numbers in the list, in the order of the stack.
        shape: (rows, columns) of each page of the stack, rows ≤ columns.
    """

    members: tuple[int, ...]
    shape: tuple[int, int]


def operations(rows: int, columns: int, steps: int = STEPS) -> float:
    """Number of additions and multiplications of the iteration for one matrix with rows ≤ columns."""
    return steps * (4.0 * rows * rows * columns + 2.0 * rows**3)


@lru_cache(maxsize=64)
def plan(shapes: tuple[tuple[int, int], ...], padding: float = 0.0) -> tuple[Stack, ...]:
    """Divide matrices among stacks, the costliest first; padding may add `padding` operations per matrix.

    >>> [(stack.members, stack.shape) for stack in plan(((8, 4), (4, 8), (3, 8)))]
    [((0, 1), (4, 8)), ((2,), (3, 8))]
    >>> [(stack.members, stack.shape) for stack in plan(((8, 4), (4, 8), (3, 8)), padding=1e4)]
    [((0, 1, 2), (4, 8))]
    """
    lying = [(min(shape), max(shape)) for shape in shapes]
    pages: list[tuple[int, int]] = []
    members: list[list[int]] = []
    for i in sorted(range(len(lying)), key=lambda i: operations(*lying[i]), reverse=True):
        rows, columns = lying[i]
        for page, stacked in zip(pages, members, strict=True):
            holds = rows <= page[0] and columns <= page[1]
            if holds and operations(*page) - operations(rows, columns) <= padding:
                stacked.append(i)
                break
        else:
            pages.append((rows, columns))
            members.append([i])
    return tuple(Stack(tuple(stacked), page) for stacked, page in zip(members, pages, strict=True))


def padding_on(device: torch.device) -> float:
    """The padding that saves time: none on CPUs, where starting a product costs little."""
    return PADDING if device.type == "cuda" else 0.0


def default_dtype(device: torch.device) -> torch.dtype:
    """Number format of the iteration: bfloat16 on GPUs, which compute faster with it, float32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def lying_page(x: Tensor) -> Tensor:
    """The matrix, or its transpose if it has more rows than columns."""
    return x.mT if x.shape[0] > x.shape[1] else x


def stacked(matrices: Sequence[Tensor], stack: Stack, dtype: torch.dtype) -> Tensor:
    """The members of a stack as one tensor, (members, rows, columns), padded with zeros."""
    pages = [lying_page(matrices[i]) for i in stack.members]
    if all(page.shape == stack.shape for page in pages):
        return torch.stack(pages).to(dtype)
    out = pages[0].new_zeros((len(pages), *stack.shape), dtype=dtype)
    for to, page in zip(out, pages, strict=True):
        to[: page.shape[0], : page.shape[1]].copy_(page)
    return out


def newton_schulz(x: Tensor, steps: int = STEPS) -> Tensor:
    """The iteration for a stack of matrices, (k, rows, columns) with rows ≤ columns, in the dtype of x.

    Matrices shorter than 1e-18 stay (almost) zero.

    >>> x = torch.tensor([[[3.0, 0.0], [0.0, 0.5]]])
    >>> newton_schulz(x).diagonal(dim1=1, dim2=2).round(decimals=2)
    tensor([[0.7100, 1.0400]])
    """
    a, b, c = QUINTIC
    lengths = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=_precise(x))
    x = x / lengths.clamp_min(SHORTEST).to(x.dtype)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def pages_like(x: Tensor, matrices: Sequence[Tensor], stack: Stack) -> list[Tensor]:
    """Views of a stack in the shapes of its members, without padding."""
    views = []
    for page, i in zip(x, stack.members, strict=True):
        rows, columns = matrices[i].shape
        views.append(page[:columns, :rows].mT if rows > columns else page[:rows, :columns])
    return views


def largest_rate(scaling: str) -> float:
    """The largest learning rate of a scaling."""
    return 1.0 if scaling in TO_LENGTHS else LARGEST


def check_rate(lr: float, name: str, most: float) -> float:
    """A learning rate from 0 to `most`."""
    if number(lr, name, least=0) > most:
        why = "the length of the weights" if most == 1 else "beyond which weights may overflow"
        raise InputError(name, f"must be at most {most:g}, {why}", lr, "begin with 0.02 for muon")
    return float(lr)


def start_lengths(matrices: Sequence[Tensor]) -> list[Tensor]:
    """‖w‖_F of every matrix; one of zeros counts as long as a matrix with orthonormal rows, so that it can move."""
    lengths = torch._foreach_norm([w.float() for w in matrices])
    for n, w in zip(lengths, matrices, strict=True):
        if not n < LONGEST:  # also if it is nan
            rule = f"must be finite at the start, and of a length below {LONGEST:.0e}"
            raise InputError(f"weights of shape {tuple(w.shape)}", rule, f"length {float(n):g} in float32")
    return [torch.where(n > SHORTEST, n, min(w.shape) ** 0.5) for n, w in zip(lengths, matrices, strict=True)]


def descend(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    rate: Tensor,
    scaling: str,
    lengths: Sequence[Tensor] = (),
    *,
    steps: int = STEPS,
    dtype: torch.dtype | None = None,
    padding: float | None = None,
) -> None:
    """Move matrices against the polar factors O of their updates, in place and without waiting for the device.

    Scalings, with ℓ = `lengths` of the matrices at the start: "relative": w ← w − rate · ℓ · O / ‖O‖_F; "fixed": the
    same, then w ← ℓ w / ‖w‖_F; "keller": w ← w − rate · max(1, rows/columns)^½ · O; "moonshot":
    w ← w − rate · 0.2 max(rows, columns)^½ · O. Inside a CUDA graph the stacks are computed in parallel.
    """
    if not weights:
        return
    device = weights[0].device
    layout = plan(tuple((x.shape[0], x.shape[1]) for x in updates), padding_on(device) if padding is None else padding)

    def move(stack: Stack) -> None:
        x = newton_schulz(stacked(updates, stack, dtype or default_dtype(device)), steps)
        moved = [weights[i] for i in stack.members]
        rates: Sequence[Tensor] = [rate] * len(moved)
        if scaling in TO_LENGTHS:
            its = [lengths[i] for i in stack.members]
            of_polar = torch.linalg.vector_norm(x, dim=(1, 2), dtype=_precise(x))
            rates = torch.where(of_polar > SHORTEST, rate * torch.stack(its).float() / of_polar, 0.0).unbind()
        for w, page, r in zip(moved, pages_like(x, updates, stack), rates, strict=True):
            w.addcmul_(page, r, value=-_factor(scaling, *w.shape))
        if scaling == "fixed":
            now = torch.stack(torch._foreach_norm(moved)).float()
            restore = torch.where((now > SHORTEST) & (rate > 0), torch.stack(its).float() / now, 1.0)
            torch._foreach_mul_(moved, list(restore.unbind()))

    in_parallel([partial(move, stack) for stack in layout])


def _precise(x: Tensor) -> torch.dtype:
    """float32 or, if x has it, float64."""
    return torch.promote_types(x.dtype, torch.float32)


def _factor(scaling: str, rows: int, columns: int) -> float:
    if scaling == "keller":
        return max(1.0, rows / columns) ** 0.5
    return 0.2 * max(rows, columns) ** 0.5 if scaling == "moonshot" else 1.0
