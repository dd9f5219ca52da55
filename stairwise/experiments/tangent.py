"""`stairwise ntk`: the tangent kernel of a trained run, the embeddings predicted from it, and how much they capture.

The machinery of Tables 1 and 2 (App. E): a fixed batch of n pairs, the trained embeddings of its 2n views, the
network's empirical tangent kernel on them, and spans compared by `subspace_alignment`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stairwise.checks import InputError, positive_int
from stairwise.data.feed import build_feed, channel_statistics
from stairwise.data.images import load
from stairwise.evaluate.representations import eval_mode
from stairwise.files import atomic, load_arrays, save_arrays, save_json
from stairwise.nets.encoder import Network
from stairwise.ntk.empirical import empirical_ntk, ntk_error
from stairwise.ntk.predict import kernel_pca, predict_embeddings
from stairwise.report.page import Table
from stairwise.theory.spectra import chance_alignment, subspace_alignment
from stairwise.train import checkpoint
from stairwise.train.loop import initial_network
from stairwise.train.pairs import Pairs
from stairwise.train.process import choose_device
from stairwise.train.run import CHECKPOINTS, Run

__all__ = ["Drift", "Outputs", "Tangent", "compare", "drift", "drifted", "fixed_views", "over_time", "studied", "study"]

Floats = NDArray[np.float64]
Progress = Callable[[float, str], None]
BATCH = 256


class Outputs(nn.Module):
    """The embedding z of a network, alone."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """x → z."""
        out: Tensor = self.network(x)[1]
        return out


@dataclass(frozen=True, eq=False)
class Tangent:
    """What was found for one run.

    Attributes:
        run: its folder.
        embeddings: P_exp's source, z of the 2n views, (2n, d).
        kernel: K̃, (2n, 2n).
        scores: alignments and errors by name.
        by_dimension: alignment of the leading d' modes, theory and kernel PCA, (2, d).
        by_pairs: numbers of pairs and alignment of theory and kernel PCA with so many, (3, sizes).
    """

    run: Path
    embeddings: Floats
    kernel: Floats
    scores: dict[str, float]
    by_dimension: Floats
    by_pairs: Floats
    facts: dict[str, Any] = field(default_factory=dict)

    def table(self) -> Table:
        """For people."""
        rows = [[name, f"{value:.4g}"] for name, value in self.scores.items()]
        return Table(f"{self.run.name}: span of the trained embeddings", ["aligned with", "share"], rows)

    def write(self, folder: Path, keep_kernel: bool = False) -> list[Path]:
        """tangent.json, tangent.npz (embeddings, spectra, curves) and figure.png."""
        from stairwise.figures.style import style
        from stairwise.figures.tangent import draw_tangent

        arrays = {
            "embeddings": self.embeddings.astype(np.float32),
            "spectrum": np.linalg.eigvalsh(self.kernel)[::-1],
            "by_dimension": self.by_dimension,
            "by_pairs": self.by_pairs,
        }
        save_arrays(
            folder / "tangent.npz", arrays | ({"kernel": self.kernel.astype(np.float32)} if keep_kernel else {})
        )
        save_json(folder / "tangent.json", {"run": self.run, "scores": self.scores, **self.facts})
        with style():
            figure = draw_tangent(arrays["spectrum"], self.by_dimension, self.by_pairs, len(self.kernel))
            with atomic(folder / "figure.png") as part:
                figure.savefig(part)
        return [folder / name for name in ("tangent.json", "tangent.npz", "figure.png")]


def fixed_views(run: Run, n: int, seed: int, device: torch.device) -> Tensor:
    """Two views of n images that seed and data fix, first views first, (2n, channels, size, size)."""
    recipe = run.recipe
    images = load(recipe.data, size=recipe.size or 64)
    training = int(run.facts["training_images"])
    rows = torch.randperm(training, generator=torch.Generator().manual_seed(seed))[: positive_int(n, "n")]
    if len(rows) < n:
        raise InputError("n", f"must be at most {training}, the number of training images", n, f"n = {training}")
    mean, std = (s.to(device) for s in channel_statistics(images.pixels[:training]))
    size = recipe.size or min(images.pixels.shape[1:3])
    pairs = Pairs(build_feed(images, device), recipe.views, size, mean, std, seed)
    both = [pairs.at_start(some, i) for i, some in enumerate(rows.split(BATCH))]
    return torch.cat([a for a, _ in both] + [b for _, b in both])


def study(
    run: Run,
    n: int = 1000,
    seed: int = 0,
    device: str = "auto",
    precision: str = "float32",
    initial: bool = True,
    views: Tensor | None = None,
    progress: Progress = lambda *_: None,
) -> Tangent:
    """Kernel, predicted embeddings and alignments of a trained run.

    `initial`: also from the kernel at initialization, which knows nothing of the training.
    """
    where = choose_device(device)
    progress(0.0, "drawing pairs")
    x = fixed_views(run, n, seed, where) if views is None else views
    model = Outputs(run.network()).to(where).eval()
    z = embed(model, x)
    d = z.shape[1]
    progress(0.1, "the tangent kernel")
    K, error = _kernel(model, x, precision)
    progress(0.5, "predicting")
    try:
        F = predict_embeddings(K, d)
    except InputError as error:
        rule = f"must have a tangent kernel with {d} modes above rounding, as many as there are embeddings"
        remedy = "take more pairs (n), train longer" + (", or precision float64" if precision != "float64" else "")
        raise InputError("run", rule, None, remedy) from error
    pca = kernel_pca(K, d)
    chance, spread = chance_alignment(len(x), d, draws=20, seed=seed)
    scores = {
        "theory": subspace_alignment(z, F),
        "kernel PCA": subspace_alignment(z, pca),
        "chance": chance,
        "chance, standard deviation": spread,
    }
    facts: dict[str, Any] = {"n": n, "d": d, "seed": seed, "precision": precision, "initial": initial}
    facts |= {"weights": checkpoint.identity(run.folder / CHECKPOINTS), "kernel_error": error}
    if initial:
        progress(0.7, "the tangent kernel at initialization")
        K0, _ = _kernel(Outputs(initial_network(run)).to(where).eval(), x, precision)
        try:
            scores["theory, initial kernel"] = subspace_alignment(z, predict_embeddings(K0, d))
        except InputError as unresolved:  # modes below the rounding of the kernel
            facts["initial_kernel"] = str(unresolved)
        scores["kernel PCA, initial kernel"] = subspace_alignment(z, kernel_pca(K0, d))
        facts |= {"drift": drift([K0, K])[-1]}
    progress(0.9, "fewer dimensions, fewer pairs")
    return Tangent(
        run.folder, z, K.astype(np.float64), scores, _by_dimension(z, F, pca), _by_pairs(z, K, _sizes(n, d)), facts
    )


def studied(
    run: Run, n: int, seed: int, device: str, precision: str, progress: Progress
) -> tuple[dict[str, float], dict[str, Any]]:
    """Scores and arrays of a run, read from RUN/ntk if the same study of the same weights has been written there, else
    made and written."""
    folder = run.folder / "ntk"
    asked = {"n": n, "seed": seed, "precision": precision, "initial": True}
    if weights := checkpoint.identity(run.folder / CHECKPOINTS):  # a run may have come without its checkpoints
        asked["weights"] = weights
    try:
        stored = json.loads((folder / "tangent.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stored = {}
    if any(stored.get(key) != value for key, value in asked.items()):
        study(run, n, seed, device, precision, progress=progress).write(folder)
        stored = json.loads((folder / "tangent.json").read_text(encoding="utf-8"))
    return stored["scores"], load_arrays(folder / "tangent.npz")


DRIFT = ("n", "seed", "steps", "t", "change", "with_first", "with_last", "theory")


@dataclass(frozen=True, eq=False)
class Drift:
    """The tangent kernel through training.

    Attributes:
        n, seed: pairs, and what fixes them.
        steps, t: times, the first 0.
        change: ‖K − K_0‖/‖K_0‖ of kernels scaled to trace 1, (T,).
        with_first, with_last: <K, K'>/‖K‖‖K'‖ with the kernel at the beginning and at the end, (T,).
        theory: alignment of the final embeddings with those predicted from K; nan where K does not resolve d modes.
        chance: what it would be of any d directions, d/2n.
    """

    run: Path
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
        """For people."""
        columns = (self.change, self.with_first, self.with_last, self.theory)
        rows = [[str(s), *(_or_unknown(v) for v in values)] for s, *values in zip(self.steps, *columns, strict=True)]
        final = "theory with the final embeddings"
        header = ["step", "relative change", "alignment with the first", "with the last", final]
        return Table(f"{self.run.name}: the tangent kernel through training", header, rows)

    def write(self, folder: Path) -> list[Path]:
        """drift.npz and drift.png."""
        from stairwise.figures.style import style
        from stairwise.figures.tangent import draw_drift

        save_arrays(folder / "drift.npz", {name: getattr(self, name) for name in DRIFT})
        with style(), atomic(folder / "drift.png") as part:
            draw_drift(self.steps, self.with_first, self.with_last, self.theory, self.chance).savefig(part)
        return [folder / "drift.npz", folder / "drift.png"]


def _or_unknown(value: float) -> str:
    return "below rounding" if np.isnan(value) else f"{value:.3f}"


def over_time(
    run: Run,
    n: int = 250,
    seed: int = 0,
    device: str = "auto",
    precision: str = "float32",
    progress: Progress = lambda *_: None,
) -> Drift:
    """How the tangent kernel moves through training, from the weights that the recipe's `keep` has kept."""
    where = choose_device(device)
    kept = list(run.kept())
    if not kept:
        raise InputError(
            "run", "must have kept weights on its way", run.folder, "train it again with --set keep=10 --restart"
        )
    x = fixed_views(run, n, seed, where)
    z = embed(Outputs(kept[-1][2]).to(where).eval(), x)
    kernels, theory = [], []
    for i, (step, _, network) in enumerate([(0, 0.0, initial_network(run)), *kept]):
        progress(i / (len(kept) + 1), f"the tangent kernel at step {step}")
        K = empirical_ntk(Outputs(network).to(where).eval(), x, precision=precision).cpu().numpy()
        kernels.append(K / np.trace(K))
        try:
            theory.append(subspace_alignment(z, predict_embeddings(K, z.shape[1])))
        except InputError:  # modes below the rounding of the kernel
            theory.append(float("nan"))
    first, last = drift(kernels), drift(kernels[::-1])[::-1]
    return Drift(
        run.folder,
        n,
        seed,
        np.array([0, *(step for step, _, _ in kept)]),
        np.array([0.0, *(t for _, t, _ in kept)]),
        np.array([one["distance"] for one in first]),
        np.array([one["alignment"] for one in first]),
        np.array([one["alignment"] for one in last]),
        np.array(theory),
        z.shape[1] / len(z),
    )


def drifted(run: Run, n: int, seed: int, device: str, precision: str, progress: Progress) -> dict[str, Any] | None:
    """Arrays of `over_time`, read from RUN/ntk if they are of the same pairs, else made and written; None where the run
    has not kept weights."""
    stored = run.folder / "ntk" / "drift.npz"
    if stored.is_file():
        found = load_arrays(stored)
        if (int(found["n"]), int(found["seed"])) == (n, seed):
            return found
    if not any(run.kept()):
        return None
    over_time(run, n, seed, device, precision, progress).write(stored.parent)
    return load_arrays(stored)


def embed(model: nn.Module, x: Tensor) -> Floats:
    """z of all views, (2n, d)."""
    with eval_mode(model):
        return np.asarray(torch.cat([model(part) for part in x.split(BATCH)]).double().cpu().numpy())


def compare(found: Sequence[Tangent]) -> Table:
    """Method against method: alignments of the trained spans on the same pairs (Table 2)."""
    names = [one.run.name for one in found]
    rows = [[a.run.name, *(f"{subspace_alignment(a.embeddings, b.embeddings):.3f}" for b in found)] for a in found]
    return Table("Span of one run's embeddings within another's", ["", *names], rows)


def drift(kernels: Sequence[Floats]) -> list[dict[str, float]]:
    """Change of a kernel since the first: relative distance, and alignment <K, K₀> / ‖K‖‖K₀‖, at every time."""
    first = np.asarray(kernels[0], dtype=np.float64)
    out = []
    for kernel in kernels:
        K = np.asarray(kernel, dtype=np.float64)
        norms = np.linalg.norm(K) * np.linalg.norm(first)
        distance = np.linalg.norm(K - first) / np.linalg.norm(first)
        out.append({"distance": float(distance), "alignment": float((K * first).sum() / norms)})
    return out


def _kernel(model: nn.Module, x: Tensor, precision: str) -> tuple[NDArray[Any], float]:
    K = empirical_ntk(model, x, precision=precision)
    return K.cpu().numpy(), ntk_error(model, x, K)


def _by_dimension(z: Floats, F: Floats, pca: Floats) -> Floats:
    """The leading d' modes of each: of z by its own principal components."""
    U = np.linalg.svd(z, full_matrices=False)[0]
    d = z.shape[1]
    return np.array([[subspace_alignment(U[:, : k + 1], other[:, : k + 1]) for k in range(d)] for other in (F, pca)])


def _by_pairs(z: Floats, K: NDArray[Any], sizes: Sequence[int]) -> Floats:
    """Alignment with fewer pairs: does it rise with their number, as the paper supposes?"""
    n, d = len(z) // 2, z.shape[1]
    rows = []
    for size in sizes:
        keep = np.r_[:size, n : n + size]
        part = K[np.ix_(keep, keep)]
        rows.append(
            (
                size,
                subspace_alignment(z[keep], predict_embeddings(part, d)),
                subspace_alignment(z[keep], kernel_pca(part, d)),
            )
        )
    return np.array(rows, dtype=np.float64).T.reshape(3, -1)


def _sizes(n: int, d: int) -> list[int]:
    found = [n]
    while found[-1] // 2 >= max(2 * d, 50):
        found.append(found[-1] // 2)
    return found[::-1]
