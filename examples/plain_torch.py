"""An ordinary training loop in plain torch; one added line records how the network learns its dimensions.

    python examples/plain_torch.py [--steps 1500] [--out run]
    stairwise report run

A small network learns scikit-learn's digits with its own VICReg loss.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import stairwise as sw


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU())
        self.projector = nn.Linear(256, 8)

    def forward(self, x):
        return self.projector(self.backbone(x))


class Loss(nn.Module):
    """Invariance, variance, covariance."""

    def forward(self, z_a, z_b):
        loss = 25 * (z_a - z_b).square().mean()
        for z in (z_a, z_b):
            C = torch.cov(z.T)
            loss = loss + 12.5 * torch.relu(1 - (C.diagonal() + 1e-4).sqrt()).mean()
            loss = loss + (C - torch.diag(C.diagonal())).square().sum() / z.shape[1]
        return loss


def shifted(x):
    """Shift randomly by at most one pixel and add noise."""
    dx, dy = torch.randint(-1, 2, (2,)).tolist()
    return x.roll((dx, dy), dims=(2, 3)) + 0.1 * torch.randn_like(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", default="run")
    options = parser.parse_args()
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    model, criterion = Encoder(), Loss()
    with torch.no_grad():
        model.projector.weight.mul_(0.01)  # small initialization makes the steps visible
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.5)

    watch = sw.SpectrumMonitor().attach(loss=criterion, optimizer=optimizer, log=options.out, every=5)  # added

    for _ in range(options.steps):
        x = images[torch.randint(len(images), (256,))]
        loss = criterion(model(shifted(x)), model(shifted(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    watch.close()
    print(f"loss {loss.item():.3f}; now: stairwise report {options.out}")


if __name__ == "__main__":
    main()
