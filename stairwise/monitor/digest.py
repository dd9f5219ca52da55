"""What the host needs of the sums: all of them, or small matrices whose eigenvalues are the leading ones."""

import torch
import torch.distributed as dist
from torch import Tensor

from stairwise.distributed import reduced, total, world
from stairwise.monitor.bases import Bases, ritz_matrices
from stairwise.monitor.frames import Frames, sums_of
from stairwise.monitor.moments import COLUMNS, STREAMS, dimensions, empty, facts
from stairwise.monitor.products import centred, centred_pair, power_of_two, representable
from stairwise.monitor.rows import Rows


def alike(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device


def ages(x: Tensor, keep: float) -> Tensor:
    """Weights of the batches, (batches,): 1 for the last one, `keep` for the one before, and so on."""
    return keep ** torch.arange(len(x) - 1, -1, -1, device=x.device, dtype=x.dtype)


def direction_sums(a: Tensor, b: Tensor) -> Tensor:
    """Sums over both views of each batch (batches, rows, d): of û = z/‖z‖, of its squares by dimension, of the cosine
    û_a·û_b, and their number."""
    tiny = torch.finfo(a.dtype).tiny ** 0.5
    u, v = (x / torch.linalg.vector_norm(x, dim=2, keepdim=True).clamp(min=tiny) for x in (a, b))
    # no matrix products, because the user may have allowed them to be inexact (TF32)
    total = u.sum(dim=1) + v.sum(dim=1)
    squares = u.square().sum(dim=1) + v.square().sum(dim=1)
    cosines = 2 * (u * v).sum(dim=(1, 2))
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
    count = torch.ones(len(z), dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
    numbers = [count / world(), count * z.shape[1]]  # a batch is shared by all processes, whose sums are added later
    if not full:
        return torch.stack(numbers, dim=1)
    squares, centred = z.square(), (z - z.mean(dim=1, keepdim=True)).square_()
    a, b = z.chunk(2, dim=2)
    norms, lengths = (x.unflatten(2, (2, -1)).sum(dim=3) for x in (squares, centred))
    rows = z.shape[1]
    unbiased = (rows / (rows - 1)) ** 2 if rows > 1 else 1.0  # each batch is centred on its own mean
    scatter = [
        norms.prod(dim=2).sum(dim=1),
        torch.linalg.vecdot(a, b).square_().sum(dim=1),
        torch.linalg.vecdot(*squares.chunk(2, dim=2)).sum(dim=1),
        lengths.square_().sum(dim=(1, 2)) * (unbiased / 2),
        torch.linalg.vecdot(centred, centred).sum(dim=1) * (unbiased / 2),
    ]
    return torch.stack(numbers + scatter, dim=1)


def add_statistics(
    sums: dict[str, Tensor], batches: Tensor, finite: Tensor, keep: float, full: bool, normalized: bool
) -> None:
    """Add sums over directions and pairs, (batches, rows, 2d).

    full: of all batches in float64; directions of large embeddings come from the last batch only, to save time.
    """
    last = 0 if full else len(batches) - 1
    rows = batches[last:].to(torch.float64 if full else torch.float32)
    directions = direction_sums(*rows.chunk(2, dim=2))
    _add_each(sums, "directions", directions, finite[last:], keep, keep ** len(batches))
    _add_each(sums, "pairs", pair_sums(rows if full else batches, full), finite, keep, keep ** len(batches))
    if normalized and full:
        a, b = torch.where(finite[:, None, None], rows, 0.0).chunk(2, dim=2)
        _accumulate(sums, "ab", cross_sums(a, b, ages(a, keep)), keep ** len(a))


def _add_each(sums: dict[str, Tensor], name: str, found: Tensor, finite: Tensor, keep: float, decay: float) -> None:
    """Add the sums found in each finite batch in turn, (batches, number of sums); `decay`: weight of older sums."""
    found = torch.where(finite[:, None], found, 0.0).double()
    _accumulate(sums, name, ages(found, keep) @ found, decay)


def _accumulate(sums: dict[str, Tensor], name: str, found: Tensor, keep: float) -> None:
    """sums[name] ← keep · sums[name] + found, in place."""
    if name not in sums:
        sums[name] = torch.zeros_like(found)
    if sums[name].device != found.device:  # it was read from a checkpoint
        sums[name] = sums[name].to(found.device)
    sums[name].mul_(keep).add_(found)


def counted(flaws: Tensor | None, finite: Tensor) -> Tensor:
    """Number of batches seen, number skipped, and number of the first one skipped, without waiting for the device."""
    flaws = torch.zeros(3, dtype=torch.float64, device=finite.device) if flaws is None else flaws.to(finite.device)
    seen, skipped, first = flaws
    bad = (~finite).double()
    number = seen + bad.argmax() + 1
    first.copy_(torch.where((first == 0) & (bad.sum() > 0), number, first))
    seen += len(finite)
    skipped += bad.sum()
    return flaws


def joint_flaws(flaws: Tensor) -> Tensor:
    """Number of batches seen and skipped by all processes, and the first one that any process skipped."""
    first = torch.where(flaws[2] > 0, flaws[2], torch.inf)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    return torch.cat([total(flaws[:2]), torch.where(torch.isfinite(first), first, 0.0)[None]])


def _is_sum(name: str) -> bool:
    """Whether this part of a monitor's state is a sum over batches."""
    return name.rpartition(".")[0] in ("", "before") and name != "seen"


def whole(sums: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over both halves of a window."""
    out = dict(sums)
    for name, value in before.items():
        out[name] = value.to(out[name].device) + out[name] if name in out else value
    return out


def joint_sums(values: dict[str, Tensor], frames: Frames) -> dict[str, Tensor]:
    """Sums over all processes, for the first one; all get those in tracked bases, which they turn alike."""
    out = {}
    for name, value in sorted(values.items()):  # in the same order in all processes
        out[name] = total(value) if STREAMS.get(name) in frames.bases else reduced(value)
    frames.agree(out)
    return out


def joint_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A monitor's state with the sums of all processes, for the first one; all call this, in the same frames."""
    out = dict(state)
    for name in sorted(filter(_is_sum, state)):  # in the same order in all processes
        out[name] = joint_flaws(state[name]) if name == "flaws" else reduced(state[name])
    return out


def without_sums(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A monitor's state before anything has been summed; of rows that are kept, dense sums."""
    out = {}
    for name, value in state.items():
        if f"rows.{STREAMS.get(name)}" in state:
            out[name] = empty(len(value), "dense", value.device)
        elif not name.startswith(("rows.", "counts.")):
            out[name] = torch.zeros_like(value) if _is_sum(name) else value
    return out


def condensed(
    sums: dict[str, Tensor],
    frames: Frames,
    bases: Bases,
    normalized: bool,
    kept: dict[str, Rows],
) -> dict[str, Tensor]:
    """Replace sums that are not to be decomposed completely by small matrices; all others are returned as they are.

    Dense sums are overwritten, all but Σ x and the number of rows.

    Arguments:
        bases: those in which the leading eigenvalues of dense sums are found, by spectrum; they are replaced.
        normalized: include the spectrum of C of standardized embeddings, of dense sums.
        kept: rows of z and h that are not yet summed.
    """
    out = dict(sums)
    for stream, centre in frames.centres.items():
        names, basis = sums_of(stream, sums), frames.bases.get(stream)
        unit = frames.units.get(stream, centre.new_ones(()))
        parts = [out.pop(name) for name in names]
        if stream == "z" and parts:
            u, v = parts
            if basis is None:
                out |= _dense_pairs(u, v, kept.get("z"), centre, unit, bases, normalized)
            else:
                out |= _tracked_pairs(u, v, centre, basis)
            out["z.centre"] = centre
        elif parts:
            if basis is None:
                out |= _dense_hidden(parts[0], kept.get("h"), unit, bases)
            else:
                out |= _tracked_hidden(parts[0], basis)
    return out


def _dense_pairs(
    u: Tensor, v: Tensor, rows: Rows | None, centre: Tensor, unit: Tensor, bases: Bases, normalized: bool
) -> dict[str, Tensor]:
    """Of the moments of u and v, or of rows of z, about the mean of both views; the mean is added where it belongs."""
    centre, d = centre / unit, len(centre)
    of_u, of_v = facts(u, d), facts(v, d)
    n = of_u[2, 0].clamp(min=1)
    mean, half = of_u[1] / (2 * n), of_v[1] / (2 * n)  # the views' own means are mean ± half
    variance = (of_u[0] + of_v[0]) / (4 * n) - mean.square()
    if rows is not None:
        bound = _bound(2 * n * variance, mean)
    else:
        both, difference = centred_pair(u[:d, :d], v[:d, :d], 2 * n.sqrt() * mean)
    own = variance - half.square()  # mean of both views' variances
    scale = torch.where(own > 0, own.rsqrt(), 0.0)[:, None]
    largest = scale.max().clamp(min=torch.finfo(scale.dtype).tiny)
    scale = scale / largest
    names = ("covariance", "C", "normalized") if normalized else ("covariance", "C")

    def product(q: Tensor, exact: bool) -> Tensor:
        if normalized:
            q = torch.stack([*q[:2], representable(scale * q[2])])
        if rows is None:
            matrices = (both, difference, difference)[: len(names)]
            products = torch.stack([A.times(x, exact) for A, x in zip(matrices, q, strict=True)]).div_(4 * n)
        else:
            products = rows.times(q, mean, bound, [name != "covariance" for name in names]).div_(2 * n)
        products[1].addr_(mean + centre, (mean + centre) @ q[1])
        if normalized:
            products[2].addr_(half, half @ q[2])  # each view has its own mean
            products[2].mul_(largest**2 * scale)
        return products

    found = ritz_matrices(product, names, bases, mean)
    ritz = {f"ritz.{name}": _in_ones(found[name], unit if name != "normalized" else unit / unit) for name in names}
    return {"z.facts": torch.stack([_facts_in_ones(x, unit) for x in (of_u, of_v)])} | ritz


def _bound(squares: Tensor, mean: Tensor) -> Tensor:
    """A bound of ‖y − mean‖, from Σ (y − mean)² by dimension, and of ‖mean‖, which rows that are left out have."""
    return power_of_two(torch.maximum(squares.clamp(min=0).sum().sqrt(), torch.linalg.vector_norm(mean)))


def _in_ones(ritz: Tensor, unit: Tensor) -> Tensor:
    """Pᵀ P and Pᵀ A P, where A was in units."""
    return ritz * torch.stack([torch.ones_like(unit), unit.square()]).double()[:, None, None]


def _facts_in_ones(known: Tensor, unit: Tensor) -> Tensor:
    """Σ x², Σ x and the number of rows, where x was in units."""
    return known * torch.stack([unit.square(), unit, torch.ones_like(unit)])[:, None]


def _means(mean: Tensor, centre: Tensor, q: Tensor) -> Tensor:
    """(mcᵀ + cmᵀ + ccᵀ) q."""
    return torch.outer(mean, centre @ q) + torch.outer(centre, (mean + centre) @ q)


def _dense_hidden(h: Tensor, rows: Rows | None, unit: Tensor, bases: Bases) -> dict[str, Tensor]:
    d = dimensions(h)
    known = facts(h, d)
    n = known[2, 0].clamp(min=1)
    mean = known[1] / n
    if rows is not None:
        bound = _bound(known[0] - n * mean.square(), mean)
    else:
        H = centred(h[:d, :d], n.sqrt() * mean)

    def product(q: Tensor, exact: bool) -> Tensor:
        return (rows.times(q, mean, bound) if rows is not None else H.times(q[0], exact)[None]).div_(n)

    found = ritz_matrices(product, ["hidden"], bases, mean)
    return {"h.facts": _facts_in_ones(known, unit), "ritz.hidden": _in_ones(found["hidden"], unit)}


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
