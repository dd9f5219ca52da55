"""How do the exact and the approximate kernel solutions grow with the number of pairs, and how accurate are they?

    python benchmarks/bench_scale.py --quick                 # a CPU, about a minute
    python benchmarks/bench_scale.py --device cuda           # 100,000 pairs exactly, 1,000,000 by Nyström, d = 50

Views are noisy copies of points with a power-law spectrum, 3072 features (64 with --quick), drawn on the device before
the clock starts. RBF kernel, float32 values, float64 iteration and sums. Columns: "tiles" is the time until K̃ stands,
"solve" the time of the modes once it does, "total" both; C − I is of all fitted pairs; "γ off" is the relative error
against the same method in float64 on 1000 of the pairs. The peers are scikit-learn's Nystroem, with the same landmarks,
batches and float64 sums, and scipy's eigh, on the CPU of the same machine; and the same formulas in torch on the same
device. The last line is JSON.
"""

import argparse
import json

import numpy as np
import scipy.linalg
import torch
from sklearn.kernel_approximation import Nystroem

from benchmarks.clock import now
from stairwise.distributed import choose_device
from stairwise.kernel.estimator import KernelSSL
from stairwise.kernel.kernels import rbf
from stairwise.kernel.models import Exact
from stairwise.kernel.operators import Blocks
from stairwise.kernel.routes import SPARE
from stairwise.kernel.solvers import solve
from stairwise.kernel.tiles import TilePairs

BATCH = 8192
FEW = 1000  # pairs on which float64 is computed too


def batch(i, rows, features, device):
    """Pairs number i: two noisy views, drawn on the device."""
    generator = torch.Generator(device).manual_seed(i)
    scale = (1 + torch.arange(features, device=device)) ** -0.6
    base = torch.randn(rows, features, generator=generator, device=device)
    noise = [torch.randn(rows, features, generator=generator, device=device) for _ in "ab"]
    return tuple((base + 0.5 * one) * scale for one in noise)


def sizes(n):
    return [min(BATCH, n - start) for start in range(0, n, BATCH)]


def views(n, features, device):
    a, b = (torch.empty(n, features, device=device) for _ in "ab")
    for i, rows in enumerate(sizes(n)):
        a[i * BATCH : i * BATCH + rows], b[i * BATCH : i * BATCH + rows] = batch(i, rows, features, device)
    return a, b


def off_identity(cross, n):
    """Largest entry of |C − I|, C = (Σ z_a z_bᵀ + z_b z_aᵀ) / 2n."""
    C = (cross + cross.T) / (2 * n)
    return float(abs(C - torch.eye(C.shape[0], device=C.device, dtype=C.dtype)).max())


def gamma_error(single, double):
    return float(np.abs(single.eigenvalues_ / double.eigenvalues_ - 1).max())


def exact(n, d, features, device, memory):
    """Tiles, then modes, as `KernelSSL(method="exact")` computes them; kept apart for the clock."""
    a, b = views(n, features, device)
    kernel = rbf().fit(torch.cat([a[:500], b[:500]]))
    model = Exact(Blocks((a, b), (kernel, kernel), True, "float32"), True, "krylov", memory)
    started = now(device)
    pairs = TilePairs(model.blocks, True, memory)
    tiles = now(device)
    solution = solve(pairs, d, "krylov", spare=SPARE)
    done = now(device)
    z = pairs.matmul(solution.coefficients) / torch.as_tensor(solution.eigenvalues**0.5, device=device)  # one more pass
    few = min(n, 1000)
    small = [KernelSSL(d, kernel=kernel, dtype=t, method="exact", solver="krylov") for t in ("float32", "float64")]
    parts = [one.fit(a[:few], X_b=b[:few]) for one in small]
    return {
        "n": n,
        "tiles_s": tiles - started,
        "solve_s": done - tiles,
        "total_s": done - started,
        "products": solution.products,
        "stored": pairs.stored,
        "C_off": off_identity(z[:n].T @ z[n:], n),
        "gamma_off": gamma_error(*parts),
    }


def nystroem(n, d, features, width, device):
    """Batches through `partial_fit`, as they would come from a disk or a network."""
    kernel = rbf().fit(torch.cat(batch(0, 500, features, device)))
    est = KernelSSL(d, kernel=kernel, method="nystroem", n_features=width, dtype="float32")
    spent = -now(device)
    drawing = 0.0
    for i, rows in enumerate(sizes(n)):
        start = now(device)
        a, b = batch(i, rows, features, device)
        drawing += now(device) - start
        est.partial_fit(a, X_b=b)
    gamma = est.eigenvalues_
    spent += now(device) - drawing
    cross = 0
    for i, rows in enumerate(sizes(n)):
        z_a, z_b = map(est.transform, batch(i, rows, features, device))
        cross = cross + z_a.T @ z_b
    few = batch(0, min(n, FEW), features, device)
    parts = [
        KernelSSL(d, kernel=kernel, method="nystroem", n_features=width, dtype=t).fit(few[0], X_b=few[1])
        for t in ("float32", "float64")
    ]
    return {
        "n": n,
        "total_s": spent,
        "C_off": off_identity(cross, n),
        "gamma_off": gamma_error(*parts),
        "gamma": gamma,
        "double": parts[1],
        "landmarks": est._model.maps[0].points,
        "kernel": kernel,
    }


def on_cpu(points, gamma):
    """Features of scikit-learn's Nystroem with our landmarks, and eigh, on the CPU."""
    # all of `points` are its basis, whatever their order
    peer_map = Nystroem(gamma=gamma, n_components=len(points), random_state=0).fit(points.cpu().numpy())

    def top(matrix, d):
        return scipy.linalg.eigh(matrix, subset_by_index=[len(matrix) - d, len(matrix) - 1])[0][::-1]

    return lambda x: peer_map.transform(x).astype(np.float64), lambda x: x.cpu().numpy(), top


def on_device(points, gamma):
    """The same formulas in torch, where our solution is computed: features of every batch are whitened."""

    def kernel(x):
        squares = (x * x).sum(1)[:, None] + (points * points).sum(1) - 2 * x @ points.T
        return (-gamma * squares.clamp_(min=0)).exp_()

    values, vectors = torch.linalg.eigh(kernel(points))  # scikit-learn's SVD is the same and takes much longer
    white = (vectors / values.clamp(min=1e-12).sqrt()) @ vectors.T

    def top(matrix, d):
        return torch.linalg.eigvalsh(matrix)[-d:].flip(0).cpu().numpy()

    return lambda x: (kernel(x) @ white.T).double(), lambda x: x, top


def peer_modes(start, batches, d, points, gamma, device):
    """Seconds and γ of a peer, from features of every batch and eigh of their correlation; drawing is not counted."""
    spent, drawing, total, n = -now(device), 0.0, 0, 0
    features, placed, top = start(points, gamma)
    for i, rows in batches:
        began = now(device)
        a, b = map(placed, batch(i, rows, points.shape[1], device))
        drawing += now(device) - began
        total, n = total + features(a).T @ features(b), n + rows
    found = top((total + total.T) / (2 * n), d)
    return spent + now(device) - drawing, found


PEERS = {"sklearn": on_cpu, "torch": on_device}


def compared(name, n, d, device, ours):
    """Seconds of a peer, the largest difference of its γ from ours, and from float64 on 1000 pairs."""
    gamma, double = ours["kernel"].gamma, ours["double"]
    spent, found = peer_modes(PEERS[name], enumerate(sizes(n)), d, ours["landmarks"], gamma, device)
    points = double._model.maps[0].points.float()
    few = [(0, min(n, FEW))]
    _, part = peer_modes(PEERS[name], few, d, points, gamma, device)
    off = np.abs(part / double.eigenvalues_ - 1).max()
    return {
        f"{name}_s": spent,
        f"{name}_differ": float(np.abs(found / ours["gamma"] - 1).max()),
        f"{name}_off": float(off),
    }


def exponent(rows, name):
    """Slope of log time over log n."""
    n, t = (np.log([row[key] for row in rows]) for key in ("n", name))
    return float(np.polyfit(n, t, 1)[0])


def short(row):
    return {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in row.items()}


def measure_exact(counts, d, features, device, memory):
    exact(counts[0] // 4, d, features, device, memory)  # warm up
    print(f"exact, d = {d}, {features} features")
    print(f"{'n':>9}{'tiles':>10}{'solve':>9}{'total':>9}{'products':>10}{'|C-I|':>10}{'γ off':>9}")
    rows = []
    for n in counts:
        row = exact(n, d, features, device, memory)
        rows.append(row)
        kept = "" if row["stored"] else "  (tiles recomputed)"
        print(
            f"{n:>9,}{row['tiles_s']:>8.2f} s{row['solve_s']:>7.2f} s{row['total_s']:>7.2f} s{row['products']:>10}"
            f"{row['C_off']:>10.1e}{row['gamma_off']:>9.1e}{kept}",
            flush=True,
        )
    growth = {"exponent": exponent(rows, "total_s"), "solve_exponent": exponent(rows, "solve_s")}
    print(f"total grows like n^{growth['exponent']:.2f}, solve like n^{growth['solve_exponent']:.2f}\n")
    return short(rows[-1] | growth)


def measure_nystroem(counts, d, features, width, device, peer_most):
    warm = nystroem(width, d, features, width, device)
    for name in PEERS if peer_most else ():
        compared(name, 400, d, device, nystroem(400, d, features, 200, device) if name == "sklearn" else warm)
    print(f"Nyström, {width} landmarks; γ off: against float64 on {FEW} pairs, ours, scikit-learn's, torch's")
    print(f"{'n':>9}{'ours':>10}{'scikit-learn':>14}{'ratio':>8}{'torch':>10}{'ratio':>8}{'|C-I|':>10}{'γ off':>27}")
    rows = []
    for n in counts:
        ours = nystroem(n, d, features, width, device)
        row = {key: ours[key] for key in ("n", "total_s", "C_off", "gamma_off")}
        for name in PEERS:
            keys = [f"{name}_{key}" for key in ("s", "differ", "off")]
            wanted = peer_most and (name == "torch" or n <= peer_most)
            row |= compared(name, n, d, device, ours) if wanted else dict.fromkeys(keys, np.nan)
        rows.append(row)
        print(
            f"{n:>9,}{row['total_s']:>8.2f} s{row['sklearn_s']:>12.2f} s{row['sklearn_s'] / row['total_s']:>7.1f}x"
            f"{row['torch_s']:>8.2f} s{row['torch_s'] / row['total_s']:>7.1f}x{row['C_off']:>10.1e}"
            f"{row['gamma_off']:>9.1e}{row['sklearn_off']:>9.1e}{row['torch_off']:>9.1e}",
            flush=True,
        )
    return short(growth_of(rows))


def growth_of(rows):
    """The last row, the exponents, and the ratios at the largest n that each peer has reached."""
    summary = {key: value for key, value in rows[-1].items() if np.isfinite(value)}
    summary["exponent"] = exponent(rows, "total_s")
    for name in PEERS:
        done = [row for row in rows if np.isfinite(row[f"{name}_s"])]
        if done:
            last = done[-1]
            summary |= {key: last[key] for key in last if key.startswith(name)}
            summary |= {f"{name}_n": last["n"], f"{name}_ratio": last[f"{name}_s"] / last["total_s"]}
        if len(done) > 1:
            summary[f"{name}_exponent"] = exponent(done, f"{name}_s")
    shown = {name: summary.get(f"{name}_exponent", np.nan) for name in PEERS}
    print(f"grows like n^{summary['exponent']:.2f}, " + ", ".join(f"{k}'s n^{v:.2f}" for k, v in shown.items()))
    return summary


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--memory", type=float, default=100.0, help="GiB for the tiles")
    parser.add_argument("--peer-most", type=int, default=100_000, help="largest n of scikit-learn; 0: no peers")
    options = parser.parse_args()
    device = choose_device("cpu" if options.quick else options.device)
    if options.quick:
        d, features, width, few, many = 10, 64, 200, (1000, 2000, 4000), (4000, 16_000, 64_000)
    else:
        d, features, width = 50, 3072, 5000
        few, many = (12_500, 25_000, 50_000, 100_000), (50_000, 100_000, 250_000, 1_000_000)
    summary = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "d": d, "features": features}
    summary["exact"] = measure_exact(few, d, features, device, int(options.memory * 2**30))
    summary["nystroem"] = measure_nystroem(many, d, features, width, device, options.peer_most)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
