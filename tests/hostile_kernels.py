"""Valid calls of `KernelSSL` for many pairs, into whose arguments `tests/test_hostile.py` puts hostile values."""

import stairwise as sw


def large_kernels(x, y):
    """KernelSSL for many pairs: its parameters, and its methods with landmarks, random features and the points."""
    batches = {
        "landmarks": {"method": "nystroem", "n_features": 6},
        "random features": {"method": "features", "n_features": 6},
        "linear": {"kernel": "linear"},
        "modalities": {"kernel": ("rbf", "linear"), "n_features": 6},
    }
    table = {
        "KernelSSL, many pairs": (
            lambda **k: _embedded(sw.KernelSSL(2, **k).fit(x, X_b=y), x),
            {"method": "nystroem", "n_features": 6, "landmarks": "pivoted", "device": "cpu", "random_state": 0}
            | {"progress": lambda done, total, words: None, "kernel": "rbf", "dtype": "float32", "memory": 10**9},
        ),
        "KernelSSL, random features": (
            lambda **k: _embedded(sw.KernelSSL(method="features", **k).fit(x, X_b=y), x),
            {"n_components": 2, "n_features": 6, "random_state": 0, "kernel": "rbf"},
        ),
        "KernelSSL.plan": (lambda X, X_b: sw.KernelSSL(2, memory=1000).plan(X, X_b), {"X": x, "X_b": y}),
        "KernelSSL.plan, parameters": (
            lambda **k: sw.KernelSSL(**k).plan(x, y),
            {"n_components": 2, "method": "auto", "n_features": 6, "memory": 1000, "kernel": "rbf", "solver": "auto"}
            | {"dtype": "float64", "landmarks": "uniform"},
        ),
        "KernelSSL.combine": (
            lambda others: _embedded(sw.KernelSSL(2).partial_fit(x).combine(others)),
            {"others": sw.KernelSSL(2).partial_fit(x)},
        ),
    }
    for name, settings in batches.items():
        est = sw.KernelSSL(2, **settings).partial_fit(x, X_b=y)
        table |= {
            f"KernelSSL.fit, {name}": (
                lambda X, X_b, s=settings: _embedded(sw.KernelSSL(2, **{"method": "nystroem"} | s).fit(X, X_b=X_b)),
                {"X": x, "X_b": y},
            ),
            f"KernelSSL.partial_fit, {name}": (
                lambda X, X_b, s=settings: _embedded(
                    sw.KernelSSL(2, **s).partial_fit(x, X_b=y).partial_fit(X, X_b=X_b), x
                ),
                {"X": x, "X_b": y},
            ),
            f"KernelSSL.partial_fit, first, {name}": (
                lambda X, X_b, s=settings: _embedded(sw.KernelSSL(2, **s).partial_fit(X, X_b=X_b)),
                {"X": x, "X_b": y},
            ),
            f"KernelSSL.transform, {name}": (est.transform, {"X": x, "view": "b"}),
        }
    return table


def _embedded(est, x=None):
    return est.eigenvalues_, est.dual_coef_, None if x is None else est.transform(x)
