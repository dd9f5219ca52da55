r"""Small initialization: multiply all or some parameters by α (Sec. 5.1, App. D).

The paper scales "all initial weights" but does not say whether this includes the affine parameters of batch norm. It
matters, because normalization undoes the scale of a convolution, so `scope` selects it. The paper's rule is to choose α
so that the largest eigenvalue at initialization is 1e-3 (Barlow Twins, VICReg) or 1e-6 (SimCLR); see `find_alpha`.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from stairwise.checks import InputError, number, one_of
from stairwise.nets.encoder import Network

SCOPES = ("all", "weights", "weights+norm", "readout")
NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)


def scoped(network: Network, scope: str) -> Iterator[Tensor]:
    """The parameters in a scope.

    "all": every parameter. "weights": matrices and filters. "weights+norm": also the affine parameters of normalization
    layers. "readout": weight and bias of the head's last linear layer.
    """
    one_of(scope, "scope", SCOPES)
    if scope == "readout":
        linear = [m for m in network.projector.modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise InputError("scope", "readout needs a linear layer in the head", scope, "choose another scope")
        yield from linear[-1].parameters()
        return
    normed = {id(p) for m in network.modules() if isinstance(m, NORMS) for p in m.parameters(recurse=False)}
    for parameter in network.parameters():
        if scope == "all" or parameter.ndim > 1 or (scope == "weights+norm" and id(parameter) in normed):
            yield parameter


@torch.no_grad()
def scale_parameters(network: Network, alpha: float, scope: str = "all") -> None:
    """Multiply the parameters in scope by α, in place."""
    number(alpha, "alpha", above=0)
    for parameter in scoped(network, scope):
        parameter.mul_(alpha)


def find_alpha(
    network: Network,
    top_eigenvalue: Callable[[], float],
    target: float,
    scope: str = "all",
    tolerance: float = 0.02,
    rounds: int = 60,
) -> float:
    """The α ≤ 1 for which the largest eigenvalue is `target`, to a relative tolerance. The network is not changed.

    log λ is nearly linear in log α, so a bracketed secant method needs only a few measurements.

    Arguments:
        top_eigenvalue: measures the current network, on the same data at each call.
    """
    number(target, "target", above=0)
    parameters = list(scoped(network, scope))
    initial = [p.detach().clone() for p in parameters]

    def measured(log_alpha: float) -> float:
        with torch.no_grad():
            for p, value in zip(parameters, initial, strict=True):
                p.copy_(value * math.exp(log_alpha))
        return math.log(max(top_eigenvalue(), 1e-300)) - math.log(target)

    try:
        high, off_high = 0.0, measured(0.0)
        if off_high <= 0:
            return 1.0
        low, off_low = -0.5, measured(-0.5)
        while off_low > 0 and low > -60:
            high, off_high, low = low, off_low, 2 * low
            off_low = measured(low)
        for i in range(rounds):
            if off_low > 0:
                break
            share = 0.5 if i % 3 == 2 else off_high / (off_high - off_low)
            middle = high + share * (low - high)
            off = measured(middle)
            if abs(off) <= tolerance:
                return math.exp(middle)
            if off > 0:
                high, off_high = middle, off
            else:
                low, off_low = middle, off
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, initial, strict=True):
                p.copy_(value)
    raise InputError(
        "alpha",
        f"auto could not bring the largest eigenvalue to {target:g}",
        f"scope {scope}",
        "batch norm may undo the scale: choose scope all or readout, or set alpha to a number",
    )
