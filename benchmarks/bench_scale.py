"""How do the exact and the approximate kernel solutions grow with the number of pairs, and how accurate are they?

    python -m benchmarks.bench_scale --quick                 # a CPU, about a minute
    python -m benchmarks.bench_scale --device cuda           # 100,000 pairs exactly, 1,000,000 by Nyström, d = 50

Views are noisy copies of points with a power-law spectrum, 3072 features (64 with --quick), drawn on the device before
the clock starts. RBF kernel, float32 values, float64 iteration and sums. Parts (`--parts`):

    exact      "tiles" is the time until K̃ stands, "solve" the time of the modes once it does, "total" both; C − I is of
               all fitted pairs. On a GPU the largest n is solved twice: with tiles as pairs of half-precision numbers
               and as plain float32. `product_s`: a product with d columns and all digits; `rough_s`: with 64 columns,
               of which halves read only the first number
    fit        `KernelSSL.fit` of the largest n from numpy arrays in the memory of the host to the modes
    nystroem   batches through `partial_fit`, and a peer: the same formulas in torch on the same device
    peers      the same with fewer landmarks and pairs, beside scikit-learn's Nystroem, with the same landmarks, batches
               and float64 sums, and scipy's eigh, on the CPU of the same machine

"γ off" is the relative error against the same method in float64 on a part of the pairs. A JSON line per part is printed
and added to the file `--out`.
"""

import argparse
import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import scipy.linalg
import torch
from sklearn.kernel_approximation import Nystroem

from benchmarks.clock import now
from stairwise.distributed import choose_device
from stairwise.kernel.estimator import KernelSSL
from stairwise.kernel.kernels import rbf
from stairwise.kernel.operators import Blocks
from stairwise.kernel.routes import SPARE
from stairwise.kernel.solvers import solve
from stairwise.kernel.tiles import TilePairs, triangle_bytes

BATCH = 8192
FEW = 1000  # pairs on which float64 is computed too, of the peers


@dataclass(frozen=True)
class Sizes:
    """Pairs of the exact solution, by Nyström and of the peers; modes, features, landmarks; GiB for the tiles."""

    pairs: int = 100_000
    many: int = 1_000_000
    peer_pairs: int = 50_000
    d: int = 50
    features: int = 3072
    landmarks: int = 5000
    peer_landmarks: int = 2000
    memory: float = 100.0
    subsample: int = 4000  # pairs on which the exact solution is computed in float64 too


QUICK = Sizes(4000, 64_000, 64_000, 10, 64, 200, 200, 2.0, 1000)


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


def solved(blocks, d, memory, device, halves=None):
    """Tiles, then modes, as `KernelSSL(method="exact")` computes them; kept apart for the clock."""
    started = now(device)
    pairs = TilePairs(blocks, True, memory, halves=halves)
    tiles = now(device)
    steps = []
    solution = solve(pairs, d, "krylov", spare=SPARE, progress=lambda *_: steps.append(1))
    done = now(device)
    n = blocks.size // 2
    z = pairs.matmul(solution.coefficients) / torch.as_tensor(solution.eigenvalues**0.5, device=device)
    product = now(device) - done
    block = torch.randn(blocks.size, 64, device=device, dtype=torch.float64)
    began = now(device)
    pairs.rough(block)
    rough = now(device) - began
    return solution, {
        "n": n,
        "tiles_s": tiles - started,
        "solve_s": done - tiles,
        "total_s": done - started,
        "product_s": product,
        "rough_s": rough,
        "products": solution.products,
        "steps": len(steps),
        "residual": solution.residual,
        "stored": pairs.stored,
        "halves": bool(pairs.halves),
        "C_off": off_identity(z[:n].T @ z[n:], n),
    }


def exact(n, sizes, device, also_plain=False):
    """The solution of n pairs, its error on a part of them and, on a GPU, seconds with plain float32 tiles."""
    a, b = views(n, sizes.features, device)
    kernel = rbf().fit(torch.cat([a[:500], b[:500]]))
    blocks, memory = Blocks((a, b), (kernel, kernel), True, "float32"), int(sizes.memory * 2**30)
    solution, row = solved(blocks, sizes.d, memory, device)
    few = min(n, sizes.subsample)
    parts = [
        KernelSSL(sizes.d, kernel=kernel, dtype=t, method="exact", solver="krylov", memory=room)
        for t, room in (("float32", int(1.05 * triangle_bytes(2 * few, "float32"))), ("float64", memory))
    ]
    row["gamma_off"] = gamma_error(*(one.fit(a[:few], X_b=b[:few]) for one in parts))
    if also_plain and row["halves"]:
        torch.cuda.empty_cache()
        plain, its = solved(blocks, sizes.d, memory, device, halves=False)
        row |= {f"plain_{name}": its[name] for name in ("tiles_s", "solve_s", "product_s", "steps", "C_off")}
        row["plain_differ"] = float(np.abs(plain.eigenvalues / solution.eigenvalues - 1).max())
    return row


def measure_fit(sizes, device):
    """Seconds of `KernelSSL.fit` from numpy arrays, and of its modes after the last tile."""
    a, b = (x.cpu().numpy() for x in views(sizes.pairs, sizes.features, device))
    words = []
    est = KernelSSL(sizes.d, method="exact", solver="krylov", dtype="float32", memory=int(sizes.memory * 2**30))
    est.set_params(device=str(device), progress=lambda done, total, text: words.append((now(device), text)))
    started = now(device)
    est.fit(a, X_b=b)
    ended = now(device)
    modes = next(at for at, text in words if "products with" in text)
    row = {"n": sizes.pairs, "total_s": ended - started, "modes_s": ended - modes, "route": words[0][1]}
    print(
        f"fit from numpy arrays, n = {sizes.pairs:,}: {row['total_s']:.2f} s, of which modes {row['modes_s']:.2f} s\n"
    )
    return short(row)


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
PARTS = ["exact", "fit", "nystroem", "peers"]


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


def measure_exact(sizes, device, largest):
    counts = [sizes.pairs // by for by in (8, 4, 2, 1)]
    exact(counts[0], sizes, device, also_plain=not largest)  # warm up
    counts = counts[-1:] if largest else counts
    print(f"exact, d = {sizes.d}, {sizes.features} features")
    print(f"{'n':>9}{'tiles':>10}{'solve':>9}{'total':>9}{'products':>10}{'steps':>7}{'|C-I|':>10}{'γ off':>9}")
    rows = []
    for n in counts:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        row = exact(n, sizes, device, also_plain=n == counts[-1] and not largest)
        rows.append(row)
        kept = "" if row["stored"] else "  (tiles recomputed)"
        print(
            f"{n:>9,}{row['tiles_s']:>8.2f} s{row['solve_s']:>7.2f} s{row['total_s']:>7.2f} s{row['products']:>10}"
            f"{row['steps']:>7}{row['C_off']:>10.1e}{row['gamma_off']:>9.1e}{kept}",
            flush=True,
        )
    if "plain_solve_s" in row:
        print(f"plain float32: {row['plain_tiles_s']:.2f} s for the tiles, {row['plain_solve_s']:.2f} s to solve")
    growth = {}
    if len(rows) > 1:
        growth = {"exponent": exponent(rows, "total_s"), "solve_exponent": exponent(rows, "solve_s")}
        print(f"total grows like n^{growth['exponent']:.2f}, solve like n^{growth['solve_exponent']:.2f}\n")
    if device.type == "cuda":
        growth["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return short(rows[-1] | growth | {"all": [short({k: r[k] for k in ("n", "tiles_s", "solve_s")}) for r in rows]})


def measure_nystroem(counts, width, peers, sizes, device):
    d, features = sizes.d, sizes.features
    warm = nystroem(width, d, features, width, device)
    for name in peers:
        compared(name, 400, d, device, nystroem(400, d, features, 200, device) if name == "sklearn" else warm)
    print(f"Nyström, {width} landmarks; γ off: against float64 on {FEW} pairs, ours, scikit-learn's, torch's")
    print(f"{'n':>9}{'ours':>10}{'scikit-learn':>14}{'ratio':>8}{'torch':>10}{'ratio':>8}{'|C-I|':>10}{'γ off':>27}")
    rows = []
    for n in counts:
        ours = nystroem(n, d, features, width, device)
        row = {key: ours[key] for key in ("n", "total_s", "C_off", "gamma_off")}
        for name in PEERS:
            keys = [f"{name}_{key}" for key in ("s", "differ", "off")]
            row |= dict.fromkeys(keys, np.nan)
            if name in peers:
                try:
                    row |= compared(name, n, d, device, ours)
                except (RuntimeError, ValueError) as error:  # a peer that fails does not end the benchmark
                    print(f"{name}: {error}")
        rows.append(row)
        print(
            f"{n:>9,}{row['total_s']:>8.2f} s{row['sklearn_s']:>12.2f} s{row['sklearn_s'] / row['total_s']:>7.1f}x"
            f"{row['torch_s']:>8.2f} s{row['torch_s'] / row['total_s']:>7.1f}x{row['C_off']:>10.1e}"
            f"{row['gamma_off']:>9.1e}{row['sklearn_off']:>9.1e}{row['torch_off']:>9.1e}",
            flush=True,
        )
    return short(growth_of(rows) | {"landmarks": width})


def growth_of(rows):
    """The last row, the exponents, and the ratios at the largest n."""
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


def measure(part, sizes, device, largest):
    """The summary of one part."""
    if part == "exact":
        return measure_exact(sizes, device, largest)
    if part == "fit":
        return measure_fit(sizes, device)
    if part == "nystroem":
        counts = [sizes.many // by for by in (20, 10, 4, 1)]
        return measure_nystroem(counts, sizes.landmarks, ["torch"], sizes, device)
    counts = [sizes.peer_pairs // by for by in (4, 2, 1)]
    return measure_nystroem(counts, sizes.peer_landmarks, ["sklearn", "torch"], sizes, device)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--largest", action="store_true", help="exact: only the largest n, and no plain float32")
    parser.add_argument("--out", type=Path, help="add a JSON line per part to this file")
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), help="of `Sizes`")
    options = parser.parse_args()
    device = choose_device("cpu" if options.quick else options.device)
    given = {field.name: getattr(options, field.name) for field in fields(Sizes)}
    sizes = replace(QUICK if options.quick else Sizes(), **{k: v for k, v in given.items() if v is not None})
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    for part in options.parts:
        found = {"part": part, "device": where, "d": sizes.d, "features": sizes.features}
        line = json.dumps(found | measure(part, sizes, device, options.largest))
        print(line, flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
