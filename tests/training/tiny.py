"""Recipes that train on a CPU within seconds; tests change what they are about."""

from stairwise.training.recipe import Recipe

TINY = Recipe(
    data="photos",
    pretrain=80,
    views="simclr-small",
    size=16,
    encoder="resnet18",
    encoder_options={"stem": "small", "width": 4},
    hidden=[16],
    d=6,
    batch=16,
    steps=8,
    lr=0.02,
    records=4,
    precision="float32",
)
DIGITS = Recipe(
    data="digits",
    views="simclr-small",
    encoder="mlp",
    encoder_options={"inputs": 64, "widths": [16]},
    hidden=[16],
    d=4,
    batch=64,
    steps=12,
    lr=0.05,
    window=128,
    records=5,
    precision="float32",
)
