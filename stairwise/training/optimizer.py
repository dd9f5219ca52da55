r"""SGD, LARS, AdamW and Muon on flat memory.

All parameters are moved into one vector, and their gradients into another. A step then takes a few kernels for any
network, data parallelism takes one reduction, and a checkpoint of the optimizer is one tensor. Matrices and filters
come first, then biases and norms, which have a separate learning rate.
"""

import torch
from torch import Tensor, nn

from stairwise.checks import InputError, number, one_of
from stairwise.training.newton_schulz import LONGEST, SCALINGS, descend, start_lengths

OPTIMIZERS = ("sgd", "lars", "adamw", "muon")
TRUST = 1e-3  # LARS: norm of a step relative to the norm of the weights
BETA, EPSILON = 0.999, 1e-8  # AdamW: decay of the mean square, and the smallest divisor


class FlatOptimizer:
    """Momentum descent, v ← m v + u, w ← w − lr v, where u is computed from the gradient g:

    "sgd" (torch's rule): u = g + weight_decay · w for all parameters.
    "lars" (Meta's rule): for parameters with more than one axis, u = g + weight_decay · w, scaled by 1e-3 ‖w‖ / ‖u‖ if
    both norms are positive; for the others u = g.
    "adamw" (torch's rule): v and the mean square s of g are exponential averages, both corrected for their start at 0;
    w ← (1 − lr · weight_decay) w − lr v / (√s + 1e-8), where weights decay, and biases and norms do not.
    "muon": parameters with more than one axis move along the polar factor O of the momentum (see `sw.Muon`),
    w ← (1 − lr · weight_decay) w − lr ‖w₀‖ O / ‖O‖ with O ≈ polar(g + m v) and the initial weights w₀; for the others
    u = g. A gradient that is not finite, or longer than 1e18, changes nothing.

    Attributes:
        lr: learning rates of (weights, biases and norms); a tensor that the caller fills before each step.
        gradient: the flat gradient; the parameters' `.grad` are views of it.
        momentum_buffer: v, flat.
        square_buffer, count: s, flat, and the number of steps so far; only AdamW uses them.
        lengths: ‖w₀‖ of every weight, for "muon".
    """

    def __init__(
        self,
        module: nn.Module,
        kind: str = "sgd",
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        clip: float = 0.0,
        scaling: str = "relative",
    ) -> None:
        self.kind = one_of(kind, "optimizer", OPTIMIZERS)
        self.scaling = one_of(scaling, "scaling", SCALINGS)
        self.momentum = number(momentum, "momentum", least=0, below=1)
        self.weight_decay = number(weight_decay, "weight_decay", least=0)
        self.clip = number(clip, "clip", least=0)
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            raise InputError("the network", "must have trainable parameters", 0, "set requires_grad")
        weights, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
        parameters = weights + others
        device = parameters[0].device
        sizes = [p.numel() for p in parameters]
        self.split = sum(p.numel() for p in weights)
        self.values = torch.zeros(sum(sizes), device=device)
        self.gradient = torch.zeros_like(self.values)
        self.momentum_buffer = torch.zeros_like(self.values)
        self.square_buffer = torch.zeros_like(self.values) if kind == "adamw" else self.values.new_zeros(0)
        self.count = self.values.new_zeros(1)
        self.lr = torch.zeros(2, device=device)
        self.weights: list[Tensor] = []
        self.weight_gradients: list[Tensor] = []
        self.momenta: list[Tensor] = []  # views of the buffers in the shape of each parameter
        self.matrices: list[Tensor] = []  # weights as (out, rest), with the columns in memory order
        self.matrix_updates: list[Tensor] = []
        start = 0
        for p, size in zip(parameters, sizes, strict=True):
            value, gradient = (_shaped(flat[start : start + size], p) for flat in (self.values, self.gradient))
            with torch.no_grad():
                value.copy_(p)
            p.data, p.grad = value, gradient
            self.momenta.append(_shaped(self.momentum_buffer[start : start + size], p))
            if p.ndim > 1:
                self.weights.append(value)
                self.weight_gradients.append(gradient)
                for matrices, flat in ((self.matrices, self.values), (self.matrix_updates, self.gradient)):
                    matrices.append(flat[start : start + size].view(p.shape[0], -1))
            start += size
        if kind == "adamw":
            pieces = zip(self.square_buffer.split(sizes), parameters, strict=True)
            self.momenta += [*(_shaped(piece, p) for piece, p in pieces), self.count]
        self.lengths = torch.stack(start_lengths(self.matrices)) if self.matrices else torch.zeros(0, device=device)

    def zero_grad(self) -> None:
        """Set the gradient to zero, before the backward pass."""
        self.gradient.zero_()

    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint: v with every parameter contiguous, because layouts differ between CPU and GPU."""
        momentum = {"momentum": torch.cat([v.reshape(-1) for v in self.momenta])}
        return momentum | ({"lengths": self.lengths} if self.kind == "muon" else {})

    def load(self, saved: dict[str, Tensor], channels_last: bool = False) -> None:
        """Continue from `state()`. `channels_last`: filters of v are in that order, as version 0.1 saved them."""
        for v, part in zip(self.momenta, saved["momentum"].split([v.numel() for v in self.momenta]), strict=True):
            if channels_last and v.ndim == 4:
                n, c, high, wide = v.shape
                v.copy_(part.view(n, high, wide, c).permute(0, 3, 1, 2))
            else:
                v.copy_(part.view(v.shape))
        if self.kind == "muon":
            self.lengths.copy_(saved["lengths"])

    @torch.no_grad()
    def step(self) -> Tensor:
        """Clip and update without waiting for the device; returns the norm of the gradient before clipping."""
        norm = self.gradient.norm()
        if self.clip:
            self.gradient.mul_((self.clip / (norm + 1e-6)).clamp_max(1.0))
        if self.kind == "adamw":
            self._step_adamw()
            return norm
        if self.kind == "muon":
            self._step_of_muon(norm)
            return norm
        g, w = self.gradient[: self.split], self.values[: self.split]
        if self.weight_decay:
            if self.kind == "sgd":
                self.gradient.add_(self.values, alpha=self.weight_decay)
            else:
                g.add_(w, alpha=self.weight_decay)
        if self.kind == "lars" and self.weights:
            lengths = torch.stack(torch._foreach_norm(self.weights))
            steps = torch.stack(torch._foreach_norm(self.weight_gradients))
            both = (lengths > 0) & (steps > 0)
            ratio = torch.where(both, TRUST * lengths / steps, 1.0)
            torch._foreach_mul_(self.weight_gradients, list(ratio.unbind()))
        v = self.momentum_buffer
        v.mul_(self.momentum).add_(self.gradient)
        w.addcmul_(v[: self.split], self.lr[0], value=-1)
        self.values[self.split :].addcmul_(v[self.split :], self.lr[1], value=-1)
        return norm

    def _step_adamw(self) -> None:
        g, v, s, w = self.gradient, self.momentum_buffer, self.square_buffer, self.values
        self.count.add_(1)
        v.lerp_(g, 1 - self.momentum)
        s.mul_(BETA).addcmul_(g, g, value=1 - BETA)
        t = self.count.double()  # 1 − 0.999 has few digits in float32
        started_v, started_s = ((1 - beta**t).float() for beta in (self.momentum, BETA))
        step = (v / started_v) / ((s / started_s).sqrt_() + EPSILON)
        if self.weight_decay:
            w[: self.split].mul_(1 - self.lr[0] * self.weight_decay)
        w[: self.split].addcmul_(step[: self.split], self.lr[0], value=-1)
        w[self.split :].addcmul_(step[self.split :], self.lr[1], value=-1)

    def _step_of_muon(self, norm: Tensor) -> None:
        usable = norm < LONGEST  # false for NaN
        lr = torch.where(usable, self.lr, 0.0)
        g, v = self.gradient.masked_fill_(~usable, 0.0), self.momentum_buffer
        torch.addcmul(g, v, torch.where(usable, self.momentum, 1.0), out=v)  # in one pass over memory
        if self.weight_decay:
            self.values[: self.split].mul_(1 - self.weight_decay * lr[0])
        self.values[self.split :].addcmul_(v[self.split :], lr[1], value=-1)
        g[: self.split].add_(v[: self.split], alpha=self.momentum)
        descend(self.matrices, self.matrix_updates, lr[0], self.scaling, self.lengths.unbind())


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """View a piece of the vector in the shape of a parameter and, if that is dense, in its memory order."""
    dense = like.is_contiguous() or (like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last))
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset()) if dense else flat.view(like.shape)
