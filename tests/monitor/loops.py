"""A model with spies on its embeddings, and a check that the monitor leaves its training alone."""

import numpy as np
import pytest
import torch
from torch import nn

import stairwise as sw


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(10, 12), nn.ReLU())
        self.projector = nn.Linear(12, 4)
        self.predictor = nn.Linear(4, 4)
        self.criterion = sw.losses.VICReg()

    def forward(self, x):
        return self.projector(self.backbone(x))


def batches(number=8, views=2, rows=32):
    """Views of the same samples, (number, views, rows, 10)."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(number, 1, rows, 10, generator=draw)
    return x + 0.1 * torch.randn(number, views, rows, 10, generator=draw)


def watched(loop, hook, make=Model, optimizer=None, full=list, **options):
    """Run `loop(model, optimizer, spy)` without and with a monitor: weights must be equal to the last bit.

    hook: function of the model that returns what to hook. `loop` adds (z_a, z_b) and (h, …) of what should be recorded
    to `spy`. full: gathers weights that are sharded. Returns the attachment and the spy.
    """
    ends = []
    for watching in (False, True):
        model, spy = make(), Spy()
        optimizer_of = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05))
        stepped = optimizer_of(model.parameters())
        torch.manual_seed(2)
        if watching:
            watch = sw.SpectrumMonitor().attach(**hook(model), optimizer=stepped, **({"every": 100} | options))
        loop(model, stepped, spy)
        ends.append(full([p.detach().clone() for p in model.parameters()]))
    watch.close()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    return watch, spy


class Spy:
    """What should be recorded."""

    def __init__(self):
        self.pairs, self.hidden = [], []

    def see(self, z_a, z_b, *h):
        self.pairs.append([z.detach().double() for z in (z_a, z_b)])
        self.hidden += [one.detach().double() for one in h]

    def check(self, record):
        """Eigenvalues of C and of h's covariance agree with a record."""
        a, b = (torch.cat(z).numpy() for z in zip(*self.pairs, strict=True))
        assert record.samples == len(a)
        assert record.eigenvalues == approx(np.linalg.eigvalsh((a.T @ b + b.T @ a) / (2 * len(a)))[::-1])
        if self.hidden:
            assert record.hidden == approx(np.linalg.eigvalsh(np.cov(torch.cat(self.hidden).numpy().T))[::-1])
        else:
            assert record.hidden is None


def approx(values):
    return pytest.approx(values, rel=1e-6, abs=1e-9)
