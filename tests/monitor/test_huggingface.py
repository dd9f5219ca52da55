"""The callback in Hugging Face's Trainer; skipped if transformers is not installed."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import stairwise as sw
from stairwise.checks import InputError
from stairwise.monitor import huggingface
from stairwise.runs.log import read_log

INSTALLED = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(10, 12), nn.ReLU())
        self.projector = nn.Linear(12, 4)
        self.criterion = sw.losses.VICReg()
        self.seen = []

    def forward(self, x_a, x_b):
        z = [self.projector(self.backbone(x)) for x in (x_a, x_b)]
        self.seen.append([one.detach().double() for one in z])
        return {"loss": self.criterion(*z)}


def train(folder, callbacks, accumulated=1):
    transformers = pytest.importorskip("transformers")
    draw = torch.Generator().manual_seed(1)
    data = [{"x_a": a, "x_b": b} for a, b in zip(*torch.randn(2, 256, 10, generator=draw), strict=True)]
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=8,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=accumulated,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model = Model()
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
    return model


@pytest.mark.libraries
@pytest.mark.skipif(not INSTALLED, reason="needs transformers and accelerate")
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("names", [{}, {"loss": "criterion", "backbone": "backbone"}, {"projector": "projector"}])
@pytest.mark.filterwarnings("ignore")
def test_records_of_the_trainer(tmp_path, names, accumulated):
    callback = huggingface.SpectrumTrainerCallback(**names, every=4)
    alone, watched = (train(tmp_path, callbacks, accumulated) for callbacks in ([], [callback]))
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), watched.parameters(), strict=True))
    records, bad = read_log(tmp_path / "metrics.jsonl")
    assert bad == 0
    assert [(r.step, r.t, r.samples) for r in records] == [(4, 0.2, 64 * accumulated), (8, 0.4, 64 * accumulated)]
    assert [r.planned_updates for r in records] == [8, 8]
    a, b = (torch.cat(z) for z in zip(*watched.seen[4 * accumulated :], strict=True))
    C = (a.T @ b + b.T @ a) / (2 * len(a))
    assert callback.watch.records[1].eigenvalues == pytest.approx(torch.linalg.eigvalsh(C).flip(0).numpy(), abs=1e-6)
    assert (records[1].hidden is None) == ("projector" in names)


@pytest.mark.libraries
@pytest.mark.skipif(not INSTALLED, reason="needs transformers and accelerate")
@pytest.mark.parametrize(("done", "all_of_them", "planned"), [(0, 8, 8), (5, 8, 3), (0, -1, None)])
def test_a_trainer_that_goes_on_plans_fewer_updates(tmp_path, done, all_of_them, planned):
    model, callback = Model(), huggingface.SpectrumTrainerCallback(folder=tmp_path)
    state = SimpleNamespace(max_steps=all_of_them, global_step=done)
    callback.on_train_begin(None, state, None, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert callback.watch.recorder.updates == planned
    callback.watch.close()


@pytest.mark.libraries
@pytest.mark.skipif(not INSTALLED, reason="needs transformers and accelerate")
def test_names_that_are_not_there(tmp_path, capsys):
    train(tmp_path, [huggingface.SpectrumTrainerCallback(loss="loss")])
    assert "nothing is recorded: loss must name a submodule of Model (got loss)" in capsys.readouterr().err
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.skipif(INSTALLED, reason="transformers is installed")
def test_without_transformers():
    with pytest.raises(InputError, match="pip install transformers"):
        huggingface.SpectrumTrainerCallback()
