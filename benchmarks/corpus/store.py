"""The corpus in one file, and the truth of every record."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.staircase.signs import Signs

Floats = NDArray[np.float64]
SCALARS = ("step", "t", "loss", "trace_c", "trace_cov", "mean_square", "positive", "negative", "top", "batch", "skipped")


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
        v = self.scalars
        return Signs(
            v["loss"],
            v["trace_cov"],
            v["trace_c"] - v["mean_square"],
            v["mean_square"],
            v["positive"],
            v["negative"],
            v["top"],
            v["batch"],
            v["skipped"],
        )


def pack(folder: Path, target: Path) -> None:
    """Join the files of `make` into one, with spectra to three digits."""
    arrays: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as stored:
            name = path.stem
            arrays[f"{name}/settings"] = stored["settings"]
            arrays[f"{name}/scalars"] = np.array([stored[key] for key in SCALARS], dtype=np.float32)
            arrays[f"{name}/lam"] = _rounded(stored["lam"])
    np.savez_compressed(target, **arrays)


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 with 10 bits of mantissa, which compress well."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).view(np.float32)


def read(path: Path) -> list[CorpusRun]:
    runs = []
    with np.load(path) as stored:
        for key in stored.files:
            if key.endswith("/settings"):
                name = key.removesuffix("/settings")
                values = stored[f"{name}/scalars"].astype(np.float64)
                scalars = dict(zip(SCALARS, values, strict=True))
                runs.append(CorpusRun(json.loads(str(stored[key])), scalars, stored[f"{name}/lam"].astype(np.float64)))
    return runs
