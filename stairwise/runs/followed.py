"""Fixed views that a run has followed: their embeddings and representations at every record.

Columns are stored in float16, each divided by its largest entry, which is stored beside them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.archives import load_arrays, save_arrays
from stairwise.runs.folder import FOLLOWED

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Followed:
    """All records of fixed views.

    Attributes:
        t: (T,).
        z: leading principal components of the embeddings about their mean, (T, views, k).
        h: representations, projected to fewer dimensions, (T, views, m).
        spectra: eigenvalues of covariances over the views by name: "z", and for BYOL "predictor" and "target", (T, d).
    """

    t: Floats
    z: Floats
    h: Floats
    spectra: dict[str, Floats]


def write_followed(folder: Path, step: int, t: float, z: ArrayLike, h: ArrayLike, spectra: dict[str, NDArray]) -> Path:
    """Write one record; another of the same step is replaced."""
    path = folder / FOLLOWED / f"step-{step:010d}.npz"
    arrays: dict[str, NDArray] = {"t": np.array(t)}
    for name, x in (("z", np.asarray(z, dtype=np.float64)), ("h", np.asarray(h, dtype=np.float64))):
        scale = np.maximum(np.abs(x).max(axis=0), 1e-300)
        arrays |= {name: (x / scale).astype(np.float16), f"{name}.scale": scale}
    save_arrays(path, arrays | {f"spectrum.{name}": lam.astype(np.float32) for name, lam in spectra.items()})
    return path


def read_followed(folder: Path) -> Followed | None:
    """All records of a run, in order of time; None if it has followed nothing."""
    records = [load_arrays(path) for path in sorted((folder / FOLLOWED).glob("step-*.npz"))]
    if not records:
        return None
    z, h = ([one[name].astype(np.float64) * one[f"{name}.scale"] for one in records] for name in ("z", "h"))
    names = [name for name in records[0] if name.startswith("spectrum.")]
    spectra = {name.removeprefix("spectrum."): np.array([one[name] for one in records], float) for name in names}
    return Followed(np.array([float(one["t"]) for one in records]), np.array(z), np.array(h), spectra)
