"""Small networks and seven methods, healthy and with a deliberate fault, as strangers write them."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, mse_loss, normalize

import stairwise as sw
from stairwise.nets.perceptron import MLP, head
from stairwise.nets.resnet import BasicBlock, ResNet

FAULTS = {  # what is wrong, and what it does to the embedding
    "cosine": "complete",  # the similarity of positive pairs alone
    "invariance": "complete",  # the mean squared distance of positive pairs alone
    "no_variance": "complete",  # VICReg without its variance term
    "no_predictor": "complete",  # BYOL without predictor and momentum
    "no_stop": "complete",  # SimSiam without stop-gradient
    "no_centering": "complete",  # DINO without centering
    "no_covariance": "dimensional",  # VICReg without its covariance term
    "no_off_diagonal": "dimensional",  # Barlow Twins without redundancy reduction
}
FAULTS_OF = {
    "barlow_twins": ("no_off_diagonal", "invariance"),
    "barlow_twins_norm": ("no_off_diagonal", "cosine"),
    "simclr": ("cosine", "invariance"),
    "vicreg": ("no_variance", "no_covariance"),
    "spectral": ("cosine", "invariance"),
    "byol": ("no_predictor", "cosine"),
    "simsiam": ("no_stop", "invariance"),
    "dino": ("no_centering", "cosine"),
}


class ViT(nn.Module):
    """A small vision transformer: patches, learned positions, mean over tokens."""

    def __init__(self, side: int, channels: int, patch: int = 4, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.features = width

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.blocks(tokens).mean(dim=1)


class CNN(nn.Module):
    """Three convolutions without normalization, and the mean over positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, 24, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(24, 48, 3, 2, 1), nn.ReLU()),
            *(nn.Conv2d(48, 64, 3, 2, 1), nn.ReLU()),
        )
        self.features = 64

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(dim=(2, 3))


class Mixer(nn.Module):
    """Patches of 2 × 2 pixels, and blocks that mix first positions, then features."""

    def __init__(self, side: int, channels: int, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 2, 2)
        self.over_positions = nn.ModuleList(_mixing(width, (side // 2) ** 2) for _ in range(depth))
        self.over_features = nn.ModuleList(_mixing(width, width) for _ in range(depth))
        self.features = width

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)  # (n, positions, features)
        for (norm_p, mix_p), (norm_f, mix_f) in zip(self.over_positions, self.over_features, strict=True):
            h = h + mix_p(norm_p(h).transpose(1, 2)).transpose(1, 2)
            h = h + mix_f(norm_f(h))
        return h.mean(dim=1)


def _mixing(width: int, mixed: int) -> nn.ModuleList:
    """Layer norm over `width` features, and a perceptron from `mixed` numbers to as many."""
    layers = nn.Sequential(nn.Linear(mixed, 2 * mixed), nn.GELU(), nn.Linear(2 * mixed, mixed))
    return nn.ModuleList([nn.LayerNorm(width), layers])


class Recurrent(nn.Module):
    """Reads an image two rows at a time; its last state is the output."""

    def __init__(self, side: int, channels: int, width: int = 64) -> None:
        super().__init__()
        self.reads, self.keeps = nn.Linear(2 * side * channels, width), nn.Linear(width, width, bias=False)
        self.features = width

    def forward(self, x: Tensor) -> Tensor:
        rows = self.reads(x.transpose(1, 2).flatten(2).unflatten(1, (-1, 2)).flatten(2))  # (n, side / 2, width)
        h = torch.tanh(rows[:, 0])
        for k in range(1, rows.shape[1]):
            h = torch.tanh(rows[:, k] + self.keeps(h))
        return h


class Patches(nn.Module):
    """Sees patches of 2 × 2 pixels one by one, without their positions; the largest of each feature is the output."""

    def __init__(self, channels: int, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4 * channels, width), nn.ReLU(), nn.Linear(width, width))
        self.features = width

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return self.layers(patches).amax(dim=1)


class Gated(nn.Module):
    """Two layers of products: half of the outputs of a linear map, each multiplied by a gate, a sigmoid of the rest."""

    def __init__(self, inputs: int, width: int = 96) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, 2 * width), nn.GLU(), nn.Linear(width, 2 * width), nn.GLU()
        )
        self.features = width

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build(architecture: str, side: int, channels: int, d: int, norm: bool) -> nn.Sequential:
    """Backbone and head, from images to z."""
    if architecture == "mlp":
        backbone: nn.Module = MLP(channels * side**2, [128, 128])
    elif architecture == "resnet":
        backbone = ResNet(BasicBlock, (1, 1, 1, 1), "small", 16, channels)
    elif architecture == "cnn":
        backbone = CNN(channels)
    elif architecture == "mixer":
        backbone = Mixer(side, channels)
    elif architecture == "shallow":
        backbone = MLP(channels * side**2, [128])
    elif architecture == "recurrent":
        backbone = Recurrent(side, channels)
    elif architecture == "patches":
        backbone = Patches(channels)
    elif architecture == "gated":
        backbone = Gated(channels * side**2)
    else:
        backbone = ViT(side, channels, 2 if side < 16 else 4)
    return nn.Sequential(backbone, head(backbone.features, [128], d, norm, bias=not norm))


class Method(nn.Module):
    """Network, loss and, for BYOL, SimSiam and DINO, predictor and target network; if `unit`, z is normalized."""

    def __init__(self, network: nn.Module, loss: str, d: int, unit: bool = False) -> None:
        super().__init__()
        self.network, self.loss, self.unit = network, loss, unit
        self.predictor = nn.Sequential(nn.Linear(d, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, d))
        self.target = copy.deepcopy(network).requires_grad_(False) if loss in ("byol", "dino") else None
        self.register_buffer("center", torch.zeros(d))

    def trained(self) -> list[nn.Parameter]:
        modules = [self.network, *([self.predictor] if self.loss in ("byol", "simsiam") else [])]
        return [p for module in modules for p in module.parameters()]

    def forward(self, x_a: Tensor, x_b: Tensor, fault: str = "") -> tuple[Tensor, Tensor, Tensor]:
        """The loss, and both views of z."""
        z_a, z_b = self.network(x_a), self.network(x_b)
        if self.unit:
            z_a, z_b = normalize(z_a), normalize(z_b)
        if fault:
            return self._faulty(fault, z_a, z_b, x_a, x_b), z_a, z_b
        if self.loss == "barlow_twins":  # the paper's form
            return sw.losses.barlow_twins(z_a, z_b, 1.0, batch_norm=False, symmetric=True), z_a, z_b
        if self.loss == "barlow_twins_norm":
            return sw.losses.barlow_twins(z_a, z_b), z_a, z_b
        if self.loss == "simclr":
            return sw.losses.simclr(z_a, z_b), z_a, z_b
        if self.loss == "vicreg":
            return sw.losses.vicreg(z_a, z_b), z_a, z_b
        if self.loss == "spectral":
            return sw.losses.spectral_contrastive(z_a, z_b), z_a, z_b
        if self.loss == "simsiam":
            return self._predicted(z_a, z_b, z_a.detach(), z_b.detach()), z_a, z_b
        with torch.no_grad():
            t_a, t_b = self.target(x_a), self.target(x_b)
        if self.loss == "byol":
            return self._predicted(z_a, z_b, t_a, t_b), z_a, z_b
        return self._distilled(z_a, z_b, t_a, t_b, centred=True), z_a, z_b

    def _faulty(self, fault: str, z_a: Tensor, z_b: Tensor, x_a: Tensor, x_b: Tensor) -> Tensor:
        if fault == "cosine":
            return -cosine_similarity(z_a, z_b).mean()
        if fault == "invariance":
            return mse_loss(z_a, z_b)
        if fault == "no_variance":
            return sw.losses.vicreg(z_a, z_b, 25, 0, 1)
        if fault == "no_covariance":
            return sw.losses.vicreg(z_a, z_b, 25, 25, 0)
        if fault == "no_off_diagonal":
            return sw.losses.barlow_twins(z_a, z_b, 0.0)
        if fault == "no_predictor":
            return 2 - 2 * cosine_similarity(z_a, z_b).mean()
        if fault == "no_stop":
            return self._predicted(z_a, z_b, z_a, z_b)
        with torch.no_grad():
            t_a, t_b = self.target(x_a), self.target(x_b)
        return self._distilled(z_a, z_b, t_a, t_b, centred=False)

    def _predicted(self, z_a: Tensor, z_b: Tensor, t_a: Tensor, t_b: Tensor) -> Tensor:
        p_a, p_b = self.predictor(z_a), self.predictor(z_b)
        return -0.5 * (cosine_similarity(p_a, t_b).mean() + cosine_similarity(p_b, t_a).mean())

    def _distilled(self, z_a: Tensor, z_b: Tensor, t_a: Tensor, t_b: Tensor, centred: bool) -> Tensor:
        """Cross-entropy between softmax distributions over d prototypes; the teacher's is centred and sharpened."""
        center = self.center if centred else torch.zeros_like(self.center)
        q_a, q_b = (torch.softmax((t - center) / 0.04, dim=1) for t in (t_a, t_b))
        p_a, p_b = (torch.log_softmax(z / 0.1, dim=1) for z in (z_a, z_b))
        with torch.no_grad():
            self.center.mul_(0.9).add_(0.1 * torch.cat([t_a, t_b]).mean(dim=0))
        return -0.5 * ((q_a * p_b).sum(dim=1).mean() + (q_b * p_a).sum(dim=1).mean())

    @torch.no_grad()
    def after_step(self) -> None:
        if self.target is None:
            return
        pairs = zip(self.target.parameters(), self.network.parameters(), strict=True)
        for old, new in pairs:
            old.lerp_(new, 0.01)
        for old, new in zip(self.target.buffers(), self.network.buffers(), strict=True):
            old.copy_(new)


class LARS(torch.optim.SGD):
    """SGD whose step of each weight is a share `trust` of the weight's length."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, trust: float = 0.02) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.trust = trust

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.ndim > 1:
                size = p.grad.norm()
                p.grad.mul_(torch.where(size > 0, self.trust * p.norm() / size, 1.0))
        super().step(closure)


def optimizer_of(name: str, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    if name == "lars":
        return LARS(parameters, lr)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def factor(step: int, steps: int, schedule: str) -> float:
    """Learning rate relative to its maximum: constant, or ten steps of warm-up and a cosine."""
    warm = min(1.0, (step + 1) / 10)
    return warm if schedule == "constant" else warm * (0.001 + 0.999 * 0.5 * (1 + math.cos(math.pi * step / steps)))
