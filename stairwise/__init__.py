"""stairwise: predict, measure and speed up the way self-supervised networks learn, one dimension at a time."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stairwise import losses
    from stairwise.checks import InputError, TheoryWarning
    from stairwise.dynamics.descent import gradient_descent
    from stairwise.dynamics.flow import gradient_flow
    from stairwise.evaluate.probes import probe_curve
    from stairwise.kernel import kernels
    from stairwise.kernel.estimator import KernelSSL
    from stairwise.losses import precondition
    from stairwise.monitor.forecast import forecast_steps
    from stairwise.monitor.spectrum import SpectrumMonitor
    from stairwise.monitor.steps import detect_steps
    from stairwise.ntk.empirical import empirical_ntk
    from stairwise.ntk.predict import predict_embeddings
    from stairwise.theory import landscapes
    from stairwise.theory.alignment import gaussian_init
    from stairwise.theory.conditions import check_conditions
    from stairwise.theory.correlation import Correlation
    from stairwise.theory.ensemble import predict_staircase
    from stairwise.theory.laws import closed_form
    from stairwise.theory.modes import Modes
    from stairwise.theory.solutions import top_spectral_weights
    from stairwise.theory.spectra import subspace_alignment
    from stairwise.theory.trajectory import Trajectory
    from stairwise.train.loop import train
    from stairwise.train.recipe import Recipe, load_recipe
    from stairwise.train.run import Run

__version__ = "0.1.0"

# name: module that holds it (the whole module where the name is its own last part); loaded when first used
_HOMES = {
    "Correlation": "theory.correlation",
    "InputError": "checks",
    "KernelSSL": "kernel.estimator",
    "Modes": "theory.modes",
    "Recipe": "train.recipe",
    "Run": "train.run",
    "SpectrumMonitor": "monitor.spectrum",
    "TheoryWarning": "checks",
    "Trajectory": "theory.trajectory",
    "check_conditions": "theory.conditions",
    "closed_form": "theory.laws",
    "detect_steps": "monitor.steps",
    "empirical_ntk": "ntk.empirical",
    "forecast_steps": "monitor.forecast",
    "gaussian_init": "theory.alignment",
    "gradient_descent": "dynamics.descent",
    "gradient_flow": "dynamics.flow",
    "kernels": "kernel.kernels",
    "landscapes": "theory.landscapes",
    "load_recipe": "train.recipe",
    "losses": "losses",
    "precondition": "losses",
    "predict_embeddings": "ntk.predict",
    "predict_staircase": "theory.ensemble",
    "probe_curve": "evaluate.probes",
    "subspace_alignment": "theory.spectra",
    "top_spectral_weights": "theory.solutions",
    "train": "train",
}

__all__ = [
    "Correlation",
    "InputError",
    "KernelSSL",
    "Modes",
    "Recipe",
    "Run",
    "SpectrumMonitor",
    "TheoryWarning",
    "Trajectory",
    "check_conditions",
    "closed_form",
    "detect_steps",
    "empirical_ntk",
    "forecast_steps",
    "gaussian_init",
    "gradient_descent",
    "gradient_flow",
    "kernels",
    "landscapes",
    "load_recipe",
    "losses",
    "precondition",
    "predict_embeddings",
    "predict_staircase",
    "probe_curve",
    "subspace_alignment",
    "top_spectral_weights",
    "train",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stairwise' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = import_module(f"stairwise.{home}")
    value = module if home.split(".")[-1] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
