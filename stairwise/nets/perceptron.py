"""Fully connected networks: the MLP of Fig. 2A,B and the heads of the three methods."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from stairwise.checks import InputError, positive_int


class MLP(nn.Module):
    """Flatten the input and apply ReLU layers in PyTorch's default parametrization; the last layer is the output h.

    With a linear readout as its head this is the network of Fig. 2A,B.

    >>> import torch
    >>> MLP(inputs=1200, widths=[2048])(torch.zeros(3, 3, 20, 20)).shape
    torch.Size([3, 2048])
    """

    def __init__(self, inputs: int, widths: Sequence[int] = (2048,)) -> None:
        super().__init__()
        sizes = [inputs, *widths]
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
        self.layers = nn.Sequential(*layers)
        self.inputs, self.features = inputs, sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if x.shape[1] != self.inputs:
            raise InputError("views", f"must have {self.inputs} values each", x.shape[1], "set encoder_options.inputs")
        h: Tensor = self.layers(x)
        return h


def head(features: int, hidden: Sequence[int], d: int, norm: bool = True, bias: bool = False) -> nn.Sequential:
    """Linear → (batch norm) → ReLU for each hidden width, then a linear readout to d dimensions.

    Barlow Twins: norm, no biases. VICReg: the same; its published code has biases in the hidden layers, but batch norm
    removes their effect. SimCLR: no norm, biases. Without hidden widths the head is only the readout.

    >>> [type(layer).__name__ for layer in head(512, [2048], 128)]
    ['Linear', 'BatchNorm1d', 'ReLU', 'Linear']
    """
    layers: list[nn.Module] = []
    for a, b in pairwise([features, *hidden]):
        layers.append(nn.Linear(a, positive_int(b, "hidden"), bias=bias))
        if norm:
            layers.append(nn.BatchNorm1d(b))
        layers.append(nn.ReLU())
    last = hidden[-1] if hidden else features
    return nn.Sequential(*layers, nn.Linear(last, positive_int(d, "d"), bias=bias))
