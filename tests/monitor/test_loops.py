"""Training loops of many kinds: the monitor records the right views, and the weights are those without it."""

import pickle
import re
import subprocess
import sys
import warnings
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import stairwise as sw
from stairwise.monitor import hooks
from stairwise.runs.log import read_log
from tests.monitor.loops import Model, Spy, batches, watched
from tests.two_processes import run_two

NONE = "no embeddings were seen"


def says(watch, *patterns):
    """Everything that the monitor said, in order; where warnings are errors, as in tests, it goes to stderr."""
    assert len(watch.tell.said) == len(patterns), watch.tell.said
    for said, pattern in zip(watch.tell.said, patterns, strict=True):
        assert re.search(pattern, said)


def by_loss(model):
    return {"loss": model.criterion, "backbone": model.backbone}


def by_projector(model):
    return {"projector": model.projector, "backbone": model.backbone}


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def embed(model, views, spy):
    """z of all views; the first two are spied on."""
    h = [model.backbone(x) for x in views]
    z = [model.projector(one) for one in h]
    spy.see(z[0], z[1], h[0], h[1])
    return z


@pytest.mark.parametrize("hook", [by_loss, by_projector])
def test_accumulated_gradients(hook):
    """A backward pass per batch and an update for every second: each batch has its pair."""

    def loop(model, optimizer, spy):
        for i, views in enumerate(batches()):
            model.criterion(*embed(model, views, spy)).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()

    watch, spy = watched(loop, hook)
    assert watch.step == 4
    spy.check(watch.records[0])


def test_many_crops():
    """Six calls and one backward pass: the first two are the views; this is said once, unless `views` says it."""

    def loop(model, optimizer, spy):
        for views in batches(views=6):
            z = embed(model, views, spy)
            step(optimizer, sum(sw.losses.vicreg(z[0], other) for other in z[1:]) / 5)

    watch, spy = watched(loop, by_projector)
    says(watch, "called 6 times per update: .* write views=2")
    spy.check(watch.records[0])
    watch, spy = watched(loop, by_projector, views=2)
    says(watch)
    spy.check(watch.records[0])


def test_crops_joined_in_one_batch():
    def loop(model, optimizer, spy):
        for views in batches(views=4):
            h = model.backbone(views.flatten(0, 1))
            z = model.projector(h)
            spy.see(*z.chunk(4)[:2], h)
            step(optimizer, sw.losses.vicreg(*z.chunk(4)[:2]) + z[64:].square().mean())

    watch, spy = watched(loop, by_projector, views=4, joined=True)
    says(watch, r"recorded h has 128 rows per batch and z 64, .* use watch.update\(z_a, z_b, h_a, h_b\)")
    spy.check(watch.records[0])


def test_views_that_are_joined_after_the_backbone():
    def loop(model, optimizer, spy):
        for views in batches():
            h = [model.backbone(x) for x in views]
            z = model.projector(torch.cat(h))
            spy.see(*z.chunk(2), *h)
            step(optimizer, sw.losses.vicreg(*z.chunk(2)))

    watch, spy = watched(loop, by_projector, joined=True)
    says(watch)
    spy.check(watch.records[0])


def test_global_and_local_crops_in_two_calls_of_the_backbone():
    """As DINO's MultiCropWrapper calls them: h is that of the global crops, like z."""

    def loop(model, optimizer, spy):
        for views in batches(views=5):
            h = [model.backbone(x.flatten(0, 1)) for x in (views[:2], views[2:])]
            z = model.projector(torch.cat(h))
            spy.see(*z.chunk(5)[:2], h[0])
            step(optimizer, sw.losses.vicreg(*z.chunk(5)[:2]) + z[64:].square().mean())

    watch, spy = watched(loop, by_projector, views=lambda z: z.chunk(5)[:2])
    says(watch)
    spy.check(watch.records[0])


class Named(nn.Module):
    """A loss that returns its parts, too."""

    def forward(self, a, b):
        return sw.losses.vicreg(a, b), {"invariance": (a - b).square().mean()}


def test_batches_that_accumulate_under_a_loss_that_returns_more():
    def loop(model, optimizer, spy):
        for i, views in enumerate(batches(12), 1):
            z = [model(x) for x in views]
            spy.see(*z)
            model.criterion(*z)[0].backward()
            if i % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()

    def make():
        model = Model()
        model.criterion = Named()
        return model

    watch, spy = watched(loop, lambda model: {"loss": model.criterion}, make=make)
    says(watch)
    spy.check(watch.records[0])
    assert watch.records[0].loss > 0


@pytest.mark.parametrize("locals_", [2, 3])
def test_joined_global_crops_are_not_mixed_with_local_ones(locals_):
    """Two calls of the backbone; two local crops have as many rows as two global ones."""

    def loop(model, optimizer, spy):
        for views in batches(views=2 + locals_):
            h = [model.backbone(x.flatten(0, 1)) for x in (views[:2], views[2:])]
            z = model.projector(torch.cat(h))
            spy.see(*z.chunk(2 + locals_)[:2], h[0])
            step(optimizer, sw.losses.vicreg(*z[:64].chunk(2)) + z[64:].square().mean())

    watch, spy = watched(loop, by_projector, joined=True, views=2 + locals_)
    says(watch)
    spy.check(watch.records[0])


@pytest.mark.parametrize("with_projector", [False, True])
def test_evaluation_with_gradients_is_left_out(with_projector):
    """A criterion stays in training mode; the backbone does not."""
    losses = []

    def loop(model, optimizer, spy):
        losses.clear()
        for views in batches():
            loss = model.criterion(*embed(model, views, spy))
            losses.append(loss.item())
            step(optimizer, loss)
            model.eval()
            model.criterion.train()
            model.criterion(*(model.projector(model.backbone(100 * x)) for x in views))
            model.train()

    def hook(model):
        return by_loss(model) | ({"projector": model.projector} if with_projector else {})

    watch, spy = watched(loop, hook)
    says(watch)
    spy.check(watch.records[0])
    assert watch.records[0].loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.parametrize("gradients", [False, True])
def test_calls_in_evaluation_mode_before_the_loss(gradients):
    """An online probe looks at other samples after z has been computed."""

    def loop(model, optimizer, spy):
        for views in batches():
            z = embed(model, views, spy)
            model.eval()
            with torch.set_grad_enabled(gradients):
                model.backbone(views[0])
            model.train()
            step(optimizer, model.criterion(*z))

    watch, spy = watched(loop, by_loss)
    says(watch)
    spy.check(watch.records[0])


def test_a_target_in_evaluation_mode():
    def loop(model, optimizer, spy):
        for views in batches():
            z_a = model(views[0])
            model.eval()
            with torch.no_grad():
                z_b = model(views[1])
            model.train()
            spy.see(z_a, z_b)
            step(optimizer, model.criterion(z_a, z_b))

    watch, _ = watched(loop, by_loss)
    assert "query and the key" in watch.tell.said[0]
    assert watch.records[0].samples == 8 * 32


@pytest.mark.parametrize("counted", [False, True])
def test_a_backbone_that_is_trained_in_evaluation_mode(counted):
    """Its statistics are frozen after the first update; if updates are counted, one of them is left out."""
    model, spy = Model(), Spy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch = sw.SpectrumMonitor().attach(**by_loss(model), optimizer=optimizer if counted else None, every=100)
    for i, views in enumerate(batches()):
        if i == 1:
            model.backbone.eval()
        left_out = i == 1 and counted
        step(optimizer, model.criterion(*embed(model, views, Spy() if left_out else spy)))
    watch.close()
    says(watch)
    assert watch.records[0].samples == 32 * (7 if counted else 8)


def test_a_momentum_key_that_is_zero_is_not_a_label():
    def loop(model, optimizer, spy):
        for views in batches():
            step(optimizer, model.criterion(model(views[0]), torch.zeros(32, 4)))

    watch, _ = watched(loop, lambda model: {"loss": model.criterion})
    says(watch, "query and the key of a momentum encoder")
    assert watch.records[0].samples == 8 * 32


def test_an_optimizer_without_a_learning_rate():
    class Relative(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.05)
            self.param_groups[0]["lr"] = None

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.data -= 0.05 * p.grad

    def loop(model, optimizer, spy):
        for views in batches():
            step(optimizer, model.criterion(*embed(model, views, spy)))

    watch, spy = watched(loop, by_loss, optimizer=Relative)
    says(watch, "no learning rate, so t counts updates")
    spy.check(watch.records[0])
    assert (watch.records[0].step, watch.records[0].t) == (8, 8.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["soft", "several"])
def test_labels_of_a_loss_of_ones_own_are_not_keys(dtype, kind):
    class Own(nn.Module):
        def forward(self, x, labels):
            return (x.float() - labels.float()).square().mean()

    def make():
        model = Model().to(dtype)
        model.criterion = Own()
        return model

    def loop(model, optimizer, spy):
        for views in batches():
            labels = views[0][:, :4].softmax(dim=1) if kind == "soft" else (views[0][:, :4] > 0)
            step(optimizer, model.criterion(model(views[0].to(dtype)), labels.to(dtype)))

    watch, _ = watched(loop, lambda model: {"loss": model.criterion}, make=make)
    assert not watch.records
    assert "compares predictions with labels" in watch.tell.said[0]


def test_views_that_a_function_finds():
    class Rows(nn.Module):
        def forward(self, batch):
            return sw.losses.vicreg(batch["z"][::2], batch["z"][1::2])

    def make():
        model = Model()
        model.criterion = Rows()
        return model

    def loop(model, optimizer, spy):
        for views in batches():
            h = model.backbone(views.transpose(0, 1).flatten(0, 1))
            z = model.projector(h)
            spy.see(z[::2], z[1::2], h)
            step(optimizer, model.criterion({"z": z}))

    watch, spy = watched(loop, by_loss, make, views=lambda args, _: (args[0]["z"][::2], args[0]["z"][1::2]))
    spy.check(watch.records[0])
    watch, spy = watched(loop, by_projector, make, views=lambda z: (z[::2], z[1::2]))
    spy.check(watch.records[0])


class Target(nn.Module):
    def forward(self, p, z):
        return -nn.functional.cosine_similarity(p, z).mean()


def byol():
    model = Model()
    model.criterion = Target()
    return model


def byol_loop(model, optimizer, spy):
    for views in batches():
        z = embed(model, views, spy)
        p = [model.predictor(one) for one in z]
        step(optimizer, model.criterion(p[0], z[1].detach()) + model.criterion(p[1], z[0].detach()))


def test_predictions_are_not_taken_for_views():
    watch, _ = watched(byol_loop, by_loss, byol)
    says(watch, r"as in BYOL and SimSiam: use attach\(projector=model.projection_head", NONE)
    assert watch.records == []


def test_projector_and_loss_together():
    """z from the projector, and only the value from the loss."""
    watch, spy = watched(byol_loop, lambda model: by_loss(model) | by_projector(model), byol)
    spy.check(watch.records[0])
    assert watch.records[0].loss < 0


def test_queries_and_momentum_keys():
    """MoCo: recorded are query and key, which is said, and h of the query."""

    def loop(model, optimizer, spy):
        momentum = deepcopy(model)
        for x_q, x_k in batches():
            h = model.backbone(x_q)
            query = model.projector(h)
            with torch.no_grad():
                key = momentum(x_k)
            spy.see(query, key, h)
            step(optimizer, model.criterion(query, key))

    watch, spy = watched(loop, by_loss, byol)
    says(watch, "recorded are a query and the key of a momentum encoder")
    spy.check(watch.records[0])
    watch, _ = watched(loop, by_projector, byol)
    says(watch, "called once before the backward pass", NONE)
    assert watch.records == []


def test_losses_that_compare_with_labels():
    def make():
        model = Model()
        model.criterion = nn.CrossEntropyLoss()
        return model

    class Soft(nn.Module):
        def forward(self, logits, labels):
            return -(labels * logits.log_softmax(dim=1)).sum(dim=1).mean()

    def make_soft():
        model = Model()
        model.criterion = Soft()
        return model

    def loop(model, optimizer, spy):
        for x, _ in batches():
            step(optimizer, model.criterion(model(x), torch.full((32, 4), 0.25)))

    for one in (make, make_soft):
        watch, _ = watched(loop, by_loss, one)
        says(watch, r"predictions with labels: use attach\(projector=", NONE)
        assert watch.records == []


def test_cached_gradients():
    """GradCache: embeddings without gradient, the loss on all of them, then each part again."""

    def loop(model, optimizer, spy):
        for views in batches():
            with torch.no_grad():
                z = [torch.cat([model(part) for part in x.chunk(2)]) for x in views]
            leaves = [one.requires_grad_() for one in z]
            optimizer.zero_grad()
            model.criterion(*leaves).backward()
            spy.pairs.append([one.detach().double() for one in leaves])
            for x, leaf in zip(views, leaves, strict=True):
                for part, gradient in zip(x.chunk(2), leaf.grad.chunk(2), strict=True):
                    h = model.backbone(part)
                    spy.hidden.append(h.detach().double())
                    model.projector(h).backward(gradient)
            optimizer.step()

    watch, spy = watched(loop, by_loss)
    spy.check(watch.records[0])
    watch, _ = watched(loop, by_projector)
    says(watch, "called once before the backward pass", NONE)
    assert watch.records == []  # these are no pairs, and nothing wrong is recorded


def test_closures_are_counted_once():
    def loop(model, optimizer, spy):
        for views in batches():
            calls = []

            def closure(views=views, calls=calls):
                optimizer.zero_grad()
                h = [model.backbone(x) for x in views]
                z = [model.projector(one) for one in h]
                if not calls:
                    spy.see(*z, *h)
                calls.append(1)
                loss = model.criterion(*z)
                loss.backward()
                return loss

            optimizer.step(closure)
            assert len(calls) > 1

    for hook in (by_loss, by_projector):
        watch, spy = watched(loop, hook, optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3))
        assert watch.step == 8
        says(watch)
        spy.check(watch.records[0])


def test_a_scaler_that_skips_updates():
    def loop(model, optimizer, spy):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125)
        for views in batches():
            with torch.autocast("cpu", torch.bfloat16):
                z = embed(model, views, spy)
            optimizer.zero_grad()
            scaler.scale(model.criterion(*(one.float() for one in z))).backward()
            scaler.step(optimizer)
            scaler.update()

    watch, spy = watched(loop, by_projector)
    assert 0 < watch.step < 8
    assert watch.records[0].samples == 8 * 32
    spy.check(watch.records[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_backbones(reentrant):
    """The backward pass calls the backbone again; it is counted at most once."""

    def loop(model, optimizer, spy):
        for views in batches():
            views.requires_grad_()
            h = [checkpoint(model.backbone, x, use_reentrant=reentrant) for x in views]
            z = [model.projector(one) for one in h]
            spy.see(*z, *([] if reentrant else h))
            step(optimizer, model.criterion(*z))

    watch, spy = watched(loop, by_projector)
    says(watch, *(["so h is left out: .* use_reentrant=False"] if reentrant else []))
    spy.check(watch.records[0])


@pytest.mark.filterwarnings("ignore")  # of torch
def test_compiled_models_are_compiled_once():
    from torch._dynamo.testing import CompileCounter

    counters = []

    def loop(model, optimizer, spy):
        torch._dynamo.reset()
        counters.append(CompileCounter())
        compiled = torch.compile(model, backend=counters[-1])
        for views in batches(20):
            z = [compiled(x) for x in views]
            spy.see(*z)
            step(optimizer, model.criterion(*z))

    watch, spy = watched(loop, lambda model: {"projector": model.projector})
    spy.check(watch.records[0])
    assert counters[1].frame_count <= 2


def test_sharded_models():
    """FSDP in one process, on the CPU."""
    code = "import os; from tests.monitor import test_loops as t; t.sharded(t.by_projector); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def sharded(hook):
    """Train a sharded model, with and without a monitor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def make():
        model = Model()
        for part in (model.backbone, model.projector, model):
            fully_shard(part, mesh=mesh)
        return model

    def loop(model, optimizer, spy):
        for views in batches():
            step(optimizer, model.criterion(*embed(model, views, spy)))

    def full(tensors):
        return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in tensors]

    watch, spy = watched(loop, hook, make, full=full)
    spy.check(watch.records[0])


def test_copies_and_pickles_are_not_watched():
    def loop(model, optimizer, spy):
        for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
            for x, _ in batches():
                copy(x).sum().backward()
        for views in batches():
            step(optimizer, model.criterion(*embed(model, views, spy)))

    watch, spy = watched(loop, by_projector)
    spy.check(watch.records[0])


def test_where_warnings_are_errors(capsys, tmp_path):
    """Everything that goes wrong is said on stderr, once, and the training goes on."""

    class Broken:
        def log(self, row):
            raise ConnectionError("no network")

    def loop(model, optimizer, spy):
        for i, views in enumerate(batches(12)):
            z = embed(model, views, spy)
            model.criterion(torch.zeros(3), "no views") if i % 2 else model.criterion(*z)
            step(optimizer, sw.losses.vicreg(*z))

    class Any(nn.Module):
        def forward(self, a, b):
            return torch.zeros(())

    def make():
        model = Model()
        model.criterion = Any()
        return model

    (tmp_path / "metrics.jsonl").write_text("{}\n")  # of an earlier run, which is renamed with a warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch, _ = watched(loop, by_loss, make, every=4, log=[tmp_path, Broken()])
    assert [r.step for r in watch.records] == [4, 8, 12]
    assert [r.step for r in read_log(tmp_path / "metrics.jsonl")[0]] == [4, 8, 12]
    err = capsys.readouterr().err
    for message in ("Any gets one tensor", "no network", "metrics-1.jsonl"):
        assert err.count(message) == 1


def test_views_of_different_sizes():
    def loop(model, optimizer, spy):
        for x_a, x_b in batches():
            z_a, z_b = model(x_a), model(x_b[:3])
            step(optimizer, z_a.square().mean() + z_b.square().mean())

    watch, _ = watched(loop, by_projector)
    says(watch, r"must be 2-D and of the same shape \(got \(32, 4\), \(3, 4\)\)", NONE)
    assert watch.records == []


FORK = """
import os, sys
import torch
import stairwise as sw
from tests.monitor.loops import Model, batches

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
watch = sw.SpectrumMonitor().attach(loss=model.criterion, optimizer=optimizer, every=2, log=sys.argv[1])
for i, views in enumerate(batches(5)):
    model.criterion(*(model(x) for x in views)).backward()
    optimizer.step()
    if i in (1, 2):
        child = os.fork()
        if child == 0:  # neither its training nor its end may wait for a thread that it does not have
            for views in batches(3):
                model.criterion(*(model(x) for x in views)).backward()
                optimizer.step()
            watch.state()
            if i == 1:
                watch.close()
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_forked_processes_and_nobody_closes_it(tmp_path):
    """Children neither hang nor write. At the end of the interpreter the rest is recorded, without `close`."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", FORK, tmp_path], timeout=120, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert [(r.step, r.samples) for r in read_log(tmp_path / "metrics.jsonl")[0]] == [(2, 64), (4, 64), (5, 32)]


ONE_OF_TWO = """
import os, sys
import torch
import torch.distributed as dist
import stairwise as sw
from stairwise.files import save_json

dist.init_process_group("gloo")
rank = dist.get_rank()
criterion = sw.losses.SpectralContrastive()
z = torch.randn(4, 16, 3, generator=torch.Generator().manual_seed(rank)).double()
watch = sw.SpectrumMonitor().attach(loss=criterion, every=2, log=sys.argv[1]) if rank == 0 else None
for batch in z:
    criterion(batch.requires_grad_(), batch)
    dist.all_reduce(torch.ones(1))  # as in training
if rank == 0:
    watch.close()
    assert "not all processes have attached a monitor" in watch.tell.said[0]
dist.barrier()
os._exit(0)  # threads of gloo do not always survive the end of the interpreter
"""


def test_attached_in_the_first_process_only(tmp_path):
    """It says so, records the share of this process, and no collective is left without a partner."""
    assert run_two("-W", "ignore", "-c", ONE_OF_TWO, tmp_path) == [0, 0]
    assert [(r.step, r.samples) for r in read_log(tmp_path / "metrics.jsonl")[0]] == [(2, 32), (4, 32)]


REST_OF_TWO = """
import os, sys, time
import torch
import torch.distributed as dist
import stairwise as sw

dist.init_process_group("gloo")
rank = dist.get_rank()
criterion = sw.losses.SpectralContrastive()
z = torch.randn(3, 16, 3, generator=torch.Generator().manual_seed(rank)).double()
watch = sw.SpectrumMonitor().attach(loss=criterion, every=2, log=sys.argv[1])
for batch in z:
    criterion(batch.requires_grad_(), batch)
if rank == 0 or sys.argv[2] == "both":
    watch.close()
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize(("closing", "samples"), [("both", 32), ("first", 16)])
def test_closing_processes_together_or_alone(tmp_path, closing, samples):
    """The rest of all processes if all close; a process that closes alone waits a few seconds and records its own."""
    assert run_two("-W", "ignore", "-c", REST_OF_TWO, tmp_path, closing) == [0, 0]
    assert [(r.step, r.samples) for r in read_log(tmp_path / "metrics.jsonl")[0]] == [(2, 64), (3, samples)]


class Several(nn.Module):
    """One call with predictions and targets of both views, as in SimSiam."""

    def forward(self, p_a, p_b, z_a, z_b):
        return -F.cosine_similarity(p_a, z_b).mean() - F.cosine_similarity(p_b, z_a).mean()


@pytest.mark.parametrize("detached", [False, True])
def test_a_loss_of_four_tensors_is_not_guessed(detached):
    net, loss = nn.Linear(6, 4), Several()
    watch = sw.SpectrumMonitor().attach(loss=loss, every=2)
    for _ in range(4):
        z_a, z_b = net(torch.randn(32, 6)), net(torch.randn(32, 6))
        targets = (z_a.detach(), z_b.detach()) if detached else (z_a, z_b)
        loss(2 * z_a, 2 * z_b, *targets).backward()
    watch.close()
    says(watch, r"Several gets 4 tensors of one shape, .*: use attach\(projector=", NONE)
    assert watch.records == []


def test_an_optimizer_that_never_steps_is_told_of(monkeypatch):
    monkeypatch.setattr(hooks, "STILL", 5)
    net = nn.Linear(6, 4)
    attached, used = (torch.optim.SGD(net.parameters(), lr=0.01) for _ in range(2))
    watch = sw.SpectrumMonitor().attach(optimizer=attached, every=2)
    for i in range(12):
        z = net(torch.randn(32, 6))
        watch.update(z, z + 0.1)
        z.square().mean().backward()
        (attached if i < 3 else used).step()
    assert len(watch.tell.said) == 1
    assert "made no update in 5 batches" in watch.tell.said[0]
    watch.close()


@pytest.mark.parametrize("interleaved", [False, True])
def test_joined_views_that_are_not_alike_are_told_of(interleaved):
    torch.manual_seed(0)
    net = nn.Linear(20, 16)
    watch = sw.SpectrumMonitor().attach(projector=net, joined=True, every=8)
    for _ in range(48):
        x = torch.randn(256, 20)
        views = (x, x + 0.1 * torch.randn_like(x))
        net(torch.stack(views, dim=1).flatten(0, 1) if interleaved else torch.cat(views)).square().mean().backward()
        watch.recorder.settle(wait=True)
    watch.close()
    says(watch, *(["pairs the first half of a batch with the second, but"] if interleaved else []))


UNEQUAL = """
import sys
import torch
import torch.distributed as dist
import stairwise as sw
from stairwise.monitor import recorder
from tests.two_processes import leave

recorder.LATEST = 2.0
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.01), torch.nn.CosineEmbeddingLoss()
watch = sw.SpectrumMonitor().attach(optimizer=optimizer, every=2, log=sys.argv[1])
with model.join():
    for _ in range(6 if rank == 0 else 3):
        x = torch.randn(16, 8)
        z_a, z_b = model(torch.cat([x, x + 0.1])).chunk(2)
        watch.update(z_a, z_b)
        optimizer.zero_grad()
        criterion(z_a, z_b, torch.ones(16)).backward()
        optimizer.step()
watch.close()
leave()
"""


def test_a_process_that_does_not_come_to_a_record_is_not_waited_for(tmp_path):
    """One process makes three updates, the other one six: its later records are its own."""
    assert run_two("-W", "ignore", "-c", UNEQUAL, tmp_path) == [0, 0]
    assert [(r.step, r.samples) for r in read_log(tmp_path / "metrics.jsonl")[0]] == [(2, 64), (4, 32), (6, 32)]


def test_no_dimension_comes_after_the_last():
    """SimCLR fills all dimensions, and the last ones still rise when they are in use."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    mixing, optimizer = torch.randn(20, 32), torch.optim.SGD(net.parameters(), lr=0.2)
    watch, named = sw.SpectrumMonitor().attach(optimizer=optimizer, every=10), []
    for _ in range(160):
        x = torch.randn(64, 20) @ mixing
        z_a, z_b = (F.normalize(net(x + torch.randn_like(x)), dim=1) for _ in range(2))
        loss = F.cross_entropy(z_a @ z_b.T / 0.2, torch.arange(64))
        watch.update(z_a, z_b, loss=loss)
        step(optimizer, loss)
        watch.recorder.settle(wait=True)
        named += map(int, re.findall(r"Dimension (\d+) comes next", str(watch.advice)))
    watch.close()
    assert watch.advice.learned == 16
    assert not [mode for mode in named if mode > 16]
