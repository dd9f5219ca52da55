"""Fast paths. Only `choose` connects them to the rest; without them the plain code computes the same kernel.

The first line of each file gives its speed-up. Paths that saved less than 10 % were removed (`docs/log.md`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from stairwise.ntk.factors import Contraction
from stairwise.ntk.fast.convolutions import ConvolutionsByProducts
from stairwise.ntk.fast.half import HalfProducts
from stairwise.ntk.fast.pixels import propose
from stairwise.ntk.fast.second_stream import SecondStream

ENABLED = True  # False: plain code everywhere, float32 products for "float16" and "tf32"


@dataclass(frozen=True)
class Paths:
    """The paths of one computation. The defaults are the plain code.

    Attributes:
        convolutions: makes a context in which convolutions are computed in another way.
        second_stream: makes the stream on which the trial runs.
        contraction: how inner products are computed.
    """

    convolutions: Callable[[], AbstractContextManager] | None = None
    second_stream: type[SecondStream] | None = None
    contraction: Contraction = field(default_factory=Contraction)


def choose(device: torch.device, precision: str) -> Paths:
    if not ENABLED:
        return Paths()
    gpu = device.type == "cuda"
    half = HalfProducts() if precision == "float16" or (precision == "tf32" and gpu) else None
    if not gpu:
        return Paths(contraction=Contraction(half=half, more_ways=(propose,)))
    # with TF32, cuDNN's convolutions are the faster ones
    convolutions = ConvolutionsByProducts if precision in ("float32", "float16") else None
    return Paths(convolutions, SecondStream, Contraction(half=half))
