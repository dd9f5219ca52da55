"""Build encoders by name or import path, and the trained network: an encoder followed by a head."""

import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stairwise.checks import InputError, one_of
from stairwise.nets.perceptron import MLP, head
from stairwise.nets.resnet import resnet18, resnet34, resnet50

ENCODERS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "mlp": MLP,
}


class Network(nn.Module):
    """x → (h, z): the representation of the encoder and its embedding by the head.

    Attributes:
        backbone: images → h, (N, features).
        projector: h → z, (N, d).
    """

    def __init__(self, backbone: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.backbone, self.projector = backbone, projector

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.backbone(x)
        with torch.autocast(x.device.type, enabled=False):  # bf16 rounding would hide small eigenvalues of z
            h = h.float() if h.dtype in (torch.bfloat16, torch.float16) else h
            return h, self.projector(h)


def build_encoder(name: str, arguments: dict[str, Any] | None = None) -> nn.Module:
    """Build an encoder by name, or any module by import path `package.module:factory`, with the factory's arguments.

    >>> build_encoder("torch.nn:Flatten", {"start_dim": 1})
    Flatten(start_dim=1, end_dim=-1)
    """
    factory = _imported(name) if ":" in name else ENCODERS[one_of(name, "encoder", [*ENCODERS, "package.module:name"])]
    given = arguments or {}
    known = _parameters(factory)
    for key in given if known else ():
        one_of(key, "encoder argument", known)
    try:
        module = factory(**given)
    except TypeError as error:
        raise InputError(
            f"encoder {name}", "must accept its arguments", error, "set encoder_options.NAME=VALUE"
        ) from error
    except (Exception, SystemExit) as error:  # code of the user
        raise InputError(f"encoder {name}", "must not fail", _named(error), "call the factory by hand") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"encoder {name}", "must return a torch module", type(module).__name__)
    return module


def build_network(
    encoder: nn.Module, sample: Tensor, hidden: Sequence[int], d: int, norm: bool = True, bias: bool = False
) -> Network:
    """Add a head to an encoder. Its features are counted by calling it with `sample`, (N, channels, height, width)."""
    was_training = encoder.training
    encoder.eval()
    try:
        with torch.no_grad():
            h = encoder(sample)
    except Exception as error:  # code of the user
        shape = tuple(sample.shape[1:])
        remedy = (
            f"{(str(error) or type(error).__name__).splitlines()[0]}; set encoder_options (channels, inputs, …) or size"
        )
        raise InputError("the encoder", f"must accept views of shape {shape}", None, remedy) from error
    encoder.train(was_training)
    if not isinstance(h, Tensor) or h.ndim != 2:
        given = f"shape {tuple(h.shape)}" if isinstance(h, Tensor) else type(h).__name__
        raise InputError("the encoder's output", "must be 2-D, (samples, features)", given, "pool or flatten it")
    return Network(encoder, head(h.shape[1], hidden, d, norm, bias))


def _parameters(factory: Callable[..., Any]) -> list[str]:
    """Names of the factory's arguments; empty if it accepts any or has no signature."""
    try:
        known = inspect.signature(factory).parameters
    except ValueError:  # some built-in callables have no signature
        return []
    return [] if any(p.kind is p.VAR_KEYWORD for p in known.values()) else list(known)


def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise InputError(
            "encoder", "must be package.module:factory", repr(path), "for example torchvision.models:vgg11"
        )
    here = str(Path.cwd())
    if here not in sys.path:  # like python -m: find modules of the user's project
        sys.path.append(here)
    try:
        imported = import_module(module)
    except ImportError as error:
        raise InputError("encoder", "must name an importable module", repr(path), str(error)) from error
    except (Exception, SystemExit) as error:  # code of the user
        raise InputError(f"module {module}", "must not fail when it is imported", _named(error)) from error
    if not callable(getattr(imported, name, None)):
        raise InputError("encoder", f"must name something callable in {module}", repr(name))
    factory: Callable[..., Any] = getattr(imported, name)
    return factory


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
