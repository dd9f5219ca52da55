"""Batches as the libraries' loaders hand them over, and small networks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N, SIZE, SMALL = 16, 32, 16  # images per batch, pixels of an image and of a small crop
FEATURES, D = 12, 6  # of the representation h and of the embedding z


def crops(*sizes: int, seed: int = 0, n: int = N) -> list[Tensor]:
    """Views of the same n images: noise is added, and each is scaled to its size."""
    random = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 3, 4, 4, generator=random)
    views = []
    for size in sizes:
        noise = 0.5 * torch.randn(images.shape, generator=random)
        views.append(F.interpolate(images + noise, size=(size, size), mode="bilinear"))
    return views


def backbone(pooled: bool = True) -> nn.Sequential:
    """Stands for a ResNet without its last layer, (N, features, 1, 1), or its last two, (N, features, 8, 8)."""
    layers = [nn.Conv2d(3, FEATURES, 3, stride=4, padding=1), nn.BatchNorm2d(FEATURES), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.AdaptiveAvgPool2d(1)] if pooled else []))
