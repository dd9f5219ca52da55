"""VICReg (Bardes et al. 2022)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stairwise.losses.views import gathered_views, of_views, weight


@of_views
def vicreg(
    z_a: Tensor, z_b: Tensor, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0
) -> Tensor:
    r"""L = invariance · mean (z_a − z_b)² + variance · (v_a + v_b)/2 + covariance · (c_a + c_b).

    v = mean_j max(0, 1 − √(Var_j + 1e-4)) and c = Σ_{i≠j} Cov_ij² / d, with unbiased variance and covariance. As
    in the published code, the variance terms of the two views are averaged and the covariance terms are summed.

    Arguments:
        z_a, z_b: (N, d); in data-parallel training, the rows of this process.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        >>> vicreg(z, z + 1.0)  # only the invariance term
        tensor(25.)
    """
    invariance, variance, covariance = _options(invariance, variance, covariance)
    distance = nn.functional.mse_loss(z_a, z_b)
    narrowness = (_too_narrow(z_a) + _too_narrow(z_b)) / 2
    redundant = _redundancy(z_a) + _redundancy(z_b)
    return invariance * distance + variance * narrowness + covariance * redundant


def _too_narrow(z: Tensor) -> Tensor:
    """v of rows (N, d), or its mean over views (V, N, d)."""
    return nn.functional.relu(1 - (z.var(dim=-2) + 1e-4).sqrt()).mean()


def _redundancy(z: Tensor) -> Tensor:
    """c of rows (N, d), or its mean over views (V, N, d)."""
    z = z - z.mean(dim=-2, keepdim=True)
    squares = (z.mT @ z / (z.shape[-2] - 1)).square()
    diagonals = squares.diagonal(dim1=-2, dim2=-1)
    return (squares.sum() - diagonals.sum()) / diagonals.numel()


def _options(invariance: float, variance: float, covariance: float) -> tuple[float, float, float]:
    return weight(invariance, "invariance"), weight(variance, "variance"), weight(covariance, "covariance")


class VICReg(nn.Module):
    """`vicreg` as a module."""

    def __init__(self, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0) -> None:
        super().__init__()
        self.invariance, self.variance, self.covariance = _options(invariance, variance, covariance)

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return vicreg(z_a, z_b, self.invariance, self.variance, self.covariance)

    def mean_over_pairs(self, views: Sequence[Tensor]) -> Tensor:
        """Mean over all pairs of V views, (N, d) each, in as many operations as one pair takes.

        Variance and covariance are those of each view, and Σ_{i<j} ‖z_i − z_j‖² = V Σ_i ‖z_i − m‖² with their mean m.
        """
        z = gathered_views(views)
        with torch.autocast(z.device.type, enabled=False):
            distance = 2 / (len(z) - 1) * (z - z.mean(dim=0)).square().sum(dim=0).mean()
            narrowness, redundant = _too_narrow(z), 2 * _redundancy(z)
        return self.invariance * distance + self.variance * narrowness + self.covariance * redundant
