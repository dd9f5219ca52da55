"""Contrast of everything that is drawn, on light and on dark pages."""

import re
from importlib.resources import files

import matplotlib
import numpy as np
import pytest

from stairwise.report import colors
from stairwise.report.colors import BADGES, ICONS, INK, RUNS, contrast, mode_color
from stairwise.staircase.advice import STATES

CURVE, TEXT = 3.0, 4.5  # least contrast by WCAG 2.1: graphics (1.4.11) and text (1.4.3)
CSS = files("stairwise.report").joinpath("page.html").read_text(encoding="utf-8")


def css(name, scheme):
    light, dark = re.findall(rf"--{name}: (#\w+)", CSS)
    return {"light": light, "dark": dark}[scheme]


@pytest.mark.parametrize("scheme", ["light", "dark"])
class TestContrast:
    @pytest.mark.parametrize("d", [1, 2, 3, 8, 24])
    def test_modes(self, scheme, d):
        assert min(contrast(mode_color(j, d)[scheme], css("paper", scheme)) for j in range(d)) >= CURVE

    def test_runs(self, scheme):
        assert min(contrast(shades[scheme], css("paper", scheme)) for shades in RUNS) >= CURVE
        assert len({shades[scheme] for shades in RUNS}) == len(RUNS)

    def test_text(self, scheme):
        assert INK[scheme] == css("ink", scheme)
        for name in ("ink", "soft"):
            assert contrast(css(name, scheme), css("paper", scheme)) >= TEXT
        assert contrast(css("ink", scheme), css("grid", scheme)) >= TEXT  # the button that is pressed

    @pytest.mark.parametrize("state", STATES)
    def test_badges(self, scheme, state):
        rule = r"body \.badge" if scheme == "dark" else r"background: var\(--light\); color"
        words = re.search(rule + r".*?(#\w{6})", CSS).group(1)
        assert contrast(BADGES[state][scheme], words) >= TEXT
        assert contrast(BADGES[state][scheme], css("paper", scheme)) >= CURVE


def test_contrast_of_known_pairs():
    """Ratios that the guidelines' own examples give."""
    assert contrast("#ffffff", "#777777") == pytest.approx(4.48, abs=0.005)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)


def test_colours_are_those_of_matplotlib():
    x = np.linspace(0, 1, 101)
    ours = np.array([colors._rgb(colors._cividis(v)) for v in x])
    assert np.abs(ours - 255 * matplotlib.colormaps["cividis"](x)[:, :3]).max() < 12


def test_states_differ_without_colour():
    assert set(ICONS) == set(BADGES) == set(STATES)
    assert len(set(ICONS.values())) == len(STATES)
