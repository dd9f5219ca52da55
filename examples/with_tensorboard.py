"""An ordinary training loop that logs to TensorBoard; one added line sends it how the network learns its dimensions.

    python examples/with_tensorboard.py [--steps 600] [--out run]
    tensorboard --logdir run

Scalars under stairwise/ are eigenvalues, ranks and the number of dimensions learned; Text holds the state of the run.
Needs `pip install tensorboard`.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import stairwise as sw


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", default="run")
    options = parser.parse_args()
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    criterion = sw.losses.VICReg()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.5)
    writer = SummaryWriter(options.out)

    log = [writer, options.out]  # the folder also holds the records for `stairwise report`
    watch = sw.SpectrumMonitor().attach(loss=criterion, optimizer=optimizer, log=log, every=5)  # added

    for step in range(options.steps):
        x = images[torch.randint(len(images), (256,))]
        loss = criterion(*(model(x + 0.3 * torch.randn_like(x)) for _ in "ab"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.add_scalar("loss", loss.item(), step)
    watch.close()
    writer.close()
    print(f"now: stairwise report {options.out}")


if __name__ == "__main__":
    main()
