"""Views that grow during training."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import stairwise as sw
from stairwise.checks import InputError, RunWarning
from stairwise.runs.log import read_log
from stairwise.runs.reader import Run
from stairwise.runs.record import CLOCKS
from stairwise.training.loop import Stopped, Trainer
from stairwise.training.networks import load_network
from stairwise.training.recipe import Recipe, load_recipe
from stairwise.training.schedule import Sizes
from tests.two_processes import run_two

CPU = torch.device("cpu")
PHASES = [[0.0, 5], [0.4, 6], [0.75, 8]]
TINY = Recipe(
    **{"data": "digits", "pretrain": 1200, "views": "simclr-small", "sizes": PHASES, "hidden": [16], "d": 4},
    **{"batch": 64, "steps": 12},
    **{"encoder_options": {"stem": "small", "width": 8, "channels": 1}, "lr": 0.05, "window": 64, "records": 6},
    **{"precision": "float32", "probes": ["ridge"], "probe_images": 200, "held_out": 64, "follow": 16, "keep": 2},
)
FIXED_SIZE = {"encoder": "mlp", "encoder_options": {"inputs": 64, "widths": [32]}}


def metrics(folder):
    """Records without timings."""
    records = read_log(Path(folder) / "metrics.jsonl")[0]
    return [{k: v for k, v in r.as_json().items() if k not in CLOCKS} for r in records]


def weights(folder):
    return load_network(Run(folder)).state_dict()


def stopped(recipe, folder, at):
    """Stop a run after some step, as Ctrl-C does."""

    def progress(step, _total, _text):
        if step >= at:
            raise KeyboardInterrupt

    with pytest.raises((Stopped, KeyboardInterrupt)):
        sw.train(recipe, folder, checkpoint_minutes=0, progress=progress)


def test_views_have_the_size_of_their_phase(tmp_path):
    trainer = Trainer(TINY, tmp_path, CPU)
    pairs = trainer.remaining_pairs()
    seen = [next(pairs) for _ in range(TINY.steps)]
    assert [x.shape[2] for x, _ in seen] == [5] * 5 + [6] * 4 + [8] * 3
    assert all(x.shape == y.shape and x.shape[2] == x.shape[3] for x, y in seen)


def test_measurements_have_full_views(tmp_path):
    sides = []
    trainer = Trainer(TINY, tmp_path, CPU)
    trainer.network.backbone.register_forward_pre_hook(lambda _, x: sides.append((trainer.step_number, x[0].shape[2])))
    trainer.objective.train()
    trainer.advance(trainer.remaining_pairs())
    assert set(sides) == {(0, 5)}
    trainer.resume()
    trainer._record(0.0)
    trainer.step_number = TINY.steps
    trainer._record(0.0)
    assert {side for step, side in sides if step} == {8}
    trainer.close()


def test_one_phase_of_the_full_size_changes_nothing(tmp_path):
    sw.train(replace(TINY, sizes=[]), tmp_path / "without")
    sw.train(replace(TINY, sizes=[[0.0, 8]]), tmp_path / "with")
    assert metrics(tmp_path / "with") == metrics(tmp_path / "without")
    ours, theirs = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("at", [2, 5, 8, 10])
def test_a_run_continues_in_any_phase(at, tmp_path):
    sw.train(TINY, tmp_path / "whole")
    stopped(TINY, tmp_path / "parts", at)
    sw.train(TINY, tmp_path / "parts")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_longer_run_has_the_phases_of_its_new_length(tmp_path):
    recipe = replace(TINY, schedule="constant")
    sw.train(recipe, tmp_path)
    longer = Trainer(replace(recipe, steps=40), tmp_path, CPU)
    with pytest.warns(RunWarning, match="views have the sizes of a run of 40 steps"):
        longer.resume()
    assert next(longer.remaining_pairs())[0].shape[2] == 5  # step 12 of 40
    longer.close()


def test_two_processes_see_the_same_sizes(tmp_path):
    recipe = replace(TINY, encoder="tests.training.test_sizes:Pooled", encoder_options={}, head_norm=False)
    recipe = replace(recipe, views="none", probes=[], held_out=0, follow=0)
    one = sw.train(recipe, tmp_path / "one")
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.plain()))
    code = "import json, sys, stairwise as sw; sw.train(sw.Recipe(**json.load(open(sys.argv[1]))), sys.argv[2])"
    assert run_two("-c", code, tmp_path / "recipe.json", tmp_path / "two") == [0, 0]
    assert Run(tmp_path / "two").series("loss") == pytest.approx(one.series("loss"), rel=1e-4)


class Pooled(nn.Module):
    """An encoder for views of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1)).relu()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([[0.0, 8], [0.5, 8], [0.5, 9]], "increase"),
        ([[0.5, 8], [0.0, 8]], "begin at 0"),
        ([[0.1, 8]], "begin at 0"),
        ([[0.0, 0]], "at least 1"),
        ([[0.0, -8]], "at least 1"),
        ([[0.0, 7.5]], "whole number"),
        ([[0.0, float("nan")]], "finite"),
        ([[0.0, 8], [1.0, 9]], "less than 1"),
        ([[0.0, 8, 9]], "pairs"),
        ([[0.0, "8"]], "number"),
        ([8], "list of list"),
        ("8", "list of list"),
    ],
)
def test_sizes_that_cannot_be(sizes, words):
    with pytest.raises(InputError, match=words):
        replace(TINY, sizes=sizes)


@pytest.mark.parametrize("text", ["8", "[0, 8]", "[[0, 8]", "small"])
def test_sizes_as_text_that_cannot_be(text):
    with pytest.raises(InputError, match="sizes"):
        Recipe().with_settings({"sizes": text})


def test_sizes_as_text_and_in_a_file(tmp_path):
    assert Recipe().with_settings({"sizes": "[[0, 20], [0.5, 32]]"}).sizes == [[0, 20], [0.5, 32]]
    file = tmp_path / "mine.toml"
    file.write_text("sizes = [[0.0, 20], [0.5, 32]]\n")
    recipe = load_recipe(str(file))
    assert recipe.sizes == [[0.0, 20], [0.5, 32]]
    assert Recipe().with_settings(recipe.plain()) == recipe


def test_what_cannot_take_other_sizes_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"sizes need an encoder .*leave sizes out, or use a conv"):
        sw.train(replace(TINY, **FIXED_SIZE), tmp_path)
    sw.train(replace(TINY, **FIXED_SIZE, sizes=[[0.0, 8]], steps=1), tmp_path / "full")
    with pytest.raises(InputError, match="a side in sizes must be at most 32, 4 times the full size"):
        sw.train(replace(TINY, sizes=[[0.0, 8], [0.5, 20_000]]), tmp_path / "huge")
    with pytest.raises(InputError, match="fixed_views"):
        replace(TINY, fixed_views=True)
    with pytest.raises(InputError, match="at most 8, the side of the images"):
        sw.train(replace(TINY, views="crop", sizes=[[0.0, 6], [0.5, 9]]), tmp_path)


def test_phases_shorter_than_a_step():
    sizes = Sizes([[0.0, 4], [0.01, 5], [0.02, 6]], total=3, full=8)
    assert [sizes.at(step) for step in range(3)] == [6, 6, 6]
