"""Does the kernel of a half-trained network predict the modes that it learns next?

Modes that have grown at one moment of a training are compared with those at the first later moment at which more have
grown. Directions in the later span that are farthest from the earlier one are *new*. From a kernel of the network at
the earlier moment we predict a fixed number of modes, by the theory or by kernel PCA, and ask for the share of the new
modes that lies in their span, beyond the modes that had grown by then. Two simple kernels are for comparison: that of
the inputs of the last layer, and that of the embeddings, which already hold the next modes with a small variance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from stairwise.archives import save_arrays
from stairwise.checks import InputError
from stairwise.kernel.arrays import Matrix
from stairwise.ntk.lengths import Kernels, hidden_weights, kernels_of
from stairwise.ntk.predict import kernel_pca, predict_embeddings, unit_diagonal
from stairwise.ntk.study import embed
from stairwise.progress import Progress, silent
from stairwise.theory.spectra import grown

Floats = NDArray[np.float64]
TANGENT = ("as it is", "unit diagonal", "directions", "directions, unit diagonal", "filters")
SIMPLE = ("inputs of the last layer", "embeddings")  # for comparison: what can be seen without a tangent kernel
KERNELS = (*TANGENT, *SIMPLE)  # runs of 2026-11-18 have the first five only
WAYS = ("theory", "kernel PCA")
TARGETS = ("next", "end")
PREDICTED = 50  # modes predicted from a kernel, at most d


def grown_modes(z: Floats, count: int | None = None) -> Floats:
    """Orthonormal directions (N, count) of the embeddings' leading modes about their mean; None: of the grown ones."""
    modes, size, _ = np.linalg.svd(z - z.mean(axis=0), full_matrices=False)
    return np.asarray(modes[:, : grown(size**2)[0] if count is None else count])


def new_modes(before: Floats, after: Floats) -> Floats:
    """Orthonormal directions (N, m) in the span of `after` (N, g + m) that are farthest from that of `before` (N, g).

    >>> before, after = np.eye(4)[:, :1], np.eye(4)[:, :2]
    >>> np.abs(new_modes(before, after)).ravel()
    array([0., 1., 0., 0.])
    """
    count = max(0, after.shape[1] - before.shape[1])
    rest = after - before @ (before.T @ after)
    return np.asarray(np.linalg.svd(rest, full_matrices=False)[0][:, :count])


def beyond(F: Floats, before: Floats) -> Floats:
    """An orthonormal basis of the centred predictions F (N, p), less the span of `before` (N, g)."""
    F = F - F.mean(axis=0)
    basis, size, _ = np.linalg.svd(F - before @ (before.T @ F), full_matrices=False)
    return np.asarray(basis[:, size > 1e-8 * size[0]])


def captured(new: Floats, basis: Floats) -> float:
    """Share of orthonormal directions `new` (N, m) in the span of an orthonormal basis; nan if there are none."""
    return float(((basis.T @ new) ** 2).sum() / new.shape[1]) if new.shape[1] else np.nan


@dataclass(frozen=True, eq=False)
class Coming:
    """Prediction of new modes during a training, for D draws of pairs.

    Attributes:
        name: of the run.
        steps: the moments, the last one is the end, (T + 1,).
        grown: grown modes at these moments, over the views of all draws, (T + 1,).
        until: index of the first later moment at which more have grown; −1: there is none, (T,).
        shares: share of the new modes by that moment, and by the end, (D, T, targets, kernels, ways); nan: none is
            new, or the kernel predicts none.
        chance: the share that random directions would capture, (D, T, kernels, ways).
    """

    name: str
    steps: NDArray[np.int64]
    grown: NDArray[np.int64]
    until: NDArray[np.int64]
    shares: Floats
    chance: Floats

    def write(self, folder: Path) -> list[Path]:
        """Write coming.npz; returns its path."""
        names = ("steps", "grown", "until", "shares", "chance")
        save_arrays(folder / "coming.npz", {name: getattr(self, name) for name in names})
        return [folder / "coming.npz"]


def study_coming(
    name: str,
    models: Sequence[tuple[int, nn.Module]],
    views: Sequence[Tensor],
    *,
    predicted: int = PREDICTED,
    precision: str = "float32",
    progress: Progress = silent,
) -> Coming:
    """Measure how well kernels during training predict the modes that come next, and those at the end.

    Arguments:
        models: step and model at several times, in order; the last one is the end.
        views: several draws of pairs, each with first views first, (2n, …), on the models' device.
        predicted: number of modes to predict from every kernel; at most d are.
    """
    z = [[embed(model, x) for x in views] for _, model in models]
    most = min(predicted, z[0][0].shape[1])
    counts = np.array([grown_modes(np.concatenate(draws)).shape[1] for draws in z])
    T = len(models) - 1
    until = next_growth(counts, z[0][0].shape[1])
    shape = len(KERNELS), len(WAYS)
    shares, chance = np.full((len(views), T, len(TARGETS), *shape), np.nan), np.full((len(views), T, *shape), np.nan)
    for i, (step, model) in enumerate(models[:-1]):
        if until[i] < 0:
            continue
        hidden = hidden_weights(model, views[0][:2])
        for draw, x in enumerate(views):
            progress(i * len(views) + draw, T * len(views), f"kernels at step {step}")
            before = grown_modes(z[i][draw], counts[i])
            new = [new_modes(before, grown_modes(z[j][draw], counts[j])) for j in (until[i], T)]
            for k, K in enumerate(_every(kernels_of(model, x, hidden, precision=precision), z[i][draw])):
                for way, F in enumerate(_predictions(K, most)):
                    if np.isnan(F).any():
                        continue
                    basis = beyond(F, before)
                    shares[draw, i, :, k, way] = [captured(one, basis) for one in new]
                    chance[draw, i, k, way] = basis.shape[1] / (len(x) - before.shape[1] - 1)
    return Coming(name, np.array([step for step, _ in models]), counts, until, shares, chance)


def next_growth(counts: NDArray[np.int64], d: int) -> NDArray[np.int64]:
    """Of every moment but the last, the index of the first later one at which more modes have grown; −1: none.

    All d modes count as grown if they are not in two bands, which before the end says nothing: such moments are left
    out.

    >>> next_growth(np.array([1, 3, 50, 2, 4, 50]), 50)
    array([ 1,  4, -1,  4,  5])
    """
    last = len(counts) - 1
    usable = [i for i, count in enumerate(counts) if count < d or i == last]
    later = [[j for j in usable if j > i and counts[j] > counts[i]] for i in range(last)]
    return np.array([found[0] if found and i in usable else -1 for i, found in enumerate(later)])


def _every(kernels: Kernels, z: Floats) -> list[Matrix]:
    """The kernels of `KERNELS`."""
    plain, directions, last = kernels.at(1.0), kernels.directions, kernels.layers()["readout"]
    z = z - z.mean(axis=0)
    return [plain, unit_diagonal(plain), directions, unit_diagonal(directions), kernels.filters, last, z @ z.T]


def _predictions(K: Matrix, most: int) -> list[Floats]:
    """The modes predicted in each way of `WAYS`; fewer by theory if the kernel resolves fewer, nan if it has none."""
    try:
        theory = predict_embeddings(K, most, at_most=True)
    except InputError:  # it resolves none, or is not positive semidefinite
        theory = np.full((len(K), 1), np.nan)
    return [theory, kernel_pca(K, most)]
