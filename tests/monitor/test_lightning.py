"""The Lightning callback in the Trainers of both packages; skipped if neither is installed."""

import importlib
import json
import math
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import stairwise as sw
from stairwise.checks import InputError, RunWarning
from stairwise.monitor import lightning
from stairwise.runs.log import read_log

PACKAGES = [name for name in ("lightning.pytorch", "pytorch_lightning") if importlib.util.find_spec(name.split(".")[0])]


@pytest.fixture(params=PACKAGES or [pytest.param("", marks=pytest.mark.skip(reason="needs lightning"))])
def package(request):
    return importlib.import_module(request.param)


def module(package):
    class Model(package.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.backbone = nn.Sequential(nn.Linear(10, 12), nn.ReLU())
            self.projector = nn.Linear(12, 4)
            self.criterion = sw.losses.VICReg()
            self.tau = 3.0

        def step(self, batch):
            return self.criterion(*(self.projector(self.backbone(x)) for x in batch))

        def training_step(self, batch, _):
            return self.step(batch)

        def validation_step(self, batch, _):
            self.step(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Model()


def fit(package, folder, steps, callbacks=(), checkpoint=None, model=None, **options):
    data = torch.utils.data.TensorDataset(*torch.randn(2, 64, 10, generator=torch.Generator().manual_seed(1)))
    loader = torch.utils.data.DataLoader(data, 16)
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning advises about workers and unused GPUs
        warnings.simplefilter("error", RunWarning)  # ours must not stop the training: they go to stderr
        model = model or module(package)
        trainer = package.Trainer(
            max_steps=steps, accelerator="cpu", default_root_dir=folder, callbacks=list(callbacks), **(quiet | options)
        )
        trainer.fit(model, loader, loader, ckpt_path=checkpoint)
    return trainer, model


def test_records_of_both_packages(package, tmp_path):
    watch = lightning.SpectrumCallback(loss="criterion", backbone="backbone", every=5)
    _, watched = fit(package, tmp_path, 20, [watch])
    _, alone = fit(package, tmp_path, 20)
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))
    records, bad = read_log(tmp_path / "metrics.jsonl")
    assert bad == 0
    assert [r.step for r in records] == [5, 10, 15, 20]  # validation is not counted
    assert records[-1].t == pytest.approx(20 * 0.05)
    assert all(r.samples == 80 for r in records)
    assert np.shape(records[0].hidden) == (12,)
    assert np.shape(json.loads((tmp_path / "embeddings.json").read_text())["views"]) == (2, 16, 2)


class Byol(nn.Module):
    """BYOL's parts: predictions are compared with projections that have no gradient."""

    def __init__(self, head="projection_head"):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(10, 12), nn.ReLU())
        setattr(self, head, nn.Linear(12, 4))
        self.head = head
        self.prediction_head = nn.Linear(4, 4)
        self.criterion = Cosine()
        self.seen = []

    def step(self, batch):
        z = [getattr(self, self.head)(self.backbone(x)) for x in batch]
        p = [self.prediction_head(x) for x in z]
        self.seen.append([x.detach() for x in z])
        return (self.criterion(p[0], z[1].detach()) + self.criterion(p[1], z[0].detach())) / 2


class Cosine(nn.Module):
    def forward(self, p, z):
        return -nn.functional.cosine_similarity(p, z).mean()


class Dino(Byol):
    """Lists of views: two global crops and two local ones, of student and teacher."""

    def __init__(self):
        super().__init__("student_head")
        self.criterion = Lists()

    def step(self, batch):
        z = [self.student_head(self.backbone(x)) for x in (*batch, batch[0] / 2, batch[1] / 2)]
        self.seen.append([x.detach() for x in z[:2]])
        return self.criterion([x.detach() for x in z[:2]], z, epoch=1)


class Lists(nn.Module):
    def forward(self, teacher, student, epoch):
        return sum((a - b).square().mean() for a in teacher for b in student[::-1])


class Moco(Byol):
    """A query and the key of a momentum encoder."""

    def step(self, batch):
        query = self.projection_head(self.backbone(batch[0]))
        with torch.no_grad():
            key = self.projection_head(self.backbone(batch[1]))
        self.seen.append([query.detach(), key])
        return self.criterion(query, key)


class Masked(Byol):
    """Patches are predicted; there are no views."""

    def step(self, batch):
        tokens = torch.stack([self.projection_head(self.backbone(x)) for x in batch[:1]] * 3, dim=1)
        return self.criterion(tokens, torch.zeros_like(tokens))


def in_lightning(package, model):
    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            for name, part in model.named_children():
                setattr(self, name, part)

        def training_step(self, batch, _):
            return model.step(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Module()


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (Byol, "z is recorded from projection_head"),
        (Dino, "z is recorded from student_head, the first two of 4 calls per update"),
        (Moco, "z is recorded from the arguments of the loss, query and key"),
    ],
)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_found_by_itself(package, tmp_path, capsys, method, says, accumulated):
    """Without names, the first update shows where z is; weights are those of a training without the monitor."""
    ends = []
    for callbacks in ([], [lightning.SpectrumCallback(every=4)]):
        model = method()
        fit(package, tmp_path, 4, callbacks, model=in_lightning(package, model), accumulate_grad_batches=accumulated)
        ends.append(model)
    assert all(torch.equal(a, b) for a, b in zip(*(end.parameters() for end in ends), strict=True))
    assert says in capsys.readouterr().err
    (record,) = callbacks[0].watch.records
    a, b = (torch.cat(z).double() for z in zip(*model.seen, strict=True))
    C = (a.T @ b + b.T @ a) / (2 * len(a))
    assert record.samples == len(a) == 4 * 16 * accumulated
    assert record.eigenvalues == pytest.approx(torch.linalg.eigvalsh(C).flip(0).numpy(), abs=1e-6)
    assert len(record.hidden) == 12
    assert record.loss is not None


@pytest.mark.parametrize("method", [Byol, Masked])
def test_a_loss_that_does_not_show_z_is_explained(package, tmp_path, capsys, method):
    """What the user named is hooked, nothing wrong is recorded, and the line to use has the real name."""
    callback = lightning.SpectrumCallback(loss="criterion", every=2)
    trainer, _ = fit(package, tmp_path, 4, [callback], model=in_lightning(package, method()))
    assert trainer.global_step == 4
    assert callback.watch.records == []
    err = capsys.readouterr().err
    assert err.count("z is not recorded") == 1
    assert 'use SpectrumCallback(projector="projection_head", …)' in err


def test_numbers_go_to_lightnings_loggers(package, tmp_path):
    logger = importlib.import_module(f"{package.__name__}.loggers").CSVLogger(tmp_path)
    fit(package, tmp_path, 8, [lightning.SpectrumCallback(projector="projector", every=4)], logger=logger)
    logger.save()
    text = next(tmp_path.rglob("metrics.csv")).read_text()
    columns = set(text.splitlines()[0].split(",")) - {"epoch", "step"}  # these two are Lightning's own
    assert {"stairwise/covariance/1", "stairwise/effective_rank", "stairwise/learned"} <= columns
    assert all(name.startswith("stairwise/") for name in columns)
    assert len(read_log(next(tmp_path.rglob("metrics.jsonl")))[0]) == 2


def test_going_on_from_lightnings_checkpoint(package, tmp_path):
    def watch(name):
        return lightning.SpectrumCallback(loss="criterion", every=4, folder=tmp_path / name)

    fit(package, tmp_path, 16, [watch("whole")])
    trainer, _ = fit(package, tmp_path, 8, [watch("parts")])
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(package, tmp_path, 16, [watch("parts")], checkpoint=tmp_path / "half.ckpt")
    whole, parts = (
        [
            {k: v for k, v in r.as_json().items() if k != "seconds"}
            for r in read_log(tmp_path / name / "metrics.jsonl")[0]
        ]
        for name in ("whole", "parts")
    )
    planned = [[record.pop("planned_updates") for record in records] for records in (whole, parts)]
    assert whole == parts
    assert planned == [[16] * 4, [8, 8, 16, 16]]


def test_the_end_of_a_second_training(package, tmp_path):
    """The records go on where the first training ended, and so does the number of updates that are planned."""
    callback = lightning.SpectrumCallback(loss="criterion", every=4, folder=tmp_path)
    for _ in range(2):
        fit(package, tmp_path, 8, [callback])
    assert [(r.step, r.planned_updates) for r in callback.watch.records] == [(12, 16), (16, 16)]


@pytest.mark.parametrize(("optimizers", "left"), [(1, 13), (2, None), (0, None)])
def test_how_many_updates_are_left(package, optimizers, left):
    class Known:
        estimated_stepping_batches, global_step = 20, 7

    class Unknown(Known):
        estimated_stepping_batches = math.inf

    for kind, expected in ((Known, left), (Unknown, None)):
        trainer = kind()
        trainer.optimizers = [None] * optimizers
        assert lightning._updates_left(trainer) == expected


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"loss": "loss"}, r"it has \['backbone', 'projector', 'criterion'\]"),
        ({"projector": "tau"}, r"projector must name a module \(got tau, a float\)"),
    ],
)
def test_names_that_are_not_there(package, tmp_path, capsys, names, says):
    """One message, and the training goes on; where warnings are errors, it goes to stderr."""
    callback = lightning.SpectrumCallback(**names)
    trainer, _ = fit(package, tmp_path, 2, [callback])
    assert trainer.global_step == 2
    assert callback.watch.records == []
    callback.watch.update(torch.ones(2, 3), torch.ones(2, 3))  # a script that calls it goes on
    assert re.search(f"stairwise: nothing is recorded: .*{says}", capsys.readouterr().err)


def test_embeddings_handed_over_in_the_training_step(package, tmp_path):
    """For a loss that is a function: the callback attaches without modules, the module calls update."""
    callback = lightning.SpectrumCallback(every=4, folder=tmp_path)

    class Own(type(module(package))):
        def training_step(self, batch, _):
            z_a, z_b = (self.projector(self.backbone(x)) for x in batch)
            loss = sw.losses.vicreg(z_a, z_b)
            callback.watch.update(z_a, z_b, loss=loss)
            return loss

    fit(package, tmp_path, 8, [callback], model=Own())
    records, _ = read_log(tmp_path / "metrics.jsonl")
    assert [(r.step, r.samples) for r in records] == [(4, 64), (8, 64)]
    assert all(r.loss > 0 for r in records)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"loss": nn.Identity()}, r'loss must be the name of a submodule \(got a Identity\): write loss="loss"'),
        ({"loss": "criterion", "every": 5.0}, "every must be a whole number"),
        ({"loss": "criterion", "joined": 1}, "joined must be True or False"),
        ({"loss": "criterion", "monitor": "mine"}, "monitor must be a SpectrumMonitor"),
    ],
)
@pytest.mark.skipif(not PACKAGES, reason="needs lightning")
def test_wrong_types(given, says):
    with pytest.raises(InputError, match=says):
        lightning.SpectrumCallback(**given)


@pytest.mark.skipif(bool(PACKAGES), reason="lightning is installed")
def test_without_lightning():
    with pytest.raises(InputError, match="pip install lightning"):
        lightning.SpectrumCallback(loss="criterion")
