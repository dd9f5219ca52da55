"""Beyond the paper: does the kernel of a half-trained network predict the modes that it learns next?

    stairwise reproduce coming                          runs from small initialization, STL-10, ResNet-50
    stairwise reproduce coming --set methods=simclr --store FOLDER --join      one of them, added to the others
    stairwise reproduce coming --set d50=true           the runs of Table 1, Barlow Twins at batch 256
    stairwise reproduce coming --set methods=simclr --set only=x4      at four times the rate
    stairwise reproduce coming --data cifar10           ResNet-18
    stairwise reproduce coming --smoke                  seconds on a CPU, photographs; its numbers mean nothing

From the weights that a run has kept (`keep = 16` in its recipe): grown modes on 500 pairs at each of these moments, and
the modes that are new at the first later moment at which more have grown. Each kernel of the earlier network predicts
50 modes, by the theory and by kernel PCA, beyond those that had grown. All runs see one and the same tensor of views;
means and spreads are over three draws of pairs. The kernels "directions" and "filters" do not depend on the lengths of
weights that batch norm hides (docs/results/tables.md). For comparison, the same from two kernels that need no
derivatives: of the inputs of the last layer, and of the embeddings themselves.
Expected: more than twice chance, by the theory from the kernel of directions; and from the inputs of the last layer at
most 0.05 less than from that kernel.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stairwise.checks import InputError, one_of
from stairwise.figures.tangent import draw_coming
from stairwise.ntk.coming import KERNELS, TARGETS, WAYS
from stairwise.paper import trained
from stairwise.paper.harness import Arrays, Claim
from stairwise.paper.table1 import pipeline
from stairwise.paper.trained import (
    D50,
    LARGE,
    METHODS,
    SMALL,
    RunsConfig,
    about,
    methods_in,
    obtain,
    runs_table,
    spread,
    title,
)
from stairwise.progress import Progress, part
from stairwise.report.page import Page
from stairwise.runs.reader import Run
from stairwise.table import Table
from stairwise.training.studies import stored_coming

SMOKE = {"n": 40, "batches": 2}
USUAL = {"bt": "x4"}  # kind of run; Barlow Twins takes more steps in the same time at four times the rate
TITLES = trained.TITLES | {f"{m}{D50}": f"{name}, d = 50" for m, name in METHODS.items()}
FEWEST = 3  # moments with new modes, for a mean over them
JUDGED, BAR = "directions", 2.0  # the kernel that is judged, and by how many times chance
ALT = "Share of the next modes that kernels of half-trained networks predict, over training."


@dataclass(frozen=True)
class Config(RunsConfig):
    """Beyond the paper.

    Attributes:
        n, batches: pairs, and how often they are drawn.
        d50: take the runs with d = 50 instead of those from small initialization with more dimensions.
        only: take those at a higher rate, such as x4.
        views: pipeline of augmentations for all runs; default: that of Barlow Twins.
        precision, seed: of the kernels, and of the first draw.
    """

    kinds = (SMALL, trained.KINDS["x4"], D50, LARGE)
    n: int = 500
    batches: int = 3
    d50: bool = False
    only: str = ""
    views: str = ""
    precision: str = "float16"
    seed: int = 0


def studied(config: Config, method: str) -> tuple[str, str]:
    """The run that is studied: its name in the figure, and the suffix of its recipe."""
    if config.only and config.d50:
        raise InputError("only", "must be empty if d50 is true", config.only, "set one of them")
    on_stl10 = config.data == "stl10" and not config.smoke
    if config.d50:
        return f"{method}{D50}", LARGE if method == "bt" and on_stl10 else D50
    usual = USUAL.get(method, "small") if on_stl10 else "small"
    (kind,) = trained.chosen_kinds(config.only and one_of(config.only, "only", trained.FROM_SMALL), [method], [usual])
    return trained.run_name(method, kind), trained.KINDS[kind]


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    runs: dict[str, Run] = {}
    for i, method in enumerate(config.chosen()):
        share = part(progress, 0.5 * i / len(config.chosen()), 0.5 * (i + 1) / len(config.chosen()))
        name, kind = studied(config, method)
        runs[name] = obtain(replace(config, methods=method), kind, share)[method]
    arrays = about(runs)
    seeds = range(config.seed, config.seed + config.batches)
    for i, (name, run) in enumerate(runs.items()):
        share = part(progress, 0.5 + 0.5 * i / len(runs), 0.5 + 0.5 * (i + 1) / len(runs))
        how = config.device, config.precision, share
        found = stored_coming(run, config.n, seeds, *how, views=pipeline(config.data, config.smoke, config.views))
        if found is None:
            remedy = "train it again with --set keep=16 --restart"
            raise InputError(str(run.folder), "must have kept weights during training", None, remedy)
        arrays |= {f"{name}.{k}": v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in found.items()}
    return arrays


def means(arrays: Arrays, name: str, target: str = "next") -> tuple[NDArray, NDArray]:
    """Shares and chance, (draws, kernels, ways): means over the moments before new modes at which the kernel predicts
    any; nan if there are none."""
    shares, chance = arrays[f"{name}.shares"][:, :, TARGETS.index(target)], arrays[f"{name}.chance"]
    missing = np.isnan(shares)
    one, other = (np.ma.array(values, mask=missing).mean(axis=1).filled(np.nan) for values in (shares, chance))
    return one, other


def kernels_in(arrays: Arrays, name: str) -> tuple[str, ...]:
    """The kernels of a run; the first runs do not have the two for comparison."""
    return KERNELS[: arrays[f"{name}.shares"].shape[-2]]


def check(arrays: Arrays) -> list[Claim]:
    claims = []
    for name in methods_in(arrays):
        words, (shares, chance) = title(arrays, name, TITLES), means(arrays, name)
        moments = int((arrays[f"{name}.until"] >= 0).sum())
        claims.append(Claim.at_least(f"{words}: moments before new modes", moments, FEWEST))
        one, bar = shares[:, KERNELS.index(JUDGED), 0], BAR * chance[:, KERNELS.index(JUDGED), 0]
        text = f"{words}: share of the next modes, theory, kernel of {JUDGED}"
        expected = f"> {bar.mean():.3f}, twice chance, in every draw"
        claims.append(Claim(text, float(one.mean()), expected, bool((one > bar).all())))
        for k, kernel in enumerate(kernels_in(arrays, name)):
            for w, way in enumerate(WAYS):
                if (kernel, way) != (JUDGED, "theory"):
                    text = f"{words}: share of the next modes, {way}, kernel {kernel}"
                    claims.append(Claim.note(text, float(shares[:, k, w].mean())))
    return claims


def table(arrays: Arrays) -> Table:
    """Means over moments: one row per run and kernel."""
    rows = []
    for name in methods_in(arrays):
        run = title(arrays, name, TITLES)
        for target, words in zip(TARGETS, ("next", "all until the end"), strict=True):
            shares, chance = means(arrays, name, target)
            rows += [
                [run, words, kernel, *(spread(shares[:, k, w]) for w in range(2)), spread(chance[:, k, 0])]
                for k, kernel in enumerate(kernels_in(arrays, name))
            ]
    return Table("Share of new modes that kernels predict", ["run", "modes", "kernel", *WAYS, "chance"], rows)


def moments_table(arrays: Arrays) -> Table:
    """Every moment before new modes: theory from each kernel."""
    rows = []
    for name in methods_in(arrays):
        run = title(arrays, name, TITLES)
        steps, grown, until = (arrays[f"{name}.{k}"] for k in ("steps", "grown", "until"))
        for i, j in enumerate(until):
            if j >= 0:
                shares, chance = arrays[f"{name}.shares"][:, i, 0, :, 0], arrays[f"{name}.chance"][:, i, 0, 0]
                cells = [spread(column) for column in shares.T] + ["–"] * (len(KERNELS) - shares.shape[1])
                when = f"{steps[i]:,} to {steps[j]:,}"
                rows.append([run, when, f"{grown[i]} → {grown[j]}", *cells, f"{chance.mean():.3f}"])
    header = ["run", "updates", "grown modes", *KERNELS, f"chance, {KERNELS[0]}"]
    return Table("Share of the next modes, theory, moment by moment", header, rows)


def draw(arrays: Arrays) -> Figure:
    rows = []
    for name in methods_in(arrays):
        some = np.flatnonzero(arrays[f"{name}.until"] >= 0)
        steps, shares = arrays[f"{name}.steps"][some], arrays[f"{name}.shares"][:, some, 0]
        lines = {kernel: shares[:, :, k, 0] for k, kernel in enumerate(kernels_in(arrays, name))}
        lines[f"kernel PCA, {JUDGED}"] = shares[:, :, KERNELS.index(JUDGED), 1]
        rows.append((title(arrays, name, TITLES), steps, lines, arrays[f"{name}.chance"][:, some, 0, 0].mean(axis=0)))
    return draw_coming(rows)


def page(arrays: Arrays) -> Page:
    return Page(
        "Do kernels of half-trained networks predict the next modes?",
        "The share of the modes that grow next that lies in the span of modes predicted from a kernel.",
        [],
        [table(arrays), moments_table(arrays), runs_table(arrays)],
    )
