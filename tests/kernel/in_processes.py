"""One of two processes, for test_scale.py: estimators on shared data, then a process that is lost."""

import os
import signal
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

import stairwise as sw
from stairwise.checks import InputError
from stairwise.distributed import LostProcess
from stairwise.kernel.kernels import rbf
from stairwise.kernel.krylov import krylov
from stairwise.kernel.operators import Blocks
from stairwise.kernel.processes import place, solve_together
from stairwise.kernel.tiles import TilePairs

CASES = {
    "tiles": {"method": "exact", "solver": "krylov", "memory": 200_000},
    "recomputed": {"method": "exact", "solver": "krylov", "memory": 5_000},
    "two modalities": {"method": "exact", "solver": "krylov", "kernel": ("rbf", "laplace")},
    "gamma": {"kernel": "linear", "method": "features"},
    "nystroem": {"method": "nystroem", "n_features": 50, "landmarks": "pivoted"},
    "features": {"method": "features", "n_features": 80},
}


def views(n=130, m=8):
    rng = np.random.default_rng(0)
    base = rng.standard_normal((n, m)) * np.linspace(2, 0.3, m)
    return tuple(base + 0.3 * rng.standard_normal((n, m)) for _ in "ab")


def results(folder):
    """γ and embeddings of every case: all rows are given to fit, or each process adds its own."""
    x_a, x_b = views()
    found = {}
    for name, settings in CASES.items():
        est = sw.KernelSSL(4, **settings).fit(x_a, X_b=x_b)
        found |= {f"{name}.gamma": est.eigenvalues_, f"{name}.z": est.transform(x_a[:20])}
    est = added(sw.KernelSSL(4, method="nystroem", n_features=40), x_a, x_b)
    found |= {"partial_fit.gamma": est.eigenvalues_, "partial_fit.z": est.transform(x_a[:20])}
    est = resumed(x_a, x_b, folder / "begun.npz")
    found |= {"resumed.gamma": est.eigenvalues_, "resumed.pairs": est.pairs_}
    return found | {"halves.gamma": of_halves(x_a, x_b)}


def of_halves(x_a, x_b):
    """γ from tiles as on a GPU, with rough products first."""
    parts, (rank, world) = tuple(torch.tensor(x).float() for x in (x_a, x_b)), place()
    blocks = Blocks(parts, (rbf(0.1),) * 2, True, "float32")
    own = TilePairs(blocks, memory=200_000, share=rank, shares=world, halves=True)
    return (solve_together(own, lambda pairs: krylov(pairs, 4)) if world > 1 else krylov(own, 4)).eigenvalues


def added(est, x_a, x_b):
    """Every process adds its own rows, in batches."""
    rank, world = place()
    for start in range(26 * rank, len(x_a), 26 * world):
        est.partial_fit(x_a[start : start + 26], X_b=x_b[start : start + 26])
    return est.combine()


def resumed(x_a, x_b, path):
    """Every process goes on from one file, whose pairs count once; without it they are refused."""
    rank, world = place()
    begun = sw.KernelSSL(4, method="nystroem", n_features=40).partial_fit(x_a[:30], X_b=x_b[:30])
    if rank == 0:
        begun.save(path)
    if world > 1:
        dist.barrier()
    start, est = (sw.KernelSSL.load(path) for _ in range(2))
    est.partial_fit(x_a[30 + rank :: world], X_b=x_b[30 + rank :: world])
    if world > 1:
        with pytest.raises(InputError, match="must not hold the same pairs"):
            est.combine()
    return est.combine(start=start)


def lose_one(x_a, x_b, folder):
    """The second process dies in its third call of the kernel; the first writes how long it took to notice."""
    calls = []

    def kernel(x, y):
        calls.append(1)
        if place()[0] == 1 and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return x @ y.T

    started = perf_counter()
    try:
        sw.KernelSSL(4, kernel=kernel, method="exact", solver="krylov", memory=5_000).fit(x_a, X_b=x_b)
    except LostProcess as error:
        (folder / "seconds").write_text(str(perf_counter() - started))
        print(error, file=sys.stderr, flush=True)
        os._exit(1)  # threads of gloo do not always survive the end of the interpreter


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    np.savez(folder / f"{place()[0]}.npz", **results(folder))
    lose_one(*views(), folder)
