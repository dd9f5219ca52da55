"""Orthonormal bases Q that follow the leading modes of sums S = Σ x xᵀ which are too large to be decomposed.

A record starts from the basis of the one before, so that bases follow the network's training.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from stairwise.monitor.moments import COLUMNS, count
from stairwise.monitor.products import representable

Bases = dict[str, Tensor]
Product = Callable[[str, Tensor, bool], Tensor]

BLOCK, BLOCKS = 256, 3  # columns and number of blocks in which the leading eigenvalues of a dense matrix are found
PASSES, COLD = 1, 3  # products with the matrix before the first block, with the basis of the last record and without
FRESH = 16  # columns that start anew in every record, from random numbers that are always the same
ROUNDING = 1e-10  # of squared lengths of columns; makes those that depend on others harmless
TINY = 1e-300  # shorter columns are zero
SMALLEST = 1e-6  # of the largest eigenvalue of rows in float32; smaller ones are rounding
ROWS = 1024  # number of rows in which a first tracked basis is found


def random_basis(d: int, columns: int, device: torch.device) -> Tensor:
    """Columns of unit length, always the same on a device; the user's random numbers are left alone."""
    draw = torch.randn(d, columns, generator=torch.Generator(device).manual_seed(0), device=device)
    return nn.functional.normalize(draw, dim=0)


def ritz_matrices(product: Product, names: Iterable[str], bases: Bases, like: Tensor) -> Bases:
    """Pᵀ P and Pᵀ A P of symmetric matrices A, (2, columns, columns) each, whose eigenvalues are the leading ones of A.

    P consists of several blocks: a basis Q, which follows the leading modes by products with A, what A Q adds to it,
    and so on. Q alone would not do for matrices with negative eigenvalues, which take half of its columns. Nothing
    waits for the device.

    Arguments:
        product: from the name of the matrix and Q to A Q; its last argument asks for all digits.
        names: of the matrices.
        bases: where to start, by name; they are replaced.
        like: a row of A, for its size and device.
    """
    names = list(names)

    def image(bases: Tensor, exact: bool) -> Tensor:
        return torch.stack([product(name, q, exact) for name, q in zip(names, bases, strict=True)])

    passes = PASSES if all(name in bases for name in names) else COLD
    last = torch.stack([_start(bases.get(name), like) for name in names])  # all at once: small products are slow
    for _ in range(passes):
        last = _orthonormal(image(last, False), last)
    bases |= {name: basis.clone() for name, basis in zip(names, last, strict=True)}
    spans, products = [last], [image(last, True)]
    for _ in range(BLOCKS - 1):
        last = _orthonormal(_without(spans, products[-1]), last)
        spans.append(last)
        products.append(image(last, True))
    found = {}
    for i, name in enumerate(names):
        p, Ap = (torch.cat([block[i] for block in blocks], dim=1).double() for blocks in (spans, products))
        found[name] = torch.stack([p.T @ p, _symmetric(p.T @ Ap)])
    return found


def _start(known: Tensor | None, like: Tensor) -> Tensor:
    """The basis of the last record; modes of which it knows nothing come in through the last columns."""
    d = len(like)
    columns = min(BLOCK, d // 2)
    kept = like.new_empty(d, 0) if known is None else known.to(like.device)[:, : columns - FRESH].nan_to_num(0.0)
    return representable(torch.cat([kept, random_basis(d, columns - kept.shape[1], like.device)], dim=1))


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


def _orthonormal(products: Tensor, bases: Tensor) -> Tensor:
    """Bases of the columns, (matrices, d, columns), almost orthonormal; a column of the old basis for each that is zero
    or not finite.

    By Cholesky's factors of the products of columns, which GPUs compute much faster than QR.
    """
    columns = products.to(torch.float64, copy=True)
    columns /= torch.linalg.vector_norm(columns, dim=1, keepdim=True).clamp_(min=TINY)
    overlaps = columns.mT @ columns
    overlaps.diagonal(dim1=1, dim2=2).add_(ROUNDING)
    factors = torch.linalg.cholesky_ex(overlaps).L
    identity = torch.eye(factors.shape[1], dtype=factors.dtype, device=factors.device)
    columns = columns @ torch.linalg.solve_triangular(factors, identity.expand_as(factors), upper=False).mT
    lengths = torch.linalg.vector_norm(columns, dim=1, keepdim=True)
    usable = torch.isfinite(lengths) & (lengths > TINY)
    return representable(torch.where(usable, columns.div_(lengths).to(bases.dtype), bases))


def _without(spans: list[Tensor], columns: Tensor) -> Tensor:
    """The part of the columns that is orthogonal to bases, which are almost orthonormal; twice removes nearly all."""
    columns = columns.to(torch.float64, copy=True)
    for basis in 2 * spans:
        q = basis.double()
        columns.baddbmm_(q, q.mT @ columns, alpha=-1)
    return columns


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2
