"""How fast does a ResNet-18 reach 85, 90 and 92 % on CIFAR-10 without labels, by logistic regression on one view?

    python -m benchmarks.speedrun [--goals 85 90 92] [--seeds 3] [--data-file FILE …] [--out FILE.jsonl]
    python -m benchmarks.speedrun --goals 85 --held-out --set loss=simclr --set lr=0.04      to choose settings

The recipes are in benchmarks/speedrun.toml. With `--held-out` a run does not see the last tenth of the training images
and is judged on it, and the test images are not loaded; this is how settings are chosen. Every result is one line of
`--out`; a run that is there already is not repeated.

The time of a run begins when the images are in the memory of the host and ends with the last step. It includes building
the network, choosing algorithms, compiling and recording, and excludes the probe. Where the time of a step goes is
measured after the run, piece by piece: views (drawn on a second stream, so not all of their time is added), loss and
its gradient, optimizer, and the rest, which is the network.
"""

import argparse
import json
import tomllib
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.bench_engine import optimizer_call, rate, step_call, views_call
from benchmarks.bench_train import sync
from benchmarks.race.images import RaceImages, named_images, read_images
from benchmarks.race.single import CHECK, free_memory
from benchmarks.race.store import Result, Store
from stairwise.distributed import choose_device
from stairwise.theory.spectra import effective_rank
from stairwise.training.graph import Recorded
from stairwise.training.loop import Trainer
from stairwise.training.measure import held_out_spectra, probe_accuracies
from stairwise.training.recipe import Recipe

GOALS = tomllib.loads((Path(__file__).parent / "speedrun.toml").read_text())
STORE = Path("docs/results/speedrun.jsonl")
COMMON: dict[str, Any] = {
    **{"views": "barlow-small", "encoder": "resnet18", "encoder_options": {"stem": "small"}, "schedule": "cosine"},
    **{"optimizer": "muon", "momentum": 0.95, "warmup_epochs": 1.0, "final_lr": 0.0},
    **{"probes": ["knn", "logistic"], "held_out": 4096, "records": 1, "hidden_spectrum": False},
}


def recipe_of(goal: str, seed: int, held_out: bool, changes: dict[str, str]) -> Recipe:
    settings = COMMON | GOALS[goal]["recipe"] | {"seed": seed, "data": "race-tune" if held_out else "race-final"}
    return Recipe().with_settings(settings).with_settings(changes)


def key_of(goal: str, recipe: Recipe, training: int) -> str:
    """Names a run by all settings that are not defaults."""
    plain, default = recipe.plain(), Recipe().plain()
    changed = {k: v for k, v in plain.items() if v != default[k] and k not in ("label", "probes", "records")}
    return f"{goal}/{training}/" + json.dumps(changed, sort_keys=True)


def speedrun(goal: str, recipe: Recipe, device: torch.device) -> Result:
    """Train, probe, and take the time."""
    began = perf_counter()
    trainer = Trainer(recipe, Path("unused"), device)
    trainer.objective.train()
    pairs, total = trainer.remaining_pairs(), trainer.calendar.total
    ready = began
    for step in range(1, total + 1):
        trainer.advance(pairs)
        if step == min(10, total):
            sync(device)
            ready = perf_counter()
        if step % CHECK == 0 and trainer.recorder.numbers()["bad_step"]:
            break
    sync(device)
    done = perf_counter()
    result: Result = {
        **{"goal": goal, "wanted": GOALS[goal]["accuracy"], "limit": GOALS[goal]["seconds"], "steps": total},
        **{"views": 2 * recipe.batch * total, "seconds": round(done - began, 2), "start": round(ready - began, 2)},
        **{"diverged": bool(trainer.recorder.numbers()["bad_step"]), "training_images": trainer.material.training},
    }
    result["views_per_second"] = round(2 * recipe.batch * (total - 10) / max(done - ready, 1e-9))
    if not result["diverged"]:
        result |= probe_accuracies(trainer.network, recipe, trainer.material)
        spectrum = held_out_spectra(trainer.network, recipe, trainer.material)["held_covariance"]
        result["rank"] = round(float(effective_rank(spectrum)), 2)
        sync(device)
        result["probe"] = round(perf_counter() - done, 2)
        result["parts_ms"] = parts(trainer, device)
    trainer.close()
    return result


def parts(trainer: Trainer, device: torch.device, seconds: float = 0.5) -> dict[str, float]:
    """Milliseconds per step of its parts, each measured alone."""
    batch, d = trainer.material.batch, trainer.recipe.d
    loss: Any = getattr(trainer.objective, "loss", None)
    z = [torch.randn(batch, d, device=device, requires_grad=True) for _ in range(2)]

    def of_loss() -> None:
        loss(*z).backward()

    calls = {"views": views_call(trainer), "step": step_call(trainer), "optimizer": optimizer_call(trainer)}
    if loss is not None:
        calls["loss"] = Recorded(of_loss) if trainer.material.graph else of_loss
    found = {name: 1e3 / rate(device, call, 1, seconds) for name, call in calls.items()}
    found["network"] = found["step"] - found["optimizer"] - found.get("loss", 0.0)
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goals", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held-out", action="store_true", help="judge on held-out training images, to choose settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of the recipe"
    )
    parser.add_argument("--data-file", type=Path, nargs="+", help=".npz files of images, as for benchmarks.race")
    parser.add_argument("--most", type=int, default=0, help="use only so many images of each split")
    parser.add_argument("--out", type=Path, default=STORE)
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after this time")
    options = parser.parse_args()
    began = perf_counter()
    images = read_images(options.data_file, "cifar10", options.most) if options.data_file else named_images("cifar10")
    changes = dict(text.split("=", 1) for text in options.set)
    store, device = Store(options.out), choose_device("auto")
    torch.backends.cudnn.benchmark = device.type == "cuda"
    images.offer()
    for goal in options.goals:
        for seed in range(options.seeds):
            recipe = recipe_of(goal, seed, options.held_out, changes)
            expected = GOALS[goal]["seconds"] / 60
            if (perf_counter() - began) / 60 + expected < options.minutes:
                _run_once(goal, recipe, images, store, device, options.held_out)


def _run_once(
    goal: str, recipe: Recipe, images: RaceImages, store: Store, device: torch.device, held_out: bool
) -> None:
    key = key_of(goal, recipe, images.training)
    if key in store.results():
        return
    result = {"key": key, "seed": recipe.seed, "held_out": held_out, **speedrun(goal, recipe, device)}
    result |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "alone": True}
    store.add(result)
    free_memory(device)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
