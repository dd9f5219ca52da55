"""How fast do weights grow under Muon, and so how fast does the angle of its updates fall?

    python -m benchmarks.bench_muon_angle [--data photos] [--width 8] [--steps 600] [--decay 0 2]

Updates have the length lr ‖w₀‖. If their directions are noise, ‖w‖² = ‖w₀‖² (1 + c Σ lr²), where momentum m makes
successive updates alike: c = 1 / [(1 − m)² ((1 + m)² + m⁴/(1 − m²))] for a gradient of noise that is averaged but not
orthogonalized. First table: c of matrices whose gradient is noise. Second table: a ResNet-18 with VICReg and a constant
learning rate, its length (median over layers) against the law with this c, where weight decay δ is in
d‖w‖²/dt = c lr² ‖w₀‖² − 2 lr δ ‖w‖²; it must be weak enough for weights to decay more slowly than momentum forgets.
CPU, one seed. The last line is JSON.
"""

import argparse
import json
from pathlib import Path

import torch

import stairwise as sw
from stairwise.training.loop import Trainer
from stairwise.training.recipe import Recipe

SHAPES, MOMENTA = ((64, 576), (128, 512), (64, 64)), (0.0, 0.9, 0.95)
LR, SETTLED = 0.01, 200  # updates after which momentum no longer knows that it began with zero


def law(momentum: float) -> float:
    """c of averaged noise.

    >>> [round(law(m), 2) for m in MOMENTA]
    [1.0, 14.16, 32.9]
    """
    return 1 / ((1 - momentum) ** 2 * ((1 + momentum) ** 2 + momentum**4 / (1 - momentum**2)))


def noise(shape: tuple[int, int], momentum: float, steps: int) -> float:
    """c of a matrix whose gradient is noise."""
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(shape))
    optimizer, start = sw.Muon([w], lr=LR, momentum=momentum), w.detach().norm() ** 2
    lengths = []
    for _ in range(steps + SETTLED):
        w.grad = torch.randn(shape)
        optimizer.step()
        lengths.append(float(w.detach().norm() ** 2 / start))
    return (lengths[-1] - lengths[SETTLED - 1]) / (LR**2 * steps)


def predicted(lr: float, decay: float, momentum: float, steps: int) -> float:
    """‖w‖/‖w₀‖ by the law, step by step."""
    square = 1.0
    for _ in range(steps):
        square += law(momentum) * lr**2 - 2 * lr * decay * square
    return float(square**0.5)


def network(recipe: Recipe) -> float:
    """‖w‖/‖w₀‖ after training, the median over layers."""
    trainer = Trainer(recipe, Path("unused"), torch.device("cpu"))
    trainer.objective.train()
    pairs = trainer.remaining_pairs()
    for _ in range(recipe.steps):
        trainer.advance(pairs)
    lengths = torch.stack(torch._foreach_norm(trainer.optimizer.matrices)) / trainer.optimizer.lengths
    trainer.close()
    return float(lengths.median())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="photos")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage; a ResNet-18 has 64")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--decay", type=float, nargs="+", default=[0.0, 2.0], help="weight decay × lr × updates")
    options = parser.parse_args()
    found: dict[str, float] = {}
    print("momentum  shape        c    averaged noise")
    for momentum in MOMENTA:
        for shape in SHAPES:
            found[f"noise {momentum:g} {shape}"] = c = noise(shape, momentum, options.steps)
            print(f"{momentum:<9g} {shape!s:<10} {c:6.2f} {law(momentum):10.2f}")
    plain = Recipe(
        data=options.data,
        views="barlow-small",
        encoder="resnet18",
        encoder_options={"stem": "small", "width": options.width},
        **{"hidden": [128], "d": 64, "batch": 64, "size": 24, "precision": "float32", "loss": "vicreg"},
        **{"optimizer": "muon", "momentum": 0.95, "lr": 0.025, "schedule": "constant", "warmup_epochs": 0},
        **{"steps": options.steps, "records": 1, "probes": [], "held_out": 0},
    )
    print("decay × lr × updates   length   by the law")
    for total in options.decay:
        decay = total / (plain.lr * plain.steps)
        found[f"network {total:g}"] = length = network(plain.with_settings({"weight_decay": decay}))
        found[f"law {total:g}"] = expected = predicted(plain.lr, decay, plain.momentum, plain.steps)
        print(f"{total:<22g} {length:6.2f} {expected:10.2f}")
    print(json.dumps({key: round(value, 3) for key, value in found.items()}))


if __name__ == "__main__":
    main()
