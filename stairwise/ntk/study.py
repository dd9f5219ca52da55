"""Share of a trained network's embeddings that the theory predicts from its tangent kernel (Tables 1 and 2, App. E).

For a network and the 2n views of a fixed batch of pairs, we compute the embeddings and the empirical tangent kernel,
and compare spans by `subspace_alignment`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stairwise.archives import save_arrays
from stairwise.checks import InputError, as_numpy
from stairwise.files import atomic, save_json
from stairwise.kernel.arrays import Matrix
from stairwise.kernel.precision import float32_products
from stairwise.ntk.empirical import empirical_ntk, ntk_error
from stairwise.ntk.predict import kernel_pca, predict_embeddings
from stairwise.progress import Progress, silent
from stairwise.table import Table
from stairwise.theory.spectra import chance_alignment, subspace_alignment

Floats = NDArray[np.float64]
BATCH = 256


class Outputs(nn.Module):
    """A network x → z made from a network x → (h, z)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x)[1]
        return out


@dataclass(frozen=True, eq=False)
class Tangent:
    """The study of one network.

    Attributes:
        name: name of the network or its run.
        embeddings: z of the 2n views, (2n, d).
        kernel: K̃, (2n, 2n).
        scores: alignments by name.
        by_dimension: alignment of the leading d' modes with theory and kernel PCA, (2, d).
        by_pairs: numbers of pairs, and the alignments of theory and kernel PCA for each, (3, sizes).
        facts: settings and errors of the measurement.
    """

    name: str
    embeddings: Floats
    kernel: Floats
    scores: dict[str, float]
    by_dimension: Floats
    by_pairs: Floats
    facts: dict[str, Any] = field(default_factory=dict)

    def table(self) -> Table:
        rows = [[name, f"{value:.4g}"] for name, value in self.scores.items()]
        return Table(f"{self.name}: span of the trained embeddings", ["aligned with", "share"], rows)

    def write(self, folder: Path, keep_kernel: bool = False) -> list[Path]:
        """Write tangent.json and tangent.npz (embeddings, spectra, curves); returns their paths."""
        arrays = {
            "embeddings": self.embeddings.astype(np.float32),
            "spectrum": np.linalg.eigvalsh(self.kernel)[::-1],
            "by_dimension": self.by_dimension,
            "by_pairs": self.by_pairs,
        }
        kernel = {"kernel": self.kernel.astype(np.float32)} if keep_kernel else {}
        save_arrays(folder / "tangent.npz", arrays | kernel)
        save_json(folder / "tangent.json", {"run": self.name, "scores": self.scores, **self.facts})
        return [folder / "tangent.json", folder / "tangent.npz"]

    def draw(self, folder: Path) -> list[Path]:
        """Write figure.png; returns its path."""
        from stairwise.figures.style import style
        from stairwise.figures.tangent import draw_tangent

        spectrum = np.linalg.eigvalsh(self.kernel)[::-1]
        with style(), atomic(folder / "figure.png") as part:
            draw_tangent(spectrum, self.by_dimension, self.by_pairs, len(self.kernel)).savefig(part)
        return [folder / "figure.png"]


def study(
    name: str,
    model: nn.Module,
    views: Tensor,
    initial: nn.Module | None = None,
    *,
    precision: str = "float32",
    seed: int = 0,
    progress: Progress = silent,
) -> Tangent:
    """Compute kernel, predicted embeddings and alignments of a trained model.

    Arguments:
        model: views → z, (2n, d), in evaluation mode.
        views: first views first, (2n, …), on the model's device.
        initial: the model before training; if given, its kernel is studied as well.
        seed: seed of the random subspaces for "chance".
    """
    z = embed(model, views)
    d = z.shape[1]
    progress(0.1, 1, "the tangent kernel")
    K, error = _kernel(model, views, precision)
    progress(0.5, 1, "predicting")
    F, pca = _predicted(K, d, precision), kernel_pca(K, d)
    chance, spread = chance_alignment(len(views), d, draws=20, seed=seed)
    scores = {
        "theory": subspace_alignment(z, F),
        "kernel PCA": subspace_alignment(z, pca),
        "chance": chance,
        "chance, standard deviation": spread,
    }
    facts: dict[str, Any] = {"n": len(views) // 2, "d": d, "seed": seed, "precision": precision}
    facts |= {"initial": initial is not None, "kernel_error": error}
    if initial is not None:
        progress(0.7, 1, "the tangent kernel at initialization")
        K0, _ = _kernel(initial, views, precision)
        try:
            scores["theory, initial kernel"] = subspace_alignment(z, predict_embeddings(K0, d))
        except InputError as unresolved:  # some modes are below the kernel's rounding error
            facts["initial_kernel"] = str(unresolved)
        scores["kernel PCA, initial kernel"] = subspace_alignment(z, kernel_pca(K0, d))
        facts["drift"] = kernel_drift([as_numpy(K0), as_numpy(K)])[-1]
    progress(0.9, 1, "fewer dimensions, fewer pairs")
    by_pairs = _by_pairs(z, K, _sizes(len(views) // 2, d))
    whole = as_numpy(K).astype(np.float64)
    return Tangent(name, z, whole, scores, _by_dimension(z, F, pca), by_pairs, facts)


def _predicted(K: Matrix, d: int, precision: str) -> Floats:
    try:
        return predict_embeddings(K, d)
    except InputError as error:
        rule = f"must have a tangent kernel with {d} modes above rounding error, one per dimension"
        remedy = "take more pairs (n), train longer" + (", or precision float64" if precision != "float64" else "")
        raise InputError("run", rule, None, remedy) from error


DRIFT = ("n", "seed", "steps", "t", "change", "with_first", "with_last", "theory")


@dataclass(frozen=True, eq=False)
class Drift:
    """The tangent kernel during training.

    Attributes:
        name: name of the run.
        n, seed: number and seed of the pairs.
        steps, t: times, beginning with 0.
        change: ‖K − K_0‖/‖K_0‖ of kernels scaled to trace 1, (T,).
        with_first, with_last: alignment <K, K'>/‖K‖‖K'‖ with the first and the last kernel, (T,).
        theory: alignment of the final embeddings with those predicted from K; nan if K does not resolve d modes, (T,).
        chance: expected alignment of d random directions, d/2n.
    """

    name: str
    n: int
    seed: int
    steps: NDArray[np.int64]
    t: Floats
    change: Floats
    with_first: Floats
    with_last: Floats
    theory: Floats
    chance: float

    def table(self) -> Table:
        columns = (self.change, self.with_first, self.with_last, self.theory)
        rows = [[str(s), *(_or_unknown(v) for v in values)] for s, *values in zip(self.steps, *columns, strict=True)]
        final = "theory with the final embeddings"
        header = ["step", "relative change", "alignment with the first", "with the last", final]
        return Table(f"{self.name}: the tangent kernel during training", header, rows)

    def write(self, folder: Path) -> list[Path]:
        """Write drift.npz; returns its path."""
        save_arrays(folder / "drift.npz", {name: getattr(self, name) for name in DRIFT})
        return [folder / "drift.npz"]

    def draw(self, folder: Path) -> list[Path]:
        """Write drift.png; returns its path."""
        from stairwise.figures.style import style
        from stairwise.figures.tangent import draw_drift

        with style(), atomic(folder / "drift.png") as part:
            draw_drift(self.steps, self.with_first, self.with_last, self.theory, self.chance).savefig(part)
        return [folder / "drift.png"]


def _or_unknown(value: float) -> str:
    return "below rounding" if np.isnan(value) else f"{value:.3f}"


def study_drift(
    name: str,
    models: Sequence[tuple[int, float, nn.Module]],
    views: Tensor,
    *,
    precision: str = "float32",
    seed: int = 0,
    progress: Progress = silent,
) -> Drift:
    """Measure how the tangent kernel changes during training.

    Arguments:
        models: step, t and model at several times: the first at initialization, the last with the embeddings that are
            to be predicted.
    """
    z = embed(models[-1][2], views)
    kernels, theory, steps, times = [], [], [], []
    for i, (step, t, model) in enumerate(models):
        progress(i, len(models), f"the tangent kernel at step {step}")
        K = empirical_ntk(model, views, precision=precision).cpu().numpy()
        kernels.append(K / np.trace(K))
        steps.append(step)
        times.append(t)
        try:
            theory.append(subspace_alignment(z, predict_embeddings(K, z.shape[1])))
        except InputError:  # some modes are below the kernel's rounding error
            theory.append(float("nan"))
    first, last = kernel_drift(kernels), kernel_drift(kernels[::-1])[::-1]
    return Drift(
        name,
        len(views) // 2,
        seed,
        np.array(steps),
        np.array(times),
        np.array([one["distance"] for one in first]),
        np.array([one["alignment"] for one in first]),
        np.array([one["alignment"] for one in last]),
        np.array(theory),
        z.shape[1] / len(z),
    )


def embed(model: nn.Module, x: Tensor) -> Floats:
    """The embeddings z of all views, (2n, d), without TF32."""
    with torch.no_grad(), float32_products(tf32=False):
        return np.asarray(torch.cat([model(part) for part in x.split(BATCH)]).double().cpu().numpy())


def compare(studies: Sequence[Tangent]) -> Table:
    """Alignments of the spans of several networks on the same pairs (Table 2)."""
    names = [one.name for one in studies]
    rows = [[a.name, *(f"{subspace_alignment(a.embeddings, b.embeddings):.3f}" for b in studies)] for a in studies]
    return Table("Span of one run's embeddings within another's", ["", *names], rows)


def kernel_drift(kernels: Sequence[Floats]) -> list[dict[str, float]]:
    """Relative distance of each kernel to the first, and alignment <K, K₀> / ‖K‖‖K₀‖."""
    first = np.asarray(kernels[0], dtype=np.float64)
    out = []
    for kernel in kernels:
        K = np.asarray(kernel, dtype=np.float64)
        norms = np.linalg.norm(K) * np.linalg.norm(first)
        distance = np.linalg.norm(K - first) / np.linalg.norm(first)
        out.append({"distance": float(distance), "alignment": float((K * first).sum() / norms)})
    return out


def _kernel(model: nn.Module, x: Tensor, precision: str) -> tuple[Matrix, float]:
    """The kernel, which stays on a GPU but becomes a numpy array on a CPU; and its error."""
    K = empirical_ntk(model, x, precision=precision)
    return K if K.is_cuda else as_numpy(K), ntk_error(model, x, K)


def _by_dimension(z: Floats, F: Floats, pca: Floats) -> Floats:
    """Alignment of the leading d' modes; those of z are its principal components."""
    U = np.linalg.svd(z, full_matrices=False)[0]
    rows = []
    for other in (F, pca):
        # the first k columns of Q span what those of `other` do
        overlaps = (U.T @ np.linalg.qr(other)[0]) ** 2
        rows.append(overlaps.cumsum(axis=0).cumsum(axis=1).diagonal() / np.arange(1, len(overlaps) + 1))
    return np.array(rows)


def _by_pairs(z: Floats, K: Matrix, sizes: Sequence[int]) -> Floats:
    """Alignment with fewer pairs; the paper expects it to rise with their number."""
    n, d = len(z) // 2, z.shape[1]
    rows = []
    for size in sizes:
        keep = np.r_[:size, n : n + size]
        part = K[keep][:, keep]
        rows.append(
            (
                size,
                subspace_alignment(z[keep], predict_embeddings(part, d)),
                subspace_alignment(z[keep], kernel_pca(part, d)),
            )
        )
    return np.array(rows, dtype=np.float64).T.reshape(3, -1)


def _sizes(n: int, d: int) -> list[int]:
    sizes = [n]
    while sizes[-1] // 2 >= max(2 * d, 50):
        sizes.append(sizes[-1] // 2)
    return sizes[::-1]
