"""The numbers that loggers get."""

import warnings

import numpy as np
import pytest
import torch

import stairwise as sw
from stairwise.monitor.loggers import named_numbers
from stairwise.runs.record import Record
from stairwise.theory.spectra import effective_rank, participation_ratio

LAM = 2.0 ** -np.arange(40)
MEASURES = {"effective_rank": effective_rank, "participation_ratio": participation_ratio}


@pytest.mark.parametrize(("spectrum", "prefix"), [("covariance", ""), ("hidden", "hidden_")])
@pytest.mark.parametrize("name", MEASURES)
def test_ranks_are_exact_or_between_bounds(spectrum, prefix, name):
    exact = float(MEASURES[name](LAM))
    complete = named_numbers(Record(step=1, t=1.0, **{spectrum: LAM}))
    assert complete[f"stairwise/{prefix}{name}"] == exact
    assert not [label for label in complete if label.endswith(("_low", "_high"))]
    known = {"dimensions": 40, "hidden_dimensions": 40, "variance": LAM.sum(), "hidden_variance": LAM.sum()}
    leading = named_numbers(Record(step=1, t=1.0, **{spectrum: LAM[:8]}, **known))
    assert f"stairwise/{prefix}{name}" not in leading
    low, high = (leading[f"stairwise/{prefix}{name}_{end}"] for end in ("low", "high"))
    assert low < exact < high
    assert leading["stairwise/dimensions"] == 40


def test_scores_of_other_libraries_and_totals_are_logged():
    scores = {"rankme": 3.5, "hidden_rankme": 9.0, "lidar": 2.5, "std_of_l2_normalized": 0.1}
    totals = {"trace": 1.5, "variance": 2.0, "hidden_variance": 7.0, "dimensions": 40, "wanted": 160}
    numbers = named_numbers(Record(step=1, t=1.0, **scores, **totals))
    assert {name: numbers[f"stairwise/{name}"] for name in scores | totals} == scores | totals


@pytest.mark.parametrize("values", [np.zeros(3), np.array([1.0, 0.0, 0.0])])
def test_spectra_without_variance(values):
    numbers = named_numbers(Record(step=1, t=1.0, covariance=values, dimensions=9, variance=values.sum()))
    assert numbers["stairwise/effective_rank_low"] == numbers["stairwise/effective_rank_high"] == values.any()
    assert "stairwise/alpha_req" not in numbers


@pytest.mark.parametrize("kind", ["log", "add_text"])
def test_a_logger_that_takes_no_text_gets_numbers_where_warnings_are_errors(kind, capsys):
    class Numbers:
        def __init__(self):
            self.rows = []

        def log(self, values):
            if any(isinstance(value, str) for value in values.values()):
                raise TypeError("numbers only")
            self.rows.append(values)

    class Board(Numbers):
        log = None

        def add_scalar(self, name, value, step):
            self.rows.append((name, value, step))

        def add_text(self, name, value, step):
            raise TypeError("numbers only")

    logger = Numbers() if kind == "log" else Board()
    criterion, z = sw.losses.VICReg(), torch.randn(32, 3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sw.SpectrumMonitor().attach(loss=criterion, every=2, log=logger):
            for _ in range(8):
                criterion(z, z)
    steps = {row["stairwise/step"] if kind == "log" else row[2] for row in logger.rows}
    assert steps == {2, 4, 6, 8}
    assert "a logger does not take text" in capsys.readouterr().err
