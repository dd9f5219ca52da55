"""The corpus: the stored runs, replayed record by record, give the numbers on the page; truth is sane by hand."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks.corpus import score as scoring
from benchmarks.corpus.make import settings
from benchmarks.corpus.score import FILES, PROMISES, STORED, score, table
from benchmarks.corpus.store import SCALARS, CorpusRun, coded, decoded, read
from benchmarks.corpus.truth import truth
from stairwise.staircase.advice import STATES

SHARED = True  # replaying takes ten seconds
PAGE = (STORED / "corpus.md").read_text(encoding="utf-8")
TUNED, HELD = 0, 1
NAMES = {"Barlow Twins without batch norm, λ = 1": "barlow_twins", "Barlow Twins, usual form": "barlow_twins_norm"}
NAMES |= {"SimCLR": "simclr", "VICReg": "vicreg", "spectral contrastive": "spectral", "BYOL": "byol"}
NAMES |= {"SimSiam": "simsiam", "like DINO": "dino", "CIFAR-10": "cifar10"}
NAMES |= {"MLP": "mlp", "ResNet": "resnet", "ViT": "vit"}


@pytest.fixture(scope="module")
def runs():
    return [read(path) for path in FILES]


class Replayed:
    """A half of the corpus, what was said about it, and its score."""

    def __init__(self, runs):
        self.runs, self.said = runs, {run.name: scoring.replay(run) for run in runs}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scoring, "replay", lambda run: self.said[run.name])
            self.score = score(runs)

    def wrong_stops(self):
        """Records at which "finished" was said although more came, by run."""
        pairs = {run.name: zip(truth(run).later, self.said[run.name], strict=True) for run in self.runs}
        found = {name: sum(later and word == "finished" for later, word in pair) for name, pair in pairs.items()}
        return {name: n for name, n in found.items() if n}


@pytest.fixture(scope="module")
def replayed(runs):
    known = {}

    def of(half):
        if half not in known:
            known[half] = Replayed(runs[half])
        return known[half]

    return of


def rows(heading):
    """Cells of the table that follows a line of the page."""
    text = PAGE[PAGE.index(heading) + len(heading) :]
    lines = re.search(r"(?:^\|.*\|$\n?)+", text, re.M)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[:1] + cells[2:]


HALVES = [
    pytest.param(HELD, "Half that was set aside; records", "Half that was set aside (records", id="held"),
    pytest.param(TUNED, "Tuned half:\n\n| true", "Tuned half:\n\n- ", id="tuned", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("half", "matrix", "notes"), HALVES)
def test_the_page_has_what_a_replay_gives(half, matrix, notes, replayed):
    total = replayed(half).score
    print(table(total))
    print(f"false alarms per healthy run: {np.mean(total.alarms):.3f} records; delays: {sorted(total.delays)}")
    for cells in rows("## Results")[1:]:
        share = getattr(total, PROMISES[cells[0]])
        low, high = share.interval
        inside = f"{share.hits} of {share.total}; {100 * low:.1f} to {100 * high:.1f} %"
        assert cells[2 + half] == f"{100 * share.value:.1f} % ({inside})"
    median, most, alarms = (float(cells[1 + half]) for cells in rows("*Finishes named in time*")[1:])
    assert (median, most) == (np.median(total.delays), round(np.quantile(total.delays, 0.95)))
    assert alarms == pytest.approx(np.mean(total.alarms), abs=5e-4)
    said = rows(matrix.removesuffix("| true"))
    assert said[0][1:] == list(STATES)
    counts = {(cells[0], word): int(n) for cells in said[1:] for word, n in zip(STATES, cells[1:], strict=True)}
    assert {key: n for key, n in counts.items() if n} == dict(total.confusion)
    listed = re.search(r"(?:^- .*$\n?)+", PAGE[PAGE.index(notes) :], re.M)[0].splitlines()
    assert [line.removeprefix("- ") for line in listed] == sorted(total.notes)


def test_runs_that_are_called_finished_too_early(replayed):
    wrong = replayed(HELD).wrong_stops()
    paragraph = re.search(r'^"Finished" although more came: .*$', PAGE, re.M)[0]
    assert f"{sum(wrong.values())} records of seven runs" in paragraph
    assert len(wrong) == 7
    named = {name: int(n) for name, n in re.findall(r"`([\w-]+)` (\d+)", paragraph)}
    assert named == dict(Counter(wrong).most_common(2))
    assert f"{sum(named.values())} of them in two runs" in paragraph


def test_the_numbers_of_runs(runs, replayed):
    counts = [Counter(run.settings[key] for run in half for key in ("loss", "data", "architecture")) for half in runs]
    scenarios = [Counter(run.settings["scenario"] for run in half) for half in runs]
    kinds = [Counter(truth(run).kind for run in half) for half in runs]
    listed = rows("so that an interrupted corpus is balanced.")[1:]
    assert listed[0][1:] == [str(len(half)) for half in runs]
    seen = [0, 0]
    for label, *cells in listed[1:]:
        key, _, name = label.partition(": ")
        source = {"scenario": scenarios, "truth": kinds}.get(key, counts)
        assert [int(cell) for cell in cells] == [half[NAMES.get(name, name)] for half in source], label
        seen = [a + int(b) for a, b in zip(seen, cells, strict=True)]
    assert seen == [5 * len(half) for half in runs]
    assert f"{sum(map(len, runs))} short trainings" in PAGE


def test_no_group_is_in_both_halves(runs):
    tuned, held = (
        {(run.settings["loss"], run.settings["data"], run.settings["architecture"]) for run in half} for half in runs
    )
    assert not tuned & held
    assert f"({len(tuned)} tuned, {len(held)} set aside)" in PAGE
    assert not any(run.settings["held"] for run in runs[TUNED])
    assert all(run.settings["held"] for run in runs[HELD])


def test_the_corpus_is_a_part_of_what_is_defined(runs):
    defined = {run["name"]: run for run in settings()}
    stored = {run.name for half in runs for run in half}
    assert stored <= set(defined)
    third = [run for run in defined.values() if run["architecture"] == "cnn"]
    assert f"`LAST` in `make.py`, {len(third)} runs" in PAGE
    assert f"defines {len(defined) - len(third)} such runs; {len(stored)} were trained" in PAGE
    assert f"The other {len(defined) - len(third) - len(stored)}," in PAGE
    assert not {run["name"] for run in third} & stored
    added = sum(run.settings.get("later") is True for half in runs for run in half)
    assert f"{added} of the runs" in PAGE


def test_the_first_judgement_counted_the_same_records(replayed):
    """It cannot be repeated: the rules have changed. What it was out of can be checked, and what is said of today."""
    total = replayed(HELD).score
    first = {cells[0]: cells[2:] for cells in rows("are better and two are worse:")[1:]}
    results = {cells[0]: cells[3] for cells in rows("## Results")[1:]}
    assert set(first) == set(PROMISES)
    for label, (then, today) in first.items():
        assert today == results[label]
        assert f"of {getattr(total, PROMISES[label]).total};" in then


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


def test_truth_of_a_dimensional_collapse():
    lam = np.tile(np.r_[1.0, np.full(19, 1e-3)], (60, 1))
    lam[:20] = 1.0
    known = truth(made(lam, loss="vicreg", scenario="fault", fault="no_covariance"))
    assert (known.kind, known.real) == ("collapse", 20)


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
