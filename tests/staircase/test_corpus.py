"""The corpus: the stored runs, replayed record by record, give the tables of the page; truth is sane by hand."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks.corpus import judge, page
from benchmarks.corpus.images import Source, closeups, smaller
from benchmarks.corpus.known import complete
from benchmarks.corpus.make import OWN, settings, train
from benchmarks.corpus.score import (
    LAST,
    PARTS,
    TRUTHS,
    Score,
    Share,
    count_run,
    replay,
    score,
    table,
)
from benchmarks.corpus.store import SCALARS, CorpusRun, coded, decoded, pack, read
from benchmarks.corpus.truth import truth

TEXT = page.PAGE.read_text(encoding="utf-8")


def on_the_page(name):
    """A table of the page as rows of cells."""
    return cells(re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- end -->", TEXT, re.S)[1])


def column(rows, part):
    return [[row[0], row[rows[0].index(part)]] for row in rows]


def cells(markdown):
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if "---" not in line
    ]


@pytest.fixture(scope="module")
def everything():
    return page.everything()


@pytest.fixture(scope="module")
def runs(everything):
    return everything[0]


@pytest.fixture(scope="module")
def truths(everything):
    return everything[1]


@pytest.fixture(scope="module")
def said():
    return page.stored_words()


@pytest.mark.slow
def test_a_replay_of_a_sample_says_what_is_stored(runs, said):
    for part in PARTS:
        stored = [k for k, run in enumerate(runs[part]) if len(run.lam)]
        for k in stored[len(part) :: 12]:  # which ones does not matter, but they should differ
            assert replay(runs[part][k]) == said[part][k], runs[part][k].name


@pytest.mark.parametrize("part", TRUTHS)
def test_a_quarter_of_a_part_that_is_not_stored_has_curves_which_give_its_truth(part, runs, truths):
    shown = [(run, known) for run, known in zip(runs[part], truths[part], strict=True) if len(run.lam)]
    assert len(shown) == -(-len(runs[part]) // 4)
    for run, known in shown:
        judged = truth(run)
        assert judged.states == known.states, run.name
        assert (judged.later == known.later).all()
        for name in ("kind", "real", "finished", "doubtful"):
            assert getattr(judged, name) == getattr(known, name)


def test_stored_words_of_other_rules_are_left_out():
    old = [["learning"], ["waiting"]]
    assert page.kept([["learning"], []], old) == old
    assert page.kept([["finished"], ["waiting"]], None) == [["finished"], ["waiting"]]
    assert page.kept([["finished"], []], old) == [["finished"], []]
    run = made(np.ones((60, 3)))
    assert score([run, run], [["waiting"] * 60, []], [truth(run)] * 2).kinds == {"healthy": 1}


def test_a_part_is_judged_once_and_stored(tmp_path, monkeypatch, capsys):
    part, folder = tmp_path / "part.npz", tmp_path / "trained"
    folder.mkdir()
    for k in range(6):
        run = made(stairs([4.0, 2.0, 1.0]) * (1 + k), name=f"run{k}")
        np.savez(folder / f"run{k}.npz", settings=np.array(json.dumps(run.settings)), lam=run.lam, **run.scalars)
    np.savez(folder / "run9.part.npz", nothing=0)  # a run that was interrupted
    pack(folder, part)
    (folder / "run5.npz").replace(tmp_path / "run5.npz")
    some = tmp_path / "some.npz"  # packed twice, and once without the last run
    pack(folder, some)
    monkeypatch.setattr(page, "WORDS", tmp_path / "words.npz")
    monkeypatch.setattr(judge, "STORED", tmp_path)
    monkeypatch.setattr("sys.argv", ["judge", str(some), str(part), "--workers", "1"])
    page.save_words({"tenth": [["waiting"] * 60, []]})
    judge.main()
    assert "- healthy runs accused of collapse, at most 1 %: met" in capsys.readouterr().out
    said = page.stored_words()
    assert said["tenth"] == [["waiting"] * 60, []]
    assert said["eleventh"] == [replay(run) for run in read(part)]
    runs, truths = complete(read(tmp_path / "corpus_eleventh.npz"), tmp_path / "corpus_eleventh_truth.npz")
    assert [run.name for run in runs] == [f"run{k}" for k in range(6)]
    assert sum(len(run.lam) > 0 for run in runs) == 2
    assert page.kept([replay(run) for run in runs], said["eleventh"]) == said["eleventh"]
    assert [known.states for known in truths] == [truth(run).states for run in read(part)]
    with pytest.raises(SystemExit):
        judge.main()
    assert "has been judged" in capsys.readouterr().err


@pytest.mark.parametrize("part", PARTS)
def test_the_page_has_what_the_stored_words_give(part, runs, truths, said):
    total = score(runs[part], said[part], truths[part])
    print(table(total))
    print(f"false alarms per healthy run: {np.mean(total.alarms):.3f} records; delays: {sorted(total.delays)}")
    for name, made in (("results", page.results), ("stricter", page.stricter), ("delays", page.delays)):
        assert column(on_the_page(name), part) == column(cells(made({part: total})), part)
    if part == LAST:
        for name, made in (
            ("matrix", page.matrix),
            ("wrong", page.wrong),
            ("verdict", page.verdict),
            ("by run", page.by_run),
        ):
            assert on_the_page(name) == cells(made(total))
        assert f"<!-- states -->\n{page.quoted(total)}\n<!-- end -->" in page.QUOTES.read_text(encoding="utf-8")


def test_the_verdict_names_what_is_met_and_what_its_interval_carries():
    total = Score(Share(95, 100), Share(0, 1000), Share(2, 100), Share(299, 300), Share(9, 10))
    lines = page.verdict(total).splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "met; its interval reaches beyond the goal",  # 95 of 100: 88.7 to 98.4 %
        "met; its interval carries the claim",
        "missed; its interval includes the goal",
        "met; its interval carries the claim",
        "met; its interval reaches beyond the goal",
    ]
    total.named = Share(145, 161)
    assert "missed; its interval excludes the goal" in page.verdict(total)


def test_a_collapse_that_is_revoked_counts_as_named_but_not_as_kept():
    lam = np.tile([1.0, 0.5, 0.1], (60, 1))
    run = made(lam, scenario="fault", fault="cosine", negative=0.95, positive=0.97)
    known, total = truth(run), Score()
    count_run(total, run, known, ["collapsed"] * 30 + ["waiting"] * 30)
    assert (total.named.hits, total.kept.hits, total.ends.hits) == (1, 0, 0)
    assert total.notes == ["revoked: made (cosine), ends as waiting"]


def test_what_is_said_before_the_fault_does_not_name_its_collapse():
    lam = np.tile([1.0, 0.5, 0.1], (60, 1))
    alike = {"positive": 0.97, "negative": np.r_[np.zeros(32), [0.95] * 28]}
    run = made(lam, scenario="midway", fault="cosine", fault_at=0.5, **alike)
    known, total = truth(run), Score()
    count_run(total, run, known, ["waiting"] * 28 + ["collapsed"] + ["waiting"] * 31)
    assert (known.real, total.named.hits, total.named.total) == (32, 0, 1)


def test_the_numbers_of_runs(runs, truths):
    assert on_the_page("numbers") == cells(page.numbers(runs, truths))


def test_what_losses_charge(runs):
    assert on_the_page("charges") == cells(page.charges(run for part in runs.values() for run in part))


def test_no_group_is_in_two_parts(runs):
    groups = [
        {tuple(run.settings[k] for k in ("loss", "data", "architecture")) for run in part} for part in runs.values()
    ]
    assert sum(map(len, groups)) == len(set().union(*groups))


def test_the_corpus_is_a_part_of_what_is_defined(runs):
    defined = {run["name"]: run for run in settings()}
    stored = {run.name for part in runs.values() for run in part}
    assert stored <= set(defined)
    later = {"stl10": "eighth", "leaves": "ninth", "clouds": "tenth", "strokes closeups": "eleventh"}
    old = ("mlp", "resnet", "vit")
    early = [run for run in defined.values() if run["architecture"] in old and run["data"] not in OWN]
    for data, part in later.items():
        if part in runs:
            missing = sum(run["data"] in data.split() for run in defined.values()) - len(runs[part])
            assert (f" {missing} of the {part}" in TEXT) == (missing > 0)
    assert f"of {sum(map(len, runs.values()))} short trainings" in TEXT
    assert f"{len(early) - len(runs['first']) - len(runs['second'])} of the first two parts" in TEXT


def test_a_run_of_the_last_part_trains():
    run = next(run for run in settings() if run["name"] == "vicreg-strokes-gated-standard0")
    assert (train(run | {"steps": 60}, {}, "cpu")["covariance"].sum(axis=1) > 0).tolist() == [True] * 60


def test_closeups_are_squares_of_the_photographs():
    pixels = np.arange(5 * 6 * 6 * 3).reshape(5, 6, 6, 3)
    cut = closeups(pixels, np.arange(5), number=4, side=3)
    assert sorted(set(cut["labels"])) == sorted(cut["labels"])
    for square, k in zip(cut["pixels"], cut["labels"], strict=True):
        windows = np.lib.stride_tricks.sliding_window_view(pixels[k], (3, 3), axis=(0, 1)).transpose(0, 1, 3, 4, 2)
        assert (windows == square).all(axis=(2, 3, 4)).sum() == 1


def test_details_stored_smaller_are_what_networks_see(tmp_path):
    pixels, files = np.random.default_rng(0).integers(256, size=(6, 32, 32, 3)).astype(np.uint8), {}
    for side, stored in ((32, pixels), (8, smaller(pixels, 8))):
        files[side] = tmp_path / f"{side}.npz"
        np.savez(files[side], pixels=stored, labels=np.arange(6))
    whole, small = (Source("closeups", 8, 0, {"closeups": path}, "cpu", torch.Generator()).x for path in files.values())
    torch.testing.assert_close(small, whole, rtol=0, atol=1e-5)


def test_a_table_without_a_place_is_an_error():
    with pytest.raises(ValueError, match="0 places for the table other"):
        page.filled("text", {"other": "table"})


# truth, by hand


def made(lam, loss="simclr", scenario="standard", **more):
    """A run with these spectra, healthy unless said otherwise."""
    n, d = lam.shape
    v = {name: np.full(n, np.nan) for name in SCALARS}
    variance = lam.clip(0).sum(axis=1)
    v |= {"step": np.arange(n) * 10.0, "t": np.arange(n) * 1.0, "loss": np.linspace(3, 1, n)}
    v |= {"trace_cov": variance, "trace_c": variance, "mean_square": np.zeros(n)}
    v |= {"positive": np.full(n, 0.8), "negative": np.zeros(n), "batch": np.full(n, 64.0)}
    v |= {name: np.broadcast_to(np.float64(more.pop(name)), n).copy() for name in SCALARS if name in more}
    chosen = {"name": "made", "loss": loss, "scenario": scenario, "d": d, "classes": 0, "fault": "", "fault_at": 0.0}
    return CorpusRun(chosen | more, v, lam)


def stairs(rates, records=60, until=30.0):
    t = np.linspace(0, until, records)
    return 1 / (1 + 1e4 * np.exp(-np.outer(t, rates)))


def test_truth_of_a_finished_staircase():
    rates = [4.0, 2.0, 1.0]
    known = truth(made(stairs(rates), loss="barlow_twins", scenario="done"))
    last = np.log(1e4) / rates[-1] / 30 * 59  # record at which the last mode passes ½
    assert known.kind == "healthy"
    assert known.finished is not None
    assert last - 1 <= known.finished <= last + 6
    assert known.states[0] == {"not started"}
    assert known.states[-1] == {"finished"}
    assert "learning" in known.states[round(last)]
    assert known.later[: round(last) - 3].all()
    assert not known.later[round(last) + 1 :].any()


def test_truth_after_the_last_mode_is_open_if_more_could_come():
    known = truth(made(stairs([4.0, 2.0, 1.0]), loss="barlow_twins"))
    assert known.finished is None
    assert known.states[-1] == {"waiting", "finished"}


def test_truth_of_a_divergence():
    lam = stairs([4.0, 2.0, 1.0])
    lam[40:] = np.inf
    known = truth(made(lam))
    assert (known.kind, known.real) == ("diverged", 40)
    assert known.states[:40] == [None] * 40
    assert set(known.states[40:]) == {frozenset({"diverged"})}
    lam[50:] = 1.0
    assert truth(made(lam)).kind == "unknown"


def test_truth_of_a_huge_loss():
    run = made(stairs([4.0, 2.0, 1.0]))
    run.scalars["loss"][45:] = 1e11
    assert (truth(run).kind, truth(run).real) == ("diverged", 45)


def test_truth_of_a_complete_collapse():
    negative = np.r_[np.zeros(30), np.full(30, 0.95)]
    faulty = {"scenario": "midway", "fault": "cosine", "fault_at": 0.4, "positive": 0.97}
    known = truth(made(stairs([4.0, 2.0, 1.0]), negative=negative, **faulty))
    assert (known.kind, known.real) == ("collapse", 30)
    assert known.states[24:30] == [None] * 6
    assert set(known.states[30:]) == {frozenset({"collapsing", "collapsed"})}
    assert all(states is not None for states in known.states[:24])
    without = truth(made(stairs([4.0, 2.0, 1.0]), **faulty))
    assert without.kind == "unknown"


def test_truth_dates_a_collapse_no_earlier_than_its_fault():
    faulty = {"scenario": "midway", "fault": "cosine", "fault_at": 0.5, "positive": 0.97}
    known = truth(made(stairs([4.0, 2.0, 1.0]), negative=np.r_[np.zeros(20), np.full(40, 0.95)], **faulty))
    assert (known.kind, known.real, known.doubtful) == ("collapse", 30, 20)
    assert known.states[20:30] == [None] * 10


def test_truth_sees_a_mode_that_jumps():
    lam = np.c_[np.ones(60), np.r_[np.full(40, 1e-3), np.ones(20)]]
    known = truth(made(lam, loss="barlow_twins", scenario="done"))
    assert 40 <= known.finished <= 42
    assert known.later[:39].all()


def test_truth_does_not_know_what_was_undone_or_never_began():
    lam = stairs([4.0, 2.0, 1.0])
    undone = made(lam, loss="vicreg")
    assert truth(undone).kind == "healthy"
    undone.scalars["loss"][:] = np.r_[np.linspace(25, 17, 30), np.full(30, 25.0)]
    assert truth(undone).kind == "unknown"
    uniform = {"loss": "dino", "negative": 0.95, "positive": 0.97}
    run = made(lam, **uniform)
    assert truth(run).kind == "collapse"
    run.scalars["loss"][:] = np.log(3)
    assert truth(run).kind == "unknown"


def test_truth_of_a_dimensional_collapse():
    lam = np.tile(np.r_[1.0, np.full(19, 1e-3)], (60, 1))
    lam[:20] = 1.0
    known = truth(made(lam, loss="vicreg", scenario="fault", fault="no_covariance"))
    assert (known.kind, known.real) == ("collapse", 20)


def test_truth_of_a_collapse_to_two_dimensions():
    lam = np.tile(np.r_[0.86, 0.14, np.full(30, 1e-4)], (60, 1))
    faulty = {"loss": "vicreg", "scenario": "fault", "fault": "no_covariance"}
    assert truth(made(lam, **faulty)).kind == "collapse"
    assert truth(made(lam[:, :16], **faulty)).kind == "unknown"  # two of sixteen are not few


def test_truth_of_an_idle_run():
    lam = np.tile([1.0, 0.5, 0.1], (60, 1))
    known = truth(made(lam, scenario="frozen"))
    assert known.kind == "idle"
    assert set(known.states) == {frozenset({"not started"})}
    assert truth(made(stairs([4.0, 2.0]), scenario="slow")).kind == "unknown"


# the file

CODES = st.one_of(st.floats(1e-30, 1e30), st.sampled_from([0.0, np.inf, np.nan, -1.0]))


@given(arrays(np.float64, st.tuples(st.integers(1, 8), st.integers(1, 4)), elements=CODES))
def test_spectra_are_stored_within_a_third_of_a_percent(lam):
    back = decoded(coded(lam))
    assert back.shape == lam.shape
    assert (np.isfinite(back) == np.isfinite(lam)).all()
    whole = np.isfinite(lam)
    np.testing.assert_allclose(back[whole], np.maximum(lam[whole], 0), rtol=2 ** (0.5 / 128) - 1 + 1e-12)
    assert (decoded(coded(back))[whole] == back[whole]).all()
