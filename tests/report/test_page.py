"""The HTML page."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from stairwise.report.page import MOST_POINTS, Line, Page, Panel, Picture
from stairwise.table import Table

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010804000000b51c0c020000000b4944415478da6364f8ff1f0003030200efa2a75b0000000049454e44ae426082"
)


@pytest.fixture
def page(tmp_path):
    (tmp_path / "p.png").write_bytes(PIXEL)
    t = np.linspace(0, 1, 5000)
    lines = [Line("</script><b>", t, t**2, (0, 2)), Line("pred", t, np.where(t > 0.5, np.nan, t), dashed=True)]
    Page(
        "T & <title>",
        "lead",
        [Panel("panel", "t", "y", lines, marks=[0.5, np.inf], log=True)],
        [Table("table", ["a", "b"], [["<1>", "2"]])],
        [Picture(tmp_path / "p.png", 'alt "text"')],
        {"commit": "abc"},
    ).write(tmp_path / "page.html")
    return tmp_path / "page.html"


def test_self_contained_and_escaped(page):
    text = page.read_text()
    head = text[: text.index("<script>")]
    assert not re.search(r'(src|href)="(?!data:)', head)
    assert "T &amp; &lt;title&gt;" in head
    assert "&lt;1&gt;" in head
    assert 'alt="alt &quot;text&quot;"' in head
    assert 'name="viewport"' in head
    assert "prefers-color-scheme: dark" in head


def test_curves_are_embedded(page):
    data = re.search(r"let charts = (.*);\n", page.read_text()).group(1)
    assert "</script>" not in data
    (chart,) = json.loads(data)
    assert chart["marks"] == [{"t": [0.5], "step": None}]
    assert chart["scale"] == "symlog"  # t² is 0 at the first point
    assert len(chart["lines"][0]["x"]) == MOST_POINTS
    assert chart["lines"][0]["name"] == "</script><b>"
    assert chart["lines"][1]["y"][-1] is None  # gaps stay gaps
    assert chart["lines"][0]["light"] != chart["lines"][0]["dark"]


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_draws_in_a_browser(page, tmp_path):
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    command = [
        "chromium",
        *flags.split(),
        "--virtual-time-budget=5000",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        page.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert dom.count('class="scatterlayer') >= 1
    assert len(re.findall(r'class="trace scatter', dom)) == 2
