"""Orthonormal bases Q that follow the leading modes of sums S = Σ x xᵀ which are too large to be decomposed.

A record starts from the basis of the one before, so that bases follow the network's training.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stairwise.monitor.moments import COLUMNS, count
from stairwise.monitor.products import representable

BLOCK = 384  # columns of the basis in which the leading eigenvalues of a dense matrix are found
PASSES, COLD = 2, 6  # further products with the matrix per record, with the basis of the last record and without one
FRESH = 16  # columns of the basis that are random in every record
ROUNDING = 1e-10  # of squared lengths of columns; makes those that depend on others harmless
TINY = 1e-300  # shorter columns are zero
SMALLEST = 1e-6  # of the largest eigenvalue of rows in float32; smaller ones are rounding
ROWS = 1024  # number of rows in which a first tracked basis is found


def random_basis(d: int, columns: int, device: torch.device) -> Tensor:
    """An orthonormal basis, always the same; the user's random numbers are left alone."""
    draw = torch.randn(d, columns, generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(draw).Q.to(device)


def ritz_matrices(product: Callable[[Tensor], Tensor], bases: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Qᵀ Q and Qᵀ A Q of a symmetric matrix A, (2, columns, columns), whose leading eigenvalues are those of A.

    Q follows the leading modes by a few products with A, each made orthonormal before the next one. Nothing waits for
    the device.

    Arguments:
        product: Q → A Q.
        bases: bases[name] is where to start, and is replaced.
        like: a row of A, for its size and device.
    """
    known, d = bases.get(name), len(like)
    columns = min(BLOCK, d // 2)
    if known is None:
        basis = random_basis(d, columns, like.device)
    else:  # modes of which it knows nothing come in through the last columns
        basis = torch.cat([known.to(like.device)[:, :-FRESH], random_basis(d, FRESH, like.device)], dim=1)
    basis = representable(basis)
    image = product(basis)
    for _ in range(PASSES if known is not None else COLD):
        basis = _orthonormal(image, basis)
        image = product(basis)
    bases[name] = _orthonormal(image, basis)
    q, image = basis.double(), image.double()
    return torch.stack([q.T @ q, _symmetric(q.T @ image)])


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


def _orthonormal(product: Tensor, basis: Tensor) -> Tensor:
    """A basis of the columns, almost orthonormal; a column of the old basis for each that is zero or not finite.

    By Cholesky's factors of the products of columns, which GPUs compute much faster than QR.
    """
    columns = nn.functional.normalize(product.double(), dim=0, eps=TINY)
    overlaps = columns.T @ columns
    overlaps.diagonal().add_(ROUNDING)
    factor = torch.linalg.cholesky_ex(overlaps).L
    columns = torch.linalg.solve_triangular(factor, columns.T, upper=False).T
    found = nn.functional.normalize(columns, dim=0, eps=TINY).to(basis.dtype)
    usable = torch.isfinite(found).all(dim=0) & (found != 0).any(dim=0)
    return representable(torch.where(usable, found, basis))


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2
