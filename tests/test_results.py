"""Stored results: what is kept in docs/results shows what its page says."""

from pathlib import Path

import numpy as np
import pytest

from stairwise.experiments import fig2ab
from stairwise.figures.style import style
from stairwise.figures.training import Course, draw_courses
from stairwise.files import load_arrays

RESULTS = Path(__file__).parents[1] / "docs" / "results"
LOSSES = {"barlow_twins": "C", "simclr": "Cov z", "vicreg": "Cov z"}
CLEAN = {"barlow_twins": 18, "simclr": 7, "vicreg": 6}  # as the page says


def clean_steps(spectra):
    """Modes that rise from below a hundredth to half of their plateau while the next one is below a tenth of theirs."""
    count = 0
    for j in range(spectra.shape[1] - 1):
        plateau = np.median(spectra[:, j][spectra[:, j] > 0.2 * spectra[:, j].max()])
        if plateau < 0.1 * np.median(spectra[-20:, 0]):
            break
        at = int(np.argmax(spectra[:, j] > plateau / 2))
        if spectra[: at + 1, j].min() < 0.01 * plateau and spectra[at, j + 1] < 0.1 * spectra[at, j]:
            count += 1
    return count


@pytest.mark.parametrize("loss", LOSSES)
def test_staircases_on_cifar10(loss):
    stored = load_arrays(RESULTS / "staircases.npz")
    assert clean_steps(stored[f"{loss}.spectra"]) == CLEAN[loss]
    assert f" | {CLEAN[loss]} | " in (RESULTS / "staircases.md").read_text(encoding="utf-8")


def test_the_tangent_kernel_foretells_the_first_eight_steps():
    """docs/results/fig2ab.md: CIFAR-10, within 10 %."""
    arrays = load_arrays(RESULTS / "fig2ab.npz")
    measured, predicted = fig2ab.step_times(arrays)
    assert np.isfinite(measured[:8]).all()
    assert np.abs(predicted[:8] / measured[:8] - 1).max() <= 0.1
    assert all(claim.holds for claim in fig2ab.check(arrays))


def test_the_figure_of_the_staircases_can_be_redrawn(tmp_path):
    stored = load_arrays(RESULTS / "staircases.npz")
    courses = [
        Course(loss.replace("_", " "), *(stored[f"{loss}.{k}"] for k in ("times", "loss", "spectra")), of)
        for loss, of in LOSSES.items()
    ]
    with style():
        draw_courses(courses).savefig(tmp_path / "staircases.png")
    assert (tmp_path / "staircases.png").stat().st_size > 50_000
