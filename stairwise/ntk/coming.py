"""Does the kernel of a half-trained network predict the modes that it learns next?

Of two moments of a training, the modes that have grown by the later one and whose span is not that of the earlier ones
are *new*. We ask for the share of them that lies in the d modes predicted from a kernel at the earlier moment, beyond
the modes that had grown by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from stairwise.archives import save_arrays
from stairwise.checks import InputError
from stairwise.ntk.lengths import hidden_weights, kernels_of
from stairwise.ntk.predict import predict_embeddings
from stairwise.ntk.study import embed
from stairwise.progress import Progress, silent
from stairwise.table import Table
from stairwise.theory.spectra import grown

Floats = NDArray[np.float64]
KERNELS = ("as it is", "unit diagonal", "directions", "filters")


def grown_modes(z: Floats) -> Floats:
    """Orthonormal directions (N, g) of the embeddings' grown modes, about their mean."""
    modes, size, _ = np.linalg.svd(z - z.mean(axis=0), full_matrices=False)
    return np.asarray(modes[:, : grown(size**2)[0]])


def new_modes(before: Floats, after: Floats) -> Floats:
    """Orthonormal directions (N, m) in the span of `after` (N, g + m) that are farthest from that of `before` (N, g).

    >>> before, after = np.eye(4)[:, :1], np.eye(4)[:, :2]
    >>> np.abs(new_modes(before, after)).ravel()
    array([0., 1., 0., 0.])
    """
    count = max(0, after.shape[1] - before.shape[1])
    rest = after - before @ (before.T @ after)
    return np.asarray(np.linalg.svd(rest, full_matrices=False)[0][:, :count])


def captured(new: Floats, before: Floats, K: NDArray, d: int) -> tuple[float, float]:
    """Share of the new modes in the d modes predicted from K, less the span of `before`; and what chance gives."""
    if not new.shape[1]:
        return np.nan, np.nan
    try:
        F = predict_embeddings(K, d)
    except InputError:  # the kernel does not resolve d modes
        return np.nan, np.nan
    F = F - F.mean(axis=0)
    basis, size, _ = np.linalg.svd(F - before @ (before.T @ F), full_matrices=False)
    basis = basis[:, size > 1e-8 * size[0]]
    return float((basis.T @ new).ravel() @ (basis.T @ new).ravel() / new.shape[1]), basis.shape[1] / (
        len(new) - before.shape[1] - 1
    )


@dataclass(frozen=True, eq=False)
class Coming:
    """Prediction of new modes during a training.

    Attributes:
        name: of the run.
        steps: at which kernels were computed, (T,).
        grown: grown modes at these steps and at the end, (T + 1,).
        following, final: share of the modes that are new at the next of these steps, and at the end, (T, kernels).
        chance: (T, 2), for both.
    """

    name: str
    steps: NDArray[np.int64]
    grown: NDArray[np.int64]
    following: Floats
    final: Floats
    chance: Floats

    def table(self) -> Table:
        rows = [
            [str(step), f"{now} → {then}", *(f"{v:.3f}" for v in (*shares, chance))]
            for step, now, then, shares, chance in zip(
                self.steps, self.grown[:-1], self.grown[1:], self.following, self.chance[:, 0], strict=True
            )
        ]
        header = ["step", "grown, now and next", *KERNELS, "chance"]
        return Table(f"{self.name}: share of the next modes that each kernel predicts", header, rows)

    def write(self, folder: Path) -> list[Path]:
        """Write coming.npz; returns its path."""
        names = ("steps", "grown", "following", "final", "chance")
        save_arrays(folder / "coming.npz", {name: getattr(self, name) for name in names})
        return [folder / "coming.npz"]


def study_coming(
    name: str,
    models: Sequence[tuple[int, nn.Module]],
    views: Tensor,
    *,
    precision: str = "float32",
    progress: Progress = silent,
) -> Coming:
    """Measure how well kernels during training predict the modes that come next, and those at the end.

    Arguments:
        models: step and model at several times, in order; the last one is the end.
    """
    embeddings = [embed(model, views) for _, model in models]
    modes = [grown_modes(z) for z in embeddings]
    following, final, chance = [], [], []
    for i, (step, model) in enumerate(models[:-1]):
        progress(i, len(models) - 1, f"kernels at step {step}")
        found = kernels_of(model, views, hidden_weights(model, views[:2]), precision=precision)
        plain = found.at(1.0)
        size = np.sqrt(np.maximum(np.diagonal(plain), np.finfo(np.float32).tiny))
        unit = (plain / np.outer(size, size)).astype(plain.dtype)
        d = embeddings[i].shape[1]
        rows = [
            [captured(new_modes(modes[i], later), modes[i], K, d) for later in (modes[i + 1], modes[-1])]
            for K in (plain, unit, found.directions, found.filters)
        ]
        following.append([next_one[0] for next_one, _ in rows])
        final.append([last[0] for _, last in rows])
        chance.append([np.nanmax([row[j][1] for row in rows] + [0.0]) for j in (0, 1)])
    steps = np.array([step for step, _ in models[:-1]])
    counts = np.array([m.shape[1] for m in modes])
    return Coming(name, steps, counts, np.array(following), np.array(final), np.array(chance))
