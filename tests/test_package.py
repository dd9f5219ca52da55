"""What is promised about the package as a whole."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stairwise as sw
from stairwise import provenance

ROOT = Path(__file__).parent.parent


def test_import_is_light():
    heavy = "('torch', 'matplotlib', 'sklearn', 'plotly', 'scipy')"
    code = f"import sys, stairwise; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_theory_needs_no_torch():
    code = (
        "import sys, stairwise as sw; corr = sw.Correlation.from_matrix([2.0, 1.0]);"
        "sw.closed_form(sw.gaussian_init(1, 2, 1e-3, 0), corr, [1.0]); sw.gradient_flow([[0.1, 0.1]], corr, [1.0]);"
        "print([m for m in ('torch', 'matplotlib', 'sklearn') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_reading_a_run_needs_no_torch(tmp_path):
    """`import stairwise.staircase` and `stairwise report` of a log that somebody else has written."""
    lines = [{"step": i, "t": float(i), "covariance": [1.0 + i, 0.1]} for i in range(1, 20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code = (
        "import sys, stairwise.staircase; from stairwise.cli import app;"
        f"app(['report', {str(tmp_path)!r}], standalone_mode=False); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert (tmp_path / "report.html").is_file()


def test_help_loads_little():
    code = "import sys, stairwise.cli; print([m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", sw.__all__)
def test_every_public_name_is_there(name):
    thing = getattr(sw, name)
    assert thing.__doc__
    assert name in dir(sw)


def test_unknown_name():
    with pytest.raises(AttributeError, match="has no attribute 'Mode'"):
        _ = sw.Mode


def test_version_is_stated_once_everywhere():
    assert f"version: {sw.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {sw.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_notation_names_exist():
    """Every code name in docs/notation.md can be found in the package."""
    text = (ROOT / "docs" / "notation.md").read_text()
    source = "\n".join(path.read_text() for path in (ROOT / "stairwise").rglob("*.py"))
    names = re.findall(r"\| `([\w.]+)", text)
    assert len(names) > 15
    missing = [name for name in names if not re.search(rf"\b{name.split('.')[-1]}\b", source)]
    assert not missing


def test_origin_outside_of_a_git_checkout(tmp_path, monkeypatch):
    """The commit is None, and a digest names the code instead."""
    digest = provenance.code_digest()
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    origin = provenance.provenance()
    assert origin["commit"] is None
    assert origin["code"] == digest
    assert json.loads(json.dumps(origin)) == origin
