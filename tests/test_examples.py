"""Examples run as their users would run them."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest

from stairwise.report.run_page import run_page
from stairwise.runs.log import read_log

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"


def assert_every_fifth_step(records, steps):
    """But where the background is slow: then the pairs go into the next record, and none is lost."""
    seen = [r.step for r in records]
    assert seen == [step for step in range(5, steps + 1, 5) if step in set(seen)]
    assert len(seen) > steps / 10
    ends = [0, *seen]
    assert all(r.samples == 256 * (r.step - before) for r, before in zip(records, ends, strict=False))
    assert all(abs(r.t - 0.003 * r.step) < 1e-6 for r in records)


def test_plain_torch(tmp_path):
    """One added line: records with spectra, time that adds up the learning rate, a first step seen."""
    command = [sys.executable, EXAMPLES / "plain_torch.py", "--steps", "600", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    records, bad = read_log(tmp_path / "metrics.jsonl")
    assert bad == 0
    assert_every_fifth_step(records, 600)
    assert records[0].covariance[0] < 1e-4
    assert records[-1].covariance[0] > 1
    assert run_page(tmp_path).advice.learned == 1


def test_lightning(tmp_path):
    """One added line in a LightningModule's script."""
    pytest.importorskip("lightning")
    command = [sys.executable, EXAMPLES / "lightning_module.py", "--steps", "200", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    records, bad = read_log(tmp_path / "metrics.jsonl")
    assert bad == 0
    assert_every_fifth_step(records, 200)
    assert records[0].eigenvalues[0] < 0.05
    assert records[-1].eigenvalues[0] > 0.8
    assert len(records[0].hidden) == 256


def test_a_folder_is_embedded_as_if_it_had_not_stopped(tmp_path, monkeypatch):
    from PIL import Image

    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i in range(50):
        scene = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(scene).resize((20, 20), Image.Resampling.BICUBIC).save(tmp_path / "images" / f"{i:02}.png")
    sizes = ("--dimension", "3", "--landmarks", "20", "--size", "16", "--crop", "12", "--batch", "20")
    for out, most in (("whole", 50), ("stopped", 20), ("stopped", 50)):
        options = [str(tmp_path / "images"), "--out", str(tmp_path / out), "--most", str(most), *sizes]
        monkeypatch.setattr(sys, "argv", ["embed_folder.py", *options])
        run_path(str(EXAMPLES / "embed_folder.py"), run_name="__main__")
        assert (tmp_path / out / "z.npy").exists() == (most == 50)
    whole, stopped = (np.load(tmp_path / out / "z.npy") for out in ("whole", "stopped"))
    assert whole.shape == (50, 3)
    np.testing.assert_array_equal(whole, stopped)


def test_two_encoders_are_aligned(tmp_path, monkeypatch, capsys):
    sizes = ("--train", "60", "--steps", "1", "--pairs", "300", "--dimension", "8", "--clip-steps", "60")
    monkeypatch.setattr(sys, "argv", ["align.py", "--data", "photos", *sizes, "--out", str(tmp_path)])
    run_path(str(EXAMPLES / "align_two_encoders.py"), run_name="__main__")
    rows = capsys.readouterr().out.splitlines()[-4:]
    shares = {row[:28].strip(): [float(value) for value in row[28:].split()[:3]] for row in rows}
    assert len(shares) == 4
    assert all(ten > 5 * 10 / 160 for _, _, ten in shares.values())  # five times chance


def run_with(library, name, folder, *command):
    """Run an example of a library for 60 steps; its records."""
    if not find_spec(library):
        pytest.skip(f"needs {library}: make libraries")
    options = [EXAMPLES / f"{name}.py", "--steps", "60", "--out", folder]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    subprocess.run([sys.executable, *command, *options], check=True, capture_output=True, timeout=300, env=environment)
    records, bad = read_log(folder / "metrics.jsonl")
    assert bad == 0
    assert_every_fifth_step(records, 60)
    assert records[-1].covariance[0] > records[0].covariance[0]
    return records


@pytest.mark.libraries
@pytest.mark.parametrize(("library", "name"), [("lightly", "with_lightly"), ("transformers", "with_hugging_face")])
def test_callbacks_of_libraries(library, name, tmp_path):
    records = run_with(library, name, tmp_path, "-m", "tests.monitor.libraries.torchvision_on_cpu")
    assert len(records[0].hidden) == 256


@pytest.mark.libraries
def test_wandb(tmp_path):
    run_with("wandb", "with_wandb", tmp_path)
    stored = next(tmp_path.glob("wandb/offline-run-*/*.wandb")).read_bytes()
    assert all(name in stored for name in (b"stairwise/covariance/1", b"stairwise/says", b"loss"))


@pytest.mark.libraries
def test_tensorboard(tmp_path):
    records = run_with("tensorboard", "with_tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    shown = {e.step: e.value for e in events.Scalars("stairwise/covariance/1")}
    assert shown == pytest.approx({r.step: r.covariance[0] for r in records}, rel=1e-6)
    assert len(events.Scalars("loss")) == 60
    assert "stairwise/says/text_summary" in events.Tags()["tensors"]
