"""Follow fixed views through training: embeddings and representations of the same images at every record."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stairwise.archives import load_arrays, save_arrays
from stairwise.checks import InputError
from stairwise.data.feed import START, mixed
from stairwise.distributed import rank
from stairwise.evaluate.representations import eval_mode
from stairwise.runs.folder import FOLLOWED
from stairwise.runs.followed import read_followed, write_followed
from stairwise.runs.reader import Run
from stairwise.staircase.shares import between, shares_along
from stairwise.staircase.steps import FEWEST, detect_steps
from stairwise.training.objective import AbstractObjective, Bootstrap
from stairwise.training.recipe import Recipe
from stairwise.training.setup import Material

COMPONENTS, PROJECTED = 32, 128  # of z and of h that are stored


def follow(objective: AbstractObjective, recipe: Recipe, material: Material, folder: Path, step: int, t: float) -> None:
    """Write the record of fixed views of the first `follow` training images, in evaluation mode."""
    if not recipe.follow or rank() != 0:
        return
    # a copy, because the original may be drawing the views of the next step
    pairs = material.pairs.copy()
    parts: dict[str, list[Tensor]] = {}
    with eval_mode(objective), torch.autocast(pairs.feed.device.type, torch.bfloat16, enabled=material.bf16):
        for x_a, x_b in pairs.fixed_batches(torch.arange(recipe.follow)):
            for x in (x_a, x_b):
                for name, value in _outputs(objective, x).items():
                    parts.setdefault(name, []).append(value.double())
    whole = {name: torch.cat(values) for name, values in parts.items()}
    h = whole.pop("h")
    decomposed = {name: _principal(x) for name, x in whole.items()}
    spectra = {name: lam.cpu().numpy() for name, (lam, _) in decomposed.items()}
    write_followed(folder, step, t, decomposed["z"][1].cpu(), _projected(h).cpu(), spectra)


def followed_summary(run: Run) -> dict[str, NDArray]:
    """What a run has followed, in few numbers: `t`, `spectrum.z` (and of BYOL's predictor and target), and, if there
    are steps, `share.times`, `share.z` and `share.h`, the shares along their new modes; the same of a control, along
    directions between the steps, as `control.…`. Empty if it followed nothing.

    It is written to RUN/followed/summary.npz and read from there once the records are gone."""
    path = run.folder / FOLLOWED / "summary.npz"
    followed = read_followed(run.folder)
    if followed is None:
        return load_arrays(path) if path.is_file() else {}
    found: dict[str, NDArray] = {"t": followed.t}
    found |= {f"spectrum.{name}": lam.astype(np.float32) for name, lam in followed.spectra.items()}
    if len(run.times) >= FEWEST:
        steps = detect_steps(run.times, run.series("covariance"))
        for name, at in (("share", steps), ("control", between(steps))):
            with suppress(InputError):  # no step has records before and after it
                shares = shares_along(followed.t, followed.z, followed.h, at)
                found |= {f"{name}.times": shares.times, f"{name}.z": shares.z, f"{name}.h": shares.h}
    save_arrays(path, found)
    return found


def _outputs(objective: AbstractObjective, x: Tensor) -> dict[str, Tensor]:
    h, z = objective.network(x)
    if not isinstance(objective, Bootstrap):
        return {"h": h, "z": z}
    return {"h": h, "z": z, "predictor": objective.predicted(z), "target": objective.target(x)[1]}


def _principal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of the covariance of x (N, d), descending, min(N, d) of them; and leading principal components.

    From the covariance, in float64: three times as fast as the singular values of x. Eigenvalues below 1e-15 of the
    largest are rounding error, which they would be anyway, because networks compute x in float32."""
    x = x - x.mean(dim=0)
    lam, axes = torch.linalg.eigh(x.T @ x / len(x))
    return lam.flip(0)[: min(x.shape)].clamp_min(0.0), x @ axes.flip(1)[:, : min(*x.shape, COMPONENTS)]


def _projected(h: Tensor) -> Tensor:
    """h times one Gaussian matrix that depends on its size alone, which keeps distances; h itself if it is small."""
    if h.shape[1] <= PROJECTED:
        return h
    generator = torch.Generator().manual_seed(mixed(START, h.shape[1]))
    matrix = torch.randn(h.shape[1], PROJECTED, generator=generator, dtype=torch.float64) / PROJECTED**0.5
    return h @ matrix.to(h.device)
