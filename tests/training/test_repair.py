"""`stairwise repair` shows what is wrong in a run folder, repairs it, and loses nothing."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import stairwise as sw
from stairwise.checks import InputError, RunWarning
from stairwise.cli import app
from stairwise.runs.log import read_log
from stairwise.runs.reader import Run
from stairwise.training import checkpoint
from stairwise.training.continuing import FREE, LENGTH
from stairwise.training.process import locked
from stairwise.training.repair import examine, repair
from tests.training.test_checkpoint import NEWEST, RECIPE, as_version_0_2, edit, metrics, run, trained

__all__ = ["run", "trained"]  # fixtures
SHARED = True
QUICK = settings(max_examples=60, deadline=None)


def invoke(*words):
    return CliRunner().invoke(app, ["repair", *map(str, words)], catch_exceptions=False)


def contents(folder):
    """Every file of a folder and its bytes, without the lock."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_nothing_is_wrong(run):
    before = contents(run)
    done = invoke(run)
    assert (done.exit_code, done.stdout) == (0, f"nothing is wrong in {run}\n")
    assert invoke(run, "--yes").exit_code == 0
    assert json.loads(invoke(run, "--json").stdout) == {"run": str(run), "repaired": 0, "found": []}
    assert contents(run) == before


def damage(run):
    """Everything at once; returns the lost recipe."""
    facts = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text("null")
    edit(run / NEWEST, step=12)
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 21, "t": 1.')
    (run / "embeddings.json").write_text("[")
    (run / "checkpoints" / ".step-0000000030.part-0123456789ab.safetensors").write_bytes(b"half")
    (run / "checkpoints" / ".step-0000000030-abcd_123.safetensors").write_bytes(b"half")
    (run / "checkpoints" / "step-0000000040.safetensors").mkdir()
    return facts


FOUND = [
    "recipe.json: it does not hold a table",
    "metrics.jsonl: its last line breaks off",
    "embeddings.json: it is damaged",
    "checkpoints/step-0000000020.safetensors: it is damaged: its metadata do not match their digest",
    "checkpoints/step-0000000040.safetensors: it is not a file",
    "checkpoints/.step-0000000030.part-0123456789ab.safetensors: a killed process left it unfinished",
    "checkpoints/.step-0000000030-abcd_123.safetensors: a killed process left it unfinished",
]


def test_it_shows_first_and_changes_nothing(run):
    damage(run)
    before = contents(run)
    done = invoke(run)
    assert done.exit_code == 1
    assert [line for line in done.stdout.splitlines() if not line.startswith(" ")][:-1] == FOUND
    assert done.stdout.endswith(f"to repair: stairwise repair {run} --yes\n")
    assert "can be repaired: rebuild it from step-0000000010.safetensors" in done.stdout
    assert contents(run) == before
    listed = json.loads(invoke(run, "--json").stdout)
    assert listed["repaired"] == 0
    assert len(listed["found"]) == 7
    assert all(one["repairable"] for one in listed["found"])


def test_it_repairs_and_keeps_what_it_replaces(run, trained):
    whole = contents(run)
    facts = damage(run)
    damaged = contents(run)
    done = invoke(run, "--yes", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["repaired"] == 7
    assert examine(run) == []
    after = contents(run)
    assert Run(run).facts == facts | {"rebuilt": "step-0000000010.safetensors"}
    assert after["metrics.jsonl"] == whole["metrics.jsonl"]
    assert after["metrics.jsonl.damaged"] == b'{"step": 21, "t": 1.'
    for name in ("recipe.json", "embeddings.json", NEWEST):
        assert after[f"{name}.damaged"] == damaged[name]
    assert not [name for name in after if "part" in name or "abcd" in name]
    assert (run / "checkpoints" / "step-0000000040.safetensors.damaged").is_dir()
    sw.train(RECIPE, run)  # without a warning
    assert metrics(run) == metrics(trained)


def test_a_last_line_that_only_lacks_its_end(run):
    log = run / "metrics.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[:-1])
    assert [f.problem for f in repair(run)] == ["its last line has no end"]
    assert log.read_bytes() == whole
    assert examine(run) == []


def test_what_cannot_be_repaired_is_said(run):
    log = run / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:2], b"#" * (len(lines[2]) - 1) + b"\n", *lines[3:-1]]))
    for path in (run / "checkpoints").iterdir():
        as_version_0_2(path)
    (run / "recipe.json").write_text("{")
    done = invoke(run, "--yes")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[1::2] == [
        "    the same `stairwise train` command rebuilds it",
        "    readers skip them",
        "    training goes on without those records",
    ]
    assert f"{len(lines[-1])} bytes are missing at its end" in done.stdout
    assert "1 of its lines are not records" in done.stdout


def test_no_whole_checkpoint(run):
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(b"")
    (run / "recipe.json").write_text("")
    done = invoke(run, "--yes")
    assert done.exit_code == 1
    assert "there is no whole checkpoint to rebuild it from" in done.stdout
    assert "no whole checkpoint is left" in done.stdout
    assert len(list((run / "checkpoints").glob("*.damaged"))) == 2


def test_runs_of_a_monitor(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "t": 1.0}\n{"step"')
    with (tmp_path / "metrics.jsonl").open("ab") as still_open:
        assert invoke(tmp_path, "--yes").exit_code == 0
        still_open.write(b'{"step": 2, "t": 2.0}\n')
    records, bad = read_log(tmp_path / "metrics.jsonl")
    assert ([r.step for r in records], bad) == ([1, 2], 0)


def test_runs_in_training_and_other_folders_are_left_alone(run, tmp_path):
    damage(run)
    before = contents(run)
    with locked(run), pytest.raises(InputError, match="another process"):
        repair(run)
    assert contents(run) == before
    (tmp_path / "photos").mkdir()
    for folder in (tmp_path / "photos", tmp_path / "none"):
        with pytest.raises(InputError, match="RUN must be the folder of a run"):
            repair(folder)
    assert list((tmp_path / "photos").iterdir()) == []
    assert not (tmp_path / "none").exists()


def test_a_full_disk_during_repair_loses_nothing(run, monkeypatch):
    facts = damage(run)
    before = contents(run)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        repair(run)
    monkeypatch.undo()
    assert sorted(contents(run).values()) == sorted(before.values())
    repair(run)
    assert Run(run).facts["recipe"] == facts["recipe"]
    assert examine(run) == []


def test_damaged_weights(run):
    shutil.copytree(run / "checkpoints", run / "weights")
    path = checkpoint.every(run / "weights")[0]
    os.truncate(path, 1000)
    assert [f.path for f in repair(run)] == [path]
    assert examine(run) == []


def test_a_repair_between_damage_and_training_is_not_needed(run, trained):
    """Training does what it needs of it by itself, and says so."""
    damage(run)
    with pytest.warns(RunWarning, match="falling back"), pytest.warns(RunWarning, match="is rebuilt"):
        sw.train(RECIPE, run)
    assert metrics(run) == metrics(trained)


@QUICK
@given(data=st.data())
def test_flipped_bits_and_truncations_of_recipe_and_log(trained, tmp_path_factory, data):
    """After a repair nothing repairable is wrong, whole records are there, and the recipe is that of the run."""
    run = shutil.copytree(trained, tmp_path_factory.mktemp("flipped") / "run")
    name = data.draw(st.sampled_from(["recipe.json", "metrics.jsonl"]))
    content = bytearray((run / name).read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        at = data.draw(st.integers(0, 8 * len(content) - 1))
        content[at // 8] ^= 1 << at % 8
    (run / name).write_bytes(content)
    repair(run)
    assert [finding for finding in examine(run) if finding.mend] == []
    facts, before = Run(run).facts, Run(trained).facts
    assert all(facts["recipe"].get(k) == v for k, v in before["recipe"].items() if k not in FREE | LENGTH)
    assert facts["alpha"] == before["alpha"]
    lost = len(metrics(trained)) - len(metrics(run))
    cut = len(content) < (trained / name).stat().st_size
    assert lost == 0 if name == "recipe.json" else cut or lost <= 2
    shutil.rmtree(run)
