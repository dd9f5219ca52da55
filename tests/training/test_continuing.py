"""A run that is made longer, and what is refused."""

import json
import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import stairwise as sw
from stairwise.checks import InputError, RunWarning
from stairwise.paper.trained import _differing
from stairwise.report.reading import _planned
from stairwise.runs.log import read_log
from stairwise.runs.reader import Run
from stairwise.runs.record import CLOCKS
from stairwise.training import checkpoint
from stairwise.training.loop import Stopped
from stairwise.training.schedule import Schedule
from stairwise.training.setup import Calendar
from tests.command_lines import stairwise
from tests.training.tiny import DIGITS as SHORT
from tests.two_processes import run_two


def train(recipe, folder, **more):
    """Without the notes that a longer run makes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunWarning)
        return sw.train(recipe, folder, device="cpu", **more)


def stop_after(last):
    return lambda step, *_: os.kill(os.getpid(), signal.SIGTERM) if step == last else None


def network(folder):
    return checkpoint.newest(Path(folder) / "checkpoints").part("objective")


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def lines(folder):
    return [{k: v for k, v in r.as_json().items() if k not in CLOCKS} for r in read_log(folder / "metrics.jsonl")[0]]


@pytest.mark.parametrize("finished", [True, False])
def test_with_a_constant_rate_it_is_the_longer_run(tmp_path, finished):
    """The same weights to the bit, because views and order depend on seed and step alone."""
    short = replace(SHORT, schedule="constant", steps=12 if finished else 20)
    longer = replace(short, steps=30)
    train(longer, tmp_path / "whole")
    if finished:
        train(short, tmp_path / "parts")
    else:
        with pytest.raises(Stopped):
            train(short, tmp_path / "parts", progress=stop_after(10))
    run = train(longer, tmp_path / "parts")
    assert equal(network(tmp_path / "whole"), network(tmp_path / "parts"))
    assert run.records[-1].step == 30
    assert run.times[-1] == pytest.approx(Run(tmp_path / "whole").times[-1], rel=1e-12)
    assert run.facts["steps"] == run.recipe["steps"] == 30
    assert run.facts["continued"] == [[12 if finished else 10, 30]]


def test_a_cosine_follows_the_new_length_and_says_so(tmp_path):
    train(SHORT, tmp_path)
    before = lines(tmp_path)
    first, last = (0.05 * Schedule("cosine", total).factor(step) for total, step in ((40, 12), (12, 11)))
    says = rf"goes on after step 12, up to step 40; .* \(it was {last:.3g} and is now {first:.3g}\)"
    with pytest.warns(RunWarning, match=says):
        run = sw.train(replace(SHORT, steps=40), tmp_path, device="cpu")
    assert lines(tmp_path)[: len(before)] == before
    schedule = Schedule("cosine", 40)
    later = [record for record in run.records if record.step > 12]
    assert later
    assert [r.lr for r in later] == pytest.approx([0.05 * schedule.factor(r.step - 1) for r in later], rel=1e-6)
    rates = [Schedule("cosine", 12).factor(i) for i in range(12)] + [schedule.factor(i) for i in range(12, 40)]
    assert run.times[-1] == pytest.approx(0.05 * sum(rates))
    # the page's clock, as of the first record after the change, knows when the others come
    known = run.series("step") <= later[0].step
    clock = sw.Clock(run.times[known], run.series("step")[known], planned=_planned(run))
    assert clock.steps([r.t for r in later]) == pytest.approx([r.step for r in later], abs=1e-3)


def test_a_longer_run_can_be_interrupted_and_made_longer_again(tmp_path):
    for name in ("whole", "parts"):
        train(SHORT, tmp_path / name)
    longer = replace(SHORT, steps=40)
    train(longer, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(longer, tmp_path / "parts", progress=stop_after(20))
    assert Run(tmp_path / "parts").facts["continued"] == [[12, 40]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing new is said
        sw.train(longer, tmp_path / "parts", device="cpu")
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")
    assert equal(network(tmp_path / "whole"), network(tmp_path / "parts"))
    again = train(replace(longer, steps=44), tmp_path / "parts")
    assert again.facts["continued"] == [[12, 40], [40, 44]]
    assert again.records[-1].step == 44


def test_a_note_that_was_lost_is_made_up_for(tmp_path):
    """A run that is killed between its checkpoint and its recipe.json continues with the length of the checkpoint."""
    train(SHORT, tmp_path)
    old = (tmp_path / "recipe.json").read_text()
    with pytest.raises(Stopped):
        train(replace(SHORT, steps=40), tmp_path, progress=stop_after(20))
    (tmp_path / "recipe.json").write_text(old)
    assert train(replace(SHORT, steps=40), tmp_path).facts["steps"] == 40


def test_no_record_mixes_the_windows_of_two_calendars(tmp_path):
    """A stopped run has summed a part of a window; the next record begins after it, or the sums would be mixed."""
    short = replace(SHORT, steps=40, window=512)  # windows of 8 steps: 1 to 8, 9 to 16, 17 to 24, …
    with pytest.raises(Stopped):
        train(short, tmp_path, progress=stop_after(20))
    run = train(replace(short, steps=70), tmp_path)
    assert [r.step for r in run.records] == [8, 16, 28, 42, 56, 70]
    assert {r.samples for r in run.records} == {512}


def test_a_calendar_that_begins_late_still_records_the_end():
    assert Calendar(replace(SHORT, steps=14), 1000, 64, begun=13).records == {14}
    whole = Calendar(SHORT, 1000, 64)
    assert whole.records == Calendar(SHORT, 1000, 64, begun=0).records
    assert min(Calendar(SHORT, 1000, 64, begun=5).records) >= 5 + whole.window


def test_what_is_refused(tmp_path):
    train(replace(SHORT, steps=12), tmp_path)
    before = (tmp_path / "recipe.json").read_text()
    for change, says in (
        ({"steps": 11}, r"contains a longer run \(got 12 steps there, 11 here\): ask for at least 12 steps"),
        ({"steps": 0, "epochs": 0.1}, r"12 steps there, 3 here"),
        ({"steps": 24, "lr": 0.01}, r"another recipe.*lr = 0.05 there, 0.01 here"),
        ({"steps": 24, "records": 7}, r"records = 5 there, 7 here"),
        ({"seed": 1}, r"seed = 0 there, 1 here"),
    ):
        with pytest.raises(InputError, match=says):
            sw.train(replace(SHORT, **change), tmp_path, device="cpu")
    assert (tmp_path / "recipe.json").read_text() == before
    same = sw.train(replace(SHORT, steps=0, epochs=12 / 28), tmp_path, device="cpu")  # 12 steps by another name
    assert same.records[-1].step == 12


def test_two_processes_agree_that_it_became_longer(tmp_path):
    code = (
        "import json, sys, stairwise as sw; "
        "sw.train(sw.Recipe().with_settings(json.load(open(sys.argv[1]))), sys.argv[2], device='cpu')"
    )
    recipe = replace(SHORT, head_norm=False, schedule="constant")
    train(recipe, tmp_path / "two")
    (tmp_path / "recipe.json").write_text(json.dumps(replace(recipe, steps=20).plain()))
    assert run_two("-c", code, tmp_path / "recipe.json", tmp_path / "two") == [0, 0]
    two = Run(tmp_path / "two")
    assert two.records[-1].step == 20
    assert two.facts["continued"] == [[12, 20]]
    assert np.isfinite(two.series("loss")).all()


def test_figures_do_not_take_a_run_that_was_made_longer(tmp_path):
    longer = replace(SHORT, steps=20)
    train(SHORT, tmp_path)
    assert _differing(Run(tmp_path), longer) == ["steps = 12 there, 20 in the recipe"]
    assert _differing(train(longer, tmp_path), longer) == ["it was made longer on the way"]


def test_command_line(tmp_path):
    """The default folder does not depend on the length, so that the command with more steps finds the run."""
    small = {"encoder": "mlp", "encoder_options": "{inputs = 3072, widths = [8]}", "hidden": "8", "batch": 32}
    arguments = [a for k, v in small.items() for a in ("--set", f"{k}={v}")]
    line = ["train", "photos-bt", *arguments, "--set", "alpha=1", "--json"]
    for steps in (4, 8):
        done = stairwise(*line, "--set", f"steps={steps}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["steps"] == steps
    assert "note: the run of 4 steps goes on after step 4, up to step 8" in done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert np.isfinite(Run(next((tmp_path / "runs").iterdir())).series("loss")).all()
