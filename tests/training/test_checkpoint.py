"""A checkpoint is what was written, tensors and metadata, or it is not used."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import stairwise as sw
from stairwise.checks import InputError, RunWarning
from stairwise.runs.log import read_log
from stairwise.runs.reader import Run
from stairwise.runs.record import CLOCKS
from stairwise.training import checkpoint
from stairwise.training.loop import Stopped
from tests.training.tiny import DIGITS

SHARED = True  # one training for all tests
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RECIPE = replace(DIGITS, steps=20, records=10, schedule="constant")
FACTS = {
    "recipe": {"lr": 0.1},
    "about": {"steps": 20},
    "t": 0.5,
    "alpha": 1.0,
    "seconds": 3.25,
    "log_size": 100,
    "images": ["(9, 8, 8, 1) uint8", "digits"],
    "continued": [[4, 20]],
    "view_shape": [1, 8, 8],
}
TENSORS = {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(4, dtype=torch.bfloat16), "none": torch.zeros(0)}


def metrics(folder):
    return [{k: v for k, v in r.as_json().items() if k not in CLOCKS} for r in read_log(folder / "metrics.jsonl")[0]]


def metadata(path):
    with safe_open(path, framework="pt") as stored:
        return json.loads(stored.metadata()["stairwise"])


def edit(path, **changes):
    """Change facts as an editor of the file would."""
    facts = metadata(path) | changes
    save_file(load_file(path), path, metadata={"stairwise": json.dumps(facts)})


def as_version_0_2(path):
    """A checkpoint without a digest of its metadata."""
    facts = {name: value for name, value in metadata(path).items() if name not in ("seal", "about")} | {"format": 1}
    save_file(load_file(path), path, metadata={"stairwise": json.dumps(facts)})


def stop_after_10(step, *_):
    if step == 10:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run with checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.raises(Stopped):
        sw.train(RECIPE, folder, progress=stop_after_10)
    sw.train(RECIPE, folder)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


NEWEST = "checkpoints/step-0000000020.safetensors"


@pytest.mark.parametrize(
    "changes",
    [{"step": 12}, {"log_size": 77}, {"t": 0.1}, {"alpha": 2.0}, {"continued": [[3, 20]]}, {"recipe": {}}],
    ids=str,
)
def test_edited_metadata_count_as_damage(run, trained, changes):
    edit(run / NEWEST, **changes)
    with pytest.warns(
        RunWarning, match=r"step-0000000020\.safetensors is damaged: .*; falling back to step-0+10"
    ) as said:
        sw.train(RECIPE, run)
    assert len(said) == 1
    assert "its metadata do not match their digest" in str(said[0].message)
    assert metrics(run) == metrics(trained)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step": "20"}, "step in its metadata is not a whole number: '20'"),
        ({"log_size": -1}, "log_size"),
        ({"log_size": 1e9}, "log_size"),
        ({"log_size": True}, "log_size"),
        ({"t": None}, "t in its metadata is not a number"),
        ({"t": float("nan")}, "t in its metadata is not a number"),
        ({"recipe": []}, "recipe"),
        ({"images": "digits"}, "images"),
        ({"continued": [[1, "2"]]}, "continued"),
        ({"view_shape": [1, 8]}, "view_shape"),
        ({"format": "2"}, "format"),
        ({"format": None}, "format"),
        ({"step": 19}, "it is named step 20, but holds step 19"),
    ],
    ids=str,
)
@pytest.mark.parametrize("version", [1, 2])
def test_metadata_of_the_wrong_type(tmp_path, changes, says, version):
    for step in (10, 20):
        path = checkpoint.save(tmp_path, step, FACTS, TENSORS)
    if version == 1:
        as_version_0_2(path)
    edit(path, **changes)
    if version == 2:
        facts = metadata(path)
        edit(path, seal=checkpoint._seal(facts))  # it could not be told from the digest
    with pytest.warns(RunWarning, match="falling back to step-0000000010") as said:
        assert checkpoint.newest(tmp_path).facts["step"] == 10
    assert says in str(said[0].message)


@pytest.mark.parametrize("content", ["null", "[]", "7", '"text"', "{", "[" * 100_000, "{}"], ids=lambda text: text[:9])
def test_metadata_that_are_no_table(tmp_path, content):
    path = checkpoint.save(tmp_path, 20, FACTS, TENSORS)
    save_file(load_file(path), path, metadata={"stairwise": content})
    with pytest.raises(checkpoint.Damaged):
        checkpoint.load(path)
    save_file(load_file(path), path)
    with pytest.raises(checkpoint.Damaged, match="lack 'stairwise'"):
        checkpoint.load(path)


def test_checkpoints_of_version_0_2_are_read(run, trained):
    """They are recognized by their format, 1."""
    with pytest.raises(Stopped):
        sw.train(RECIPE, run, restart=True, progress=stop_after_10)
    as_version_0_2(run / "checkpoints" / "step-0000000010.safetensors")
    sw.train(RECIPE, run)
    assert metrics(run) == metrics(trained)
    assert metadata(run / NEWEST)["format"] == 2


def test_a_removed_seal_is_not_an_older_version(tmp_path):
    path = checkpoint.save(tmp_path, 20, FACTS, TENSORS)
    for changes, says in (({"seal": None}, "digest"), ({"format": 1}, "another format")):
        edit(path, **changes)
        with pytest.raises(checkpoint.Damaged, match=says):
            checkpoint.load(path)


def test_files_of_later_versions_are_left_alone(tmp_path):
    """A run must not begin again because its checkpoints are too new."""
    path = checkpoint.save(tmp_path, 20, FACTS, TENSORS)
    edit(path, format=3)
    with pytest.raises(checkpoint.Damaged):
        checkpoint.load(path)
    edit(path, seal=checkpoint._seal(metadata(path)))
    with pytest.raises(InputError, match=r"at most format 2 \(got 3\): use the version that wrote it"):
        checkpoint.newest(tmp_path)


def test_missing_facts(tmp_path):
    for step in (10, 20):
        path = checkpoint.keep(tmp_path, step, FACTS if step == 10 else {"t": 1.0}, TENSORS)
    assert checkpoint.newest(tmp_path).path == path
    with pytest.warns(RunWarning, match="lack recipe, alpha, seconds, log_size, images; falling back"):
        assert checkpoint.newest(tmp_path, checkpoint.RESUMABLE).facts["step"] == 10


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link"])
def test_what_is_only_named_like_a_checkpoint_is_passed_over(run, trained, kind):
    (run / NEWEST).unlink()
    if kind == "folder":
        (run / NEWEST).mkdir()
    elif kind == "pipe":
        os.mkfifo(run / NEWEST)
    else:
        (run / NEWEST).symlink_to("nowhere")
    assert [p.name for p in checkpoint.every(run / "checkpoints")] == ["step-0000000010.safetensors"]
    sw.train(RECIPE, run)
    assert metrics(run) == metrics(trained)
    assert checkpoint.newest(run / "checkpoints").facts["step"] == 20


def test_damaged_files_do_not_crowd_out_whole_ones(tmp_path):
    for step in (10, 20):
        path = checkpoint.save(tmp_path, step, FACTS, TENSORS)
    path.write_bytes(b"damaged")
    for step in (13, 16):
        checkpoint.save(tmp_path, step, FACTS, TENSORS)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [f"step-{step:010d}.safetensors" for step in (13, 16)] + ["step-0000000020.safetensors.damaged"]


@QUICK
@given(data=st.data())
def test_flipped_bits_and_truncations_are_noticed(tmp_path, data):
    path = checkpoint.keep(tmp_path, 20, FACTS, TENSORS)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        at = data.draw(st.integers(0, 8 * len(content) - 1))
        content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)
    try:
        back = checkpoint.load(path)
    except checkpoint.Damaged:
        return
    assert {name: back.facts[name] for name in FACTS} == FACTS  # only spaces of the header differ
    assert back.tensors.keys() == TENSORS.keys()
    assert all(torch.equal(back.tensors[name], t) for name, t in TENSORS.items())


def test_a_power_failure_finds_file_and_folder_on_disk(tmp_path, monkeypatch):
    flushed, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (flushed.append(os.fstat(handle).st_ino), real(handle)))
    path = checkpoint.save(tmp_path / "checkpoints", 20, FACTS, TENSORS)
    assert flushed == [p.stat().st_ino for p in (path, path.parent, tmp_path)]


# recipe.json


@pytest.mark.parametrize(
    "content",
    ["", "null", "{", "[]", "{}", '{"recipe": null}', '{"recipe": {}}', "\x00", "folder", "missing"],
    ids=repr,
)
@pytest.mark.parametrize("unfinished", [True, False])
def test_a_damaged_recipe_is_rebuilt_from_the_checkpoint(run, trained, content, unfinished):
    path = run / "recipe.json"
    before = json.loads(path.read_text())
    if unfinished:
        (run / NEWEST).unlink()
    path.unlink()
    if content == "folder":
        path.mkdir()
    elif content != "missing":
        path.write_text(content)
    with pytest.warns(RunWarning, match=r"recipe\.json is rebuilt from step-0000000(010|020)\.safetensors: its? "):
        sw.train(RECIPE, run)
    after = Run(run).facts
    assert {k: v for k, v in after.items() if k != "rebuilt"} == before  # with commit, versions, device and date
    assert (run / "recipe.json.damaged").exists() == (content != "missing")
    assert metrics(run) == metrics(trained)
    sw.train(RECIPE, run)  # and nothing more to say
    assert Run(run).facts == after


def test_an_edited_recipe_is_rebuilt(run):
    facts = json.loads((run / "recipe.json").read_text())
    facts["recipe"]["lr"] = 1.0
    (run / "recipe.json").write_text(json.dumps(facts))
    with pytest.warns(RunWarning, match=r"not that of step-0000000020\.safetensors: lr = 0\.05 there, 1\.0 here"):
        sw.train(RECIPE, run)
    assert Run(run).recipe["lr"] == 0.05


def test_a_recipe_is_rebuilt_from_a_checkpoint_of_version_0_2(run):
    before = Run(run).facts
    for path in checkpoint.every(run / "checkpoints"):
        as_version_0_2(path)
    (run / "recipe.json").write_text("null")
    with pytest.warns(RunWarning, match="is rebuilt"):
        sw.train(RECIPE, run)
    after = Run(run).facts
    assert all(after[k] == before[k] for k in ("recipe", "alpha", "steps", "batch", "training_images"))


def test_a_longer_run_and_a_damaged_recipe(run):
    (run / "recipe.json").write_text("null")
    with pytest.warns(RunWarning, match="is rebuilt"), pytest.warns(RunWarning, match="goes on after step 20"):
        sw.train(replace(RECIPE, steps=30), run)
    facts = Run(run).facts
    assert (facts["steps"], facts["continued"], facts["recipe"]["steps"]) == (30, [[20, 30]], 30)
    assert metadata(checkpoint.every(run / "checkpoints")[0])["about"]["steps"] == 30


# the log


def test_a_line_that_breaks_off_does_not_spoil_the_next_record(run, trained):
    """As after a lost block of the disk: the log is shorter than the checkpoint says."""
    (run / NEWEST).unlink()
    log = run / "metrics.jsonl"
    size = metadata(run / "checkpoints" / "step-0000000010.safetensors")["log_size"]
    log.write_bytes(log.read_bytes()[: size - 30])
    with pytest.warns(RunWarning, match="lost earlier records"):
        sw.train(RECIPE, run)
    records, bad = read_log(log)
    whole = read_log(trained / "metrics.jsonl")[0]
    assert bad == 1
    assert len(records) == len(whole) - 1
    assert records[-1].step == 20
