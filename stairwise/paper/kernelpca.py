"""Beyond the paper: SSL as kernel PCA. What do pairs add, how many modes does a probe need, and which come first?

    stairwise reproduce kernelpca                                        2 s on a CPU, scikit-learn's digits
    stairwise reproduce kernelpca --data cifar10 --set n=3000 --set crop=24 --set labelled=6000     20 s on a CPU

KernelSSL is fitted on two random crops of n images; KernelSSL with X_b = None (X = X′) and scikit-learn's KernelPCA are
fitted on the central crops of the same images. A ridge probe on central crops of other, labelled images scores the
first d modes. Expected: X = X′ and KernelPCA agree to a few percent (they differ by centring); pairs of crops add about
a percent on CIFAR-10 and nothing on digits, whose crops carry little information.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import InputError, positive_int
from stairwise.data.crops import central_crops, two_crops
from stairwise.data.images import load
from stairwise.evaluate.probes import probe_curve, ridge_accuracy
from stairwise.figures.modes import draw_kernel_pca
from stairwise.kernel.estimator import KernelSSL
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Line, Page, Panel
from stairwise.theory.alignment import step_time_quantiles

SHOWN, EXTREMES = 6, 5
ALT = "Probe accuracy over dimension and time, and the images with extreme values of the first modes."


@dataclass(frozen=True)
class Config:
    """Sizes are our choice."""

    data: str = "digits"
    n: int = 800
    crop: int = 6
    pixels: str = "standardize"
    kernel: str = "rbf"
    d: int = 40
    labelled: int = 900
    alpha: float = 1e-4
    seed: int = 0


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Probe accuracies over d (and t), and the images with extreme values of the first modes."""
    from sklearn.decomposition import KernelPCA

    images = load(config.data)
    if images.labels is None:
        raise InputError("data", "must have labels", config.data, "digits, cifar10 or stl10")
    total = len(images.pixels)
    positive_int(config.labelled, "labelled", total - config.n, f"{config.n} of {total} images are used for the pairs")
    order = np.random.default_rng(config.seed).permutation(total)
    pairs_of, probe_on = order[: config.n], order[config.n : config.n + config.labelled]
    progress(0.0, 1, "cutting crops")
    x_a, x_b = two_crops(images.take(pairs_of), config.n, config.crop, config.pixels, config.seed)
    same = central_crops(images.take(pairs_of), config.crop, config.pixels)
    x, y = central_crops(images.take(probe_on), config.crop, config.pixels), images.labels[probe_on]
    held = config.labelled // 3
    progress(0.1, 1, "modes of the pairs")
    ssl = KernelSSL(config.d, kernel=config.kernel).fit(x_a, X_b=x_b)
    steps = step_time_quantiles(ssl.eigenvalues_, config.alpha, 0.5)[0]
    times = np.append(np.geomspace(0.5 * steps[0], 1.2 * steps[-1], 40), np.inf)
    progress(0.4, 1, "probing every d and t")
    curve = probe_curve(ssl, x[held:], y[held:], X_test=x[:held], y_test=y[:held], t=times, alpha=config.alpha)
    progress(0.6, 1, "X = X′")
    alone = KernelSSL(config.d, kernel=ssl.kernel_).fit(same)
    single = probe_curve(alone, x[held:], y[held:], X_test=x[:held], y_test=y[:held])
    progress(0.8, 1, "scikit-learn's KernelPCA")
    pca = KernelPCA(config.d, kernel="precomputed").fit(ssl.kernel_(same, same))
    scale = np.sqrt(pca.eigenvalues_ / len(same))  # unit variance, like the modes of SSL
    z = [pca.transform(ssl.kernel_(part, same)) / scale for part in (x[held:], x[:held])]
    ends = np.argsort(ssl.transform(x)[:, :SHOWN], axis=0)
    return {
        "gamma": ssl.eigenvalues_,
        "times": curve.times,
        "over_time": curve.accuracy,
        "pairs": curve.accuracy[-1],
        "same": single.accuracy[-1],
        "pca": ridge_accuracy(z[0], y[held:], z[1], y[:held]),
        "chance": curve.chance,
        "extremes": images.pixels[probe_on][np.concatenate([ends[:EXTREMES], ends[-EXTREMES:]])],
        "step_times": steps,
    }


def check(arrays: Arrays) -> list[Claim]:
    pairs, same, pca = arrays["pairs"], arrays["same"], arrays["pca"]
    return [
        Claim.close("accuracy with all d, X = X′ against KernelPCA", same[-1], pca[-1], 0.05),
        Claim("accuracy with all d, pairs", float(pairs[-1]), "above chance", bool(pairs[-1] > 2 * arrays["chance"])),
        Claim.note("gain of pairs over KernelPCA, mean over d (for comparison)", (pairs - pca).mean()),
        Claim.note(
            "dimensions for 95 % of the final accuracy, pairs (KernelPCA: predicted column)",
            float(np.argmax(pairs >= 0.95 * pairs[-1]) + 1),
            float(np.argmax(pca >= 0.95 * pca[-1]) + 1),
        ),
    ]


def draw(arrays: Arrays) -> Figure:
    return draw_kernel_pca(
        {"pairs of crops": arrays["pairs"], "X = X′": arrays["same"], "KernelPCA": arrays["pca"]},
        float(arrays["chance"]),
        arrays["times"][:-1],
        arrays["over_time"][:-1],
        arrays["extremes"],
    )


def page(arrays: Arrays) -> Page:
    dims = np.arange(1, len(arrays["pairs"]) + 1)
    names = {"pairs": "pairs of crops", "same": "X = X′", "pca": "KernelPCA"}
    lines = [Line(name, dims, arrays[key], (i, 3)) for i, (key, name) in enumerate(names.items())]
    ends = [t for t in (5, 10, 20, 40) if t <= len(dims)]
    over_time = [
        Line(f"d = {d}", arrays["times"][:-1], arrays["over_time"][:-1, d - 1], (i, len(ends)))
        for i, d in enumerate(ends)
    ]
    return Page(
        "SSL as kernel PCA",
        "The embedding that an infinitely wide network learns from pairs of views consists of the leading modes of a "
        "kernel, in order. One fit gives all dimensions and all times.",
        [
            Panel("Probe accuracy over the dimension", "embedding dimension d", "accuracy", lines),
            Panel("Probe accuracy over training time", "time t", "accuracy", over_time),
        ],
    )
