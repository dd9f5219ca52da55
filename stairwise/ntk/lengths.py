r"""How the tangent kernel depends on the lengths of weights that batch norm hides, and kernels that do not.

A weight w that batch norm follows can be multiplied by s without any change of the function, and its part of the kernel
K_w is then divided by s². So K is not a function of the function: initialization, optimizer, learning rate and length
of training set the lengths, and these set K. Two kernels do not depend on s. That of *directions*, Σ ‖w‖² K_w over
tensors w, is the kernel of relative changes of whole weights; that of *filters*, Σ ‖w_c‖² K_{w_c}, of every output
channel c by itself, whose length batch norm hides as well.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stairwise.archives import save_arrays
from stairwise.checks import InputError, as_numpy, number
from stairwise.files import save_json
from stairwise.kernel.arrays import Matrix
from stairwise.ntk.empirical import Part, ntk_parts
from stairwise.ntk.predict import kernel_pca, predict_embeddings, unit_diagonal
from stairwise.ntk.study import embed
from stairwise.progress import Progress, silent
from stairwise.table import Table
from stairwise.theory.spectra import grown, subspace_alignment

Floats = NDArray[np.float64]
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SCORES = ("theory", "kernel PCA", "theory, unit diagonal", "theory, grown modes", "theory, 2d modes")
NORMS = nn.modules.batchnorm._BatchNorm
MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
HIDDEN, FREE = "hidden", "free"


def hidden_weights(model: nn.Module, x: Tensor) -> dict[str, str]:
    """Linear maps whose output goes straight into a batch norm: name of the map → name of the norm.

    Arguments:
        x: a few samples, which are passed through the model.
    """
    names = {module: name for name, module in model.named_modules()}
    outputs: list[tuple[nn.Module, Tensor]] = []
    found: dict[str, str] = {}
    calls: list[nn.Module] = []

    def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        calls.append(module)
        if isinstance(module, NORMS):
            source = [made for made, tensor in outputs if inputs and tensor is inputs[0]]
            found.update({names[made]: names[module] for made in source})
        else:
            outputs.append((module, output))  # keeps the tensor alive, so that its identity stays its own

    hooks = [m.register_forward_hook(record) for m in names if isinstance(m, (*MAPS, NORMS))]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    once = {names[module] for module in calls if calls.count(module) == 1}
    return {made: norm for made, norm in found.items() if {made, norm} <= once}


@torch.no_grad()
def rescaled(model: nn.Module, hidden: dict[str, str], s: float) -> nn.Module:
    """A copy with all hidden weights (and biases) times s; running averages and ε of their norms follow, so that the
    function is the same, in training and in evaluation mode."""
    number(s, "s", above=0)
    copy = deepcopy(model)
    modules: dict[str, Any] = dict(copy.named_modules())
    for made, norm_name in hidden.items():
        for parameter in modules[made].parameters(recurse=False):
            parameter.mul_(s)
        norm = modules[norm_name]
        norm.eps *= s**2
        if norm.running_mean is not None:
            norm.running_mean.mul_(s)
            norm.running_var.mul_(s**2)
    return copy


def layer_of(name: str, readout: str) -> str:
    """The part of a ResNet with a head that a parameter belongs to: stem, layer1 … layer4, head or readout."""
    if name.rpartition(".")[0] == readout:
        return "readout"
    words = name.removeprefix("network.").split(".")
    if words[0] != "backbone":
        return "head"
    return words[1] if words[1].startswith("layer") else "stem"


@dataclass(frozen=True, eq=False)
class Kernels:
    """Kernels of a network, (N, N) each: numpy arrays, or tensors if the network is on a GPU.

    Attributes:
        parts: by layer, and whether batch norm hides its parameters: "layer1, hidden", "layer1, free", …
        directions, filters: kernels that do not depend on the lengths of hidden weights.
    """

    parts: dict[str, Matrix]
    directions: Matrix
    filters: Matrix

    def at(self, s: float) -> Matrix:
        """K after hidden weights have been multiplied by s."""
        return sum(K / s**2 if name.endswith(HIDDEN) else K for name, K in self.parts.items())

    def layers(self) -> dict[str, Matrix]:
        """K of every layer, hidden and free parameters together."""
        names = dict.fromkeys(name.split(", ")[0] for name in self.parts)
        return {n: sum(K for name, K in self.parts.items() if name.startswith(f"{n}, ")) for n in names}

    def share(self) -> float:
        """Share of the hidden weights in the trace of K."""
        traces = {name: float(K.diagonal().sum()) for name, K in self.parts.items()}
        return sum(v for name, v in traces.items() if name.endswith(HIDDEN)) / sum(traces.values())


def kernels_of(
    model: nn.Module, x: Tensor, hidden: dict[str, str], *, precision: str = "float32", progress: Progress = silent
) -> Kernels:
    """All kernels of a model in evaluation mode, on samples x."""
    linear = [name for name, module in model.named_modules() if isinstance(module, MAPS)]
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    parts: dict[str, dict[str, float | Tensor]] = {}
    for name in parameters:
        kind = HIDDEN if name.rpartition(".")[0] in hidden else FREE
        parts.setdefault(f"{layer_of(name, linear[-1] if linear else '')}, {kind}", {})[name] = 1.0
    directions: Part = {name: float(p.norm()) for name, p in parameters.items()}
    filters: Part = {name: p.reshape(len(p), -1).norm(dim=1) for name, p in parameters.items()}
    every: dict[str, Part] = {**parts, "directions": directions, "filters": filters}
    computed = ntk_parts(model, x, every, precision=precision, progress=progress)
    found = {name: K if K.is_cuda else as_numpy(K) for name, K in computed.items()}
    return Kernels({name: found[name] for name in parts}, found["directions"], found["filters"])


def scores_of(K: Any, z: Floats, d_grown: int) -> Floats:
    """`SCORES` of a kernel: shares of the trained span; nan where the kernel does not resolve enough modes.

    Arguments:
        z: trained embeddings, (N, d).
        d_grown: number of leading modes of z that have grown.
    """
    d = z.shape[1]
    modes = np.linalg.svd(z, full_matrices=False)[0]
    F, unit = _predicted(K, 2 * d), _predicted(unit_diagonal(K), d)
    theory = np.nan if F.shape[1] < d else subspace_alignment(z, F[:, :d])
    return np.array(
        [
            theory,
            subspace_alignment(z, kernel_pca(K, d)),
            np.nan if unit.shape[1] < d else subspace_alignment(z, unit),
            np.nan if F.shape[1] < d else subspace_alignment(modes[:, :d_grown], F[:, :d]),
            np.nan if F.shape[1] < 2 * d else subspace_alignment(z, F),
        ]
    )


def _predicted(K: Matrix, most: int) -> Floats:
    """Predicted embeddings in up to `most` dimensions, as many as the kernel resolves."""
    try:
        return predict_embeddings(K, most, at_most=True)
    except InputError:  # it resolves none, or is not positive semidefinite
        return np.zeros((len(K), 0))


@dataclass(frozen=True, eq=False)
class Lengths:
    """Scores of all kernels of one network.

    Attributes:
        name: of the run.
        kernels: names of the kernels: "s = 0.25" …, layers, "directions", "filters".
        scores: one row per kernel, one column per name of `SCORES`.
        facts: share of hidden weights in K's trace, change of the function by s = 2, number of grown modes, chance.
    """

    name: str
    kernels: list[str]
    scores: Floats
    facts: dict[str, Any]

    def table(self) -> Table:
        rows = [[k, *(f"{v:.3f}" for v in row)] for k, row in zip(self.kernels, self.scores, strict=True)]
        return Table(f"{self.name}: span of the trained embeddings, by kernel", ["kernel", *SCORES], rows)

    def write(self, folder: Path) -> list[Path]:
        """Write lengths.json and lengths.npz; returns their paths."""
        save_arrays(folder / "lengths.npz", {"kernels": np.array(self.kernels), "scores": self.scores})
        save_json(folder / "lengths.json", {"run": self.name, **self.facts})
        return [folder / "lengths.json", folder / "lengths.npz"]


def study_lengths(
    name: str,
    model: nn.Module,
    views: Tensor,
    scales: Sequence[float] = SCALES,
    *,
    precision: str = "float32",
    progress: Progress = silent,
) -> Lengths:
    """Compute the scores of a trained model's kernels, rescaled, layer by layer, and of those that do not depend on s.

    Arguments:
        model: views → z, (2n, d), in evaluation mode.
        views: first views first, (2n, …), on the model's device.
    """
    hidden = hidden_weights(model, views[:2])
    if not hidden:
        raise InputError("model", "must have weights that batch norm hides", None, "its kernel does not depend on s")
    z = embed(model, views)
    change = float(np.abs(embed(rescaled(model, hidden, 2.0), views) - z).max() / np.abs(z).max())
    kernels = kernels_of(model, views, hidden, precision=precision, progress=progress)
    count = grown(np.linalg.svd(z - z.mean(axis=0), compute_uv=False) ** 2)[0]
    every = {f"s = {s:g}": kernels.at(s) for s in scales} | kernels.layers()
    every |= {"directions": kernels.directions, "filters": kernels.filters}
    scores = []
    for i, (kernel, K) in enumerate(every.items()):
        progress(i, len(every), f"predicting: {kernel}")
        scores.append(scores_of(K, z, count))
    facts = {"n": len(views) // 2, "d": z.shape[1], "hidden_share": kernels.share(), "function_change": change}
    facts |= {"grown": count, "chance": z.shape[1] / len(z), "precision": precision}
    return Lengths(name, list(every), np.array(scores), facts)
