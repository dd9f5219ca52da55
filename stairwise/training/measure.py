"""Measurements that need extra passes: probes, spectra of held-out images, and the initial scale."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from stairwise.distributed import world
from stairwise.evaluate.classifiers import PROBES
from stairwise.evaluate.representations import eval_mode, probe_rows, represent
from stairwise.monitor.decompose import decompose_on_one_core
from stairwise.monitor.spectrum import SpectrumMonitor
from stairwise.nets.encoder import Network
from stairwise.nets.initial import find_alpha, scale_parameters
from stairwise.runs.record import spectrum_of_loss
from stairwise.training.recipe import Recipe
from stairwise.training.setup import Material

SMALL_VIEWS = 32  # pixels


def probe_accuracies(network: Network, recipe: Recipe, material: Material) -> dict[str, float]:
    """Accuracies of the recipe's probes, fitted to representations."""
    if not recipe.probes:
        return {}
    pairs, images = material.pairs, material.images
    labels = torch.as_tensor(np.asarray(images.labels, dtype=np.int64))
    crop = pairs.pipeline[0].scale is None
    precision = torch.bfloat16 if material.bf16 else None
    large = pairs.feed.device.type == "cuda" and pairs.size <= SMALL_VIEWS
    batch = 2048 if large else 512  # fewer launches, which small views wait for

    def represented(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        about = pairs.size, pairs.mean, pairs.std, crop, batch
        h, _ = represent(network, pairs.feed, rows, *about, precision=precision)
        return h, labels[rows].to(h.device)

    rows, held = probe_rows(images, material.training, recipe.probe_images)
    (h, y), (h_test, y_test) = represented(rows), represented(held)
    return {name: PROBES[name](h, y, h_test, y_test) for name in recipe.probes}


def held_out_spectra(network: Network, recipe: Recipe, material: Material) -> dict[str, Any]:
    """Spectra of images that the network is not trained on, in evaluation mode."""
    rows = torch.arange(material.training, len(material.images.pixels))[: recipe.held_out]
    if len(rows) == 0:
        return {}
    monitor = SpectrumMonitor()
    # a copy, because the original may be drawing the views of the next step
    pairs = material.pairs.copy()
    with eval_mode(network), torch.autocast(pairs.feed.device.type, torch.bfloat16, enabled=material.bf16):
        for x_a, x_b in pairs.fixed_batches(rows, least=2):
            (h_a, z_a), (h_b, z_b) = network(x_a), network(x_b)
            monitor.update(z_a, z_b, h_a, h_b)
    spectrum = decompose_on_one_core(monitor.snapshot())  # many threads are far slower if others use the machine
    return {f"held_{name}": getattr(spectrum, name) for name in ("eigenvalues", "covariance", "hidden")}


@torch.no_grad()
def top_eigenvalue(network: Network, recipe: Recipe, material: Material) -> float:
    """The largest eigenvalue at initialization: of C for Barlow Twins and related losses, else of the covariance."""
    buffers = {name: b.clone() for name, b in network.named_buffers()}
    monitor, pairs = SpectrumMonitor(), material.pairs
    rows = torch.arange(material.training)[: max(512, 4 * recipe.d)]
    for x_a, x_b in pairs.fixed_batches(rows, least=2):
        with torch.autocast(pairs.feed.device.type, torch.bfloat16, enabled=material.bf16):
            monitor.update(network(x_a)[1], network(x_b)[1])
    for name, b in network.named_buffers():
        b.copy_(buffers[name])
    # the paper sets the scale of C, even if the loss standardizes z afterwards
    name = spectrum_of_loss(recipe.loss, recipe.loss_options | {"batch_norm": False})
    return float(getattr(decompose_on_one_core(monitor.snapshot()), name)[0])


def scale_initially(network: Network, recipe: Recipe, material: Material) -> float:
    """Multiply the initial parameters by the recipe's α, which may have to be found, and return it."""
    if recipe.alpha != "auto":
        alpha = float(recipe.alpha)
    else:
        alpha = find_alpha(network, lambda: top_eigenvalue(network, recipe, material), recipe.start, recipe.scope)
        if world() > 1:
            shared = torch.tensor(alpha, dtype=torch.float64, device=material.pairs.feed.device)
            dist.broadcast(shared, 0)
            alpha = float(shared)
    if alpha != 1:
        scale_parameters(network, alpha, recipe.scope)
    return alpha
