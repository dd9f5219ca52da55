"""Why is SimCLR stepwise from standard initialization? Small networks, on a CPU, with one thing changed or few.

    python -m benchmarks.bench_overshoot [--seeds 3 4 5] [--folder runs/overshoot] [--out FILE.json]

The paper's SimCLR starts with SGD at 0.5 from the first update on, and is more stepwise than the other losses
(docs/results/sharpness.md). Does that come from its first updates? ResNet-18 of width 8 at 16 px, d = 64, CIFAR-10,
standard initialization, 2400 updates of 128 images. One row per run: how far the largest variance of the embeddings
rises within the first 80 updates, as a multiple of that of the untrained network, and within 80 updates after the
warm-up; the gap to the next mode when a mode rises, in decades (stairwise/staircase/separation.py); how many modes rise
(of the first ten); how many have grown at the end; the loss at the end. The optimizers of VICReg and Barlow Twins
change rate, schedule and warm-up as well. A run takes four minutes on one core; finished runs in FOLDER are not
repeated (diverged ones are), and FILE keeps what it holds of other runs. The last line is JSON.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.bench_coming import SMALL
from benchmarks.initial_gaps import initial_embeddings
from benchmarks.rows import keep, show, stored_rows, trained
from stairwise.figures.style import key, panels, style
from stairwise.runs.reader import Run
from stairwise.staircase.separation import relative_variance, separation
from stairwise.theory.spectra import grown
from stairwise.training.recipe import Recipe, load_recipe, recipe_of
from stairwise.training.setup import Calendar

SHORT: dict[str, Any] = {"keep": 0, "steps": 2400, "records": 600, "window": 512}
EARLY = 80  # updates
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.5, "lr_bias": 0.0, "schedule": "constant", "warmup_epochs": 0.0}
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # title, recipe and what is changed in it
    "paper": ("SimCLR: SGD at 0.5, momentum 0.9", "cifar10-simclr-standard", {}),
    "warm": ("SimCLR: the same with an epoch of warm-up", "cifar10-simclr-standard-warm", {}),
    "plain": ("SimCLR: SGD at 0.5, no momentum", "cifar10-simclr-standard", {"momentum": 0.0}),
    "fast": ("SimCLR: SGD at 5, no momentum", "cifar10-simclr-standard", {"lr": 5.0, "momentum": 0.0}),
    "tenth": ("SimCLR: SGD at 0.05, momentum 0.9", "cifar10-simclr-standard", {"lr": 0.05}),
    "lars": ("SimCLR with VICReg's optimizer", "cifar10-simclr-standard-lars", {}),
    "bt": ("Barlow Twins with its own optimizer", "cifar10-bt-standard", {}),
    "bt-sgd": ("Barlow Twins: SGD at 0.5, momentum 0.9", "cifar10-bt-standard", SGD),
    "vicreg": ("VICReg with its own optimizer", "cifar10-vicreg-standard", {}),
    "vicreg-sgd": ("VICReg: SGD at 0.5, momentum 0.9", "cifar10-vicreg-standard", SGD),
}
COLORS = {"S": "#1b4a7a", "B": "#c08a2d", "V": "#4f8a5b"}  # of SimCLR, Barlow Twins and VICReg
MARKS = dict(zip(VARIANTS, "oDv<P*sX^^", strict=True))
HEADER = ["run", "seed", "rise", "rise after the warm-up", "gap in decades", "rising modes, of ten", "grown", "loss"]


def recipe_for(name: str, seed: int) -> Recipe:
    _, recipe, changes = VARIANTS[name]
    return load_recipe(recipe, SMALL | SHORT | changes | {"seed": seed})


def measured(name: str, seed: int, run: Run | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"run": name, "seed": seed}
    if run is None:
        return facts | {"diverged": True}
    lam, recipe = run.series("covariance"), recipe_of(run)
    warmup = Calendar(recipe, int(run.facts["training_images"]), int(run.facts["batch"])).warmup
    early, late = (sum(record.step <= steps for record in run.records) for steps in (EARLY, warmup + EARLY))
    z = torch.cat(initial_embeddings(recipe, "cifar10"))
    before = float(torch.linalg.eigvalsh(torch.cov(z.T))[-1])
    apart = separation(run.times, relative_variance(lam))
    rises = [float(f"{lam[:count, 0].max() / before:.4g}") for count in (early, late)]
    facts |= {"rise": rises[0], "rise_after_warmup": rises[1], "gap": round(apart.gap, 3)}
    facts |= {"rising": len(apart.modes), "grown": grown(lam[-1])[0]}
    return facts | {"loss": round(float(run.series("loss")[-1]), 4)}


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [VARIANTS[row["run"]][0], str(row["seed"])]
        + (
            ["diverged", *["–"] * 5]
            if row.get("diverged")
            else [
                *(f"{row[rise]:,.0f}" for rise in ("rise", "rise_after_warmup")),
                f"{row['gap']:.2f}",
                str(row["rising"]),
                str(row["grown"]),
                f"{row['loss']:.2f}",
            ]
        )
        for row in rows
    ]


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Gap, and grown modes at the end, over the rise after the warm-up; one mark per run."""
    figure, axes = panels(2, height=3.2)
    looks = {}
    for name, (title, *_) in VARIANTS.items():
        mine = [row for row in rows if row["run"] == name and not row.get("diverged")]
        if not mine:
            continue
        looks[name] = {"marker": MARKS[name], "linestyle": "", "markersize": 5.5, "color": COLORS[title[0]]}
        looks[name] |= {"markeredgecolor": "0.3", "markeredgewidth": 0.4}
        for ax, number in zip(axes, ("gap", "grown"), strict=True):
            ax.plot([row["rise_after_warmup"] for row in mine], [row[number] for row in mine], **looks[name])
    for ax, words in zip(axes, ("gap in decades", "grown modes at the end"), strict=True):
        ax.set(xscale="log", ylim=(0, None), xlabel="rise of the largest variance (factor)", ylabel=words)
    key(figure, [(VARIANTS[name][0], look) for name, look in looks.items()], 2)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[3, 4, 5])
    parser.add_argument("--folder", type=Path, default=Path("runs/overshoot"))
    parser.add_argument("--out", type=Path, help="also write the results of all runs to this JSON file, and draw them")
    options = parser.parse_args()
    rows = stored_rows(options.out)
    for name in options.runs:
        for seed in options.seeds:
            run = trained(recipe_for(name, seed), options.folder / f"{name}-{seed}")
            rows = keep(rows, measured(name, seed, run), list(VARIANTS), options.out)
            if options.out:
                with style():
                    draw(rows).savefig(options.out.with_suffix(".png"))
    show(HEADER, table(rows), rows)


if __name__ == "__main__":
    main()
