"""An ordinary training loop that logs to wandb; one added line sends it how the network learns its dimensions.

    python examples/with_wandb.py [--steps 600] [--out run]

In wandb, panels under stairwise/ show eigenvalues, ranks, the number of dimensions learned and the state of the run.
This script writes offline: `wandb sync run/wandb/offline-run-…` uploads it. Needs `pip install wandb`.
"""

import argparse
from pathlib import Path

import torch
import wandb
from sklearn.datasets import load_digits
from torch import nn

import stairwise as sw


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", default="run")
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    criterion = sw.losses.VICReg()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.5)
    run = wandb.init(project="digits", dir=options.out, mode="offline")

    log = [run, options.out]  # the folder holds the records for `stairwise report`
    watch = sw.SpectrumMonitor().attach(loss=criterion, optimizer=optimizer, log=log, every=5)  # added

    for _ in range(options.steps):
        x = images[torch.randint(len(images), (256,))]
        loss = criterion(*(model(x + 0.3 * torch.randn_like(x)) for _ in "ab"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss.item()})
    watch.close()
    run.finish()
    print(f"now: stairwise report {options.out}")


if __name__ == "__main__":
    main()
