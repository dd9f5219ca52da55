"""The loop learns, resumes bit for bit, survives kill -9, damage and divergence, and reports clear errors."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import stairwise as sw
from stairwise.checks import InputError, RunWarning
from stairwise.data.images import load
from stairwise.distributed import choose_device
from stairwise.nets.encoder import build_encoder, build_network
from stairwise.report.run_page import run_page
from stairwise.runs.log import MetricsLog, read_log
from stairwise.runs.reader import Run
from stairwise.runs.record import CLOCKS, Record
from stairwise.training import checkpoint
from stairwise.training.loop import Diverged, Stopped, Trainer
from stairwise.training.measure import top_eigenvalue
from stairwise.training.networks import load_network
from stairwise.training.objective import Bootstrap, build_objective, can_pass_at_once, capturable, two_passes
from stairwise.training.process import StopRequest, locked
from stairwise.training.recipe import Recipe, load_recipe, recipe_names, recipe_of
from tests.command_lines import alone, stairwise
from tests.two_processes import run_two

CPU = torch.device("cpu")
TINY = Recipe(
    data="digits",
    views="simclr-small",
    encoder="resnet18",
    encoder_options={"stem": "small", "width": 8, "channels": 1},
    hidden=[16],
    d=4,
    batch=64,
    steps=12,
    lr=0.05,
    window=64,
    records=6,
    precision="float32",
)


class Classifier(nn.Module):
    """An encoder as a user would write it, with its own random numbers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2))

    def forward(self, x):
        return self.net(x)


def metrics(folder):
    """Records without timings."""
    return [
        {k: v for k, v in r.as_json().items() if k not in CLOCKS} for r in read_log(Path(folder) / "metrics.jsonl")[0]
    ]


# learning


STAIRS = Recipe(
    data="digits",
    views="none",
    encoder="mlp",
    encoder_options={"inputs": 64, "widths": [256]},
    hidden=[],
    head_norm=False,
    head_bias=True,
    d=4,
    loss_options={"lambda_": 1.0, "batch_norm": False, "symmetric": True},
    alpha=1e-3,
    scope="readout",
    lr=0.01,
    momentum=0.0,
    schedule="constant",
    batch=256,
    steps=400,
    records=200,
    window=256,
    precision="float32",
    hidden_spectrum=False,
)


def test_a_small_network_learns_in_steps(tmp_path):
    """From small initialization, the loss begins at d and the eigenvalues rise to 1 one after another."""
    run = sw.train(STAIRS, tmp_path)
    spectra, loss = run.series("eigenvalues"), run.series("loss")
    assert spectra[0, 0] < 1e-3
    assert loss[0] == pytest.approx(4, abs=0.01)
    crossings = [np.argmax(spectra[:, j] > 0.5) for j in range(3)]
    assert 0 < crossings[0] < crossings[1] <= crossings[2]
    assert loss[-1] < 1
    # the loss that was minimized is the sum over modes of (1 − λ)²
    assert np.median(np.abs(loss - ((1 - spectra) ** 2).sum(1))) < 0.05


def test_auto_alpha_starts_at_the_papers_eigenvalue(tmp_path):
    for loss, target in (("barlow_twins", 1e-3), ("vicreg", 1e-3), ("simclr", 1e-6)):
        recipe = replace(TINY, loss=loss, alpha="auto", head_norm=False)
        trainer = Trainer(recipe, tmp_path / loss, CPU)
        assert top_eigenvalue(trainer.network, recipe, trainer.material) == pytest.approx(target, rel=0.03)


@pytest.mark.parametrize("loss", sw.losses.MODULES)
def test_every_loss_trains(loss, tmp_path):
    run = sw.train(replace(TINY, loss=loss, steps=30, lr=0.01), tmp_path)
    losses = run.series("loss")
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "options",
    [
        {"precondition": {"power": 0.5}},
        {"optimizer": "lars", "lr": 2.0},
        {"together": True},
        {"clip": 1.0, "lr": 0.05},
        {"optimizer": "adamw", "lr": 0.003},
    ],
)
def test_options_train(options, tmp_path):
    run = sw.train(replace(TINY, loss="vicreg", steps=30, **{"lr": 0.01, **options}), tmp_path)
    assert run.series("loss")[-1] < run.series("loss")[0]


def test_a_compiled_network_trains_alike(tmp_path, monkeypatch):
    """With a backend that needs no compiler; parameters keep their names, and probes use the plain network."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    options = {"inputs": 64, "widths": [16]}
    recipe = replace(TINY, encoder="mlp", encoder_options=options, probes=["ridge"], probe_images=200)
    plain, fused = (sw.train(replace(recipe, compile=on), tmp_path / str(on)) for on in (False, True))
    assert fused.series("loss") == pytest.approx(plain.series("loss"), rel=1e-5)
    theirs = load_network(plain).state_dict()
    assert all(torch.allclose(v, theirs[k], atol=1e-5) for k, v in load_network(fused).state_dict().items())


def test_growing_views_are_compiled_once_per_size(tmp_path, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    recipe = replace(TINY, sizes=[[0.0, 5], [0.5, 6], [0.8, 8]])
    plain, fused = (sw.train(replace(recipe, compile=on), tmp_path / str(on)) for on in (False, True))
    assert fused.series("loss") == pytest.approx(plain.series("loss"), rel=1e-5)
    assert len(graphs) == 3


def test_compiling_on_a_gpu_needs_triton(monkeypatch):
    objective = build_objective(nn.Linear(2, 2), 2, "simclr", {}, {})
    monkeypatch.setattr("stairwise.training.objective.find_spec", lambda _: None)
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)
    objective.compile_network()  # on a CPU it is not needed
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    with pytest.raises(InputError, match="triton"):
        objective.compile_network()


@pytest.mark.parametrize("name", ["vicreg", "barlow_twins", "simclr", "frossl"])
def test_the_loss_of_four_views_is_the_mean_over_six_pairs(name):
    """Its gradients, too; VICReg computes all pairs at once."""

    class Same(nn.Module):
        def forward(self, x):
            return x, x

    views = [torch.randn(8, 3, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(4)]
    objective = build_objective(Same(), 3, name, {}, {}, repeats=2)
    found = objective(torch.cat(views[:2]), torch.cat(views[2:])).loss
    loss = sw.losses.MODULES[name]()
    expected = torch.stack([loss(a, b) for i, a in enumerate(views) for b in views[i + 1 :]]).mean()
    assert torch.allclose(found, expected)
    for one, other in zip(*(torch.autograd.grad(value, views) for value in (found, expected)), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_views_that_do_not_belong_together_are_refused():
    with pytest.raises(InputError, match=r"views\[2\]"):
        sw.losses.VICReg().mean_over_pairs([torch.randn(8, 3), torch.randn(8, 3), torch.randn(8, 4)])


def test_training_with_four_views_per_image(tmp_path):
    run = sw.train(replace(TINY, loss="simclr", views_per_image=4, steps=30, lr=0.1), tmp_path)
    assert run.series("loss")[-1] < run.series("loss")[0]


@pytest.mark.parametrize(
    "changes", [{"views_per_image": 3}, {"views_per_image": 6}, {"batch": 2, "views_per_image": 4}]
)
def test_impossible_numbers_of_views(changes):
    with pytest.raises(InputError, match="views_per_image"):
        replace(TINY, **changes)


def test_any_module_by_import_path(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_package", sys.modules[__name__])
    recipe = replace(TINY, encoder="my_package:Classifier", encoder_options={"width": 8})
    run = sw.train(recipe, tmp_path)
    assert run.series("hidden").shape[1] == 8
    h, z = load_network(run)(torch.zeros(3, 1, 8, 8))
    assert (h.shape, z.shape) == ((3, 8), (3, 4))


def test_probes_and_stored_network(tmp_path):
    recipe = replace(TINY, probes=["knn", "ridge", "logistic"], probe_times=2, probe_images=300)
    run = sw.train(recipe, tmp_path)
    for name in recipe.probes:
        times, accuracy = run.probes(name)
        assert len(times) == 2
        assert (accuracy > 0.15).all()  # chance is 0.1
    assert run.times[-1] == pytest.approx(sum(0.05 * f for f in _factors(recipe)), rel=1e-6)


def _factors(recipe):
    from stairwise.training.schedule import Schedule

    schedule = Schedule(recipe.schedule, recipe.steps, 0, recipe.final_lr)
    return [schedule.factor(i) for i in range(recipe.steps)]


def test_probing_does_not_disturb_training(tmp_path):
    plain = sw.train(TINY, tmp_path / "plain")
    probed = sw.train(replace(TINY, probes=["knn"], probe_times=12, probe_images=200), tmp_path / "probed")
    assert np.array_equal(plain.series("eigenvalues"), probed.series("eigenvalues"))


def test_streaming_equals_resident(tmp_path, monkeypatch):
    resident = sw.train(TINY, tmp_path / "a")
    monkeypatch.setattr("stairwise.data.feed.Resident", sys.modules["stairwise.data.feed"].Streamed)
    streamed = sw.train(TINY, tmp_path / "b")
    assert metrics(resident.folder) == metrics(streamed.folder)


def test_fixed_views_are_full_batch_descent(tmp_path):
    """A linear network on fixed pairs has the same eigenvalues as gradient descent in `dynamics`."""
    recipe = Recipe(
        data="photos",
        pretrain=200,
        views="crop",
        size=8,
        fixed_views=True,
        encoder="torch.nn:Flatten",
        hidden=[],
        head_norm=False,
        d=4,
        loss_options={"lambda_": 1.0, "batch_norm": False, "symmetric": True},
        alpha=1e-3,
        momentum=0.0,
        lr=1e-4,
        schedule="constant",
        steps=400,
        records=400,
        window=1,
        precision="float32",
        hidden_spectrum=False,
    )
    trainer = Trainer(recipe, tmp_path, CPU)
    x_a, x_b = (x.flatten(1).double().numpy() for x in trainer.fixed_pairs())
    W0 = trainer.network.projector[0].weight.detach().double().numpy().copy()
    run = sw.train(recipe, tmp_path)
    expected = sw.gradient_descent(W0, sw.Correlation.from_pairs(x_a, x_b), 1e-4, 400).eigenvalues
    # a record measures the embeddings before its step
    assert run.series("eigenvalues") == pytest.approx(expected[:-1], abs=2e-4)
    assert run.series("eigenvalues")[-1, 0] > 0.9


# resuming


def test_resuming_after_a_signal_is_exact_to_the_bit(tmp_path):
    recipe = replace(TINY, encoder="my_package:Classifier", encoder_options={}, steps=40, records=13, window=700)
    sys.modules["my_package"] = sys.modules[__name__]
    sw.train(recipe, tmp_path / "whole")

    def interrupt(step, *_):
        if step in (10, 20):
            os.kill(os.getpid(), signal.SIGTERM if step == 10 else signal.SIGINT)

    for name, at in (("SIGTERM", 10), ("SIGINT", 20)):
        with pytest.raises(Stopped, match=f"stopped by {name} after step {at} of 40.*same command again"):
            sw.train(recipe, tmp_path / "parts", progress=interrupt)
        waiting = checkpoint.newest(tmp_path / "parts" / "checkpoints").part("shelf")
        assert len(waiting["z"]) > 0  # embeddings that are not yet summed
    sw.train(recipe, tmp_path / "parts")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    ends = [checkpoint.newest(tmp_path / f / "checkpoints") for f in ("whole", "parts")]
    assert all(torch.equal(ends[0].tensors[k], ends[1].tensors[k]) for k in ends[0].tensors)


def stop_at(last, step, *_):
    if step == last:
        os.kill(os.getpid(), signal.SIGTERM)


def test_rounding_errors_do_not_depend_on_where_a_run_was_stopped(tmp_path):
    """Some eigenvalues of h are zeros up to rounding, which depends on how memory is aligned."""
    mlp = {"encoder": "mlp", "encoder_options": {"inputs": 64, "widths": [32]}}
    recipe = replace(TINY, **mlp, views="none", steps=60, records=20)
    sw.train(recipe, tmp_path / "whole", device="cpu")
    for last in (3, 20, 33, 48):
        parts = tmp_path / f"{last}"
        with pytest.raises(Stopped, match=f"after step {last} of"):
            sw.train(recipe, parts, device="cpu", progress=partial(stop_at, last))
        sw.train(recipe, parts, device="cpu")
        assert metrics(tmp_path / "whole") == metrics(parts)


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path):
    settings = {"steps": 60, "records": 20, "data": "digits", "encoder_options.channels": 1, "encoder_options.width": 8}
    settings |= {"window": 64, "batch": 64, "alpha": 0.1}
    arguments = [a for k, v in settings.items() for a in ("--set", f"{k}={v}")]
    command = [sys.executable, "-m", "stairwise", "train", "photos-bt", *arguments, "--device", "cpu"]
    command += ["--checkpoint-minutes", "0.003", "--out"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run([*command, whole], env=env, check=True, capture_output=True, timeout=120)
    rng, kills = random.Random(0), 0
    for _ in range(40):
        process = subprocess.Popen([*command, parts], env=env, stdout=subprocess.DEVNULL)
        log = parts / "metrics.jsonl"
        size, deadline = log.stat().st_size if log.exists() else 0, time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if kills < 3 and log.exists() and log.stat().st_size != size:  # it has come further
                time.sleep(rng.uniform(0, 0.4))
                process.kill()
                break
            time.sleep(0.02)
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    assert kills == 3
    assert metrics(whole) == metrics(parts)
    assert len(metrics(parts)) >= 20


def test_momentum_of_version_0_1_is_put_in_order(tmp_path):
    """It was saved in the order of memory, which was channels-last; now every parameter is contiguous in the file."""
    with pytest.raises(Stopped):
        sw.train(TINY, tmp_path / "new", progress=lambda step, *_: step == 10 and os.kill(os.getpid(), signal.SIGTERM))
    state = checkpoint.newest(tmp_path / "new" / "checkpoints")
    trainer = Trainer(TINY, tmp_path / "fresh", CPU)
    sizes = [v.numel() for v in trainer.optimizer.momenta]
    parts = zip(state.tensors["momentum"].split(sizes), trainer.optimizer.momenta, strict=True)
    old = [p.view(v.shape).permute(0, 2, 3, 1).reshape(-1) if v.ndim == 4 else p for p, v in parts]
    facts = {key: value for key, value in state.facts.items() if key not in ("momentum", "digest", "format")}
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    shutil.rmtree(tmp_path / "old" / "checkpoints")
    assert not torch.equal(torch.cat(old), state.tensors["momentum"])
    checkpoint.save(tmp_path / "old" / "checkpoints", 10, facts, state.tensors | {"momentum": torch.cat(old)})
    trainer.close()
    for name in ("new", "old"):
        sw.train(TINY, tmp_path / name)
    assert metrics(tmp_path / "new") == metrics(tmp_path / "old")


def test_a_finished_run_is_returned_as_it_is(tmp_path):
    sw.train(TINY, tmp_path)
    before = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    assert len(sw.train(TINY, tmp_path).records) == len(metrics(tmp_path))
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text"])
def test_a_damaged_newest_checkpoint_falls_back(tmp_path, damage):
    recipe = replace(TINY, steps=20, records=10)
    whole = metrics(sw.train(recipe, tmp_path / "whole").folder)

    def stop(step, *_):
        if step in (10, 20) and not (step == 20 and finished):
            os.kill(os.getpid(), signal.SIGTERM)

    finished = False
    with pytest.raises(Stopped):
        sw.train(recipe, tmp_path / "run", progress=stop)
    finished = True
    sw.train(recipe, tmp_path / "run")
    older, newest = sorted((tmp_path / "run" / "checkpoints").iterdir())
    content = bytearray(newest.read_bytes())
    if damage == "truncate":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[-100] ^= 1
    elif damage == "empty":
        content = bytearray()
    else:
        content = bytearray(b"not a checkpoint")
    newest.write_bytes(content)
    with pytest.warns(RunWarning, match="falling back"):
        sw.train(recipe, tmp_path / "run")
    assert metrics(tmp_path / "run") == whole
    assert older.name == "step-0000000010.safetensors"


def test_all_checkpoints_damaged_begins_again(tmp_path):
    whole = metrics(sw.train(TINY, tmp_path).folder)
    for path in (tmp_path / "checkpoints").iterdir():
        path.write_bytes(b"")
    with (
        pytest.warns(RunWarning, match="no whole checkpoint is left"),
        pytest.warns(RunWarning, match=r"metrics-1\.jsonl"),
    ):
        sw.train(TINY, tmp_path)
    assert metrics(tmp_path) == whole
    assert (tmp_path / "metrics-1.jsonl").is_file()


def test_another_recipe_is_refused_and_restart_discards(tmp_path):
    sw.train(TINY, tmp_path)
    with pytest.raises(InputError, match=r"another recipe.*lr = 0.05 there, 0.01 here"):
        sw.train(replace(TINY, lr=0.01), tmp_path)
    run = sw.train(replace(TINY, lr=0.01), tmp_path, restart=True)
    assert run.recipe["lr"] == 0.01


def test_a_full_disk_keeps_the_older_checkpoint(tmp_path, monkeypatch):
    recipe = replace(TINY, steps=20)
    with pytest.raises(Stopped):
        sw.train(
            recipe, tmp_path, progress=lambda step, *_: os.kill(os.getpid(), signal.SIGTERM) if step == 10 else None
        )
    kept = list((tmp_path / "checkpoints").iterdir())

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        sw.train(recipe, tmp_path)
    monkeypatch.undo()
    assert list((tmp_path / "checkpoints").iterdir()) == kept
    assert checkpoint.newest(tmp_path / "checkpoints").facts["step"] == 10
    sw.train(recipe, tmp_path)


def test_two_trainers_do_not_share_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(InputError, match="another process"):
        sw.train(TINY, tmp_path)


def test_no_record_is_lost_when_writing_fails(tmp_path, monkeypatch):
    """If the disk is full for a moment, the run stops with an error instead of continuing with gaps."""
    real, calls = MetricsLog.write, []

    def sometimes(log, record):
        calls.append(record.step)
        time.sleep(0.2)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(log, record)

    monkeypatch.setattr(MetricsLog, "write", sometimes)
    with pytest.raises(OSError, match="No space left"):
        sw.train(replace(TINY, steps=40, records=40), tmp_path)


def test_other_data_and_a_lost_log_are_noticed(tmp_path):
    np.save(tmp_path / "data.npy", load("digits").pixels[:200])
    recipe = replace(TINY, data=f"array:{tmp_path / 'data.npy'}", steps=20)

    def stop(step, *_):
        if step == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        sw.train(recipe, tmp_path / "run", progress=stop)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.warns(RunWarning, match="lost earlier records"), pytest.raises(Stopped):
        sw.train(recipe, tmp_path / "run", progress=lambda step, *_: os.kill(os.getpid(), signal.SIGTERM))
    np.save(tmp_path / "data.npy", load("digits").pixels[:200])
    with pytest.warns(RunWarning, match="changed since"), pytest.raises(Stopped):
        sw.train(recipe, tmp_path / "run", progress=lambda step, *_: os.kill(os.getpid(), signal.SIGTERM))
    np.save(tmp_path / "data.npy", load("digits").pixels[:90])
    with pytest.raises(InputError, match="same as when the run began"):
        sw.train(recipe, tmp_path / "run")


def test_every_record_has_its_window(tmp_path):
    run = sw.train(replace(TINY, steps=50, records=40, window=150), tmp_path)
    assert (run.series("samples") >= 150).all()
    assert run.series("step")[-1] >= 48


def test_the_callers_random_numbers_are_left_alone(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load_network(sw.train(TINY, tmp_path))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("value", [True, False])
def test_the_callers_settings_of_cudnn_hold(value, tmp_path, monkeypatch):
    cudnn, found = torch.backends.cudnn, []
    for name in ("allow_tf32", "deterministic", "benchmark"):
        monkeypatch.setattr(cudnn, name, value)
    sw.train(TINY, tmp_path, device="cpu", progress=lambda *_: found.append((cudnn.allow_tf32, cudnn.deterministic)))
    assert set(found) == {(value, value)}
    assert cudnn.benchmark is value


def test_on_a_cpu_nothing_is_channels_last(tmp_path):
    """It is no faster there, and torch 2.13 without AVX-512 computes wrong gradients of strided 1 × 1 convolutions."""
    trainer = Trainer(TINY, tmp_path, CPU)
    x_a, x_b = trainer.material.pairs.fixed(torch.arange(4))
    assert TINY.channels_last
    assert all(tensor.is_contiguous() for tensor in (x_a, x_b, *trainer.network.parameters()))
    trainer.close()


def test_without_channels_last_views_are_laid_out_as_usual(tmp_path):
    """On a GPU views are channels-last, and one such tensor is enough for all convolutions after it."""
    trainer = Trainer(replace(TINY, channels_last=False), tmp_path, CPU)
    views = trainer.material.pairs.fixed(torch.arange(4))
    seen = []
    trainer.objective.register_forward_pre_hook(lambda _, given: seen.extend(given))
    trainer.step(*(x.contiguous(memory_format=torch.channels_last) for x in views), measure=False)
    assert len(seen) == 2
    assert all(x.is_contiguous() for x in seen)
    trainer.close()


def test_leftovers_of_killed_writers_are_swept(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step-0000000004-abc.safetensors").write_bytes(b"half")
    sw.train(TINY, tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-0000000012.safetensors"]


# what goes wrong


def test_pixels_must_be_bytes_or_shares(tmp_path):
    pixels = load("digits").pixels[:100]
    for wrong, says in ((pixels.astype(np.int64), "uint8 or float"), (pixels.astype(float), "floats from 0 to 1")):
        np.save(tmp_path / "data.npy", wrong)
        with pytest.raises(InputError, match=says):
            sw.train(replace(TINY, data=f"array:{tmp_path / 'data.npy'}"), tmp_path / "run")


def test_divergence_of_a_spectral_loss_is_called_that(tmp_path):
    with pytest.raises(Diverged, match="first not finite at step"):
        sw.train(replace(TINY, loss="sharpened", lr=1e20), tmp_path)


def test_another_loss_begins_without_options():
    recipe = load_recipe("photos-bt", {"loss": "simclr"})
    assert recipe.loss_options == {}
    assert load_recipe("photos-bt", {"loss_options": "{ lambda_ = 0.5 }"}).loss_options == {"lambda_": 0.5}


def test_divergence_names_the_step_and_keeps_the_checkpoint(tmp_path):
    recipe = replace(TINY, loss="vicreg", steps=40, records=40)
    with pytest.raises(Stopped):
        sw.train(
            recipe, tmp_path, progress=lambda step, *_: os.kill(os.getpid(), signal.SIGTERM) if step == 10 else None
        )
    trainer = Trainer(recipe, tmp_path, CPU)
    trainer.resume()
    original = trainer.schedule.factor
    object.__setattr__(trainer.schedule, "factor", lambda step: 1e30 if step == 15 else original(step))
    with pytest.raises(
        Diverged, match=r"first not finite at step 17 .*last good checkpoint: .*step-0000000010.*lower lr"
    ):
        trainer.run(StopRequest(), 1e9, lambda *_: None)
    trainer.close()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-0000000010.safetensors"]
    assert sw.train(recipe, tmp_path).records[-1].step == 40


def test_divergence_before_any_checkpoint(tmp_path):
    recipe = replace(TINY, loss="vicreg", lr=1e20)
    with pytest.raises(Diverged, match="no checkpoint was written") as said:
        sw.train(recipe, tmp_path)
    step = re.search(r"first not finite at step (\d+)", str(said.value))[1]
    assert (
        f"The first batch that was not finite was number {step}." in run_page(tmp_path).lead
    )  # the page says what the error said
    before = metrics(tmp_path)
    assert before[-1]["first_skipped"] == int(step)
    with pytest.raises(Diverged):
        sw.train(recipe, tmp_path)
    assert metrics(tmp_path) == before  # begun anew


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": "barlow"}, "did you mean 'barlow_twins'"),
        ({"views": "simclrr"}, "did you mean 'simclr'"),
        ({"optimizer": "adam"}, "known: sgd, lars"),
        ({"precision": "fp8"}, "known: bf16"),
        ({"scope": "weight"}, "did you mean 'weights'"),
        ({"probes": ["knnn"]}, "did you mean 'knn'"),
        ({"batch": 1}, "at least 2"),
        ({"d": 0}, "at least 1"),
        ({"alpha": 0.0}, "greater than 0"),
        ({"lr": float("nan")}, "finite"),
        ({"epochs": 0.0, "steps": 0}, "greater than 0"),
        ({"seed": -1}, "nonnegative"),
        ({"held_out": 1}, "at least 2"),
        ({"momentum": 1.0}, "momentum must be less than 1"),
        ({"compile": "yes"}, "compile must be True or False"),
        ({"graph": 1}, "graph must be True or False"),
    ],
)
def test_bad_recipes(changes, says):
    with pytest.raises(InputError, match=says):
        replace(TINY, **changes)


@pytest.mark.parametrize("text", ["knn,ridge", "[knn,ridge]", '["knn", "ridge"]', "['knn','ridge',]", " knn , ridge "])
def test_lists_as_text(text):
    assert TINY.with_settings({"probes": text}).probes == ["knn", "ridge"]


def test_lists_that_are_empty_or_short():
    probed = replace(TINY, probes=["knn"])
    assert probed.with_settings({"probes": "[]"}).probes == probed.with_settings({"probes": ""}).probes == []
    assert TINY.with_settings({"hidden": "512"}).hidden == TINY.with_settings({"hidden": "[512]"}).hidden == [512]
    with pytest.raises(InputError, match="must be of type"):
        TINY.with_settings({"hidden": "[512,wide]"})


class Board:
    """A TensorBoard writer."""

    def __init__(self):
        self.scalars, self.texts = [], []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, float(value), step))

    def add_text(self, name, text, step):
        self.texts.append((name, text, step))

    def close(self):
        pass


@pytest.mark.parametrize("loss", ["vicreg", "spectral_contrastive", "barlow_twins"])
def test_boards_are_told_what_the_page_says(loss, tmp_path, monkeypatch):
    """Also in a run that is made longer: its earlier records are judged, too."""
    board = Board()
    monkeypatch.setattr("stairwise.training.loop.tensorboard_in", lambda *_: board)
    monkeypatch.setattr("stairwise.monitor.commentary.REST", 0)
    options = {"batch_norm": False} if loss == "barlow_twins" else {}  # follows the eigenvalues of C
    for steps in (10, 20):
        recipe = replace(TINY, loss=loss, loss_options=options, steps=steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RunWarning)  # the run goes on with another schedule
            run = sw.train(recipe, tmp_path, tensorboard=True, device="cpu")
    advice, said = run_page(tmp_path).advice, {name: (text, step) for name, text, step in board.texts}
    assert said["stairwise/state"] == (advice.state, 20)
    assert f"of {recipe.d} dimensions" in said["stairwise/says"][0]
    assert ("stairwise/learned", float(advice.learned), 20) in board.scalars
    assert {step for _, _, step in board.texts} == {record.step for record in run.records}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": 5000}, "at most 1797"),
        ({"pretrain": 5000}, "at most 1797"),
        ({"loss_options": {"lamda": 1}}, "arguments of BarlowTwins"),
        ({"loss": "byol", "precondition": {"power": 0.5}}, "does not apply to BYOL"),
        ({"encoder": "torch.nn:Identity", "encoder_options": {}}, "2-D"),
        ({"data": "nowhere"}, "dataset is unknown"),
        ({"held_out": 10}, "not used for training"),
        ({"views": "crop", "size": 20}, "at most 8"),
        ({"loss_options": {"lambda_": "abc"}}, "lambda_ must be a number"),
        ({"precondition": {"dampening": 0.1}}, "arguments of sw.precondition"),
        ({"encoder_options": {"stem": "small", "width": 8}}, r"views of shape \(1, 8, 8\).*channels"),
    ],
)
def test_recipes_that_do_not_fit(changes, says, tmp_path):
    with pytest.raises(InputError, match=says):
        sw.train(replace(TINY, **changes), tmp_path)


def test_probes_need_labels(tmp_path):
    np.save(tmp_path / "images.npy", np.zeros((100, 8, 8, 1), np.uint8))
    with pytest.raises(InputError, match="need labels"):
        sw.train(replace(TINY, data=f"array:{tmp_path / 'images.npy'}", probes=["knn"]), tmp_path / "run")


def test_spectra_of_held_out_images(tmp_path):
    """They are measured in evaluation mode on images beyond `pretrain`, without side effects on training."""
    recipe = replace(TINY, pretrain=1000, probes=["knn"], probe_times=2, probe_images=50)
    run = sw.train(replace(recipe, held_out=300), tmp_path / "with", device="cpu")
    bare = sw.train(recipe, tmp_path / "without", device="cpu")
    assert run.series("eigenvalues") == pytest.approx(bare.series("eigenvalues"), rel=0, abs=0)
    t, held = run.probes("held_covariance")
    assert held.shape == (2, 4)
    assert list(t) == list(run.probes("knn")[0])
    trainer = Trainer(replace(recipe, held_out=300), tmp_path / "with", torch.device("cpu"))
    trainer.resume()
    network = trainer.network.eval()
    views = [trainer.material.pairs.fixed(torch.arange(1000, 1300)[i : i + 256], i // 256) for i in (0, 256)]
    with torch.no_grad():
        z = torch.cat([network(torch.cat([a[k] for a in views]))[1] for k in (0, 1)]).double().numpy()
    assert held[-1] == pytest.approx(np.linalg.eigvalsh(np.cov(z.T))[::-1], rel=1e-4)
    assert run.probes("held_hidden")[1].shape == (2, 64)
    trainer.close()


def test_weights_that_are_not_finite_are_not_kept(tmp_path):
    with pytest.raises(Diverged):
        sw.train(replace(TINY, lr=1e18, keep=12, steps=24, loss="vicreg"), tmp_path, device="cpu")
    for path in (tmp_path / "weights").glob("*"):
        tensors = checkpoint.load(path).tensors
        assert all(torch.isfinite(v).all() for v in tensors.values() if v.is_floating_point())


def test_what_does_not_change_the_course_may_be_asked_for_later(tmp_path):
    recipe = replace(TINY, pretrain=1000)
    sw.train(recipe, tmp_path, device="cpu")
    again = sw.train(replace(recipe, held_out=100, keep=2), tmp_path, device="cpu")
    assert again.records[-1].step == 12


def test_settings_from_text():
    recipe = Recipe().with_settings(
        {
            "lr": "1e-3",
            "hidden": "8,16",
            "head_norm": "false",
            "alpha": "auto",
            "loss": "simclr",
            "loss_options.temperature": "0.5",
            "d": "7",
        }
    )
    assert (recipe.lr, recipe.hidden, recipe.head_norm, recipe.alpha, recipe.d) == (1e-3, [8, 16], False, "auto", 7)
    assert recipe.loss_options == {"temperature": 0.5}
    assert Recipe().with_settings(recipe.plain()) == recipe
    for key, value in (
        ("lrr", 1),
        ("lr", "x"),
        ("d", "1.5"),
        ("d", 1.5),
        ("head_norm", "maybe"),
        ("loss_options", "x"),
        ("lr.x", 1),
    ):
        with pytest.raises(InputError):
            Recipe().with_settings({key: value})


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_are_whole_and_labelled(name):
    recipe = load_recipe(name)
    lines = recipe.label.strip().splitlines()
    assert lines[0].startswith(f"stairwise train {name} ")
    assert len(lines) >= 2
    assert len(lines[0].split("          ")) == 2  # what, or how long and where
    assert ("Expected" in recipe.label) != ("Not yet run at full length" in recipe.label)
    network = nn.Identity()
    build_objective(network, recipe.d, recipe.loss, recipe.loss_options, recipe.precondition)
    assert capturable(recipe.loss)


def test_recipe_files_of_users(tmp_path):
    (tmp_path / "mine.toml").write_text('data = "digits"\nlr = 0.5\n')
    assert load_recipe(str(tmp_path / "mine.toml"), {"d": 3}).lr == 0.5
    (tmp_path / "bad.toml").write_text("lr = = 3")
    with pytest.raises(InputError, match="TOML"):
        load_recipe(str(tmp_path / "bad.toml"))
    with pytest.raises(InputError, match="must exist"):
        load_recipe(str(tmp_path / "none.toml"))
    with pytest.raises(InputError, match="did you mean 'photos-bt'"):
        load_recipe("photo-bt")


def test_devices():
    assert choose_device("cpu") == CPU
    with pytest.raises(InputError, match="cpu, cuda"):
        choose_device("gpu0")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match=r"must be available .*: use cpu"):
            choose_device("cuda")


def test_byol_moves_its_target_slowly():
    from stairwise.nets.encoder import build_encoder, build_network

    net = build_network(build_encoder("torch.nn:Flatten"), torch.zeros(2, 5), [4], 3)
    objective = Bootstrap(net, 3, width=8, decay=0.9)
    before = [p.clone() for p in objective.target.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    objective.after_step()
    for old, new, fast in zip(before, objective.target.parameters(), net.parameters(), strict=True):
        assert torch.allclose(new, 0.9 * old + 0.1 * fast.detach())
    assert not any(p.requires_grad for p in objective.target.parameters())


def test_byol_predicts_in_float32():
    """As the head embeds: rounding to bfloat16 would hide small eigenvalues."""
    from stairwise.nets.encoder import build_encoder, build_network

    net = build_network(build_encoder("torch.nn:Flatten"), torch.zeros(2, 5), [4], 3)
    objective = Bootstrap(net, 3, width=8)
    seen = []
    objective.predictor.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        out = objective(torch.randn(6, 5), torch.randn(6, 5))
    assert seen == [(torch.float32, torch.float32)] * 2
    assert out.loss.dtype == torch.float32


# records


def test_log_is_cut_back_and_damaged_lines_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(Record(step=1, t=0.1, loss=np.float64(1 / 3), extra={"bad": float("nan")}))
    size = log.size
    log.write(Record(step=2, t=0.2))
    log.close()
    again = MetricsLog(path, size)
    again.write(Record(step=3, t=0.3, covariance=np.arange(2.0)))
    again.close()
    with path.open("a") as stream:
        stream.write('{"step": 4, "lo')
    records, bad = read_log(path)
    assert [r.step for r in records] == [1, 3]
    assert bad == 1
    assert records[0].loss == 0.3333333
    assert records[0].extra == {"bad": None}
    longer = MetricsLog(path, 10**9)  # a log shorter than it should be is not padded
    longer.close()
    again, still_bad = read_log(path)
    assert ([r.as_json() for r in again], still_bad) == ([r.as_json() for r in records], 1)
    assert read_log(tmp_path / "none") == ([], 0)


def test_run_reads_what_there_is(tmp_path):
    with pytest.raises(InputError, match="made by `stairwise train`"):
        _ = Run(tmp_path).recipe
    run = sw.train(TINY, tmp_path)
    assert recipe_of(run) == TINY
    assert {"commit", "versions", "device", "alpha"} <= set(run.facts)
    with pytest.raises(InputError, match="measured: "):
        run.series("accuracy")
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(InputError, match="valid JSON"):
        _ = Run(tmp_path).facts


def test_command_line(tmp_path):
    listed = json.loads(stairwise("train", "--list", "--json", cwd=tmp_path).stdout)
    assert set(listed) == set(recipe_names())
    done = stairwise("train", "photos-bt", "--set", "lrate=1", "--out", tmp_path / "x", cwd=tmp_path)
    assert done.returncode == 2
    assert "key is unknown (got 'lrate')" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    settings = {"steps": 4, "window": 128, "records": 2, "alpha": 0.1}  # to find alpha takes longer than the rest
    quick = ["photos-bt", *(a for k, v in settings.items() for a in ("--set", f"{k}={v}")), "--out", tmp_path / "run"]
    done = alone("train", *quick, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 4
    assert (tmp_path / "run" / "figure.png").stat().st_size > 10_000


# two processes


def test_two_processes_train_like_one(tmp_path):
    """Without batch norm, whose statistics are per process on CPUs, the losses are those of the joint batch."""
    recipe = replace(TINY, encoder="mlp", encoder_options={"inputs": 64, "widths": [32]}, head_norm=False, views="none")
    one = sw.train(recipe, tmp_path / "one")
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.plain()))
    code = (
        "import json, sys, stairwise as sw; "
        "sw.train(sw.Recipe().with_settings(json.load(open(sys.argv[1]))), sys.argv[2], device='cpu')"
    )
    assert run_two("-c", code, tmp_path / "recipe.json", tmp_path / "two") == [0, 0]
    two = Run(tmp_path / "two")
    assert two.series("loss") == pytest.approx(one.series("loss"), rel=1e-4)
    assert two.series("eigenvalues") == pytest.approx(one.series("eigenvalues"), rel=1e-3, abs=1e-6)
    assert len(two.records) == len(one.records)
    assert {r.batch for r in two.records} == {r.batch for r in one.records} == {recipe.batch}
    for name in ("scatter_diagonal", "scatter_symmetric", "scatter_plain"):
        assert two.series(name) == pytest.approx(one.series(name), rel=1e-3), name


def test_two_processes_continue_with_what_both_have_measured(tmp_path):
    recipe = replace(TINY, encoder="mlp", encoder_options={"inputs": 64, "widths": [32]}, head_norm=False, views="none")
    recipe = replace(recipe, steps=48, records=2, window=40 * recipe.batch)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.plain()))
    code = (
        "import json, os, signal, sys, stairwise as sw\n"
        "stop = lambda step, *_: step == int(sys.argv[3]) and os.kill(os.getpid(), signal.SIGTERM)\n"
        "recipe = sw.Recipe().with_settings(json.load(open(sys.argv[1])))\n"
        "try: sw.train(recipe, sys.argv[2], device='cpu', progress=stop)\n"
        "except sw.training.loop.Stopped: sys.exit(7)"
    )
    assert run_two("-c", code, tmp_path / "recipe.json", tmp_path / "whole", "99") == [0, 0]
    assert run_two("-c", code, tmp_path / "recipe.json", tmp_path / "parts", "20") == [7, 7]
    assert checkpoint.newest(tmp_path / "parts" / "checkpoints").part("monitor")["uu"].any()
    assert run_two("-c", code, tmp_path / "recipe.json", tmp_path / "parts", "99") == [0, 0]
    whole, parts = Run(tmp_path / "whole"), Run(tmp_path / "parts")
    for name in ("eigenvalues", "covariance", "hidden", "scatter_diagonal"):
        assert parts.series(name) == pytest.approx(whole.series(name), rel=1e-9, abs=1e-12), name


def test_no_stray_warnings(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.train(TINY, tmp_path)


class _Twice(nn.Module):
    """One norm is used twice per pass, one once and one never."""

    def __init__(self):
        super().__init__()
        self.once, self.twice, self.never = (nn.BatchNorm1d(5) for _ in range(3))

    def forward(self, x):
        return self.twice(self.once(x) * x.abs() + self.twice(x))


def test_two_passes_at_once_with_norms_used_twice_and_never():
    torch.manual_seed(0)
    one, two = _Twice(), _Twice()
    for _ in range(3):
        x_a, x_b = torch.randn(2, 16, 5) * 3 + 1
        one(x_a), one(x_b)
        two_passes(two, x_a, x_b, lambda first, second: (first(), second()))
    for (name, value), mine in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.allclose(value, mine, rtol=1e-5, atol=1e-6), name
    assert (two.once.num_batches_tracked, two.twice.num_batches_tracked, two.never.num_batches_tracked) == (6, 12, 0)


def test_what_may_pass_at_once():
    """Two parallel passes may share no state except that of plain batch norms."""

    def net(*modules):
        return nn.Sequential(nn.Linear(4, 4), *modules)

    assert can_pass_at_once(net(nn.ReLU(), nn.BatchNorm1d(4), nn.Dropout()))
    assert can_pass_at_once(net(nn.BatchNorm1d(4, track_running_stats=False)))
    assert can_pass_at_once(net(nn.BatchNorm1d(4, momentum=None).eval()))
    frozen = net()
    frozen[0].bias.requires_grad_(False)
    counting = nn.ReLU()
    counting.register_buffer("calls", torch.zeros(()))
    for other in (
        frozen,
        net(counting),
        net(nn.SyncBatchNorm(4)),
        net(nn.BatchNorm1d(4, momentum=None)),
        net(_Twice()),  # not of a package that is known to keep its state in buffers
    ):
        assert not can_pass_at_once(other)


def test_two_passes_at_once_leave_what_two_in_order_leave():
    """Running averages and counters of batch norms, and the gradient, are the same."""
    torch.manual_seed(0)
    network = build_network(build_encoder("resnet18", {"stem": "small", "width": 8}), torch.zeros(2, 3, 16, 16), [8], 4)
    for m, momentum in zip(network.modules(), np.linspace(0.05, 0.5, 200), strict=False):
        if isinstance(m, torch.nn.modules.batchnorm._BatchNorm):
            m.momentum = float(momentum)
    network.projector.insert(0, torch.nn.BatchNorm1d(network.projector[0].in_features).eval())
    other = deepcopy(network)
    for step in range(3):
        x_a, x_b = torch.randn(2, 8, 3, 16, 16)
        one = [network(x_a)[1], network(x_b)[1]]
        two = [z for _, z in two_passes(other, x_a, x_b, lambda first, second: (first(), second()))]
        for z, w in zip(one, two, strict=True):
            assert torch.equal(z, w)
        for outputs in (one, two):
            (outputs[0] * outputs[1]).sum().backward()
        for (name, value), mine in zip(network.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.allclose(value, mine, rtol=1e-5, atol=1e-6), (step, name)
        for p, q in zip(network.parameters(), other.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6)
