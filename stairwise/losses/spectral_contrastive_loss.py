"""The spectral contrastive loss (HaoChen et al. 2021)."""

from torch import Tensor, nn

from stairwise.losses.views import of_views


@of_views
def spectral_contrastive(z_a: Tensor, z_b: Tensor) -> Tensor:
    r"""L = −(2/N) Σ_i z_a,i·z_b,i + (1/N(N−1)) Σ_{i≠k} (z_a,i·z_b,k)².

    The embeddings are not normalized. The authors' code projects them to a sphere for stability; the theory does not.

    Arguments:
        z_a, z_b: (N, d); in data-parallel training, the rows of this process.

    Example:
        >>> import torch
        >>> z = torch.eye(3)
        >>> spectral_contrastive(z, z)
        tensor(-2.)
    """
    n = len(z_a)
    overlaps = z_a @ z_b.T
    alike = overlaps.diagonal()
    return -2 * alike.mean() + (overlaps.square().sum() - alike.square().sum()) / (n * (n - 1))


class SpectralContrastive(nn.Module):
    """`spectral_contrastive` as a module."""

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return spectral_contrastive(z_a, z_b)
