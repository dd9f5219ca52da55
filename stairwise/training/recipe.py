"""Recipes: everything that decides the outcome of a run, in one flat, checked, comparable value."""

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from stairwise.checks import InputError, number, one_of, positive_int
from stairwise.checks import seed as check_seed
from stairwise.data.augment import PIPELINES
from stairwise.evaluate.classifiers import PROBES
from stairwise.losses import MODULES
from stairwise.nets.initial import SCOPES
from stairwise.runs.reader import Run
from stairwise.training.optimizer import OPTIMIZERS
from stairwise.training.schedule import SCHEDULES

__all__ = ["Recipe", "load_recipe", "parsed", "recipe_names", "recipe_of"]

HERE = Path(__file__).parent / "recipes"
PRECISIONS = ("bf16", "float32")
START = {"simclr": 1e-6}  # the paper's largest eigenvalue at small initialization, where it is not 1e-3


@dataclass(frozen=True)
class Recipe:
    """How a network is trained and measured.

    Attributes:
        label: command, time and expected outcome, for people.
        data: dataset by name, `images:FOLDER` or `array:FILE.npy`.
        pretrain: train on this many images from the first on; 0: those its makers set aside for training, or all.
        views: pipeline of augmentations.
        size: side of a view in pixels; 0: that of the images.
        fixed_views: draw the pairs once and train on the whole of them at every step (the paper's MLP).
        encoder, encoder_options: by name or import path `package.module:factory`, and arguments of the factory.
        hidden: widths of the head's hidden layers. head_norm, head_bias: batch norm and biases in the head.
        d: dimension of the embedding.
        loss, loss_options: by name, and arguments of the loss.
        precondition: arguments of `sw.precondition`; empty: off.
        together: pass both views through the network as one batch (batch norm then sees both).
        alpha: factor of the initial parameters in `scope`, or "auto": the one that puts the largest eigenvalue at
            `target` (0: the paper's 1e-3, or 1e-6 for SimCLR).
        optimizer, lr, momentum, weight_decay, clip: clip 0 is off.
        lr_bias: learning rate of biases and norms; 0: that of the weights.
        schedule, warmup_epochs, final_lr: final_lr as a multiple of lr.
        batch: images a step, over all processes.
        epochs: length of the run; steps, if not 0, instead.
        precision: "bf16" (autocast, encoder only) or "float32" (convolutions in TF32, if cuDNN may: torch's default).
        channels_last: memory format of convolutions on a GPU; on a CPU it buys nothing.
        graph: record the step as a CUDA graph where that is possible.
        seed: of initialization, order and views.
        records: number of measurements over the run, evenly spaced.
        window: images behind a measured spectrum; 0: the larger of 4 d and 512.
        hidden_spectrum: also measure the representations' covariance.
        probes: "knn", "ridge", "logistic"; run `probe_times` times, the last at the end.
        probe_images: at most this many images to fit and to score probes with; 0: all.
        held_out: with every probe, also measure spectra of at most so many images not trained on, in evaluation
            mode.
        keep: keep the weights at so many times of the run, evenly spaced, in RUN/weights.
    """

    label: str = ""
    data: str = "photos"
    pretrain: int = 0
    views: str = "simclr"
    size: int = 0
    fixed_views: bool = False
    encoder: str = "resnet18"
    encoder_options: dict[str, Any] = field(default_factory=dict)
    hidden: list[int] = field(default_factory=lambda: [512])
    head_norm: bool = True
    head_bias: bool = False
    d: int = 128
    loss: str = "barlow_twins"
    loss_options: dict[str, Any] = field(default_factory=dict)
    precondition: dict[str, Any] = field(default_factory=dict)
    together: bool = False
    alpha: str | float = 1.0
    scope: str = "all"
    target: float = 0.0
    optimizer: str = "sgd"
    lr: float = 0.1
    lr_bias: float = 0.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float = 0.0
    schedule: str = "cosine"
    warmup_epochs: float = 0.0
    final_lr: float = 0.001
    batch: int = 256
    epochs: float = 10.0
    steps: int = 0
    precision: str = "bf16"
    channels_last: bool = True
    graph: bool = True
    seed: int = 0
    records: int = 200
    window: int = 0
    hidden_spectrum: bool = True
    probes: list[str] = field(default_factory=list)
    probe_times: int = 1
    probe_images: int = 0
    held_out: int = 0
    keep: int = 0

    def __post_init__(self) -> None:
        one_of(self.views, "views", PIPELINES)
        one_of(self.loss, "loss", MODULES)
        one_of(self.optimizer, "optimizer", OPTIMIZERS)
        one_of(self.schedule, "schedule", SCHEDULES)
        one_of(self.precision, "precision", PRECISIONS)
        one_of(self.scope, "scope", SCOPES)
        for probe in self.probes:
            one_of(probe, "probes", PROBES)
        positive_int(self.d, "d")
        positive_int(self.records, "records")
        positive_int(self.probe_times, "probe_times")
        if positive_int(self.batch, "batch") < 2:
            raise InputError("batch", "must be at least 2", self.batch, "a loss compares samples")
        check_seed(self.seed)
        if self.alpha != "auto":
            number(self.alpha, "alpha", above=0)
        number(self.lr, "lr", above=0)
        for name in ("pretrain", "size", "target", "lr_bias", "momentum", "weight_decay", "clip", "final_lr"):
            number(getattr(self, name), name, least=0)
        for name in ("warmup_epochs", "steps", "window", "probe_images", "keep"):
            number(getattr(self, name), name, least=0)
        if self.held_out and positive_int(self.held_out, "held_out") < 2:
            raise InputError("held_out", "must be at least 2, or 0", self.held_out)
        if not self.steps:
            number(self.epochs, "epochs", above=0)

    @property
    def start(self) -> float:
        """The largest eigenvalue that alpha = "auto" aims at."""
        return self.target or START.get(self.loss, 1e-3)

    def plain(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return dataclasses.asdict(self)

    def with_settings(self, settings: dict[str, Any]) -> "Recipe":
        """Changed values, given as such or as text; `loss_options.temperature=0.1` reaches into tables.

        Another loss begins with no options.

        >>> Recipe().with_settings({"lr": "0.5", "hidden": "512,512", "loss_options.lambda_": "1"}).loss_options
        {'lambda_': 1}
        """
        known = {f.name: f for f in dataclasses.fields(self)}
        values: dict[str, Any] = {}
        if settings.get("loss", self.loss) != self.loss:
            values["loss_options"] = {}  # they belong to the loss they were given for
        for key, value in settings.items():
            name, dot, inner = key.partition(".")
            tables = [n for n in known if isinstance(getattr(self, n), dict)]
            one_of(name, "key", tables if dot else known)
            if dot:
                table = values.get(name, dict(getattr(self, name)))
                values[name] = {**table, inner: parsed(value)}
            else:
                values[name] = _convert(name, value, known[name].type)
        return dataclasses.replace(self, **values)


def load_recipe(name: str, settings: dict[str, Any] | None = None) -> Recipe:
    """A recipe by name, or from a .toml file of yours, with changes."""
    path = Path(name) if name.endswith(".toml") else HERE / f"{one_of(name, 'recipe', recipe_names())}.toml"
    try:
        with path.open("rb") as stream:
            stored = tomllib.load(stream)
    except FileNotFoundError:
        raise InputError("recipe", "must exist", path, "see: stairwise train --list") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(str(path), "must be TOML", error) from error
    return Recipe().with_settings(stored).with_settings(settings or {})


def recipe_of(run: Run) -> Recipe:
    """The recipe of a run; settings that the run's version did not have get their defaults."""
    return Recipe().with_settings(run.recipe)


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(p.stem for p in HERE.glob("*.toml"))


def _convert(name: str, value: Any, kind: Any) -> Any:
    """`value`, perhaps text, as the annotated type of the field."""
    origin = get_origin(kind)
    try:
        if kind is bool:
            return value if isinstance(value, bool) else {"true": True, "false": False}[str(value).lower()]
        if origin is list:
            parts = value if isinstance(value, list) else [v for v in str(value).split(",") if v]
            return [get_args(kind)[0](v) for v in parts]
        if origin is dict:
            table = parsed(value)
            if not isinstance(table, dict):
                raise ValueError
            return table
        if kind == str | float:
            return value if value == "auto" else float(value)
        if kind is int and not isinstance(value, str) and value != int(value):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, KeyError):
        remedy = f"set {name}.KEY=VALUE" if origin is dict else ""
        raise InputError(name, f"must be of type {getattr(kind, '__name__', kind)}", repr(value), remedy) from None


def parsed(value: Any) -> Any:
    """Text on the command line as the TOML value it would be."""
    if not isinstance(value, str):
        return value
    try:
        return tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return value
