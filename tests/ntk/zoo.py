"""Architectures, and their tangent kernels by plain autograd, which the tests compare with."""

import torch
from torch import nn

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


class Net(nn.Module):
    """Modules and parameters by name, and a function of these and x."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, x):
        return self.function(self, x)


def apply(function):
    return Net(lambda _, x: function(x))


def pool():
    return apply(lambda x: x.flatten(2).mean(dim=2))


def scale(features):
    """A user's own module with parameters of its own, for which there is no rule."""
    return Net(lambda m, x: torch.tanh(x * m.gain) + m.shift, gain=torch.rand(features), shift=torch.rand(1))


def residual():
    block = {"conv": nn.Conv2d(4, 4, 3, padding=1), "norm": nn.BatchNorm2d(4), "relu": nn.ReLU(inplace=True)}
    return Net(lambda m, x: m.relu(m.norm(m.conv(x)).add_(x)), **block)


def twice():
    """Calls a layer twice."""
    layers = {"layer": nn.Linear(6, 6), "out": nn.Linear(6, 3)}
    return Net(lambda m, x: m.out(torch.tanh(m.layer(torch.tanh(m.layer(x))))), **layers)


def tied():
    """An embedding whose table is also the readout, used by a function."""
    layers = {"table": nn.Embedding(11, 5), "mix": nn.Linear(5, 5)}
    return Net(lambda m, x: nn.functional.linear(m.mix(m.table(x)).mean(dim=1), m.table.weight), **layers)


def shared():
    """Two modules with one parameter."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    model[2].weight = model[0].weight
    return model


def attention(batch_first=True):
    def forward(m, x):
        x = m.norm(m.into(x))
        x = x if batch_first else x.transpose(0, 1)
        return m.out(x + m.attention(x, x, x, need_weights=False)[0]).mean(dim=1 if batch_first else 0)

    heads = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    return Net(forward, into=nn.Linear(5, 8), norm=nn.LayerNorm(8), attention=heads, out=nn.Linear(8, 3))


def frozen():
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    model[0].weight.requires_grad_(False)
    return model


def conv(*args, **options):
    return lambda: nn.Sequential(nn.Conv2d(*args, **options), nn.ReLU(), pool(), nn.Linear(args[1], 3))


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
    "conv 1-D": (lambda: nn.Sequential(nn.Conv1d(7, 6, 3, padding=1, stride=2), pool(), nn.Linear(6, 2)), SERIES),
    "conv 1-D circular": (lambda: nn.Sequential(nn.Conv1d(7, 6, 3, 1, 1, padding_mode="circular"), pool()), SERIES),
    "conv 3-D": (lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 3, 2), pool()), IMAGES),
    "conv transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 3, 3, stride=2), pool()), IMAGES),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), pool()), IMAGES),
    "batch norm 1-D": (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh()), VECTORS),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm([7, 5]), nn.Linear(5, 4), nn.LayerNorm(4), nn.Flatten()), SERIES),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 3), pool()), IMAGES),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 3, 3), pool()), IMAGES),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 5), nn.PReLU(5)), VECTORS),
    "sequence": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2), nn.Flatten()), SERIES),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 5, padding_idx=3), nn.Flatten(), nn.Linear(35, 2)), TOKENS),
    "embedding sparse": (lambda: nn.Sequential(nn.Embedding(11, 5, sparse=True), nn.Flatten()), TOKENS),
    "residual": (lambda: nn.Sequential(residual(), residual(), pool()), IMAGES),
    "attention": (attention, SERIES),
    "attention, samples second": (lambda: attention(batch_first=False), SERIES),
    "user's": (lambda: nn.Sequential(nn.Linear(6, 5), scale(5), nn.Linear(5, 2)), VECTORS),
    "called twice": (twice, VECTORS),
    "tied": (tied, TOKENS),
    "shared": (shared, VECTORS),
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
