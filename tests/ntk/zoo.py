"""Architectures, and their tangent kernels by plain autograd, which the tests compare with."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from stairwise.nets.encoder import build_encoder


def mean(outputs):
    return outputs.sum(dim=1) / outputs.shape[1] ** 0.5


def gradients(model, x, scalar=mean):
    """One backward pass per sample."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(x)):
        each = torch.autograd.grad(scalar(model(x[i : i + 1]))[0], parameters, allow_unused=True)
        dense = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(parameters, each, strict=True)]
        rows.append(torch.cat([g.flatten() for g in dense]))
    return torch.stack(rows)


def by_autograd(model, x, scalar=mean):
    G = gradients(model, x, scalar)
    return G @ G.T


def by_vmap(model, x):
    chosen = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def one(parameters, sample):
        return mean(functional_call(model, parameters, (sample.unsqueeze(0),)))[0]

    G = torch.cat([g.flatten(1) for g in vmap(grad(one), in_dims=(None, 0))(chosen, x).values()], dim=1)
    return G @ G.T


class Pool(nn.Module):
    def forward(self, x):
        return x.flatten(2).mean(dim=2)


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Scale(nn.Module):
    """A user's own module with parameters of its own, for which there is no rule."""

    def __init__(self, features):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.rand(features)), nn.Parameter(torch.rand(1))

    def forward(self, x):
        return torch.tanh(x * self.gain) + self.shift


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.norm(self.conv(x))
        out += x
        return self.relu(out)


class Twice(nn.Module):
    """Calls a layer twice."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Tied(nn.Module):
    """An embedding whose table is also the readout, used by a function."""

    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(11, 5), nn.Linear(5, 5)

    def forward(self, x):
        return nn.functional.linear(self.mix(self.table(x)).mean(dim=1), self.table.weight)


class Shared(nn.Module):
    """Two modules with one parameter."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(torch.relu(self.b(torch.relu(self.a(x)))))


class Attention(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.batch_first = batch_first
        self.into, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.into(x))
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.out(x + self.attention(x, x, x, need_weights=False)[0])
        return x.mean(dim=1 if self.batch_first else 0)


def frozen():
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    model[0].weight.requires_grad_(False)
    return model


def conv(*args, **options):
    return lambda: nn.Sequential(nn.Conv2d(*args, **options), nn.ReLU(), Pool(), nn.Linear(args[1], 3))


IMAGES, VECTORS, TOKENS, SERIES = (4, 8, 8), (6,), "tokens", (7, 5)
ZOO = {
    "linear": (lambda: nn.Linear(6, 3), VECTORS),
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3, bias=False)), VECTORS),
    "conv": (conv(4, 6, 3), IMAGES),
    "conv padded": (conv(4, 6, 3, padding=1), IMAGES),
    "conv same": (conv(4, 6, 3, padding="same", dilation=2), IMAGES),
    "conv reflecting": (conv(4, 6, 3, padding=2, padding_mode="reflect"), IMAGES),
    "conv circular": (conv(4, 6, 3, padding=(1, 2), padding_mode="circular"), IMAGES),
    "conv strided": (conv(4, 6, 3, stride=2, bias=False), IMAGES),
    "conv oblong": (conv(4, 6, (3, 2), stride=(2, 1), padding=(1, 0)), IMAGES),
    "conv dilated": (conv(4, 6, 3, dilation=2, padding=2), IMAGES),
    "conv grouped": (conv(4, 6, 3, groups=2), IMAGES),
    "conv depthwise": (conv(4, 8, 3, groups=4, padding=1), IMAGES),
    "conv 1 x 1": (conv(4, 6, 1), IMAGES),
    "conv 1 x 1 strided": (conv(4, 6, 1, stride=2), IMAGES),
    "conv whole": (conv(4, 6, 8), IMAGES),
    "conv 1-D": (lambda: nn.Sequential(nn.Conv1d(7, 6, 3, padding=1, stride=2), Pool(), nn.Linear(6, 2)), SERIES),
    "conv 1-D circular": (lambda: nn.Sequential(nn.Conv1d(7, 6, 3, 1, 1, padding_mode="circular"), Pool()), SERIES),
    "conv 3-D": (lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 3, 2), Pool()), IMAGES),
    "conv transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 3, 3, stride=2), Pool()), IMAGES),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), Pool()), IMAGES),
    "batch norm 1-D": (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh()), VECTORS),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm([7, 5]), nn.Linear(5, 4), nn.LayerNorm(4), nn.Flatten()), SERIES),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 3), Pool()), IMAGES),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 3, 3), Pool()), IMAGES),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 5), nn.PReLU(5)), VECTORS),
    "sequence": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2), nn.Flatten()), SERIES),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 5, padding_idx=3), nn.Flatten(), nn.Linear(35, 2)), TOKENS),
    "embedding sparse": (lambda: nn.Sequential(nn.Embedding(11, 5, sparse=True), nn.Flatten()), TOKENS),
    "residual": (lambda: nn.Sequential(Residual(), Residual(), Pool()), IMAGES),
    "attention": (Attention, SERIES),
    "attention, samples second": (lambda: Attention(batch_first=False), SERIES),
    "user's": (lambda: nn.Sequential(nn.Linear(6, 5), Scale(5), nn.Linear(5, 2)), VECTORS),
    "called twice": (Twice, VECTORS),
    "tied": (Tied, TOKENS),
    "shared": (Shared, VECTORS),
    "frozen": (frozen, VECTORS),
    "resnet": (lambda: build_encoder("resnet18", {"stem": "small", "width": 4}), (3, 8, 8)),
    "resnet50": (lambda: build_encoder("resnet50", {"width": 2}), (3, 32, 32)),
}


def build(name, n=7):
    """A model of the zoo in double precision, and n samples."""
    torch.manual_seed(1)
    make, shape = ZOO[name]
    model = make().double()
    with torch.no_grad():
        for module in model.modules():  # statistics and scales of a trained network
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                if module.affine:
                    module.weight.uniform_(0.5, 2)
    x = torch.randint(11, (n, 7)) if shape == TOKENS else torch.randn(n, *shape, dtype=torch.float64)
    return model.eval(), x
