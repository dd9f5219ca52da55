"""The command that makes the STL-10 runs several at once: which runs, which figures, in which order, and failures."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress

import numpy as np
import pytest

from benchmarks import stl10_runs
from benchmarks.packing import pack_all
from benchmarks.stl10_runs import AFTER, PARTS, Work, begin, byol, rescue, small
from stairwise.checks import InputError
from stairwise.files import save_json
from stairwise.paper import harness, trained
from stairwise.paper.harness import stored_names, stored_results
from stairwise.progress import silent
from stairwise.runs.followed import write_followed
from stairwise.training import checkpoint
from stairwise.training.recipe import load_recipe
from tests.paper.test_figures import invented
from tests.training.test_checkpoint import FACTS, TENSORS

PAIR = (small("vicreg"), byol("", "standard"))
SMALL, STANDARD = {"fig2cf", "fig5", "fig7", "coming"}, {"fig3", "fig4", "fig7"}
FIGURES = {  # what each run is for
    "stl10-bt-d50-large": {"table1", "table2", "coming"},
    "stl10-simclr-d50": {"table1", "table2"},
    "stl10-vicreg-d50": {"table1", "table2", "coming"},
    "stl10-vicreg-small": SMALL,
    "stl10-simclr-small-x4": SMALL,
    "stl10-simclr-small-seed1": SMALL - {"coming"},
    "stl10-vicreg-small-seed1": SMALL - {"coming"},
    "stl10-vicreg": STANDARD,
    "stl10-simclr": STANDARD,
    "stl10-byol": {"byol"},
    "stl10-byol-small": {"byol"},
    "stl10-bt-plain-x4": {"fig7"},
}
FAKE = """
import sys, time
about = sys.argv[2:]  # without "stairwise"
with open(LOG, "a") as log:
    log.write("begin " + " ".join(about) + chr(10))
time.sleep(WAIT)
with open(LOG, "a") as log:
    log.write("end " + " ".join(about) + chr(10))
sys.exit(3 if any(word == FAILING for word in about) else 1)
"""


def wanted(figure, monkeypatch):
    """Names of the runs that a figure would read, or train if they were missing."""
    folders = set()

    def note(config, kind, *_):
        folders.update(config.folder(method, kind).name for method in config.chosen())
        return dict.fromkeys(config.chosen())

    module = harness._module(figure.name)
    for place in (trained, module, getattr(module, "table1", module)):
        if hasattr(place, "obtain"):
            monkeypatch.setattr(place, "obtain", note)
    settings = dict(text.split("=") for text in figure.settings) | {"run_seed": figure.seed}
    with suppress(AttributeError):  # there are no runs to go on with
        module.compute(harness._configure(module, settings), silent)
    return folders


def test_every_figure_reads_the_runs_of_its_chain(monkeypatch):
    found = {}
    for part, chains in PARTS.items():
        made = {chain.folder for chain in chains if chain.recipe}
        for chain in chains:
            for figure in chain.figures:
                if chain.recipe:
                    assert wanted(figure, monkeypatch) == {chain.folder}
                    found.setdefault(chain.folder, set()).add(figure.name)
        for figure, needed in AFTER[part].items():
            assert wanted(figure, monkeypatch) <= {chain.folder for chain in needed} <= made
            for name in wanted(figure, monkeypatch):
                found[name].add(figure.name)
    assert found == FIGURES


def test_the_control_of_sharpness_has_the_seeds_that_are_missing(monkeypatch):
    (chain,) = (chain for chains in PARTS.values() for chain in chains if not chain.recipe)
    runs = [wanted(figure, monkeypatch) for figure in chain.figures]
    warm = [{f"cifar10-simclr-standard-warm-seed{seed}"} for seed in (1, 2)]
    plain = {f"cifar10-simclr-standard-plain{seed}" for seed in ("", "-seed1", "-seed2")}
    assert runs == [*warm, plain], "and no run that is stored"


@pytest.mark.parametrize("part", ["tables", "curves"])
def test_studies_are_made_once_as_soon_as_their_runs_have_ended(tmp_path, faked, monkeypatch, part):
    faked("nothing")
    monkeypatch.setattr(Work, "_call", trained_well(Work._call))
    assert Work(tmp_path, dict(os.environ), after=dict(AFTER[part])).make(PARTS[part])
    lines = log_of(tmp_path)
    for figure, needed in AFTER[part].items():
        drawn = [i for i, words in enumerate(lines) if words == ["begin", *figure.command(tmp_path)[3:]]]
        ends = [lines.index(["end", *chain.command(tmp_path)[3:]]) for chain in needed]
        assert len(drawn) == 1
        assert drawn[0] > max(ends)
        figures = [lines.index(["begin", *f.command(tmp_path)[3:]]) for f in needed[-1].figures]
        assert len(needed) > 1 or drawn[0] < min(figures), "it needs the weights, which do not come back"


def test_studies_need_their_own_runs_and_no_others(tmp_path, faked, monkeypatch):
    faked("stl10-simclr-d50")
    monkeypatch.setattr(Work, "_call", trained_well(Work._call))
    assert not Work(tmp_path, dict(os.environ), after=dict(AFTER["tables"])).make(PARTS["tables"])
    drawn = {tuple(words[2:5]) for words in log_of(tmp_path) if words[1] == "reproduce"}
    assert {(name, method) for name, _, method in drawn} == {
        (name, f"methods={method}") for name in ("table1", "coming") for method in ("bt", "vicreg")
    }, "table2 needs the run that failed"


@pytest.mark.parametrize("part", PARTS)
def test_recipes_are_those_of_the_package(part, tmp_path):
    for chain in PARTS[part]:
        if chain.recipe:
            settings = dict(word.split("=") for word in chain.command(tmp_path) if "=" in word)
            recipe = load_recipe(chain.recipe, settings)
            assert (recipe.compile, recipe.seed) == (True, chain.seed)


@pytest.fixture
def faked(tmp_path, monkeypatch):
    """Commands that note when they begin and end; those that have FAILING among their words fail."""

    def fake(failing, wait=0.1):
        program = tmp_path / "fake.py"
        program.write_text(f"LOG, FAILING, WAIT = {str(tmp_path / 'log')!r}, {failing!r}, {wait}\n{FAKE}")
        monkeypatch.setattr(stl10_runs, "STAIRWISE", (sys.executable, str(program), "stairwise"))

    return fake


def log_of(tmp_path):
    return [line.split() for line in (tmp_path / "log").read_text().splitlines()]


def test_figures_are_measured_and_then_stored_one_at_a_time(tmp_path, faked, monkeypatch):
    faked("nothing")
    monkeypatch.setattr(Work, "_call", trained_well(Work._call))
    chains = PAIR
    assert Work(tmp_path, dict(os.environ)).make(chains)
    lines = log_of(tmp_path)
    for chain in chains:
        mine = [words for words in lines if words[0] == "begin" and _chain_of(words) == chain.folder]
        expected = [("train", False)] + [(f.name, stored) for f in chain.figures for stored in (False, True)]
        assert [(_what(words), "--join" in words) for words in mine] == expected
    storing = [words[0] for words in lines if "--store" in words]
    assert storing == ["begin", "end"] * (len(storing) // 2), "never two at once"
    places = {words[words.index("--store") + 1] for words in lines if "--store" in words}
    assert places == {str(tmp_path / "results")}


def trained_well(call):
    """The fake ends with 1, as figures do whose claims fail; a training that ended well ends with 0."""

    def changed(self, name, command):
        status = call(self, name, command)
        return 0 if "train" in command and status == 1 else status

    return changed


def _what(words):
    return "train" if words[1] == "train" else words[2]


def _chain_of(words):
    return "stl10-byol" if any("byol" in word for word in words[1:4]) else "stl10-vicreg-small"


def test_nothing_is_drawn_of_a_run_that_failed_and_others_go_on(tmp_path, faked, monkeypatch):
    faked("stl10-vicreg-small")
    monkeypatch.setattr(Work, "_call", trained_well(Work._call))
    assert [Work(tmp_path, dict(os.environ)).make([chain]) for chain in PAIR] == [False, True]
    assert {_chain_of(words) for words in log_of(tmp_path) if words[1] == "reproduce"} == {"stl10-byol"}
    assert (tmp_path / "times.txt").read_text().count("stl10-vicreg-small ended with 3") == 2, "tried once more"


def test_a_run_that_failed_at_once_is_tried_without_compilation_and_graphs(tmp_path, faked, monkeypatch):
    faked("compile=true")
    monkeypatch.setattr(Work, "_call", trained_well(Work._call))
    assert Work(tmp_path, dict(os.environ)).make(PAIR[1:])
    tried = [set(words) for words in log_of(tmp_path) if words[:2] == ["begin", "train"]]
    assert [{"compile=true"} <= words for words in tried] == [True, False]
    assert {"compile=false", "graph=false"} <= tried[1]
    (folder,) = {words[words.index("--out") + 1] for words in log_of(tmp_path) if words[1] == "train"}
    assert folder == str(tmp_path / "runs" / PAIR[1].folder)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_run_that_failed_on_the_way_goes_on_from_its_checkpoint(tmp_path, faked, monkeypatch, compiled):
    """With the settings with which it was begun, because it would be refused with others."""
    faked("stl10-byol")
    monkeypatch.setattr(Work, "_call", trained_well(Work._call))
    folder = tmp_path / "runs" / PAIR[1].folder
    invented(folder, PAIR[1].recipe, np.ones(3))
    facts = json.loads((folder / "recipe.json").read_text())
    save_json(folder / "recipe.json", facts | {"recipe": facts["recipe"] | {"compile": compiled}})
    checkpoint.save(folder / "checkpoints", 10, FACTS, TENSORS)
    assert not Work(tmp_path, dict(os.environ)).make(PAIR[1:])
    tried = [words for words in log_of(tmp_path) if words[0] == "begin"]
    assert [f"compile={str(compiled).lower()}" in words for words in tried] == [True, True]


def test_a_run_that_diverged_is_not_tried_again(tmp_path, faked, monkeypatch):
    faked("stl10-byol")
    monkeypatch.setattr(Work, "_call", trained_well(Work._call))
    folder = tmp_path / "runs" / PAIR[1].folder
    invented(folder, PAIR[1].recipe, np.ones(3))
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": 5600, "t": 9.0, "seconds": 9.0, "failed": "the loss was not finite"}) + "\n")
    assert not Work(tmp_path, dict(os.environ)).make(PAIR[1:])
    assert len([words for words in log_of(tmp_path) if words[0] == "begin"]) == 1


def test_figures_do_not_hold_up_trainings(tmp_path, faked, monkeypatch):
    """A training begins when another has ended, although figures of the first are still drawn."""
    faked("nothing")
    monkeypatch.setattr(Work, "_call", trained_well(Work._call))
    monkeypatch.setattr(stl10_runs, "AT_ONCE", 1)
    assert Work(tmp_path, dict(os.environ)).make(PAIR)
    begun = [_what(words) for words in log_of(tmp_path) if words[0] == "begin"]
    assert begun.index("train", 1) < begun.index("fig7")


def test_a_figure_that_failed_is_not_stored_and_the_next_is_drawn(tmp_path, faked, monkeypatch):
    faked("fig5")
    monkeypatch.setattr(Work, "_call", trained_well(Work._call))
    assert not Work(tmp_path, dict(os.environ)).make([small("simclr", seed=1)])
    stored = [words for words in log_of(tmp_path) if words[0] == "end" and "--store" in words]
    assert [words[2] for words in stored] == ["fig2cf", "fig7"]
    assert {words[words.index("--store") + 1] for words in stored} == {str(tmp_path / "results" / "seed1")}


@pytest.mark.parametrize("by", ["signal", "time"])
def test_stopping_ends_the_commands(tmp_path, by):
    """A command that is stopped, or whose time is over, ends its trainings, begins nothing more, and packs."""
    program = tmp_path / "fake.py"
    program.write_text(f"LOG, FAILING, WAIT = {str(tmp_path / 'log')!r}, '', 30\n{FAKE}")
    code = (
        "import sys; from benchmarks import stl10_runs; "
        f"stl10_runs.STAIRWISE = (sys.executable, {str(program)!r}, 'stairwise'); "
        "stl10_runs.load = lambda data: None; stl10_runs.main()"
    )
    command = [sys.executable, "-c", code, "curves", "--out", str(tmp_path / "out")]
    command += ["--minutes", "0.2"] if by == "time" else []
    process = subprocess.Popen(command, cwd=stored_results().parents[1], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while time.monotonic() < until and (not (tmp_path / "log").exists() or len(log_of(tmp_path)) < 3):
        time.sleep(0.05)
    if by == "signal":
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 1
    assert [words[0] for words in log_of(tmp_path)] == ["begin"] * 3
    assert (tmp_path / "out" / "times.txt").read_text().count(f"ended with {-signal.SIGTERM}") == 3
    assert (tmp_path / "out" / "packed" / "results.tar.gz").is_file()


def test_a_command_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(stl10_runs, "GRACE", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # from now on it ignores the signal
        work = Work(tmp_path, {}, running={process})
        work.stop()
        assert process.wait(timeout=30) == -signal.SIGKILL


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "20000"])
def test_minutes_that_make_no_sense_are_refused(text, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["stl10_runs", "curves", "--minutes", text])
    with pytest.raises(SystemExit, match="2"):
        stl10_runs.main()
    assert f"must be above 0 and at most 10080, a week; got {text}" in capsys.readouterr().err


def test_results_begin_as_those_that_are_stored(tmp_path):
    (tmp_path / "results.part").mkdir()  # left by a command that was killed
    (tmp_path / "results.part" / "fig5.npz").write_bytes(b"half")
    begin(tmp_path)
    assert stored_names(tmp_path / "results") == stored_names(stored_results())
    (tmp_path / "results" / "fig5.npz").write_bytes(b"new")
    begin(tmp_path)
    assert (tmp_path / "results" / "fig5.npz").read_bytes() == b"new"


def test_runs_that_have_not_ended_are_drawn_and_packed(tmp_path, faked):
    """Beside the results, which a command that is at work goes on writing; nothing is trained."""
    faked("nothing")
    begin(tmp_path)
    begun, not_begun = PAIR
    folder, empty = (tmp_path / "runs" / chain.folder for chain in PAIR)
    for place in (folder / "ntk" / "barlow-0", empty):
        place.mkdir(parents=True)
    invented(folder, begun.recipe, np.ones(3))
    write_followed(folder, 10, 0.1, np.ones((4, 2)), np.ones((4, 3)), {"z": np.ones(2)})
    (folder / "ntk" / "barlow-0" / "coming.npz").write_text("a study")
    (folder / "weights").write_text("large")
    (empty / "recipe.json").write_bytes((folder / "recipe.json").read_bytes())
    (empty / "metrics.jsonl").touch()  # compiling
    (tmp_path / "results" / ".part").write_text("being written")
    assert rescue(tmp_path, PAIR)
    drawn = [words for words in log_of(tmp_path) if words[0] == "begin"]
    assert {words[1] for words in drawn} == {"reproduce"}
    assert sorted({words[2] for words in drawn}) == sorted(figure.name for figure in begun.figures)
    assert all({"unfinished=true", f"runs={tmp_path / 'frozen'}"} <= set(words) for words in drawn)
    assert not (tmp_path / "frozen" / not_begun.folder).exists(), "nothing to draw, and nothing is trained"
    assert {words[words.index("--store") + 1] for words in drawn if "--store" in words} == {str(tmp_path / "rescued")}
    (tmp_path / "rescued" / "fig2cf.npz").write_bytes(b"so far")
    assert (tmp_path / "results" / "fig2cf.npz").read_bytes() != b"so far"
    packed = tmp_path / "packed"
    assert {path.name for path in packed.iterdir()} == {"results.tar.gz", *(f"logs-{i}.tar.gz" for i in range(1, 7))}
    with tarfile.open(packed / "results.tar.gz") as inside:
        names = set(inside.getnames())
    assert {"results/fig2cf.npz", "rescued/fig2cf.npz", "times.txt", "fig2cf.txt"} <= names
    assert not any(".part" in name for name in names)
    logs = {}
    for path in packed.glob("logs-*"):
        with tarfile.open(path) as inside:
            logs |= {name: inside.extractfile(name).read() for name in inside.getnames()}
    files = ("metrics.jsonl", "recipe.json", "ntk/barlow-0/coming.npz", "followed/summary.npz")
    assert {name for name in logs if begun.folder in name} == {f"runs/{begun.folder}/{name}" for name in files}
    assert logs[f"runs/{begun.folder}/metrics.jsonl"] == (folder / "metrics.jsonl").read_bytes()
    assert not list((tmp_path / "frozen").rglob("step-*")), "figures read the summary"
    assert rescue(tmp_path, PAIR), "again, over what it has left"


def test_what_runs_have_followed_is_packed_without_drawing(tmp_path, faked, capsys):
    faked("nothing")
    begin(tmp_path)
    (tmp_path / "results" / "fig5.png").write_bytes(b"drawn again in seconds")
    for chain in PAIR:
        folder = tmp_path / "runs" / chain.folder
        invented(folder, chain.recipe, np.ones(3))
        write_followed(folder, 10, 0.1, np.ones((4, 2)), np.ones((4, 3)), {"z": np.ones(2)})
    broken, whole = (chain.folder for chain in PAIR)
    (tmp_path / "runs" / broken / "followed" / "step-0000000010.npz").write_bytes(b"half")
    pack_all(tmp_path)
    assert f"{broken} cannot be summed up" in capsys.readouterr().err
    names = set()
    for path in (tmp_path / "packed").iterdir():
        with tarfile.open(path) as inside:
            names |= set(inside.getnames())
    assert f"runs/{whole}/followed/summary.npz" in names
    assert {f"runs/{folder}/metrics.jsonl" for folder in (broken, whole)} <= names
    assert "results/fig5.npz" in names
    assert not any(name.endswith(".png") for name in names)
    assert not (tmp_path / "log").exists(), "no command was called"


@pytest.mark.parametrize("damaged_file", ["followed/step-0000000010.npz", "recipe.json"])
def test_a_damaged_run_does_not_cost_the_others(tmp_path, faked, capsys, damaged_file):
    faked("nothing")
    begin(tmp_path)
    for chain in PAIR:
        invented(tmp_path / "runs" / chain.folder, chain.recipe, np.ones(3))
    damaged, other = (chain.folder for chain in PAIR)
    (tmp_path / "runs" / damaged / "followed").mkdir()
    (tmp_path / "runs" / damaged / damaged_file).write_bytes(b"\xff half")
    assert not rescue(tmp_path, PAIR)
    assert f"{damaged} cannot be drawn" in capsys.readouterr().err
    assert {_chain_of(words) for words in log_of(tmp_path) if words[0] == "begin"} == {other}
    names = set()
    for path in (tmp_path / "packed").glob("logs-*"):
        with tarfile.open(path) as inside:
            names |= set(inside.getnames())
    assert {f"runs/{name}/metrics.jsonl" for name in (damaged, other)} <= names


def test_images_are_looked_for_before_anything_begins(tmp_path, monkeypatch):
    monkeypatch.setenv("STAIRWISE_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr(sys, "argv", ["stl10_runs", "controls", "--out", str(tmp_path / "out")])
    with pytest.raises(InputError, match="cifar10 must be fetched first"):
        stl10_runs.main()
    assert not (tmp_path / "out" / "times.txt").exists()
