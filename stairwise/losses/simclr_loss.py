"""SimCLR's NT-Xent (Chen et al. 2020)."""

import torch
from torch import Tensor, nn

from stairwise.checks import number
from stairwise.losses.views import of_views


@of_views
def simclr(z_a: Tensor, z_b: Tensor, temperature: float = 0.2) -> Tensor:
    r"""L = −(1/2N) Σ_i log( e^{s(i, i⁺)/τ} / Σ_{k≠i} e^{s(i,k)/τ} ) over all 2N views, with s the cosine similarity.

    i⁺ is the other view of the same sample; the sum in the denominator runs over the 2N − 1 other views.

    Arguments:
        z_a, z_b: (N, d), not normalized; in data-parallel training, the rows of this process.
        temperature: τ.

    Example:
        >>> z = torch.eye(2)
        >>> simclr(z, z, temperature=1.0).round(decimals=4)  # −log(e / (e + 2))
        tensor(0.5514)
    """
    temperature = _option(temperature)
    z = nn.functional.normalize(torch.cat([z_a, z_b]), dim=1)
    logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    partner = torch.arange(len(z), device=z.device).roll(len(z_a))
    return nn.functional.cross_entropy(logits, partner)


def _option(temperature: float) -> float:
    return number(temperature, "temperature", least=1e-6, most=1e30)


class SimCLR(nn.Module):
    """`simclr` as a module."""

    def __init__(self, temperature: float = 0.2) -> None:
        super().__init__()
        self.temperature = _option(temperature)

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return simclr(z_a, z_b, self.temperature)
