"""Lengths of weights that batch norm hides: the function does not change, the kernel does, two kernels do not."""

import numpy as np
import pytest
import torch
from torch import nn

from stairwise.checks import InputError
from stairwise.nets.encoder import Network
from stairwise.nets.perceptron import head
from stairwise.nets.resnet import resnet18
from stairwise.ntk.empirical import empirical_ntk, ntk_parts
from stairwise.ntk.lengths import (
    SCORES,
    hidden_weights,
    kernels_of,
    layer_of,
    rescaled,
    scores_of,
    study_lengths,
)
from stairwise.ntk.predict import kernel_pca, predict_embeddings
from stairwise.ntk.study import Outputs
from stairwise.theory.spectra import subspace_alignment

S = 3.0


def small(norm=True):
    """A narrow ResNet-18 with a head, in double precision, whose batch norms have seen data."""
    torch.manual_seed(0)
    backbone = resnet18(stem="small", width=4)
    model = Outputs(Network(backbone, head(backbone.features, [8], 3, norm=norm, bias=not norm))).double()
    for _ in range(20):
        model(torch.randn(16, 3, 12, 12).double())
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def x():
    torch.manual_seed(1)
    return torch.randn(10, 3, 12, 12).double()


@pytest.fixture(scope="module")
def kernels(model, x):
    return kernels_of(model, x, hidden_weights(model, x[:2]))


def test_hidden_weights(model, x):
    hidden = hidden_weights(model, x[:2])
    convolutions = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    assert set(hidden) == convolutions | {"network.projector.0"}, "all but the readout"
    assert hidden["network.backbone.layer2.0.downsample.0"] == "network.backbone.layer2.0.downsample.1"
    free = small(norm=False)
    assert set(hidden_weights(free, x[:2])) == convolutions, "no norm in that head"


@pytest.mark.parametrize("s", [0.25, S, 100.0])
@pytest.mark.parametrize("training", [False, True])
def test_the_function_is_the_same(model, x, s, training):
    copy = rescaled(model, hidden_weights(model, x[:2]), s).train(training)
    before = small().train(training)
    assert not torch.equal(copy.network.backbone.conv1.weight, before.network.backbone.conv1.weight)
    z = before(x)
    assert (copy(x) - z).abs().max() < 1e-12 * z.abs().max()


def test_parts_add_up(model, x, kernels):
    K = empirical_ntk(model, x).numpy()
    assert kernels.at(1.0) == pytest.approx(K, rel=1e-10)
    assert sum(kernels.layers().values()) == pytest.approx(K, rel=1e-10)
    assert list(kernels.layers()) == ["stem", "layer1", "layer2", "layer3", "layer4", "head", "readout"]
    assert 0.1 < kernels.share() < 1


def test_hidden_parts_scale_and_invariant_kernels_do_not(model, x, kernels):
    hidden = hidden_weights(model, x[:2])
    other = kernels_of(rescaled(model, hidden, S), x, hidden)
    for name, K in kernels.parts.items():
        factor = S**-2 if name.endswith("hidden") else 1.0
        assert other.parts[name] == pytest.approx(factor * K, rel=1e-9), name
    assert other.directions == pytest.approx(kernels.directions, rel=1e-9)
    assert other.filters == pytest.approx(kernels.filters, rel=1e-9)
    assert other.at(1.0) == pytest.approx(kernels.at(S), rel=1e-9)
    plain = kernels.at(1.0)
    assert np.abs(kernels.at(S) - plain).max() > 0.1 * np.abs(plain).max(), "K itself depends on s"


def test_filters_may_have_different_lengths(model, x, kernels):
    """Batch norm hides the length of every filter: only the kernel of filters does not depend on them."""
    copy = rescaled(model, {}, 1.0)
    block = copy.network.backbone.layer3[0]
    factors = torch.linspace(0.5, 3, len(block.conv1.weight)).double()
    with torch.no_grad():
        block.conv1.weight.mul_(factors[:, None, None, None])
        block.bn1.running_mean.mul_(factors)
        # ε cannot follow channel by channel, so the variance does: (σ² + ε) f² − ε
        block.bn1.running_var.add_(block.bn1.eps).mul_(factors**2).sub_(block.bn1.eps)
    assert (copy(x) - model(x)).abs().max() < 1e-12
    other = kernels_of(copy, x, hidden_weights(copy, x[:2]))
    assert other.filters == pytest.approx(kernels.filters, rel=1e-9)
    assert np.abs(other.directions - kernels.directions).max() > 1e-3 * np.abs(kernels.directions).max()


def test_directions_by_autograd(model, x, kernels):
    """Σ ‖w‖² ∇s·∇s', parameter by parameter; and with one length per filter."""
    gradients = []
    for point in x[:3]:
        scalar = model(point[None]).sum() / 3**0.5
        gradients.append(torch.autograd.grad(scalar, list(model.parameters())))
    by_tensor, by_filter = np.zeros((3, 3)), np.zeros((3, 3))
    for i in range(3):
        for j in range(3):
            for w, g, h in zip(model.parameters(), gradients[i], gradients[j], strict=True):
                p = w.detach()
                by_tensor[i, j] += float((g * h).sum() * (p**2).sum())
                rows = (p.reshape(len(p), -1) ** 2).sum(dim=1)
                by_filter[i, j] += float(((g * h).reshape(len(p), -1).sum(dim=1) * rows).sum())
    assert kernels.directions[:3, :3] == pytest.approx(by_tensor, rel=1e-9)
    assert kernels.filters[:3, :3] == pytest.approx(by_filter, rel=1e-9)


def test_scores():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 30)) * np.arange(1, 31) ** -0.5
    both = np.concatenate([x, x + 0.3 * rng.standard_normal(x.shape)])
    K, z = both @ both.T, rng.standard_normal((120, 4)) + both[:, :4]
    theory, pca, unit, leading, twice = scores_of(K, z, 2)
    assert theory == pytest.approx(subspace_alignment(z, predict_embeddings(K, 4)))
    assert pca == pytest.approx(subspace_alignment(z, kernel_pca(K, 4)))
    size = np.sqrt(np.diagonal(K))
    assert unit == pytest.approx(subspace_alignment(z, predict_embeddings(K / np.outer(size, size), 4)))
    modes = np.linalg.svd(z, full_matrices=False)[0][:, :2]
    assert leading == pytest.approx(subspace_alignment(modes, predict_embeddings(K, 4)))
    assert twice == pytest.approx(subspace_alignment(z, predict_embeddings(K, 8)))
    assert twice > theory
    few = np.isnan(scores_of(both[:, :2] @ both[:, :2].T, z, 2))  # a kernel of rank two
    assert few.tolist() == [True, False, True, True, True]


def test_study(model, x):
    views = torch.cat([x, x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double()])
    found = study_lengths("tiny", model, views, scales=(0.5, 1.0))
    assert found.kernels[:3] == ["s = 0.5", "s = 1", "stem"]
    assert found.kernels[-2:] == ["directions", "filters"]
    assert found.scores.shape == (len(found.kernels), len(SCORES))
    assert found.facts["function_change"] < 1e-12
    K = empirical_ntk(model, views).numpy()
    z = model(views).detach().numpy()
    assert found.scores[1, 0] == pytest.approx(subspace_alignment(z, predict_embeddings(K, 3)), rel=1e-6)
    assert len(found.table().rows) == len(found.kernels)


def test_layers_of_other_names():
    assert layer_of("network.backbone.layer2.0.conv1.weight", "network.projector.3") == "layer2"
    assert layer_of("network.backbone.conv1.weight", "network.projector.3") == "stem"
    assert layer_of("network.projector.0.weight", "network.projector.3") == "head"
    assert layer_of("network.projector.3.bias", "network.projector.3") == "readout"


def test_bad_input(model, x):
    with pytest.raises(InputError, match="batch norm hides"):
        study_lengths("plain", nn.Sequential(nn.Flatten(), nn.Linear(432, 3)).double(), x)
    with pytest.raises(InputError, match="s must be greater than 0"):
        rescaled(model, {}, 0.0)
    with pytest.raises(InputError, match="parts"):
        ntk_parts(model, x, {"one": {"unknown.weight": 1.0}})
    with pytest.raises(InputError, match="parts must each name parameters"):
        ntk_parts(model, x, {"none": {}})
