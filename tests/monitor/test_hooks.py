"""The monitor attached to training loops written by others."""

import gc
import json
import re
import shutil
import warnings
import weakref
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

import stairwise as sw
from stairwise.checks import InputError, RunWarning
from stairwise.monitor import hooks, recorder
from stairwise.report.run_page import run_page
from stairwise.runs.folder import RunFolder
from stairwise.runs.log import read_log
from stairwise.runs.record import Record
from tests.two_processes import run_two


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(10, 12), nn.ReLU())
        self.projector = nn.Linear(12, 4)

    def forward(self, x):
        return self.projector(self.backbone(x))


def ordinary_loop(model, criterion, optimizer, steps=20, joined=False, spy=None):
    """An ordinary training loop with occasional evaluations."""
    data = torch.Generator().manual_seed(1)
    for i in range(steps):
        x = torch.randn(32, 10, generator=data)
        x_a, x_b = (x + 0.1 * torch.randn(32, 10, generator=data) for _ in "ab")
        if joined:
            z_a, z_b = model(torch.cat([x_a, x_b])).chunk(2)
        else:
            z_a, z_b = model(x_a), model(x_b)
        if spy is not None:
            spy.append((z_a.detach().double(), z_b.detach().double()))
        loss = criterion(z_a, z_b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 7 == 0:
            with torch.no_grad():
                criterion(model(x_a), model(x_b))


def expected(pairs):
    a, b = (torch.cat(z).numpy() for z in zip(*pairs, strict=True))
    C = (a.T @ b + b.T @ a) / (2 * len(a))
    return np.linalg.eigvalsh(C)[::-1], np.linalg.eigvalsh(np.cov(np.concatenate([a, b]).T))[::-1]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("where", ["loss", "projector"])
def test_one_line_gives_the_spectra(where, joined, tmp_path):
    model, criterion = Model(), sw.losses.VICReg()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    place = {"loss": criterion} if where == "loss" else {"projector": model.projector}
    watch = sw.SpectrumMonitor().attach(
        **place, backbone=model.backbone, optimizer=optimizer, log=tmp_path, every=10, joined=joined, updates=20
    )
    spy = []
    ordinary_loop(model, criterion, optimizer, joined=joined, spy=spy)
    watch.close()
    records, bad = read_log(tmp_path / "metrics.jsonl")
    assert bad == 0
    assert [(r.step, r.planned_updates) for r in records] == [(10, 20), (20, 20)]
    assert records[1].t == pytest.approx(20 * 0.05)
    for record, part in zip(watch.records, (spy[:10], spy[10:]), strict=True):
        eigenvalues, covariance = expected(part)
        assert record.eigenvalues == pytest.approx(eigenvalues, rel=1e-6)
        assert record.covariance == pytest.approx(covariance, rel=1e-6)
        assert record.samples == 320
        assert record.hidden.shape == (12,)


def test_training_is_not_changed():
    ends = []
    for watched in (False, True):
        model, criterion = Model(), sw.losses.VICReg()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if watched:
            watch = sw.SpectrumMonitor().attach(loss=criterion, backbone=model.backbone, every=5)
        ordinary_loop(model, criterion, optimizer)
        ends.append([p.detach().clone() for p in model.parameters()])
    watch.close()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert len(watch.records) == 4


def test_few_pairs_are_collected_until_they_are_enough():
    criterion, z = sw.losses.VICReg(), torch.randn(8, 10, requires_grad=True)
    with sw.SpectrumMonitor().attach(loss=criterion, every=2) as watch:
        for _ in range(13):
            criterion(z, z)
    assert [(r.step, r.samples, r.wanted) for r in watch.records] == [(6, 48, None), (12, 48, None), (13, 8, 40)]


def test_after_closing_nothing_is_recorded():
    model, criterion = Model(), sw.losses.VICReg()
    with sw.SpectrumMonitor().attach(loss=criterion, every=5) as watch:
        ordinary_loop(model, criterion, torch.optim.SGD(model.parameters(), lr=0.01), steps=5)
    ordinary_loop(model, criterion, torch.optim.SGD(model.parameters(), lr=0.01), steps=5)
    assert len(watch.records) == 1
    assert watch.records[0].t == 5


def test_windows_and_other_loggers():
    class Logger:
        def __init__(self):
            self.rows = []

        def log(self, row):
            self.rows.append(row)

    model, criterion, logger = Model(), sw.losses.VICReg(), Logger()
    with sw.SpectrumMonitor(window=64).attach(loss=criterion, every=4, log=logger) as watch:
        ordinary_loop(model, criterion, torch.optim.SGD(model.parameters(), lr=0.01), steps=12)
    assert [row["stairwise/step"] for row in logger.rows] == [4, 8, 12]
    assert logger.rows[0]["stairwise/covariance/1"] == watch.records[0].covariance[0]
    assert 1 <= logger.rows[0]["stairwise/effective_rank"] <= 4
    assert all(name.startswith("stairwise/") for row in logger.rows for name in row)
    assert all(64 <= r.samples < 128 + 64 for r in watch.records)


def test_embeddings_that_are_not_finite():
    criterion = sw.losses.VICReg()
    z = torch.randn(8, 3, requires_grad=True)
    watch = sw.SpectrumMonitor().attach(loss=criterion, every=2)

    def loop():
        for i in range(6):
            criterion(z * (float("nan") if i == 2 else 1.0), z)
            watch.writer._thread.submit(lambda: None).result()  # let it catch up
        watch.close()

    with pytest.warns(
        RunWarning, match="1 batch up to step 4 is left out; the first such batch of the run was number 3"
    ):
        loop()
    assert [r.samples for r in watch.records] == [16, 8, 16]
    assert all(np.isfinite(r.eigenvalues).all() for r in watch.records)


def test_nothing_but_bad_batches():
    criterion, z = sw.losses.VICReg(), torch.full((8, 3), float("nan"), requires_grad=True)
    watch = sw.SpectrumMonitor().attach(loss=criterion, every=2)

    def loop():
        for _ in range(2):
            criterion(z, z)
        watch.close()

    with pytest.warns(RunWarning, match="2 batches"):
        loop()
    assert watch.records[0].eigenvalues is None


def test_a_run_that_has_diverged_says_so_a_few_times():
    """Once the number of lost batches has doubled, not at every record."""
    criterion, z = sw.losses.VICReg(), torch.full((8, 3), float("nan"), requires_grad=True)
    watch = sw.SpectrumMonitor().attach(loss=criterion, every=2)

    def loop():
        for _ in range(40):
            criterion(z, z)
            watch.recorder.settle(wait=True)  # on a busy machine the queue could be full, and a record left out
        watch.close()

    with pytest.warns(RunWarning) as told:
        loop()
    assert len(watch.records) == 20
    steps = [int(re.search(r"up to step (\d+) are left out", str(one.message))[1]) for one in told]
    assert steps == [2, 4, 8, 16, 32]


def test_several_loggers_and_boards(tmp_path):
    class Board:
        def __init__(self):
            self.rows = []

        def add_scalar(self, name, value, step):
            self.rows.append((name, value, step))

    model, criterion, board = Model(), sw.losses.VICReg(), Board()
    with sw.SpectrumMonitor().attach(loss=criterion, every=4, log=[tmp_path, board]) as watch:
        ordinary_loop(model, criterion, torch.optim.SGD(model.parameters(), lr=0.01), steps=8)
    assert ("stairwise/eigenvalues/1", float(watch.records[1].eigenvalues[0]), 8) in board.rows
    assert all(name.startswith("stairwise/") and name != "stairwise/step" for name, _, _ in board.rows)
    assert len(read_log(tmp_path / "metrics.jsonl")[0]) == 2


@pytest.mark.filterwarnings("ignore:vicreg:stairwise.checks.RunWarning")  # it diverges
def test_time_counts_updates():
    """With gradients accumulated over three batches, a step is an update, as in the learning-rate schedule."""
    model, criterion = Model(), sw.losses.VICReg()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with sw.SpectrumMonitor().attach(loss=criterion, optimizer=optimizer, every=1) as watch:
        for i in range(9):
            x = torch.randn(16, 10)
            criterion(model(x), model(x)).backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert [(r.step, r.t, r.samples) for r in watch.records] == [(1, 0.5, 48), (2, 1.0, 48), (3, 1.5, 48)]


@pytest.mark.parametrize("closed", [False, True])
def test_going_on_from_a_checkpoint(tmp_path, closed):
    """State may be taken before or after closing: the record that closing makes is dropped again."""

    def run(folder, pieces):
        model, criterion = Model(), sw.losses.VICReg()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data, state = torch.Generator().manual_seed(1), None
        for steps in pieces:
            watch = sw.SpectrumMonitor().attach(loss=criterion, optimizer=optimizer, every=4, log=folder)
            if state is not None:
                watch.load(state)
            for _ in range(steps):
                x = torch.randn(32, 10, generator=data)
                loss = criterion(model(x), model(x + 0.1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if closed:
                watch.close()
                state = watch.state()
                continue
            state = watch.state()
            watch.writer.folder.write(Record(step=99, t=0.0))  # lost with the crash that follows
            watch.close()
        return [{k: v for k, v in r.as_json().items() if k != "seconds"} for r in read_log(folder / "metrics.jsonl")[0]]

    whole, parts = run(tmp_path / "whole", [14]), run(tmp_path / "parts", [6, 8])
    assert whole == parts
    assert [r["step"] for r in whole if r["step"] != 99] == [4, 8, 12, 14]


def test_bad_attachments():
    model, criterion = Model(), sw.losses.VICReg()
    monitor = sw.SpectrumMonitor()
    for options, says in (
        ({"loss": criterion, "views": 1}, r"views must be at least 2 \(got 1\): write views=2"),
        ({"loss": criterion, "views": "two"}, r"views must be a whole number of at least 1 \(got 'two'\)"),
        ({"loss": criterion, "log": 3}, r"log must be a folder.*\(got 3\): write log="),
        ({"loss": criterion, "log": ["a", "b"]}, r"log must name one folder at most \(got a and b\)"),
        ({"loss": criterion, "log": __file__}, r"log must be a folder \(got the file"),
        ({"loss": criterion, "every": 0}, "every must be a whole number of at least 1"),
        (
            {"loss": criterion, "every": 50.0},
            r"every must be a whole number of at least 1 \(got 50.0\): write every=50",
        ),
        ({"loss": criterion, "every": True}, r"every must be a whole number of at least 1 \(got True\)"),
        ({"loss": criterion, "joined": "yes"}, "joined must be True or False"),
        ({"projector": "projector"}, r"projector must be a torch module \(got 'projector'\): .* model.projector"),
        ({"backbone": 3}, r"backbone must be a torch module \(got 3\)"),
        ({"loss": sw.losses.VICReg}, r"loss must be a torch module \(got the class VICReg\): give an instance"),
        (
            {"loss": sw.losses.vicreg},
            r"loss must be a torch module: a function cannot be hooked \(got the function vicreg\): "
            r"attach without loss=, and call watch.update\(z_a, z_b, loss=…\) once per step",
        ),
        ({"loss": lambda a, b: a}, "a function cannot be hooked"),
        (
            {"loss": criterion, "optimizer": 0.1},
            r"optimizer must have param_groups .*\(got a float\): give the optimizer",
        ),
        ({"loss": criterion, "optimizer": model}, r"optimizer must have param_groups .*\(got a Model\)"),
    ):
        with pytest.raises(InputError, match=says):
            monitor.attach(**options)


def test_wrong_types_of_a_monitors_arguments():
    for options, says in (
        ({"window": True}, r"window must be a whole number of at least 1 \(got True\): a number of pairs"),
        ({"window": 64.0}, "window must be a whole number"),
        ({"half_life": True}, r"half_life must be a number \(got True\)"),
        ({"half_life": "100"}, r"half_life must be a number \(got '100'\)"),
        ({"normalized": 1}, r"normalized must be True or False \(got 1\)"),
    ):
        with pytest.raises(InputError, match=says):
            sw.SpectrumMonitor(**options)
    with pytest.raises(InputError, match=r"z_b must be a torch tensor \(got ndarray\)"):
        sw.SpectrumMonitor().update(torch.zeros(4, 2), np.zeros((4, 2)))


@pytest.mark.parametrize("counted", ["updates", "calls"])
def test_a_loss_that_is_a_function(counted, tmp_path):
    """Nothing is hooked but the optimizer: `update` gives the same records as a hooked loss."""
    model, criterion = Model(), sw.losses.VICReg()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    given = optimizer if counted == "updates" else None
    hooked = sw.SpectrumMonitor().attach(loss=criterion, backbone=model.backbone, optimizer=given, every=4)
    watch = sw.SpectrumMonitor().attach(optimizer=given, log=tmp_path, every=4)
    for _ in range(8):
        x_a, x_b = torch.randn(2, 32, 10)
        h_a, h_b = model.backbone(x_a), model.backbone(x_b)
        z_a, z_b = model.projector(h_a), model.projector(h_b)
        loss = criterion(z_a, z_b)
        watch.update(z_a, z_b, h_a, h_b, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    watch.close()
    hooked.close()
    drop = {"seconds": 0}
    assert [r.as_json() | drop for r in watch.records] == [r.as_json() | drop for r in hooked.records]
    assert [(r.step, r.samples, len(r.hidden)) for r in read_log(tmp_path / "metrics.jsonl")[0]] == [
        (4, 128, 12),
        (8, 128, 12),
    ]
    assert watch.records[0].t == pytest.approx(4 * 0.05 if counted == "updates" else 4)


def test_updates_by_hand_that_are_wrong():
    z = torch.randn(32, 3)
    with sw.SpectrumMonitor().attach(loss=sw.losses.VICReg()) as hooked:
        with pytest.raises(InputError, match="update must not be called when loss or projector is hooked"):
            hooked.update(z, z)
        hooked.taken = 1  # nothing was shown, and that is not the point here
    watch = sw.SpectrumMonitor().attach(every=2)
    for options, says in (
        ({"h_a": z}, "h_a and h_b must be given together"),
        ({"z_b": z[:3]}, "must be 2-D and of the same shape"),
        ({"z_b": "z"}, r"z_b must be a torch tensor \(got str\)"),
        ({"loss": "low"}, r"loss must be a number or a tensor \(got str\)"),
    ):
        with pytest.raises(InputError, match=says):
            watch.update(**({"z_a": z, "z_b": z} | options))
    watch.update(z, z, loss=1.5)
    with pytest.warns(RunWarning, match=r"loss must be a single number \(got shape \(32,\)\): take the mean"):
        watch.update(z, z, loss=torch.zeros(32))  # once it has worked, it does not stop training
    watch.close()
    assert [(r.step, r.samples, r.loss) for r in watch.records] == [(2, 64, 1.5)]


def test_nothing_handed_over_is_pointed_out():
    watch = sw.SpectrumMonitor().attach(every=2)
    with pytest.warns(RunWarning, match=r"no embeddings were seen: call watch\.update\(z_a, z_b, loss=…\)"):
        watch.close()


class Run:
    """A wandb run as its documentation describes it: `log` without commit adds to a row that a later call commits."""

    def __init__(self):
        self.rows, self.row, self.step, self.defined = [], {}, 0, []

    def define_metric(self, name, step_metric=None):
        self.defined.append((name, step_metric))

    def log(self, data, step=None, commit=None):
        self.row |= data
        if commit or commit is None:
            self.rows.append(self.row)
            self.row, self.step = {}, self.step + 1


def test_the_users_steps_in_wandb_are_left_alone():
    run, criterion, z = Run(), sw.losses.VICReg(), torch.randn(32, 3, requires_grad=True)
    with sw.SpectrumMonitor().attach(loss=criterion, every=2, log=run) as watch:
        for i in range(6):
            criterion(z, z)
            watch._settle(wait=True)
            run.log({"loss": i})
    assert [row["loss"] for row in run.rows] == list(range(6))  # one row per call of the user
    assert [row.get("stairwise/step") for row in run.rows] == [None, 2, None, 4, None, 6]
    assert run.defined == [("stairwise/*", "stairwise/step")]


def test_a_wandb_run_in_which_the_user_logs_nothing():
    run, criterion, z = Run(), sw.losses.VICReg(), torch.randn(32, 3, requires_grad=True)
    with sw.SpectrumMonitor().attach(loss=criterion, every=2, log=run):
        for _ in range(6):
            criterion(z, z)
    rows = [*run.rows, run.row]  # wandb commits the last one when the run finishes
    assert [row["stairwise/step"] for row in rows] == [2, 4, 6]


def test_compiled_modules_are_pointed_out():
    module = nn.Linear(2, 2)
    module._compiled_call_impl = module.forward  # as module.compile() does
    with pytest.warns(RunWarning, match=r"before torch\.compile"):
        watch = sw.SpectrumMonitor().attach(projector=module)
    watch.taken = 1  # nothing was shown, and that is not the point here
    watch.close()


def test_hooks_that_come_after_compiling_say_that_they_see_nothing():
    model, criterion = Model(), sw.losses.VICReg()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(32, 10)
    criterion(compiled(x), compiled(x)).backward()
    watch = sw.SpectrumMonitor().attach(projector=model.projector, optimizer=optimizer, every=5)

    def loop():
        for _ in range(12):
            criterion(compiled(x), compiled(x)).backward()
            optimizer.step()

    with pytest.warns(RunWarning, match="no embeddings seen so far"):
        loop()
    with pytest.warns(RunWarning, match="no embeddings were seen"):
        watch.close()


def test_nobody_has_to_keep_or_close_it(tmp_path):
    """The documented call drops its return value; each record is written as soon as it is decomposed."""
    model, criterion = Model(), sw.losses.VICReg()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sw.SpectrumMonitor().attach(loss=criterion, optimizer=optimizer, log=tmp_path / "run", every=5)
    assert (tmp_path / "run").is_dir()
    gc.collect()
    ordinary_loop(model, criterion, optimizer, steps=10)
    folders = {one.writer.folder.folder: one for one in hooks._alive if one.writer.folder is not None}
    watch = folders[tmp_path / "run"]
    watch.writer._thread.submit(lambda: None).result()
    assert [r.step for r in read_log(tmp_path / "run" / "metrics.jsonl")[0]] == [5, 10]
    watch.close()
    assert watch not in hooks._alive


def test_another_runs_records_are_kept(tmp_path):
    for _ in range(2):
        model, criterion = Model(), sw.losses.VICReg()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with sw.SpectrumMonitor().attach(loss=criterion, log=tmp_path, every=5):
                ordinary_loop(model, criterion, torch.optim.SGD(model.parameters(), lr=0.01), steps=10)
    assert "metrics-1.jsonl" in str(said[0].message)
    assert len(read_log(tmp_path / "metrics-1.jsonl")[0]) == len(read_log(tmp_path / "metrics.jsonl")[0]) == 2


def test_a_logger_that_fails_does_not_stop_training(tmp_path):
    class Broken:
        def log(self, row):
            raise ConnectionError("no network")

    model, criterion = Model(), sw.losses.VICReg()
    watch = sw.SpectrumMonitor().attach(loss=criterion, log=[tmp_path, Broken()], every=5)

    def loop():
        ordinary_loop(model, criterion, torch.optim.SGD(model.parameters(), lr=0.01), steps=20)
        watch.close()

    with pytest.warns(RunWarning, match="no network") as said:
        loop()
    assert len(said) == 1
    assert len(read_log(tmp_path / "metrics.jsonl")[0]) == 4


def test_a_decomposition_that_fails_does_not_stop_training(monkeypatch):
    criterion, z = sw.losses.VICReg(), torch.randn(32, 3, requires_grad=True)
    monkeypatch.setattr(recorder, "decompose_on_one_core", lambda *_: 1 / 0)
    watch = sw.SpectrumMonitor().attach(loss=criterion, every=2)

    def loop():
        for _ in range(2):
            criterion(z, z)
        watch.close()

    with pytest.warns(RunWarning, match="no spectrum at step 2: division"):
        loop()


def test_watched_modules_can_be_copied_and_saved(tmp_path):
    model, criterion = Model(), sw.losses.VICReg()
    with sw.SpectrumMonitor().attach(projector=model.projector, every=100) as watch:
        copy = deepcopy(model)
        torch.save(model.projector, tmp_path / "whole.pt")
        for _ in range(2):
            copy(torch.randn(8, 10))  # a copy is not watched
        assert watch.taken == 0
        criterion(model(torch.randn(8, 10)), model(torch.randn(8, 10)))
        assert watch.taken == 1


def test_a_view_without_a_partner_does_not_meet_the_next_step():
    model, criterion = Model(), sw.losses.VICReg()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = sw.SpectrumMonitor().attach(projector=model.projector, optimizer=optimizer, every=4)
    spy = []

    def loop():
        for i in range(4):
            if i == 0:
                model(torch.zeros(32, 10))  # a stray call
            ordinary_loop(model, criterion, optimizer, steps=1, spy=spy)
        watch.close()

    with pytest.warns(RunWarning, match="called 3 times per update"):
        loop()
    # the stray call spoils the pair of its own step only
    assert watch.records[0].samples == 4 * 32


def test_loss_is_recorded():
    criterion, z = sw.losses.VICReg(), torch.randn(32, 3, requires_grad=True)
    with sw.SpectrumMonitor().attach(loss=criterion, every=2) as watch:
        values = [criterion(z, z * k).item() for k in (1.0, 2.0)]
    assert watch.records[0].loss == pytest.approx(np.mean(values))


def test_backbones_that_are_not_called_for_both_views():
    model, criterion = Model(), sw.losses.VICReg()
    watch = sw.SpectrumMonitor().attach(loss=criterion, backbone=nn.Linear(2, 2), every=2)

    def loop():
        ordinary_loop(model, criterion, torch.optim.SGD(model.parameters(), lr=0.01), steps=2)
        watch.close()

    with pytest.warns(RunWarning, match="so h is left out"):
        loop()
    assert watch.records[0].hidden is None


def test_images_that_grow_do_not_stop_training():
    """Positions are averaged, so image sizes may change; if the number of channels changes, a warning follows."""
    conv, criterion = nn.Conv2d(3, 6, 3), sw.losses.VICReg()
    watch = sw.SpectrumMonitor().attach(loss=criterion, backbone=conv, every=2)
    for size in (8, 8, 12, 12):
        h = [conv(torch.randn(32, 3, size, size)) for _ in "ab"]
        criterion(*(x.mean(dim=(2, 3)) for x in h))
    watch.close()
    assert [len(r.hidden) for r in watch.records] == [6, 6]


def test_dimensions_that_change_do_not_stop_training():
    criterion = sw.losses.VICReg()
    watch = sw.SpectrumMonitor().attach(loss=criterion, every=2)

    def loop():
        for d in (3, 3, 5, 3):
            z = torch.randn(32, d, requires_grad=True)
            criterion(z, z)
        watch.close()

    with pytest.warns(RunWarning, match="must have 3 dimensions"):
        loop()
    assert watch.records[0].samples == 64


def test_losses_that_return_more_than_a_number():
    class Wordy(nn.Module):
        def forward(self, a, b):
            return {"parts": (a - b).square().mean(dim=0), "loss": (a - b).square().mean() + 2}

    criterion, z = Wordy(), torch.randn(32, 3, requires_grad=True)
    with sw.SpectrumMonitor().attach(loss=criterion, every=2) as watch:
        for _ in range(4):
            criterion(z, z)
    assert [r.step for r in watch.records] == [2, 4]
    assert watch.records[0].loss == 2.0


def test_a_full_disk_does_not_stop_training(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "write", full)
    criterion, z = sw.losses.VICReg(), torch.randn(32, 3, requires_grad=True)
    watch = sw.SpectrumMonitor().attach(loss=criterion, every=2, log=tmp_path)

    def loop():
        for _ in range(4):
            criterion(z, z)
        watch.close()

    with pytest.warns(RunWarning, match="No space left"):
        loop()
    assert [r.step for r in watch.records] == [2, 4]


def test_a_slow_background_keeps_processes_together(tmp_path):
    """Only the first process has a queue of decompositions, but both must sum at the same steps."""
    slow = "import time, stairwise.monitor.recorder as m; real = m.decompose_on_one_core\n"
    slow += "m.decompose_on_one_core = lambda *a: (time.sleep(0.5), real(*a))[1]\n"
    many = TWO.replace("every=2", "every=1").replace("z[2 * rank : 2 * rank + 2]", "z[:3].repeat(4, 1, 1)")
    code = slow + many
    assert run_two("-c", code, tmp_path) == [0, 0]


TWO = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import stairwise as sw
from stairwise.files import save_json

dist.init_process_group("gloo")
rank = dist.get_rank()
criterion = sw.losses.SpectralContrastive()
z = torch.randn(4, 16, 3, generator=torch.Generator().manual_seed(0)).double()
z[3, 0, 0] = float("nan")  # the second batch of the second process
with sw.SpectrumMonitor().attach(loss=criterion, every=2) as watch:
    for batch in z[2 * rank : 2 * rank + 2]:
        criterion(batch.requires_grad_(), batch)
if rank == 0:
    save_json(sys.argv[1] + "/record.json", [vars(record) for record in watch.records])
dist.destroy_process_group()
"""


def test_two_processes(tmp_path):
    """One record for the joint batch, and the batches skipped by either process."""
    assert run_two("-c", TWO, tmp_path) == [0, 0]
    (record,) = map(Record.from_json, json.loads((tmp_path / "record.json").read_text()))  # not rounded
    z = torch.randn(4, 16, 3, generator=torch.Generator().manual_seed(0)).double()
    alone = sw.SpectrumMonitor()
    for batch in z[:3]:
        alone.update(batch, batch)
    assert record.eigenvalues == pytest.approx(alone.compute().eigenvalues, rel=1e-10)
    assert (record.samples, record.skipped, record.first_skipped) == (48, 1, 2)


def test_attaching_again_begins_anew():
    monitor, criterion = sw.SpectrumMonitor(), sw.losses.VICReg()
    for scale in (100.0, 1.0):
        watch = monitor.attach(loss=criterion, every=2)
        for _ in range(3):
            criterion(scale * torch.randn(40, 3, requires_grad=True), torch.randn(40, 3, requires_grad=True))
        watch.close()
        assert [record.samples for record in watch.records] == [80, 40]
        assert watch.records[0].covariance[0] < 3 * scale**2


def test_an_open_attachment_keeps_no_model():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone = weakref.ref(model)
    watch = sw.SpectrumMonitor().attach(projector=model, backbone=model, optimizer=optimizer)
    del model, optimizer
    gc.collect()
    assert gone() is None
    watch.close()


def test_evaluation_with_gradients_is_left_out():
    """Calls in evaluation mode, once a module has been called in training mode."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = sw.SpectrumMonitor().attach(projector=model, backbone=model, optimizer=optimizer, every=100)
    for _ in range(4):
        model.train()
        z_a, z_b = (model(torch.randn(20, 3)) for _ in "ab")
        (z_a * z_b).sum().backward()
        optimizer.step()
        model.eval()
        for _ in "ab":
            model(1e6 * torch.randn(20, 3))
    watch.close()
    (record,) = watch.records
    assert record.samples == 80
    assert record.covariance[0] < 100
    assert record.hidden[0] < 100


def trained(net, criterion, optimizer, watch, spoil=lambda i, loss: loss, steps=40):
    generator = torch.Generator().manual_seed(0)
    for i in range(steps):
        x = torch.randn(16, 6, generator=generator)
        z_a, z_b = net(x), net(x + 0.1)
        loss = spoil(i, criterion(z_a, z_b))
        watch.update(z_a, z_b, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    watch.close()


def test_losses_that_are_not_finite_while_embeddings_are():
    """Muon leaves such updates out, so that nothing else tells of them; the mean is that of the others."""
    net, criterion = nn.Linear(6, 3), sw.losses.VICReg()
    optimizer, kept = sw.Muon(net.parameters(), lr=0.01), []

    def spoil(i, loss):
        bad = i % 10 == 4 or i >= 30
        kept.append(None if bad else float(loss.detach()))
        return loss * float("nan") if bad else loss

    watch = sw.SpectrumMonitor().attach(optimizer=optimizer, every=10)
    with pytest.warns(
        RunWarning, match="the loss was not finite in 1 batch up to step 10, though embeddings were"
    ) as told:
        trained(net, criterion, optimizer, watch, spoil)
    assert len(told) == 1
    means = [np.mean([x for x in kept[i : i + 10] if x is not None]) for i in (0, 10, 20)]
    assert [r.loss for r in watch.records[:3]] == pytest.approx(means)
    assert watch.records[3].loss is None
    assert optimizer.skipped == 13


def test_sums_of_losses_continue_and_older_ones_are_understood():
    first = sw.SpectrumMonitor().attach(every=4)
    z = torch.randn(8, 3)
    for loss in (1.0, float("nan"), 3.0):
        first.update(z, z, loss=loss)
    state = first.state()
    assert state["loss"] == [4.0, 2.0, 3]
    for given, expected in ((state["loss"], 3.0), ([6.0, 3], 2.75), ([float("nan"), 3], 5.0)):
        second = sw.SpectrumMonitor().attach(every=4)
        second.load(state | {"loss": given})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            second.update(z, z, loss=5.0)
            second.close()
        assert second.records[0].loss == pytest.approx(expected)
    first.close()


@pytest.mark.parametrize("state", [{}, None, {"x": 1}])
def test_a_state_of_something_else_is_refused(state):
    watch = sw.SpectrumMonitor().attach()
    with pytest.raises(InputError, match=r"state must be what watch\.state\(\) returned"):
        watch.load(state)
    watch.close()


def test_a_log_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="log must be a folder that can be made"):
        sw.SpectrumMonitor().attach(log=tmp_path / "file" / "run")


def test_time_is_that_of_the_first_group_that_moves():
    net, frozen, criterion = nn.Linear(6, 3), nn.Linear(6, 6), sw.losses.VICReg()
    groups = [{"params": frozen.parameters(), "lr": 0.0}, {"params": net.parameters(), "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    watch = sw.SpectrumMonitor().attach(optimizer=optimizer, every=10)
    trained(nn.Sequential(frozen, net), criterion, optimizer, watch)
    assert [r.t for r in watch.records] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_time_that_stands_still_is_told_of(tmp_path):
    net, criterion = nn.Linear(6, 3), sw.losses.VICReg()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    watch = sw.SpectrumMonitor().attach(optimizer=optimizer, every=10, log=tmp_path)
    with pytest.warns(RunWarning, match="the learning rate is 0, so t = Σ lr stands still"):
        trained(net, criterion, optimizer, watch)
    page = run_page(tmp_path)
    assert page.facts["records"] == "1 record, 3 left out because t stood still (learning rate 0)"


def test_a_loss_that_holds_the_network_is_told_of():
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.criterion = nn.Linear(6, 3), sw.losses.VICReg()

        def forward(self, x_a, x_b):
            return self.criterion(self.net(x_a), self.net(x_b))

    step, x = Step(), torch.randn(16, 6)
    watch = sw.SpectrumMonitor().attach(loss=step, every=2)

    def loop():
        for _ in range(4):
            step(x, x + 0.1).backward()
        watch.close()

    with pytest.warns(RunWarning, match=r"Step gets tensors without a gradient, which may be inputs: .*projector="):
        loop()


def test_a_log_that_is_removed_begins_again(tmp_path):
    net, criterion = nn.Linear(6, 3), sw.losses.VICReg()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    watch = sw.SpectrumMonitor().attach(optimizer=optimizer, every=10, log=tmp_path / "run")

    def spoil(i, loss):
        if i == 25:
            watch.writer._thread.submit(lambda: None).result()  # let it catch up
            shutil.rmtree(tmp_path / "run")
        return loss

    with pytest.warns(RunWarning, match=r"metrics\.jsonl was removed: it begins again with step 30"):
        trained(net, criterion, optimizer, watch, spoil)
    assert [r.step for r in read_log(tmp_path / "run" / "metrics.jsonl")[0]] == [30, 40]
