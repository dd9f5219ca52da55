"""Inner products of factored gradients, by every way, against the gradients themselves."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stairwise.ntk.factors import Contraction, Lookup, Outer, _explicit, _ghost
from stairwise.ntk.fast.half import HalfProducts
from stairwise.ntk.fast.pixels import propose
from stairwise.ntk.patches import windows
from stairwise.ntk.rules import factors


@pytest.mark.parametrize("positions", [1, 2, 9])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("slices", [1.0, 1e9])
def test_explicit_and_ghost_products_agree(positions, groups, slices, monkeypatch):
    monkeypatch.setattr("stairwise.ntk.factors.SMALL_LAYER", 0)  # float16 in small layers, too
    torch.manual_seed(0)
    how, half = Contraction(slices), Contraction(slices, HalfProducts())
    layer = nn.Conv1d(2 * groups, 4 * groups, 1, groups=groups).double()
    x, b = torch.randn(2, 6, 2 * groups, positions).double(), torch.randn(2, 6, groups, 4, positions).double()
    one, two = (Outer(layer, ((x[k], b[k]),)) for k in (0, 1))
    in_parts = Outer.joined([Outer(layer, ((x[0, :2], b[0, :2]),)), Outer(layer, ((x[0, 2:], b[0, 2:]),))])
    torch.testing.assert_close(in_parts.gradients(), one.gradients())
    between, among = one.gradients() @ two.gradients().T, one.gradients() @ one.gradients().T
    for factor in (one, in_parts):
        assert factor.samples == 6
        for gram in (_explicit, _ghost, Outer.gram):
            assert gram(factor, two, how) == pytest.approx(between, rel=1e-10)
            assert gram(two, factor, how) == pytest.approx(between.T, rel=1e-10)
            assert gram(factor, None, how) == pytest.approx(among, rel=1e-10)
        rounded = factor.gram(None, half)
        torch.testing.assert_close(rounded.double(), among, rtol=1e-2, atol=1e-2 * float(among.max()))
        assert not torch.equal(rounded.double(), factor.gram(None, how))


@pytest.mark.parametrize(
    ("layer", "size", "way"),
    [
        (lambda: nn.Conv2d(128, 128, 3, padding=1), 4, "pixels"),
        (lambda: nn.Conv2d(256, 256, 3, padding=1), 1, "pixels"),
        (lambda: nn.Conv2d(16, 16, 3, padding=1), 4, "explicit"),
        (lambda: nn.Conv2d(128, 128, 3, padding=1), 16, "explicit"),
        (lambda: nn.Conv2d(128, 128, 3, padding=1, padding_mode="circular"), 4, "ghost"),
        (lambda: nn.Conv2d(128, 128, 3, padding="same"), 4, "ghost"),
        (lambda: nn.Conv2d(128, 128, 3, groups=2), 4, "ghost"),
        (lambda: nn.Conv2d(128, 128, 1), 1, "ghost"),
        (lambda: nn.Linear(300, 200), None, "ghost"),
    ],
)
def test_the_cheapest_way_is_taken(layer, size, way):
    """And all are right, in both layouts."""
    torch.manual_seed(0)
    layer = layer()
    x = torch.randn(12, layer.weight.shape[1] * getattr(layer, "groups", 1), *[] if size is None else (size, size))
    b = torch.randn_like(layer(x))
    factor = factors(layer, x, b)["weight"]
    single, half = Contraction(more_ways=(propose,)), Contraction(half=HalfProducts(), more_ways=(propose,))
    assert factor.cheapest(factor, True, single).name == way
    layout = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    some = factors(layer, x[:5].contiguous(memory_format=layout), b[:5])["weight"]
    G = factor.gradients().double()
    torch.testing.assert_close(some.gradients().double(), G[:5], rtol=1e-4, atol=1e-4)
    K = G @ G.T
    for how, error in ((single, 1e-5), (half, 1e-3)):
        for gram, exact in ((factor.gram(None, how), K), (some.gram(factor, how), K[:5])):
            torch.testing.assert_close(gram.double(), exact, rtol=0, atol=error * float(K.max()))


def test_small_layers_stay_in_single_precision():
    torch.manual_seed(0)
    for layer, x in ((nn.Conv2d(3, 8, 3), torch.randn(4, 3, 9, 9)), (nn.Linear(200, 90), torch.randn(4, 200))):
        for factor in factors(layer, x, torch.randn_like(layer(x))).values():
            assert torch.equal(factor.gram(None, Contraction(half=HalfProducts())), factor.gram(None, Contraction()))


def test_lookup_counts_repeated_rows():
    index = torch.tensor([[0, 0, 2], [2, -1, 0]])
    factor = Lookup(index, torch.randn(2, 3, 4, dtype=torch.float64), 5)
    G = factor.gradients()
    assert factor.gram(None, Contraction()) == pytest.approx(G @ G.T, rel=1e-10)
    assert factor.gram(factor, Contraction(1.0)) == pytest.approx(G @ G.T, rel=1e-10)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_windows(layout):
    x = torch.randn(3, 4, 7, 6).contiguous(memory_format=layout)
    unfolded = F.unfold(x, (3, 2), (1, 2), 0, (2, 1)).view(3, 4, 3, 2, -1)
    assert torch.equal(windows(x, (3, 2), (2, 1), (1, 2))[:, 0].flatten(4), unfolded)
