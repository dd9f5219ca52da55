"""Convolutions as products give the same passes; models that they do not suit are left to torch."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stairwise.nets.encoder import build_encoder
from stairwise.ntk import fast
from stairwise.ntk.capture import Capture
from stairwise.ntk.empirical import empirical_ntk
from stairwise.ntk.factors import Contraction, Outer
from stairwise.ntk.fast.convolutions import ConvolutionsByProducts
from stairwise.ntk.fast.half import HalfProducts
from tests.ntk.zoo import Net, apply, by_autograd, mean, pool


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Use them in `empirical_ntk`, which otherwise does so on a GPU only."""
    paths = fast.Paths(ConvolutionsByProducts, None, Contraction())
    monkeypatch.setattr(fast, "choose", lambda *_: paths)


@pytest.mark.parametrize("size", [(7, 6), (9, 11)])
@pytest.mark.parametrize("out", [2, 5])  # fewer channels than there are, or more
def test_convolutions_by_products(size, out):
    torch.manual_seed(0)
    kernels, strides, paddings = [(1, 1), (3, 3), (2, 3), (5, 5)], [(1, 1), (2, 2), (2, 1), (3, 3)], [0, 1, 3]
    for kernel, stride, pad in product(kernels, strides, paddings):
        padding = (pad, min(pad, 1))
        x = torch.randn(4, 3, *size, requires_grad=True)
        weight, bias = torch.randn(out, 3, *kernel, requires_grad=True), torch.randn(out)
        with ConvolutionsByProducts():
            by_products = F.conv2d(x, weight, bias, stride, padding, (1, 1), 1)
        wanted = F.conv2d(x, weight, bias, stride, padding)
        torch.testing.assert_close(by_products, wanted, rtol=1e-4, atol=1e-4)
        b = torch.randn_like(wanted)
        gradients = [torch.autograd.grad(y, x, b)[0] for y in (by_products, wanted)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"groups": 3}, {"dilation": 2}, {"padding": "same"}, {"padding_mode": "circular"}])
def test_other_convolutions_are_left_alone(options):
    layer, x = nn.Conv2d(3, 6, 3, **{"padding": 1, **options}), torch.randn(2, 3, 6, 6)
    with ConvolutionsByProducts():
        by_products = layer(x)
    torch.testing.assert_close(by_products, layer(x))


def steered(x):
    """The weights of the second convolution come from the first, so that gradients have two ways."""
    weight = torch.linspace(-1, 1, 12).view(4, 3, 1, 1).requires_grad_()
    h = torch.conv2d(x, weight, None, (1, 1), (0, 0), (1, 1), 1)
    weight = h[:1].mean(dim=(2, 3)).view(4, 1, 1, 1).expand(4, 4, 1, 1)
    return torch.conv2d(h, weight, None, (1, 1), (0, 0), (1, 1), 1).sum()


def test_weights_that_are_computed_pass_gradients_on():
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4, 4, requires_grad=True)
    with ConvolutionsByProducts():
        by_products = torch.autograd.grad(steered(x), x)
    torch.testing.assert_close(by_products, torch.autograd.grad(steered(x), x))


def viewing():
    """Cannot take channels-last images."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), apply(lambda z: z.view(len(z), 2, -1).sum(dim=2)))


@pytest.mark.parametrize("size", [9, 16])  # few positions, and so many that cuDNN is better
@pytest.mark.parametrize(
    ("make", "taken"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(True), nn.Conv2d(4, 5, 1), nn.ReLU(True), pool()), True),
        (lambda: build_encoder("resnet18", {"stem": "small", "width": 8}), True),
        (lambda: build_encoder("resnet50", {"width": 8}), True),
        (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.GroupNorm(2, 6), nn.Conv2d(6, 4, 3, 2), pool()), True),
        (viewing, False),
    ],
)
def test_passes_by_products(make, taken, size, monkeypatch):
    """The same gradients, and inner products, from images in the other layout."""
    monkeypatch.setattr("stairwise.ntk.factors.SMALL_LAYER", 0)
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(6, 3, size, size)
    plain, by_products = Capture(model, mean, x), Capture(model, mean, x, ConvolutionsByProducts)
    with nullcontext() if taken else pytest.warns(RuntimeWarning, match="left to torch, which is slower: view size"):
        one, other = plain.factors(x), by_products.factors(x)
    assert (by_products.convolutions is not None) is taken
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):  # the layout is kept throughout
        parts = [part for f in other.values() if isinstance(f, Outer) for part in f.parts]
        assert all(x.stride(1) == b.stride(2) == 1 for x, b in parts if x[0, 0].numel() > 1)
    assert one.keys() == other.keys() == {name for name, _ in model.named_parameters()}
    for name, factor in one.items():
        torch.testing.assert_close(other[name].gradients(), factor.gradients(), rtol=1e-3, atol=1e-4)
        for half in (None, HalfProducts()):
            how = Contraction(1e4, half)
            exact = factor.gram(None, Contraction())
            tolerance = {"rtol": 1e-2 if half else 1e-3, "atol": float(exact.max()) * 1e-3 + 1e-9}
            for gram in (other[name].gram(None, how), other[name].gram(factor, how)):  # the latter mixes layouts
                torch.testing.assert_close(gram, exact, **tolerance)
            twice = factor.joined([factor, other[name]]).gram(None, how)
            torch.testing.assert_close(twice, exact.repeat(2, 2), **tolerance)


class Border(torch.autograd.Function):
    """A pool whose gradient is wrong at the borders of channels-last images, like that of torch 2.13 on a GPU."""

    @staticmethod
    def forward(ctx, x):
        ctx.size, ctx.wrong = x.shape, not x.is_contiguous()
        return F.avg_pool2d(x, 3, 1, 1)

    @staticmethod
    def backward(ctx, g):
        x = g.new_zeros(ctx.size, requires_grad=True)
        with torch.enable_grad():
            out = F.avg_pool2d(x, 3, 1, 1)
        (right,) = torch.autograd.grad(out, x, g.contiguous())
        if ctx.wrong:
            right = right.clone()
            right[:, :, 0], right[:, :, :, 0] = 0, 0
            right = right.contiguous(memory_format=torch.channels_last)
        return right


@pytest.mark.usefixtures("on_a_cpu")
def test_gradients_that_are_a_little_wrong_in_the_other_layout_are_noticed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), apply(Border.apply), nn.Conv2d(8, 4, 1), pool()).eval()
    x = torch.randn(5, 3, 20, 20)
    with pytest.warns(RuntimeWarning, match="left to torch, which is slower: as products they give other gradients"):
        K = empirical_ntk(model, x)
    torch.testing.assert_close(K, by_autograd(model, x), rtol=1e-4, atol=1e-5)


class ViewsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone(memory_format=torch.preserve_format)

    @staticmethod
    def backward(ctx, g):
        return g.view(len(g), -1).view(g.shape)


def recomputed():
    convs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1))
    return Net(lambda m, x: checkpoint(m.convs, x, use_reentrant=False).mean(dim=(2, 3)), convs=convs)


def token_rows():
    """A layer that gets other numbers of rows than samples."""

    def forward(m, x):
        z = m.stem(x).flatten(2).transpose(1, 2)
        return m.head(torch.tanh(m.tokens(z.reshape(-1, 4))).view(*z.shape[:2], 6).mean(1))

    return Net(forward, stem=nn.Conv2d(3, 4, 3), tokens=nn.Linear(4, 6), head=nn.Linear(6, 3))


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.filterwarnings("ignore:this model's convolutions are left to torch")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(apply(lambda x: x.as_strided((len(x), 16), (x.stride(0), 1))), nn.Linear(16, 3)),
        recomputed,
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), apply(ViewsBackward.apply), nn.Conv2d(4, 3, 1), pool()),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=(1,)), pool()),
        lambda: nn.Sequential(nn.Conv2d(3, 1, 3), nn.ReLU(inplace=True), pool()),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 9, 3), pool()).to(memory_format=torch.channels_last),
        token_rows,
    ],
)
@pytest.mark.parametrize("size", [6, 12])
def test_models_that_products_do_not_suit(make, size):
    """The kernel is right."""
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(5, 3, size, size)
    torch.testing.assert_close(empirical_ntk(model, x), by_autograd(model, x), rtol=1e-3, atol=1e-4)
