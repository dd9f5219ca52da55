"""What only a GPU can show: recorded steps, half-precision views, resuming there. Skipped where there is none."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

import stairwise as sw
from stairwise.data.augment import PIPELINES, augment, full_view, to_layout
from stairwise.data.feed import batch_rows
from stairwise.data.images import load
from stairwise.losses.preconditioning import inverse_root
from stairwise.monitor.decompose import decompose
from stairwise.training import loop
from stairwise.training.loop import Stopped, Trainer
from stairwise.training.networks import load_network
from stairwise.training.recipe import Recipe

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),  # torch's compiler warns of torch
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # and of float32, which is asked for
]

TINY = Recipe(
    data="photos",
    views="barlow",
    encoder="mlp",
    encoder_options={"inputs": 3072, "widths": [128]},
    hidden=[64],
    d=8,
    batch=128,
    steps=30,
    lr=1e-3,
    records=10,
    precision="float32",
)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_fused_norms_equal_those_of_torch(name, monkeypatch):
    pytest.importorskip("triton")
    # products in TF32 are rounded to 1e-3, and ReLUs that switch multiply this: one draw of ten differed by 5 %
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    from benchmarks import fused_norms
    from stairwise.nets import resnet

    plain, fused = (getattr(module, name)("small", 16).cuda() for module in (resnet, fused_norms))
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.1 * torch.randn_like(p))
    fused.load_state_dict(plain.state_dict())
    exact = deepcopy(plain).double()
    x = torch.randn(32, 3, 20, 20, device="cuda").contiguous(memory_format=torch.channels_last)
    for net in (exact, plain, fused):
        h = net.train()(x.double() if net is exact else x)
        (h * torch.linspace(0, 1, h.numel(), device="cuda").view_as(h)).sum().backward()
    for parameters in zip(*(net.parameters() for net in (exact, plain, fused)), strict=True):
        truth, *found = (p.grad.double() for p in parameters)
        theirs, ours = ((g - truth).norm() / truth.norm() for g in found)
        assert ours <= 2 * theirs + 1e-2
    for p, q in zip(plain.buffers(), fused.buffers(), strict=True):
        assert torch.allclose(p, q, rtol=1e-2, atol=1e-3)
    assert torch.allclose(plain.eval()(x), fused.eval()(x), rtol=1e-2, atol=1e-2)


class Pooled(torch.nn.Module):
    """An encoder for views of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3 * 16, 64)

    def forward(self, x):
        return self.linear(torch.nn.functional.adaptive_avg_pool2d(x, 4).flatten(1)).relu()


GROWING = {"encoder": "tests.test_gpu:Pooled", "encoder_options": {}, "sizes": [[0.0, 16], [0.4, 24], [0.7, 32]]}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        GROWING,
        GROWING | {"compile": True},
        {"loss": "simclr"},
        {"loss": "frossl"},
        {"loss": "spectral_contrastive"},
        {"loss": "vicreg", "precondition": {"power": 0.5}},
        {"loss": "vicreg", "precondition": {"power": 1.0}},
        {"optimizer": "lars"},
        {"optimizer": "adamw"},
        {"compile": True},
        {"optimizer": "muon", "lr": 0.02, "momentum": 0.95, "weight_decay": 0.1},
        {"optimizer": "muon", "lr": 0.02, "scaling": "fixed"},
        {"loss": "byol"},
    ],
)
def test_recorded_steps_equal_steps_taken_one_by_one(changes, tmp_path):
    recipe = replace(TINY, **changes)
    graph = sw.train(recipe, tmp_path / "graph", device="cuda")
    eager = sw.train(replace(recipe, graph=False), tmp_path / "eager", device="cuda")
    assert graph.series("loss") == pytest.approx(eager.series("loss"), rel=1e-3)
    assert graph.series("eigenvalues") == pytest.approx(eager.series("eigenvalues"), rel=1e-2, abs=1e-4)


@pytest.fixture
def deterministic_convolutions(monkeypatch):
    """Without, equal trainings differ (by up to 2 % of a ResNet's loss after 30 steps with LARS), because cuDNN sums in
    another order each time."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(loop, "fastest_convolutions", lambda _: nullcontext())  # it chooses by time


@pytest.mark.usefixtures("deterministic_convolutions")
def test_recorded_passes_equal_passes_in_order(tmp_path):
    """A recording runs the two views' passes at once. It ends at the same bits as passes in order; running averages,
    which it puts in order afterwards, may round."""
    recipe = replace(TINY, encoder="resnet18", encoder_options={"stem": "small", "width": 16}, optimizer="lars")
    graph = sw.train(recipe, tmp_path / "graph", device="cuda")
    eager = sw.train(replace(recipe, graph=False), tmp_path / "eager", device="cuda")
    assert np.array_equal(graph.series("loss"), eager.series("loss"))
    theirs = load_network(eager).state_dict()
    for name, value in load_network(graph).state_dict().items():
        if "running" in name:
            assert torch.allclose(value, theirs[name], rtol=1e-5, atol=1e-6), name
        else:
            assert torch.equal(value, theirs[name]), name
        assert "num_batches" not in name or value == 2 * recipe.steps


def test_steps_are_recorded(tmp_path):
    trainer = Trainer(TINY, tmp_path, torch.device("cuda"))
    pairs = trainer.material.pairs.stream(batch_rows(500, 128, seed=0), 0)
    for _ in range(5):
        trainer.take(*next(pairs), measure=False)
    assert [key[1:] for key in trainer.take.recordings] == [(("measure", False),)]
    assert len(trainer.material.pairs.draw.recordings) == 1
    trainer.close()


def test_every_replay_draws_new_views(tmp_path):
    recipe = replace(TINY, lr=1e-12, steps=20, records=20, window=128)
    losses = sw.train(recipe, tmp_path, device="cuda").series("loss")
    assert len(np.unique(losses)) == 20


def test_resuming_on_the_gpu(tmp_path):
    import os
    import signal

    whole = sw.train(TINY, tmp_path / "whole", device="cuda")
    with pytest.raises(Stopped):
        sw.train(
            TINY,
            tmp_path / "parts",
            device="cuda",
            progress=lambda step, *_: os.kill(os.getpid(), signal.SIGTERM) if step == 20 else None,
        )
    parts = sw.train(TINY, tmp_path / "parts", device="cuda")
    assert parts.series("loss") == pytest.approx(whole.series("loss"), rel=1e-4)


def test_views_in_half_precision():
    images = to_layout(torch.tensor(load("photos").pixels[:64]))
    mean, std = torch.full((3,), 0.5), torch.full((3,), 0.25)
    cpu = full_view(images, 24, mean, std)
    gpu = full_view(images.cuda(), 24, mean.cuda(), std.cuda())
    assert gpu.dtype == torch.float16
    assert (gpu.float().cpu() - cpu).abs().max() < 0.02  # of 4, the range after normalization
    for pair in PIPELINES.values():
        for view in pair:
            size = 20
            x = augment(images.cuda(), view, size, torch.Generator("cuda").manual_seed(0), mean.cuda(), std.cuda())
            y = augment(images, view, size, torch.Generator().manual_seed(0), mean, std)
            assert torch.isfinite(x).all()
            # other random numbers, the same distribution
            assert float(x.float().mean()) == pytest.approx(float(y.mean()), abs=0.15)
            assert float(x.float().std()) == pytest.approx(float(y.std()), rel=0.15)


def test_precondition_on_the_gpu():
    torch.manual_seed(0)
    z = torch.randn(64, 300, device="cuda")
    A = z.T @ z / 64
    A = A / A.diagonal().mean() + 0.1 * torch.eye(300, device="cuda")
    values, V = torch.linalg.eigh(A.double())
    exact = (V * values**-0.5) @ V.T
    assert float((inverse_root(A, 0.1, 300.1).double() - exact).norm() / exact.norm()) < 1e-4


def test_bf16_keeps_small_eigenvalues(tmp_path):
    """The head runs in float32 under autocast: eigenvalues a millionth of the largest are not lost in rounding."""
    recipe = replace(TINY, encoder="resnet18", encoder_options={"stem": "small", "width": 16}, alpha="auto", steps=8)
    recipe = replace(recipe, lr=1e-12)  # two ways of rounding soon part when they learn
    bf16 = sw.train(replace(recipe, precision="bf16"), tmp_path / "bf16", device="cuda").series("covariance")[0]
    full = sw.train(recipe, tmp_path / "full", device="cuda").series("covariance")[0]
    assert bf16 == pytest.approx(full, rel=0.3, abs=1e-4 * full[0])


def test_garbage_of_an_earlier_recording_does_not_spoil_another():
    import gc

    from stairwise.training.graph import Recorded

    x = torch.ones(3, device="cuda")
    earlier = Recorded(lambda x: x + 1)
    for _ in range(5):
        earlier(x)

    def work(x):
        nonlocal earlier
        if torch.cuda.is_current_stream_capturing():
            cycle = [earlier]
            cycle.append(cycle)
            earlier = cycle = None
        kept = [[] for _ in range(10_000)]  # time to collect
        return x + len(kept)

    with_garbage, threshold = Recorded(work), gc.get_threshold()
    gc.set_threshold(100, 1, 1)
    try:
        out = [float(with_garbage(x)[0]) for _ in range(5)]
    finally:
        gc.set_threshold(*threshold)
    assert out == [10_001.0] * 5


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_updating_the_monitor_waits_for_nothing():
    z = torch.randn(2, 64, 16, device="cuda", requires_grad=True)
    h = torch.randn(2, 64, 32, device="cuda", dtype=torch.bfloat16)
    criterion = sw.losses.VICReg()
    with sw.SpectrumMonitor().attach(loss=criterion, every=100):
        criterion(z[0], z[1])
        monitor = sw.SpectrumMonitor(half_life=100.0)
        monitor.update(z[0].detach(), z[1].detach(), h[0], h[1])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):  # sums are taken several times
                monitor.collect(z[0].detach(), z[1].detach(), h[0], h[1])
                monitor.update(z[0].detach(), z[1].detach(), h[0], h[1])
                criterion(z[0], z[1])
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_monitor_goes_on_from_a_checkpoint_on_the_gpu():
    z = torch.randn(2, 64, 4, device="cuda")
    whole, first, second = sw.SpectrumMonitor(), sw.SpectrumMonitor(), sw.SpectrumMonitor()
    for _ in range(2):
        whole.update(z[0], z[1])
    first.update(z[0], z[1])
    second.load({name: value.cpu() for name, value in first.state().items()})
    second.update(z[0], z[1])
    assert second.compute().eigenvalues == pytest.approx(whole.compute().eigenvalues)


def small_encoder(name):
    """A narrow network, all by rules, and images whose maps have 36 and 9 positions, no multiples of eight."""
    from stairwise.nets.encoder import build_encoder

    torch.manual_seed(0)
    small = {"stem": "small"} if name == "resnet18" else {}
    return build_encoder(name, {"width": 16, **small}).cuda().eval(), torch.randn(40, 3, 48, 48, device="cuda")


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_tangent_kernels_on_the_gpu(name, monkeypatch):
    """Smooth networks: rounding may turn a ReLU on or off, or choose another maximum."""
    from stairwise.ntk.capture import Capture
    from stairwise.ntk.empirical import empirical_ntk, ntk_error
    from stairwise.ntk.fast.convolutions import ConvolutionsByProducts
    from stairwise.ntk.fast.second_stream import SecondStream

    model, x = small_encoder(name)
    monkeypatch.setattr(torch, "relu", torch.nn.functional.silu)
    model.maxpool = torch.nn.Identity()
    for convolutions in (None, ConvolutionsByProducts):
        for stream in (None, SecondStream):
            capture = Capture(model, lambda z: z[:, 0], x, convolutions, stream)
            capture.factors(x)
            assert capture.by_rule == {name for name, _ in model.named_parameters()}
            assert capture.convolutions is convolutions
    for precision, error in (("float64", 1e-10), ("float32", 1e-5), ("tf32", 1e-2), ("float16", 1e-3)):
        K = empirical_ntk(model, x, precision=precision)
        assert ntk_error(model, x, K, 40) < error, precision
        tiled = empirical_ntk(model, x, precision=precision, memory=1e8 * (1 + (precision == "float64")))
        assert float((tiled - K).abs().max() / K.max()) < error


@pytest.mark.filterwarnings("ignore:this model's convolutions are left to torch")
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_that_torch_gets_wrong_in_channels_last_layout_are_noticed(stride):
    """Those of padded average pools, in torch 2.13."""
    from stairwise.ntk.empirical import empirical_ntk, ntk_error

    torch.manual_seed(0)
    parts = [torch.nn.Conv2d(3, 8, 3), torch.nn.SiLU(), torch.nn.AvgPool2d(3, stride, 1), torch.nn.Conv2d(8, 8, 3)]
    model = torch.nn.Sequential(*parts, torch.nn.AdaptiveAvgPool2d(6), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4))
    model, x = model.cuda().eval(), torch.randn(20, 3, 18, 18, device="cuda")
    for precision, error in (("float32", 1e-5), ("float16", 1e-3)):
        assert ntk_error(model, x, empirical_ntk(model, x, precision=precision)) < error


@pytest.mark.parametrize(("n", "parts", "rest"), [(64, 30, 8), (3000, 9, 8), (64, 2, 0), (64, 0, 40)])
def test_long_sums_of_float16_are_not_cut_off(n, parts, rest):
    from stairwise.ntk.fast import half

    torch.manual_seed(0)
    x = torch.rand(n, parts * half.TERMS + rest, device="cuda").half()
    exact = x[:64].double() @ x.double().T
    for slice_bytes in (1e10, 16 * 2 * n * n):
        products = half.HalfProducts().product(x, x, slice_bytes)
        assert float(((products[:64] - exact) / exact).abs().max()) < 3e-5


TWO = """
import os, sys, torch, torch.distributed as dist
from stairwise.ntk.empirical import empirical_ntk
from tests.test_gpu import small_encoder
dist.init_process_group("gloo")
model, x = small_encoder("resnet18")
K = empirical_ntk(model, x, memory=1e8)
torch.save(K.cpu(), f"{sys.argv[1]}/{dist.get_rank()}.pt")
dist.barrier()
os._exit(0)  # threads of gloo do not always survive the end of the interpreter
"""


def test_two_processes_on_one_gpu_share_the_tiles_of_a_tangent_kernel(tmp_path):
    from stairwise.ntk.empirical import empirical_ntk
    from tests.two_processes import run_two

    assert run_two("-c", TWO, str(tmp_path)) == [0, 0]
    model, x = small_encoder("resnet18")
    expected = empirical_ntk(model, x).cpu()
    for i in range(2):
        found = torch.load(tmp_path / f"{i}.pt", weights_only=True)
        assert float((found - expected).abs().max() / expected.max()) < 1e-4


@pytest.mark.parametrize(("d", "rel"), [(512, 1e-6), (2048, 1e-3), (9000, 0.05)])
def test_the_monitor_sums_in_a_recorded_step(d, rel):
    """All three layouts, in half precision as under autocast, against sums in float64."""
    import stairwise as sw
    from stairwise.training.graph import Recorded

    torch.manual_seed(0)
    monitor = sw.SpectrumMonitor()
    step = Recorded(monitor.update)
    modes = torch.randn(300, d, device="cuda") * torch.arange(1, 301, device="cuda")[:, None] ** -1.0
    for window in range(2):
        views = [(torch.randn(256, 300, device="cuda") @ modes).bfloat16() for _ in range(8)]
        noise = [(z + 0.1 * torch.randn_like(z)).bfloat16() for z in views]
        for pair in zip(views, noise, strict=True):
            step(*pair)
        found = monitor.compute()
        if window == 0:
            monitor.reset()
    a, b = (torch.cat(side).double() for side in (views, noise))
    C = (a.T @ b + b.T @ a) / (2 * len(a))
    values = torch.linalg.eigvalsh(C).flip(0)[:64].cpu().numpy()
    assert found.samples == len(a)
    assert found.eigenvalues[:64] == pytest.approx(values, rel=rel)
    assert found.trace == pytest.approx(float(C.trace()), rel=1e-4)


@pytest.mark.parametrize(("d", "rel"), [(512, 1e-6), (3000, 1e-3), (8192, 1e-3)])
def test_records_are_prepared_beside_training(d, rel):
    """Copies, reset and the next batches follow each other without waiting; each record has its own batches, and a bad
    one is left out."""
    torch.manual_seed(0)
    monitor = sw.SpectrumMonitor()
    scale = torch.arange(1, 401, device="cuda")[:, None] ** -1.0
    modes, windows, pending = torch.randn(400, d, device="cuda") * scale, [], []
    for window in range(4):
        base = torch.randn(2048, 400, device="cuda") @ modes * (1 + window) + 3
        pairs = (base.bfloat16(), (base + 0.1 * torch.randn_like(base)).bfloat16())
        for a, b in zip(*(view.split(256) for view in pairs), strict=True):
            monitor.collect(a, b, a[:, :1500], b[:, :1500])
        monitor.collect(a * torch.nan, b)
        windows.append(pairs)
        pending.append(monitor.copies())
        monitor.reset()
    assert set(monitor.kept.rows) == (set() if d == 512 else {"z", "h"})
    for number, (pairs, copies) in list(enumerate(zip(windows, pending, strict=True)))[1:]:
        found = decompose(copies.arrays())
        a, b = (view.double() for view in pairs)
        C, both = (a.T @ b + b.T @ a) / (2 * len(a)), torch.cat([a, b])
        spectra = {"eigenvalues": C, "covariance": torch.cov(both.T), "hidden": torch.cov(both[:, :1500].T)}
        for name, matrix in spectra.items():
            values = torch.linalg.eigvalsh(matrix).flip(0)[:64].cpu().numpy()
            assert getattr(found, name)[:64] == pytest.approx(values, rel=rel), name
        assert found.variance == pytest.approx(float(both.var(dim=0).sum()), rel=1e-5)
        assert (found.samples, found.skipped) == (2048, number + 1)


def test_memory_of_a_deleted_monitor_is_not_used_again_too_early():
    """Its record and its reset are still under way on another stream, which must not write to others' tensors."""
    z = torch.randn(2, 512, 4096, device="cuda")
    monitor = sw.SpectrumMonitor()
    monitor.update(z[0], z[1])
    monitor.snapshot()  # now it has a stream
    shape = monitor.sums["uu"].shape
    with torch.cuda.stream(monitor.aside.stream):
        torch.cuda._sleep(10**9)
    copies = monitor.copies()
    monitor.reset()
    del monitor
    mine = [torch.ones(shape, device="cuda") for _ in range(2)]
    assert decompose(copies.arrays()).samples == 512
    torch.cuda.synchronize()
    assert all((x == 1).all() for x in mine)


def test_a_monitor_leaves_weights_as_they_are():
    """To the bit, also while its records are prepared on another stream."""
    weights = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2048)).cuda()
        loss, optimizer = sw.losses.BarlowTwins(), torch.optim.SGD(model.parameters(), lr=1e-3)
        watch = sw.SpectrumMonitor().attach(loss=loss, optimizer=optimizer, every=5) if watched else None
        for _ in range(40):
            x = torch.randn(256, 64, device="cuda")
            optimizer.zero_grad()
            loss(model(x), model(x + 0.1 * torch.randn_like(x))).backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
        if watch is not None:
            watch.close()
            assert len(watch.records) > 0
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def matrices_of_many_shapes(device):
    torch.manual_seed(0)
    shapes = ((64, 27), (64, 576), (64, 576), (128, 64), (16, 300), (300, 16), (48, 48), (512, 256))
    return [torch.randn(shape).to(device) for shape in shapes]


@pytest.mark.parametrize("scaling", ["relative", "fixed", "keller", "moonshot"])
def test_padded_stacks_in_parallel_equal_matrices_one_by_one(scaling):
    """In float32, recorded on several streams, against the CPU, which neither pads nor records."""
    from stairwise.training.graph import Recorded
    from stairwise.training.newton_schulz import PADDING, descend, plan, start_lengths

    expected, updates = matrices_of_many_shapes("cpu"), [x.flip(0) for x in matrices_of_many_shapes("cpu")]
    lengths = start_lengths(expected)
    weights, on_gpu = matrices_of_many_shapes("cuda"), [u.cuda() for u in updates]
    rate, lengths_there = torch.full((), 0.01, device="cuda"), [n.cuda() for n in lengths]
    step = Recorded(lambda: descend(weights, on_gpu, rate, scaling, lengths_there, dtype=torch.float32))
    for _ in range(6):
        step()
        descend(expected, updates, torch.tensor(0.01), scaling, lengths)
    assert len(step.recordings) == 1
    shapes = tuple(tuple(w.shape) for w in weights)
    assert len(plan(shapes, PADDING)) < len(plan(shapes))
    for w, e in zip(weights, expected, strict=True):
        assert torch.allclose(w.cpu(), e, rtol=1e-3, atol=1e-3 * float(e.abs().max()))  # TF32 may be on


def test_polar_factors_in_bfloat16():
    from stairwise.training.newton_schulz import descend

    updates = matrices_of_many_shapes("cuda")
    moved = [torch.zeros_like(u) for u in updates]
    descend(moved, updates, torch.ones((), device="cuda"), "keller")
    for u, w in zip(updates, moved, strict=True):
        left, _, right = torch.linalg.svd(u, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(-w.flatten(), (left @ right).flatten(), dim=0) > 0.97


@pytest.mark.parametrize("changes", [{}, {"rest": "adamw"}, {"foreach": False}, {"groups": True}])
def test_muon_in_a_cuda_graph(changes):
    """Recorded steps equal ordinary ones, follow lr, and leave everything as it is if the gradient is not finite."""

    def build():
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, bias=False),
            torch.nn.BatchNorm2d(16),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 36, 10),
        ).to("cuda", memory_format=torch.channels_last)
        lr = torch.full((), 0.02, device="cuda")
        options = {key: value for key, value in changes.items() if key != "groups"}
        params = [{"params": layer.parameters()} for layer in (network[0], network[1], network[3])]
        given = params if "groups" in changes else network.parameters()
        return network, lr, sw.Muon(given, lr=lr, rest_lr=1e-3, dtype=torch.float32, **options)

    x = torch.empty(8, 3, 8, 8, device="cuda")

    def step(network, optimizer):
        optimizer.zero_grad(set_to_none=False)
        network(x).square().mean().backward()
        optimizer.step()

    def fill(i):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(i)))

    (ours, lr, optimizer), (theirs, their_lr, ordinary) = build(), build()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            fill(i)
            step(ours, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step(ours, optimizer)
    for i in range(3):
        fill(i)
        step(theirs, ordinary)
    for i in range(3, 8):
        lr.fill_(0.1 / i)
        their_lr.fill_(0.1 / i)
        fill(i)
        graph.replay()
        step(theirs, ordinary)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-3, atol=1e-4)
    places = [state["momentum_buffer"].data_ptr() for state in optimizer.state.values() if "length" in state]
    ours[0].weight.grad, kept = None, ours[0].weight.grad  # an ordinary step with fewer gradients moves no momentum
    optimizer.step()
    ours[0].weight.grad = kept
    assert places == [state["momentum_buffer"].data_ptr() for state in optimizer.state.values() if "length" in state]
    before = [p.detach().clone() for p in ours.parameters()]
    x.fill_(float("nan"))
    graph.replay()
    assert optimizer.skipped == 1
    assert all(torch.equal(p, b) for p, b in zip(ours.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_muon_must_take_a_step_before_it_is_recorded():
    layer = torch.nn.Linear(4, 4, device="cuda")
    optimizer = sw.Muon(layer.parameters())
    layer(torch.randn(2, 4, device="cuda")).sum().backward()
    with pytest.raises(sw.InputError, match="once before it is recorded"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_convolutional_kernels_equal_those_of_the_cpu():
    """In tiles, in both precisions; compiled, which takes most of the time, for one network only."""
    from stairwise.kernel.conv import conv_covariances
    from stairwise.kernel.convnet import ConvNet

    x = torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    residual = ConvNet(5, skip=2, strides=(1, 2), head="gap", bias_variance=0.1)
    for net in (ConvNet(6, head="gap"), residual, ConvNet(4)):
        exact = conv_covariances(net, x, x)
        for dtype, rtol in ((torch.float64, 1e-7), (torch.float32, 2e-4)):
            on_gpu = x.to("cuda", dtype)
            for compiled in (False, True) if net is residual and dtype == torch.float32 else (False,):
                found = conv_covariances(net, on_gpu, on_gpu, memory=1 << 24, compiled=compiled)
                for K, expected in zip(found, exact, strict=True):
                    torch.testing.assert_close(K.cpu().double(), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "exact", "solver": "krylov", "memory": 300_000},
        {"method": "exact", "solver": "krylov", "memory": 20_000},
        {"method": "nystroem", "n_features": 60, "landmarks": "pivoted"},
        {"method": "features", "n_features": 90},
    ],
    ids=["tiles", "recomputed", "nystroem", "features"],
)
def test_kernels_of_many_points_are_those_of_the_cpu(settings):
    rng = np.random.default_rng(0)
    base = rng.standard_normal((150, 8)) * np.linspace(2, 0.3, 8)
    x_a, x_b = (base + 0.3 * rng.standard_normal(base.shape) for _ in "ab")
    expected = sw.KernelSSL(4, **settings).fit(x_a, X_b=x_b)
    for dtype, off in (("float64", 1e-9), ("float32", 1e-4)):
        found = sw.KernelSSL(4, device="cuda", dtype=dtype, **settings).fit(x_a, X_b=x_b)
        np.testing.assert_allclose(found.step_times(1e-4), expected.step_times(1e-4), rtol=max(off, 1e-3))
        np.testing.assert_allclose(found.eigenvalues_, expected.eigenvalues_, rtol=off)
        z = found.transform(x_a)
        assert isinstance(z, np.ndarray)
        np.testing.assert_allclose(np.abs(z), np.abs(expected.transform(x_a)), atol=100 * off)


def test_modes_of_many_points_on_the_gpu_are_those_of_float64():
    """Tiles as halves and as plain float32, in long sums, with wide blocks; TF32 of the caller is not used."""
    from stairwise.kernel.kernels import rbf
    from stairwise.kernel.operators import Blocks
    from stairwise.kernel.solvers import solve
    from stairwise.kernel.tiles import TilePairs

    generator = torch.Generator().manual_seed(0)
    base = torch.randn(1500, 40, generator=generator, dtype=torch.float64) * torch.arange(1, 41) ** -0.6
    x_a, x_b = (base + 0.3 * torch.randn(base.shape, generator=generator, dtype=torch.float64) for _ in "ab")
    exact = sw.KernelSSL(20, kernel=rbf(0.1), method="exact", solver="krylov").fit(x_a, X_b=x_b)
    parts = tuple(x.to("cuda", torch.float32) for x in (x_a, x_b))
    for halves in (True, False):
        pairs = TilePairs(Blocks(parts, (rbf(0.1),) * 2, True, "float32"), memory=20_000_000, halves=halves)
        assert pairs.stored
        found = solve(pairs, 20, "krylov", spare=20)
        np.testing.assert_allclose(found.eigenvalues, exact.eigenvalues_, rtol=1e-5)
        assert found.trusted
        assert found.products <= 400  # those with halves do not wait for digits that they lack
        block = torch.randn(3000, 7, generator=generator, dtype=torch.float64).cuda()
        dense = Blocks(parts, (rbf(0.1),) * 2, True, "float32").matrix().double()
        torch.testing.assert_close(pairs.matmul(block), dense @ block, rtol=0, atol=1e-4)
        torch.testing.assert_close(pairs.rough(block), dense @ block, rtol=0, atol=0.1 if halves else 1e-4)
    torch.set_float32_matmul_precision("high")
    try:
        est = sw.KernelSSL(20, kernel=rbf(0.1), dtype="float32", memory=20_000_000).fit(*parts[:1], X_b=parts[1])
        assert est._model.operator().halves
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    np.testing.assert_allclose(est.eigenvalues_, exact.eigenvalues_, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["rbf", ("rbf", "laplace")], ids=str)
def test_landmarks_and_sums_stay_on_the_gpu(kernel):
    rng = np.random.default_rng(0)
    base = rng.standard_normal((400, 8))
    x_a, x_b = (torch.tensor(base + 0.2 * rng.standard_normal(base.shape)) for _ in "ab")
    settings = {"kernel": kernel, "method": "nystroem", "n_features": 100}
    expected = sw.KernelSSL(6, **settings).fit(x_a, X_b=x_b)
    found = sw.KernelSSL(6, **settings).fit(x_a.cuda(), X_b=x_b.cuda())
    np.testing.assert_allclose(found.eigenvalues_, expected.eigenvalues_, rtol=1e-9)
    z = found.transform(x_b.cuda(), view="b")
    assert z.is_cuda
    torch.testing.assert_close(z.cpu(), expected.transform(x_b, view="b"), rtol=0, atol=1e-6)


def normed_model():
    """A narrow ResNet-18 with a head, in double precision, and 40 views of 20 images."""
    from tests.ntk.test_lengths import small

    x = torch.randn(20, 3, 12, 12, generator=torch.Generator().manual_seed(1)).double()
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).double()
    return small(), torch.cat([x, x + 0.1 * noise])


@pytest.mark.parametrize(("precision", "error"), [("float64", 1e-10), ("float32", 1e-4), ("float16", 2e-3)])
def test_kernels_of_parts_on_the_gpu(precision, error, monkeypatch):
    """Layers, hidden and free parameters, directions and filters. A smooth network, as above."""
    from stairwise.ntk.lengths import hidden_weights, kernels_of

    monkeypatch.setattr(torch, "relu", torch.nn.functional.silu)
    model, x = normed_model()
    hidden = hidden_weights(model, x[:2])
    exact = kernels_of(model, x, hidden)
    there, views = deepcopy(model).cuda(), x.cuda()
    if precision != "float64":
        there, views = there.float(), views.float()
    assert hidden_weights(there, views[:2]) == hidden
    found = kernels_of(there, views, hidden, precision=precision)
    assert found.directions.is_cuda
    kernels = {**exact.layers(), "directions": exact.directions, "filters": exact.filters, "s = 4": exact.at(4.0)}
    others = {**found.layers(), "directions": found.directions, "filters": found.filters, "s = 4": found.at(4.0)}
    for name, K in kernels.items():
        size = np.sqrt(np.diagonal(K))
        off = np.abs(torch.as_tensor(others[name]).double().cpu().numpy() - K) / np.outer(size, size)
        assert off.max() < error, name
    assert found.share() == pytest.approx(exact.share(), rel=error)


def test_predictions_from_kernels_on_the_gpu():
    from stairwise.ntk.predict import kernel_pca, predict_embeddings, unit_diagonal

    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 200)) * np.arange(1, 201) ** -0.8
    both = np.concatenate([x, x + 0.3 * rng.standard_normal(x.shape) * np.arange(1, 201) ** -0.8])
    for K in (both @ both.T, (both @ both.T).astype(np.float32)):
        there = torch.tensor(K).cuda()
        off = 1e-7 if K.dtype == np.float64 else 1e-3
        for one, other in ((K, there), (unit_diagonal(K), unit_diagonal(there))):
            for predict in (predict_embeddings, kernel_pca):
                expected, found = predict(one, 20), predict(other, 20)
                assert isinstance(found, np.ndarray)
                assert sw.subspace_alignment(expected, found) > 1 - off
                assert np.abs(found).max() == pytest.approx(np.abs(expected).max(), rel=max(off, 1e-5))


def test_studies_of_networks_on_the_gpu():
    """Scores of kernels and lengths, as on the CPU."""
    from stairwise.ntk.lengths import study_lengths
    from stairwise.ntk.study import study

    model, x = normed_model()
    there, views = deepcopy(model).cuda(), x.cuda()
    expected, found = (study("tiny", m, v, initial=m, precision="float64") for m, v in ((model, x), (there, views)))
    assert found.scores == pytest.approx(expected.scores, rel=1e-5)
    assert found.by_dimension == pytest.approx(expected.by_dimension, rel=1e-5)
    assert found.kernel == pytest.approx(expected.kernel, rel=1e-8)
    expected, found = (study_lengths("tiny", m, v) for m, v in ((model, x), (there, views)))
    assert found.scores == pytest.approx(expected.scores, rel=1e-4, nan_ok=True)
    assert found.facts["function_change"] < 1e-9
    assert found.facts["hidden_share"] == pytest.approx(expected.facts["hidden_share"])


def test_next_modes_on_the_gpu():
    from stairwise.ntk.coming import study_coming
    from tests.ntk.test_coming import linear_staircase

    models, views = linear_staircase()
    expected = study_coming("tiny", models, views, predicted=6)
    there = [(step, deepcopy(model).cuda()) for step, model in models]
    found = study_coming("tiny", there, [x.cuda() for x in views], predicted=6)
    assert found.grown.tolist() == expected.grown.tolist()
    assert found.shares == pytest.approx(expected.shares, abs=1e-5)
    assert found.chance == pytest.approx(expected.chance)


@pytest.mark.usefixtures("deterministic_convolutions")
@pytest.mark.parametrize("loss", ["barlow_twins", "byol"])
def test_followed_views_on_the_gpu(tmp_path, loss):
    """They are those of the network in evaluation mode, and recorded steps do not notice."""
    from stairwise.evaluate.representations import eval_mode
    from stairwise.runs.followed import read_followed

    small = {"encoder": "resnet18", "encoder_options": {"stem": "small", "width": 16}, "loss": loss, "follow": 24}
    recipe = TINY.with_settings(small)
    runs = [sw.train(recipe.with_settings({"follow": n}), tmp_path / str(n), device="cuda") for n in (0, 24)]
    assert runs[0].series("loss") == pytest.approx(runs[1].series("loss"), rel=1e-4)
    found = read_followed(runs[1].folder)
    assert found.t == pytest.approx(runs[1].times)
    assert set(found.spectra) == ({"z", "predictor", "target"} if loss == "byol" else {"z"})
    assert (found.z**2).sum(axis=1) / 48 == pytest.approx(found.spectra["z"], rel=1e-2, abs=1e-12)
    trainer = Trainer(recipe, runs[1].folder, torch.device("cuda"))
    trainer.resume()
    views = trainer.material.pairs.copy().fixed(torch.arange(24), 0)
    with eval_mode(trainer.objective):
        z = torch.cat([trainer.network(x)[1] for x in views]).double().cpu().numpy()
    trainer.close()
    lam = np.linalg.svd(z - z.mean(axis=0))[1] ** 2 / 48
    assert found.spectra["z"][-1] == pytest.approx(lam, rel=1e-2, abs=1e-5 * lam[0])


def test_stored_studies_of_runs_on_the_gpu(tmp_path):
    """All that Tables 1 and 2 and the next modes need; other views than those of a CPU are refused."""
    from stairwise.checks import InputError
    from stairwise.training import studies

    small = {"encoder": "resnet18", "encoder_options": {"stem": "small", "width": 16}, "keep": 3, "d": 4, "alpha": 0.5}
    runs = [
        sw.train(TINY.with_settings(small | {"seed": seed}), tmp_path / str(seed), device="cuda") for seed in (0, 1)
    ]
    how = "cuda", "float16", lambda *_: None
    for run in runs:
        scores, arrays = studies.stored_study(run, 40, 0, *how, views="barlow")
        assert all(np.isfinite(value) for value in scores.values())
        assert arrays["embeddings"].shape == (80, 4)
        facts, lengths = studies.stored_lengths(run, 40, 0, *how, views="barlow")
        assert facts["function_change"] < 1e-3
        at_one = lengths["kernels"].tolist().index("s = 1")
        assert lengths["scores"][at_one, :2] == pytest.approx([scores["theory"], scores["kernel PCA"]], abs=0.01)
        drift = studies.stored_drift(run, 30, 0, *how, views="barlow")
        assert drift["with_last"][-1] == pytest.approx(1.0)
        coming = studies.stored_coming(run, 40, [0, 1], *how, views="barlow")
        assert coming["shares"].shape[:2] == (2, 2)
    studies.refuse_other_views(runs, 0, "barlow")
    studies.study_of(runs[1], 40, 0, "cpu", "float32", views="barlow").write(runs[1].folder / "ntk" / "barlow-0")
    with pytest.raises(InputError, match="of the same views"):
        studies.refuse_other_views(runs, 0, "barlow")


@pytest.mark.slow
def test_studies_of_the_papers_network_fit_on_the_gpu():
    """ResNet-50, 96 px, 1000 pairs, d = 50: all kernels, in less than half a minute."""
    import time

    from stairwise.nets.encoder import Network, build_encoder
    from stairwise.nets.perceptron import head
    from stairwise.ntk.lengths import study_lengths
    from stairwise.ntk.study import Outputs

    torch.manual_seed(0)
    backbone = build_encoder("resnet50", {})
    model = Outputs(Network(backbone, head(backbone.features, [512], 50))).cuda()
    x = torch.randn(1000, 3, 96, 96, device="cuda")
    with torch.no_grad():
        model(x[:256])  # running averages
    views = torch.cat([x, x + 0.3 * torch.randn_like(x)])
    began = time.perf_counter()
    found = study_lengths("large", model.eval(), views, precision="float16")
    seconds = time.perf_counter() - began
    assert np.isfinite(found.scores[:, 1]).all()
    print(f"{len(found.kernels)} kernels in {seconds:.1f} s, {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")
    assert seconds < 30
