"""The script that makes the STL-10 runs several at once: what it would do is valid, and complete."""

import os
import shlex
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from stairwise.paper import harness, trained
from stairwise.progress import silent
from stairwise.training.recipe import load_recipe
from tests.paper.test_results import RESULTS

SCRIPT = RESULTS.parents[1] / "benchmarks" / "stl10_on_gpu.sh"
pytestmark = pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
PARTS = {"d50": 3, "vicreg-small": 2, "vicreg": 2, "simclr": 1, "seed1": 1}  # and their numbers of runs


def told(part, out):
    """The commands of a part, as lists of words, and the exit status of the script."""
    environment = os.environ | {"STAIRWISE": "echo stairwise"}
    command = ["sh", str(SCRIPT), part, str(out)]
    done = subprocess.run(command, cwd=SCRIPT.parents[1], env=environment, capture_output=True, check=False, timeout=60)
    lines = [line for file in sorted(Path(out).glob("*.txt")) for line in file.read_text().splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("stairwise ")], done.returncode


def options_of(words, flag):
    return [words[i + 1] for i, word in enumerate(words) if word == flag]


def wanted(name, settings, monkeypatch):
    """Folders of the runs that a figure would read, or train if they were missing."""
    folders = set()

    def note(config, kind, *_):
        folders.update(str(config.folder(method, kind)) for method in config.chosen())
        return dict.fromkeys(config.chosen())

    module = harness._module(name)
    for place in (trained, module):
        if hasattr(place, "obtain"):
            monkeypatch.setattr(place, "obtain", note)
    if hasattr(module, "table1"):  # whose function Table 2 calls
        monkeypatch.setattr(module.table1, "obtain", note)
    with suppress(AttributeError):  # there are no runs to go on with
        module.compute(harness._configure(module, settings), silent)
    return folders


@pytest.mark.parametrize("part", PARTS)
def test_every_figure_finds_its_runs(part, tmp_path, monkeypatch):
    commands, status = told(part, tmp_path)
    assert status == 0
    runs = {}
    for words in commands:
        settings = dict(text.split("=", 1) for text in options_of(words, "--set"))
        if words[1] == "train":
            assert settings.pop("compile") == "true"
            runs[options_of(words, "--out")[0]] = load_recipe(words[2], settings)
    assert len(runs) == PARTS[part]
    figures = [words for words in commands if words[1] == "reproduce"]
    assert len(figures) >= 3
    used = set()
    for words in figures:
        settings = dict(text.split("=", 1) for text in options_of(words, "--set"))
        asked = wanted(words[2], settings, monkeypatch)
        assert asked
        assert asked <= set(runs) or words[2] == "sharpness", "its short runs are trained by itself"
        used |= asked
        seeds = {recipe.seed for recipe in runs.values()}
        assert {int(settings.get("run_seed", 0))} == seeds or words[2] == "sharpness"
    assert set(runs) <= used, "no run is made in vain"


def test_an_unknown_part_is_refused(tmp_path):
    assert told("fig5", tmp_path) == ([], 2)
