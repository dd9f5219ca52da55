"""What does a small initialization cost, and do hidden representations step? Small networks, on a CPU.

    python -m benchmarks.bench_starts [--starts small standard] [--seeds 6 7 8] [--folder runs/starts] [--out FILE]

`stairwise reproduce fig5` and `fig7` ask this of the paper's network, with one seed. Here are networks that need no
GPU, with several: ResNet-18 of width 8 at 16 px, d = 64, CIFAR-10, 4000 updates of 128 images. Two runs per loss and
seed, with the settings of `cifar10-…-small` and of `cifar10-…-standard`. They differ not in their start alone, but also
in optimizer and rate, and for Barlow Twins in the loss, as the paper's do. A run takes ten minutes on one core.

One row per run: accuracy of logistic regression and of nearest neighbours (kNN) on the representations h at the end;
grown modes of the covariance; steps that `detect_steps` finds. From small initialization also the scores of Fig. 5, in
standard deviations above shifted times, of shares along new modes: that of h; that of the embeddings z, for comparison;
that of h without the step on which it leans most; and that of h along the modes of other steps. Finished runs in FOLDER
are not repeated, and FILE keeps what it holds of other runs. The last line is JSON.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.bench_coming import RATES, SMALL
from benchmarks.rows import keep, show, stored_rows, trained
from stairwise.paper.trained import METHODS
from stairwise.runs.reader import Run
from stairwise.staircase.shares import Shares
from stairwise.staircase.steps import detect_steps
from stairwise.theory.spectra import grown
from stairwise.training.following import followed_summary
from stairwise.training.recipe import Recipe, load_recipe

MEASURED: dict[str, Any] = {
    "keep": 0,
    "follow": 512,
    "records": 300,
    "probes": ["knn", "logistic"],
    "probe_times": 4,
    "probe_images": 10_000,
}
STARTS = ("small", "standard")
NAMES = [f"{method} {start}" for method in METHODS for start in STARTS]  # of runs
SCORES = {
    "share": "share of h",
    "own": "share of z",
    "without_best": "of h without the best step",
    "elsewhere": "of h at other steps",
}
HEADER = ["loss", "initialization", "seed", "logistic", "kNN", "grown", "steps", *SCORES.values()]


def recipe_for(method: str, start: str, seed: int) -> Recipe:
    rate = RATES.get(method, {}) if start == "small" else {}
    return load_recipe(f"cifar10-{method}-{start}", SMALL | MEASURED | rate | {"seed": seed})


def measured(name: str, seed: int, run: Run | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"run": name, "seed": seed}
    if run is None:
        return facts | {"diverged": True}
    facts |= {probe: round(float(run.probes(probe)[1][-1]), 4) for probe in ("logistic", "knn")}
    lam = run.series("covariance")
    facts |= {"grown": grown(lam[-1])[0], "steps": len(detect_steps(run.times, lam).times)}
    found = followed_summary(run)
    if name.endswith(STARTS[0]) and "share.h" in found:
        facts |= scores(Shares(*(found[key].astype(float) for key in ("t", "share.times", "share.z", "share.h"))))
    return facts


def scores(shares: Shares) -> dict[str, Any]:
    """How many steps were scored, and z against shifted times."""
    several = len(shares.times) > 1
    found = {
        "share": shares.events,
        "own": shares.own,
        "without_best": shares.without_best if several else None,
        "elsewhere": shares.elsewhere if several else None,
    }
    return {"scored": len(shares.times)} | {name: round(e.z, 2) for name, e in found.items() if e is not None}


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    found = []
    for row in rows:
        method, start = row["run"].split()
        cells = ["diverged", *["–"] * (len(HEADER) - 4)]
        if not row.get("diverged"):
            cells = [f"{100 * row[probe]:.1f} %" for probe in ("logistic", "knn")]
            cells += [str(row[number]) for number in ("grown", "steps")]
            cells += [f"{row[score]:.1f}" if score in row else "–" for score in SCORES]
        found.append([METHODS[method], start, str(row["seed"]), *cells])
    return found


def together(rows: list[dict[str, Any]], score: str) -> dict[str, float]:
    """z of all seeds of each loss together: their sum over the root of their number. Each must have one."""
    z = {m: [row[score] for row in rows if row["run"] == f"{m} {STARTS[0]}"] for m in METHODS}
    return {method: sum(values) / len(values) ** 0.5 for method, values in z.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--starts", nargs="+", default=STARTS, choices=STARTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[6, 7, 8])
    parser.add_argument("--folder", type=Path, default=Path("runs/starts"))
    parser.add_argument("--out", type=Path, help="also write the results of all runs to this JSON file")
    options = parser.parse_args()
    rows = stored_rows(options.out)
    for start in options.starts:
        for seed in options.seeds:
            for method in options.losses:
                run = trained(recipe_for(method, start, seed), options.folder / f"{method}-{start}-{seed}")
                rows = keep(rows, measured(f"{method} {start}", seed, run), NAMES, options.out)
    show(HEADER, table(rows), rows)


if __name__ == "__main__":
    main()
