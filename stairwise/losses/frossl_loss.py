"""FroSSL (Skean et al. 2023): the logarithm of a Frobenius norm equalizes the spectrum."""

from torch import Tensor, nn

from stairwise.losses.views import centred, of_views, weight

TINY = 1e-30  # avoids 0/0 for embeddings that are all equal


@of_views
def frossl(z_a: Tensor, z_b: Tensor, invariance: float = 1.0) -> Tensor:
    r"""L = invariance · mean (ẑ_a − ẑ_b)² + Σ_views log ‖K/Tr K‖_F²,  K = ẑᵀẑ.

    ẑ is centred and its columns are scaled to length √d, as in the authors' first two-view code. With p_j the
    eigenvalues of K divided by their sum, the second term is log Σ p_j², which is smallest when all p_j are equal.

    Arguments:
        z_a, z_b: (N, d); in data-parallel training, the rows of this process.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        >>> frossl(z, z).round(decimals=4)  # p = ½, ½: 2 log ½
        tensor(-1.3863)
    """
    invariance = weight(invariance, "invariance")
    z_a, z_b = (nn.functional.normalize(centred(z), dim=0) * z.shape[1] ** 0.5 for z in (z_a, z_b))
    distance = nn.functional.mse_loss(z_a, z_b)
    return invariance * distance + _concentration(z_a) + _concentration(z_b)


def _concentration(z: Tensor) -> Tensor:
    K = z.T @ z if len(z) > z.shape[1] else z @ z.T  # both have the same norm
    # not K.trace(): its gradient reads a value on the CPU, which a CUDA graph cannot record
    return ((K.square().sum() + TINY) / (K.diagonal().sum().square() + TINY)).log()


class FroSSL(nn.Module):
    """`frossl` as a module."""

    def __init__(self, invariance: float = 1.0) -> None:
        super().__init__()
        self.invariance = weight(invariance, "invariance")

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return frossl(z_a, z_b, self.invariance)
