"""Training objectives: from two views to the loss, the embeddings and the representations."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from itertools import combinations
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from stairwise.checks import InputError, number, one_of
from stairwise.losses import MODULES, VICReg, byol, precondition
from stairwise.nets.encoder import Network
from stairwise.nets.perceptron import head
from stairwise.training.graph import on_two_streams

TRIAL = (torch.eye(4)[:, :3], torch.eye(4)[:, :3])  # two views, for testing options
UNCAPTURABLE = ("sharpened", "smoothed", "fourth_power", "hinged")  # they decompose matrices on the CPU
AVERAGES = ("running_mean", "running_var")
STATELESS = ("torch", "torchvision", "timm", "stairwise")  # packages whose modules keep all state in buffers
Both = Callable[[Callable[[], Any], Callable[[], Any]], Any]


class Embedded(NamedTuple):
    """Loss, embeddings and representations of two views."""

    loss: Tensor
    z_a: Tensor
    z_b: Tensor
    h_a: Tensor
    h_b: Tensor


class AbstractObjective(nn.Module, ABC):
    """A network and its loss. All its parameters are trained, and all its state is checkpointed."""

    network: Network
    compiled: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None  # the network's pass in training

    @abstractmethod
    def forward(self, x_a: Tensor, x_b: Tensor) -> Embedded: ...

    def compile_network(self) -> None:
        """Fuse the operations of the network in training by `torch.compile`; probes use the network as it is."""
        if next(self.network.parameters()).is_cuda and find_spec("triton") is None:
            raise InputError("compile", "needs triton on a GPU", "triton is not installed", "set compile=false")
        self.compiled = torch.compile(self.network.forward, dynamic=False)  # anew for every size of views

    def after_step(self) -> None:
        """Called after each step of the optimizer."""

    def embed(self, x_a: Tensor, x_b: Tensor, together: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """h_a, z_a, h_b, z_b; if `together`, both views pass through the network as one batch."""
        through = self.compiled or self.network
        if together:
            h, z = through(torch.cat([x_a, x_b]))
            (h_a, h_b), (z_a, z_b) = h.chunk(2), z.chunk(2)
        elif (
            self.compiled is None
            and x_a.is_cuda
            and torch.cuda.is_current_stream_capturing()
            and can_pass_at_once(self.network)
        ):
            (h_a, z_a), (h_b, z_b) = two_passes(self.network, x_a, x_b, on_two_streams)
        else:
            (h_a, z_a), (h_b, z_b) = through(x_a), through(x_b)
        return h_a, z_a, h_b, z_b


def two_passes(network: nn.Module, x_a: Tensor, x_b: Tensor, both: Both) -> Any:
    """Compute network(x_a) and network(x_b) by both(first, second), which may run them in parallel.

    The result is the same as after two successive passes, if `can_pass_at_once`: the second pass gets copies of the
    running averages r₀ of batch norms, and r = (1 − m)ᵏ (r_a − r₀) + r_b combines the updates of a norm that is used k
    times per pass.
    """
    norms: list[Any] = [m for m in network.modules() if _keeps_averages(m)]
    if not norms:
        return both(lambda: network(x_a), lambda: network(x_b))
    original = [dict(m._buffers) for m in norms]
    averages = [
        m._buffers[name].data for m in norms for name in AVERAGES
    ]  # .data, because autograd may have saved them
    before, copies = torch._foreach_add(averages, 0.0), torch._foreach_add(averages, 0.0)
    used = Counter[nn.Module]()

    def second() -> Any:
        for i, m in enumerate(norms):
            m._buffers.update(zip(AVERAGES, copies[2 * i : 2 * i + 2], strict=True))
        return network(x_b)

    hooks = [m.register_forward_pre_hook(lambda m, _: used.update([m])) for m in norms]
    try:
        for m in norms:
            m._buffers["num_batches_tracked"] = None  # would launch many small kernels; counted below instead
        out = both(lambda: network(x_a), second)
    finally:
        for hook in hooks:
            hook.remove()
        for m, buffers in zip(norms, original, strict=True):
            m._buffers.update(buffers)
    torch._foreach_sub_(averages, before)
    torch._foreach_mul_(averages, [(1 - m.momentum) ** (used[m] // 2) for m in norms for _ in AVERAGES])
    torch._foreach_add_(averages, copies)
    torch._foreach_add_([m.num_batches_tracked for m in norms], [used[m] for m in norms])
    return out


def can_pass_at_once(network: nn.Module) -> bool:
    """Whether two parallel passes are safe, that is, cannot overwrite each other's state.

    A pass may write to modules of unknown packages and to parameters that are not trained, so these count as unsafe.
    """
    return all(p.requires_grad for p in network.parameters()) and all(
        type(m).__module__.partition(".")[0] in STATELESS and (_keeps_averages(m) or not _has_buffers(m))
        for m in network.modules()
    )


def _keeps_averages(module: nn.Module) -> bool:
    """Whether this is a plain batch norm that updates exponential running averages."""
    plain = type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and module.training
    return plain and module.momentum is not None and None not in module._buffers.values()


def _has_buffers(module: nn.Module) -> bool:
    return module.training and any(value is not None for value in module._buffers.values())


class _Joint(AbstractObjective):
    """loss(z_a, z_b), with a preconditioned gradient if `stretch` (arguments of `precondition`) is not empty.

    If the batch repeats its images, the loss is the mean over all pairs of different views of them.
    """

    def __init__(
        self, network: Network, loss: nn.Module, stretch: dict[str, Any], together: bool = False, repeats: int = 1
    ) -> None:
        super().__init__()
        self.network, self.loss, self.stretch = network, loss, stretch
        self.together, self.repeats = together, repeats

    def forward(self, x_a: Tensor, x_b: Tensor) -> Embedded:
        h_a, z_a, h_b, z_b = self.embed(x_a, x_b, self.together)
        return Embedded(self.loss_of(z_a, z_b), z_a, z_b, h_a, h_b)

    def loss_of(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        first, second = precondition(z_a, z_b, **self.stretch) if self.stretch else (z_a, z_b)
        if self.repeats == 1:
            return cast(Tensor, self.loss(first, second))
        views = [*first.chunk(self.repeats), *second.chunk(self.repeats)]
        if isinstance(self.loss, VICReg):  # at once, which is faster
            return self.loss.mean_over_pairs(views)
        return torch.stack([self.loss(*pair) for pair in combinations(views, 2)]).mean()


class Bootstrap(AbstractObjective):
    """BYOL: predict the embedding of the other view by a slowly moving copy of the network."""

    def __init__(self, network: Network, d: int, width: int = 512, decay: float = 0.99, together: bool = False) -> None:
        super().__init__()
        if number(decay, "decay", least=0) >= 1:
            raise InputError("decay", "must be below 1", decay)
        self.network, self.decay, self.together = network, decay, together
        self.predictor = head(d, [width], d, norm=True, bias=True)
        self.target = deepcopy(network).requires_grad_(False)

    def forward(self, x_a: Tensor, x_b: Tensor) -> Embedded:
        h_a, z_a, h_b, z_b = self.embed(x_a, x_b, self.together)
        with torch.no_grad():
            (_, t_a), (_, t_b) = self.target(x_a), self.target(x_b)
        loss = byol(self.predicted(z_a), t_b) + byol(self.predicted(z_b), t_a)
        return Embedded(loss, z_a, z_b, h_a, h_b)

    def predicted(self, z: Tensor) -> Tensor:
        """The predictor's output, in float32 like the head's."""
        with torch.autocast(z.device.type, enabled=False):
            return cast(Tensor, self.predictor(z.float()))

    @torch.no_grad()
    def after_step(self) -> None:
        pairs = zip(self.target.parameters(), self.network.parameters(), strict=True)
        slow, fast = zip(*pairs, strict=True)
        torch._foreach_lerp_(list(slow), list(fast), 1 - self.decay)


def build_objective(
    network: Network,
    d: int,
    loss: str,
    options: dict[str, Any],
    stretch: dict[str, Any],
    together: bool = False,
    repeats: int = 1,
) -> AbstractObjective:
    """Make the objective of a loss by its name in recipes; `repeats`: how often a batch holds each of its images."""
    check_options(loss, options, stretch)
    if loss != "byol":
        return _Joint(network, MODULES[loss](**options), stretch, together, repeats)
    if repeats > 1:
        raise InputError("views_per_image", "must be 2 for BYOL", 2 * repeats)
    try:
        return Bootstrap(network, d, together=together, **options)
    except (TypeError, RuntimeError) as error:
        raise InputError("loss_options", "must be arguments of Bootstrap", options, str(error)) from error


def check_options(loss: str, options: dict[str, Any], stretch: dict[str, Any]) -> None:
    """Refuse arguments that a loss, or `precondition`, does not take; those of BYOL are checked with its network."""
    module = MODULES[one_of(loss, "loss", MODULES)]
    if loss == "byol":
        if stretch:
            raise InputError("precondition", "does not apply to BYOL", stretch, "leave it out")
        return
    try:
        module(**options)
    except TypeError as error:
        raise InputError("loss_options", f"must be arguments of {module.__name__}", options, str(error)) from error
    try:
        precondition(*TRIAL, **stretch)
    except TypeError as error:
        raise InputError("precondition", "must be arguments of sw.precondition", stretch, str(error)) from error


def capturable(loss: str) -> bool:
    """Whether a step with this loss can be recorded as a CUDA graph."""
    return loss not in UNCAPTURABLE
