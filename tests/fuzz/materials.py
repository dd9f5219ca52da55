"""A folder of good and bad files for command lines: features, images, runs, recipes, models."""

import shutil
from pathlib import Path

import numpy as np
import torch

import stairwise as sw

TOML = """
data = "digits"
views = "none"
encoder = "mlp"
hidden = []
head_norm = false
d = 4
batch = 64
steps = 2
lr = 0.01
records = 2
window = 64
precision = "float32"
hidden_spectrum = false
[encoder_options]
inputs = 64
widths = [8]
"""
MODEL = """
from torch import nn
def good(width: int = 8): return nn.Sequential(nn.Flatten(), nn.Linear(64, width))
def raises(): raise KeyError("no such network")
def nothing(): return None
number = 3
"""
FEATURES = {
    "x_a.npy": lambda x: x,
    "x_b.npy": lambda x: x + 0.1 * np.roll(x, 1, 0),
    "hole.npy": lambda x: np.where(x > 2, np.nan, x),
    "endless.npy": lambda x: np.where(x > 2, np.inf, x),
    "zero.npy": lambda x: 0 * x,
    "large.npy": lambda x: x * 1e160,
    "small.npy": lambda x: x * 1e-200,
    "whole.npy": lambda x: (9 * x).astype(int),
    "complex.npy": lambda x: x + 1j,
    "half.npy": lambda x: x.astype(np.float16),
    "flat.npy": lambda x: x[0],
    "cube.npy": lambda x: x[None],
    "empty.npy": lambda x: x[:0],
    "one.npy": lambda x: x[:1],
    "text.npy": lambda x: x.astype(str),
    "wide.npy": lambda x: np.hstack([x, x]),
    "images.npy": lambda x: np.random.default_rng(0).integers(0, 255, (40, 1, 8, 8)).astype(np.uint8),
}

DAMAGE = {
    "null": ("recipe.json", b"null"),
    "list": ("recipe.json", b"[]"),
    "cutjson": ("recipe.json", b'{"recipe": {'),
    "bytes": ("metrics.jsonl", b"\xff\xfe\n"),
    "nolog": ("metrics.jsonl", b""),
    "numbers": ("metrics.jsonl", b"3\n4\n"),
    "cutlog": ("metrics.jsonl", b'{"step": 1, "t": 0.01'),
    "badpoint": ("checkpoints/step-0000000002.safetensors", b"\x08\0\0\0\0\0\0\0{}      "),
}


def make(folder: Path) -> None:
    """Write everything; `run` is a finished run, the others are damaged copies of it."""
    folder.mkdir(parents=True)
    x = np.random.default_rng(0).standard_normal((40, 6))
    for name, change in FEATURES.items():
        np.save(folder / name, change(x))
    np.save(folder / "objects.npy", np.array([[object()]]), allow_pickle=True)
    (folder / "cut.npy").write_bytes((folder / "x_a.npy").read_bytes()[:200])
    (folder / "file").write_text("in the way")
    (folder / "good.toml").write_text(TOML)
    (folder / "latin.toml").write_bytes('label = "é"'.encode("latin-1") + TOML.encode())
    (folder / "broken.toml").write_text(TOML + "\n[[[")
    (folder / "types.toml").write_text(TOML.replace("d = 4", 'd = "four"'))
    (folder / "fuzznet.py").write_text(MODEL)
    (folder / "weights").mkdir()
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8))
    for step in (1, 2):
        torch.save(network.state_dict(), folder / "weights" / f"step{step}.pt")
    (folder / "weights" / "bad1.pt").write_bytes(b"not a checkpoint")
    sw.train(sw.load_recipe(str(folder / "good.toml")), folder / "run", device="cpu")
    shutil.copytree(folder / "run", folder / "kept")
    damage(folder)


def damage(folder: Path) -> None:
    """Make the runs anew that a command may have continued, repaired or discarded."""
    for name, (file, content) in DAMAGE.items():
        if not (folder / name).is_dir():
            shutil.copytree(folder / "kept", folder / name)
        if (folder / name / file).parent.is_dir():
            (folder / name / file).write_bytes(content)
