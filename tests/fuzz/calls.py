"""Calls of public functions as Python source, most of them hostile, so that a failing one can be pasted and run."""

from string import Formatter

import numpy as np
import torch
from hypothesis import strategies as st

import stairwise as sw

NUMBERS = [
    "0", "-1", "1", "0.5", "2", "1e-200", "1e-300", "5e-324", "1e160", "1e308", "-1e308", "np.nan", "np.inf",
    "-np.inf", "None", "'a'",
    "True", "10**400", "1 + 2j", "[1.0]", "np.float32(0.5)", "torch.tensor(0.5)",
    "torch.tensor(0.5, requires_grad=True)", "np.array(0.5)",
]  # fmt: skip
WHOLE = [
    "1",
    "2",
    "3",
    "0",
    "-1",
    "2.5",
    "np.nan",
    "None",
    "'a'",
    "True",
    "10**400",
    "np.int8(2)",
    "[2]",
    "1e308",
    "torch.tensor(2)",
]
CHANGES = [
    "{}", "{} * 0", "{} * 1e160", "{} * 1e-200", "{} * 1e308", "{} * np.nan", "{}[:0]", "{}[0]", "{}[None]",
    "{} + 1j", "{}.astype(object)",
    "{}.astype(str)", "{}.astype(np.float32)", "{}.astype(np.float16)", "{}.astype(int)", "{}.tolist()",
    "torch.tensor({})", "{}[:, :1]",
    "torch.tensor({}, requires_grad=True)", "torch.tensor({}).float()", "np.ma.masked_greater({}, 1)", "None", "'a'",
    "[[1], [1, 2]]", "{}.T",
    "{}[:1]", "-{}", "np.where({} > 1, np.inf, {})", "3", "[]", "{{}}", "np.zeros((0, 0))", "[[10**400]]", "{} > 0",
]  # fmt: skip
TENSORS = [
    "{}", "{} * 0", "{} * 1e30", "{} * 1e-30", "{} * np.nan", "{}[:0]", "{}[0]", "{}[:1]", "{}.double()", "{}.half()",
    "{}.bfloat16()", "{}.int()",
    "{}.numpy()", "None", "'a'", "{}[:, :1]", "{}[:3]", "{} + 1j", "{}[None]", "{}.requires_grad_()", "{}.T",
    "{} * np.inf", "torch.zeros(0, 0)",
]  # fmt: skip
TIMES = [
    "[0, 1, 10]",
    "np.linspace(0, 5, 6)",
    "[1, 0]",
    "[-1]",
    "[]",
    "[np.inf]",
    "[0, 1e308]",
    "[1e-200]",
    "[[0, 1]]",
    "[None]",
    "'ab'",
    *NUMBERS,
]


def _changed(name: str, changes: list[str]) -> list[str]:
    return [change.format(*[name] * 2) for change in changes]


CORRELATIONS = [
    "corr", "None", "'corr'", "A", "sw.Correlation()", "sw.Correlation.from_pairs(A * 1e150, B * 1e150)",
    "sw.Correlation.from_pairs(A * 1e-160, B * 1e-160)", "sw.Correlation.from_pairs(A * 0, B * 0)",
    "sw.Correlation.from_pairs(A[:1], B[:1])",
]  # fmt: skip
SLOTS = {
    "r": ("gamma / 2", _changed("(gamma / 2)", CHANGES)), "T": ("times", TIMES), "p": ("0.5", NUMBERS),
    "A": ("A", _changed("A", CHANGES)), "B": ("B", _changed("B", CHANGES)), "W": ("W", _changed("W", CHANGES)),
    "K": ("K", _changed("K", CHANGES)),
    "S": ("S", _changed("S", CHANGES)), "g": ("gamma", _changed("gamma", [c for c in CHANGES if "[:, :1]" not in c])),
    "z": ("z_a", _changed("z_a", TENSORS)), "y": ("z_b", _changed("z_b", TENSORS)), "c": ("corr", CORRELATIONS),
    "t": ("[0, 1, 10]", TIMES),
    "x": ("0.1", NUMBERS), "n": ("2", WHOLE), "e": ("est", ["est", "None", "sw.KernelSSL(2)", "'a'"]), "v": ("y",
    ["y", "y[:3]", "None", "y * np.nan", "y.astype(str)"]),
    "l": ("'barlow_twins'", ["'vicreg'", "'simclr'", "'x'", "None", "3"]), "k": ("'rbf'", ["'linear'", "'ntk'", "'x'",
    "None", "lambda X, Y: X @ Y.T", "lambda X, Y: None", "3"]),
    "m": ("model", ["model", "None", "torch.nn.Linear(6, 2)", "torch.nn.Linear(5, 2)", "torch.nn.BatchNorm1d(6)",
    "lambda x: x"]),
}  # fmt: skip
CALLS = [
    "sw.Correlation.from_pairs({A}, {B})", "sw.Correlation.from_pairs({A}, {B}).eigenvalues",
    "sw.Correlation().update({A}, {B}).matrix", "{c}.top({n})",
    "sw.Modes({g}, {x}).eigenvalues({t})", "sw.Modes({g}, {x}).loss({t})", "sw.Modes({g}, {x}).step_times()",
    "sw.Modes({g}, {x}).singular_values({t})",
    "sw.SpectralModes({g}, {x}).eigenvalues({t})", "sw.SpectralModes({g}, {x}).loss({t})",
    "sw.closed_form({W}, {c}, {t})", "sw.closed_form({W}, {c}, {t}, lr={x})",
    "sw.gradient_flow({W}, {c}, {t})", "sw.gradient_flow({W} * {x}, {c}, {t})",
    "sw.gradient_descent({W}, {c}, {x}, {n})",
    "sw.predict_staircase({g}, {n}, {x}, {t})", "sw.gaussian_init({n}, {n}, {x}, {n})",
    "sw.early_weights({W}, {c}, {x})", "sw.check_conditions({W}, {c})",
    "sw.saddle_at({W}, {c})", "sw.saddle_at({W}, {c}, {n}, {x})", "sw.top_spectral_weights({c}, {n})",
    "sw.penalized_weights({c}, {n}, {x})",
    "sw.subspace_alignment({A}, {B})", "sw.detect_steps({T}, {S})", "sw.detect_steps(times, {S})",
    "sw.forecast_steps(times, {S})", "sw.forecast_steps({T}, {S})",
    "sw.advise(times, {S})", "sw.predict({A}, {B}, d={n}, alpha={x})",
    "sw.predict({A}, {B}, d=2, alpha=1e-4, lr={x})", "sw.predict_embeddings({K}, {n})",
    "sw.KernelSSL({n}, kernel={k}).fit({A}, X_b={B})", "sw.KernelSSL({n}).fit({A}).transform({B})",
    "{e}.transform_at({A}, {x}, alpha={x})", "{e}.step_times({x})",
    "sw.KernelSSL(2, kernel=sw.kernels.rbf({x})).fit(A)",
    "sw.KernelSSL(2, kernel=sw.kernels.polynomial({n}, {x}, {x})).fit(A)",
    "sw.kernels.ntk({n}, weight_variance={x})(A, B)",
    "sw.probe_curve({e}, {A}, {v})", "sw.carried({r}, {n}, {l})", "sw.smallest_batch({r}, {n}, {l})",
    "sw.useful_d({r}, {n}, {l})",
    "sw.losses.barlow_twins({z}, {y}, {x})", "sw.losses.simclr({z}, {y}, {x})",
    "sw.losses.vicreg({z}, {y}, {x}, {x}, {x})", "sw.losses.byol({z}, {y})",
    "sw.losses.frossl({z}, {y}, {x})", "sw.losses.hinged({z}, {y}, {x})", "sw.losses.smoothed({z}, {y}, {x})",
    "sw.losses.sharpened({z}, {y})",
    "sw.losses.fourth_power({z}, {y})", "sw.losses.spectral_contrastive({z}, {y})",
    "sw.precondition({z}, {y}, {x}, {p})", "measured({z}, {y})",
    "sw.SpectrumMonitor(window={n})", "sw.SpectrumMonitor(half_life={x})", "sw.empirical_ntk({m}, {z})",
    "sw.empirical_ntk({m}, {z}, {y})",
    "sw.landscapes.Smoothed({x}).solve({t}, {x}, {x})", "sw.landscapes.Hinged({x}).step_times({x}, {x})",
    "sw.landscapes.DoubleWell({x}, {x}).loss({x})",
    "sw.landscapes.BarlowTwins().solve({t}, {x}, {x})", "sw.landscapes.Supervised({x}).rate({x}, {x})",
    "sw.landscapes.Sharpened().step_times({x}, {x})",
    "sw.Muon([W_torch], lr={x}, momentum={x})", "sw.load_recipe('photos-bt', {{'lr': {x}}})", "sw.Quartic({K}, {K})",
    "sw.Clock({t}, {t})",
]  # fmt: skip


def _measured(z_a: object, z_b: object) -> object:
    monitor = sw.SpectrumMonitor()
    monitor.update(z_a, z_b)
    return monitor.compute()


class Names(dict):
    """Names for the sources, made anew for each, since some calls change their arguments."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        A = rng.standard_normal((20, 6))
        B = A + 0.3 * rng.standard_normal((20, 6))
        torch.manual_seed(0)
        z = torch.randn(16, 6)
        super().__init__(
            np=np, torch=torch, sw=sw, A=A, B=B, z_a=z, z_b=z + 0.1, y=np.arange(20) % 2, measured=_measured
        )
        self |= {"W": 1e-3 * rng.standard_normal((3, 6)), "K": A @ A.T, "gamma": np.array([2.0, 1.0, 0.5, -0.1])}
        self["times"] = np.linspace(0, 10, 60)
        self["S"] = 1 / (1 + np.exp(-4 * (self["times"][:, None] - np.array([2.0, 5.0, 8.0]))))
        self["corr"] = sw.Correlation.from_pairs(A, B)
        self["model"], self["W_torch"] = torch.nn.Linear(6, 2), torch.nn.Parameter(torch.randn(3, 4))

    def __missing__(self, name: str) -> object:
        if name != "est":
            raise KeyError(name)
        self["est"] = sw.KernelSSL(2).fit(self["A"])
        return self["est"]


@st.composite
def _source(draw: st.DrawFn) -> str:
    template = draw(st.sampled_from(CALLS))
    slots = [name for _, name, _, _ in Formatter().parse(template) if name]
    hostile = draw(st.sets(st.integers(0, max(0, len(slots) - 1)), max_size=2))
    values = [draw(st.sampled_from(SLOTS[name][1])) if i in hostile else SLOTS[name][0] for i, name in enumerate(slots)]
    parts, remaining = [], iter(values)
    for text, name, _, _ in Formatter().parse(template):
        parts.append(text + (next(remaining) if name else ""))
    return "".join(parts)


SOURCES = _source()
