"""Every recipe for STL-10 takes a few steps on photographs, with a tiny network."""

import pytest

from stairwise.paper.trained import SMOKE
from stairwise.runs.followed import read_followed
from stairwise.training.loop import train
from stairwise.training.recipe import load_recipe, recipe_names
from stairwise.training.setup import Calendar

FEW = {"steps": 4, "records": 2, "window": 16, "batch": 16, "probe_times": 1, "held_out": 32, "follow": 8, "keep": 2}
SETTINGS = {  # of the paper: α, lr, batch, d, and hidden widths where it gives them
    "stl10-bt-small": (0.093, 0.05, 64, 512, [2048]),
    "stl10-bt-small-x4": (0.093, 0.2, 64, 512, [2048]),
    "stl10-bt-small-x8": (0.093, 0.4, 64, 512, [2048]),
    "stl10-bt-d50": (0.542, 0.05, 64, 50, [2048]),
    "stl10-bt-d50-large": (0.542, 0.2, 256, 50, [2048]),
    "stl10-simclr": (1.0, 0.5, 256, 128, None),
    "stl10-simclr-small": (0.087, 0.01, 256, 128, None),
    "stl10-simclr-d50": (0.284, 0.1, 256, 50, None),
    "stl10-vicreg": (1.0, 0.5, 256, 128, [512, 512]),
    "stl10-vicreg-small": (0.133, 0.25, 256, 128, [512, 512]),
    "stl10-vicreg-d50": (0.604, 0.25, 256, 50, [512, 512]),
}


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("stl10")])
def test_a_few_steps(name, tmp_path):
    hidden = [16] * len(load_recipe(name).hidden)
    run = train(load_recipe(name, SMOKE | FEW | {"hidden": hidden}), tmp_path / name, device="cpu")
    assert run.records[-1].step == 4
    assert run.records[-1].value("knn") is not None
    assert len(read_followed(run.folder).t) == len(run.times)
    assert len(list((run.folder / "weights").iterdir())) == 2


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_paper(name):
    alpha, lr, batch, d, hidden = SETTINGS[name]
    recipe = load_recipe(name)
    assert (recipe.alpha, recipe.lr, recipe.batch, recipe.d) == (alpha, lr, batch, d)
    assert hidden is None or recipe.hidden == hidden
    assert recipe.encoder == "resnet50"
    assert recipe.size == 96
    if recipe.lr_bias:
        assert recipe.lr_bias == pytest.approx(0.024 * recipe.lr), "stock rates of Barlow Twins: 0.2 and 0.0048"


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("stl10")])
def test_enough_pairs_and_records(name):
    """Runs that are stored keep the window they had; the others count modes from enough pairs (bench_window)."""
    recipe = load_recipe(name)
    calendar = Calendar(recipe, recipe.pretrain, recipe.batch)
    pairs = calendar.window * recipe.batch
    if name in ("stl10-bt", "stl10-bt-small", "stl10-bt-small-fast", "stl10-bt-d50"):
        assert recipe.window == 0
    else:
        assert pairs == (9216 if recipe.d == 50 else 2048)
    assert len(calendar.records) >= recipe.records == 300
    assert max(calendar.records) == calendar.total
