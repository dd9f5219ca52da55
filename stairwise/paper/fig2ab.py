"""Fig. 2A,B: a nonlinear network learns in steps, and its tangent kernel at initialization predicts when.

    stairwise reproduce fig2ab                    two minutes on two CPU cores, photographs that ship with scikit-learn
    stairwise reproduce fig2ab --data cifar10     the paper's data

One hidden layer of 2048 ReLUs in PyTorch's parametrization, d = 10, 50 images, one fixed pair of standardized 20×20
crops each, ‖C − I‖², full-batch descent at learning rate 1e-4 for 7000 steps. The paper scales "the weights" by 1e-4;
if all are scaled, nothing is learned in that time, so we scale the readout only. The paper shows no theory here; ours
is the kernelized solution for the network's tangent kernel at initialization. Expected: about eight steps; the times of
those reached among the first eight are within 10 % of the prediction.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stairwise.figures.staircase import draw_staircase
from stairwise.kernel.estimator import KernelSSL
from stairwise.nets.encoder import Network
from stairwise.ntk.study import Outputs, embed
from stairwise.paper.fig1ab import staircase_panels
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress, part
from stairwise.report.page import Page
from stairwise.runs.reader import Run
from stairwise.table import Table
from stairwise.theory.trajectory import Trajectory
from stairwise.training.loop import Trainer
from stairwise.training.process import StopRequest
from stairwise.training.recipe import load_recipe

Floats = NDArray[np.float64]
FIRST = 8  # modes whose step times are checked

SMOKE = {"steps": 200}
ALT = "Loss and eigenvalues of C of a trained network, with the prediction of its tangent kernel."


@dataclass(frozen=True)
class Config:
    """The paper's numbers (App. D.1)."""

    data: str = "photos"
    n: int = 50
    width: int = 2048
    d: int = 10
    alpha: float = 1e-4
    lr: float = 1e-4
    steps: int = 7000
    seed: int = 0


@dataclass(frozen=True, eq=False)
class _Trained:
    """A network before and after training.

    Attributes:
        x: all views, first views first, (2n, channels, side, side).
        kernel, outputs: tangent kernel and outputs at initialization, (2n, 2n), (2n, d).
        times, measured: eigenvalues of C over time, (T,), (T, d).
        network: after training.
    """

    x: torch.Tensor
    kernel: Floats
    outputs: Floats
    times: Floats
    measured: Floats
    network: Network


def train(config: Config, progress: Progress) -> _Trained:
    recipe = load_recipe(
        "mlp",
        {
            "data": config.data,
            "pretrain": config.n,
            "encoder_options.widths": [config.width],
            "d": config.d,
            "alpha": config.alpha,
            "lr": config.lr,
            "steps": config.steps,
            "records": max(1, config.steps // 20),
            "seed": config.seed,
        },
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(recipe, Path(folder), torch.device("cpu"))
        try:
            x = torch.cat(trainer.fixed_pairs())
            kernel, outputs = tangent_kernel(trainer.network, x), embed(Outputs(trainer.network), x)
            trainer.resume()
            trainer.run(
                StopRequest(), 1e9, lambda i, n, words: progress(i, n, f"training, step {i:,} of {n:,}; {words}")
            )
        finally:
            trainer.close()
        run = Run(Path(folder))
        # eigenvalues are measured before the update, and t is counted after it
        times = np.maximum(run.times - config.lr, 0.0)  # the first one is zero up to rounding
        return _Trained(x, kernel, outputs, times, run.series("eigenvalues"), trainer.network)


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Train, and predict from the tangent kernel at initialization."""
    trained = train(config, part(progress, 0, 0.95))
    progress(0.95, 1, "predicting")
    t = trained.times
    theory = KernelSSL(config.d, kernel="precomputed").fit(trained.kernel)
    ahead = np.linspace(0, 2 * t[-1], 4000)  # a step measured just before the end may be predicted just after it
    predicted = theory.spectrum_at(ahead, init=trained.outputs, lr=config.lr)
    return {
        "predicted_steps": Trajectory(ahead, predicted, "kernel").step_times(),
        "times": t,
        "measured": trained.measured,
        "predicted": theory.spectrum_at(t, init=trained.outputs, lr=config.lr),
        "gamma": theory.eigenvalues_,
        "lr": config.lr,
    }


def tangent_kernel(network: Network, x: torch.Tensor) -> Floats:
    r"""K̃(x, x') = (1/d) Σ_k ∇f_k(x)·∇f_k(x') of a network with one hidden layer, in closed form.

    With h = ReLU(Wx + c) and f = Ah + b: h·h' + 1 from the readout, and (x·x' + 1) Σ_i a_i 1[h_i > 0] 1[h'_i > 0] from
    the hidden layer, a_i = Σ_k A_ki²/d.
    """
    x = x.flatten(1).double()
    with torch.no_grad():
        h = network.backbone(x.float()).double()
        readout: torch.Tensor = cast(Any, network.projector)[-1].weight.double()
        active = (h > 0).double()
        weights = readout.square().sum(dim=0) / len(readout)
        kernel = h @ h.T + 1 + (x @ x.T + 1) * ((active * weights) @ active.T)
    return np.asarray(kernel.numpy())


def step_times(arrays: Arrays) -> tuple[Floats, Floats]:
    """Measured and predicted times at which eigenvalues cross one half."""
    return Trajectory(arrays["times"], arrays["measured"], "trained").step_times(), arrays["predicted_steps"]


def check(arrays: Arrays) -> list[Claim]:
    measured, predicted = step_times(arrays)
    reached = np.isfinite(measured[:FIRST])
    off = np.abs(predicted[:FIRST][reached] / measured[:FIRST][reached] - 1)
    loss0 = ((1 - arrays["measured"][0]) ** 2).sum()
    expected = (predicted <= arrays["times"][-1]).sum()
    return [
        Claim.close("the loss starts at d", loss0, len(measured), 0.01),
        Claim.close("steps taken, and predicted to be", np.isfinite(measured).sum(), expected, 1),
        Claim.at_most(
            f"largest relative error of the step times of the {len(off)} reached among the first {FIRST} modes",
            float(np.max(off)) if len(off) else np.nan,
            0.1,
        ),
        Claim("median relative error of them", float(np.median(off)) if len(off) else np.nan, "any", len(off) > 0),
    ]


def draw(arrays: Arrays) -> Figure:
    return draw_staircase(
        arrays["times"],
        arrays["measured"],
        arrays["predicted"],
        step_times(arrays)[1],
        "trained network",
        "its tangent kernel at initialization",
    )


def table(arrays: Arrays) -> Table:
    measured, predicted = step_times(arrays)
    rows = [
        [
            str(j + 1),
            f"{g:.4g}",
            f"{p:.4f}",
            f"{m:.4f}",
            f"{100 * (p / m - 1):+.1f} %" if np.isfinite(m) else "not reached",
        ]
        for j, (g, p, m) in enumerate(zip(arrays["gamma"], predicted, measured, strict=True))
    ]
    return Table("When each dimension is learned (λ = ½)", ["mode", "γ", "predicted t", "measured t", "error"], rows)


def page(arrays: Arrays) -> Page:
    times, measured, predicted, steps = (arrays[k] for k in ("times", "measured", "predicted", "predicted_steps"))
    return Page(
        "A nonlinear network learns one dimension at a time",
        "A network with one hidden layer of ReLUs is trained from a small readout to map two crops of an image to the "
        "same point while keeping its outputs uncorrelated. Solid: trained. Dashed: predicted in closed form from the "
        "kernel of its gradients at initialization.",
        staircase_panels("trained network", times, measured, predicted, steps),
        [table(arrays)],
    )
