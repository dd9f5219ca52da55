"""Compute representations of images in the middle of training, without side effects on the network."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stairwise.checks import InputError
from stairwise.data.augment import full_view
from stairwise.data.feed import AbstractFeed
from stairwise.data.images import Images


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. Afterwards modes, batch-norm statistics and RNG state are unchanged."""
    modes = {m: m.training for m in module.modules()}
    devices = [p.device for p in module.parameters() if p.device.type == "cuda"][:1]
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        for m, mode in modes.items():
            m.training = mode


@contextmanager
def _without_search() -> Iterator[None]:
    """Disable cudnn.benchmark, which would time all algorithms for the last batch, too; a single pass is faster."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def represent(
    network: nn.Module,
    feed: AbstractFeed,
    rows: Tensor,
    size: int,
    mean: Tensor,
    std: Tensor,
    crop: bool = False,
    batch: int = 512,
    precision: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """h (N, features) and z (N, d) of the given images, unaugmented, in evaluation mode.

    Arguments:
        network: images → (h, z).
        precision: dtype of autocast; None turns it off.
    """
    outputs: list[tuple[Tensor, Tensor]] = []
    autocast = torch.autocast(feed.device.type, precision, enabled=precision is not None)
    with eval_mode(network), autocast, _without_search():
        for images in feed.stream(iter(rows.split(batch))):
            h, z = network(full_view(images, size, mean, std, crop).float())
            outputs.append((h.float(), z.float()))
    return torch.cat([h for h, _ in outputs]), torch.cat([z for _, z in outputs])


def probe_rows(images: Images, pretrained: int, most: int = 0) -> tuple[Tensor, Tensor]:
    """Row numbers of the images that probes are fitted on, and of those they are scored on.

    Probes are fitted on the dataset's training images and scored on images that neither they nor pretraining (the
    first `pretrained` images) have seen. If there are none, every fifth image is held out; pretraining has seen these,
    but not their labels. `most` limits both sets, evenly spaced.
    """
    if images.labels is None:
        raise InputError("probes", "need labels", images.name, "leave probes empty")
    rows = torch.arange(images.training or pretrained)
    held = torch.arange(max(len(rows), pretrained), len(images.labels))
    if len(held) == 0:
        fifth = torch.arange(len(rows)) % 5 == 0
        rows, held = rows[~fifth], rows[fifth]
    if most:
        rows, held = (some[torch.linspace(0, len(some) - 1, min(most, len(some))).long()] for some in (rows, held))
    return rows, held
