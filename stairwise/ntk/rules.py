"""Rules: the factors of a module's parameters, from its input and the gradient at its output in one call."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stairwise.ntk.factors import AbstractFactor, Direct, Lookup, Outer


def _linear(module: nn.Module, x: Tensor, b: Tensor) -> Iterator[tuple[str, AbstractFactor]]:
    assert isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)
    if isinstance(module, nn.Linear):
        b = b.reshape(len(b), -1, b.shape[-1]).transpose(1, 2)
    b, groups = b.flatten(2), 1 if isinstance(module, nn.Linear) else module.groups
    yield "weight", Outer(module, ((x, b.view(len(b), groups, -1, b.shape[-1])),))
    if module.bias is not None:
        yield "bias", Direct(b.sum(dim=2))


def _batch_norm(module: nn.Module, x: Tensor, b: Tensor) -> Iterator[tuple[str, AbstractFactor]]:
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    assert module.running_mean is not None
    assert module.running_var is not None
    x, b = (v if v.ndim == 4 else v.reshape(*v.shape[:2], -1, 1) for v in (x, b))  # images keep their layout
    normed = (x - module.running_mean[:, None, None]).mul_(b)
    yield "weight", Direct(normed.sum(dim=(2, 3)) / (module.running_var + module.eps).sqrt())
    yield "bias", Direct(b.sum(dim=(2, 3)))


def _layer_norm(module: nn.Module, x: Tensor, b: Tensor) -> Iterator[tuple[str, AbstractFactor]]:
    assert isinstance(module, nn.LayerNorm)
    normed = F.layer_norm(x, module.normalized_shape, eps=module.eps)
    size = len(module.normalized_shape)
    rest = tuple(range(1, x.ndim - size))
    for name, g in (("weight", b * normed), ("bias", b)):
        yield name, Direct((g.sum(dim=rest) if rest else g).flatten(1))


def _group_norm(module: nn.Module, x: Tensor, b: Tensor) -> Iterator[tuple[str, AbstractFactor]]:
    assert isinstance(module, nn.GroupNorm)
    normed = F.group_norm(x, module.num_groups, eps=module.eps)
    rest = tuple(range(2, x.ndim))
    for name, g in (("weight", b * normed), ("bias", b)):
        yield name, Direct(g.sum(dim=rest) if rest else g)


def _embedding(module: nn.Module, x: Tensor, b: Tensor) -> Iterator[tuple[str, AbstractFactor]]:
    assert isinstance(module, nn.Embedding)
    if module.scale_grad_by_freq or module.max_norm is not None:
        raise ValueError("no rule")
    index = x.reshape(len(x), -1)
    if module.padding_idx is not None:
        index = torch.where(index == module.padding_idx, -1, index)
    yield "weight", Lookup(index, b.reshape(len(b), index.shape[1], -1), module.num_embeddings)


RULES = {
    nn.Linear: _linear,
    nn.Conv1d: _linear,
    nn.Conv2d: _linear,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.Embedding: _embedding,
}


def factors(module: nn.Module, x: Tensor, b: Tensor) -> dict[str, AbstractFactor]:
    """Factors of a module's own trainable parameters, from its input x and the gradient b at its output."""
    own = {name for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    return {name: factor for name, factor in RULES[type(module)](module, x, b) if name in own}
