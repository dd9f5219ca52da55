"""A training with lightly; one added line records how it learns its dimensions.

    python examples/with_lightly.py [--steps 300] [--out run]
    stairwise report run

Loss, heads and views are lightly's; the module is written as in its examples. The callback finds `criterion`,
`projection_head` and `backbone` by itself. Needs `pip install lightly`.
"""

import argparse

import pytorch_lightning as pl
import torch
from lightly.loss import VICRegLoss
from lightly.models.modules.heads import VICRegProjectionHead
from lightly.transforms.multi_view_transform import MultiViewTransform
from sklearn.datasets import load_digits
from torch import nn
from torchvision.transforms import v2

from stairwise.monitor.lightning import SpectrumCallback


class Digits(torch.utils.data.Dataset):
    """Two views of each of scikit-learn's digits, 8 × 8."""

    def __init__(self):
        self.images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
        view = v2.Compose([v2.RandomCrop(8, padding=1), v2.GaussianNoise(sigma=0.1, clip=False)])
        self.transform = MultiViewTransform([view, view])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(self.images[i])


class VICReg(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU())
        self.projection_head = VICRegProjectionHead(256, 64, 8, num_layers=2)
        self.criterion = VICRegLoss()

    def forward(self, x):
        return self.projection_head(self.backbone(x))

    def training_step(self, batch):
        x0, x1 = batch
        return self.criterion(self(x0), self(x1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.003, momentum=0.5)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="run")
    options = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    loader = torch.utils.data.DataLoader(Digits(), batch_size=256, shuffle=True, drop_last=True)
    trainer = pl.Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SpectrumCallback(every=5, folder=options.out)],  # added
    )
    trainer.fit(VICReg(), loader)
    print(f"now: stairwise report {options.out}")


if __name__ == "__main__":
    main()
