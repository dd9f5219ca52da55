"""The command line as a user sees it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stairwise.commands import embed
from stairwise.kernel.estimator import KernelSSL
from tests.command_lines import alone, stairwise


def features(folder, n=50, m=6, name="ab"):
    rng = np.random.default_rng(0)
    base = rng.standard_normal((n, m))
    for view in name:
        np.save(folder / f"x_{view}.npy", base + 0.1 * rng.standard_normal((n, m)))


def test_demo(tmp_path):
    done = alone("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "When each dimension is learned" in done.stdout
    assert (tmp_path / "demo" / "report.html").stat().st_size > 1_000_000
    assert (tmp_path / "demo" / "fig1ab" / "figure.png").exists()


def test_predict_json(tmp_path):
    features(tmp_path)
    done = stairwise("predict", "x_a.npy", "x_b.npy", "-d", "3", "--alpha", "1e-4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["pairs"] == 50
    assert len(found["gamma"]) == 3
    assert found["lr_bound"] == pytest.approx(1 / (4 * found["gamma"][0]))
    done = stairwise("predict", "x_a.npy", "x_b.npy", "-d", "3", "--optimizer", "muon", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    muon = json.loads(done.stdout)
    assert muon["lr_bound"] is None
    assert muon["step_times"]["median"][0] == pytest.approx((2 * found["gamma"][0]) ** -0.5, rel=0.02)


def test_predict_text(tmp_path):
    done = stairwise("predict", "photos", "--n", "60", "-d", "4", "--lr", "5e-5", "--out", "p.pdf", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step number" in done.stdout
    assert "█" in done.stdout
    assert (tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")


def test_predict_a_small_folder(tmp_path):
    """No prefix, no n, no crop, no d: all are found; an unreadable file is one note; --out makes its folder."""
    (tmp_path / "mine").mkdir()
    rng = np.random.default_rng(0)
    for i in range(5):
        Image.fromarray(rng.integers(0, 255, (30, 40, 3), np.uint8)).save(tmp_path / "mine" / f"{i}.png")
    (tmp_path / "mine" / "bad.png").write_bytes(b"")
    done = stairwise("predict", "mine", "--out", "new/p.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "5 pairs, 1,200 features, linear model" in " ".join(done.stdout.split())
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("note: 1 of 6 images skipped, the first because mine/bad.png cannot be read")
    assert (tmp_path / "new" / "p.png").is_file()
    assert "linear model" in " ".join(stairwise("predict", "--help", cwd=tmp_path).stdout.split("Options")[0].split())
    assert "linear" in stairwise("--help", cwd=tmp_path).stdout


def test_predict_of_images_smaller_than_the_papers_crop(tmp_path):
    done = stairwise("predict", "digits", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["pairs"], found["features"], found["d"], found["model"]) == (500, 25, 10, "linear")


def test_out_is_checked_before_any_work(tmp_path):
    """Two inputs are wrong; the output is named, because it was looked at first."""
    (tmp_path / "file").write_text("in the way")
    done = stairwise("predict", "no_such_data", "--out", "file/p.png", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --out must lie in a folder")


def test_embed(tmp_path):
    features(tmp_path)
    done = stairwise("embed", "x_a.npy", "x_b.npy", "-d", "3", "--kernel", "ntk", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = ["figure.png", "model.npz", "spectrum.json", "z_a.npy", "z_b.npy"]
    assert [Path(path).name for path in found["files"]] == names
    z_a, z_b = (np.load(tmp_path / "embedding" / f"z_{view}.npy") for view in "ab")
    np.testing.assert_allclose((z_a.T @ z_b + z_b.T @ z_a) / 100, np.eye(3), atol=1e-8)
    assert done.stderr.startswith("exact: K̃ of 100 points fits into")
    many = ("--method", "nystroem", "--features", "50")
    text = stairwise("embed", "photos", "--n", "60", "-d", "4", *many, "--out", "e", cwd=tmp_path)
    assert "step at t" in text.stdout
    assert text.stderr.startswith("nystroem: 50 landmarks stand for 120 points (approximate); takes about")
    assert np.load(tmp_path / "e" / "z_b.npy").shape == (60, 4)


@pytest.mark.parametrize("kernel", ["ntk", "rbf,laplace"])
def test_embed_evaluates_an_exact_kernel_once(tmp_path, monkeypatch, kernel):
    """The fit has found the embeddings of its points."""
    features(tmp_path)
    monkeypatch.setattr(KernelSSL, "transform", None)
    embed.embed(str(tmp_path / "x_a.npy"), str(tmp_path / "x_b.npy"), d=3, kernel=kernel, folder=tmp_path / "e")
    monkeypatch.undo()
    est = KernelSSL.load(tmp_path / "e" / "model.npz")
    for view in "ab":
        z = est.transform(np.load(tmp_path / f"x_{view}.npy"), view=view)
        np.testing.assert_allclose(np.load(tmp_path / "e" / f"z_{view}.npy"), z, atol=1e-8)


@pytest.mark.parametrize("rank", [0, 1])
def test_embed_shows_one_bar(monkeypatch, rank):
    shown = []
    monkeypatch.setattr(embed, "bar", lambda name: nullcontext(lambda *report: shown.append(report)))
    monkeypatch.setattr("stairwise.kernel.processes.place", lambda: (rank, 2))
    with embed._progress() as progress:
        progress(1, 2, "half")
    assert shown == ([] if rank else [(1, 2, "half")])


def test_reproduce_and_read_back(tmp_path):
    first = stairwise("reproduce", "fig8", "--json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)[0]["experiment"] == "fig8"
    assert "1 figure made in" in first.stderr  # stdout is JSON
    again = stairwise("reproduce", "fig8", cwd=tmp_path)
    assert "read back" in again.stdout
    assert again.stdout.splitlines()[-1].startswith("1 figure made in")
    assert again.stdout.splitlines()[-1].endswith("checks held")
    assert "fig1ab" in stairwise("reproduce", "--list", cwd=tmp_path).stdout


def test_reproduce_from_stored_smoke_and_store(tmp_path):
    kept = stairwise("reproduce", "fig8", "--store", "kept", cwd=tmp_path)
    assert kept.returncode == 0, kept.stderr
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["fig8.json", "fig8.npz", "fig8.png"]
    drawn = stairwise("reproduce", "all", "--from-stored", "--stored", "kept", "--json", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert [one["experiment"] for one in json.loads(drawn.stdout)] == ["fig8"]
    assert "left out: fig1 (not stored), fig1ab (not stored)" in drawn.stderr
    assert (tmp_path / "results" / "fig8,stored" / "report.html").is_file()
    (tmp_path / "moved").mkdir()
    (tmp_path / "kept").rename(tmp_path / "moved" / "cifar10")  # results with other data, if there are no others
    found = stairwise("reproduce", "fig8", "--from-stored", "--stored", "moved", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    (tmp_path / "moved" / "cifar10").rename(tmp_path / "kept")
    tried = stairwise("reproduce", "fig1cd", "--smoke", cwd=tmp_path)
    assert tried.returncode == 0, tried.stderr
    assert "not judged" in tried.stderr
    for line in (
        "fig9 --from-stored --stored kept",
        "fig8 --from-stored --stored kept --set seed=1",
        "fig8 --from-stored --smoke",
        "fig8 --stored kept",
        "fig8 --smoke --store kept",
    ):
        done = stairwise("reproduce", *line.split(), cwd=tmp_path)
        assert done.returncode == 2, line
        assert len(done.stderr.strip().splitlines()) <= 3, done.stderr


def test_data_list_and_check(tmp_path):
    assert "photos" in stairwise("data", "list", cwd=tmp_path).stdout
    listed = json.loads(stairwise("data", "list", "--json", cwd=tmp_path).stdout)
    assert {entry["name"] for entry in listed} == {"photos", "digits", "cifar10", "stl10", "stl10-full"}
    (tmp_path / "data" / "cifar10").mkdir(parents=True)
    (tmp_path / "data" / "cifar10" / "test_batch.bin").write_bytes(b"damaged")
    done = stairwise("data", "check", cwd=tmp_path)
    assert done.returncode == 2
    assert "test_batch.bin has 7 bytes" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        *("", "demo", "predict", "embed", "reproduce", "data list", "data get", "data check"),
        *("train", "report", "watch", "spectrum", "ntk"),
    ],
)
def test_help_has_an_example(tmp_path, command):
    done = stairwise(*command.split(), "--help", cwd=tmp_path)
    assert done.returncode == 0
    if command:
        assert f"stairwise {command}" in done.stdout.split("Options")[0].split("Usage:")[1].split("\n", 1)[1]


def bad_files(folder):
    features(folder)
    np.save(folder / "other.npy", np.zeros((50, 7)))
    np.save(folder / "empty.npy", np.zeros((0, 6)))
    np.save(folder / "flat.npy", np.zeros(6))
    np.save(folder / "objects.npy", np.array([[object()]]), allow_pickle=True)
    x = np.load(folder / "x_a.npy")
    x[3, 2] = np.nan
    np.save(folder / "nan.npy", x)
    (folder / "cut.npy").write_bytes((folder / "x_a.npy").read_bytes()[:200])
    (folder / "file").write_text("in the way")
    np.save(folder / "complex.npy", x + 1j)
    np.save(folder / "huge.npy", 1e200 * np.load(folder / "x_a.npy"))
    (folder / "latin.toml").write_bytes('label = "Größe"'.encode("latin-1"))
    (folder / "nets.py").write_text("def boom(): raise ZeroDivisionError('no net')\ndef leave(): raise SystemExit(0)\n")
    (folder / "leaves.py").write_text("raise SystemExit(0)\n")
    for name, text in {"null": "null", "list": "[]", "deep": "[" * 100_000}.items():
        (folder / name).mkdir()
        (folder / name / "recipe.json").write_text(text)
        (folder / name / "metrics.jsonl").write_text('{"step": 1, "t": 1, "covariance": [1, 0.5]}\n')


BAD = {
    "predict x_a.npy nan.npy": "x_b[3, 2] must be finite (got nan)",
    "predict x_a.npy other.npy": "x_a and x_b must have the same shape (got (50, 6) and (50, 7))",
    "predict empty.npy empty.npy": "x_a must not be empty",
    "predict flat.npy flat.npy": "flat.npy must be a 2-D .npy array",
    "predict objects.npy objects.npy": "objects.npy must be a whole .npy file without objects",
    "predict x_a.npy cut.npy": "cut.npy must be a whole .npy file",
    "predict x_a.npy none.npy": "none.npy must exist",
    "predict x_a.npy": "x_b.npy is needed",
    "predict x_a.npy x_b.npy -d 7": "d must be at most 6",
    "predict nothing": "dataset is unknown (got 'nothing'): known: photos, digits, cifar10, stl10",
    "predict photos --n 0": "n must be a whole number of at least 1 (got 0)",
    "predict photos --alpha 0": "alpha must be greater than 0",
    "predict photos --alpha 1": "alpha must start with all eigenvalues of C below 1",
    "predict photos --seed -1": "seed must be a nonnegative whole number (got -1)",
    "predict photos --lr 0.01": "lr must be below 0.000261: descent diverges above it",
    "predict [/red]": "dataset is unknown (got '[/red]')",
    "predict photos --lr -1": "lr must be greater than 0",
    "predict photos --pixels raw": "pixels is unknown",
    "predict cifar10": "cifar10 must be fetched first",
    "predict images:nowhere": "images:FOLDER must name a folder",
    "predict photos --out p.txt": "--out must end in .png",
    "embed photos --kernel rfb": "kernel is unknown (got 'rfb'): did you mean 'rbf'?",
    "embed x_a.npy x_b.npy -d 200": "n_components must be at most 100",
    "embed x_a.npy nan.npy": "X_b[3, 2] must be finite",
    "embed x_a.npy other.npy": "X and X_b must have the same number of features for one kernel",
    "embed x_a.npy x_b.npy --alpha 1e9": "alpha must start with all eigenvalues of C below 1",
    "reproduce fig77": "figure is unknown",
    "reproduce fig1ab --set n": "--set must be KEY=VALUE",
    "reproduce fig1ab --set q=1": "setting is unknown",
    "reproduce all --data photos": "--data and --set belong to one figure",
    "reproduce fig8 --out file": "--out must lie in a folder (got file, but",
    "demo --out file": "--out must lie in a folder (got file, but",
    "embed photos --out file/deeper": "--out must lie in a folder (got file/deeper, but",
    "predict complex.npy complex.npy": "x_a must hold real numbers (got complex numbers",
    "predict huge.npy huge.npy": "must be at most 1e+24 in magnitude",
    "predict x_a.npy x_b.npy --lr 1e300 --optimizer muon": "lr must lie between 1e-100 and 1e100",
    "embed complex.npy complex.npy": "X must hold real numbers (got Complex data not supported)",
    "train latin.toml": "latin.toml must be UTF-8 text",
    "train photos-bt --set loss_options.lambda_=nan": "lambda_ must be finite",
    "train photos-bt --set epochs=1e300 --set steps=0": "epochs must be at most 1e+08",
    "train photos-bt --set lr=1e300": "lr must be at most 1e+38",
    "spectrum --model : --checkpoints *.npy --data photos": "encoder must be package.module:factory (got ':')",
    "spectrum --model nets:boom --checkpoints *.npy --data photos": "must not fail (got ZeroDivisionError: no net)",
    "spectrum --model nets:leave --checkpoints *.npy --data photos": "must not fail (got SystemExit: 0)",
    "spectrum --model leaves:x --checkpoints *.npy --data photos": "module leaves must not fail when it is imported",
    "report null": "recipe.json must hold an object, as `stairwise train` writes it (got null)",
    "report list": "recipe.json must hold an object, as `stairwise train` writes it (got a list)",
    "report deep": "recipe.json must be valid JSON",
    "ntk null": "recipe.json must hold an object",
    "data get mnist": "dataset is unknown (got 'mnist'): known: cifar10, stl10",
    "data get stl10 --from npm": "--from for stl10 is unknown",
}


@pytest.fixture(scope="module")
def bad_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    bad_files(folder)
    return folder


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line(bad_folder, line):
    done = stairwise(*line.split(), cwd=bad_folder)
    assert done.returncode == 2
    assert BAD[line] in done.stderr
    errors = [
        text for text in done.stderr.splitlines() if not text.startswith("exact: ")
    ]  # `embed` names its method first
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["watch", "report", "ntk"])
def test_an_empty_run_is_not_the_current_folder(bad_folder, command):
    done = stairwise(command, "", cwd=bad_folder / "null")
    assert done.returncode == 2
    assert "must be the folder of a run (got '')" in done.stderr


BROKEN = """
import sys
import stairwise.commands.predict
import stairwise.data.pairs
def broken(*_, **__): raise {error}
stairwise.data.pairs.read_pairs = broken
sys.argv = ["stairwise", "predict", *{options}]
from stairwise.cli import main
main()
"""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        ("KeyError('x')", 3, "unexpected: KeyError: 'x'; please report this; --debug shows where"),
        ("ValueError('a\\nb')", 3, "unexpected: ValueError: a b; please report this; --debug shows where"),
        ("RecursionError", 3, "unexpected: RecursionError; please report this; --debug shows where"),
        ("AssertionError('[/red]')", 3, "unexpected: AssertionError: [/red]; please report this; --debug shows where"),
        ("MemoryError('1 TB')", 2, "error: not enough memory: 1 TB: use fewer pairs or features, a smaller batch or"),
        ("PermissionError(13, 'Permission denied', 'here')", 2, "error: here: permission denied: check the path and"),
        ("OSError(28, 'No space left on device', 'here')", 2, "error: here: no space left on device: free space or"),
    ],
)
def test_any_exception_is_one_line(tmp_path, error, code, words):
    program = BROKEN.format(error=error, options=[])
    env = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == code
    assert done.stderr.startswith(words)
    assert len(done.stderr.splitlines()) == 1
    if code == 3:
        program = BROKEN.format(error=error, options=["--debug"])
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=env)
        assert "Traceback" in done.stderr


def test_output_that_nobody_reads_and_terminals_without_unicode(tmp_path):
    program = f"{sys.executable} -m stairwise data list --json | true"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    ascii_only = stairwise("data", "list", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "")


def test_debug_shows_the_traceback(tmp_path):
    done = alone("predict", "nothing", "--debug", cwd=tmp_path)
    assert "Traceback" in done.stderr


def test_full_disk(tmp_path):
    """Every write fails with ENOSPC on a file system of a few pages."""
    code = (
        "import errno, pathlib, sys\n"
        "def full(*a, **k): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "pathlib.Path.replace = full\n"
        "sys.argv = ['stairwise', 'reproduce', 'fig8']\n"
        "from stairwise.cli import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "arrays.npz: no space left on device" in done.stderr
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_ctrl_c(tmp_path):
    arguments = ["stairwise", "reproduce", "fig1ab", "--set", "lr=1e-7"]  # millions of steps
    code = (  # imports first: Python cannot be interrupted cleanly in the middle of torch's
        "import sys, stairwise.paper.trained, stairwise.paper.fig1ab; from stairwise.cli import main;"
        f"sys.argv = {arguments}; print('ready', flush=True); main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
