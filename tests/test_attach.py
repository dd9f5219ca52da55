"""The monitor in loops that other people write."""

import numpy as np
import pytest
import torch
from torch import nn

import stairwise as sw
from stairwise.checks import InputError
from stairwise.monitor.log import read_log


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(10, 12), nn.ReLU())
        self.projector = nn.Linear(12, 4)

    def forward(self, x):
        return self.projector(self.backbone(x))


def ordinary_loop(model, criterion, optimizer, steps=20, joined=False, spy=None):
    """A training loop as others write it, with an evaluation now and then."""
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
        **place, backbone=model.backbone, optimizer=optimizer, log=tmp_path, every=10, joined=joined
    )
    spy = []
    ordinary_loop(model, criterion, optimizer, joined=joined, spy=spy)
    watch.close()
    records, bad = read_log(tmp_path / "metrics.jsonl")
    assert bad == 0
    assert [r["step"] for r in records] == [10, 20]
    assert records[1]["t"] == pytest.approx(20 * 0.05)
    for record, part in zip(watch.records, (spy[:10], spy[10:]), strict=True):
        eigenvalues, covariance = expected(part)
        assert record["eigenvalues"] == pytest.approx(eigenvalues, rel=1e-6)
        assert record["covariance"] == pytest.approx(covariance, rel=1e-6)
        assert record["samples"] == 320
        assert record["hidden"].shape == (12,)


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


def test_after_closing_nothing_is_recorded():
    model, criterion = Model(), sw.losses.VICReg()
    with sw.SpectrumMonitor().attach(loss=criterion, every=5) as watch:
        ordinary_loop(model, criterion, torch.optim.SGD(model.parameters(), lr=0.01), steps=5)
    ordinary_loop(model, criterion, torch.optim.SGD(model.parameters(), lr=0.01), steps=5)
    assert len(watch.records) == 1
    assert watch.records[0]["t"] == 5


def test_windows_and_other_loggers():
    class Logger:
        def __init__(self):
            self.rows = []

        def log(self, row):
            self.rows.append(row)

    model, criterion, logger = Model(), sw.losses.VICReg(), Logger()
    with sw.SpectrumMonitor(window=64).attach(loss=criterion, every=4, log=logger) as watch:
        ordinary_loop(model, criterion, torch.optim.SGD(model.parameters(), lr=0.01), steps=12)
    assert [row["step"] for row in logger.rows] == [4, 8, 12]
    assert all(64 <= r["samples"] < 128 + 64 for r in watch.records)


def test_embeddings_that_are_not_finite():
    criterion = sw.losses.VICReg()
    z = torch.randn(8, 3, requires_grad=True)
    watch = sw.SpectrumMonitor().attach(loss=criterion, every=2)

    def loop():
        for i in range(6):
            criterion(z * (float("nan") if i == 2 else 1.0), z)
            watch.background.submit(lambda: None).result()  # let it catch up
        watch.close()

    with pytest.warns(UserWarning, match="not finite between steps 3 and 4"):
        loop()
    assert [r.get("finite", True) for r in watch.records] == [True, False, True]
    assert np.isfinite(watch.records[2]["eigenvalues"]).all()


def test_bad_attachments():
    model, criterion = Model(), sw.losses.VICReg()
    monitor = sw.SpectrumMonitor()
    for options, says in (
        ({}, "one and not the other"),
        ({"loss": criterion, "projector": model.projector}, "one and not the other"),
        ({"loss": criterion, "log": 3}, "log"),
        ({"loss": criterion, "every": 0}, "every"),
    ):
        with pytest.raises(InputError, match=says):
            monitor.attach(**options)
    identity = nn.Identity()
    with sw.SpectrumMonitor().attach(loss=identity), pytest.raises(InputError, match="z_a, z_b"):
        identity(torch.zeros(3, 2))


def test_compiled_modules_are_pointed_out():
    module = nn.Linear(2, 2)
    module._compiled_call_impl = module.forward  # as module.compile() does
    with pytest.warns(UserWarning, match=r"before torch\.compile"):
        sw.SpectrumMonitor().attach(projector=module).close()
