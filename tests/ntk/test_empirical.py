"""The tangent kernel of a zoo of architectures against autograd; tiles, precisions, processes, and bad arguments."""

from threading import Lock

import pytest
import torch
from torch import nn

from stairwise.checks import InputError
from stairwise.nets.encoder import build_encoder, build_network
from stairwise.ntk import fast
from stairwise.ntk.capture import Capture
from stairwise.ntk.empirical import PRECISIONS, empirical_ntk, ntk_error
from stairwise.paper.fig2ab import tangent_kernel
from tests.ntk.zoo import ZOO, Net, apply, build, by_autograd, gradients, mean, pool
from tests.two_processes import run_two


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_equals_per_sample_gradients(name, enabled, monkeypatch):
    """With the fast paths and without."""
    monkeypatch.setattr(fast, "ENABLED", enabled)
    assert bool(fast.choose(torch.device("cpu"), "float64").contraction.more_ways) is enabled
    model, x = build(name)
    exact = by_autograd(model, x)
    K = empirical_ntk(model, x, precision="float64")
    torch.testing.assert_close(K, exact, rtol=1e-10, atol=1e-10 * float(exact.max()))
    assert torch.equal(K, K.T)
    assert float(torch.linalg.eigvalsh(K)[0]) > -1e-10 * float(K.max())


@pytest.mark.parametrize("name", ["resnet", "attention", "embedding", "called twice", "conv grouped"])
def test_does_not_depend_on_tiles(name):
    model, x = build(name, n=11)
    whole = empirical_ntk(model, x, precision="float64")
    need = Capture(model, mean, x).sample_bytes + sum(8.0 * p.numel() for p in model.parameters())
    for samples in (1, 3, 4):
        tiled = empirical_ntk(model, x, precision="float64", memory=samples * need * 4)
        assert tiled == pytest.approx(whole, rel=1e-11)
    cross = empirical_ntk(model, x[:4], x[4:], precision="float64", memory=need * 8)
    assert cross == pytest.approx(whole[:4, 4:], rel=1e-11)


def test_one_position_against_many():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), apply(lambda z: z.sum(dim=1))).double()
    x, y = torch.randn(6, 1, 4).double(), torch.randn(7, 5, 4).double()
    K = empirical_ntk(model, x, y, precision="float64")
    torch.testing.assert_close(K, gradients(model, x) @ gradients(model, y).T)


def test_channels_last_images():
    model, x = build("resnet")
    last = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(empirical_ntk(model, last, precision="float64"), empirical_ntk(model, x, precision="float64"))


def test_outputs():
    torch.manual_seed(0)
    encoder = build_encoder("mlp", {"inputs": 12, "widths": [40]})
    net = build_network(encoder, torch.zeros(2, 3, 2, 2), [], 5, False, True)
    model, x = nn.Sequential(net, apply(lambda out: out[1])), torch.randn(9, 3, 2, 2)
    seen = []
    # an independent formula for the trace kernel of a network with one hidden layer
    exact = torch.tensor(tangent_kernel(net, x)).float()
    trace = empirical_ntk(model, x, output="trace", progress=lambda *done: seen.append(done[:2]))
    assert trace == pytest.approx(exact, rel=1e-4)
    assert seen == [(k + 1, 5) for k in range(5)]
    first = empirical_ntk(model, x, output=lambda z: z[:, 0], precision="float64")
    assert first == pytest.approx(by_autograd(model.double(), x.double(), lambda z: z[:, 0]), rel=1e-10)


@pytest.mark.parametrize(
    ("precision", "error"), [("float64", 1e-12), ("float32", 1e-5), ("tf32", 1e-5), ("float16", 3e-4)]
)
def test_precision(precision, error, monkeypatch):
    monkeypatch.setattr("stairwise.ntk.factors.SMALL_LAYER", 0)  # float16 in small layers, too
    model, x = build("resnet", n=12)
    model, x = model.float(), x.float()
    K = empirical_ntk(model, x, precision=precision)
    assert ntk_error(model, x, K, 12) < error
    assert (ntk_error(model, x, K, 12) > 1e-6) == (precision == "float16")
    assert precision in PRECISIONS
    assert next(model.parameters()).dtype == torch.float32


def test_large_images_stay_in_the_range_of_float16(monkeypatch):
    monkeypatch.setattr("stairwise.ntk.factors.SMALL_LAYER", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), pool(), nn.Linear(2, 2))
    x = 3 + torch.rand(3, 1, 320, 320)
    assert empirical_ntk(model, x, precision="float16") == pytest.approx(empirical_ntk(model, x), rel=5e-3)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_models_of_low_precision(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)), 20 * torch.randn(6, 64)
    exact = empirical_ntk(model, x)
    K = empirical_ntk(model.to(kind), x.to(kind))
    assert K.dtype == torch.float32
    assert float((K - exact).abs().max() / exact.max()) < 0.05


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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_empty_parameters_and_single_rows_of_tables(precision):
    torch.manual_seed(0)
    parts = {"layer": nn.Linear(6, 3), "table": nn.Embedding(4, 6), "none": torch.zeros(0)}
    model, x = Net(lambda m, x: m.layer(x * m.table(torch.tensor(2))), **parts), torch.randn(9, 6)
    K = empirical_ntk(model, x, precision=precision)
    torch.testing.assert_close(K.float(), by_autograd(model, x), rtol=1e-2, atol=1e-2)


def dropping():
    heads = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
    return Net(lambda m, x: m.heads(x[:, None], x[:, None], x[:, None])[0][:, 0], heads=heads)


X, NET = torch.randn(4, 6), nn.Linear(6, 2)


@pytest.mark.parametrize(
    ("model", "x", "options", "says"),
    [
        (nn.Sequential(NET, nn.BatchNorm1d(2)), X, {}, "evaluation mode: in training mode batch norm mixes"),
        (nn.Sequential(NET, nn.Dropout(0.1)), X, {}, "dropout"),
        (dropping(), X, {}, "dropout"),
        (nn.Sequential(NET, nn.BatchNorm1d(2, track_running_stats=False)).eval(), X, {}, "running statistics"),
        (nn.Unflatten(1, (2, 3)), X, {}, "trainable parameters"),
        (nn.Linear(6, 2).requires_grad_(False), X, {}, "trainable parameters"),
        (nn.Sequential(NET, nn.Unflatten(1, (2, 1))), X, {}, "2-D"),
        (nn.Sequential(NET, nn.Unflatten(1, (2, 1))), X, {"output": "trace"}, "2-D"),
        (NET, X * float("nan"), {}, "finite"),
        (NET, X[:0], {}, "samples"),
        (NET, X, {"y": X[:0]}, "samples"),
        (NET, X, {"precision": "float8"}, "precision"),
        (NET, X, {"output": "sum"}, "output"),
        (NET, X, {"output": lambda z: z}, "one number per sample"),
        (NET, X, {"memory": 10.0}, "must be at least .* bytes"),
        (NET, X, {"memory": "1GB"}, "memory must be a number"),
        (NET, X, {"memory": 0}, "memory must be greater than 0"),
        (NET, X.numpy(), {}, "x must be a tensor"),
        (NET, X, {"y": X.numpy()}, "y must be a tensor"),
        (NET, X, {"y": X.double()}, "y must be like x"),
        (torch.relu, X, {}, "torch module"),
        (NET, X, {"output": None}, "a function of the outputs"),
        (NET, X, {"output": lambda z: None}, "one number per sample"),
        (NET, X, {"output": lambda z: z[:, 0].detach()}, "can be differentiated"),
        (Net(lambda m, x: m.net(x), net=NET, lock=Lock()), X, {"precision": "float64"}, "possible to copy"),
    ],
)
def test_bad_arguments(model, x, options, says):
    with pytest.raises(InputError, match=says):
        empirical_ntk(model, x, **options)


def network_and_images(twice):
    """A network; or one with a layer that is used twice, which only the run itself can notice."""
    torch.manual_seed(0)
    layer = nn.Linear(48, 48)
    more = (layer, nn.Tanh(), layer) if twice else (layer,)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), *more, nn.Linear(48, 4))
    return model.double().eval(), torch.randn(23, 2, 6, 6).double()


CASES = [(False, 2e5), (True, 4e5), (True, 1e6)]  # called twice?, memory
TWO = """
import os, sys, torch, torch.distributed as dist
from stairwise.checks import InputError
from stairwise.ntk.empirical import empirical_ntk
from tests.ntk.test_empirical import CASES, network_and_images
dist.init_process_group("gloo")
for i, (twice, memory) in enumerate(CASES):
    model, x = network_and_images(twice)
    K = empirical_ntk(model, x, memory=memory, precision="float64")
    torch.save(K, f"{sys.argv[1]}/{i}-{dist.get_rank()}.pt")
model, x = network_and_images(False)
x[-1] = torch.nan  # only one process sees it
try:
    empirical_ntk(model, x, memory=2e5, precision="float64")
except InputError:
    os._exit(3)  # gloo's threads do not always survive the end of the interpreter
"""


def test_two_processes_share_the_tiles(tmp_path):
    """And none waits for the other when the samples of one are bad."""
    assert run_two("-c", TWO, str(tmp_path)) == [3, 3]
    for i, (twice, _) in enumerate(CASES):
        exact = by_autograd(*network_and_images(twice))
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{i}-{rank}.pt", weights_only=True), exact)
