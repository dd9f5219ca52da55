"""How much faster are flow and descent in the eigenbasis than a plain training loop?

    python benchmarks/bench_linear.py [--data photos] [--pixels unit] [--rounds 5]

Settings of the paper's Fig. 1 (n = 500, 20×20×3 crops, d = 10, α = 1e-7, η = 5e-5), one thread, float64. The naive
loop is a torch loop that embeds all pairs, forms C, calls backward and steps. Naive and fast rounds alternate in one
run, and their medians are compared. The time of the flow is from raw pairs to spectra: Γ, its eigenvectors and the
integration. Its error is the difference to DOP853 with rtol 1e-13. The last line is JSON.
"""

import argparse
import json
from time import perf_counter

import numpy as np
import torch
from scipy.integrate import solve_ivp
from threadpoolctl import threadpool_limits

from stairwise.data.crops import two_crops
from stairwise.data.images import load
from stairwise.dynamics.descent import gradient_descent
from stairwise.dynamics.eigenbasis import rhs
from stairwise.dynamics.flow import gradient_flow
from stairwise.theory.alignment import gaussian_init
from stairwise.theory.correlation import Correlation
from stairwise.theory.laws import closed_form
from stairwise.theory.modes import Modes

D, ALPHA, LR = 10, 1e-7, 5e-5
NAIVE_STEPS = 100


def naive_steps(x_a, x_b, W0, steps):
    """Seconds per step of the naive loop."""
    a, b = torch.tensor(x_a), torch.tensor(x_b)
    W = torch.tensor(W0, requires_grad=True)
    optimizer = torch.optim.SGD([W], lr=LR)
    eye = torch.eye(D, dtype=W.dtype)
    started = perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        z_a, z_b = a @ W.T, b @ W.T
        c = (z_a.T @ z_b + z_b.T @ z_a) / (2 * len(a))
        ((c - eye) ** 2).sum().backward()
        optimizer.step()
    return (perf_counter() - started) / steps


def seconds(call):
    started = perf_counter()
    result = call()
    return perf_counter() - started, result


def reference(W0, corr, t, columns=80):
    """Spectra by an explicit integration of the leading columns with tight tolerances."""
    u, gamma = corr.project(W0)
    u, gamma = u[:, :columns], gamma[:columns]
    solved = solve_ivp(
        lambda _, y: rhs(y.reshape(D, -1), gamma).ravel(), (0, t[-1]), u.ravel(), "DOP853", t, rtol=1e-13, atol=1e-22
    )
    u = solved.y.T.reshape(len(t), D, -1)
    return np.linalg.eigvalsh((u * gamma) @ u.transpose(0, 2, 1))[:, ::-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="photos")
    parser.add_argument("--pixels", default="unit")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)

    x_a, x_b = two_crops(load(options.data), 500, 20, options.pixels)
    W0 = gaussian_init(D, x_a.shape[1], ALPHA, seed=0)
    corr = Correlation.from_pairs(x_a, x_b)
    horizon = (
        1.15 * Modes(corr.eigenvalues[:D], np.diag(np.abs(np.linalg.qr(corr.project(W0)[0])[1]))).step_times().max()
    )
    steps = int(np.ceil(horizon / LR))
    t = np.linspace(0, horizon, 300)

    times = {"naive step": [], "descent step": [], "flow": [], "Γ and eigenvectors": [], "closed form": []}
    for _ in range(options.rounds):
        times["naive step"].append(naive_steps(x_a, x_b, W0, NAIVE_STEPS))
        took, fresh = seconds(lambda: Correlation.from_pairs(x_a, x_b))
        took += seconds(lambda: fresh.eigenvectors)[0]  # noqa: B023 (called at once)
        times["Γ and eigenvectors"].append(took)
        took, flow = seconds(lambda: gradient_flow(W0, fresh, t, rtol=1e-7))  # noqa: B023
        times["flow"].append(took)
        took, _ = seconds(lambda: gradient_descent(W0, fresh, LR, steps, steps))  # noqa: B023
        times["descent step"].append(took / steps)
        times["closed form"].append(seconds(lambda: closed_form(W0, fresh, t))[0])  # noqa: B023

    median = {name: float(np.median(values)) for name, values in times.items()}
    naive_total = median["naive step"] * steps
    whole_flow = median["Γ and eigenvectors"] + median["flow"]
    error = float(np.abs(flow.eigenvalues - reference(W0, corr, t)).max())
    print(
        f"{options.data}, {options.pixels} pixels, {steps:,} steps to t = {horizon:.4g}, γ_1/γ_d = "
        f"{corr.eigenvalues[0] / corr.eigenvalues[D - 1]:.0f}"
    )
    print(f"{'what':34}{'time':>14}{'naive / it':>12}")
    print(f"{'naive torch loop, whole run':34}{naive_total:>12.1f} s{1:>12}")
    print(f"{'gradient flow, from raw pairs':34}{whole_flow:>12.3f} s{naive_total / whole_flow:>12.0f}")
    print(f"{'gradient flow, Γ known':34}{median['flow']:>12.3f} s{naive_total / median['flow']:>12.0f}")
    print(f"{'closed form, Γ known':34}{median['closed form']:>12.3f} s{naive_total / median['closed form']:>12.0f}")
    print(f"{'naive step':34}{median['naive step'] * 1e6:>11.1f} µs{1:>12}")
    print(
        f"{'descent step':34}{median['descent step'] * 1e6:>11.1f} µs"
        f"{median['naive step'] / median['descent step']:>12.0f}"
    )
    print(
        json.dumps(
            {
                "flow_vs_naive": round(naive_total / whole_flow, 1),
                "descent_vs_naive": round(median["naive step"] / median["descent step"], 1),
                "max_abs_err": float(f"{error:.3g}"),
            }
        )
    )


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
