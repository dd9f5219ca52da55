"""How accurate are the closed forms on real images? Errors relative to flow and to descent, over seeds.

    python benchmarks/bench_laws.py [--data photos] [--pixels standardize] [--seeds 20]

Settings of the paper's Fig. 1 (n = 500, 20×20×3 crops, d = 10, α = 1e-7, η = 5e-5). Each seed draws images, crops and
weights. An error is the largest difference of λ_j(t) over modes and times. "solver" is the largest difference between
the flow and an explicit integration with rtol 1e-13. The last line is JSON.
"""

import argparse
import json
import warnings

import numpy as np

from stairwise.checks import TheoryWarning
from stairwise.data.crops import two_crops
from stairwise.data.images import load
from stairwise.dynamics.descent import gradient_descent
from stairwise.dynamics.flow import gradient_flow
from stairwise.theory.alignment import effective_singular_values, gaussian_init
from stairwise.theory.correlation import Correlation
from stairwise.theory.laws import closed_form
from stairwise.theory.modes import Modes

from bench_linear import ALPHA, LR, D, reference  # isort: skip


def one_seed(images, pixels, seed):
    """Errors of both laws for one draw of images, crops and weights."""
    corr = Correlation.from_pairs(*two_crops(images, 500, 20, pixels, seed))
    W0 = gaussian_init(D, corr.features, ALPHA, seed)
    s0 = effective_singular_values(W0, corr)
    steps = int(1.3 * Modes(corr.eigenvalues[:D], s0).step_times().max() / LR)
    records = np.unique(np.concatenate([np.linspace(0, steps, 500), np.geomspace(1, steps, 500)]).astype(int))
    descent = gradient_descent(W0, corr, LR, steps, records)
    t = descent.times
    flow = gradient_flow(W0, corr, t, rtol=1e-10).eigenvalues
    law, aligned, finite = (
        closed_form(W0, corr, t, **options) for options in ({}, {"law": "aligned"}, {"law": "logistic", "lr": LR})
    )

    def worst(a, b):
        return float(np.abs(a - b).max())

    off = np.abs(finite.step_times() / descent.step_times() - 1)
    return {
        "logistic": worst(law.eigenvalues, flow),
        "aligned": worst(aligned.eigenvalues, flow),
        "descent, lr law": worst(finite.eigenvalues, descent.eigenvalues),
        "descent, flow law": worst(law.eigenvalues, descent.eigenvalues),
        "step times": float(np.median(off)),
        "R_dd/α": float(s0[-1] / ALPHA),
        "solver": worst(flow, reference(W0, corr, t, 120)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="photos")
    parser.add_argument("--pixels", default="standardize")
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    warnings.simplefilter("ignore", TheoryWarning)
    images = load(options.data)
    rows = []
    for seed in range(options.seeds):
        rows.append(one_seed(images, options.pixels, seed))
        if seed == 0:
            print("seed  " + "  ".join(f"{name:>17}" for name in rows[0]))
        print(f"{seed:4}  " + "  ".join(f"{value:17.2e}" for value in rows[-1].values()), flush=True)
    table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    for name, quantile in (("median", 0.5), ("90 %", 0.9), ("max", 1.0)):
        print(f"{name:>6}" + "  ".join(f"{np.quantile(values, quantile):17.2e}" for values in table.values()))
    print(
        json.dumps(
            {
                "logistic_median": float(f"{np.median(table['logistic']):.3g}"),
                "logistic_share_within_0.005": float((table["logistic"] <= 0.005).mean()),
                "aligned_median": float(f"{np.median(table['aligned']):.3g}"),
                "descent_median": float(f"{np.median(table['descent, lr law']):.3g}"),
                "step_time_median": float(f"{np.median(table['step times']):.3g}"),
                "solver_max": float(f"{table['solver'].max():.3g}"),
            }
        )
    )


if __name__ == "__main__":
    main()
