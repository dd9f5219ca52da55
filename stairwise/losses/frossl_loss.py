"""FroSSL (Skean et al. 2023): the logarithm of a Frobenius norm spreads the spectrum."""

from torch import Tensor, nn

from stairwise.losses.views import centred, of_views

__all__ = ["FroSSL", "frossl"]


@of_views
def frossl(z_a: Tensor, z_b: Tensor, invariance: float = 1.0) -> Tensor:
    r"""L = invariance · mean (ẑ_a − ẑ_b)² + Σ_views log ‖K/Tr K‖_F²,  K = ẑᵀẑ.

    ẑ is centred and each of its columns scaled to length √d, as in the authors' first two-view code. K's eigenvalues
    divided by their sum are shares p_j; the second term is log Σ p_j², least when all are equal.

    Arguments:
        z_a, z_b: (N, d); under data parallelism the rows of this process.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        >>> frossl(z, z).round(decimals=4)  # two equal shares: 2 log ½
        tensor(-1.3863)
    """
    z_a, z_b = (nn.functional.normalize(centred(z), dim=0) * z.shape[1] ** 0.5 for z in (z_a, z_b))
    apart = nn.functional.mse_loss(z_a, z_b)
    return invariance * apart + _concentration(z_a) + _concentration(z_b)


def _concentration(z: Tensor) -> Tensor:
    K = z.T @ z if len(z) > z.shape[1] else z @ z.T  # the same norm
    return (K.square().sum() / K.trace().square()).log()


class FroSSL(nn.Module):
    """`frossl` as a module."""

    def __init__(self, invariance: float = 1.0) -> None:
        super().__init__()
        self.invariance = invariance

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return frossl(z_a, z_b, self.invariance)
