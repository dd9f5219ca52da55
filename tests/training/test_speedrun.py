"""The speedrun: its search on invented results, and runs of seconds."""

import argparse
import itertools
import json
import os
import shlex
import signal
from collections import Counter
from functools import partial

import numpy as np
import pytest

from benchmarks import speedrun, speedrun_changes, speedrun_search
from benchmarks.bench_engine import make
from benchmarks.race import page
from benchmarks.race.images import RaceImages
from benchmarks.race.single import device_for_runs
from benchmarks.race.store import Store
from benchmarks.speedrun_changes import CHANGES
from benchmarks.speedrun_search import FACTORS, START, combined, design, next_trial
from stairwise.training.recipe import Recipe

SMALL = {"encoder": "resnet18", "encoder_options.width": "4", "batch": "16", "d": "8", "hidden": "16", "held_out": "16"}
SMALL["sizes"] = "[]"  # images of 16 px


def toy_images():
    """120 images of ten classes, 80 of them for training."""
    pixels = np.random.default_rng(0).integers(0, 256, (120, 16, 16, 3), dtype=np.uint8)
    return RaceImages("cifar10", pixels, np.arange(120) % 10, 80)


def test_a_speedrun(tmp_path, monkeypatch):
    monkeypatch.setattr(speedrun, "parts", partial(speedrun.parts, seconds=0.02))
    images = toy_images()
    images.offer()
    small = SMALL | {"steps": "12"}
    store = Store(tmp_path / "speedrun.jsonl")
    for held_out in (True, False, False):
        recipe = speedrun.recipe_of("85", 0, held_out, small)
        key = speedrun.key_of("85", recipe, images.training)
        speedrun._run_once("85", recipe, key, store, device_for_runs("cpu"), held_out)
    results = list(store.results().values())
    assert [r["training_images"] for r in results] == [72, 80]
    assert all(r["start"] <= r["seconds"] and r["views"] == 2 * 16 * 12 for r in results)
    assert set(results[0]["parts_ms"]) == {"views", "step", "optimizer", "loss", "network"}
    table = page.speedrun_table(store.results())
    assert table.count("\n") == 2  # the run on held-out images is not shown


def searched_with(worth):
    """The result of a search whose trials have the accuracy worth(settings), and its trials."""
    tried = {}
    while (state := next_trial(lambda settings: tried.get(json.dumps(settings))))[1] is not None:
        tried[json.dumps(state[1])] = worth(state[1])
    return state[0], [json.loads(settings) for settings in tried]


def test_every_level_of_a_factor_meets_all_levels_of_the_others_equally_often():
    trials = design()
    assert trials[0] == (0,) * len(FACTORS)
    for i, j in itertools.combinations(range(len(FACTORS)), 2):
        met = Counter((levels[i], levels[j]) for levels in trials)
        assert len(met) == len(FACTORS[i]) * len(FACTORS[j])
        assert len(set(met.values())) == 1


def test_a_search_finds_gains_that_add_up():
    better = {"sizes": FACTORS[0][2]["sizes"], "hidden": [1024, 1024]}
    best, tried = searched_with(lambda s: 0.8 + 0.01 * sum(s.get(k) == v for k, v in better.items()))
    assert best == START | better
    assert tried[0] == START
    assert len(tried) in (8, 9)


def test_what_gains_less_than_the_margin_is_left_out():
    best, _ = searched_with(lambda s: 0.8 + 0.0005 * (s["lr"] == 0.025))
    assert best == START


def test_a_single_trial_wins_if_gains_do_not_add_up():
    good = {json.dumps(combined(START, design()[i])): score for i, score in ((1, 0.89), (3, 0.89), (5, 0.9))}
    best, tried = searched_with(lambda s: good.get(json.dumps(s), 0.5))
    assert len(tried) == 9
    assert best == combined(START, design()[5])


def test_levels_that_diverge_are_not_chosen():
    best, _ = searched_with(lambda s: 0.0 if s.get("views_per_image") == 4 else 0.8 + 0.01 * (s["lr"] == 0.025))
    assert best["lr"] == 0.025
    assert "views_per_image" not in best


def test_the_search_starts_with_the_best_of_the_first():
    """Whose trials are stored."""
    trials = [(key, r) for key, r in Store(speedrun.STORE).results().items() if key.startswith("search 45 s/")]
    key, _ = max(trials, key=lambda trial: trial[1]["logistic"])
    same = speedrun.key_of("search 45 s", speedrun.Searched(Store(speedrun.STORE), 50000, 1.0, {}).recipe(START), 50000)
    assert same == key


def test_probes_of_folds_are_judged_on_images_that_they_have_not_seen():
    """Labels of noise: a probe that had seen them would know them."""
    toy_images().offer()
    recipe = Recipe(data="race-tune", encoder="torch.nn:Flatten", views="none", batch=16, steps=1)
    trainer = make(recipe, device_for_runs("cpu"))
    assert speedrun_search.folded_accuracy(trainer) < 0.4
    trainer.close()


def test_steps_that_fit_take_all_sizes_into_account(tmp_path, monkeypatch):
    np.save(tmp_path / "images.npy", np.zeros((40, 16, 16, 3), np.uint8))
    options = {"encoder_options": {"stem": "small", "width": 1}, "views": "none", "batch": 16, "steps": 10**6}
    recipe = Recipe(data=f"array:{tmp_path / 'images.npy'}", sizes=[[0.0, 8], [0.25, 16]], **options)
    rates = iter([1000.0, 100.0])
    monkeypatch.setattr(speedrun_search, "rate", lambda *_: next(rates))
    monkeypatch.setattr(speedrun_search, "perf_counter", lambda: 0.0)
    seconds = speedrun_search.SPARE * 100
    expected = int(seconds / (0.25 / 1000 + 0.75 / 100)) // 50 * 50
    assert speedrun_search.steps_in(recipe, device_for_runs("cpu"), 100.0) == expected


def test_a_search_trains_continues_and_its_best_is_run(tmp_path, monkeypatch):
    sizes = ({}, *({"sizes": [[0.0, side], [0.5, 16]]} for side in (6, 8, 12)))
    monkeypatch.setattr(speedrun_search, "FACTORS", (sizes, *FACTORS[1:]))
    monkeypatch.setattr(speedrun_search, "OTHER_SIZES", (20,))
    for module, name in ((speedrun, "steps_in"), (speedrun, "steps_in_new_process")):
        monkeypatch.setattr(module, name, lambda *_: 2)
    monkeypatch.setattr(speedrun, "parts", lambda *_: {})
    images, store = toy_images(), Store(tmp_path / "speedrun.jsonl")
    images.offer()
    small = {name: value for name, value in SMALL.items() if name not in ("hidden", "sizes")}
    searched = speedrun.Searched(store, images.training, 1.0, small)
    device = device_for_runs("cpu")
    count = 0
    while searched.run_next(device):
        count += 1
    trials = store.results()
    assert count in (8, 9)
    assert len(trials) == count
    assert all(r["held_out"] and r["steps"] == 2 and key.startswith("design 1 s/") for key, r in trials.items())
    assert all(0 <= r["folded"] <= 1 and len(r["sized"]) > 1 for r in trials.values())
    options = argparse.Namespace(best=True, held_out=False)

    def run(goal, recipe, key, about):
        speedrun._run_once(goal, recipe, key, store, device, False, about)

    for seed in (0, 1, 0):
        speedrun.run_goal("85", seed, options, searched, run)
    finals = [r for r in store.results().values() if not r["held_out"]]
    assert [r["seed"] for r in finals] == [0, 1]
    assert len({r["about"] for r in finals}) == 1


def test_a_trial_that_fails_does_not_come_again(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of memory")

    store = Store(tmp_path / "speedrun.jsonl")
    searched = speedrun.Searched(store, 80, 1.0, {})
    monkeypatch.setattr(speedrun, "steps_in", fails)
    for count in (1, 2):
        with pytest.raises(RuntimeError):
            searched.run_next(device_for_runs("cpu"))
        assert len(store.results()) == count
    assert page.search_table(store.results()).count("diverged") == 2


def test_a_paused_run_ends_like_one_without_pause(tmp_path, monkeypatch):
    monkeypatch.setattr(speedrun, "parts", lambda *_: {})
    monkeypatch.setattr(speedrun, "CHECK", 2)
    toy_images().offer()
    small = SMALL | {"steps": "6"}
    recipe = speedrun.recipe_of("85", 0, True, small)
    device = device_for_runs("cpu")
    whole = speedrun.speedrun("85", recipe, device)
    late = speedrun.Pause(tmp_path, 0.0)
    assert [speedrun.speedrun("85", recipe, device, late) for _ in range(3)] == [None] * 3  # after steps 2, 4 and 6
    ended = speedrun.speedrun("85", recipe, device, speedrun.Pause(tmp_path, 1e12))
    same = ("logistic", "knn", "rank", "views", "steps")
    assert {name: ended[name] for name in same} == {name: whole[name] for name in same}
    assert (whole["pauses"], ended["pauses"]) == (0, 3)
    assert ended["start"] == pytest.approx(ended["seconds"], abs=0.02)
    assert ended["views_per_second"] == pytest.approx(2 * 16 * 6 / ended["seconds"], rel=0.05)  # no step was steady


def test_rates_of_a_paused_run_are_of_all_its_stretches(tmp_path, monkeypatch):
    monkeypatch.setattr(speedrun, "measured", lambda *_: {})
    monkeypatch.setattr(speedrun, "CHECK", 30)
    monkeypatch.setattr(speedrun, "WARM", 2)
    ticks = itertools.count()
    toy_images().offer()
    small = SMALL | {"steps": "63"}
    recipe, device = speedrun.recipe_of("85", 0, True, small), device_for_runs("cpu")
    monkeypatch.setattr(speedrun, "perf_counter", lambda: float(next(ticks)))
    for deadline in (0.0, 0.0, 1e12):
        ended = speedrun.speedrun("85", recipe, device, speedrun.Pause(tmp_path, deadline))
    # the clock is read at the start, when steps are steady, twice before a pause (once at the end)
    assert ended["start"] == 3 * 1.0
    assert ended["seconds"] == 3 + 3 + 2
    assert ended["views_per_second"] == round(2 * 16 * (28 + 28 + 1) / (2 + 2 + 1))
    shown = ended | {"held_out": False, "logistic": 0.9, "knn": 0.9}
    table = page.speedrun_table({"x": shown | {"seed": 0}, "y": shown | {"seed": 1, "pauses": 0}})
    assert "| 8.0 (2 pauses) |" in table
    assert "| 8.0 (warm: not the first run of its process) |" in table


def test_every_run_has_a_process_of_its_own(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("a run in this process")

    images = toy_images()
    file = images.save(tmp_path / "images.npz")
    small = SMALL | {"steps": "2"}
    recipe = speedrun.recipe_of("85", 0, False, small)
    options = argparse.Namespace(data_file=[file], most=0, out=tmp_path / "out.jsonl", held_out=False, folder=None)
    monkeypatch.setattr(speedrun, "speedrun", never)
    speedrun.run_alone(options, 0.0, "85", recipe, "key", "about")
    (result,) = Store(options.out).results().values()
    assert result["cold"]
    assert (result["key"], result["steps"], result["training_images"]) == ("key", 2, 80)


def test_steps_that_fit_are_measured(tmp_path):
    np.save(tmp_path / "images.npy", np.zeros((40, 16, 16, 3), np.uint8))
    recipe = Recipe(
        data=f"array:{tmp_path / 'images.npy'}", encoder="torch.nn:Flatten", views="none", batch=16, steps=10**6
    )
    few, many = (speedrun_search.steps_in(recipe, device_for_runs("cpu"), seconds) for seconds in (0.5, 10.0))
    assert few % 50 == many % 50 == 0
    assert few < many


# single changes


def test_changes_are_made_together():
    recipe = speedrun.recipe_of("92", 0, False, {})
    found = recipe.with_settings(speedrun_changes.settings_of(recipe, ["eight views", "half the batch", "decay D = 5"]))
    assert (found.batch, found.views_per_image, found.loss_options) == (128, 8, recipe.loss_options)
    assert found.lr == pytest.approx(0.7 * recipe.lr)
    assert found.weight_decay * found.lr * found.steps == pytest.approx(5, rel=0.01)
    assert recipe.with_settings(speedrun_changes.settings_of(recipe, ["FroSSL's loss"])).loss_options == {}
    assert speedrun_changes.settings_of(recipe, []) == {}


def test_changes_as_options_of_the_speedrun():
    recipe = speedrun.recipe_of("92", 0, False, {})
    settings = speedrun_changes.settings_of(recipe, ["eight views", "half the batch", "FroSSL's loss"])
    options = shlex.split(speedrun_changes.words(settings))
    assert options[::2] == ["--set"] * len(settings)
    read = dict(text.split("=", 1) for text in options[1::2])
    assert recipe.with_settings(read) == recipe.with_settings(settings)


def test_every_change_is_tried_and_belongs_to_one_group():
    assert sorted(name for group in speedrun_changes.EXCLUSIVE for name in group) == sorted(CHANGES)
    assert {names for names, _ in speedrun_changes.WANTED} == {(), *((name,) for name in CHANGES)}


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({"decay D = 5": -0.001, "decay D = 15": -0.001}, ()),
        ({"decay D = 5": 0.002, "decay D = 15": 0.001}, ("decay D = 15",)),
        ({"decay D = 5": 0.0, "decay D = 15": -0.001}, ("decay D = 5",)),
        ({"eight views": 0.0031}, ("eight views",)),
        ({"eight views": 0.0029}, ()),
        ({"eight views": 0.01, "half the batch": 0.02, "FroSSL's loss": 0.01}, ("half the batch", "FroSSL's loss")),
    ],
)
def test_changes_that_gain_enough_are_chosen(gains, expected):
    gains = {"decay D = 5": -1.0, "decay D = 15": -1.0} | gains
    scores = {
        (names, seed): 0.9 + sum(gains.get(name, 0.0) for name in names) for names, seed in speedrun_changes.WANTED
    }
    assert speedrun_changes.chosen(scores) == expected


def test_a_change_must_gain_more_than_two_seeds_differ():
    scores = dict.fromkeys(speedrun_changes.WANTED, 0.919) | {((), 0): 0.9, ((), 1): 0.91}
    assert speedrun_changes.chosen(scores) == ("decay D = 15", "eight views", "FroSSL's loss")
    # the mean is 0.905, and two seeds differ by 0.01
    scores[("eight views",), 0] = scores[("half the batch",), 0] = 0.914
    assert speedrun_changes.chosen(scores) == ("decay D = 15", "FroSSL's loss")


@pytest.fixture
def small_recipes(monkeypatch):
    about = SMALL | {"views": "barlow-small"}
    monkeypatch.setattr(speedrun_changes, "recipe_of", lambda *given: speedrun.recipe_of(*given[:3], about))


def test_the_command_that_chooses_changes(tmp_path, small_recipes, monkeypatch, capsys):
    """Trials run in two other processes, are not repeated, and are shown on the page."""
    decay = "decay D = 15"
    monkeypatch.setattr(speedrun_changes, "EXCLUSIVE", ((decay,),))
    monkeypatch.setattr(speedrun_changes, "WANTED", (((), 0), ((decay,), 0), ((), 1)))
    monkeypatch.setattr(speedrun_changes, "steps_in_new_process", lambda recipe, seconds: 500)
    file, store = toy_images().save(tmp_path / "images.npz"), Store(tmp_path / "s.jsonl")
    arguments = ["--seconds", "0.2", "--jobs", "2", "--data-file", str(file), "--out", str(store.path)]
    with pytest.raises(SystemExit, match="continues"):
        speedrun_changes.main([*arguments, "--minutes", "0"])
    assert store.results() == {}
    speedrun_changes.main(arguments)
    *_, decision, last = capsys.readouterr().out.splitlines()
    assert decision in (f"chosen: {decay}", "chosen: nothing")
    assert ("weight_decay=1.2" in last) == (decay in decision)  # 15 / (0.025 × 500)
    assert last.endswith("--set steps=500")
    found = store.results()
    assert len(found) == 3
    assert all(r["held_out"] and not r["alone"] and r["training_images"] == 72 for r in found.values())
    assert all(r["weights"] > 0 for r in found.values())
    speedrun_changes.main([*arguments, "--minutes", "0"])  # nothing is left to run
    assert store.results() == found
    assert "0.2 s, decay D = 15" in page.search_table(found)


def test_the_stored_trials_chose_a_decay():
    trials = speedrun_changes.Trials(Store(speedrun.STORE), "92", 90, 50_000, trial_that_fails)
    scores = trials.scores()
    assert set(scores) == set(speedrun_changes.WANTED)
    assert speedrun_changes.chosen(scores) == ("decay D = 15",)
    recipe = speedrun.recipe_of("92", 0, False, {})
    assert recipe.weight_decay == speedrun_changes.settings_of(recipe, ["decay D = 15"])["weight_decay"]


def trial_that_fails(goal, recipe):
    raise MemoryError("too large")


def trial_that_is_killed(goal, recipe):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("timing", [True, False])
def test_a_trial_that_fails_counts_as_diverged_and_is_not_repeated(tmp_path, small_recipes, monkeypatch, timing):
    def steps_in(recipe, device, seconds):
        return 50 if not timing else trial_that_fails("", recipe)

    store = Store(tmp_path / "s.jsonl")
    monkeypatch.setattr(speedrun_changes, "WANTED", (((), 0),))
    monkeypatch.setattr(speedrun_changes, "steps_in", steps_in)
    trials = speedrun_changes.Trials(store, "92", 0.2, 80, trial_that_fails)
    for _ in range(2):
        trials.run(device_for_runs("cpu"), jobs=1)
    assert trials.scores() == {((), 0): 0.0}
    (result,) = store.results().values()
    assert "too large" in result["failed"]
    assert store.path.read_text().count("\n") == 1


def test_a_trial_whose_process_is_killed_is_not_stored(tmp_path, small_recipes, monkeypatch, capsys):
    monkeypatch.setattr(speedrun_changes, "WANTED", (((), 0),))
    monkeypatch.setattr(speedrun_changes, "steps_in", lambda *_: 50)
    trials = speedrun_changes.Trials(Store(tmp_path / "s.jsonl"), "92", 0.2, 80, trial_that_is_killed)
    trials.run(device_for_runs("cpu"), jobs=1)
    assert trials.scores() == {}
    assert "none, seed 0: its process was killed" in capsys.readouterr().out


@pytest.mark.parametrize("failed", [((), 0), ((), 1)])
def test_nothing_is_chosen_without_trials_to_compare_with(failed):
    scores = dict.fromkeys(speedrun_changes.WANTED, 0.9) | {failed: 0.0}
    with pytest.raises(SystemExit, match="without changes"):
        speedrun_changes.chosen(scores)
