"""Hostile values, and a valid call of every public function and class into whose arguments they are put."""

import inspect
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

import stairwise as sw
from stairwise.kernel.kernels import KERNELS
from tests.hostile_kernels import large_kernels

HUGE = 10**400


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")

    def __array__(self, *_, **__):
        raise RuntimeError("no array")


VALUES = {
    "None": lambda: None,
    "True": lambda: True,
    "text": lambda: "text",
    "empty text": lambda: "",
    "bytes": lambda: b"x",
    "NaN": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "-1": lambda: -1,
    "0": lambda: 0,
    "-1.5": lambda: -1.5,
    "1e308": lambda: 1e308,
    "1e160": lambda: 1e160,
    "1e-200": lambda: 1e-200,
    "5e-324": lambda: 5e-324,
    "10**400": lambda: HUGE,
    "-10**5000": lambda: -(10**5000),
    "complex": lambda: 1j,
    "list": lambda: [],
    "ragged": lambda: [[1.0], [1.0, 2.0]],
    "dict": lambda: {"a": 1},
    "object": object,
    "class": lambda: dict,
    "function": lambda: len,
    "unprintable": Unprintable,
    "path": lambda: Path("nowhere"),
    "NaN array": lambda: np.full((3, 3), np.nan),
    "complex array": lambda: np.ones((3, 3)) * 1j,
    "object array": lambda: np.array([[None, HUGE]]),
    "text array": lambda: np.array(["a", "b"]),
    "empty array": lambda: np.zeros((0, 3)),
    "no columns": lambda: np.zeros((3, 0)),
    "5-D": lambda: np.zeros((1, 1, 1, 1, 1)),
    "masked": lambda: np.ma.masked_invalid([[np.nan, 1.0]]),
    "date": lambda: np.array("2020-01-01", dtype="M8[D]"),
    "long double": lambda: np.longdouble("1e4000"),
    "needs grad": lambda: torch.ones(3, 3, requires_grad=True),
    "needs grad, scalar": lambda: torch.tensor(0.5, requires_grad=True),
    "bfloat16": lambda: torch.ones(3, 3, dtype=torch.bfloat16),
    "meta": lambda: torch.ones(3, 3, device="meta"),
    "sparse": lambda: torch.ones(3, 3).to_sparse(),
}

# changes of a valid array, by name
CHANGES = {
    "× 1e160": lambda x: x * 1e160,
    "× 1e308": lambda x: x * 1e308,
    "× 1e30": lambda x: x * 1e30,
    "× 1e-200": lambda x: x * 1e-200,
    "× 1e-320": lambda x: x * 1e-320,
    "× 0": lambda x: x * 0,
    "× −1": lambda x: x * -1,
    "+ NaN": lambda x: x + float("nan"),
    "one inf": lambda x: _with(x, float("inf")),
    "one NaN": lambda x: _with(x, float("nan")),
    "complex": lambda x: x + 1j,
    "transposed": lambda x: x.T if x.ndim == 2 else x[None],
    "reversed": lambda x: x[::-1] if isinstance(x, np.ndarray) else x.flip(0),
    "one row": lambda x: x[:1],
    "no rows": lambda x: x[:0],
    "float32": lambda x: x.astype(np.float32) if isinstance(x, np.ndarray) else x.float(),
    "float16": lambda x: x.astype(np.float16) if isinstance(x, np.ndarray) else x.half(),
    "double": lambda x: x.astype(np.float64) if isinstance(x, np.ndarray) else x.double(),
    "integers": lambda x: x.astype(int) if isinstance(x, np.ndarray) else x.long(),
    "tensor that needs grad": lambda x: torch.tensor(x.tolist(), dtype=torch.float64, requires_grad=True),
    "bfloat16 tensor": lambda x: torch.tensor(x.tolist(), dtype=torch.bfloat16),
    "objects": lambda x: np.asarray(x.tolist(), dtype=object),
    "nested list": lambda x: x.tolist(),
}


def _with(x, value):
    x = x.astype(float) if isinstance(x, np.ndarray) else x.detach().clone()
    x.reshape(-1)[0] = value
    return x


def hostile(value):
    """(name, hostile value) for an argument whose valid value is `value`."""
    for name, make in VALUES.items():
        yield name, make()
    if isinstance(value, np.ndarray | torch.Tensor) and value.ndim:
        for name, change in CHANGES.items():
            with np.errstate(all="ignore"):
                yield name, change(value)


def public_names():
    """Every public function and class, also those of public modules, as `module.name`."""
    for name in sw.__all__:
        value = getattr(sw, name)
        if not inspect.ismodule(value):
            yield name
            continue
        inside = getattr(value, "__all__", None) or [
            key for key, one in vars(value).items() if getattr(one, "__module__", "") == value.__name__
        ]
        for key in inside:
            if not key.startswith(("_", "Abstract")) and (
                inspect.isfunction(getattr(value, key)) or inspect.isclass(getattr(value, key))
            ):
                yield f"{name}.{key}"


@cache
def calls():
    """Name → (function, valid arguments). `Class.method` is a method of a valid object."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 4)) * [2.0, 1.5, 1.0, 0.5]
    y = x + 0.1 * rng.standard_normal(x.shape)
    corr = sw.Correlation.from_pairs(x, y)
    W0 = 1e-3 * rng.standard_normal((2, 4))
    gamma, t = np.array([2.0, 1.0, 0.5]), np.array([0.0, 0.5, 2.0])
    records = np.linspace(0, 1.5, 40)
    lam = 1 / (1 + 1e6 * np.exp(-8 * np.outer(records, [2.0, 1.0, 0.9])))
    labels = (x[:, 0] > 0).astype(int)
    est = sw.KernelSSL(2, kernel="linear").fit(x, X_b=y)
    z_a, z_b = (torch.as_tensor(v, dtype=torch.float32) for v in (x, y))
    both = np.concatenate([x, y])
    rho = np.linspace(0.9, 0.3, 8)
    net = torch.nn.Linear(4, 2).eval()
    modes, spectral, quartic = sw.Modes(gamma, 1e-3), sw.SpectralModes(gamma, 1e-3), sw.Quartic(-np.eye(4), np.eye(4))
    path = sw.closed_form(W0, corr, t)
    clock = sw.Clock(np.arange(3.0), np.arange(3.0), np.arange(3.0))
    table = {
        "gradient_descent": (
            sw.gradient_descent,
            {"W0": W0, "corr": corr, "lr": 0.01, "steps": 5, "record_every": 2, "momentum": 0.5}
            | {"weights": False, "rule": "gradient"},
        ),
        "gradient_descent, spectral": (
            lambda W0, corr, lr, momentum: sw.gradient_descent(W0, corr, lr, 5, momentum=momentum, rule="spectral"),
            {"W0": W0, "corr": corr, "lr": 0.01, "momentum": 0.5},
        ),
        "gradient_descent, newton_schulz": (
            lambda W0, corr, lr: sw.gradient_descent(W0, corr, lr, 5, rule="newton_schulz"),
            {"W0": W0, "corr": corr, "lr": 0.01},
        ),
        "gradient_flow": (
            sw.gradient_flow,
            {"W0": W0, "corr": corr, "times": t, "weights": False, "rtol": 1e-8, "rule": "gradient"},
        ),
        "gradient_flow, spectral": (
            lambda W0, corr, times, rtol: sw.gradient_flow(W0, corr, times, rtol=rtol, rule="spectral"),
            {"W0": W0, "corr": corr, "times": t, "rtol": 1e-6},
        ),
        "quartic_flow": (sw.quartic_flow, {"W0": W0, "problem": quartic, "t": t, "rtol": 1e-8}),
        "saddle_at": (sw.saddle_at, {"W": W0, "corr": corr, "top": 3, "tolerance": 1e-2}),
        "probe_curve": (
            sw.probe_curve,
            {"est": est, "X": x, "y": labels, "t": t, "alpha": 1e-4, "ridge": 1e-3, "test_share": 0.3}
            | {"seed": 0, "view": "a"},
        ),
        "KernelSSL": (
            lambda n_components, kernel, solver, dtype, memory: sw.KernelSSL(
                n_components, kernel=kernel, solver=solver, dtype=dtype, memory=memory
            ).fit(x, X_b=y),
            {"n_components": 2, "kernel": "rbf", "solver": "auto", "dtype": "float64", "memory": 10**9},
        ),
        "KernelSSL.fit": (lambda X, X_b: sw.KernelSSL(2).fit(X, X_b=X_b), {"X": x, "X_b": y}),
        **large_kernels(x, y),
        "KernelSSL.transform": (est.transform, {"X": x, "view": "a"}),
        "KernelSSL.transform_at": (
            est.transform_at,
            {"X": x, "t": t, "alpha": 1e-4, "law": "logistic", "lr": 0.01, "random_state": 0, "view": "a"},
        ),
        "KernelSSL.spectrum_at": (est.spectrum_at, {"t": t, "alpha": 1e-4, "law": "aligned", "lr": 0.01}),
        "KernelSSL.step_times": (est.step_times, {"alpha": 1e-4, "q": np.array([0.1, 0.5]), "draws": 5}),
        "KernelSSL.learned_kernel": (est.learned_kernel, {"X": x, "Y": y, "view": "a"}),
        "KernelSSL.load": (sw.KernelSSL.load, {"path": "nowhere.npz"}),
        "precondition": (
            sw.precondition,
            {"z_a": z_a, "z_b": z_b, "damping": 0.1, "power": 0.5, "keep_norm": True},
        ),
        "SpectrumMonitor": (sw.SpectrumMonitor, {"window": 8, "normalized": False}),
        "SpectrumMonitor.update": (
            lambda z_a, z_b: _monitored(z_a, z_b),
            {"z_a": z_a, "z_b": z_b},
        ),
        "empirical_ntk": (
            sw.empirical_ntk,
            {"model": net, "x": z_a, "y": z_b, "output": "mean", "precision": "float32", "memory": 1e8},
        ),
        "predict_embeddings": (sw.predict_embeddings, {"K": both @ both.T, "d": 2}),
        "predict": (
            sw.predict,
            {"x_a": x, "x_b": y, "d": 2, "alpha": 1e-4, "lr": 0.01, "optimizer": "sgd", "draws": 5, "seed": 0},
        ),
        "predict, muon": (
            lambda x_a, x_b, alpha, lr: sw.predict(x_a, x_b, 2, alpha, lr, "muon", draws=3),
            {"x_a": x, "x_b": y, "alpha": 1e-4, "lr": 0.01},
        ),
        "Run": (lambda folder: sw.Run(folder).records, {"folder": "nowhere"}),
        "advise": (sw.advise, {"t": records, "lam": lam, "clock": None, "level": 1.0, "dimensions": 3}),
        "Clock": (
            lambda t, step, seconds, planned, end: sw.Clock(t, step, seconds, planned, end).seconds_left(5.0),
            {
                "t": np.arange(3.0),
                "step": np.arange(3.0),
                "seconds": np.arange(3.0),
                "planned": np.arange(9.0),
                "end": 9,
            },
        ),
        "Clock.steps": (clock.steps, {"t": t}),
        "Clock.seconds_left": (clock.seconds_left, {"t": t}),
        "forecast_steps": (
            sw.forecast_steps,
            {"t": records, "lam": lam, "coverage": 0.8, "level": 1.0, "dimensions": 3, "total": lam.sum(axis=1)},
        ),
        "detect_steps": (sw.detect_steps, {"t": records, "lam": lam}),
        "gaussian_init": (sw.gaussian_init, {"d": 2, "features": 3, "alpha": 1e-3, "seed": 0}),
        "carried": (
            sw.carried,
            {"rho": rho, "batch": 16, "loss": "barlow_twins", "d": 4, "excess": 1.0, "lambda_": 0.01}
            | {"batch_norm": False, "symmetric": True},
        ),
        "carried, batch norm": (sw.carried, {"rho": rho, "batch": 16, "excess": 1.0, "lambda_": 0.01}),
        "carried, vicreg": (
            lambda **k: sw.carried(loss="vicreg", **k),
            {"rho": rho, "batch": 16, "excess": 1.0, "invariance": 25.0, "variance": 25.0, "covariance": 1.0},
        ),
        "carried, simclr": (
            lambda **k: sw.carried(loss="simclr", **k),
            {"rho": rho, "batch": 16, "temperature": 0.2},
        ),
        "smallest_batch": (sw.smallest_batch, {"rho": rho, "wanted": 2, "loss": "barlow_twins", "lambda_": 0.01}),
        "useful_d": (sw.useful_d, {"rho": rho, "batch": 16, "loss": "barlow_twins", "lambda_": 0.01}),
        "check_conditions": (sw.check_conditions, {"W0": W0, "corr": corr}),
        "Correlation": (lambda x_a, x_b: _decomposed(sw.Correlation.from_pairs(x_a, x_b)), {"x_a": x, "x_b": y}),
        "Correlation.from_matrix": (
            lambda gamma, pairs: _decomposed(sw.Correlation.from_matrix(gamma, pairs)),
            {"gamma": np.diag(gamma), "pairs": 2},
        ),
        "Correlation.top": (corr.top, {"k": 2}),
        "Correlation.product": (corr.product, {"x": np.eye(4)}),
        "predict_staircase": (
            sw.predict_staircase,
            {"gamma": gamma, "d": 2, "alpha": 1e-3, "times": 4 * t, "lr": 0.01, "draws": 3, "seed": 0}
            | {"optimizer": "sgd"},
        ),
        "predict_staircase, muon": (
            lambda **k: sw.predict_staircase(optimizer="muon", draws=3, **k),
            {"gamma": gamma, "d": 2, "alpha": 1e-3, "times": t, "lr": 0.01},
        ),
        "closed_form": (
            sw.closed_form,
            {"W0": W0, "corr": corr, "times": t, "law": "logistic", "lr": 0.01, "momentum": 0.5, "weights": True},
        ),
        "closed_form, aligned": (
            lambda **k: sw.closed_form(law="aligned", weights=True, **k),
            {"W0": W0, "corr": corr, "times": t, "lr": 0.01},
        ),
        "closed_form, spectral": (
            lambda **k: sw.closed_form(law="spectral", weights=True, **k),
            {"W0": W0, "corr": corr, "times": t, "lr": 0.01},
        ),
        "early_weights": (sw.early_weights, {"W0": W0, "corr": corr, "t": 0.5}),
        "Modes": (lambda gamma, s0: _moved(sw.Modes(gamma, s0)), {"gamma": gamma, "s0": 1e-3 * gamma}),
        "Modes.loss": (modes.loss, {"t": t}),
        "Modes.eigenvalues": (modes.eigenvalues, {"t": t}),
        "Quartic": (lambda A, B: sw.Quartic(A, B).weights(W0, 1.0), {"A": -np.eye(4), "B": np.eye(4)}),
        "Quartic.loss": (quartic.loss, {"W": W0}),
        "Quartic.gradient": (quartic.gradient, {"W": W0}),
        "Quartic.weights": (quartic.weights, {"W0": W0, "t": t}),
        "penalized_weights": (sw.penalized_weights, {"corr": corr, "d": 2, "epsilon": 0.1}),
        "top_spectral_weights": (sw.top_spectral_weights, {"corr": corr, "d": 2}),
        "subspace_alignment": (sw.subspace_alignment, {"F": x[:, :2], "G": y[:, :2]}),
        "SpectralModes": (
            lambda gamma, s0, lr: _moved(sw.SpectralModes(gamma, s0, lr)),
            {"gamma": gamma, "s0": 1e-3 * gamma, "lr": 0.1},
        ),
        "SpectralModes.loss": (spectral.loss, {"t": t}),
        "Trajectory": (
            lambda times, eigenvalues: _stepped(sw.Trajectory(times, eigenvalues, "toy")),
            {"times": t, "eigenvalues": path.eigenvalues},
        ),
        "Trajectory.step_times": (path.step_times, {"level": 0.5}),
        "Muon": (
            lambda params, lr, momentum: sw.Muon(params, lr=lr, momentum=momentum) and None,
            {"params": [torch.nn.Parameter(torch.ones(2, 2))], "lr": 0.02, "momentum": 0.9},
        ),
        "load_network": (sw.load_network, {"run": sw.Run("nowhere")}),
        "train": (sw.train, {"recipe": "nowhere.toml", "folder": "nowhere"}),
        "load_recipe": (sw.load_recipe, {"name": "photos-bt", "settings": None}),
        "Recipe": (sw.Recipe, {f.name: getattr(sw.Recipe(), f.name) for f in fields(sw.Recipe)}),
    }
    for name, kind in KERNELS.items():
        values = {f.name: f.default for f in fields(kind)}
        table[f"kernels.{name}"] = (lambda kind=kind, **k: kind(**k).fit(x)(x, y), values)
    for name in ("resolve", "describe"):
        table[f"kernels.{name}"] = None
    for name, value in vars(sw.landscapes).items():
        if inspect.isclass(value) and is_dataclass(value) and not inspect.isabstract(value):
            table |= _landscape(name, value)
    for name in sw.losses.__all__:
        value = getattr(sw.losses, name)
        if inspect.isclass(value):
            options = _defaults(value)
            table[f"losses.{name}"] = (lambda value=value, **k: value(**k)(z_a, z_b), options)
        elif inspect.isfunction(value):
            first, second, *_ = inspect.signature(value).parameters
            table[f"losses.{name}"] = (value, {first: z_a, second: z_b} | _defaults(value))
    table["losses.precondition"] = table["precondition"]
    table["InputError"] = table["TheoryWarning"] = None  # they say what is wrong; nothing is computed
    return table


def _defaults(function):
    return {
        name: p.default
        for name, p in inspect.signature(function).parameters.items()
        if p.default is not p.empty and p.kind is not p.VAR_KEYWORD
    }


def _landscape(name, kind):
    valid = kind(*[f.default if isinstance(f.default, float) else 1.0 for f in fields(kind)])
    options = {f.name: getattr(valid, f.name) for f in fields(kind)}
    s, gamma, t = np.array([0.1, 0.5]), np.array([2.0, 1.0]), 0.5
    return {
        f"landscapes.{name}": (lambda **k: kind(**k).solve(t, s, gamma), options),
        f"landscapes.{name}.solve": (valid.solve, {"t": np.array([0.5]), "s_bar0": s[:1], "gamma": gamma[:1]}),
        f"landscapes.{name}.loss": (valid.loss, {"s_bar": s}),
        f"landscapes.{name}.step_times": (valid.step_times, {"s_bar0": s, "gamma": gamma}),
    }


def _decomposed(corr):
    return corr.matrix, corr.eigenvalues, corr.eigenvectors


def _moved(modes):
    return modes.eigenvalues([0.0, 1.0, 1e6]), modes.loss([0.0, 1.0, 1e6])


def _stepped(trajectory):
    trajectory.step_times()
    return trajectory.loss


def _monitored(z_a, z_b):
    monitor = sw.SpectrumMonitor()
    monitor.update(z_a, z_b)
    return monitor.compute()
