"""Beyond the paper: the wider the network, the better its tangent kernel predicts it.

    stairwise reproduce width                    about four minutes on two CPU cores, photographs
    stairwise reproduce width --data cifar10

The network of Fig. 2A,B with d = 4 at widths from 64 to 4096; the learning rate is proportional to 1/width, which keeps
the speed of learning. For each width: the share of the span of trained embeddings that the tangent kernel at
initialization predicts, the largest relative error of the four step times, and the change of the kernel during
training. Expected: alignment rises towards 1, errors and drift fall.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.figures.tangent import draw_widths
from stairwise.kernel.estimator import KernelSSL
from stairwise.ntk.predict import kernel_pca, predict_embeddings
from stairwise.ntk.study import Outputs, embed, kernel_drift
from stairwise.paper import fig2ab
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Line, Page, Panel
from stairwise.table import Table
from stairwise.theory.spectra import subspace_alignment
from stairwise.theory.trajectory import Trajectory

WIDTHS = (64, 256, 1024, 4096)
BASE = 2048  # the width at which the learning rate is lr

SMOKE = {"widest": 400, "d": 2, "steps": 1000}
ALT = "Alignment of trained with predicted embeddings, errors of step times and drift over width."


@dataclass(frozen=True)
class Config:
    """Sizes are our choice."""

    data: str = "photos"
    n: int = 50
    d: int = 4
    lr: float = 1e-4
    steps: int = 4500
    widest: int = 4096
    seed: int = 0


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Train each width and compare it with the prediction of its kernel at initialization."""
    widths = [w for w in WIDTHS if w < config.widest] + [config.widest]
    rows = []
    for i, width in enumerate(widths):
        progress(i / len(widths), 1, f"width {width}")
        lr = config.lr * BASE / width
        given = fig2ab.Config(config.data, config.n, width, config.d, 1e-4, lr, config.steps, config.seed)
        trained = fig2ab.train(given, lambda *_: None)
        z = embed(Outputs(trained.network), trained.x)
        theory = KernelSSL(config.d, kernel="precomputed").fit(trained.kernel)
        ahead = np.linspace(0, 2 * trained.times[-1], 4000)
        predicted = Trajectory(ahead, theory.spectrum_at(ahead, init=trained.outputs, lr=lr), "kernel").step_times()
        measured = Trajectory(trained.times, trained.measured, "trained").step_times()
        moved = kernel_drift([trained.kernel, fig2ab.tangent_kernel(trained.network, trained.x)])[1]
        rows.append(
            (
                subspace_alignment(z, predict_embeddings(trained.kernel, config.d)),
                subspace_alignment(z, kernel_pca(trained.kernel, config.d)),
                np.max(np.abs(predicted / measured - 1)),
                moved["distance"],
                np.isfinite(measured).sum(),
            )
        )
    names = ("alignment", "kernel_pca", "step_error", "drift", "learned")
    columns = dict(zip(names, np.array(rows, dtype=np.float64).T, strict=True))
    return {"widths": np.array(widths), "d": config.d, **columns}


def check(arrays: Arrays) -> list[Claim]:
    aligned, error = arrays["alignment"], arrays["step_error"]
    return [
        Claim.close("dimensions learned by the widest", arrays["learned"][-1], float(arrays["d"]), 0),
        Claim.at_least("alignment of the widest with the theory", aligned[-1], 0.99),
        Claim("alignment of the narrowest", float(aligned[0]), "less", bool(aligned[0] < aligned[-1])),
        Claim.at_most("largest error of a step time of the widest", float(error[-1]), 0.1),
    ]


def draw(arrays: Arrays) -> Figure:
    return draw_widths(
        arrays["widths"], arrays["alignment"], arrays["kernel_pca"], arrays["step_error"], arrays["drift"]
    )


def table(arrays: Arrays) -> Table:
    rows = [
        [f"{w:,}", f"{a:.4f}", f"{p:.4f}", f"{100 * e:.1f} %", f"{m:.3g}"]
        for w, a, p, e, m in zip(
            *(arrays[k] for k in ("widths", "alignment", "kernel_pca", "step_error", "drift")), strict=True
        )
    ]
    header = ["width", "theory", "kernel PCA", "largest error of a step time", "drift of the kernel"]
    return Table("Share of the trained span that the kernel at initialization predicts", header, rows)


def page(arrays: Arrays) -> Page:
    w = np.log2(arrays["widths"].astype(float))
    lines = [Line("theory", w, arrays["alignment"], (0, 2)), Line("kernel PCA", w, arrays["kernel_pca"], (1, 2))]
    return Page(
        "The wider the network, the better its kernel predicts it",
        "Networks with one hidden layer are trained; the kernel of their gradients at initialization predicts their "
        "final embeddings and when each dimension is learned.",
        [Panel("Share of the trained span that is predicted", "log₂ width", "alignment", lines)],
        [table(arrays)],
    )
