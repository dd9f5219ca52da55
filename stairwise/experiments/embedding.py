"""Embeddings without training, written to files: behind `stairwise embed`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError, one_of, positive_int
from stairwise.data.images import load
from stairwise.data.views import two_crops
from stairwise.experiments.outlook import read_features
from stairwise.files import atomic, save_json
from stairwise.kernel.estimator import KernelSSL
from stairwise.kernel.kernels import KERNELS
from stairwise.report.page import Table

__all__ = ["Embedded", "embed_features", "embed_images"]


@dataclass(frozen=True, eq=False)
class Embedded:
    """A fitted estimator with the embeddings of its pairs."""

    name: str
    est: KernelSSL
    alpha: float

    @property
    def pairs(self) -> int:
        return len(self.est.embedding_) // 2

    def table(self) -> Table:
        """γ and expected step times."""
        low, middle, high = self.est.step_times(self.alpha)
        rows = [
            [str(j + 1), f"{g:.4g}", f"{middle[j]:.4g}", f"{low[j]:.4g} – {high[j]:.4g}"]
            for j, g in enumerate(self.est.eigenvalues_)
        ]
        title = f"{self.name}: {self.pairs:,} pairs, {self.est.kernel_}"
        return Table(title, ["mode", "γ", "step at t", "90 % of initializations"], rows)

    def summary(self) -> dict[str, Any]:
        """Everything but the embeddings, for scripts."""
        low, middle, high = self.est.step_times(self.alpha)
        solution = self.est.solution_
        return {
            "source": self.name,
            "pairs": self.pairs,
            "kernel": str(self.est.kernel_),
            "gamma": self.est.eigenvalues_,
            "alpha": self.alpha,
            "step_times": {"q05": low, "median": middle, "q95": high},
            "solver": {"name": solution.solver, "residual": solution.residual, "products": solution.products},
        }

    def write(self, folder: Path) -> list[Path]:
        """z_a.npy, z_b.npy, spectrum.json, figure.png and model.npz (for KernelSSL.load)."""
        from stairwise.figures.modes import draw_embedding
        from stairwise.figures.style import style

        folder.mkdir(parents=True, exist_ok=True)
        for view, z in zip("ab", np.split(self.est.embedding_, 2), strict=True):
            with atomic(folder / f"z_{view}.npy") as part, part.open("wb") as stream:
                np.save(stream, z, allow_pickle=False)
        self.est.save(folder / "model.npz")
        t = np.linspace(0, 1.3 * self.est.step_times(self.alpha, 0.95)[0].max(), 400)
        spectra = self.est.spectrum_at(t, alpha=self.alpha)
        with style(), atomic(folder / "figure.png") as part:
            draw_embedding(self.est.eigenvalues_, self.est.embedding_, t, spectra).savefig(part)
        save_json(folder / "spectrum.json", self.summary())
        return [folder / name for name in ("figure.png", "model.npz", "spectrum.json", "z_a.npy", "z_b.npy")]


def embed_images(
    source: str, d: int, kernel: str, alpha: float, seed: int, *, n: int, crop: int, pixels: str, size: int
) -> Embedded:
    """From two crops of each of n images."""
    if source.endswith(".npy") and ":" not in source:
        raise InputError(
            "x_b.npy", "is needed beside the features of the first view", source, "or array:FILE for images"
        )
    images = load(source, size=positive_int(size, "size"))
    x_a, x_b = two_crops(images, n, crop, pixels, seed)
    return _embed(images.name, x_a, x_b, d, kernel, alpha)


def embed_features(path_a: Path, path_b: Path, d: int, kernel: str, alpha: float) -> Embedded:
    """From two files of features, row i of each a view of sample i."""
    x_a, x_b = (np.asarray(read_features(path)) for path in (path_a, path_b))
    return _embed(f"{path_a.name}, {path_b.name}", x_a, x_b, d, kernel, alpha)


def _embed(name: str, x_a: NDArray, x_b: NDArray, d: int, kernel: str, alpha: float) -> Embedded:
    names = [one_of(name.strip(), "kernel", KERNELS) for name in kernel.split(",")]
    est = KernelSSL(positive_int(d, "d"), kernel=names[0] if len(names) == 1 else tuple(names)).fit(x_a, X_b=x_b)
    est.step_times(alpha)  # refuses a bad alpha before anything is written
    return Embedded(name, est, alpha)
