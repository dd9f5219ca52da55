"""Orthonormal bases Q that follow the leading modes of sums S = Σ x xᵀ which are too large to be decomposed.

A record starts from the basis of the one before, so that bases follow the network's training.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stairwise.monitor.moments import COLUMNS, count

BLOCK = 256  # columns of the basis in which the leading eigenvalues of a dense matrix are found
STEPS, COLD = 4, 8  # steps per record, with the basis of the last record and without one
SMALLEST = 1e-6  # of the largest eigenvalue of rows in float32; smaller ones are rounding
ROWS = 1024  # number of rows in which a first tracked basis is found


def random_basis(d: int, columns: int, device: torch.device) -> Tensor:
    """An orthonormal basis, always the same; the user's random numbers are left alone."""
    draw = torch.randn(d, columns, generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(draw).Q.to(device)


def leading_values(product: Callable[[Tensor], Tensor], bases: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """The leading eigenvalues of a symmetric matrix A, in ascending order, by a few steps of block Rayleigh–Ritz.

    A step finds the best basis in the span of Q and its residual A Q − Q Λ. Unlike powers of A, it prefers large
    eigenvalues to negative ones of the same size, which C has if there are few pairs.

    Arguments:
        product: Q → A Q.
        bases: bases[name] is where to start, and is replaced.
        like: a row of A, for its size and device.
    """
    known, d = bases.get(name), len(like)
    columns = min(BLOCK, d // 2)
    basis = random_basis(d, columns, like.device) if known is None else known.to(like.device)
    image, values = product(basis), like.new_zeros(columns)
    for _ in range(COLD if known is None else STEPS):
        both = torch.linalg.qr(torch.cat([basis, image - basis * values], dim=1)).Q
        images = product(both)
        values, mix = torch.linalg.eigh(_symmetric(both.T @ images))
        values, mix = values[-columns:], mix[:, -columns:]
        basis, image = both @ mix, images @ mix
    bases[name] = torch.nan_to_num(basis, posinf=0.0, neginf=0.0)  # a record that fails must not spoil the next
    return values


def first_basis(x: Tensor) -> Tensor:
    """A basis of the leading directions of the rows x, (d, COLUMNS), filled up with random ones."""
    x = x[torch.linspace(0, len(x) - 1, min(len(x), ROWS)).long()]
    values, vectors = torch.linalg.eigh(x @ x.T)
    known = x.T @ vectors[:, values > SMALLEST * values[-1]].flip(1)[:, :COLUMNS]
    filled = torch.cat([nn.functional.normalize(known, dim=0), random_basis(x.shape[1], COLUMNS, x.device)], dim=1)
    return torch.linalg.qr(filled[:, :COLUMNS]).Q


def turned(basis: Tensor, sums: Tensor) -> Tensor:
    """The basis after one pass with tracked sums; as it was, if there are none."""
    return torch.where(count(sums) > 0, _orthonormal(sums[:, :COLUMNS], basis), basis)


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
    """An orthonormal basis of the columns, or the old one if they are not finite."""
    found = torch.linalg.qr(torch.nan_to_num(product, posinf=0.0, neginf=0.0)).Q
    return torch.where(torch.isfinite(product).all(), found, basis)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2
