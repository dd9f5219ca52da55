"""How fast do weights grow under Muon, and so how fast does the angle of its updates fall?

    python -m benchmarks.bench_muon_angle [--data photos] [--width 8] [--steps 600] [--decay 0 2]
    python -m benchmarks.bench_muon_angle --stored      only the stored runs of the speedrun

Updates have the length lr ‖w₀‖. If the gradient is noise, ‖w‖² = ‖w₀‖² (1 + c Σ lr²), where momentum m makes successive
updates alike: c = 1 / [(1 − m)² ((1 + m)² + m⁴/(1 − m²))] if they are averaged but not orthogonalized. First table: c
of matrices whose gradient is noise. Second table: lengths of trained networks (median over layers) against the law with
this c, in which weight decay δ takes 2 lr δ ‖w‖² per update (lr δ must be well below 1 − m): a narrow ResNet-18 with
VICReg at a constant learning rate, on a CPU, one seed; and runs of the speedrun, with their schedule. The last line is
JSON.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import stairwise as sw
from benchmarks.race.store import Store
from stairwise.training.loop import Trainer
from stairwise.training.recipe import Recipe
from stairwise.training.schedule import Schedule

SHAPES, MOMENTA = ((64, 576), (128, 512), (64, 64)), (0.0, 0.9, 0.95)
SPEEDRUN = Path("docs/results/speedrun.jsonl")
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


def predicted(rates: Iterable[float], decay: float, momentum: float) -> float:
    """‖w‖/‖w₀‖ by the law after updates with these learning rates."""
    square = 1.0
    for lr in rates:
        square += law(momentum) * lr**2 - 2 * lr * decay * square
    return float(square**0.5)


def growth_of_weights(trainer: Trainer) -> float:
    """Length of a weight relative to its start, the median over matrices and filters."""
    lengths = torch.stack(torch._foreach_norm(trainer.optimizer.matrices))
    return round(float((lengths / trainer.optimizer.lengths).median()), 2)


def stored_runs(path: Path) -> Iterator[tuple[str, float, float]]:
    """Runs of the speedrun that say how long their weights became: name, this length, and that of the law."""
    for key, result in Store(path).results().items():
        if "weights" not in result:
            continue
        name, _, settings = key.partition("/")
        recipe, steps = json.loads(settings.partition("/")[2]), result["steps"]
        total = re.search(r"decay D = (\S+)", name)  # its weight decay is not in the key of a trial
        decay = float(total[1]) / (recipe["lr"] * steps) if total else recipe.get("weight_decay", 0.0)
        warmup = result["training_images"] // recipe.get("batch", Recipe().batch) * recipe["warmup_epochs"]
        schedule = Schedule("cosine", steps, round(warmup), recipe["final_lr"])
        rates = [recipe["lr"] * schedule.factor(step) for step in range(steps)]
        yield f"{name}, seed {result['seed']}", result["weights"], predicted(rates, decay, recipe["momentum"])


def network(recipe: Recipe) -> float:
    """‖w‖/‖w₀‖ after training, the median over layers."""
    trainer = Trainer(recipe, Path("unused"), torch.device("cpu"))
    trainer.objective.train()
    pairs = trainer.remaining_pairs()
    for _ in range(recipe.steps):
        trainer.advance(pairs)
    length = growth_of_weights(trainer)
    trainer.close()
    return length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="photos")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage; a ResNet-18 has 64")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--decay", type=float, nargs="+", default=[0.0, 2.0], help="weight decay × lr × updates")
    parser.add_argument("--stored", action="store_true", help="only what the speedrun has stored")
    options = parser.parse_args()
    found: dict[str, float] = {}
    if not options.stored:
        print("momentum  shape        c    averaged noise")
        for momentum in MOMENTA:
            for shape in SHAPES:
                found[f"noise {momentum:g} {shape}"] = c = noise(shape, momentum, options.steps)
                print(f"{momentum:<9g} {shape!s:<10} {c:6.2f} {law(momentum):10.2f}")
    print(f"{'training':<50} length   by the law")
    for name, length, expected in [*([] if options.stored else trained(options)), *stored_runs(SPEEDRUN)]:
        found[name], found[f"law of {name}"] = length, expected
        print(f"{name:<50} {length:6.2f} {expected:10.2f}")
    print(json.dumps({key: round(value, 3) for key, value in found.items()}))


def trained(options: argparse.Namespace) -> Iterator[tuple[str, float, float]]:
    """Small networks: name, length of their weights, and that of the law."""
    plain = Recipe(
        data=options.data,
        views="barlow-small",
        encoder="resnet18",
        encoder_options={"stem": "small", "width": options.width},
        **{"hidden": [128], "d": 64, "batch": 64, "size": 24, "precision": "float32", "loss": "vicreg"},
        **{"optimizer": "muon", "momentum": 0.95, "lr": 0.025, "schedule": "constant", "warmup_epochs": 0},
        **{"steps": options.steps, "records": 1, "probes": [], "held_out": 0},
    )
    for total in options.decay:
        decay = total / (plain.lr * plain.steps)
        length = network(plain.with_settings({"weight_decay": decay}))
        yield f"network, D = {total:g}", length, predicted([plain.lr] * plain.steps, decay, plain.momentum)


if __name__ == "__main__":
    main()
