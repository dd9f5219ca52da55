"""The number of pairs that an honest count of modes needs, as docs/howto/which-batch.md says."""

from pathlib import Path

import pytest

from benchmarks.bench_window import CASES, counted, exact, model, row

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "which-batch.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=["Barlow Twins", "SimCLR"])
def test_rows_on_the_page(case):
    assert f"| {' | '.join(row(*case))} |" in PAGE


@pytest.mark.parametrize("ends", [(0.89, 0.42), (0.9, 0.2)])
def test_a_small_window_misses_the_bar_and_a_large_one_keeps_it(ends):
    """Barlow Twins, d = 50, batch 256: the count above ½ must be within 15 % of the theory."""
    rho, variance = model("barlow_twins", 256, 50, ends)
    how = rho, variance, "barlow_twins", 256
    true = exact(*how)
    assert true[0] == true[1], "what the theory says"
    above, theory, grown = counted(*how, 9216, seed=100)
    assert abs(above / theory - 1) < 0.05
    assert grown == true[2]
    above, theory, grown = counted(*how, 512, seed=100)
    assert above / theory - 1 < -0.15
    assert grown == true[2]
