"""Figures of runs that are made one at a time, joined; and hidden representations that are followed."""

import dataclasses
import json

import numpy as np
import pytest

from stairwise.archives import load_arrays, save_arrays
from stairwise.checks import InputError
from stairwise.paper import fig5, harness
from stairwise.paper.harness import LARGEST, from_stored, joined, page, run, store
from stairwise.paper.trained import lighter
from stairwise.report.run_page import run_page
from stairwise.runs.followed import write_followed
from stairwise.runs.reader import Run
from stairwise.staircase.steps import detect_steps
from tests.command_lines import stairwise
from tests.paper.test_figures import invented
from tests.paper.test_results import RESULTS

RATES = np.concatenate([1 / np.array([1.0, 1.7, 2.2, 3.6, 4.5, 6.8, 8.1]), np.full(4, 1e-4)])
VIEWS = 96


def follow(folder, coupled, seed=0):
    """Fixed views of an invented run: h learns each mode with z, or holds all of them from the beginning."""
    rng = np.random.default_rng(seed)
    made = Run(folder)
    k = len(made.records[0].covariance)
    modes = np.linalg.qr(rng.standard_normal((VIEWS, k)))[0]
    represent = np.linalg.qr(rng.standard_normal((20, k)))[0].T
    for record in made.records:
        lam = record.covariance
        weights = np.sqrt(0.01 + 0.5 * lam) if coupled else np.full(k, 0.7)
        h = (modes * weights) @ represent + 0.003 * rng.standard_normal((VIEWS, 20))
        write_followed(folder, record.step, record.t, modes * np.sqrt(lam + 1e-9), h, {"z": lam})
    to_follow(folder)


def to_follow(folder):
    """The recipe of an invented run says that it follows views."""
    facts = json.loads((folder / "recipe.json").read_text())
    facts["recipe"]["follow"] = VIEWS // 2
    (folder / "recipe.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("method", ["bt", "simclr", "vicreg"])
@pytest.mark.parametrize("coupled", [True, False])
def test_representations_along_new_modes(tmp_path, method, coupled):
    folder = tmp_path / "runs" / f"stl10-{method}-small"
    invented(folder, f"stl10-{method}-small", RATES)
    follow(folder, coupled)
    result = run("fig5", tmp_path, {"runs": str(tmp_path / "runs"), "methods": method})
    found = fig5.along(result.arrays, method)
    steps = detect_steps(Run(folder).times, Run(folder).series("covariance"))
    assert len(found.times) >= 5
    assert set(np.round(found.times, 2)) <= set(np.round(steps.times, 2))
    assert (found.events.z > 4) == coupled
    (claim,) = (c for c in result.claims if f"{fig5.ALONG}, z against" in c.text)
    assert claim.holds == coupled
    assert any("share of h" in row[1] for row in fig5.events_table(result.arrays).rows)
    for path in (folder / "followed").glob("step-*.npz"):  # the summary suffices
        path.unlink()
    again = run("fig5", tmp_path, {"runs": str(tmp_path / "runs"), "methods": method}, force=True)
    assert [c.measured for c in again.claims] == [c.measured for c in result.claims]
    later = [c for c in result.claims if c.text.endswith("predicted later")]
    assert [c.holds for c in later] == ([coupled] if method == "vicreg" else [])
    judged = [c for c in result.claims if c.judged and c not in later]
    assert judged == [claim], "total variance and shape are reported, not judged"
    (folder / "followed" / "summary.npz").unlink()
    with pytest.raises(InputError, match=r"must have the 48 images that it has followed .*summary.npz"):
        run("fig5", tmp_path, {"runs": str(tmp_path / "runs"), "methods": method}, force=True)


def test_a_control_between_steps_that_are_far_apart(tmp_path):
    folder = tmp_path / "runs" / "stl10-bt-small"
    invented(folder, "stl10-bt-small", np.concatenate([[1.0, 0.4, 0.16], np.full(8, 1e-4)]))
    follow(folder, coupled=True)
    result = run("fig5", tmp_path, {"runs": str(tmp_path / "runs"), "methods": "bt"})
    control = fig5.events(result.arrays, "bt")[fig5.CONTROL]
    assert control.count == 2
    assert control.z < 4, "between the steps nothing rises"
    assert [row[1] for row in fig5.events_table(result.arrays).rows][1:] == [
        fig5.ALONG,
        fig5.OWN,
        fig5.WITHOUT,
        fig5.ELSEWHERE,
        fig5.CONTROL,
    ]
    (claim,) = (c for c in result.claims if fig5.CONTROL in c.text)
    assert not claim.judged


def test_runs_that_followed_nothing_are_judged_as_before(tmp_path):
    """Those of CIFAR-10, and of Barlow Twins before views were followed: by total variances and the shape."""
    folder = tmp_path / "runs" / "stl10-bt-small"
    invented(folder, "stl10-bt-small", RATES)
    facts = json.loads((folder / "recipe.json").read_text())
    del facts["recipe"]["follow"]
    (folder / "recipe.json").write_text(json.dumps(facts))
    result = run("fig5", tmp_path, {"runs": str(tmp_path / "runs"), "methods": "bt"})
    assert len(result.claims) == 7
    assert all(claim.judged for claim in result.claims)
    assert not any("share of h" in claim.text for claim in result.claims)


def test_a_followed_run_without_steps_misses_the_prediction(tmp_path):
    folder = tmp_path / "runs" / "stl10-bt-small"
    invented(folder, "stl10-bt-small", np.full(len(RATES), 1e-4))
    follow(folder, coupled=True)
    result = run("fig5", tmp_path, {"runs": str(tmp_path / "runs"), "methods": "bt"})
    (claim,) = (claim for claim in result.claims if claim.judged)
    assert "share of h along new modes" in claim.text
    assert np.isnan(claim.measured)
    assert not claim.holds


def test_runs_are_joined(tmp_path):
    """Runs that are never in one folder give the same figure as if they were."""
    places = [("one", "stl10-simclr-small"), ("two", "stl10-vicreg-small"), ("both", "stl10-simclr-small")]
    for place, name in [*places, ("both", "stl10-vicreg-small")]:
        invented(tmp_path / place / name, name, RATES if "simclr" in name else 1.3 * RATES)
    stored = tmp_path / "stored"
    for place, method in (("one", "simclr"), ("two", "vicreg")):
        result = run("fig2cf", tmp_path, {"runs": str(tmp_path / place), "methods": method})
        store(joined(result, stored), stored)
    whole = run("fig2cf", tmp_path, {"runs": str(tmp_path / "both")})
    arrays = load_arrays(stored / "fig2cf.npz")
    assert arrays.keys() == whole.arrays.keys()
    assert json.loads(str(arrays["about"])).keys() == json.loads(str(whole.arrays["about"])).keys()
    for name in arrays:
        if name != "about":
            assert np.array_equal(arrays[name], whole.arrays[name]), name
    assert len(json.loads((stored / "fig2cf.json").read_text())["versions"]) > 0
    about = np.array(str(whole.arrays["about"]).replace('"data": "stl10"', '"data": "cifar10"'))
    store(dataclasses.replace(whole, arrays=whole.arrays | {"about": about}), tmp_path / "other")
    with pytest.raises(InputError, match="must join runs on the same images"):
        joined(whole, tmp_path / "other")


def test_runs_made_outside_of_a_git_checkout(tmp_path):
    """As on a machine that has the files alone."""
    folder = tmp_path / "runs" / "stl10-simclr-small"
    invented(folder, "stl10-simclr-small", RATES)
    facts = json.loads((folder / "recipe.json").read_text()) | {"commit": None, "code": "0123abcd"}
    (folder / "recipe.json").write_text(json.dumps(facts))
    result = run("fig2cf", tmp_path, {"runs": str(tmp_path / "runs"), "methods": "simclr"})
    store(result, tmp_path / "stored")
    page(from_stored("fig2cf", tmp_path, tmp_path / "stored")).write(tmp_path / "page.html")
    (one,) = json.loads(str(result.arrays["about"])).values()
    assert (one["commit"], one["code"]) == (None, "0123abcd")
    assert "digest of the code 0123abcd" in run_page(folder).facts["commit"]


def test_join_needs_a_folder(tmp_path):
    done = stairwise("reproduce", "fig8", "--join", cwd=tmp_path)
    assert done.returncode != 0
    assert "--join needs --store" in done.stderr


def test_fewer_modes():
    lam = np.random.default_rng(0).random((5, 96))
    arrays = {
        "x.lam": lam,
        "x.modes": 2 * np.arange(96),
        "y.lam": lam[:, :8],
        "y.modes": np.arange(8),
        "x.t": lam[:, 0],
    }
    found = lighter(arrays, 24)
    assert found.keys() == arrays.keys()
    assert all(found[key] is arrays[key] for key in ("y.lam", "y.modes", "x.t"))
    assert found["x.modes"][:18].tolist() == list(range(0, 36, 2))
    assert found["x.modes"][-1] == 190
    assert len(set(found["x.modes"])) == 24
    assert np.array_equal(found["x.lam"], lam[:, found["x.modes"] // 2])


def test_scores_do_not_change_when_other_runs_are_joined(tmp_path):
    """Fewer modes are stored then, but the shape of the spectrum is scored by those that were there."""
    folders = {method: tmp_path / "runs" / f"stl10-{method}-small" for method in ("simclr", "vicreg")}
    for folder in folders.values():
        invented(folder, folder.name, RATES)
        follow(folder, coupled=True)
    results = {m: run("fig5", tmp_path, {"runs": str(tmp_path / "runs"), "methods": m}) for m in folders}
    first, second = results.values()
    hidden = np.abs(np.random.default_rng(0).standard_normal((len(first.arrays["simclr.h.t"]), 96)))
    wide = {"simclr.h.lam": hidden.astype(np.float32), "simclr.h.modes": np.arange(96)}
    arrays = first.arrays | wide
    del arrays["simclr.shape"]  # as in results that are older than this key
    before = fig5.events(arrays, "simclr")
    store(dataclasses.replace(first, arrays=arrays), tmp_path / "stored")
    both = joined(second, tmp_path / "stored")
    assert both.arrays["simclr.h.lam"].shape[1] == 24
    assert fig5.events(both.arrays, "simclr") == before
    assert fig5.events(both.arrays, "vicreg") == fig5.events(second.arrays, "vicreg")


def test_the_stored_figure_has_room_for_a_seventh_run(tmp_path):
    """The whole run of VICReg and another one of SimCLR may take as many steps as the stored run with the most."""
    arrays = load_arrays(RESULTS / "fig5.npz")
    about = json.loads(str(arrays["about"]))
    for name in ("vicreg", "simclr-x4"):
        arrays |= {f"{name}.{k.removeprefix('bt-x8.')}": v for k, v in arrays.items() if k.startswith("bt-x8.")}
        arrays |= {f"{name}.control.{x}": arrays[f"simclr.control.{x}"] for x in ("times", "h")}
        about[name] = about["bt-x8"]
    assert len(about) == 7
    save_arrays(tmp_path / "seven.npz", fig5.joined(arrays | {"about": np.array(json.dumps(about))}))
    assert (tmp_path / "seven.npz").stat().st_size <= LARGEST


def test_a_run_that_is_replaced_leaves_nothing(tmp_path):
    """The whole run may lack what the run that was cut off had, such as a control between steps."""
    folder = tmp_path / "runs" / "stl10-simclr-small"
    invented(folder, folder.name, np.concatenate([[1.0, 0.4, 0.16], np.full(8, 1e-4)]))
    follow(folder, coupled=True)
    settings = {"runs": str(tmp_path / "runs"), "methods": "simclr"}
    result = run("fig5", tmp_path, settings)
    others = {key.replace("simclr", "simclr-x4"): array for key, array in result.arrays.items() if key != "about"}
    about = json.loads(str(result.arrays["about"]))
    both = {"about": np.array(json.dumps(about | {"simclr-x4": about["simclr"]}))}
    store(dataclasses.replace(result, arrays=result.arrays | others | both), tmp_path / "stored")
    kept = {key: array for key, array in result.arrays.items() if ".control." not in key}
    assert len(kept) < len(result.arrays)
    found = joined(dataclasses.replace(result, arrays=kept), tmp_path / "stored").arrays
    assert {key for key in found if ".control." in key} == {"simclr-x4.control.times", "simclr-x4.control.h"}
    assert found.keys() == kept.keys() | others.keys()


def test_a_run_that_has_come_farther_is_not_replaced(tmp_path):
    """As far as a lease came: 45 % are stored, 30 % are not joined, and nothing unfinished replaces the whole run."""
    folder = tmp_path / "runs" / "stl10-simclr-small"
    invented(folder, folder.name, RATES)
    settings = {"runs": str(tmp_path / "runs"), "methods": "simclr", "unfinished": True}
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    results = {}
    for count in (120, 180, 240, 400):
        (folder / "metrics.jsonl").write_text("".join(lines[:count]))
        results[count] = run("fig2cf", tmp_path, settings, force=True)
    stored = tmp_path / "stored"
    for first, then in ((180, 120), (400, 240)):
        store(results[first], stored)
        with pytest.raises(InputError, match=f"must not replace simclr, which has come farther .*{10 * then} steps"):
            joined(results[then], stored)
    store(results[120], stored)
    for count in (180, 400):
        store(joined(results[count], stored), stored)
    (one,) = json.loads(str(load_arrays(stored / "fig2cf.npz")["about"])).values()
    assert "reached" not in one


def test_a_figure_that_is_killed_while_it_is_joined_is_measured_again(tmp_path, monkeypatch):
    """Its folder may then hold the runs of others, as they were."""
    folder = tmp_path / "runs" / "stl10-simclr-small"
    invented(folder, folder.name, RATES)
    settings = {"runs": str(tmp_path / "runs"), "methods": "simclr"}
    result = run("fig2cf", tmp_path, settings)
    store(result, tmp_path / "stored")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(harness, "save_arrays", killed)
        with pytest.raises(KeyboardInterrupt):
            joined(result, tmp_path / "stored")
    assert not run("fig2cf", tmp_path, settings).cached


def test_runs_of_another_seed(tmp_path):
    folder = tmp_path / "runs" / "stl10-simclr-small-seed1"
    invented(folder, "stl10-simclr-small", RATES)
    settings = {"runs": str(tmp_path / "runs"), "methods": "simclr", "run_seed": 1}
    with pytest.raises(InputError, match="seed = 0 there, 1 in the recipe"):
        run("fig2cf", tmp_path, settings)
    facts = json.loads((folder / "recipe.json").read_text())
    facts["recipe"]["seed"] = 1
    (folder / "recipe.json").write_text(json.dumps(facts))
    assert run("fig2cf", tmp_path, settings).claims


@pytest.mark.parametrize("join", [True, False])
def test_runs_of_another_seed_are_not_replaced(tmp_path, join):
    """Neither by storing nor by joining; the command says so before it does anything."""
    runs, stored = tmp_path / "runs", tmp_path / "stored"
    for seed in (0, 1):
        for method in ("simclr", "vicreg"):
            name = f"stl10-{method}-small"
            folder = runs / (f"{name}-seed{seed}" if seed else name)
            invented(folder, name, RATES)
            facts = json.loads((folder / "recipe.json").read_text())
            facts["recipe"]["seed"] = seed
            (folder / "recipe.json").write_text(json.dumps(facts))
    settings = {"runs": str(runs), "methods": "simclr"}
    store(run("fig2cf", tmp_path, settings), stored)
    before = {path.name: path.read_bytes() for path in stored.iterdir()}
    for method in ("simclr", "vicreg"):
        other = run("fig2cf", tmp_path, settings | {"methods": method, "run_seed": 1})
        with pytest.raises(InputError, match=r"got seed 0 in .* another folder, such as seed1"):
            store(joined(other, stored) if join else other, stored)
        assert {path.name: path.read_bytes() for path in stored.iterdir()} == before
        where = ["--set", "runs=nowhere", "--set", "run_seed=1", "--set", f"methods={method}", "--store", stored]
        done = stairwise("reproduce", "fig2cf", *where, *(["--join"] if join else []), cwd=tmp_path)
        assert done.returncode == 2
        assert "such as seed1" in " ".join(done.stderr.split())
    store(joined(other, stored / "seed1") if join else other, stored / "seed1")
    store(run("fig2cf", tmp_path, settings, force=True), stored)


def test_kinds_are_joined(tmp_path):
    """Fig. 7 from standard initialization, then from small, then at four times the rate."""
    runs, stored = tmp_path / "runs", tmp_path / "stored"
    for kind in ("", "-small", "-small-x4"):
        invented(runs / f"stl10-bt{kind}", f"stl10-bt{kind}", RATES, small=bool(kind))
    for only in ("small", "standard", "x4"):
        result = run("fig7", tmp_path, {"runs": str(runs), "methods": "bt", "only": only})
        result = joined(result, stored)
        store(result, stored)
    assert [claim.text for claim in result.claims] == [
        "Barlow Twins: standard less small, at the end",
        "Barlow Twins: standard less small, four times the rate, at the end",
        "Barlow Twins: standard less small, four times the rate, at the end, predicted",
    ]
    found = run("fig1cd", tmp_path, {"runs": str(runs), "only": "x4"})
    assert {claim.text.split(":")[0] for claim in found.claims} == {"four times the rate"}
    with pytest.raises(InputError, match="methods must be bt or simclr for runs at four times the rate"):
        run("fig7", tmp_path, {"runs": str(runs), "methods": "vicreg", "only": "x4"})
    with pytest.raises(InputError, match="only is unknown"):
        run("fig7", tmp_path, {"runs": str(runs), "methods": "bt", "only": "x16"})
