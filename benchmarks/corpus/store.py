"""The corpus in one file: `python -m benchmarks.corpus.store FOLDER FILE.npz` joins what `make` has written."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.staircase.signs import Signs

Floats = NDArray[np.float64]
SCALARS = (
    "step",
    "t",
    "loss",
    "trace_c",
    "trace_cov",
    "mean_square",
    "positive",
    "negative",
    "batch",
)
SCALE, ZERO, INFINITE = 128, -16384, 32767  # codes of spectra


@dataclass(frozen=True, eq=False)
class CorpusRun:
    """Settings and records of one run; `lam` (T, d) is the followed spectrum."""

    settings: dict[str, Any]
    scalars: dict[str, Floats]
    lam: Floats

    @property
    def name(self) -> str:
        return str(self.settings["name"])

    @property
    def level(self) -> float | None:
        """The plateau, known for C."""
        return 1.0 if self.settings["loss"] == "barlow_twins" else None

    def signs(self) -> Signs:
        names = ("loss", "trace_cov", "mean_square", "positive", "negative", "batch", "trace_c")
        return Signs(*(self.scalars[name] for name in names))


def pack(folder: Path, target: Path) -> None:
    """Join the files of `make` into one."""
    arrays: dict[str, np.ndarray] = {}
    for path in sorted(set(folder.glob("*.npz")) - set(folder.glob("*.part.npz"))):
        with np.load(path) as stored:
            arrays[f"{path.stem}/settings"] = stored["settings"]
            with np.errstate(over="ignore"):
                arrays[f"{path.stem}/scalars"] = np.array([stored[key] for key in SCALARS], dtype=np.float32)
            arrays[f"{path.stem}/lam"] = coded(stored["lam"])
    np.savez_compressed(target, **arrays)


def thin(sources: Sequence[Path], target: Path, every: int) -> None:
    """Some runs of all files, chosen at random: one of so many."""
    arrays: dict[str, np.ndarray] = {}
    for source in sources:
        with np.load(source) as stored:
            arrays |= {key: stored[key] for key in stored.files}
    names = [key.removesuffix("/settings") for key in arrays if key.endswith("/settings")]
    chosen = sorted(np.random.default_rng(0).permutation(len(names))[::every])
    keys = [f"{names[k]}/{kind}" for k in chosen for kind in ("settings", "scalars", "lam")]
    np.savez_compressed(target, **{key: arrays[key] for key in keys})


def read(path: Path) -> list[CorpusRun]:
    """All runs of a file."""
    runs = []
    with np.load(path) as stored:
        for key in stored.files:
            if key.endswith("/settings"):
                name = key.removesuffix("/settings")
                values = stored[f"{name}/scalars"].astype(np.float64)
                scalars = dict(zip(SCALARS, values, strict=True))
                runs.append(CorpusRun(json.loads(str(stored[key])), scalars, decoded(stored[f"{name}/lam"])))
    return runs


def coded(lam: np.ndarray) -> np.ndarray:
    """Spectra as differences over time of 128 log₂ λ, which compress to a fifth; negative ones count as zero.

    >>> decoded(coded(np.array([[2.0, 1e-3], [np.inf, 0.0]]))).round(4).tolist()
    [[2.0, 0.001], [inf, 0.0]]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.round(SCALE * np.log2(np.maximum(lam, 0.0)))
    whole = np.where(np.isfinite(lam), np.clip(np.nan_to_num(steps, neginf=ZERO), ZERO, -ZERO), INFINITE)
    return np.diff(whole.astype(np.int16), axis=0, prepend=np.int16(0))  # wraps around, and back in `decoded`


def decoded(codes: np.ndarray) -> Floats:
    whole = np.cumsum(codes, axis=0, dtype=np.int16).astype(np.float64)
    return np.asarray(np.where(whole == INFINITE, np.inf, np.where(whole == ZERO, 0.0, 2 ** (whole / SCALE))))


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
