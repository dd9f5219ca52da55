"""A training with Hugging Face's Trainer; one added line records how it learns its dimensions.

    python examples/with_hugging_face.py [--steps 600] [--out run]
    stairwise report run

The model takes two views and returns its loss. The callback finds `criterion`, `projector` and `backbone` by itself.
Needs `pip install transformers accelerate`.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import Trainer, TrainingArguments

from stairwise.losses import VICReg
from stairwise.monitor.huggingface import SpectrumTrainerCallback


class Views(torch.utils.data.Dataset):
    """Two noisy copies of each of scikit-learn's digits."""

    def __init__(self):
        self.images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return {name: self.images[i] + 0.3 * torch.randn(1, 8, 8) for name in ("view_a", "view_b")}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU())
        self.projector = nn.Linear(256, 8)
        self.criterion = VICReg()
        with torch.no_grad():
            self.projector.weight.mul_(0.01)  # small initialization makes the steps visible

    def forward(self, view_a, view_b):
        z_a, z_b = (self.projector(self.backbone(x)) for x in (view_a, view_b))
        return {"loss": self.criterion(z_a, z_b)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", default="run")
    options = parser.parse_args()
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=256,
        dataloader_drop_last=True,
        optim="sgd",
        learning_rate=0.003,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    callbacks = [SpectrumTrainerCallback(every=5)]  # added
    Trainer(Model(), arguments, train_dataset=Views(), callbacks=callbacks).train()
    print(f"now: stairwise report {options.out}")


if __name__ == "__main__":
    main()
