"""How do the exact and the approximate kernel solutions grow with the number of pairs, and how accurate are they?

    python benchmarks/bench_scale.py --quick                 # a CPU, about a minute
    python benchmarks/bench_scale.py --device cuda           # 100,000 pairs exactly, 1,000,000 by Nyström, d = 50

Views are noisy copies of points with a power-law spectrum, 3072 features (64 with --quick), drawn on the device before
the clock starts. RBF kernel, float32 values, float64 iteration and sums. Columns: "tiles" is the time until K̃ stands,
"solve" the time of the modes once it does, "total" both; C − I is of all fitted pairs; "γ off" is the relative error
against the same method in float64 on 1000 of the pairs. The peer is scikit-learn's Nystroem, with the same landmarks,
batches and float64 sums, and scipy's eigh, on the CPU of the same machine. The last line is JSON.
"""

import argparse
import json
from time import perf_counter

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
from stairwise.kernel.solvers import solve
from stairwise.kernel.tiles import TilePairs

BATCH = 8192


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
    solution = solve(pairs, d, "krylov")
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
    few = [one[:1000] for one in batch(0, min(n, BATCH), features, device)]
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
        "landmarks": est._model.maps[0].points,
        "kernel": kernel,
    }


def peer(n, d, features, device, ours):
    """scikit-learn's Nystroem with our landmarks, batches of features, and eigh of their correlation."""
    points = ours["landmarks"].cpu().numpy()
    spent = -perf_counter()
    drawing = 0.0
    # all of `points` are its basis, whatever their order
    peer_map = Nystroem(gamma=ours["kernel"].gamma, n_components=len(points), random_state=0).fit(points)
    total = np.zeros((len(points), len(points)))
    for i, rows in enumerate(sizes(n)):
        start = perf_counter()
        a, b = (one.cpu().numpy() for one in batch(i, rows, features, device))
        drawing += perf_counter() - start
        total += peer_map.transform(a).astype(np.float64).T @ peer_map.transform(b).astype(np.float64)
    size = len(points)
    gamma = scipy.linalg.eigh((total + total.T) / (2 * n), subset_by_index=[size - d, size - 1])[0][::-1]
    spent += perf_counter() - drawing
    return spent, float(np.abs(gamma / ours["gamma"] - 1).max())


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
    nystroem(width, d, features, width, device)  # warm up
    if peer_most:
        peer(400, d, features, device, nystroem(400, d, features, 200, device))
    print(f"Nyström, {width} landmarks")
    print(f"{'n':>9}{'ours':>10}{'scikit-learn':>14}{'ratio':>8}{'γ differ':>10}{'|C-I|':>10}{'γ off':>9}")
    rows = []
    for n in counts:
        row = nystroem(n, d, features, width, device)
        theirs, differ = peer(n, d, features, device, row) if n <= peer_most else (np.nan, np.nan)
        row = {key: row[key] for key in ("n", "total_s", "C_off", "gamma_off")} | {"peer_s": theirs, "differ": differ}
        rows.append(row)
        print(
            f"{n:>9,}{row['total_s']:>8.2f} s{theirs:>12.2f} s{theirs / row['total_s']:>7.1f}x{differ:>10.1e}"
            f"{row['C_off']:>10.1e}{row['gamma_off']:>9.1e}",
            flush=True,
        )
    summary = {key: value for key, value in rows[-1].items() if np.isfinite(value)}
    summary["exponent"] = exponent(rows, "total_s")
    compared = [row for row in rows if np.isfinite(row["peer_s"])]
    if compared:
        summary |= {"peer_n": compared[-1]["n"], "peer_ratio": compared[-1]["peer_s"] / compared[-1]["total_s"]}
    if len(compared) > 1:
        summary["peer_exponent"] = exponent(compared, "peer_s")
    print(
        f"ours grows like n^{summary['exponent']:.2f}, scikit-learn's like n^{summary.get('peer_exponent', np.nan):.2f}"
    )
    return short(summary)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--memory", type=float, default=100.0, help="GiB for the tiles")
    parser.add_argument("--peer-most", type=int, default=100_000, help="largest n of the peer")
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
