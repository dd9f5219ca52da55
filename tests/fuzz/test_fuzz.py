"""A few seconds of `make fuzz`, and tests of the fuzz itself: it sees what it must count."""

from functools import partial

import pytest

from tests.fuzz import faults, materials, outcome
from tests.fuzz.calls import CALLS, SLOTS, SOURCES
from tests.fuzz.lines import LINES
from tests.fuzz.outcome import BAD, FINE, PASSED_ON, REFUSED, WARNED, judge, of_call, of_line
from tests.fuzz.worker import run


def found(cases, how, n, seed=0):
    written = []
    run(cases, how, seed, n, written.append)
    return [entry for entry in written if entry.get("kind") in BAD]


def test_calls():
    assert found(SOURCES, of_call, 100) == []


def test_commands(tmp_path):
    materials.make(tmp_path / "files")
    assert found(LINES, partial(of_line, folder=tmp_path / "files"), 25) == []


def test_faults(tmp_path):
    tally = faults.trials(4, 0, tmp_path)
    assert tally["faults"] >= 4
    assert tally["problems"] == []


@pytest.mark.parametrize("template", CALLS)
def test_every_call_works_with_good_arguments(template):
    source = template.format(**{name: good for name, (good, _) in SLOTS.items()})
    assert of_call(source).kind == FINE, of_call(source)


@pytest.mark.parametrize(
    ("source", "kind"),
    [("1 / 0", REFUSED), ("np.array([np.nan])", "nan"), ("{'a': [torch.tensor(np.nan)]}", "nan"), ("3", FINE),
    ("sw.losses.byol(z_a * np.nan, z_b)", PASSED_ON), ("sw.losses.vicreg(z_a * 1e30, z_b)", WARNED),
    ("np.array([1e308]) * 10", "nan"),
     ("iter(lambda: 0, 1) and all(True for _ in iter(lambda: 0, 1))", "hang"), ("sw.Modes([1.0], None)", REFUSED)],
)  # fmt: skip
def test_outcomes_of_calls(source, kind, monkeypatch):
    monkeypatch.setattr(outcome, "SECONDS", 0.2)
    assert of_call(source).kind == kind


@pytest.mark.parametrize(
    ("code", "out", "err", "kind"),
    [
        (0, "loss 0.1", "", FINE),
        (0, "loss nan", "", "nan"),
        (2, "", "note: x\nerror: d must be at least 1", REFUSED),
        (2, "", "error: one\nerror: two", "wordy"),
        (3, "", "unexpected: KeyError", "unexpected"),
        (1, "", "Traceback (most recent call last):\nKeyError", "traceback"),
        (-11, "", "", "crash"),
    ],
)
def test_outcomes_of_commands(code, out, err, kind):
    assert judge(code, out, err).kind == kind
