"""Second moments of a stream of rows x, summed on their device, in one of three layouts that depends on their size d.

all      S = Σ x xᵀ in float64, whose eigenvalues are computed later, all of them
dense    S in float32, its blocks on and above the diagonal; the device finds the leading modes by subspace iteration,
         from the rows themselves (`rows`) while these are few and on a GPU
tracked  only S Q, with a basis Q of COLUMNS columns that follows the leading modes, so that a row costs d · COLUMNS

A stream is u = z_a + z_b, v = z_a − z_b, or h, in float32 relative to a centre, and on a GPU in a unit (`frames`).
Σ x and the number of rows are summed as well, in columns next to S.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stairwise.monitor.products import add_square

ALL, DENSE = 1024, 8192  # the largest d of the layouts "all" and "dense"
KEPT = 128  # number of leading eigenvalues that are reported
COLUMNS = 512  # columns of a tracked basis
ONES = 8  # columns next to S; one is enough, but eight keep rows aligned, which is faster on GPUs
STREAMS = {"uu": "z", "vv": "z", "hh": "h"}  # sums, and what they are sums of
AT_ONCE = 1024  # rows that are shifted at once, to save memory
EXTRA = 3  # columns of a tracked sum after S Q, and all of rows that are kept: Σ x², Σ x and the number of rows


def layout(d: int, exact: bool | None = None) -> str:
    """The layout for rows of size d; `exact` asks for all eigenvalues, or for the leading ones, whatever the size.

    >>> layout(512), layout(2048), layout(65536), layout(2048, exact=True)
    ('all', 'dense', 'tracked', 'all')
    """
    if exact or (exact is None and d <= ALL) or d <= 2 * KEPT:
        return "all"
    return "dense" if d <= DENSE else "tracked"


def size(name: str, rows: Tensor) -> int:
    """Size of the embeddings or representations in rows: z holds both views next to each other, h one."""
    return rows.shape[1] // 2 if name == "z" else rows.shape[1]


def sums_of(stream: str) -> list[str]:
    """Names of the sums of z or h; the first one is that of u or h."""
    return [name for name in STREAMS if STREAMS[name] == stream]


def precision(kind: str) -> torch.dtype:
    """The number format of a layout."""
    return torch.float64 if kind == "all" else torch.float32


@contextmanager
def plain_products(device: torch.device) -> Iterator[None]:
    """Matrix products without gradients, in the precision of their arguments, whatever the user's autocast says.

    TF32 is used if the user has switched it on.
    """
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def empty(d: int, kind: str, device: torch.device) -> Tensor:
    """Sums of no rows."""
    shape = {"tracked": (d, COLUMNS + EXTRA), "rows": (d, EXTRA)}.get(kind, (d + ONES, d + ONES))
    return torch.zeros(shape, dtype=precision(kind), device=device)


def add(
    sums: Tensor,
    x: Tensor,
    squares: Tensor,
    weights: Tensor,
    keep: float,
    basis: Tensor | None = None,
    unit: Tensor | None = None,
) -> None:
    """sums ← keep · sums + the sums of batches x / unit with their weights; overwrites x, to save memory.

    Arguments:
        x: (batches, rows, d); batches whose weight is zero are zero.
        squares: Σ x² of each batch, (batches, d).
        weights: of the batches, (batches,).
    """
    d = x.shape[2]
    number, total, squares = weights.sum() * x.shape[1], _weighted(weights, x.sum(dim=1)), _weighted(weights, squares)
    if unit is not None:
        total, squares = total / unit, squares / unit.square()
    if keep != 1:
        x.mul_(weights.sqrt()[:, None, None])
    x = x.flatten(0, 1)
    if basis is not None:
        more = torch.stack([squares, total, number.expand(d)], dim=1)
        sums.mul_(keep).add_(torch.cat([x.T @ (x @ basis), more], dim=1))
        return
    if x.dtype == torch.float64:
        sums[:d, :d].addmm_(x.T, x, beta=keep)
    else:
        diagonal = sums.diagonal()[:d]
        exact = keep * diagonal + squares
        add_square(sums[:d, :d], x, keep, unit)
        diagonal.copy_(exact)  # products may be rounded; the trace is not
    sums[:d, d:].mul_(keep).add_(total[:, None])
    sums[d:].mul_(keep)
    sums[d:, :d] += total
    sums[d:, d:] += number


def set_facts(sums: Tensor, known: Tensor) -> None:
    """Complete dense sums by Σ x², Σ x and the number of rows, (d, EXTRA)."""
    d = len(known)
    squares, total, number = known.T
    sums.diagonal()[:d].copy_(squares)
    sums[:d, d:] = total[:, None]
    sums[d:, :d] = total
    sums[d:, d:] = number[0]


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Σ w v over batches, (d,), of those with a weight; without matrix products, in which TF32 may be allowed."""
    return torch.where(weights[:, None] > 0, weights[:, None] * values, 0.0).sum(dim=0)


def dimensions(sums: Tensor) -> int:
    """Size of the rows that were summed."""
    return len(sums) - (ONES if len(sums) == sums.shape[1] else 0)


def count(sums: Tensor) -> Tensor:
    """Number of rows, a tensor of shape ()."""
    return sums[-1, -1]


def facts(sums: Tensor, d: int) -> Tensor:
    """Σ x², Σ x and the number of rows in each column, (3, d)."""
    if len(sums) == d:  # tracked, or of rows that are kept
        return sums[:, -EXTRA:].T
    return torch.stack([sums.diagonal()[:d], sums[:d, -1], sums[-1, -1].expand(d)])


def continued(state: dict[str, Tensor], exact: bool | None) -> dict[str, Tensor]:
    """A stored state in today's form; z or h is left out if it was summed in a form that cannot be continued."""
    state = _from_older(state)
    kinds = {}  # of the sums that can be continued
    lost = set()
    for key, stream in STREAMS.items():
        for name in {key, f"before.{key}"} & state.keys():
            tracked, centred = (f"{part}.{stream}" in state for part in ("tracked", "centres"))
            kinds[stream] = layout(dimensions(state[name]), exact)
            if tracked != (kinds[stream] == "tracked") or (centred and kinds[stream] == "all"):
                lost |= {"z", "uu", "vv", "pairs", "directions", "ab", "seen"} if stream == "z" else {"h", "hh"}
    large = kinds.get("z", "all") != "all"
    if large:
        lost.add("ab")  # older versions stored more of large embeddings
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        key = name.rpartition(".")[2]
        if key in lost:
            continue
        if key in STREAMS and value.shape[1] != EXTRA:
            kind = kinds[STREAMS[key]]
            value = value.to(precision(kind))
            if kind == "dense":
                value = mirrored(value)
            if kind != "all":  # older sums have no centre
                out.setdefault(f"centres.{STREAMS[key]}", value.new_zeros(dimensions(value)))
        out[name] = value[:2] if key == "pairs" and large else value
    return out


def mirrored(sums: Tensor) -> Tensor:
    """Dense sums in full: block sizes differ between devices, but the upper triangle is known in any case."""
    return sums.triu() + sums.triu(1).T


def shift(sums: Tensor, by: Tensor, basis: Tensor | None) -> None:
    """Replace the sums of x by those of x + by; S grows by w byᵀ + by wᵀ."""
    d = len(by)
    _, total, number = facts(sums, d).clone()
    n, w = number[0], total + number / 2 * by
    if basis is None:
        for start in range(0, d, AT_ONCE):
            i = slice(start, min(start + AT_ONCE, d))
            # rounded alike above and below the diagonal
            sums[i, :d] += torch.outer(w[i], by).add_(torch.outer(by[i], w))
        sums[:d, d:] += n * by[:, None]
        sums[d:, :d] += n * by
    else:
        sums[:, :COLUMNS].addr_(w, by @ basis).addr_(by, w @ basis)
        sums[:, COLUMNS] += 2 * by * w
        sums[:, COLUMNS + 1] += n * by


def rescale(sums: Tensor, ratio: Tensor) -> None:
    """Replace dense sums of x by those of ratio · x."""
    sums[:-ONES].mul_(ratio)
    sums[:, :-ONES].mul_(ratio)


def _from_older(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state of a version that summed [z_a z_b 1]ᵀ[z_a z_b 1]."""
    out = {}
    for name, value in state.items():
        before, _, key = name.rpartition(".")
        if key == "zz":
            d = (len(value) - ONES) // 2
            half = torch.eye(d, dtype=value.dtype, device=value.device)
            ones = torch.eye(ONES, dtype=value.dtype, device=value.device)
            for stream, sign in (("uu", 1), ("vv", -1)):
                to = torch.block_diag(torch.cat([half, sign * half]), ones)
                out[f"{before}.{stream}".lstrip(".")] = to.T @ value @ to
        elif key != "u":  # sums of directions without their squares: the next record does without cosines
            out[name] = value
    return out
