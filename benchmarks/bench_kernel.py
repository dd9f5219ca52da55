"""How fast is the Krylov solver for the leading modes, compared with the paper's formula and with ARPACK?

    python benchmarks/bench_kernel.py [--device cpu] [--threads 1] [--rounds 3] [--literal-most 2000]

RBF kernel (median heuristic) on Gaussian features with a power-law spectrum, two noisy views, d = 50, float64. The
literal formula forms Z and K̃^{-1/2} and diagonalizes K_Γ; `eigs` is scipy.sparse.linalg.eigs on v ↦ P K̃ v. All three
get the same K̃ and run alternately; medians are compared. On a GPU (--device cuda) the literal formula and Krylov run
for n up to 20,000, without ARPACK. The last line is JSON.
"""

import argparse
import json

import numpy as np
import scipy.sparse.linalg
from threadpoolctl import threadpool_limits

from benchmarks.clock import timed
from stairwise.kernel.kernels import rbf
from stairwise.kernel.operators import DensePairs
from stairwise.kernel.solvers import krylov

D = 50


def pair_kernel(n, device):
    """K̃ of n pairs."""
    rng = np.random.default_rng(0)
    scale = np.arange(1, 201) ** -0.7
    base = rng.standard_normal((n, 200)) * scale
    X = np.vstack([base + 0.3 * scale * rng.standard_normal(base.shape) for _ in "ab"])
    if device != "cpu":
        import torch

        X = torch.as_tensor(X, device=device)
    kernel = rbf().fit(X)
    return kernel(X, X)


def literal(K):
    """γ by the paper's formula (corrected): K_Γ = K̃^{-1/2} Z K̃^{-1/2}."""
    linalg = np.linalg if isinstance(K, np.ndarray) else __import__("torch").linalg
    N = len(K)
    n = N // 2
    aa, ab, bb = K[:n, :n], K[:n, n:], K[n:, n:]
    Z = K.copy() if isinstance(K, np.ndarray) else K.clone()
    Z[:n, :n], Z[:n, n:], Z[n:, :n], Z[n:, n:] = ab @ aa, ab @ ab, bb @ aa, bb @ ab
    Z = (Z + Z.T) / N
    w, v = linalg.eigh(K)
    keep = w > 1e-13 * N * w[-1]
    root = (v[:, keep] / w[keep] ** 0.5) @ v[:, keep].T
    top = linalg.eigvalsh(root @ Z @ root)[-D:]
    return np.asarray(top if isinstance(K, np.ndarray) else top.cpu())[::-1]


def arpack(K):
    N = len(K)
    order = np.r_[N // 2 : N, : N // 2]
    operator = scipy.sparse.linalg.LinearOperator((N, N), matvec=lambda v: (K @ v)[order], dtype=float)
    return np.sort(scipy.sparse.linalg.eigs(operator, D, which="LR")[0].real)[::-1] / N


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--literal-most", type=int, default=2000)
    options = parser.parse_args()
    sizes = (500, 1000, 2000, 4000) if options.device == "cpu" else (1000, 2000, 5000, 10_000, 20_000)
    summary = {}
    print(
        f"{'n':>7}{'krylov':>11}{'products':>10}{'literal':>11}{'eigs':>9}{'literal/':>10}{'eigs/':>7}{'difference':>12}"
    )
    with threadpool_limits(options.threads):
        for n in sizes:
            K = pair_kernel(n, options.device)
            pairs = DensePairs(K)
            krylov(pairs, D)  # warm up
            times = {"krylov": [], "literal": [], "eigs": []}
            difference = np.nan
            for i in range(options.rounds):
                took, solution = timed(lambda: krylov(pairs, D), options.device)  # noqa: B023 (called at once)
                times["krylov"].append(took)
                if options.device == "cpu":
                    took, other = timed(lambda: arpack(K), options.device)  # noqa: B023
                    times["eigs"].append(took)
                    difference = np.fmax(difference, np.abs(other / solution.eigenvalues - 1).max())
                if n <= options.literal_most and i == 0:  # once, because it takes minutes at larger sizes
                    took, other = timed(lambda: literal(K), options.device)  # noqa: B023
                    times["literal"].append(took)
                    difference = np.fmax(difference, np.abs(other / solution.eigenvalues - 1).max())
            median = {name: float(np.median(values)) if values else np.nan for name, values in times.items()}
            ratio = {name: median[name] / median["krylov"] for name in ("literal", "eigs")}
            print(
                f"{n:>7}{median['krylov']:>9.3f} s{solution.products:>10}{median['literal']:>9.2f} s"
                f"{median['eigs']:>7.2f} s"
                f"{ratio['literal']:>9.1f}x{ratio['eigs']:>6.1f}x{difference:>12.1e}",
                flush=True,
            )
            if n == 2000:
                summary = {"n2000_vs_literal": round(ratio["literal"], 1), "n2000_vs_eigs": round(ratio["eigs"], 2)}
    print(json.dumps({name: value for name, value in summary.items() if np.isfinite(value)}))


if __name__ == "__main__":
    main()
