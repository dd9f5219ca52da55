"""Spectra of checkpoints written by other scripts."""

import argparse
import json
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import stairwise as sw
from stairwise.checks import InputError, RunWarning
from stairwise.data.images import load
from stairwise.evaluate.checkpoints import Source, measure_checkpoints
from stairwise.runs.log import read_log
from stairwise.training.recipe import Recipe
from tests.command_lines import stairwise

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, d=6):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 20), nn.ReLU())
        self.head = nn.Linear(20, d)

    def forward(self, x):
        return self.head(self.backbone(x))
"""
NET = "checkpointed_net:Net"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A project folder with its own module and checkpoints whose head is scaled by 1, 2, 4, ..."""
    (tmp_path / "checkpointed_net.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "checkpointed_net", raising=False)
    return tmp_path


def states(count):
    from checkpointed_net import Net

    torch.manual_seed(0)
    net = Net()
    for i in range(count):
        yield i, {k: v * (2.0**i if k.startswith("head") else 1.0) for k, v in net.state_dict().items()}


def source(pattern, **more):
    given = {
        "model": NET,
        "checkpoints": pattern,
        "data": "photos",
        "options": {},
        "views": "simclr",
        "size": 16,
    } | more
    return Source(**given)


def test_unreadable_images_are_mentioned_once(place):
    (place / "images").mkdir()
    for i in range(4):
        Image.fromarray(np.full((16, 16, 3), 40 * i, np.uint8)).save(place / "images" / f"{i}.png")
    (place / "images" / "broken.png").write_text("no image")
    torch.save(next(states(1))[1], place / "ck-1.pt")
    with pytest.warns(RunWarning) as said:
        measure_checkpoints(source(str(place / "ck-1.pt"), data=str(place / "images")), place / "out", "cpu")
    assert [str(note.message)[:19] for note in said] == ["1 of 5 images skipp"]


@pytest.mark.parametrize("form", ["plain", "lightning", "compiled", "parallel", "safetensors"])
def test_forms_of_checkpoints(form, place):
    for i, state in states(3):
        name = f"ck-{10**i}"  # natural order: 1, 10, 100
        match form:
            case "plain":
                torch.save(state, place / f"{name}.pt")
            case "lightning":
                wrapped = {f"model.{k}": v for k, v in state.items()}
                torch.save({"state_dict": wrapped, "global_step": 7 * i + 1, "epoch": 0}, place / f"{name}.ckpt")
            case "compiled":
                torch.save({"model": {f"_orig_mod.{k}": v for k, v in state.items()}}, place / f"{name}.pth")
            case "parallel":
                torch.save(
                    {"model": {f"module.{k}": v for k, v in state.items()}, "step": 10**i}, place / f"{name}.pth"
                )
            case "safetensors":
                save_file(state, place / f"{name}.safetensors")
    measure_checkpoints(source(str(place / "ck-*"), lr=0.5, h="backbone"), place / "out", "cpu")
    records, bad = read_log(place / "out" / "metrics.jsonl")
    assert bad == 0
    steps = [1, 8, 15] if form == "lightning" else [1, 10, 100]
    assert [r.step for r in records] == steps
    assert [r.t for r in records] == [0.5 * s for s in steps]
    first, _, last = (np.array(r.covariance) for r in records)
    assert last == pytest.approx(16 * first, rel=1e-4)  # the same views throughout, z four times as large
    assert len(records[0].hidden) == 20
    assert records[0].samples == 520


def test_our_own_checkpoints(place):
    """Checkpoints of `stairwise train` fit its network and give the spectrum of that network."""
    recipe = Recipe(
        data="photos",
        views="simclr",
        size=16,
        encoder="mlp",
        encoder_options={"inputs": 768, "widths": [20]},
        hidden=[],
        head_norm=False,
        head_bias=True,
        d=6,
        batch=64,
        steps=4,
        lr=1e-3,
        precision="float32",
    )
    run = sw.train(recipe, place / "run", device="cpu")
    (place / "our_net.py").write_text(
        "from torch import nn\nfrom stairwise.nets.encoder import Network, build_encoder\n"
        "def build():\n"
        "    return Network(build_encoder('mlp', {'inputs': 768, 'widths': [20]}), nn.Sequential(nn.Linear(20, 6)))\n"
    )
    pattern = str(place / "run" / "checkpoints" / "*.safetensors")
    measure_checkpoints(source(pattern, model="our_net:build"), place / "out", "cpu")
    (record,) = read_log(place / "out" / "metrics.jsonl")[0]
    assert record.step == 4
    assert len(record.eigenvalues) == 6
    assert len(record.hidden) == 20
    assert run.facts["steps"] == 4


def test_settings_of_a_script_in_a_checkpoint(place, capsys):
    """An argparse.Namespace, as many scripts store it, with a path in it; other objects are refused."""
    args = argparse.Namespace(lr=0.1, data=Path("somewhere"), nested=SimpleNamespace(sizes=[1, 2]), device=None)
    for i, state in states(3):
        torch.save({"model": state, "args": args, "step": i + 1}, place / f"ck-{i}.pt")
    torch.save({"model": state, "args": argparse.Namespace(evil=Evil()), "step": 9}, place / "ck-9.pt")
    with pytest.warns(RunWarning, match=r"1 of 4 checkpoints skipped, the first because .*ck-9\.pt must be"):
        measure_checkpoints(source(str(place / "ck-*")), place / "out", "cpu")
    assert "code in a checkpoint" not in capsys.readouterr().out
    assert [r.step for r in read_log(place / "out" / "metrics.jsonl")[0]] == [1, 2, 3]
    with pytest.raises(pickle.UnpicklingError):
        torch.load(place / "ck-0.pt", weights_only=True)  # the list is not left behind for others


def test_the_normalization_is_told(place):
    for i, state in states(2):
        torch.save(state, place / f"ck-{i}.pt")
    pixels = load("photos").pixels.reshape(-1, 3) / 255
    own = measure_checkpoints(source(str(place / "ck-*")), place / "own", "cpu")
    assert own.mean == pytest.approx(pixels.mean(axis=0), rel=1e-4)
    assert own.std == pytest.approx(pixels.std(axis=0), rel=1e-4)
    given = source(str(place / "ck-*"), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    told = measure_checkpoints(given, place / "given", "cpu")
    assert (told.mean, told.std) == (pytest.approx([0.5] * 3), pytest.approx([0.2] * 3))


def test_command_line_tells_the_normalization(place):
    for i, state in states(12):
        torch.save(state, place / f"net-{i + 1}.pt")
    (place / "net-99.pt").write_bytes(b"")
    (place / "net-98.pt").write_bytes(b"")
    line = ["spectrum", "--model", NET, "--checkpoints", "net-*.pt", "--data", "photos", "--size", "16"]
    done = stairwise(*line, "--mean", "0.5,0.5,0.5", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "views normalized by mean 0.5, 0.5, 0.5 and std 0." in done.stdout
    assert "(measured on these images; --std take those of your training)" in done.stdout
    notes = [line for line in done.stderr.splitlines() if " % after " not in line]  # a busy machine shows progress
    assert len(notes) == 1
    assert notes[0].startswith("note: 2 of 14 checkpoints skipped, the first because")


def test_command_line(place):
    for i, state in states(12):
        torch.save(state, place / f"net-{i + 1}.pt")
    line = ["spectrum", "--model", NET, "--checkpoints", "net-*.pt", "--data", "photos", "--size", "16"]
    done = stairwise(*line, "--options", "d=6", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["report"] == "spectrum/report.html"
    assert (told["records"], told["skipped"], len(told["mean"])) == (12, [], 3)
    assert "Eigenvalues now" in (place / "spectrum" / "report.html").read_text(encoding="utf-8")


class Evil:
    def __reduce__(self):
        return print, ("code in a checkpoint was run",)


def test_bad_checkpoints(place, capsys):
    for i, state in states(3):
        torch.save(state, place / f"ck-{i}.pt")
    (place / "ck-5.pt").write_bytes((place / "ck-1.pt").read_bytes()[:1000])
    torch.save({"model": Evil()}, place / "ck-6.pt")
    torch.save({"head.weight": torch.zeros(2, 2)}, place / "ck-7.pt")
    save_file({"a": torch.zeros(2)}, place / "ck-8.safetensors")
    with pytest.warns(RunWarning) as said:
        measured = measure_checkpoints(source(str(place / "ck-*")), place / "out", "cpu")
    (note,) = said  # one line, however many files
    assert re.match(r"4 of 7 checkpoints skipped, the first because .*ck-5\.pt must be a complete", str(note.message))
    assert (measured.records, len(measured.skipped)) == (3, 4)
    assert "it lacks backbone.1.weight" in measured.skipped[2]
    assert "code in a checkpoint" not in capsys.readouterr().out
    assert len(read_log(place / "out" / "metrics.jsonl")[0]) == 3


def test_a_folder_a_checkpoint(place):
    """checkpoint-500/model.pt, the layout of some libraries."""
    for i, state in states(3):
        (place / f"checkpoint-{9 + i}").mkdir()
        torch.save(state, place / f"checkpoint-{9 + i}" / "model.pt")
    measure_checkpoints(source(str(place / "checkpoint-*" / "model.pt")), place / "out", "cpu")
    assert [r.step for r in read_log(place / "out" / "metrics.jsonl")[0]] == [9, 10, 11]


def test_checkpoints_that_are_not_finite_are_named(place):
    for i, state in states(3):
        torch.save({k: v * (float("nan") if i == 1 else 1.0) for k, v in state.items()}, place / f"ck-{i}.pt")
    with pytest.warns(RunWarning, match=r"ck-1\.pt must give finite embeddings"):
        measure_checkpoints(source(str(place / "ck-*")), place / "out", "cpu")
    assert [r.step for r in read_log(place / "out" / "metrics.jsonl")[0]] == [0, 2]


def test_nothing_is_lost_when_nothing_fits(place):
    out = place / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    torch.save(nn.Linear(2, 2).state_dict(), place / "ck-1.pt")
    with pytest.raises(InputError, match=r"must fit the model \(got 1 files, .*the first: .*ck-1\.pt must contain all"):
        measure_checkpoints(source(str(place / "ck-*")), out, "cpu")
    assert (out / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_bad_input(place):
    for i, state in states(2):
        torch.save(state | {}, place / f"ck-{i}.pt")
    (place / "kept").mkdir()
    torch.save(nn.Linear(2, 2).state_dict(), place / "kept" / "nameless.pt")
    pattern = str(place / "ck-*.pt")
    for given, says in (
        ({"checkpoints": str(place / "nothing-*")}, "must match files"),
        ({"model": "checkpointed_net:Nothing"}, "callable"),
        ({"model": "no_such_module:Net"}, "importable"),
        ({"views": "wide"}, "views"),
        ({"size": 20}, "must accept the views"),
        ({"z": "neck"}, "it has"),
        ({"mean": (0.5,)}, "one per channel"),
        ({"options": {"dim": 3}}, "dim"),
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
    ):
        with pytest.raises(InputError, match=says):
            measure_checkpoints(
                source(pattern, **given) if "checkpoints" not in given else source(**{"pattern": given["checkpoints"]}),
                place / "out",
                "cpu",
            )
    with pytest.raises(InputError, match=r"must fit the model.*must contain its step"):
        measure_checkpoints(source(str(place / "kept" / "nameless.pt")), place / "out", "cpu")
    for i, state in states(2):
        torch.save({"model": state, "epoch": 3}, place / f"same-{i}.pt")
    with pytest.raises(InputError, match="must come after step 3"):
        measure_checkpoints(source(str(place / "same-*.pt")), place / "out", "cpu")
