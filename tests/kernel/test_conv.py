"""Kernels of convolutional networks against neural-tangents, explicit matrices, wide networks and laws."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import stairwise as sw
from stairwise.checks import InputError
from stairwise.kernel import conv
from stairwise.kernel.conv import conv_covariances
from stairwise.kernel.convnet import ConvNet, build_axis
from stairwise.kernel.kernels import conv_nngp, conv_ntk, ntk

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "infinite_width_conv.json").read_text())
NAMES = [field.name for field in fields(ConvNet)]


def net_of(case):
    return ConvNet(**{name: case[name] for name in NAMES} | {"strides": tuple(case["strides"])})


def images(n, *shape, seed=0, dtype=torch.float64):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda c: f"{c['head']}-{c['padding']}-{c['skip']}-{c['strides']}"
)
def test_against_neural_tangents(case, dtype):
    X, Y = (torch.tensor(GOLDEN[name], dtype=dtype) for name in "XY")
    for other, suffix in ((Y, ""), (X, "_self")):
        for found, name in zip(conv_covariances(net_of(case), X, other), ("nngp", "ntk"), strict=True):
            rtol = 1e-7 if dtype == torch.float64 else 1e-5
            np.testing.assert_allclose(found.numpy(), case[name + suffix], rtol=rtol)


def tap_matrices(net, size, stride, shape):
    """The matrices by which torch's convolution moves pixels, one per tap, and the shape of its output."""
    unit = torch.eye(size * size, dtype=torch.float64).reshape(-1, 1, size, size)
    basis = torch.eye(shape.numel(), dtype=torch.float64).reshape(-1, 1, *shape)
    around = [torch.arange(-(size // 2), side + size // 2) for side in shape]
    if net.padding == "circular":
        basis = basis[..., around[0] % shape[0], :][..., around[1] % shape[1]]
    elif net.padding == "same":
        basis = F.pad(basis, (size // 2,) * 4)
    out = F.conv2d(basis, unit, stride=stride)
    return out.permute(1, 2, 3, 0).flatten(1, 2).contiguous(), out.shape[-2:]


def expectations(net, S):
    """E[φφ] and E[φ′φ′] of a Gaussian vector of covariance S."""
    v = S.diag()
    if net.activation == "erf":
        outer = (1 + 2 * v[:, None]) * (1 + 2 * v)
        return (2 * S / outer.sqrt()).asin() * 2 / torch.pi, 4 / torch.pi / (outer - 4 * S**2).sqrt()
    norm = (v[:, None] * v).sqrt()
    cosine = (S / norm).clamp(-1, 1).fill_diagonal_(1)
    slope = (torch.pi - cosine.acos()) / (2 * torch.pi)
    return norm * ((1 - cosine**2).sqrt() / (2 * torch.pi) + slope * cosine), slope


def by_matrices(net, x, y):
    """Σ and Θ of two images: all pixels of both as one vector, a convolution as Σ ← σ_w² mean_δ A_δ Σ A_δᵀ + σ_b²."""
    both = torch.eye(2, dtype=x.dtype)

    def convolve(S, T, size, stride, shape):
        moves, shape = tap_matrices(net, size, stride, shape)
        moves, weight = [torch.kron(both, A) for A in moves], net.weight_variance / size**2
        S = sum(weight * A @ S @ A.T for A in moves) + net.bias_variance
        return S, S + sum(weight * A @ T @ A.T for A in moves), shape

    pixels = torch.cat([x.flatten(0, 1), y.flatten(0, 1)])
    S, shape, entry = pixels @ pixels.T / x.shape[-1], x.shape[:2], None
    T = torch.zeros_like(S)
    for layer in range(net.depth):
        S, T, shape = convolve(S, T, net.kernel_size, net.stride(layer), shape)
        if net.skip and layer and layer % net.skip == 0:
            stride = np.prod([net.stride(inner) for inner in range(layer - net.skip + 1, layer + 1)])
            short = entry if stride == 1 else convolve(*entry[:2], 1, int(stride), entry[2])
            S, T = S + short[0], T + short[1]
        if net.skip and layer % net.skip == 0:
            entry = S, T, shape
        S, slope = expectations(net, S)
        T = T * slope
    blocks = [M.reshape(2, shape.numel(), 2, shape.numel()).permute(0, 2, 1, 3) for M in (S, T)]
    means = [M.mean((2, 3)) if net.head == "gap" else M.diagonal(dim1=2, dim2=3).mean(-1) for M in blocks]
    sigma = net.weight_variance * means[0] + net.bias_variance
    return sigma, sigma + net.weight_variance * means[1]


@st.composite
def networks_and_shapes(draw):
    skip = draw(st.integers(0, 2))
    depth = 1 + (skip * draw(st.integers(1, 2)) if skip else draw(st.integers(0, 3)))
    net = ConvNet(
        depth,
        kernel_size=draw(st.sampled_from([1, 3, 5])),
        strides=tuple(draw(st.lists(st.integers(1, 3), max_size=depth))),
        padding=draw(st.sampled_from(["same", "circular"] if skip else ["same", "valid", "circular"])),
        activation=draw(st.sampled_from(["relu", "erf"])),
        skip=skip,
        head=draw(st.sampled_from(["gap", "flatten"])),
        weight_variance=draw(st.floats(0.5, 3)),
        bias_variance=draw(st.sampled_from([0.0, 0.2])),
    )
    least = 1
    if net.padding == "valid":
        for layer in reversed(range(depth)):
            least = (least - 1) * net.stride(layer) + net.kernel_size
        if least > 8:
            net, least = replace(net, padding="same"), 1
    sides = st.integers(least, max(6, least + 1))
    return net, (draw(sides), draw(sides), draw(st.integers(1, 3)))


@settings(max_examples=30, deadline=None)
@given(networks_and_shapes(), st.integers(0, 99))
def test_against_explicit_matrices(drawn, seed):
    net, shape = drawn
    x = images(2, *shape, seed=seed)
    for found, matrix in zip(conv_covariances(net, x, x), by_matrices(net, *x), strict=True):
        torch.testing.assert_close(found, matrix, rtol=1e-6, atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(networks_and_shapes(), st.integers(0, 99))
def test_laws(drawn, seed):
    """Symmetric, positive semidefinite; equal images have equal rows; tiles and the order of images do not matter."""
    net, shape = drawn
    x = images(4, *shape, seed=seed)
    x[3] = x[1]
    whole, tiled = conv_covariances(net, x, x), conv_covariances(net, x, x.clone(), memory=1)
    reverse = conv_covariances(net, x.flip(0), x)
    for K, tiles, back in zip(whole, tiled, reverse, strict=True):
        torch.testing.assert_close(K, K.T)
        torch.testing.assert_close(K, tiles, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(K, back.flip(0), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(K[1], K[3], rtol=1e-7, atol=0)
        assert torch.linalg.eigvalsh(K)[0] > -1e-8 * K.diagonal().max()
    only = conv_covariances(net, x, x, tangent=False)
    assert only.theta is None
    assert torch.equal(only.sigma, whole.sigma)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.sampled_from(["relu", "erf"]), st.sampled_from(["gap", "flatten"]))
def test_one_pixel_is_a_fully_connected_network(depth, activation, head):
    X = images(5, 7).numpy()
    net = conv_ntk(depth, 1, activation=activation, head=head, weight_variance=1.6, bias_variance=0.3, shape=(1, 1, 7))
    np.testing.assert_allclose(net(X, X), ntk(depth, activation, 1.6, 0.3)(X, X), rtol=1e-7)


def wide_output(net, x, width, generator):
    """Output of one draw of the finite network, and the list of its parameters."""
    parameters = []

    def linear(h, out, size=1, stride=1, padding=0):
        w = torch.randn(out, h.shape[1], size, size, generator=generator, dtype=h.dtype).requires_grad_()
        b = torch.randn(out, generator=generator, dtype=h.dtype).requires_grad_()
        parameters.extend([w, b])
        scale = (net.weight_variance / w[0].numel()) ** 0.5
        return F.conv2d(h, scale * w, net.bias_variance**0.5 * b, stride=stride, padding=padding)

    act = torch.relu if net.activation == "relu" else torch.erf
    h = x.movedim(-1, 1)
    entry = None
    for layer in range(net.depth):
        h = linear(act(h) if layer else h, width, net.kernel_size, net.stride(layer), net.kernel_size // 2)
        if net.leaves_block(layer):
            stride = net.block_stride(layer)
            h = h + (entry if stride == 1 else linear(entry, width, 1, stride))
        entry = h if net.enters_block(layer + 1) else entry
    h = act(h)
    h = h.mean((2, 3), keepdim=True) if net.head == "gap" else h.flatten(1)[..., None, None]
    return linear(h, 1).flatten(), parameters, h.flatten(1)


@pytest.mark.parametrize(
    "net",
    [
        ConvNet(2, head="gap", bias_variance=0.1),
        ConvNet(2, head="flatten", activation="erf", bias_variance=0.1),
        ConvNet(2, strides=(1, 2), skip=1, head="gap", bias_variance=0.1),
    ],
    ids=lambda net: f"{net.head}-{net.activation}-{net.skip}",
)
def test_against_wide_networks(net):
    """Monte Carlo: NNGP and NTK by autograd of networks of width 128, mean over draws, within 3 %."""
    x, draws = images(3, 3, 3, 2, dtype=torch.float32), 50 if net.head == "flatten" else 150
    generator = torch.Generator().manual_seed(0)
    sigma, theta = torch.zeros(3, 3), torch.zeros(3, 3)
    for _ in range(draws):
        outputs, parameters, features = wide_output(net, x, 128, generator)
        grads = [torch.autograd.grad(out, parameters, retain_graph=True) for out in outputs]
        jacobian = torch.stack([torch.cat([g.flatten() for g in grad]) for grad in grads])
        theta += jacobian @ jacobian.T / draws
        inner = features.detach() @ features.detach().T / features.shape[1]
        sigma += (net.weight_variance * inner + net.bias_variance) / draws  # the readout, averaged exactly
    for found, K in zip((sigma, theta), conv_covariances(net, x, x), strict=True):
        size = torch.outer(K.diagonal(), K.diagonal()).sqrt()
        assert float(((found - K) / size).abs().max()) < 0.03


def test_single_precision_in_a_deep_network():
    """float32 follows float64 through 21 convolutions, also for equal and for nearly equal images."""
    x = images(3, 8, 8, 3)
    x[2] = x[0] + 1e-3 * x[1]
    for net in (ConvNet(21, head="gap"), ConvNet(21), ConvNet(21, skip=2, strides=(1, 2))):
        exact, single = conv_covariances(net, x, x), conv_covariances(net, x.float(), x.float())
        for K, rounded in zip(exact, single, strict=True):
            torch.testing.assert_close(rounded.double(), K, rtol=5e-4 if net.head == "gap" else 1e-6, atol=0)


def test_fused_layers_give_the_same(monkeypatch):
    """The expressions that are compiled, without compiling them; tests/test_gpu.py does."""
    monkeypatch.setattr(conv, "_compiled_layer", lambda: conv._layer)
    x = images(3, 6, 6, 2)
    net = ConvNet(5, skip=2, strides=(1, 2), head="gap", bias_variance=0.1)
    for found, K in zip(conv_covariances(net, x, x, compiled=True), conv_covariances(net, x, x), strict=True):
        torch.testing.assert_close(found, K, rtol=1e-12, atol=0)


def test_strides_leave_few_pairs_of_pixels():
    """Only offsets that are multiples of the strides reach the output, and with a flattened head only offset 0."""
    net = ConvNet(3, strides=(1, 2, 2), head="gap")
    p, q = build_axis(net, 16, diagonal=False).pairs[0]
    assert len(p) == len(set(zip(p, q, strict=True))) < 16 * 16 / 2
    assert set((q - p) % 4) == {0}
    p, q = build_axis(net, 16, diagonal=True).pairs[0]
    assert (p == q).all()
    assert len(p) == 16


def test_kernel_ssl_learns_from_images(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.standard_normal((12, 5, 5, 1))
    X_a, X_b = ((base + 0.2 * rng.standard_normal(base.shape)).reshape(12, 25) for _ in "ab")
    kernel = conv_ntk(depth=3, strides=(1, 2), skip=2, head="gap")
    est = sw.KernelSSL(3, kernel=kernel).fit(X_a, X_b=X_b)
    assert est.kernel_.shape == (5, 5, 1)
    np.testing.assert_allclose(np.vstack([est.transform(X_a), est.transform(X_b)]), est.embedding_, atol=1e-8)
    est.save(tmp_path / "model.npz")
    again = sw.KernelSSL.load(tmp_path / "model.npz")
    assert again.kernel_ == replace(kernel, shape=(5, 5, 1))
    np.testing.assert_allclose(again.transform(X_a), est.transform(X_a))
    by_name = sw.KernelSSL(3, kernel="conv_nngp").fit(X_a, X_b=X_b)
    assert by_name.kernel_ == conv_nngp(shape=(5, 5, 1))


@pytest.mark.parametrize("kernel", [conv_ntk(2), conv_nngp(2, head="gap")], ids=["flatten", "gap"])
def test_landmarks_stand_for_many_images(kernel):
    """Beyond the memory, also of images that occur twice; random features are refused."""
    scenes = np.random.default_rng(0).random((2, 12, 16))
    X_a, X_b = np.vstack([scenes[0], scenes[0]]), np.vstack([scenes[0] + 0.1 * scenes[1], scenes[0]])
    exact = sw.KernelSSL(3, kernel=kernel).fit(X_a, X_b=X_b)
    for how in ("uniform", "pivoted"):
        with pytest.warns(sw.TheoryWarning, match="nystroem: tiles of K̃ of 48 points"):
            est = sw.KernelSSL(3, kernel=kernel, memory=1000, landmarks=how).fit(X_a, X_b=X_b)
        np.testing.assert_allclose(est.eigenvalues_, exact.eigenvalues_, rtol=1e-7)
        np.testing.assert_allclose(np.abs(est.transform(X_a)), np.abs(exact.transform(X_a)), atol=1e-4)
    with pytest.raises(InputError, match=r'kernel has no random features .*use method="nystroem"'):
        sw.KernelSSL(3, kernel=kernel, method="features").fit(X_a)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "shape must fit rows of 24 features .*give shape="),
        ({"shape": (2, 3, 3)}, "shape must fit rows of 24 features"),
        ({"head": "mean", "shape": (2, 4, 3)}, "head is unknown"),
        ({"padding": "zero", "shape": (2, 4, 3)}, "padding is unknown"),
        ({"activation": "tanh", "shape": (2, 4, 3)}, "activation is unknown"),
        ({"kernel_size": 2, "shape": (2, 4, 3)}, "kernel_size must be odd"),
        ({"depth": 2, "strides": (1, 2, 1), "shape": (2, 4, 3)}, "strides must be at most 2"),
        ({"strides": (0,), "shape": (2, 4, 3)}, "strides must be a whole number"),
        ({"depth": 4, "skip": 2, "shape": (2, 4, 3)}, "skip must divide the 3 convolutions"),
        ({"depth": 3, "skip": 2, "padding": "valid", "shape": (2, 4, 3)}, "padding must keep the size"),
        ({"padding": "valid", "shape": (2, 4, 3)}, "depth is too large for these images"),
        ({"weight_variance": 0.0, "shape": (2, 4, 3)}, "weight_variance must be at least 1e-06"),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(InputError, match=words):
        conv_ntk(**options)(np.ones((2, 24)), np.ones((3, 24)))
