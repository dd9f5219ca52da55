"""Inner products from pixels equal those of the gradients, for every geometry."""

from itertools import product

import pytest
import torch
from torch import nn

from stairwise.ntk.factors import Contraction
from stairwise.ntk.fast import pixels
from stairwise.ntk.rules import factors


def plain_convolution(kind, kernel, stride, padding, dilation, n):
    """Gradients of n samples; the second axis has options of its own."""
    torch.manual_seed(n)
    if kind is nn.Conv1d:
        layer, x = nn.Conv1d(3, 4, kernel, stride, padding, dilation), torch.randn(n, 3, 7)
    else:
        layer, x = nn.Conv2d(3, 4, (kernel, 2), (stride, 1), (padding, 1), (dilation, 1)), torch.randn(n, 3, 7, 5)
    layer, x = layer.double(), x.double()
    return factors(layer, x, torch.randn_like(layer(x)))["weight"]


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
@pytest.mark.parametrize("cache", [1, 1e6])  # rows one by one, or all
def test_products_of_pixels(kind, cache, monkeypatch):
    monkeypatch.setattr(pixels, "CACHE", cache)
    how = Contraction()
    # with padding 4 the last position may see nothing
    for options in product((1, 2, 3), (1, 2, 3), (0, 1, 4), (1, 2)):  # kernel, stride, padding, dilation
        one, two = (plain_convolution(kind, *options, n) for n in (6, 4))
        way, G = pixels.propose(one, two, False, how), one.gradients()
        torch.testing.assert_close(way.gram(one, None, how), G @ G.T)
        torch.testing.assert_close(way.gram(one, two, how), G @ two.gradients().T)
