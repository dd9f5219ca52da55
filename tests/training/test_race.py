"""The race: its rules on invented results, its files, and runs of seconds."""

import io
import json
import os
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.race import appendix, figures, jobs, page, single
from benchmarks.race.__main__ import TINY, _name, _options, _plan, _plan_of_queue
from benchmarks.race.entrants import LOSSES, METHODS, RACED, WARMUP, RaceRun
from benchmarks.race.images import RaceImages, named_images, read_images
from benchmarks.race.jobs import OVERHEAD, run_here, run_jobs, run_teams, seconds_of
from benchmarks.race.left import QUEUE, queue
from benchmarks.race.plan import Race, Rules
from benchmarks.race.single import checkpoints, race
from benchmarks.race.store import Store
from benchmarks.race.summary import at_equal_modes, groups, verdict
from benchmarks.race.team import race_together
from stairwise.checks import InputError
from stairwise.data.images import DATASETS
from stairwise.losses import MODULES, precondition
from stairwise.theory.landscapes import BarlowTwins
from stairwise.training.schedule import Schedule

BEST = {"sgd": 0.3, "lars": 3.0, "adamw": 1e-3, "muon": 0.16}  # SGD's and Muon's lie at the edge of their grids
HEIGHT = {"sgd": 0.60, "lars": 0.62, "adamw": 0.58, "muon": 0.68}


def invented(run, changes=None):
    """A result whose accuracy falls with the distance from the best rate, and grows with the steps."""
    off = abs(np.log(run.lr / BEST[run.method]))
    grown = HEIGHT[run.method] - 0.05 * off + 0.05 * np.log(run.steps / 600) + 0.001 * run.seed
    score = round(float(grown), 5)
    return {
        **{"key": run.key(changes or {}), "stage": run.stage, "data": run.data, "loss": run.loss, "method": run.method},
        **{"lr": run.lr, "steps": run.steps, "seed": run.seed, "start": run.start, "alone": True, "batch": 256},
        **{
            "step": [run.steps],
            "seconds": [run.steps * (0.013 if run.method == "muon" else 0.01)],
            "logistic": [score],
        },
        **{"knn": [score - 0.02], "rank": [30.0], "grown": [12], "diverged": False},
    }


def finished(rules):
    """All results of a race with invented runs, in the order in which they were asked for."""
    results, order = {}, []
    while pending := Race(rules, results).pending():
        run = pending[0]
        order.append(run)
        results[run.key(rules.changes)] = invented(run, rules.changes)
    return results, order


@pytest.fixture(scope="module")
def whole():
    return finished(Rules())


def test_a_decay_in_all_is_divided_among_the_steps():
    run = RaceRun("final", "cifar10", "vicreg", "muon, decay", 0.04, 1000, 0)
    assert run.settings({})["weight_decay"] == pytest.approx(10 / (0.04 * 1000))
    plain, decaying = (METHODS[name] for name in ("muon", "muon, decay"))
    assert decaying.settings == plain.settings
    assert "weight_decay" not in replace(run, method="muon").settings({})


def test_the_order_of_a_race(whole):
    rules, (results, order) = Rules(), whole
    assert len(set(order)) == len(order) == len(results)
    stages = [run.stage for run in order if run.stage != "clock"]
    assert stages == sorted(stages, key=["tune", "long", "final"].index)
    tuned = [run for run in order if run.stage == "tune" and run.loss == "simclr"]
    counts = {m: sum(run.method == m for run in tuned) for m in rules.methods}
    assert counts == {
        "sgd": 5,
        "lars": 4,
        "adamw": 4,
        "muon": 4,
    }  # SGD's best lies at the edge; Muon's may not leave it
    assert max(run.lr for run in tuned if run.method == "sgd") == 0.9
    assert [run.lr for run in order if (run.loss, run.method) == ("vicreg", "sgd")][:2] == [0.0025, 0.005]
    long = [run for run in order if run.stage == "long" and run.loss == "simclr"]
    assert [(run.method, run.lr, run.steps) for run in long] == [
        *[("lars", 3.0, 2700), ("sgd", 0.3, 2700), ("lars", 1.5, 2700)],
        *[("muon", 0.16, 900), ("muon", 0.08, 900)],
    ]
    final = [run for run in order if run.stage == "final"]
    first = {(run.loss, run.method, run.steps) for run in final[:9]}
    assert first == {(loss, m, s) for loss in RACED for m, s in (("lars", 2700), ("muon", 900), ("muon", 1350))}
    assert all(run.seed == 0 for run in final[:9])
    assert all(run.lr == BEST[run.method] for run in final if (run.loss, run.method) != ("vicreg", "sgd"))
    assert not any(run.stage == "clock" for run in order)  # all of these runs were alone, so all were timed
    assert len(final) == len(RACED) * 5 * (3 + 4)


def test_settings_are_never_chosen_on_test_images():
    """Results on test images change nothing about what is run."""
    rules = Rules(losses=("simclr",))
    results, order = finished(rules)
    turned = {
        key: r | ({"logistic": [1 - r["logistic"][-1]]} if r["stage"] == "final" else {}) for key, r in results.items()
    }
    assert list(Race(rules, turned).wanted()) == list(Race(rules, results).wanted())
    data = {run.stage: run.settings(rules.changes)["data"] for run in order}
    assert data == {"tune": "race-tune", "long": "race-tune", "final": "race-final"}


def test_a_diverged_trial_cannot_win():
    rules = Rules(losses=("simclr",), methods=("sgd",))
    results = {}
    for run in Race(rules, results).trials("simclr", "sgd"):
        results[run.key({})] = invented(run) | {"diverged": run.lr >= 0.3, "logistic": [] if run.lr >= 0.3 else [0.5]}
    assert {run.lr for run in Race(rules, results).long_trials("simclr", ("sgd",))} <= {0.01, 0.03, 0.1}


def test_another_setting_is_another_run():
    run = RaceRun("tune", "cifar10", "simclr", "sgd", 0.1, 100, 0)
    assert run.key({}) == run.key({})
    assert run.key({}) != run.key({"batch": 512})
    assert run.recipe({}, 5000).warmup_epochs * (5000 // 256) == pytest.approx(5)


def test_the_plan_names_runs_and_minutes(tmp_path):
    text = _plan(Rules(), Store(tmp_path / "none.jsonl"))
    assert "48 runs can start now" in text
    assert re.search(r"whole race: \d+\.\d min", text)


# results


def test_the_queue_holds_what_the_race_does_not(tmp_path):
    raced = {run.key({}) for run in Race(Rules(), {}).wanted()}
    for part, rules in queue(Rules(), transfer=False):
        wanted = Race(rules, {}).pending()
        assert wanted, part.name
        if part.name != "long training":  # its trials are those of the race
            assert not raced & {run.key({}) for run in wanted}
    parts = {part.name for part, _ in queue(Rules(), transfer=True)}
    assert parts - {part.name for part, _ in queue(Rules(), transfer=False)} == {"transfer: two more seeds"}
    elsewhere = {part.name for part, _ in queue(Rules(data="stl10[300]"), transfer=False)}
    assert elsewhere == {"STL-10, three seeds"} == {part.name for part in QUEUE} - parts
    assert _plan_of_queue(Rules(), Store(tmp_path / "race.jsonl"), alone=True).count(" min") == len(QUEUE)


def test_a_part_of_the_queue_may_have_fewer_lengths_and_trials():
    """With a single candidate the short trials decide, so none is repeated."""
    rules = Rules(losses=("simclr",), methods=("lars", "muon"), seeds=1, lengths=(3, 2), kept=(1, 1))
    _, order = finished(rules)
    assert {run.stage for run in order} == {"tune", "final"}
    final = [(run.method, run.lr, run.steps) for run in order if run.stage == "final"]
    assert final == [("lars", 3.0, 2700), ("muon", 0.16, 900), ("muon", 0.16, 1350)]


def test_no_run_is_pending_twice(whole):
    results, order = whole
    left = {run.key({}) for run in order if run.stage == "final"}
    pending = Race(Rules(), {key: result for key, result in results.items() if key not in left}).pending()
    assert len(pending) == len(set(pending)) == len(left)


def test_images_of_another_size_are_another_dataset():
    images = RaceImages("stl10", np.zeros((5010, 96, 96, 3), np.uint8), np.zeros(5010, np.int64), 5000)
    assert _name(images, "stl10") == "stl10(96 px)"
    assert not list(queue(Rules(data=_name(images, "stl10")), transfer=True))
    assert _name(images.smaller(32), "stl10") == "stl10"


def test_fewer_images_of_a_named_dataset(monkeypatch):
    whole = RaceImages("any", np.arange(15)[:, None, None, None] * np.ones((1, 2, 2, 3), np.uint8), np.arange(15), 10)
    monkeypatch.setattr("benchmarks.race.images.load", lambda name: whole)
    few = named_images("any", most=3)
    assert (few.labels.tolist(), few.training) == ([0, 1, 2, 10, 11, 12], 3)
    assert few.pixels[:, 0, 0, 0].tolist() == few.labels.tolist()
    assert named_images("any", most=7).labels.tolist() == [*range(7), *range(10, 15)]
    assert named_images("any").labels.tolist() == list(range(15))


def test_smaller_images_are_means_over_squares():
    pixels = np.random.default_rng(0).integers(256, size=(1203, 6, 6, 3), dtype=np.uint8)
    images = RaceImages("any", pixels, np.arange(1203), 1000)
    found = images.smaller(2).pixels
    assert found[7, 1, 0] == pytest.approx(pixels[7, 3:, :3].mean(axis=(0, 1)), abs=0.5)
    assert found.shape == (1203, 2, 2, 3)
    assert images.smaller(6).pixels.tobytes() == pixels.tobytes()
    for side in (4, 0, -2):
        with pytest.raises(InputError, match=f"--side must divide 6 × 6 pixels .*{side}"):
            images.smaller(side)
    with pytest.raises(InputError, match="6 × 4"):
        replace(images, pixels=pixels[:, :, :4]).smaller(2)


def test_results_merge_by_key_and_survive_a_kill(tmp_path):
    store, other = Store(tmp_path / "a.jsonl"), Store(tmp_path / "b.jsonl")
    store.add({"key": "x", "alone": True, "value": 1})
    with store.path.open("a") as stream:
        stream.write('{"key": "y", "val')  # killed in the middle of a line
    store.add({"key": "z", "alone": False, "value": 2})
    assert set(store.results()) == {"x", "z"}
    other.add({"key": "x", "alone": False, "value": 3})
    other.add({"key": "z", "alone": True, "value": 4})
    assert store.merge([other.path]) == 2
    assert {key: r["value"] for key, r in store.results().items()} == {"x": 1, "z": 4}
    assert len(store.path.read_text().splitlines()) == 2
    with pytest.raises(InputError, match="--merge"):
        store.merge([tmp_path / "missing.jsonl"])


def test_the_verdict_takes_the_shortest_length_that_is_as_good(tmp_path):
    results, _ = finished(Rules(losses=("simclr",)))
    found = verdict(results, "cifar10", "simclr")
    lengths = {g.steps: g.mean() for g in groups(results.values()) if g.method == "muon"}
    bar = found.baseline.mean()
    assert found.baseline.method == "lars"
    assert found.shortest.steps == min(steps for steps, mean in lengths.items() if mean >= bar)
    assert found.views == found.shortest.steps / 2700
    assert found.seconds == pytest.approx(1.3 * found.views)
    assert verdict({}, "cifar10", "simclr") is None
    worse = {k: r | ({"logistic": [0.1]} if r["method"] == "muon" else {}) for k, r in results.items()}
    assert verdict(worse, "cifar10", "simclr").shortest is None
    few = {k: r for k, r in results.items() if r["seed"] < 4}
    assert verdict(few, "cifar10", "simclr") is None


def test_a_group_with_a_diverged_seed_is_no_winner():
    results, _ = finished(Rules(losses=("simclr",)))
    for r in results.values():
        if r["stage"] == "final" and r["method"] == "lars" and r["seed"] == 3:
            r["diverged"] = True
    lars = next(g for g in groups(results.values()) if g.method == "lars")
    assert lars.mean() == 0
    assert "1 of 5 diverged" in lars.words()
    assert verdict(results, "cifar10", "simclr").baseline.method == "sgd"


# the page


def test_a_page_without_results_holds_no_numbers(tmp_path):
    for name, table in page.tables(tmp_path).items():
        assert table == ("" if name in ("baselines", "figure", "beside", "spectra") else page.NOTHING), name
    assert figures.draw({}, "cifar10") is None


def test_the_page_shows_what_was_run(tmp_path, whole):
    results, _ = whole
    store = Store(tmp_path / "race.jsonl")
    for r in results.values():
        store.add(r)
    store.merge([])
    tables = page.tables(tmp_path)
    assert tables["verdict"].count("\n") == 1 + len(RACED)
    assert "| 0.33 | 0.43 | yes |" in tables["verdict"]
    assert tables["speedrun"] == tables["engine"] == tables["appendix"] == page.NOTHING
    assert tables["figure"].endswith("(speed.png)")
    assert tables["beside"].endswith("(speed_modes.png)")


def test_seconds_are_drawn_of_methods_that_were_timed(whole):
    results, _ = whole
    shared = {key: r | {"alone": r["method"] != "muon"} for key, r in results.items()}
    points = []
    for some in (results, shared):
        figure = figures.draw(some, "cifar10", figures.FIGURES["speed.png"])
        points.append([len(axis.containers) for axis in figure.axes])
    lengths, others = 4, 3  # Muon's final lengths, and the baselines
    assert points[0] == 6 * [lengths + others]
    assert points[1] == 3 * [lengths + others] + 3 * [others]


def test_spectra_are_drawn_of_settings_with_several_seeds(whole):
    results, _ = whole
    assert figures.draw_spectra(results, "cifar10") is None, "these results hold no spectra"
    spectra = {key: r | {"spectrum": [4.0, 2.0 - r["seed"] / 9, 1.0]} for key, r in results.items()}
    figure = figures.draw_spectra(spectra, "cifar10")
    several = [g for g in figures.drawn(spectra, "cifar10") if len(g.runs) > 1]
    assert sum(len(axis.lines) for axis in figure.axes) == len(several) >= 9
    median = np.median([run["seed"] for run in next(g for g in several if g.loss == "simclr").runs])
    values = figure.axes[0].lines[0].get_ydata()
    assert values == pytest.approx([1.0, (2 - median / 9) / 4, 0.25])
    single = {key: r for key, r in spectra.items() if r["seed"] == 0}
    assert figures.draw_spectra(single, "cifar10") is None


def test_what_the_page_says_of_spectra():
    results = Store(page.RESULTS / "race.jsonl").results()
    found = {
        (g.method, g.steps): np.median(figures._spectra(g), axis=0)
        for g in figures.drawn(results, "cifar10")
        if g.loss == "simclr" and len(g.runs) > 1
    }
    text = (page.RESULTS / "speed.md").read_text(encoding="utf-8").replace("\n", " ")
    lars = found["lars", 2700]
    for steps, says in (
        (1350, "half of the updates, modes from the {}nd on are smaller than LARS's, the last one {:.0f} times"),
        (900, "with a third, modes from the {}th on, the last one {:.0f} times"),
    ):
        muon = found["muon", steps]
        first = 2 + int(np.flatnonzero(muon >= lars)[-1])  # counted from one
        assert says.format(first, round(lars[-1] / muon[-1], -1)) in text


def test_a_mode_under_the_schedule_of_the_race_diverges_at_half_of_the_bound():
    """s̄ of one mode with γ = 1 and momentum, as the page of S7 says; 600 updates."""
    bound = appendix.bound(1.0, 0.9)

    def diverges(rate, s):
        schedule, velocity = Schedule("cosine", total=600, warmup=round(600 * WARMUP), final=0.0), 0.0
        for step in range(600):
            velocity = 0.9 * velocity - 4 * (1 - s**2) * s
            s -= rate * schedule.factor(step) * velocity
            if abs(s) > 1e6:
                return True
        return False

    for start in appendix.STARTS.values():
        assert not diverges(0.45 * bound, start)
        assert diverges(0.6 * bound, start)


def test_what_the_page_says_of_the_largest_rate():
    text = (page.RESULTS / "speed.md").read_text(encoding="utf-8")
    stored = json.loads((page.RESULTS / "largest_rate.json").read_text())
    small, standard = (stored[start]["gamma"] for start in appendix.STARTS)
    assert f"{small[0]:.1f} from the small start and {standard[0]:.0f} from the standard one" in text
    seeds = f"{min(small):.1f} to {max(small):.1f} and {min(standard):.0f} to {max(standard):.0f}"
    assert f"seeds 0 to 2: {seeds}" in text
    results = Store(page.RESULTS / "race.jsonl").results()
    largest = [
        appendix._largest(appendix.trials(results, "cifar10", "plain", "sgd", start)) for start in appendix.STARTS
    ]
    bounds = [appendix.bound(gamma[0], stored["small"]["momentum"]) for gamma in (small, standard)]
    more = [rate / bound for rate, bound in zip(largest, bounds, strict=True)]
    assert "bears at least {:.1f} and {:.1f} times as much".format(*more) in text
    times = standard[0] / small[0], largest[0] / largest[1]
    assert "small start bears {:.0f} times the rate, and it bears {:.0f} times".format(*times) in text


def test_stored_results_are_those_on_the_page():
    for path, text in page.pages().items():
        assert text == path.read_text(encoding="utf-8"), path.name


def test_the_appendix_predicts_and_shows_only_what_was_measured():
    sharp = next(i for i in appendix.IDEAS if i.loss == "sharpened")
    assert appendix.sooner(sharp, 1e-3) > 2
    assert appendix.bearable(sharp) == pytest.approx(4, rel=0.01)
    assert appendix.rows({}, "cifar10") == []
    made = {}
    for loss, lr, score in (
        ("plain", 0.1, 0.4),
        ("sharpened", 0.1, 0.44),
        ("sharpened", 0.2, 0.45),
        ("hinged", 0.1, 0),
    ):
        run = RaceRun("tune", "cifar10", loss, "sgd", lr, 600, 0, "small")
        made[loss, lr] = invented(run) | {"logistic": [score], "diverged": not score}
    table = {row[0]: row[3:] for row in appendix.rows(made, "cifar10")}
    none = appendix.NOT_RUN
    assert table["S2"] == ["40.0 → 45.0 %, 12 → 12 modes", none, f"2×, {none}", "helps from small"]
    assert table["S6"] == ["diverged at every rate from 0.1 on", none, f"less than 1×, {none}", "harms from small"]
    lost = {("plain", 0.1): made["plain", 0.1] | {"diverged": True}, 1: made["sharpened", 0.1]}
    row = next(row for row in appendix.rows(lost, "cifar10") if row[0] == "S2")
    assert row[3] == "the plain loss diverged at every rate; with the idea 44.0 %"
    assert row[5] == f"plain diverged, {none}"
    assert table["S5"] == [none, none, f"{none}, {none}", none]
    assert table["S7"] == ["0.1: 40.0 %", none, "", none]
    initial = {"data": "cifar10"} | {
        start: {"gamma": [9.5], "momentum": 0.9} for start in appendix.STARTS
    }  # so 0.05 is the predicted rate
    row = appendix.rows(made, "cifar10", initial)[-1]
    assert row[2:] == [
        "bearable up to 0.05",
        "0.1: 40.0 %",
        none,
        "2.0×",
        "bears at least 2.0 times the predicted rate",
    ]
    assert appendix.rows(made, "cifar10", initial | {"data": "stl10"})[-1][-1] == none


def test_where_every_rate_diverges_lower_ones_are_tried():
    rules = Rules(losses=("hinged",), methods=("sgd",), stages=("tune",))
    results = {}
    for _ in range(9):
        for run in Race(rules, results).pending():
            results[run.key({})] = invented(run) | {"diverged": run.lr > 2e-4}
    rates = sorted(r["lr"] for r in results.values())
    assert rates == pytest.approx([0.3 / 3**k for k in range(7, -1, -1)], rel=0.12)
    assert sum(not r["diverged"] for r in results.values()) == 1


@pytest.mark.parametrize("start", [0.01, 0.3])
def test_the_prediction_of_s1_is_what_is_raced(start):
    """A linear model on exact modes, trained by the raced loss and method with small steps."""
    gamma = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    x = torch.linalg.qr(torch.randn(64, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    x, lr = x * 8 * gamma.sqrt(), 2e-3
    W = torch.diag(start / gamma.sqrt()).requires_grad_()
    loss, options = MODULES[LOSSES["plain"]["loss"]](**LOSSES["plain"]["loss_options"]), _stretch()
    t = 0.0
    while (z := x @ W.T)[:, 2].square().mean() < 0.5:
        t += lr
        (slope,) = torch.autograd.grad(loss(*precondition(z, z, **options)), W)
        W = (W - lr * slope).detach().requires_grad_()
    predicted = appendix.preconditioned_time(start, gamma.numpy(), **options)
    assert t == pytest.approx(predicted, rel=0.01)
    plain = float(BarlowTwins().step_times(start, 0.25))
    assert predicted != pytest.approx(plain, rel=0.05)
    whole = appendix.preconditioned_time(start, appendix.SPECTRUM, **options)
    expected = float(BarlowTwins().step_times(start, 1 / 64)) / whole
    assert appendix.sooner(appendix.IDEAS[0], start) == expected


def _stretch():
    return RaceRun("tune", "toy", "plain", "precondition", 0.1, 1, 0).settings({})["precondition"]


# images


@pytest.fixture
def file(tmp_path):
    """120 images of ten classes that a network can tell apart a little, 80 of them for training."""
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 10
    pixels = np.clip(25 * labels[:, None, None, None] + rng.integers(0, 40, (120, 16, 16, 3)), 0, 255)
    split = (np.arange(120) >= 80).astype(np.uint8)
    path = tmp_path / "images.npz"
    np.savez(path, pixels=pixels.astype(np.uint8), labels=labels, split=split)
    return path


def test_files_are_joined_and_read_alike(file, tmp_path):
    whole = read_images([file])
    stored = np.load(file)
    for i, part in enumerate((slice(0, 50), slice(40, 120))):  # ten images are in both
        some = {name: stored[name][part] for name in ("pixels", "labels", "split")}
        _pack(tmp_path / f"{i}.npz", **some, index=np.arange(120)[part])
    joined = read_images([tmp_path / "1.npz", tmp_path / "0.npz"])
    assert np.array_equal(joined.pixels, whole.pixels)
    assert np.array_equal(joined.labels, whole.labels)
    assert joined.training == whole.training == 80
    assert np.array_equal(read_images([whole.save(tmp_path / "c.npz")]).pixels, whole.pixels)
    assert (_name(whole, "cifar10"), len(read_images([file], most=30).labels)) == ("cifar10(16 px)[80]", 60)
    with pytest.raises(InputError, match="--data-file"):
        read_images([tmp_path / "missing.npz"])


def test_no_image_is_dropped_in_silence(file, tmp_path):
    stored = dict(np.load(file))
    np.savez(tmp_path / "second.npz", **stored)
    with pytest.raises(InputError, match=r"must hold `index`, because several files .*images\.npz.*join"):
        read_images([file, tmp_path / "second.npz"])
    np.savez(tmp_path / "twice.npz", **stored, index=np.arange(120) // 2)
    with pytest.raises(InputError, match=r"one image per split and index .got two labels for index 0 of split 0"):
        read_images([tmp_path / "twice.npz"])


def _pack(path, pixels, labels, split, index):
    """Lossless sheets of 2 × 5 images."""
    files, counts = [], []
    for start in range(0, len(pixels), 10):
        some = pixels[start : start + 10]
        sheet = np.zeros((10, 16, 16, 3), np.uint8)
        sheet[: len(some)] = some
        stream = io.BytesIO()
        Image.fromarray(sheet.reshape(2, 5, 16, 16, 3).swapaxes(1, 2).reshape(32, 80, 3)).save(stream, "png")
        files.append(stream.getvalue())
        counts.append(len(some))
    offsets = np.cumsum([0, *map(len, files)])
    blob = np.frombuffer(b"".join(files), np.uint8)
    np.savez(
        path, blob=blob, offsets=offsets, size=16, tiles=[2, 5], counts=counts, labels=labels, split=split, index=index
    )


def test_tuning_does_not_see_test_images(file):
    images = read_images([file])
    images.offer()
    tune = DATASETS["race-tune"].load(None)
    assert (len(tune.pixels), tune.training) == (80, 72)
    final = DATASETS["race-final"].load(None)
    assert (len(final.pixels), final.training) == (120, 80)


# runs of seconds

CHANGES = TINY | {"batch": 16, "held_out": 16}


@pytest.mark.parametrize("method", ["sgd", "lars", "adamw", "precondition"])
def test_a_run_of_every_method(method, file):
    run = RaceRun("tune", "digits", "barlow_twins", method, METHODS[method].rates[0], 2, 0)
    result = race(run, read_images([file]), CHANGES, alone=True, device="cpu")
    assert not result["diverged"]
    assert len(result["logistic"]) == 1
    assert result["rank"] == []  # only the accuracy decides


def test_a_final_run_is_measured_along_its_way(file):
    run = RaceRun("final", "digits", "barlow_twins", "muon", METHODS["muon"].rates[0], 16, 0)
    result = race(run, read_images([file]), CHANGES, alone=True, device="cpu")
    assert not result["diverged"]
    assert result["step"] == checkpoints(run) == [1, 2, 4, 8, 16]
    assert all(len(result[name]) == 5 for name in ("seconds", "logistic", "knn", "rank", "grown"))
    assert all(0 <= value <= 1 for value in result["logistic"])
    assert result["start_s"] > 0
    assert result["measured_s"] > 0
    assert json.loads(json.dumps(result)) == result


def test_a_final_run_is_probed_elsewhere_too(file):
    images = read_images([file])
    other = replace(images, name="other", pixels=images.pixels[:, ::2, ::2], labels=images.labels)
    for stage in ("final", "tune"):
        run = RaceRun(stage, "toy", "simclr", "sgd", 0.01, 2, 1)
        both = race(run, replace(images, elsewhere=other), CHANGES, alone=True, device="cpu")
        assert ("transfer" in both) == (stage == "final")
    together = race_together(
        [RaceRun("final", "toy", "simclr", "sgd", 0.01, 2, 1)], replace(images, elsewhere=other), CHANGES
    )
    assert 0 <= together[0]["transfer"][0] <= 1


def test_accuracy_at_equal_modes():
    run = RaceRun("final", "cifar10", "simclr", "lars", 3.0, 3000, 0)
    slow = invented(run) | {"grown": [4, 8, 12], "logistic": [0.3, 0.5, 0.7], "step": [1, 2, 3]}
    fast = slow | {"method": "muon", "grown": [2, 6, 14], "logistic": [0.1, 0.45, 0.9]}
    a, b = groups([slow, fast])
    assert at_equal_modes(a, b) == [(6, pytest.approx(0.4), 0.45)]


def test_a_run_that_diverges_says_so(file, monkeypatch):
    monkeypatch.setattr(single, "CHECK", 3)
    run = RaceRun("tune", "digits", "vicreg", "sgd", 1e30, 100_000, 0)  # it stops long before
    result = race(run, read_images([file]), CHANGES, alone=False, device="cpu")
    assert result["diverged"]
    assert result["logistic"] == []


def test_a_race_stops_and_continues(file, tmp_path, capsys):
    images, store = read_images([file], "toy"), Store(tmp_path / "race.jsonl")
    rules = [Rules(5, 1, 1, "toy", ("simclr",), ("sgd",), changes=CHANGES, stages=("tune",))]
    run_here(rules, store, images, 0.0, "cpu")  # the time is over before it begins
    assert store.results() == {}
    run_here(rules, store, images, 1e12, "cpu")
    done = store.results()
    assert len(done) >= len(METHODS["sgd"].rates)
    capsys.readouterr()
    run_here(rules, store, images, 1e12, "cpu")
    assert store.results() == done
    assert capsys.readouterr().out == ""


def test_runs_together_are_the_runs_alone(file):
    """The same steps, with the same views, rates and seeds."""
    images = read_images([file])
    runs = [RaceRun("tune", "toy", "simclr", "sgd", lr, 5, 0) for lr in (0.01, 1e30, 0.3)]
    alone = [race(run, images, CHANGES, alone=False, device="cpu") for run in runs]
    timed = {"seconds", "start_s", "measured_s"}
    for one, other in zip(alone, race_together(runs, images, CHANGES, "cpu"), strict=True):
        assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}
    assert [r["diverged"] for r in alone] == [False, True, False]


def test_a_race_in_teams(file, tmp_path):
    images, store = read_images([file], "toy"), Store(tmp_path / "race.jsonl")
    rules = Rules(3, 1, 1, "toy", ("simclr",), ("muon",), changes=CHANGES)
    assert run_teams(rules, store, images, 0.0, "cpu", 5)
    assert store.results() == {}
    run_teams(rules, store, images, 1e12, "cpu", 5)
    assert {r["stage"] for r in store.results().values()} == {"tune", "long", "final"}
    left = Race(rules, store.results()).pending()
    assert {run.stage for run in left} == {"clock"}


@pytest.mark.slow
def test_several_processes_share_a_race(file, tmp_path):
    images, store = read_images([file], "toy"), Store(tmp_path / "race.jsonl")
    rules = Rules(5, 1, 1, "toy", ("simclr",), ("sgd",), changes=CHANGES, stages=("tune", "clock"))
    run_jobs([rules, replace(rules, methods=("lars",))], store, images, 1e12, "cpu", jobs=2)
    assert {(r["stage"], r["method"]) for r in store.results().values()} == {("tune", "sgd"), ("tune", "lars")}
    assert not any(r["alone"] for r in store.results().values())


def dies_at_low_rates(stored, names, changes, device, jobs, orders, done):
    """A worker that is killed by some runs and takes its time for others."""
    while (run := orders.get()) is not None:
        if run.lr < 0.05:
            os._exit(9)
        time.sleep(2)
        done.put((run, invented(run, changes)))


def test_a_process_that_dies_costs_only_its_own_run(file, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "_work", dies_at_low_rates)
    rules = Rules(5, 1, 1, "toy", ("simclr",), ("sgd",), changes=CHANGES, stages=("tune",))
    low, *_, high = (run for run in Race(rules, {}).pending())
    monkeypatch.setattr(jobs, "_next", lambda *given, **_: next((r for r in (low, high) if r not in given[3]), None))
    store = Store(tmp_path / "race.jsonl")
    with pytest.raises(SystemExit, match=r"1 of 2 processes died, exit code 9: .* continues"):
        run_jobs([rules], store, read_images([file], "toy"), time.monotonic() + 60, "cpu", jobs=2)
    assert set(store.results()) == {high.key(CHANGES)}


def test_durations_are_expected_from_runs_like_it():
    run = RaceRun("final", "cifar10", "simclr", "lars", 3.0, 1000, 0)
    times = {True: (0.01, 0.02, 0.03, 0.04, 0.5), False: (1.0, 1.0)}
    results = {
        f"{alone}{i}": invented(run) | {"alone": alone, "seconds": [1000 * t]}
        for alone, all_of_them in times.items()
        for i, t in enumerate(all_of_them)
    }
    assert seconds_of(run, results) == pytest.approx(OVERHEAD + 1000 * 0.04)
    assert seconds_of(run, results, alone=False) == pytest.approx(OVERHEAD + 1000)
    assert seconds_of(replace(run, loss="vicreg"), results) == seconds_of(run, {})


@pytest.mark.parametrize("option", ["--losses simclr", "--seeds 2", "--start small", "--methods sgd", "--stages tune"])
def test_the_queue_has_its_own_rules(option, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["race", "--queue", *option.split()])
    with pytest.raises(SystemExit):
        _options()
    assert f"{option.split()[0]}" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr("sys.argv", ["race", "--queue", "--length", "900"])
    assert {rules.length for _, rules in queue(Rules(length=_options().length), transfer=True)} == {900, 3600}
