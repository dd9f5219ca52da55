"""Does BYOL step? Small networks, on a CPU.

    python -m benchmarks.bench_byol [--seeds 1 2 3] [--folder runs/byol] [--out FILE.npz]

`stairwise reproduce byol` asks this of the paper's network. Here are networks that need no GPU, with several seeds:
ResNet-18 of width 8 at 16 px, d = 64, CIFAR-10, from standard initialization and with all parameters times 0.093. Run
`long` is the latter with four times as many updates. The other losses are for comparison: the same network, each with
its own small initialization and optimizer. The largest variances begin near 1e-4 (BYOL), 1e-3 (Barlow Twins, VICReg)
and 1e-6 (SimCLR).

One row per run and part: steps that `detect_steps` finds in the online embeddings, in the predictor's outputs and in
the target's embeddings, on fixed views; the gap to the next mode when a mode rises, in decades
(stairwise/staircase/separation.py); how many modes have grown; how many times as large as the fourth variance the first
is at the end; and nearest neighbours (kNN). A run takes about seven minutes on one core, a long one half an hour.
Finished runs in FOLDER are not repeated, and FILE keeps what it holds of other runs. The last line is JSON.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import stairwise as sw
from benchmarks.bench_coming import RATES, SMALL
from benchmarks.rows import replaced, show
from stairwise.archives import load_arrays, save_arrays
from stairwise.figures.style import style
from stairwise.figures.training import Course, draw_courses
from stairwise.paper.byol import PARTS
from stairwise.paper.trained import METHODS
from stairwise.runs.reader import Run
from stairwise.staircase.separation import relative_variance, separation
from stairwise.staircase.steps import detect_steps
from stairwise.theory.spectra import grown
from stairwise.training.following import followed_summary
from stairwise.training.recipe import load_recipe

FOLLOWED: dict[str, Any] = {"keep": 0, "follow": 512, "probes": ["knn"], "probe_times": 8}
# of LARS at 0.5 and 2 and SGD at 0.1 and 0.3, the best by kNN after 1000 updates of seed 9
BYOL: dict[str, Any] = {
    "loss": "byol",
    "loss_options": {"width": 256, "decay": 0.99},
    "optimizer": "lars",
    "lr": 0.5,
    "lr_bias": 0.012,
}
STARTS = {  # of BYOL: title, factor of all parameters, updates
    "standard": ("BYOL, standard initialization", 1.0, 4000),
    "small": ("BYOL, small initialization", 0.093, 4000),
    "long": ("BYOL, small initialization, four times as long", 0.093, 16_000),
}
NAMES = [*STARTS, *METHODS]  # of runs
MODES, SHOWN = 24, 1  # modes that are stored and drawn, of this seed
LATE = 20  # records at the end
HEADER = [
    "run",
    "seed",
    "part",
    "steps",
    "gap in decades",
    "rising modes",
    "grown",
    "first over fourth variance",
    "kNN",
]


def trained(name: str, seed: int, folder: Path) -> Run:
    """BYOL from the start of this name, or another loss from small initialization."""
    if name in STARTS:
        _, alpha, steps = STARTS[name]
        settings = SMALL | FOLLOWED | BYOL | {"alpha": alpha, "steps": steps}
    else:
        settings = SMALL | FOLLOWED | RATES.get(name, {})
    base = "cifar10-bt-small" if name in STARTS else f"cifar10-{name}-small"
    return sw.train(load_recipe(base, settings | {"seed": seed}), folder / f"{name}-{seed}")


def measured(name: str, seed: int, run: Run) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Numbers of each part; loss and spectra of the online embeddings."""
    found = followed_summary(run)
    spectra = found["spectrum.z"][:, :MODES].astype(np.float32)
    arrays = {"t": found["t"], "loss": run.series("loss"), "z": spectra}
    rows = []
    for part in [part for part in PARTS if f"spectrum.{part}" in found]:
        lam = found[f"spectrum.{part}"].astype(float)
        apart = separation(found["t"], relative_variance(lam))
        facts: dict[str, Any] = {"run": name, "seed": seed, "part": PARTS[part]}
        facts |= {"steps": len(detect_steps(found["t"], lam).times), "gap": round(apart.gap, 3)}
        facts |= {"rising": len(apart.modes), "clean": apart.clean, "grown": grown(lam[-1])[0]}
        facts["level"] = float(f"{np.median(lam[-LATE:, 0] / lam[-LATE:, 3]):.3g}")
        rows.append(facts | {"knn": round(float(run.probes("knn")[1][-1]), 4)})
    return rows, {f"{name}-{seed}.{key}": value for key, value in arrays.items()}


def stored(path: Path | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and arrays of a file that an earlier call has written."""
    arrays = load_arrays(path) if path and path.exists() else {"rows": np.array("[]")}
    return json.loads(str(arrays.pop("rows"))), arrays


def draw(arrays: dict[str, Any]) -> Figure:
    """Loss and eigenvalues of the online embeddings of every run of one seed."""
    names = [name for name in NAMES if f"{name}-{SHOWN}.t" in arrays]
    found = [[arrays[f"{name}-{SHOWN}.{key}"] for key in ("t", "loss", "z")] for name in names]
    return draw_courses([Course(title(name), *of, "Cov z") for name, of in zip(names, found, strict=True)], MODES)


def title(name: str) -> str:
    return STARTS[name][0] if name in STARTS else f"{METHODS[name]}, small initialization"


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            title(row["run"]),
            *(str(row[key]) for key in ("seed", "part", "steps")),
            f"{row['gap']:.2f}",
            *(str(row[key]) for key in ("rising", "grown")),
            f"{row['level']:.3g}",
            f"{100 * row['knn']:.1f} %",
        ]
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=Path("runs/byol"))
    parser.add_argument("--out", type=Path, help=f"also store the numbers, and spectra of seed {SHOWN}, and draw them")
    options = parser.parse_args()
    rows, arrays = stored(options.out)
    for name in options.runs:
        for seed in options.seeds:
            some, spectra = measured(name, seed, trained(name, seed, options.folder))
            rows = replaced(rows, some, NAMES)
            arrays |= spectra if seed == SHOWN else {}
            print(json.dumps(some), flush=True)
            if options.out:
                save_arrays(options.out, arrays | {"rows": np.array(json.dumps(rows))})
                if len(arrays):
                    with style():
                        draw(arrays).savefig(options.out.with_suffix(".png"))
    show(HEADER, table(rows), rows)


if __name__ == "__main__":
    main()
