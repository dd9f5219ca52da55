"""Who takes part: losses, methods with their grids of learning rates, and the recipe of a run."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stairwise.training.recipe import Recipe

TRAINING = {"tune": "race-tune", "long": "race-tune", "clock": "race-tune", "final": "race-final"}
WARMUP = 0.05  # share of the steps

# a network per loss, the same for all methods
HEADS: dict[str, dict[str, Any]] = {
    "simclr": {"hidden": [512], "d": 128, "head_norm": False, "head_bias": True, "views": "simclr-small-wide"},
    "joint": {"hidden": [1024], "d": 512, "views": "barlow-small"},
    "modes": {"hidden": [512], "d": 64, "views": "barlow-small"},  # losses of C are decomposed in every step
}
PLAIN = {"lambda_": 1.0, "batch_norm": False, "symmetric": True}
LOSSES: dict[str, dict[str, Any]] = {
    "simclr": HEADS["simclr"] | {"loss": "simclr"},
    "vicreg": HEADS["joint"] | {"loss": "vicreg"},
    "barlow_twins": HEADS["joint"] | {"loss": "barlow_twins"},
    "frossl": HEADS["joint"] | {"loss": "frossl"},
    "plain": HEADS["modes"] | {"loss": "barlow_twins", "loss_options": PLAIN},
    "sharpened": HEADS["modes"] | {"loss": "sharpened"},
    "flat": HEADS["modes"] | {"loss": "smoothed", "loss_options": {"epsilon": 0.0}},
    "smoothed": HEADS["modes"] | {"loss": "smoothed"},
    "fourth_power": HEADS["modes"] | {"loss": "fourth_power"},
    "hinged": HEADS["modes"] | {"loss": "hinged"},
}


@dataclass(frozen=True)
class Method:
    """Settings of a method, and the learning rates that are tried, mostly four; `bias` is lr_bias / lr.

    `elsewhere`: rates for losses that need others. `decay`: weight decay × lr × steps, if it depends on these.
    """

    settings: dict[str, Any]
    rates: tuple[float, ...]
    bias: float = 1.0
    elsewhere: dict[str, tuple[float, ...]] = field(default_factory=dict)
    decay: float = 0.0

    def rates_for(self, loss: str) -> tuple[float, ...]:
        return self.elsewhere.get(loss, self.rates)


# the grids are centred on the best of five rates with SimCLR; SGD with VICReg diverged from 0.03 on
METHODS: dict[str, Method] = {
    "sgd": Method(
        {"optimizer": "sgd", "weight_decay": 5e-4},
        (0.01, 0.03, 0.1, 0.3),
        elsewhere={"vicreg": (0.0025, 0.005, 0.01, 0.02)},
    ),
    "lars": Method({"optimizer": "lars", "weight_decay": 1e-4}, (0.75, 1.5, 3.0, 6.0), bias=1 / 30),
    "adamw": Method({"optimizer": "adamw", "weight_decay": 0.01}, (3e-4, 1e-3, 3e-3, 1e-2)),
    "muon": Method({"optimizer": "muon", "momentum": 0.95}, (0.02, 0.04, 0.08, 0.16)),
    "precondition": Method(
        {"optimizer": "sgd", "weight_decay": 5e-4, "precondition": {"damping": 0.1, "power": 0.5}},
        (0.01, 0.03, 0.1, 0.3),
    ),
}
MORE_VIEWS = {"views_per_image": 4}
METHODS["lars, 4 views"] = replace(METHODS["lars"], settings=METHODS["lars"].settings | MORE_VIEWS)
METHODS["muon, 4 views"] = replace(METHODS["muon"], settings=METHODS["muon"].settings | MORE_VIEWS)
# for VICReg only, with the rate that was chosen without decay
METHODS["muon, decay"] = replace(METHODS["muon"], rates=(0.04,), decay=10.0)
BASELINES = ("sgd", "lars", "adamw")
RACED = ("simclr", "vicreg", "barlow_twins")


@dataclass(frozen=True)
class RaceRun:
    """One training. `stage`: "tune" and "long" are judged on held-out training images, "final" on the test images,
    "clock" only for time. `start`: "standard" or "small" initialization."""

    stage: str
    data: str
    loss: str
    method: str
    lr: float
    steps: int
    seed: int
    start: str = "standard"

    def settings(self, changes: dict[str, Any]) -> dict[str, Any]:
        """All settings of the recipe that are not defaults."""
        method = METHODS[self.method]
        chosen = {
            **{"data": TRAINING[self.stage], "encoder_options": {"stem": "small"}, "batch": 256},
            **{"steps": self.steps, "seed": self.seed, "final_lr": 0.0, "records": 1, "hidden_spectrum": False},
            **{"probes": ["knn", "logistic_tuned" if self.stage == "final" else "logistic"], "held_out": 2048},
            **LOSSES[self.loss],
            **method.settings,
            **{"lr": self.lr, "lr_bias": self.lr * method.bias},
        }
        if method.decay:
            chosen["weight_decay"] = float(f"{method.decay / (self.lr * self.steps):.3g}")
        if self.start == "small":
            chosen["alpha"] = "auto"
        return chosen | changes

    def recipe(self, changes: dict[str, Any], training: int) -> Recipe:
        settings = self.settings(changes)
        per_epoch = max(1, training // settings["batch"])
        return Recipe().with_settings(settings | {"warmup_epochs": WARMUP * self.steps / per_epoch})

    def key(self, changes: dict[str, Any]) -> str:
        """Names the run and, by a digest, all of its settings: another setting makes another run."""
        text = json.dumps(self.settings(changes), sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        return "/".join(str(value) for value in asdict(self).values()) + f"#{digest}"
