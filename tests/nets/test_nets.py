"""Encoders, heads, small initialization."""

import re

import pytest
import torch
from torch import nn

from stairwise.checks import InputError
from stairwise.nets.encoder import ENCODERS, Network, build_encoder, build_network
from stairwise.nets.initial import SCOPES, find_alpha, scale_parameters, scoped
from stairwise.nets.perceptron import MLP, head
from stairwise.nets.resnet import resnet18, resnet34, resnet50

# parameters of torchvision's models without the classifier
SIZES = {resnet18: 11_176_512, resnet34: 21_284_672, resnet50: 23_508_032}


@pytest.mark.parametrize("factory", SIZES)
def test_resnets_have_torchvisions_parameters(factory):
    net = factory()
    assert sum(p.numel() for p in net.parameters()) == SIZES[factory]
    names = set(net.state_dict())
    block = "conv[123]|bn[123]" if factory is resnet50 else "conv[12]|bn[12]"
    norm = "weight|bias|running_mean|running_var|num_batches_tracked"
    pattern = rf"(layer[1-4]\.\d\.)?({block}|downsample\.[01])\.({norm})"
    assert all(re.fullmatch(pattern, name) for name in names)
    assert {"conv1.weight", "bn1.running_mean", "layer2.0.downsample.0.weight", "layer4.1.conv2.weight"} <= names
    assert ("layer1.0.downsample.0.weight" in names) == (factory is resnet50)


def test_resnet18_equals_a_hand_written_forward():
    """Strides, paddings and the order of operations, said once more in functions."""
    torch.manual_seed(0)
    net = resnet18(stem="large", width=8).eval()
    for name, b in net.named_buffers():
        if "running_mean" in name:
            b.normal_()
    state, F = net.state_dict(), nn.functional

    def bn(x, name):
        return F.batch_norm(x, *(state[f"{name}.{k}"] for k in ("running_mean", "running_var", "weight", "bias")))

    x = torch.randn(2, 3, 64, 64)
    out = F.max_pool2d(F.relu(bn(F.conv2d(x, state["conv1.weight"], stride=2, padding=3), "bn1")), 3, 2, 1)
    for stage in range(1, 5):
        for i in range(2):
            at, stride = f"layer{stage}.{i}", 2 if stage > 1 and i == 0 else 1
            y = F.relu(bn(F.conv2d(out, state[f"{at}.conv1.weight"], stride=stride, padding=1), f"{at}.bn1"))
            y = bn(F.conv2d(y, state[f"{at}.conv2.weight"], padding=1), f"{at}.bn2")
            if stride == 2:
                out = bn(F.conv2d(out, state[f"{at}.downsample.0.weight"], stride=2), f"{at}.downsample.1")
            out = F.relu(y + out)
    assert torch.allclose(net(x), out.mean((2, 3)), atol=1e-5)


@pytest.mark.parametrize(("stem", "side"), [("small", 32), ("large", 96)])
@pytest.mark.parametrize("factory", SIZES)
def test_stems(factory, stem, side):
    net = factory(stem=stem, width=4, channels=1)
    shapes = []
    net.layer4.register_forward_hook(lambda _, __, out: shapes.append(out.shape))
    h = net(torch.randn(2, 1, side, side))
    assert h.shape == (2, net.features)
    assert shapes[0][2:] == ((4, 4) if stem == "small" else (3, 3))


def test_convolutions_begin_as_torchvisions():
    torch.manual_seed(0)
    weight = resnet18().layer3[1].conv2.weight.detach()
    assert float(weight.std()) == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)
    assert abs(float(weight.mean())) < 1e-4


def test_heads():
    assert [m.in_features for m in head(8, [16, 4], 2) if isinstance(m, nn.Linear)] == [8, 16, 4]
    assert not any(m.bias is not None for m in head(8, [16], 2) if isinstance(m, nn.Linear))
    assert [type(m) for m in head(8, [], 2, bias=True)] == [nn.Linear]
    assert [type(m) for m in head(8, [4], 2, norm=False)] == [nn.Linear, nn.ReLU, nn.Linear]


def test_encoders_by_name_and_import_path():
    for name in set(ENCODERS) - {"mlp"}:
        assert isinstance(build_encoder(name, {"width": 4}), nn.Module)
    assert isinstance(build_encoder("stairwise.nets.perceptron:MLP", {"inputs": 4, "widths": [3]}), MLP)


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("resnet19", {}, "did you mean 'resnet1"),
        ("resnet18", {"stemm": "small"}, "did you mean 'stem'"),
        ("resnet18", {"stem": "medium"}, "known: large, small"),
        ("no_such_package.module:f", {}, "importable"),
        ("torch.nn:NoSuchThing", {}, "callable"),
        ("builtins:dict", {}, "torch module"),
        ("mlp", {}, "arguments"),
    ],
)
def test_bad_encoders(name, arguments, says):
    with pytest.raises(InputError, match=says):
        build_encoder(name, arguments)


def test_encoder_output_must_be_flat():
    with pytest.raises(InputError, match="2-D"):
        build_network(nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8), [4], 2)
    with pytest.raises(InputError, match=r"set encoder_options\.inputs"):
        MLP(10)(torch.zeros(2, 3, 4, 4))


def test_counting_features_leaves_the_encoder_as_it_was():
    encoder = resnet18(width=4)
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    network = build_network(encoder, torch.randn(2, 3, 64, 64), [8], 3)
    assert encoder.training
    assert all(torch.equal(v, before[k]) for k, v in encoder.state_dict().items())
    h, z = network(torch.randn(4, 3, 64, 64))
    assert (h.shape, z.shape) == ((4, 32), (4, 3))


def small_network(norm=True):
    torch.manual_seed(0)
    return Network(resnet18(stem="small", width=4), head(32, [16], 4, norm=norm, bias=True))


EXPECTED = {
    "all": lambda name, p: True,
    "weights": lambda name, p: p.ndim > 1,
    "weights+norm": lambda name, p: (
        p.ndim > 1 or "bn" in name or "downsample" in name or name.startswith("projector.1")
    ),
    "readout": lambda name, p: name in {"projector.3.weight", "projector.3.bias"},
}


@pytest.mark.parametrize("scope", SCOPES)
def test_scopes_scale_just_what_they_name(scope):
    network = small_network()
    for p in network.parameters():
        p.data.add_(1.0)  # zeros do not show a scale
    before = {k: v.clone() for k, v in network.named_parameters()}
    scale_parameters(network, 0.5, scope)
    for name, p in network.named_parameters():
        factor = 0.5 if EXPECTED[scope](name, p) else 1.0
        assert torch.equal(p, factor * before[name]), name


@pytest.mark.parametrize("scope", ["all", "readout"])
@pytest.mark.parametrize("target", [1e-3, 1e-6])
def test_auto_alpha_reaches_its_target(scope, target):
    network = small_network(norm=False)
    x = torch.randn(64, 3, 16, 16)

    def top():
        with torch.no_grad():
            z = network(x)[1].double()
        return float(torch.linalg.eigvalsh(z.T @ z / len(z))[-1])

    before = [p.clone() for p in network.parameters()]
    alpha = find_alpha(network, top, target, scope)
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), before, strict=True))
    scale_parameters(network, alpha, scope)
    assert top() == pytest.approx(target, rel=0.021)


def test_auto_alpha_leaves_small_networks_alone_and_gives_up_where_norms_undo_it():
    network = small_network()
    assert find_alpha(network, lambda: 1e-9, 1e-3) == 1.0
    with pytest.raises(InputError, match="batch norm"):
        find_alpha(network, lambda: 1.0, 1e-3, "weights")
    with pytest.raises(InputError, match="known: all"):
        list(scoped(network, "everything"))
