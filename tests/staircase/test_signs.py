"""Signs of health: a loss that sits at a telling value."""

import numpy as np
import pytest

from stairwise.staircase.signs import telling_value
from tests.staircase.made import signs


@pytest.mark.parametrize(
    ("loss", "batch", "d", "name"),
    [
        (np.log(64), 64, 8, "ln 64"),
        (np.log(127), 64, 8, "ln(2·64 − 1)"),
        (np.log(4096), 64, 8, "ln 4096"),
        (np.log(65536), np.nan, 8, "ln 65536"),
        (12.0, np.nan, 12, "d = 12"),
        (11.0, np.nan, 12, "d − 1"),
        (25.0, np.nan, 12, "25"),
        (24.0, np.nan, 12, None),
        (np.nan, 64, 12, None),
        (0.0, 64, 1, None),
    ],
)
def test_telling_values(loss, batch, d, name):
    found = telling_value(signs(np.ones((10, d)), loss=loss, batch=batch), d)
    assert (found and found[0]) == name


def test_a_loss_that_passes_a_telling_value_does_not_sit_there():
    lam = np.ones((11, 8))
    assert telling_value(signs(lam, loss=np.linspace(30, 20, 11)), 8) is None
    assert telling_value(signs(lam[:4], loss=25.0), 8) is None
