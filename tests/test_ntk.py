"""The empirical tangent kernel against per-sample gradients by autograd and vmap(grad), on a zoo of modules."""

import subprocess
import sys
from collections import deque
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from io import BytesIO
from threading import Lock

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import stairwise as sw
from stairwise.checks import InputError
from stairwise.nets.encoder import build_encoder, build_network
from stairwise.ntk.capture import Capture, RulesChanged
from stairwise.ntk.compare import errors
from stairwise.ntk.empirical import PRECISIONS, empirical_ntk, ntk_error
from stairwise.ntk.factors import Contraction, Lookup, Outer, _by_pixels, _explicit, _ghost, _kernel, _product
from stairwise.ntk.guards import watched
from stairwise.ntk.predict import kernel_pca, predict_embeddings
from stairwise.ntk.products import ConvolutionsByProducts
from stairwise.ntk.rules import factors
from stairwise.ntk.windows import laid_in_rows, windows
from stairwise.paper.fig2ab import tangent_kernel
from stairwise.theory.spectra import chance_alignment, subspace_alignment
from tests.two_processes import run_two


def mean(outputs):
    return outputs.sum(dim=1) / outputs.shape[1] ** 0.5


def by_autograd(model, x, scalar=mean):
    """One backward pass a sample."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(x)):
        found = torch.autograd.grad(scalar(model(x[i : i + 1]))[0], parameters, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    torch.zeros_like(p).flatten() if g is None else g.to_dense().flatten()
                    for p, g in zip(parameters, found, strict=True)
                ]
            )
        )
    G = torch.stack(rows)
    return G @ G.T


def by_vmap(model, x, scalar=mean):
    chosen = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def one(parameters, sample):
        return scalar(functional_call(model, parameters, (sample.unsqueeze(0),)))[0]

    G = torch.cat([g.flatten(1) for g in vmap(grad(one), in_dims=(None, 0))(chosen, x).values()], dim=1)
    return G @ G.T


class Pool(nn.Module):
    def forward(self, x):
        return x.flatten(2).mean(dim=2)


class Scale(nn.Module):
    """A user's own module with parameters of its own."""

    def __init__(self, features):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.rand(features)), nn.Parameter(torch.rand(1))

    def forward(self, x):
        return torch.tanh(x * self.gain) + self.shift


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.norm(self.conv(x))
        out += x
        return self.relu(out)


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Tied(nn.Module):
    """An embedding whose table is also the readout, used by a function."""

    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(11, 5), nn.Linear(5, 5)

    def forward(self, x):
        return nn.functional.linear(self.mix(self.table(x)).mean(dim=1), self.table.weight)


class Shared(nn.Module):
    """Two modules with one parameter."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(torch.relu(self.b(torch.relu(self.a(x)))))


class Attention(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.batch_first = batch_first
        self.into, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.into(x))
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.out(x + self.attention(x, x, x, need_weights=False)[0])
        return x.mean(dim=1 if self.batch_first else 0)


class OneByOne(nn.Module):
    """Cannot be batched by vmap."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(6))

    def forward(self, x):
        return x * self.gain * (2.0 if float(x.sum()) > 0 else 1.0)


def frozen():
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    model[0].weight.requires_grad_(False)
    return model


def conv(*args, size=8, **options):
    return lambda: nn.Sequential(nn.Conv2d(*args, **options), nn.ReLU(), Pool(), nn.Linear(args[1], 3))


IMAGES, VECTORS, TOKENS, SERIES = (4, 8, 8), (6,), "tokens", (7, 5)
ZOO = {
    "linear": (lambda: nn.Linear(6, 3), VECTORS),
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3, bias=False)), VECTORS),
    "conv": (conv(4, 6, 3), IMAGES),
    "conv padded": (conv(4, 6, 3, padding=1), IMAGES),
    "conv same": (conv(4, 6, 3, padding="same", dilation=2), IMAGES),
    "conv reflecting": (conv(4, 6, 3, padding=2, padding_mode="reflect"), IMAGES),
    "conv circular": (conv(4, 6, 3, padding=(1, 2), padding_mode="circular"), IMAGES),
    "conv strided": (conv(4, 6, 3, stride=2, bias=False), IMAGES),
    "conv oblong": (conv(4, 6, (3, 2), stride=(2, 1), padding=(1, 0)), IMAGES),
    "conv dilated": (conv(4, 6, 3, dilation=2, padding=2), IMAGES),
    "conv grouped": (conv(4, 6, 3, groups=2), IMAGES),
    "conv depthwise": (conv(4, 8, 3, groups=4, padding=1), IMAGES),
    "conv 1 x 1": (conv(4, 6, 1), IMAGES),
    "conv 1 x 1 strided": (conv(4, 6, 1, stride=2), IMAGES),
    "conv whole": (conv(4, 6, 8), IMAGES),
    "conv 1-D": (lambda: nn.Sequential(nn.Conv1d(7, 6, 3, padding=1, stride=2), Pool(), nn.Linear(6, 2)), SERIES),
    "conv 1-D circular": (
        lambda: nn.Sequential(nn.Conv1d(7, 6, 3, padding=1, padding_mode="circular"), Pool()),
        SERIES,
    ),
    "conv 3-D": (lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 3, 2), Pool()), IMAGES),
    "conv transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 3, 3, stride=2), Pool()), IMAGES),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), Pool()), IMAGES),
    "batch norm 1-D": (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh()), VECTORS),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm([7, 5]), nn.Linear(5, 4), nn.LayerNorm(4), nn.Flatten()), SERIES),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 3), Pool()), IMAGES),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 3, 3), Pool()), IMAGES),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 5), nn.PReLU(5)), VECTORS),
    "sequence": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2), nn.Flatten()), SERIES),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 5, padding_idx=3), nn.Flatten(), nn.Linear(35, 2)), TOKENS),
    "embedding sparse": (lambda: nn.Sequential(nn.Embedding(11, 5, sparse=True), nn.Flatten()), TOKENS),
    "residual": (lambda: nn.Sequential(Residual(), Residual(), Pool()), IMAGES),
    "attention": (Attention, SERIES),
    "attention, samples second": (lambda: Attention(batch_first=False), SERIES),
    "user's": (lambda: nn.Sequential(nn.Linear(6, 5), Scale(5), nn.Linear(5, 2)), VECTORS),
    "called twice": (Twice, VECTORS),
    "tied": (Tied, TOKENS),
    "shared": (Shared, VECTORS),
    "frozen": (frozen, VECTORS),
    "resnet": (lambda: build_encoder("resnet18", {"stem": "small", "width": 4}), (3, 8, 8)),
    "resnet50": (lambda: build_encoder("resnet50", {"width": 2}), (3, 32, 32)),
}


def build(name, n=7):
    torch.manual_seed(1)
    make, shape = ZOO[name]
    model = make().double()
    with torch.no_grad():
        for module in model.modules():  # statistics and scales of a trained network
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                if module.affine:
                    module.weight.uniform_(0.5, 2)
    x = torch.randint(11, (n, 7)) if shape == TOKENS else torch.randn(n, *shape, dtype=torch.float64)
    return model.eval(), x


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ZOO)
def test_equals_per_sample_gradients(name):
    model, x = build(name)
    exact = by_autograd(model, x)
    K = empirical_ntk(model, x, precision="float64")
    torch.testing.assert_close(K, exact, rtol=1e-10, atol=1e-10 * float(exact.max()))
    assert torch.equal(K, K.T)
    assert float(torch.linalg.eigvalsh(K)[0]) > -1e-10 * float(K.max())
    if name not in ("tied", "embedding sparse"):
        torch.testing.assert_close(K, by_vmap(model, x), rtol=1e-10, atol=1e-10 * float(exact.max()))


@pytest.mark.parametrize("name", ["resnet", "attention", "embedding", "called twice", "conv grouped"])
def test_does_not_depend_on_tiles(name):
    model, x = build(name, n=11)
    whole = empirical_ntk(model, x, precision="float64")
    others = sum(8.0 * p.numel() for p in model.parameters())
    need = Capture(model, mean, x).sample_bytes + others
    for samples in (1, 3, 4):
        tiled = empirical_ntk(model, x, precision="float64", memory=samples * need * 4)
        assert tiled == pytest.approx(whole, rel=1e-11)
    cross = empirical_ntk(model, x[:4], x[4:], precision="float64", memory=need * 8)
    assert cross == pytest.approx(whole[:4, 4:], rel=1e-11)


def test_rules_are_used_where_they_hold():
    """Otherwise everything above would be a test of vmap."""
    for name, rules in (("tied", {"mix.weight", "mix.bias"}), ("called twice", {"out.weight", "out.bias"})):
        assert verified(*build(name)) == rules
    model, x = build("resnet")
    assert verified(model, x) == {name for name, _ in model.named_parameters()}
    assert "out.weight" not in verified(*build("attention, samples second"))
    assert "into.weight" in verified(*build("attention"))


class TwoNames(nn.Module):
    """One parameter under two names."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 4))
        self.v = self.w

    def forward(self, x):
        return torch.tanh(x @ self.w) @ self.v.T


def test_a_parameter_with_two_names():
    torch.manual_seed(0)
    model, x = TwoNames().double(), torch.randn(6, 5).double()
    torch.testing.assert_close(empirical_ntk(model, x), by_autograd(model, x))


def test_padding_that_was_changed_to_a_list():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Flatten()).double()
    model[0].padding = [0, 0]
    x = torch.randn(4, 2, 3, 3).double()
    torch.testing.assert_close(empirical_ntk(model, x, precision="float64"), by_autograd(model, x))


def test_the_model_is_left_as_it_was():
    """torch.func.functional_call puts weights of a module with two names back as plain tensors."""
    model = reused().eval()
    before = dict(model.named_parameters())
    empirical_ntk(model, torch.randn(4, 6))
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is p for name, p in before.items())


def verified(model, x):
    capture = Capture(model, mean, x)
    with suppress(RulesChanged):
        capture.factors(x)
    return capture.by_rule


class Deeper(nn.Module):
    """Calls a layer once more when some sample asks for it."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        if not torch._C._functorch.is_batchedtensor(x) and bool((x[:, 0] > 5).any()):
            h = torch.where(x[:, :1] > 5, torch.tanh(self.layer(h)), h)
        return self.out(h)


class Experts(nn.Module):
    """Sends samples to one of two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        out = x.new_zeros(len(x), 3)
        mask = x[:, 0] > 0
        out[mask] = self.a(x[mask])
        out[~mask] = self.b(x[~mask])
        return out


class TokensFirst(nn.Module):
    """Hands its layer (tokens, samples, features)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x.transpose(0, 1))[0]


def blank_first(x):
    return torch.cat([torch.zeros_like(x[:1]), x[1:]])


def reused():
    layer = nn.Linear(6, 6, bias=False)
    return nn.Sequential(layer, nn.ReLU(), layer)


def by_frequency():
    return nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Flatten())


def equal_to_autograd(model, x):
    K, exact = empirical_ntk(model, x, precision="float64"), by_autograd(model, x)
    torch.testing.assert_close(K, exact, rtol=1e-9, atol=1e-9)


def changed_padding():
    model = conv(4, 6, 3)()
    model[0].padding, model[0].dilation = (2, 2), (2, 2)  # as some segmentation networks are made
    return model


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (Twice, blank_first(torch.randn(6, 6))),
        (reused, blank_first(torch.randn(6, 6))),
        (Experts, torch.randn(9, 6)),
        (Experts, torch.randn(9, 6).abs()),
        (TokensFirst, torch.randn(3, 3, 5)),
        (TokensFirst, torch.randn(4, 3, 5)),
        (TokensFirst, torch.randn(7, 3, 5)),
        (changed_padding, torch.randn(5, 4, 8, 8)),
        (by_frequency, torch.arange(40).view(8, 5) % 9 // 2),
        (lambda: nn.Linear(6, 2), torch.randn(1, 6)),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 2)), torch.randn(5, 6)),
    ],
)
def test_what_the_trial_could_overlook(make, x):
    torch.manual_seed(0)
    model = make().double().eval()
    x = x.double() if x.is_floating_point() else x
    torch.testing.assert_close(
        empirical_ntk(model, x, precision="float64"), by_autograd(model, x), rtol=1e-9, atol=1e-9
    )


def test_samples_that_are_treated_in_another_way_than_those_of_the_trial():
    torch.manual_seed(0)
    model, x = Single(Deeper()).double(), torch.randn(8, 6, dtype=torch.float64)
    x[6, 0] = 9.0
    torch.testing.assert_close(
        empirical_ntk(model, x, precision="float64"), by_autograd(model, x), rtol=1e-9, atol=1e-9
    )


def test_one_position_against_many():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), Sum()).double()
    x, y = torch.randn(6, 1, 4).double(), torch.randn(7, 5, 4).double()

    def gradients(samples):
        parameters = list(model.parameters())
        each = [torch.autograd.grad(mean(model(one[None]))[0], parameters) for one in samples]
        return torch.stack([torch.cat([g.flatten() for g in gradient]) for gradient in each])

    K = empirical_ntk(model, x, y, precision="float64")
    torch.testing.assert_close(K, gradients(x) @ gradients(y).T)


class Sum(nn.Module):
    def forward(self, x):
        return x.sum(dim=1)


@pytest.fixture
def always_half(monkeypatch):
    """Float16 in small layers, too."""
    monkeypatch.setattr("stairwise.ntk.factors.SINGLE", 0)


@pytest.mark.usefixtures("always_half")
def test_large_images_stay_in_the_range_of_float16():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), Pool(), nn.Linear(2, 2))
    x = 3 + torch.rand(3, 1, 320, 320)
    exact = empirical_ntk(model, x)
    assert empirical_ntk(model, x, precision="float16") == pytest.approx(exact, rel=5e-3)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_models_of_low_precision(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)), 20 * torch.randn(6, 64)
    exact = empirical_ntk(model, x)
    K = empirical_ntk(model.to(kind), x.to(kind))
    assert K.dtype == torch.float32
    assert float((K - exact).abs().max() / exact.max()) < 0.05


def test_what_cannot_be_batched_is_done_one_by_one():
    model = nn.Sequential(OneByOne(), nn.Linear(6, 2)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    assert empirical_ntk(Single(model), x, precision="float64") == pytest.approx(
        by_autograd(Single(model), x), rel=1e-10
    )


class Single(nn.Module):
    """Runs its samples one at a time, so that a test on values in it sees one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.cat([self.inner(x[i : i + 1]) for i in range(len(x))])


@pytest.mark.usefixtures("always_half")
@pytest.mark.parametrize("positions", [1, 2, 9])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("slices", [1.0, 1e9])
def test_explicit_and_ghost_products_agree(positions, groups, slices):
    torch.manual_seed(0)
    how = Contraction(slice_bytes=slices)
    side = {1: 1, 2: 2, 9: 9}[positions]
    layers = nn.Conv1d(2 * groups, 4 * groups, 1, groups=groups).double()
    x, b = torch.randn(2, 6, 2 * groups, side).double(), torch.randn(2, 6, groups, 4, side).double()
    one, two = (Outer(layers, x[k], b[k]) for k in (0, 1))
    expected = one.gradients() @ two.gradients().T
    assert one.gram(two, how) == pytest.approx(expected, rel=1e-10)
    itself = one.gradients() @ one.gradients().T
    assert one.gram(None, how) == pytest.approx(itself, rel=1e-10)
    (mine, _), (theirs, _) = (factor.prepared(how, name) for factor, name in ((one, "one"), (two, "two")))
    assert _ghost(mine, theirs, how) == pytest.approx(expected, rel=1e-10)
    assert _ghost(mine, None, how) == pytest.approx(itself, rel=1e-10)
    in_parts = Outer.joined([Outer(layers, x[0, :2], b[0, :2]), Outer(layers, x[0, 2:], b[0, 2:])])
    torch.testing.assert_close(in_parts.gradients(), one.gradients())
    for factor in (one, in_parts):
        assert len(factor) == 6
        assert _explicit(factor, two, how) == pytest.approx(expected, rel=1e-10)
        assert _explicit(two, factor, how) == pytest.approx(expected.T, rel=1e-10)
        assert _explicit(factor, None, how) == pytest.approx(itself, rel=1e-10)
        assert factor.gram(two, how) == pytest.approx(expected, rel=1e-10)
        rounded = factor.gram(None, Contraction(half=True, slice_bytes=slices))
        torch.testing.assert_close(rounded.double(), itself, rtol=1e-2, atol=1e-2 * float(itself.max()))
        assert not torch.equal(rounded.double(), factor.gram(None, how))


def plain_convolution(kernel, stride, padding, dilation, n, kind):
    """Gradients of n samples; the second axis has options of its own."""
    torch.manual_seed(n)
    if kind is nn.Conv1d:
        layer, x = nn.Conv1d(3, 4, kernel, stride, padding, dilation), torch.randn(n, 3, 7)
    else:
        layer, x = nn.Conv2d(3, 4, (kernel, 2), (stride, 1), (padding, 1), (dilation, 1)), torch.randn(n, 3, 7, 5)
    b = torch.randn_like(layer(x)).flatten(2)[:, None]
    return Outer(layer.double(), x.double(), b.double())


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, 4])  # the last position may see nothing
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_products_of_pixels(kernel, stride, padding, dilation, kind, monkeypatch):
    one, two = (plain_convolution(kernel, stride, padding, dilation, n, kind) for n in (6, 4))
    mine, theirs = ((factor.x, factor.b) for factor in (one, two))
    for cache in (1, 1e6):  # rows one by one, or all
        monkeypatch.setattr("stairwise.ntk.factors.CACHE", cache)
        among = _by_pixels(_kernel(one), mine, None, Contraction())
        torch.testing.assert_close(among, one.gradients() @ one.gradients().T)
        between = _by_pixels(_kernel(one), mine, theirs, Contraction())
        torch.testing.assert_close(between, one.gradients() @ two.gradients().T)


@pytest.mark.parametrize(
    ("layer", "size", "way"),
    [
        (nn.Conv2d(128, 128, 3, padding=1), 4, "pixels"),
        (nn.Conv2d(512, 512, 3, padding=1), 1, "pixels"),
        (nn.Conv2d(16, 16, 3, padding=1), 4, "explicit"),
        (nn.Conv2d(128, 128, 3, padding=1), 16, "explicit"),
        (nn.Conv2d(128, 128, 3, padding=1, padding_mode="circular"), 4, "ghost"),
        (nn.Conv2d(128, 128, 3, padding="same"), 4, "ghost"),
        (nn.Conv2d(128, 128, 3, groups=2), 4, "ghost"),
        (nn.Conv2d(128, 128, 1), 1, "ghost"),
        (nn.Linear(300, 200), None, "ghost"),
    ],
)
def test_the_cheapest_way_is_taken(layer, size, way):
    """And all are right."""
    torch.manual_seed(0)
    x = torch.randn(12, layer.weight.shape[1] * getattr(layer, "groups", 1), *[] if size is None else (size, size))
    factor = factors(layer, x, torch.randn_like(layer(x)))["weight"]
    assert factor._cheapest(factor, True, Contraction()).name == way
    some = replace(factor, x=factor.x[:5], b=factor.b[:5])
    G = factor.gradients().double()
    K = G @ G.T
    for how, error in ((Contraction(), 1e-5), (Contraction(half=True), 1e-3)):
        for found, exact in ((factor.gram(None, how), K), (some.gram(factor, how), K[:5])):
            torch.testing.assert_close(found.double(), exact, rtol=0, atol=error * float(K.max()))


def test_small_layers_stay_in_single_precision():
    torch.manual_seed(0)
    for layer, x in ((nn.Conv2d(3, 8, 3), torch.randn(4, 3, 9, 9)), (nn.Linear(200, 90), torch.randn(4, 200))):
        out = layer(x)
        (factor,) = (f for name, f in factors(layer, x, torch.randn_like(out)).items() if name == "weight")
        assert torch.equal(factor.gram(None, Contraction(half=True)), factor.gram(None, Contraction()))


def test_lookup_counts_repeated_rows():
    index = torch.tensor([[0, 0, 2], [2, -1, 0]])
    factor = Lookup(index, torch.randn(2, 3, 4, dtype=torch.float64), 5)
    G = factor.gradients()
    assert factor.gram(None, Contraction()) == pytest.approx(G @ G.T, rel=1e-10)
    assert factor.gram(factor, Contraction()) == pytest.approx(G @ G.T, rel=1e-10)


def test_outputs():
    torch.manual_seed(0)
    net = build_network(
        build_encoder("mlp", {"inputs": 12, "widths": [40]}), torch.zeros(2, 3, 2, 2), [], 5, False, True
    )
    x = torch.randn(9, 3, 2, 2)

    class Z(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x)[1]

    # an independent statement of the trace kernel of a network with one hidden layer
    assert empirical_ntk(Z(), x, output="trace") == pytest.approx(
        torch.tensor(tangent_kernel(net, x)).float(), rel=1e-4
    )
    first = empirical_ntk(Z(), x, output=lambda z: z[:, 0], precision="float64")
    assert first == pytest.approx(by_autograd(Z().double(), x.double(), lambda z: z[:, 0]), rel=1e-10)


@pytest.mark.usefixtures("always_half")
@pytest.mark.parametrize(
    ("precision", "error"), [("float64", 1e-12), ("float32", 1e-5), ("tf32", 1e-5), ("float16", 3e-4)]
)
def test_precision(precision, error):
    model, x = build("resnet", n=12)
    model, x = model.float(), x.float()
    K = empirical_ntk(model, x, precision=precision)
    assert ntk_error(model, x, K, 12) < error
    assert precision in PRECISIONS
    assert next(model.parameters()).dtype == torch.float32


def test_predicted_embeddings_of_a_linear_model_are_the_trained_ones():
    """Gradient flow of the linear model ends in the span that its kernel predicts."""
    rng = np.random.default_rng(0)
    shared = rng.standard_normal((60, 12)) * np.linspace(1.5, 0.3, 12)
    x_a, x_b = (shared + 0.3 * rng.standard_normal((60, 12)) for _ in "ab")
    corr = sw.Correlation.from_pairs(x_a, x_b)
    run = sw.gradient_flow(sw.gaussian_init(3, 12, 1e-5, seed=0), corr, np.linspace(0, 40, 50), weights=True)
    both = np.concatenate([x_a, x_b])
    net = nn.Linear(12, 3, bias=False).double()
    K = empirical_ntk(net, torch.tensor(both), precision="float64")
    F = predict_embeddings(K, 3)
    assert subspace_alignment(F, both @ run.weights[-1].T) > 0.999
    n = len(x_a)
    assert (F[:n].T @ F[n:] + F[n:].T @ F[:n]) / (2 * n) == pytest.approx(np.eye(3), abs=1e-8)
    assert subspace_alignment(kernel_pca(K, 3), F) < 0.9995  # nearly the same here: noise is isotropic


def test_alignment():
    rng = np.random.default_rng(0)
    F = rng.standard_normal((200, 5))
    assert subspace_alignment(F, F @ rng.standard_normal((5, 5))) == pytest.approx(1)
    mean_, spread = chance_alignment(200, 5)
    assert mean_ == pytest.approx(5 / 200, rel=0.1)
    assert 0 < spread < mean_
    Q = np.linalg.qr(rng.standard_normal((200, 10)))[0]
    assert subspace_alignment(Q[:, :5], Q[:, 5:]) < 1e-20
    assert subspace_alignment(Q[:, :5], Q[:, :8]) == pytest.approx(1)
    for bad, says in (
        ((F, F[:5]), "same points"),
        ((F * np.nan, F), "finite"),
        ((F * 0, F), "zero"),
        ((F[:3], F), "points"),
    ):
        with pytest.raises(InputError, match=says):
            subspace_alignment(*bad)


def test_channels_last_images():
    model, x = build("resnet")
    last = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(empirical_ntk(model, last, precision="float64"), empirical_ntk(model, x, precision="float64"))


@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 1), (3, 3)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (2, 1), (3, 3)])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (2, 3), (5, 5)])
@pytest.mark.parametrize("size", [(7, 6), (9, 11)])
@pytest.mark.parametrize("out", [2, 5])  # fewer channels than there are, or more
def test_convolutions_by_products(size, kernel, stride, padding, out):
    torch.manual_seed(0)
    x = torch.randn(4, 3, *size, requires_grad=True)
    weight, bias = torch.randn(out, 3, *kernel, requires_grad=True), torch.randn(out)
    with ConvolutionsByProducts():
        found = F.conv2d(x, weight, bias, stride, padding, (1, 1), 1)
    wanted = F.conv2d(x, weight, bias, stride, padding)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    b = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(y, x, b)[0] for y in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [3, 4, 8, 16])  # copied one by one, or in words of 16 bytes
@pytest.mark.parametrize(("stride", "dilation"), [((1, 1), (1, 1)), ((2, 1), (1, 2))])
@pytest.mark.parametrize("given", [False, True])
def test_windows_of_channels_last_images_in_rows(kind, channels, stride, dilation, given):
    torch.manual_seed(0)
    x = torch.randn(3, channels, 7, 6).to(kind).contiguous(memory_format=torch.channels_last)[1:]
    seen = windows(x, (3, 2), stride, dilation)
    rows = laid_in_rows(seen, torch.empty(seen.numel(), dtype=kind) if given else None)
    assert rows.is_contiguous()
    assert torch.equal(rows.permute(0, 3, 6, 4, 5, 1, 2), seen)
    unfolded = F.unfold(x.double(), (3, 2), dilation, 0, stride).view(2, channels, 3, 2, -1)
    assert torch.equal(seen[:, 0].flatten(4).double(), unfolded)


@pytest.mark.parametrize("options", [{"groups": 3}, {"dilation": 2}, {"padding": "same"}, {"padding_mode": "circular"}])
def test_other_convolutions_are_left_alone(options):
    layer, x = nn.Conv2d(3, 6, 3, **{"padding": 1, **options}), torch.randn(2, 3, 6, 6)
    with ConvolutionsByProducts():
        found = layer(x)
    torch.testing.assert_close(found, layer(x))


class Viewing(nn.Module):
    """Cannot take channels-last images."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        out = self.conv(x)
        return out.view(len(out), 2, -1).sum(dim=2)


def steered(x):
    """The weights of the second convolution come from the first, so that there are two ways for gradients."""
    weight = torch.linspace(-1, 1, 12).view(4, 3, 1, 1).requires_grad_()
    h = torch.conv2d(x, weight, None, (1, 1), (0, 0), (1, 1), 1)
    weight = h[:1].mean(dim=(2, 3)).view(4, 1, 1, 1).expand(4, 4, 1, 1)
    return torch.conv2d(h, weight, None, (1, 1), (0, 0), (1, 1), 1).sum()


def test_weights_that_are_computed_pass_gradients_on():
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4, 4, requires_grad=True)
    with ConvolutionsByProducts():
        found = torch.autograd.grad(steered(x), x)
    torch.testing.assert_close(found, torch.autograd.grad(steered(x), x))


def rectified():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 1), nn.ReLU(inplace=True), Pool())


@pytest.mark.usefixtures("always_half")
@pytest.mark.parametrize("size", [9, 16])  # few positions, and so many that cuDNN would be better
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("make", "taken"),
    [
        (rectified, True),
        (lambda: build_encoder("resnet18", {"stem": "small", "width": 4}), True),
        (lambda: build_encoder("resnet50", {"width": 4}), True),
        (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.GroupNorm(2, 6), nn.Conv2d(6, 4, 3, 2), Pool()), True),
        (Viewing, False),
    ],
)
def test_passes_by_products(make, taken, half, size):
    """The same gradients, and inner products, from images in the other layout."""
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(6, 3, size, size)
    plain, by_products = Capture(model, mean, x), Capture(model, mean, x, by_products=True)
    with nullcontext() if taken else pytest.warns(RuntimeWarning, match="left to torch, which is slower: view size"):
        one, other = plain.factors(x), by_products.factors(x)
    assert by_products.by_products is taken
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):  # the layout is kept throughout
        outer = [f for f in other.values() if isinstance(f, Outer) and f.x[0, 0].numel() > 1]
        assert all(f.x.stride(1) == f.b.stride(2) == 1 for f in outer)
    assert one.keys() == other.keys() == {name for name, _ in model.named_parameters()}
    for name, factor in one.items():
        torch.testing.assert_close(other[name].gradients(), factor.gradients(), rtol=1e-3, atol=1e-4)
        grams = [f.gram(None, Contraction(half, 1e4)) for f in (other[name], factor)]
        torch.testing.assert_close(*grams, rtol=1e-2 if half else 1e-3, atol=float(grams[1].max()) * 1e-3 + 1e-9)
        mixed = other[name].gram(factor, Contraction(half, 1e4))
        torch.testing.assert_close(mixed, grams[1], rtol=1e-2 if half else 1e-3, atol=float(mixed.max()) * 1e-3 + 1e-9)
        twice = factor.joined([factor, other[name]]).gram(None, Contraction(half, 1e4))
        tolerance = {"rtol": 1e-2 if half else 1e-3, "atol": float(mixed.max()) * 1e-3 + 1e-9}
        torch.testing.assert_close(twice, grams[1].repeat(2, 2), **tolerance)


class Border(torch.autograd.Function):
    """A pool whose gradient is wrong at the borders of channels-last images, as torch 2.13's are on a GPU."""

    @staticmethod
    def forward(ctx, x, stride):
        ctx.stride, ctx.size = stride, x.shape
        ctx.wrong = not x.is_contiguous()
        return F.avg_pool2d(x, 3, stride, 1)

    @staticmethod
    def backward(ctx, g):
        x = g.new_zeros(ctx.size, requires_grad=True)
        with torch.enable_grad():
            out = F.avg_pool2d(x, 3, ctx.stride, 1)
        (right,) = torch.autograd.grad(out, x, g.contiguous())
        if ctx.wrong:
            right = right.clone()
            right[:, :, 0], right[:, :, :, 0] = 0, 0
            right = right.contiguous(memory_format=torch.channels_last)
        return right, None


class WrongPool(nn.Module):
    def __init__(self, stride):
        super().__init__()
        self.stride = stride

    def forward(self, x):
        return Border.apply(x, self.stride)


@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_that_are_a_little_wrong_in_the_other_layout_are_noticed(stride, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), WrongPool(stride), nn.Conv2d(8, 4, 1), Pool()).eval()
    x = torch.randn(5, 3, 20, 20)
    monkeypatch.setattr("stairwise.ntk.empirical.Capture", lambda *args, **_: Capture(*args[:3], by_products=True))
    with pytest.warns(RuntimeWarning, match="left to torch, which is slower: as products they give other gradients"):
        K = empirical_ntk(model, x)
    torch.testing.assert_close(K, by_autograd(model, x), rtol=1e-4, atol=1e-5)


def test_a_unit_that_rounding_turns_on_does_not_look_wrong():
    """Gradients of one of two samples may jump; if those of both do, it is not rounding."""
    torch.manual_seed(0)
    model, x = rectified().eval(), torch.randn(6, 3, 9, 9)
    capture = Capture(model, mean, x, by_products=True)
    alone, b, _ = capture._tried(x[:2])
    calls = alone.calls
    assert capture._products_agree(x[:2], calls, b)
    for rows, agree in ((slice(1), True), (slice(2), False)):
        jumped = [g.clone() for g in b]
        jumped[0][rows] *= 1.2
        assert capture._products_agree(x[:2], calls, jumped) == agree
    jumped = [g.clone() for g in b]
    jumped[0][0] *= 3  # too far for one unit
    assert not capture._products_agree(x[:2], calls, jumped)
    moved = [(name, given * 1.1) for name, given in calls]
    assert not capture._products_agree(x[:2], moved, b)


def test_rules_are_tried_once_and_after_the_graph_is_gone(monkeypatch):
    """While it lives, torch would make gradients of the trial wait for its stream."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(150, 6)
    seen = []
    passes, tried = Capture._passes, Capture._tried

    def tag(self, x):
        found = passes(self, x)
        node = torch.autograd.graph.get_gradient_edge(model[0].weight).node
        seen.append("kept" if "tag" in node.metadata else "gone")
        return found

    def marked(self, x):
        out = forward(self, x)
        torch.autograd.graph.get_gradient_edge(model[0].weight).node.metadata["tag"] = True
        return out

    forward = Capture._forward
    monkeypatch.setattr(Capture, "_forward", marked)
    monkeypatch.setattr(Capture, "_passes", tag)
    monkeypatch.setattr(Capture, "_tried", lambda self, trial: (seen.append("tried"), tried(self, trial))[1])
    empirical_ntk(model, x, memory=2e5)
    assert seen.count("tried") == 1
    assert seen.count("gone") > 2
    assert "kept" not in seen


class Strided(nn.Module):
    """Takes its images apart by their place in memory."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def forward(self, x):
        return self.layer(x.as_strided((len(x), 16), (x.stride(0), 1)))


class ViewsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone(memory_format=torch.preserve_format)

    @staticmethod
    def backward(ctx, g):
        return g.view(len(g), -1).view(g.shape)


class Recomputed(nn.Module):
    """Checkpointed, or with a function of its own."""

    def __init__(self, own):
        super().__init__()
        self.convs, self.own = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1)), own

    def forward(self, x):
        if self.own:
            return self.convs[2](ViewsBackward.apply(self.convs[0](x))).mean(dim=(2, 3))
        return checkpoint(self.convs, x, use_reentrant=False).mean(dim=(2, 3))


@pytest.mark.filterwarnings("ignore:this model's convolutions are left to torch")
@pytest.mark.parametrize(
    "make",
    [
        Strided,
        lambda: Recomputed(own=False),
        lambda: Recomputed(own=True),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=(1,)), Pool()),
        lambda: nn.Sequential(nn.Conv2d(3, 1, 3), nn.ReLU(inplace=True), Pool()),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 9, 3), Pool()).to(memory_format=torch.channels_last),
    ],
)
@pytest.mark.parametrize("size", [6, 12])
def test_models_that_products_do_not_suit(make, size, monkeypatch):
    """Found out, and the kernel is right."""
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(5, 3, size, size)

    def by_products(model, scalar, trial, by_products):
        return Capture(model, scalar, trial, by_products=True)

    monkeypatch.setattr("stairwise.ntk.empirical.Capture", by_products)
    torch.testing.assert_close(empirical_ntk(model, x), by_autograd(model, x), rtol=1e-3, atol=1e-4)


def test_rules_that_give_no_numbers_are_not_right():
    found, whole = torch.tensor([[torch.nan, 0.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0])
    off, size = errors([found], [whole], 0)[0].tolist()
    assert np.isnan(off)
    assert size == 1
    assert not off <= size


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_of_far_means(layout):
    """Differences are taken before sums."""
    torch.manual_seed(0)
    model = nn.BatchNorm2d(3).eval()
    model.running_mean += 1e4
    x = (1e4 + torch.randn(5, 3, 6, 6)).contiguous(memory_format=layout)
    b = torch.randn(5, 3, 6, 6).contiguous(memory_format=layout)
    (exact,) = (f.values for name, f in factors(model.double(), x.double(), b.double()).items() if name == "weight")
    (found,) = (f.values for name, f in factors(model.float(), x, b).items() if name == "weight")
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]


@pytest.mark.parametrize("anomalies", [False, True])
@pytest.mark.parametrize("sample", [5, 69])  # not of the trial; not in the first piece
@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 2), lambda: Scaled(6), lambda: Twice()])
def test_outputs_that_are_not_finite(make, sample, anomalies):
    x = torch.randn(70, 6)
    x[sample, 0] = torch.nan
    with torch.autograd.set_detect_anomaly(anomalies), pytest.raises(InputError, match="output must be finite"):
        empirical_ntk(make(), x)


class Strict(torch.autograd.Function):
    """Looks at what is finite on the way back."""

    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, g):
        if torch.isnan(g).any():
            raise ValueError("not a number")
        return g


@pytest.mark.parametrize("anomalies", [False, True])
@pytest.mark.parametrize("sample", [7, 9, 19])  # two of them are tried alone
@pytest.mark.parametrize(
    "function",
    [
        lambda z: z - z.mean(0),
        lambda z: z + torch.randn_like(z),
        lambda z: Strict.apply(z).sqrt(),
        lambda z: 1 / F.relu(z),
    ],
)
def test_outputs_that_are_not_finite_are_named_first(function, sample, anomalies):
    """Whatever else is wrong, or comes of it."""
    torch.manual_seed(0)
    x = torch.rand(20, 6)
    x[sample] = torch.nan
    for model in (Of(function), nn.Sequential(Scaled(6), Apply(function))):
        with torch.autograd.set_detect_anomaly(anomalies), pytest.raises(InputError, match="output must be finite"):
            empirical_ntk(model, x)


class Scaled(nn.Module):
    """No rule."""

    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return torch.tanh(self.scale * x)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


def test_products_of_float16_without_mixed_ones(monkeypatch):
    x = torch.rand(3, 50).half()
    monkeypatch.setattr("stairwise.ntk.factors.MIXED", False)
    torch.testing.assert_close(_product(x, x, Contraction(True)).double(), x.double() @ x.double().T, rtol=1e-5, atol=0)


class Sorted(nn.Module):
    """Its first layer sees samples in another order; by expert, or by number."""

    def __init__(self, experts):
        super().__init__()
        self.first, self.last, self.experts = nn.Linear(5, 6), nn.Linear(6, 3), experts

    def forward(self, x):
        key = (x[:, 0] > 0).long() if self.experts else x[:, 0]
        order = key.argsort(stable=True)
        return self.last(torch.tanh(self.first(x[order]))[order.argsort()])


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_samples_in_another_order(experts, seed):
    torch.manual_seed(seed)
    model, x = Sorted(experts).double(), torch.randn(20, 5).double()
    torch.testing.assert_close(empirical_ntk(model, x), by_autograd(model, x))


class OldFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Awkward(nn.Module):
    """What torch.func cannot do, between two layers and a free scalar parameter."""

    def __init__(self, what):
        super().__init__()
        self.first, self.last, self.gain = nn.Linear(5, 6), nn.Linear(6, 3), nn.Parameter(torch.tensor(0.7))
        self.unused, self.what, self.kept = nn.Parameter(torch.ones(2)), what, None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        h = torch.tanh(self.first(x)) * self.gain
        if self.what == "function":
            h = OldFunction.apply(h)
        elif self.what == "checkpoint":
            h = checkpoint(torch.sin, h, use_reentrant=False)
        elif self.what == "count":
            self.calls += 1
        elif self.what == "reassign":
            self.calls = self.calls + h.detach().mean()
            self.kept = h
        elif self.what == "numpy":
            h = h * float(x.numpy().shape[1])
        elif self.what == "energy":
            inner = h.detach().requires_grad_()
            h = h * torch.autograd.grad((inner**3).sum(), inner)[0]
        elif self.what == "force":
            (h,) = torch.autograd.grad((h**3).sum(), h, create_graph=True)
        return self.last(h)


@pytest.mark.parametrize("what", ["plain", "function", "checkpoint", "count", "reassign", "numpy", "energy", "force"])
def test_models_that_torch_func_cannot_take(what):
    """As by autograd, and the model is as before."""
    torch.manual_seed(0)
    model, x = Awkward(what).double().eval(), torch.randn(9, 5).double()
    expected = by_autograd(model, x)
    model.calls = torch.zeros(()).double()
    model.kept, calls = None, model.calls
    for _ in range(2):
        torch.testing.assert_close(empirical_ntk(model, x), expected)
        assert model.calls is calls
        assert float(calls) == 0
        assert model.kept is None
    model(x)
    torch.save(model.state_dict(), BytesIO())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_models():
    torch.manual_seed(0)
    inner, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(6, 5).double()
    torch.testing.assert_close(empirical_ntk(torch.jit.script(inner), x), by_autograd(inner, x))


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_modes_of_the_caller_do_not_matter(mode, precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3))
    with mode():
        x = torch.randn(8, 5)
        K = empirical_ntk(model, x, precision=precision)
    torch.testing.assert_close(K, by_autograd(model, x.clone()).to(K), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("set_up", ["matmul.fp32", "all", "cudnn", "conv", "medium", "legacy", "nothing"])
def test_settings_of_torch_are_as_before(set_up):
    """In a process of its own: torch's old and new settings do not mix."""
    code = f"""
import torch
from stairwise.ntk.empirical import empirical_ntk
from stairwise.ntk.guards import products_in
backends = torch.backends
new = hasattr(backends.cuda.matmul, "fp32_precision")
name = {set_up!r}
if name == "matmul.fp32" and new: backends.cuda.matmul.fp32_precision = "tf32"
if name == "all" and new: backends.fp32_precision = "tf32"
if name == "cudnn" and new: backends.cudnn.fp32_precision = "tf32"
if name == "conv" and new: backends.cudnn.conv.fp32_precision = "ieee"
if name == "medium": torch.set_float32_matmul_precision("medium")
if name == "legacy": backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = True, False
def state():
    calls = [lambda: backends.cuda.matmul.allow_tf32, lambda: backends.cudnn.allow_tf32]
    calls += [torch.get_float32_matmul_precision]
    if new: calls += [lambda: backends.cuda.matmul.fp32_precision, lambda: backends.cudnn.conv.fp32_precision]
    if new: calls += [lambda: backends.cudnn.rnn.fp32_precision, lambda: backends.mkldnn.matmul.fp32_precision]
    found = []
    for call in calls:
        try: found.append(call())
        except RuntimeError: found.append("mixed")
    return found
before = state()
with products_in("float32"):
    inside = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul] if new else []
    assert not {{place.fp32_precision for place in inside}} & {{"tf32", "bf16"}}
for precision in ("float32", "tf32"):
    empirical_ntk(torch.nn.Linear(3, 2), torch.randn(4, 3), precision=precision)
assert state() == before, (before, state())
try:
    with products_in("tf32"): raise KeyError
except KeyError: pass
assert state() == before
if name == "all" and new:  # what was not set still follows
    backends.fp32_precision = "ieee"
    assert backends.cuda.matmul.fp32_precision == "ieee"
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(6, 20), function

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda z: z - z.mean(0), "one by one"),
        (lambda z: z.softmax(0), "one by one"),
        (lambda z: z / z.norm(), "one by one"),
        (lambda z: F.batch_norm(z, None, None, training=True), "one by one"),
        (lambda z: z @ z.detach().T, "one by one"),
        (lambda z: z / (len(z) - 2), "one by one"),  # not finite alone
        (lambda z: F.dropout(z, 0.5, True), "same outputs twice"),
        (lambda z: z + torch.randn_like(z), "same outputs twice"),
    ],
)
def test_models_that_have_no_gradient_a_sample(function, says):
    torch.manual_seed(0)
    for model, size in ((Of(function), 6), (nn.Sequential(Scaled(20), Apply(function)), 20)):  # with rules and without
        with pytest.raises(InputError, match=says):
            empirical_ntk(model, torch.randn(30, size))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_a_model_less_itself_is_no_random_one():
    """Outputs that are rounding and nothing else."""
    torch.manual_seed(0)
    now = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), Pool())
    then = deepcopy(now).requires_grad_(False)

    class Less(nn.Module):
        def __init__(self):
            super().__init__()
            self.now, self.then = now, then

        def forward(self, x):
            return self.now(x) - self.then(x)

    x = torch.randn(70, 3, 9, 9)
    torch.testing.assert_close(empirical_ntk(Less(), x), empirical_ntk(now, x), rtol=1e-4, atol=1e-5)


class Caching(nn.Module):
    """Keeps things in its forward pass: a table with its length, a list, a tensor that is written to."""

    def __init__(self):
        super().__init__()
        self.layer, self.n, self.cos, self.seen = nn.Linear(8, 3), None, None, []
        self.total, self.gain = torch.zeros(3), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mask", torch.ones(1, 3).expand(4, 3))
        self.register_buffer("queue", torch.zeros(0))

    def forward(self, x):
        if self.n != x.shape[1]:
            self.n = x.shape[1]
            self.cos = torch.cos(torch.arange(self.n) * 1.0)
        out = self.layer(x * self.cos) * self.gain * self.mask[:1]
        self.seen.append(len(x))
        self.total += 1
        self.queue.resize_(len(x))
        return out


class Rows(nn.Module):
    """Layers that are given other numbers of rows: tokens of all samples, and a table."""

    def __init__(self, images):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3) if images else nn.Identity()
        self.tokens, self.positions, self.head = nn.Linear(4, 6), nn.Linear(2, 6), nn.Linear(6, 3)
        self.register_buffer("table", torch.randn(7, 2))

    def forward(self, x):
        z = self.stem(x)
        z = z.flatten(2).transpose(1, 2) if z.ndim == 4 else z
        tokens = torch.tanh(self.tokens(z.reshape(-1, 4))).view(*z.shape[:2], 6)
        return self.head(torch.tanh(tokens + self.positions(self.table).mean(0)).mean(1))


@pytest.mark.parametrize("n", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("length", [1, 2, 4, 7, None])
def test_layers_that_are_given_other_numbers_of_rows(n, length, monkeypatch):
    monkeypatch.setattr(
        "stairwise.ntk.empirical.Capture",
        lambda model, scalar, x, by_products: Capture(model, scalar, x, length is None),
    )
    torch.manual_seed(0)
    model, x = Rows(length is None), torch.randn(n, 3, 5, 5) if length is None else torch.randn(n, length, 4)
    torch.testing.assert_close(empirical_ntk(model, x), by_autograd(model, x), rtol=1e-4, atol=1e-5)
    if length is not None and length > 1:
        assert verified(model, x) == {"head.weight", "head.bias"}


def again(module):
    module.last = None
    module.last = torch.ones(3)


def refilled(module):
    module.things.clear()
    module.things.append(torch.ones(3))


def rekeyed(module):
    module.things = {"b": 1, "a": 2}


def containing_itself():
    things = []
    things.append(things)
    return things


@pytest.mark.parametrize(
    ("before", "write", "noticed"),
    [
        (None, lambda module: module(torch.ones(2, 3)), False),
        (lambda module: setattr(module, "act", F.relu), lambda module: module(torch.ones(2, 3)), False),
        (None, lambda module: setattr(module, "last", torch.ones(3)), True),
        (lambda module: setattr(module, "last", torch.ones(3)), again, True),
        (lambda module: setattr(module, "things", [torch.ones(3)]), refilled, True),
        (
            lambda module: setattr(module, "things", {"a": ({},)}),
            lambda module: module.things["a"][0].update(b=1),
            True,
        ),
        (lambda module: setattr(module, "things", deque()), lambda module: module.things.append(1), True),
        (lambda module: setattr(module, "things", {"a": 1, "b": 2}), rekeyed, True),
        (lambda module: setattr(module, "things", containing_itself()), lambda module: None, True),  # it may
        (lambda module: setattr(module, "things", [[0.5] * 1000] * 1000), lambda module: None, True),
        (lambda module: setattr(module, "count", 1), lambda module: setattr(module, "count", 2), True),
        (lambda module: module.register_buffer("sums", torch.ones(3)), lambda module: module.sums.add_(1), True),
        (None, lambda module: module.weight.add_(1), True),
    ],
)
def test_what_a_model_keeps_is_noticed(before, write, noticed):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    if before is not None:
        before(model[0])
    changed = watched(model)
    with torch.no_grad():
        write(model[0])
    assert changed() is noticed


def test_what_a_model_keeps_is_as_before():
    model, x = Caching(), torch.randn(9, 8)
    loss = model(x).sum()
    state = model.n, model.cos, list(model.seen), model.total.clone(), len(model.queue)
    empirical_ntk(model, x)
    assert (model.n, model.seen, len(model.queue)) == (state[0], state[2], state[4])
    assert model.cos is state[1]
    assert torch.equal(model.total, state[3])
    loss.backward()  # its graph has not been written to
    model(x)
    fresh = Caching()
    empirical_ntk(fresh, x)
    assert (fresh.n, fresh.cos, fresh.seen) == (None, None, [])
    fresh(x)


def test_samples_that_are_sorted_later():
    """Not in the first piece, and in y but not in x."""
    torch.manual_seed(0)
    model, x = Sorted(True).double(), torch.randn(130, 5).double()
    x[:64, 0] = -x[:64, 0].abs()
    exact = by_autograd(model, x)
    torch.testing.assert_close(empirical_ntk(model, x), exact)
    torch.testing.assert_close(empirical_ntk(model, x[:40], x[64:100]), exact[:40, 64:100])


def test_weights_that_a_model_has_stored_elsewhere():
    """torch.func would not see them."""
    torch.manual_seed(0)
    first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
    model, x = nn.Sequential(first, nn.ReLU(), nn.Linear(16, 2)).double().eval(), torch.randn(9, 8).double()
    exact = by_autograd(model, x)
    with nn.utils.parametrize.cached():
        torch.testing.assert_close(empirical_ntk(model, x), exact)


def test_lazy_modules():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2)).eval()
    x = torch.randn(6, 8)
    torch.testing.assert_close(empirical_ntk(model, x), by_autograd(model, x), rtol=1e-4, atol=1e-5)


class Odd(nn.Module):
    """A parameter without elements, and a table that is asked for one row."""

    def __init__(self):
        super().__init__()
        self.layer, self.table, self.none = nn.Linear(6, 3), nn.Embedding(4, 6), nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.layer(x * self.table(torch.tensor(2)))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_empty_parameters_and_single_rows_of_tables(precision):
    torch.manual_seed(0)
    model, x = Odd(), torch.randn(9, 6)
    found = empirical_ntk(model, x, precision=precision)
    torch.testing.assert_close(found.float(), by_autograd(model, x), rtol=1e-2, atol=1e-2)


def test_constants_are_not_memory_of_samples():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 512), nn.utils.parametrizations.weight_norm(nn.Linear(512, 512))
            self.register_buffer("R", torch.randn(512, 512))

        def forward(self, x):
            return self.last(torch.relu(self.first(x) @ self.R))

    assert Capture(Features(), mean, torch.randn(9, 8)).sample_bytes < 1e5


@pytest.mark.parametrize("integers", [False, True])
def test_statistics_of_the_batch_that_are_detached(integers):
    torch.manual_seed(0)
    x = torch.randint(0, 9, (60, 6)) if integers else torch.randn(60, 6)
    with pytest.raises(InputError, match="one by one"):
        empirical_ntk(nn.Sequential(Apply(lambda x: x.float() - x.float().mean(0).detach()), nn.Linear(6, 3)), x)


def test_models_that_do_not_take_samples_with_gradients():
    def picky(x):
        assert not x.requires_grad
        return x

    x = torch.randn(5, 6)
    torch.testing.assert_close(empirical_ntk(nn.Sequential(Apply(picky), nn.Linear(6, 3)), x), x @ x.T + 1)


def test_memory_counts_what_is_kept_between_layers():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            h = self.layer(x)[:, :, None, None] * torch.ones(4, 50, 50)
            return h.tanh().exp().tanh().sum(dim=(2, 3))

    capture = Capture(Wide(), mean, torch.randn(5, 4))
    assert capture.sample_bytes >= 3 * 4 * 2500 * 4  # each step keeps its own


def test_progress_counts_outputs_of_the_trace():
    seen = []
    empirical_ntk(nn.Linear(4, 3), torch.randn(5, 4), output="trace", progress=lambda *done: seen.append(done))
    assert seen == [(1, 3), (2, 3), (3, 3)]


class Locked(nn.Linear):
    def __init__(self):
        super().__init__(6, 2)
        self.lock = Lock()


def test_bad_input():
    x = torch.randn(4, 6)
    net = nn.Linear(6, 2)
    for model, given, options, says in (
        (nn.Sequential(net, nn.BatchNorm1d(2)), x, {}, "evaluation mode: in training mode batch norm mixes"),
        (nn.Sequential(net, nn.Dropout(0.1)), x, {}, "dropout"),
        (Dropping(), x, {}, "dropout"),
        (nn.Sequential(net, nn.BatchNorm1d(2, track_running_stats=False)).eval(), x, {}, "running statistics"),
        (nn.Unflatten(1, (2, 3)), x, {}, "trainable parameters"),
        (nn.Sequential(net, nn.Unflatten(1, (2, 1))), x, {}, "2-D"),
        (net, x * float("nan"), {}, "finite"),
        (net, x[:0], {}, "samples"),
        (net, x, {"y": x[:0]}, "samples"),
        (net, x, {"precision": "float8"}, "precision"),
        (net, x, {"output": "sum"}, "output"),
        (net, x, {"output": lambda z: z}, "one number a sample"),
        (net, x, {"memory": 10.0}, "must be at least .* bytes"),
        (net, x, {"memory": "1GB"}, "memory must be a number"),
        (net, x, {"memory": 0}, "memory must be greater than 0"),
        (net, x.numpy(), {}, "x must be a tensor"),
        (net, [x], {}, "x must be a tensor"),
        (net, x, {"y": x.numpy()}, "y must be a tensor"),
        (net, x, {"y": x.double()}, "y must be like x"),
        (torch.relu, x, {}, "torch module"),
        (net, x, {"output": None}, "a function of the outputs"),
        (net, x, {"output": lambda z: None}, "one number a sample"),
        (net, x, {"output": lambda z: z[:, 0].detach()}, "can be differentiated"),
        (Locked(), x, {"precision": "float64"}, "possible to copy"),
    ):
        with pytest.raises(InputError, match=says):
            empirical_ntk(model, given, **options)
    frozen_net = nn.Linear(6, 2).requires_grad_(False)
    with pytest.raises(InputError, match="trainable"):
        empirical_ntk(frozen_net, x)
    for K, d, says in (
        (np.eye(5), 2, "two rows a pair"),
        (np.ones((4, 2)), 2, "square"),
        (np.eye(4) * np.nan, 1, "finite"),
        (np.triu(np.ones((4, 4))), 1, "K must be symmetric"),
        (np.zeros((4, 4)), 1, "K must not be zero"),
        (np.eye(4), 5, "d must be at most 4"),
        (np.zeros((0, 0)), 1, "not empty"),
        (np.ones((6, 6), dtype=np.float32), 3, "d must be at most 1: .* lower d to 1, or compute K in float64"),
        (np.ones((6, 6)), 3, "d must be at most 1: .* lower d to 1$"),
    ):
        with pytest.raises(InputError, match=says):
            predict_embeddings(K, d)
    with pytest.raises(InputError, match="between 1 and 4"):
        kernel_pca(np.eye(4), 5)


def test_tensors_of_any_kind_are_compared():
    torch.manual_seed(0)
    z = torch.randn(8, 3, requires_grad=True)
    assert subspace_alignment(z, z.detach().bfloat16()) == pytest.approx(1, abs=1e-4)
    K = torch.eye(8).bfloat16()
    assert predict_embeddings((K + K.T).float(), 1).shape == predict_embeddings(K + K.T, 1).shape == (8, 1)


def network_and_images(twice):
    """A network; or one with a layer that is used twice, which only the run itself finds out."""
    torch.manual_seed(0)
    layer = nn.Linear(48, 48)
    more = (layer, nn.Tanh(), layer) if twice else (layer,)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), *more, nn.Linear(48, 4))
    return model.double().eval(), torch.randn(23, 2, 6, 6).double()


TWO = """
import os, sys, torch, torch.distributed as dist
from stairwise.ntk.empirical import empirical_ntk
from tests.test_ntk import network_and_images
dist.init_process_group("gloo")
model, x = network_and_images(sys.argv[2] == "True")
K = empirical_ntk(model, x, memory=float(sys.argv[3]), precision="float64")
torch.save(K, f"{sys.argv[1]}/{dist.get_rank()}.pt")
dist.barrier()
os._exit(0)  # threads of gloo do not always survive the end of the interpreter
"""


@pytest.mark.parametrize(("twice", "memory"), [(False, 2e5), (True, 4e5), (True, 1e6)])
def test_two_processes_share_the_tiles(twice, memory, tmp_path):
    assert run_two("-c", TWO, str(tmp_path), str(twice), str(memory)) == [0, 0]
    model, x = network_and_images(twice)
    expected = by_autograd(model, x)
    for i in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{i}.pt", weights_only=True), expected)


BAD = """
import os, torch, torch.distributed as dist
from stairwise.checks import InputError
from stairwise.ntk.empirical import empirical_ntk
from tests.test_ntk import network_and_images
dist.init_process_group("gloo")
model, x = network_and_images(False)
x[-1] = torch.nan
try:
    empirical_ntk(model, x, memory=2e5, precision="float64")
except InputError:
    os._exit(3)
"""


def test_no_process_waits_for_one_whose_samples_are_bad():
    assert run_two("-c", BAD) == [3, 3]
