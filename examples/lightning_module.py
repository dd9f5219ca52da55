"""An ordinary LightningModule; one added line records how it learns its dimensions.

    python examples/lightning_module.py [--steps 1500] [--out run]
    stairwise report run

A small network learns scikit-learn's digits with Barlow Twins. Needs `pip install lightning`.
"""

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn

from stairwise.losses import BarlowTwins
from stairwise.monitor.lightning import SpectrumCallback


class Views(torch.utils.data.Dataset):
    """Two noisy copies of each digit, shifted by at most one pixel."""

    def __init__(self):
        self.images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.view(self.images[i]), self.view(self.images[i])

    def view(self, x):
        dx, dy = torch.randint(-1, 2, (2,)).tolist()
        return x.roll((dx, dy), dims=(1, 2)) + 0.1 * torch.randn_like(x)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU())
        self.projector = nn.Linear(256, 8)
        self.criterion = BarlowTwins(lambda_=1.0, batch_norm=False)
        with torch.no_grad():
            self.projector.weight.mul_(0.01)  # small initialization makes the steps visible

    def training_step(self, batch):
        z_a, z_b = (self.projector(self.backbone(x)) for x in batch)
        loss = self.criterion(z_a, z_b)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.003, momentum=0.5)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", default="run")
    options = parser.parse_args()
    L.seed_everything(0, verbose=False)
    loader = torch.utils.data.DataLoader(Views(), batch_size=256, shuffle=True, drop_last=True)
    trainer = L.Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SpectrumCallback(loss="criterion", backbone="backbone", every=5, folder=options.out)],  # added
    )
    trainer.fit(Model(), loader)
    print(f"now: stairwise report {options.out}")


if __name__ == "__main__":
    main()
