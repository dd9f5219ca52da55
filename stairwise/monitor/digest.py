"""What the host needs of the sums: all of them, or small matrices whose eigenvalues are the leading ones."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from stairwise.distributed import total, world
from stairwise.monitor.bases import ritz_matrices
from stairwise.monitor.frames import Frames, sums_of
from stairwise.monitor.moments import COLUMNS, ONES, facts
from stairwise.monitor.products import mirror, multiplier


def direction_sums(a: Tensor, b: Tensor) -> Tensor:
    """Sums over both views of each batch (batches, rows, d): of û = z/‖z‖, of its squares by dimension, of the cosine
    û_a·û_b, and their number."""
    tiny = torch.finfo(a.dtype).tiny ** 0.5
    per_a, per_b = (1 / torch.linalg.vector_norm(x, dim=2).clamp(min=tiny)[:, None] for x in (a, b))
    total = (per_a @ a + per_b @ b)[:, 0]  # rows times matrices: no copy of the embeddings is made
    squares = (per_a.square() @ a.square() + per_b.square() @ b.square())[:, 0]
    cosines = 2 * ((a * b).sum(dim=2) * per_a[:, 0] * per_b[:, 0]).sum(dim=1)
    rows = torch.full_like(cosines, 2.0 * a.shape[1])
    return torch.cat([total, squares, cosines[:, None], rows[:, None]], dim=1)


def cross_sums(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """Σ a bᵀ, and next to it Σ a² and Σ b² by dimension, (d, d + 2), of batches with weights, (batches,)."""
    weighted_a, weighted_b = (x * weights[:, None, None] for x in (a, b))
    squares = [(x * y).sum(dim=(0, 1)) for x, y in ((weighted_a, a), (weighted_b, b))]
    return torch.cat([weighted_a.flatten(0, 1).T @ b.flatten(0, 1), torch.stack(squares, dim=1)], dim=1)


def pair_sums(z: Tensor, full: bool) -> Tensor:
    """Sums over the pairs of each batch (batches, rows, 2d), as `decompose.PAIRS` names them; the first two if not
    `full`."""
    count = torch.ones_like(z[:, 0, 0])
    numbers = [count / world(), count * z.shape[1]]  # a batch is shared by all processes, whose sums are added later
    if not full:
        return torch.stack(numbers, dim=1)
    squares, centred = z.square(), (z - z.mean(dim=1, keepdim=True)).square_()
    a, b = z.chunk(2, dim=2)
    norms, lengths = (x.unflatten(2, (2, -1)).sum(dim=3) for x in (squares, centred))
    scatter = [
        norms.prod(dim=2).sum(dim=1),
        torch.linalg.vecdot(a, b).square_().sum(dim=1),
        torch.linalg.vecdot(*squares.chunk(2, dim=2)).sum(dim=1),
        lengths.square_().sum(dim=(1, 2)) / 2,
        torch.linalg.vecdot(centred, centred).sum(dim=1) / 2,
    ]
    return torch.stack(numbers + scatter, dim=1)


def joint_flaws(flaws: Tensor) -> Tensor:
    """Number of batches seen and skipped by all processes, and the first one that any process skipped."""
    first = torch.where(flaws[2] > 0, flaws[2], torch.inf)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    return torch.cat([total(flaws[:2]), torch.where(torch.isfinite(first), first, 0.0)[None]])


def condensed(sums: dict[str, Tensor], frames: Frames, bases: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace sums that are not to be decomposed completely by small matrices; all others are returned as they are.

    bases: those in which the leading eigenvalues of dense sums are found, by spectrum; they are replaced.
    """
    out = dict(sums)
    for stream, centre in frames.centres.items():
        names, basis = sums_of(stream, sums), frames.bases.get(stream)
        parts = [out.pop(name) for name in names]
        if stream == "z" and parts:
            u, v = parts
            out |= _dense_pairs(u, v, centre, bases) if basis is None else _tracked_pairs(u, v, centre, basis)
            out["z.centre"] = centre
        elif parts:
            out |= _dense_hidden(parts[0], bases) if basis is None else _tracked_hidden(parts[0], basis)
    return out


def _dense_pairs(u: Tensor, v: Tensor, centre: Tensor, bases: dict[str, Tensor]) -> dict[str, Tensor]:
    """With c the centre and m the mean of z − c, the moments of z are those of z − c, plus mcᵀ + cmᵀ + ccᵀ."""
    d = len(u) - ONES
    of_u, of_v = facts(u, d), facts(v, d)
    n = of_u[2, 0].clamp(min=1)
    U, V, mean = _product(u, d), _product(v, d), of_u[1] / (2 * n)
    products = {
        "covariance": lambda q: (U(q) + V(q)) / (4 * n) - torch.outer(mean, mean @ q),
        "C": lambda q: (U(q) - V(q)) / (4 * n) + _means(mean, centre, q),
    }
    found = {f"ritz.{name}": ritz_matrices(product, bases, name, mean) for name, product in products.items()}
    return {"z.facts": torch.stack([of_u, of_v])} | found


def _product(sums: Tensor, d: int) -> Callable[[Tensor], Tensor]:
    """q → S q with dense sums, whose missing half is filled in."""
    S = sums[:d, :d]
    mirror(S)
    return multiplier(S)


def _means(mean: Tensor, centre: Tensor, q: Tensor) -> Tensor:
    """(mcᵀ + cmᵀ + ccᵀ) q."""
    return torch.outer(mean, centre @ q) + torch.outer(centre, (mean + centre) @ q)


def _dense_hidden(h: Tensor, bases: dict[str, Tensor]) -> dict[str, Tensor]:
    known = facts(h, len(h) - ONES)
    n = known[2, 0].clamp(min=1)
    H, mean = _product(h, len(h) - ONES), known[1] / n
    found = ritz_matrices(lambda q: H(q) / n - torch.outer(mean, mean @ q), bases, "hidden", mean)
    return {"h.facts": known, "ritz.hidden": found}


def _tracked_pairs(u: Tensor, v: Tensor, centre: Tensor, basis: Tensor) -> dict[str, Tensor]:
    """For C, the products Qᵀ S Q and those of S Q with itself, of u, of v and of both; for the covariance likewise."""
    d, q = len(u), basis.double()
    of_u, of_v = facts(u, d), facts(v, d)
    n = of_u[2, 0].double().clamp(min=1)
    U, V = (x[:, :COLUMNS].double() / (4 * n) for x in (u, v))
    mean = of_u[1].double() / (2 * n)
    both = U + V - torch.outer(mean, mean @ q)
    U = U + _means(mean, centre.double(), q)
    C = torch.stack([q.T @ U, U.T @ U, q.T @ V, V.T @ V, U.T @ V])
    return {
        "z.facts": torch.stack([of_u, of_v]),
        "nystroem.covariance": torch.stack([q.T @ both, both.T @ both]),
        "nystroem.C": C,
    }


def _tracked_hidden(h: Tensor, basis: Tensor) -> dict[str, Tensor]:
    known, q = facts(h, len(h)), basis.double()
    n = known[2, 0].double().clamp(min=1)
    mean = known[1].double() / n
    product = h[:, :COLUMNS].double() / n - torch.outer(mean, mean @ q)
    return {"h.facts": known, "nystroem.hidden": torch.stack([q.T @ product, product.T @ product])}
