"""Barlow Twins (Zbontar et al. 2021) and the paper's simplified form ‖C − I‖² (Eq. 2)."""

import torch
from torch import Tensor, nn

from stairwise.checks import flag
from stairwise.losses.views import of_views, weight


@of_views
def barlow_twins(
    z_a: Tensor, z_b: Tensor, lambda_: float = 0.0051, batch_norm: bool = True, symmetric: bool = False
) -> Tensor:
    r"""L = Σ_i (C_ii − 1)² + λ Σ_{i≠j} C_ij²,  C = ẑ_aᵀ ẑ_b / N.

    The defaults follow the published code: ẑ is standardized over the batch (biased variance, ε = 1e-5), and entries
    are summed, not averaged. The paper's loss ‖C − I‖² is `lambda_=1, batch_norm=False, symmetric=True`.

    Arguments:
        z_a, z_b: (N, d) embeddings of two views, one sample per row; in data-parallel training, this process's rows.
        lambda_: weight of the off-diagonal entries.
        batch_norm: standardize each dimension of each view over the batch.
        symmetric: replace C by (C + Cᵀ)/2.

    Example:
        >>> z = torch.eye(4) * 2
        >>> barlow_twins(z, z, lambda_=1.0, batch_norm=False)
        tensor(0.)
    """
    lambda_, batch_norm, symmetric = _options(lambda_, batch_norm, symmetric)
    if batch_norm:
        z_a, z_b = (nn.functional.batch_norm(z, None, None, training=True, eps=1e-5) for z in (z_a, z_b))
    C = z_a.T @ z_b / len(z_a)
    if symmetric:
        C = (C + C.T) / 2
    squares = (C - torch.eye(len(C), dtype=C.dtype, device=C.device)).square()
    on_diagonal = squares.diagonal().sum()
    return on_diagonal + lambda_ * (squares.sum() - on_diagonal)


def _options(lambda_: float, batch_norm: bool, symmetric: bool) -> tuple[float, bool, bool]:
    return weight(lambda_, "lambda_"), flag(batch_norm, "batch_norm"), flag(symmetric, "symmetric")


class BarlowTwins(nn.Module):
    """`barlow_twins` as a module."""

    def __init__(self, lambda_: float = 0.0051, batch_norm: bool = True, symmetric: bool = False) -> None:
        super().__init__()
        self.lambda_, self.batch_norm, self.symmetric = _options(lambda_, batch_norm, symmetric)

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return barlow_twins(z_a, z_b, self.lambda_, self.batch_norm, self.symmetric)
