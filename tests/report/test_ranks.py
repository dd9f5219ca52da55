"""Ranks on the page, and the scores of other libraries."""

import dataclasses

import numpy as np
import pytest

from stairwise.report.ranks import MEASURES, SCORES, rank_bounds, scores_table
from stairwise.runs.record import Record


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("noise", [0.1, 1.0, 3.0])
def test_bounds_hold_for_c_whose_eigenvalues_may_be_negative(name, noise):
    """Of the trace of C alone, which negative eigenvalues lower, the upper bound would be too low."""
    rng = np.random.default_rng(0)
    shared = rng.standard_normal((60, 30)) * np.geomspace(1, 0.01, 30)
    a, b = (shared + noise * rng.standard_normal((60, 30)) for _ in "ab")
    lam = np.linalg.eigvalsh((a.T @ b + b.T @ a) / 120)[::-1]
    z = np.concatenate([a, b])
    mean = z.mean(axis=0)
    known = {"trace": lam.sum(), "variance": ((z - mean) ** 2).sum() / 119, "mean_square": mean @ mean}
    record = Record(step=0, t=0.0, eigenvalues=lam[:6], dimensions=30, **known)
    (low,), (high,) = rank_bounds([record], "eigenvalues")[name]
    assert low < MEASURES[name][0](lam) < high


def test_complete_spectra_have_exact_ranks():
    records = [Record(step=i, t=float(i), covariance=np.array([2.0, 1.0, 0.5])) for i in range(2)]
    for low, high in rank_bounds(records, "covariance").values():
        assert low.tolist() == high.tolist()


def test_every_score_of_a_record_is_in_the_table():
    """At the last record that has it; a row only if there is one."""
    first = Record(step=0, t=0.0, **{name: 1.0 + i for i, name in enumerate(SCORES)})
    last = dataclasses.replace(first, rankme=7.25, lidar=None)
    rows = {row[0]: row[1] for row in scores_table([first, last]).rows}
    assert len(rows) == len(SCORES)
    assert (rows["RankMe of z"], rows["LiDAR of z"]) == ("7.25", "3")
    assert scores_table([Record(step=0, t=0.0)]).rows == []
