"""Records, the log and the folder of a run."""

import json

import numpy as np
import pytest

from stairwise.losses import MODULES
from stairwise.runs.folder import RunFolder, discard, read_picture
from stairwise.runs.log import read_log
from stairwise.runs.reader import Run, consistent
from stairwise.runs.record import SPECTRA, Record, spectrum_of_loss

FULL = Record(
    step=3,
    t=0.25,
    seconds=1.5,
    loss=1 / 3,
    samples=64,
    covariance=np.array([2.0, 1 / 3]),
    eigenvalues=np.array([1.0, -0.5]),
    skipped=1,
    first_skipped=2,
    checkpoint="a.pt",
    extra={"knn": 0.75},
)


def test_a_record_survives_its_line():
    again = Record.from_json(json.loads(json.dumps(FULL.as_json())))
    assert again.as_json() == FULL.as_json()
    assert (again.step, again.samples, again.skipped) == (3, 64, 1)
    assert again.loss == 0.3333333
    assert again.covariance == pytest.approx(FULL.covariance, rel=1e-6)
    assert again.hidden is None
    assert again.value("knn") == again.extra["knn"] == 0.75
    assert again.value("logistic") is None


def test_lines_of_version_0_1_read():
    line = {"step": 10, "t": 0.5, "epoch": 0.1, "loss": 3.0, "gradient": 1.0, "lr": 0.05, "knn": 0.3, "samples": 512}
    line |= {"eigenvalues": [1.0, 0.5], "covariance": [1.0, 0.5], "held_hidden": [0.1], "views_per_second": 9.0}
    record = Record.from_json(line)
    assert record.as_json() | {"skipped": 0, "first_skipped": 0} == line | {"skipped": 0, "first_skipped": 0}
    assert record.held_hidden.tolist() == [0.1]


@pytest.mark.parametrize("line", [3, [], {}, {"step": 1}, {"t": 1.0}, {"step": "1", "t": 1}, {"step": True, "t": 1}])
def test_what_is_no_record(line):
    with pytest.raises(ValueError, match="step and t"):
        Record.from_json(line)


def test_one_wild_line_costs_one_record(tmp_path):
    good = [{"step": i, "t": i, "covariance": [1.0, 0.5]} for i in range(1, 5)]
    wild = [good[0] | {"covariance": [10**400, 1]}, good[0] | {"covariance": [[1, 2], [1, 2]]}]
    wild.append({"step": 9, "t": 9, "covariance": [1, 2], "samples": None, "checkpoint": None})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, good + wild)))
    records, bad = read_log(tmp_path / "metrics.jsonl")
    assert bad == 1
    assert [record.step for record in consistent(records, "covariance")] == [1, 2, 3, 4, 9]
    assert (records[-1].samples, records[-1].checkpoint) == (None, None)


def test_spectra_that_are_not_finite():
    record = Record.from_json({"step": 1, "t": 1, "covariance": [1.0, None], "hidden": "x", "loss": None})
    assert record.covariance is not None
    assert record.spectrum("covariance") is None
    assert record.hidden is None
    assert record.loss is None


def test_consistent_records():
    """One wild time, another length or a value that is not finite cost one record each."""
    records = [Record(step=i, t=float(i), covariance=np.array([1.0, 0.1])) for i in range(10)]
    records[3] = Record(step=3, t=1e9, covariance=np.array([1.0, 0.1]))
    records[5] = Record(step=5, t=5.0, covariance=np.array([1.0]))
    records[7] = Record(step=7, t=7.0, covariance=np.array([1.0, np.nan]))
    assert [record.step for record in consistent(records, "covariance")] == [0, 1, 2, 4, 6, 8, 9]
    assert consistent(records, "hidden") == []


def test_which_spectrum_a_loss_follows():
    """C for losses that are functions of it, which `losses` and `runs` must agree about."""
    followed = {name: spectrum_of_loss(name, {"batch_norm": False}) for name in MODULES}
    assert {name for name, spectrum in followed.items() if spectrum == "eigenvalues"} == {
        "barlow_twins", "sharpened", "smoothed", "fourth_power", "hinged",
    }  # fmt: skip
    assert spectrum_of_loss("barlow_twins") == "covariance"
    assert set(followed.values()) <= set(SPECTRA)


def test_folder(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.size == 0
    assert not list(tmp_path.iterdir())  # nothing before the first record
    folder.write(Record(step=1, t=0.1, leading=np.ones((2, 5, 2))))
    folder.close()
    assert folder.size == (tmp_path / "metrics.jsonl").stat().st_size
    assert read_picture(tmp_path).shape == (2, 5, 2)
    (tmp_path / "embeddings.json").write_text("{")
    assert read_picture(tmp_path) is None
    (tmp_path / "mine.txt").touch()
    (tmp_path / "checkpoints").mkdir()
    discard(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_log_of_somebody_else(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "t": 1, "covariance": [1, 0.5], "mine": "x"}\n')
    run = Run(str(tmp_path))
    assert run.series("covariance").tolist() == [[1.0, 0.5]]
    assert run.times.tolist() == [1.0]
    assert run.followed == "covariance"
    assert run.records[0].extra == {"mine": "x"}
    assert read_log(tmp_path / "metrics.jsonl")[1] == 0


def leading(step, k, d=10, **more):
    """A record with k of d eigenvalues d, d − 1, …, 1."""
    every = np.arange(d, 0, -1.0)
    known = {"dimensions": d, "variance": every.sum(), "trace": every.sum() / 2} if k < d else {}
    return Record(step=step, t=float(step), covariance=every[:k], eigenvalues=every[:k] / 2, **(known | more))


def test_a_record_of_leading_eigenvalues_survives_its_line():
    record = leading(3, 4, hidden=np.ones(2), hidden_dimensions=7, hidden_variance=2.5, wanted=40, samples=12)
    record = Record.from_json(json.loads(json.dumps(record.as_json())))
    assert [record.size(name) for name in ("covariance", "eigenvalues", "hidden", "normalized")] == [10, 10, 7, 0]
    assert [record.total(name) for name in ("covariance", "eigenvalues", "hidden")] == [55.0, 27.5, 2.5]
    assert np.isnan(record.total("normalized"))
    assert (record.wanted, record.samples) == (40, 12)


def test_the_total_of_a_complete_spectrum_is_its_sum():
    assert FULL.size("eigenvalues") == 2
    assert FULL.total("eigenvalues") == 0.5
    assert leading(0, 10, dimensions=10, variance=99.0).total("covariance") == 55.0


def test_records_of_different_numbers_of_eigenvalues_are_cut_to_the_fewest():
    """A run that was continued with other settings, or whose first records were complete."""
    made = [leading(0, 10), leading(1, 6), leading(2, 4), leading(3, 6)]
    kept = consistent(made, "covariance")
    assert [record.covariance.tolist() for record in kept] == [[10, 9, 8, 7]] * 4
    assert [(record.size("covariance"), record.total("covariance")) for record in kept] == [(10, 55.0)] * 4
    assert kept[1].eigenvalues is made[1].eigenvalues


def test_records_of_other_dimensions_are_left_out():
    made = [leading(0, 6), leading(1, 6), leading(2, 6, d=12), leading(3, 6)]
    assert [record.step for record in consistent(made, "covariance")] == [0, 1, 3]


def test_few_pairs_do_not_cut_the_others():
    made = [leading(0, 6), leading(1, 2, wanted=40), leading(2, 8, wanted=40), leading(3, 6)]
    kept = consistent(made, "covariance")
    assert [(record.step, len(record.covariance)) for record in kept] == [(0, 6), (2, 6), (3, 6)]
    alone = consistent(made[1:3], "covariance")
    assert [len(record.covariance) for record in alone] == [2, 2]


def test_series_of_leading_eigenvalues(tmp_path):
    folder = RunFolder(tmp_path)
    for record in (leading(0, 10), leading(1, 6), leading(2, 4)):
        folder.write(record)
    folder.close()
    run = Run(tmp_path)
    assert run.series("covariance").shape == (3, 4)
    assert run.totals("covariance").tolist() == [55.0] * 3
    assert run.totals("eigenvalues").tolist() == [27.5] * 3
    assert run.dimensions("covariance") == 10
