"""Orthonormal bases Q that follow the leading modes of sums S = Σ x xᵀ which are too large to be decomposed.

A record starts from the basis of the one before, so that bases follow the network's training.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from stairwise.monitor.moments import COLUMNS, count
from stairwise.monitor.products import TINY, overlaps, representable

Bases = dict[str, Tensor]
Product = Callable[[Tensor, bool], Tensor]

BLOCK, BLOCKS = 256, 3  # columns and number of blocks in which the leading eigenvalues of a dense matrix are found
LARGE, NARROW = 4096, 192  # above so many dimensions blocks have fewer columns, for speed
PASSES, COLD = 1, 3  # products with the matrix before the first block, with the basis of the last record and without
FRESH = 16  # columns that start anew in every record, from random numbers that are always the same
ROUNDING = 1e-10  # of squared lengths of columns; makes those that depend on others harmless
SMALLEST = 1e-6  # of the largest eigenvalue of rows in float32; smaller ones are rounding
ROWS = 1024  # number of rows in which a first tracked basis is found


def random_basis(d: int, columns: int, device: torch.device) -> Tensor:
    """Columns of unit length, always the same on a device; the user's random numbers are left alone."""
    draw = torch.randn(d, columns, generator=torch.Generator(device).manual_seed(0), device=device)
    return nn.functional.normalize(draw, dim=0)


def ritz_matrices(product: Product, names: Iterable[str], bases: Bases, like: Tensor) -> Bases:
    """Pᵀ P and Pᵀ A P of symmetric matrices A, (2, columns, columns) each, whose eigenvalues are the leading ones of A.

    P consists of several blocks: a basis Q, which follows the leading modes by products with A, what A Q adds to it,
    and so on. Q alone would not do for matrices with negative eigenvalues, which take half of its columns. All blocks
    but the last are orthonormal; the last one need only add to the others. Nothing waits for the device, and there are
    few operations: a stream holds about a thousand, then the host waits, and training with it.

    Arguments:
        product: from the Q of all matrices, (matrices, d, columns), to A Q; its last argument asks for all digits,
            if A has more than a product uses.
        names: of the matrices.
        bases: where to start, by name; they are replaced.
        like: a row of A, for its size and device.
    """
    names = list(names)
    passes = PASSES if all(name in bases for name in names) else COLD
    first = _starts([bases.get(name) for name in names], like)  # all at once: small products are slow
    for _ in range(passes):
        first = _orthonormal(product(first, False), first)
    bases |= {name: basis.clone() for name, basis in zip(names, first, strict=True)}
    spans, products = [first], [product(first, True)]
    for block in range(1, BLOCKS):
        rest = _without(spans, products[-1])
        spans.append((_orthonormal if block < BLOCKS - 1 else _representable)(rest, spans[-1]))
        products.append(product(spans[-1], True))
    found = {}
    for i, name in enumerate(names):  # one by one, to save memory
        P, AP = (torch.cat([block[i] for block in blocks], dim=1) for blocks in (spans, products))
        found[name] = torch.stack([overlaps(P, P), _symmetric(overlaps(P, AP))])
    return found


def _starts(known: list[Tensor | None], like: Tensor) -> Tensor:
    """The bases of the last record, (matrices, d, columns), where they are known.

    Modes of which they know nothing come in through the last columns.
    """
    columns = min(BLOCK if len(like) <= LARGE else NARROW, len(like) // 2)
    fresh, keep = random_basis(len(like), columns, like.device).to(like.dtype), columns - FRESH
    kept = (fresh[:, :keep] if basis is None else basis.to(like.device)[:, :keep].nan_to_num(0.0) for basis in known)
    return representable(torch.stack([torch.cat([basis, fresh[:, keep:]], dim=1) for basis in kept]))


def first_basis(x: Tensor) -> Tensor:
    """A basis of the leading directions of the rows x, (d, COLUMNS), filled up with random ones."""
    x = x[torch.linspace(0, len(x) - 1, min(len(x), ROWS)).long()]
    values, vectors = torch.linalg.eigh(x @ x.T)
    known = x.T @ vectors[:, values > SMALLEST * values[-1]].flip(1)[:, :COLUMNS]
    filled = torch.cat([nn.functional.normalize(known, dim=0), random_basis(x.shape[1], COLUMNS, x.device)], dim=1)
    return torch.linalg.qr(filled[:, :COLUMNS]).Q


def turned(basis: Tensor, sums: Tensor) -> Tensor:
    """The basis after one pass with tracked sums; as it was, if there are none."""
    found = torch.linalg.qr(torch.nan_to_num(sums[:, :COLUMNS], posinf=0.0, neginf=0.0)).Q
    usable = (count(sums) > 0) & torch.isfinite(sums[:, :COLUMNS]).all()
    return torch.where(usable, found, basis)


def moved(sums: Tensor, basis: Tensor, to: Tensor) -> Tensor:
    """Tracked sums in another basis: S is replaced by its Nyström approximation S Q (Qᵀ S Q)⁻¹ Qᵀ S, plus a multiple of
    the identity that keeps the trace."""
    product = sums[:, :COLUMNS].double()
    core = basis.double().T @ product
    values, vectors = torch.linalg.eigh(_symmetric(core))
    scale = torch.where(values > 1e-10 * values[-1], values.clamp(min=1e-300).rsqrt(), 0.0)
    factor = product @ (vectors * scale)
    rest = (sums[:, COLUMNS].double().sum() - factor.square().sum()).clamp(min=0) / len(basis)
    again = factor @ (factor.T @ to.double()) + rest * to
    return torch.cat([again.to(sums.dtype), sums[:, COLUMNS:]], dim=1)


def _orthonormal(products: Tensor, others: Tensor) -> Tensor:
    """Bases of the columns, (matrices, d, columns), almost orthonormal; others for columns that are zero or not finite.

    By Cholesky's factors of the products of columns, which GPUs compute much faster than QR. Overwrites columns in
    float64, to save memory.
    """
    columns = _normalize(products.double())
    overlaps = columns.mT @ columns
    overlaps.diagonal(dim1=1, dim2=2).add_(ROUNDING)
    factors = torch.linalg.cholesky_ex(overlaps).L
    identity = torch.eye(factors.shape[1], dtype=factors.dtype, device=factors.device)
    columns = columns @ torch.linalg.solve_triangular(factors, identity.expand_as(factors), upper=False).mT
    return _representable(columns, others)


def _representable(columns: Tensor, others: Tensor) -> Tensor:
    """Columns of unit length, as products need them; others for those that are zero or not finite."""
    lengths = torch.linalg.vector_norm(columns, dim=1, keepdim=True)
    usable = (lengths > TINY) & (lengths < torch.inf)
    scaled = columns.to(others.dtype) / lengths.to(others.dtype)
    return representable(torch.where(usable, scaled, others))


def _without(spans: list[Tensor], columns: Tensor) -> Tensor:
    """The part of the columns that is orthogonal to bases, in float64, because it may be small.

    The bases are almost orthonormal; twice removes nearly all.
    """
    columns = _normalize(columns.to(torch.float64, copy=True))
    for basis in 2 * spans:
        q = basis.double()
        columns.baddbmm_(q, q.mT @ columns, alpha=-1)
    return columns


def _normalize(columns: Tensor) -> Tensor:
    """Make all columns one long, in place."""
    return columns.div_(torch.linalg.vector_norm(columns, dim=1, keepdim=True).clamp_(min=TINY))


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2
