"""Recipes: all settings that determine the outcome of a run, in one checked, flat dataclass."""

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from stairwise.checks import InputError, flag, instance, number, one_of, positive_int, shown
from stairwise.checks import seed as check_seed
from stairwise.data.augment import PIPELINES
from stairwise.evaluate.classifiers import PROBES
from stairwise.nets.initial import SCOPES
from stairwise.runs.reader import Run
from stairwise.training.newton_schulz import LARGEST, SCALINGS, check_rate, largest_rate
from stairwise.training.objective import check_options
from stairwise.training.optimizer import OPTIMIZERS
from stairwise.training.schedule import SCHEDULES, check_sizes

HERE = Path(__file__).parent / "recipes"
LARGEST_FLOAT = 1e38  # of float32, in which networks are trained
LONGEST = 10**8  # steps or epochs
PRECISIONS = ("bf16", "float32")
START = {"simclr": 1e-6}  # largest initial eigenvalue of small initialization in the paper, if it is not 1e-3


@dataclass(frozen=True)
class Recipe:
    """How a network is trained and measured.

    Attributes:
        label: command, time and expected outcome, for people.
        data: name of a dataset, a folder of images (`images:FOLDER`) or `array:FILE.npy`.
        pretrain: train on this many images, from the first; 0: the dataset's training split, or all images.
        views: name of the augmentation pipeline.
        size: side of a view in pixels; 0: that of the images.
        sizes: views that grow during training: [[0.0, 20], [0.5, 32]] trains on views of 20 pixels, and of 32 from
            half of the steps on. Records are of these views, probes of `size`. Empty: always `size`.
        fixed_views: draw the pairs once and train on all of them at every step (the paper's MLP).
        encoder, encoder_options: name or import path `package.module:factory`, and arguments of the factory.
        hidden: widths of the head's hidden layers. head_norm, head_bias: batch norm and biases in the head.
        d: dimension of the embedding.
        loss, loss_options: name and arguments of the loss.
        precondition: arguments of `sw.precondition`; empty: off.
        together: pass both views through the network as one batch, which matters for batch norm.
        alpha: factor of the initial parameters in `scope`; "auto": the factor for which the largest eigenvalue is
            `target` (0: the paper's 1e-3, or 1e-6 for SimCLR).
        optimizer, lr, momentum, weight_decay, clip: clip 0 is off. With "muon", lr is the length of a step relative to
            the weights (start with 0.02, and momentum 0.95).
        scaling: of the steps of "muon", see `sw.Muon`.
        lr_bias: learning rate of biases and norms; 0: that of the weights.
        schedule, warmup_epochs, final_lr: final_lr is a multiple of lr.
        batch: pairs of views per step, over all processes.
        views_per_image: an even number; the loss is the mean over all pairs of views of an image. A step then has
            2 · batch / views_per_image images, each views_per_image / 2 times.
        epochs, steps: length of the run; if steps is not 0, epochs is ignored.
        precision: "bf16" (autocast, encoder only) or "float32" (convolutions in TF32, if torch allows it).
        channels_last: use this memory format on GPUs.
        graph: record the step as a CUDA graph if possible.
        compile: fuse the network's operations by `torch.compile`; starting takes longer.
        seed: of initialization, order and views.
        records: number of measurements in the run, evenly spaced.
        window: number of images per measured spectrum; 0: the larger of 4 d and 512.
        hidden_spectrum: also measure the covariance of the representations.
        probes: "knn", "ridge", "logistic", "logistic_tuned"; fitted `probe_times` times, the last time at the end.
        probe_images: greatest number of images for fitting and scoring probes; 0: all.
        held_out: with every probe, also measure spectra of up to this many images not trained on.
        keep: keep the weights this many times, evenly spaced, in RUN/weights.
        follow: with every record, store embeddings and representations of two fixed views of this many training images
            in RUN/followed, to see when representations learn what embeddings do.
    """

    label: str = ""
    data: str = "photos"
    pretrain: int = 0
    views: str = "simclr"
    size: int = 0
    sizes: list[list[float]] = field(default_factory=list)
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
    scaling: str = "relative"
    schedule: str = "cosine"
    warmup_epochs: float = 0.0
    final_lr: float = 0.001
    batch: int = 256
    views_per_image: int = 2
    epochs: float = 10.0
    steps: int = 0
    precision: str = "bf16"
    channels_last: bool = True
    graph: bool = True
    compile: bool = False
    seed: int = 0
    records: int = 200
    window: int = 0
    hidden_spectrum: bool = True
    probes: list[str] = field(default_factory=list)
    probe_times: int = 1
    probe_images: int = 0
    held_out: int = 0
    keep: int = 0
    follow: int = 0

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            _check_type(entry.name, getattr(self, entry.name), entry.type)
        one_of(self.views, "views", PIPELINES)
        check_sizes(self.sizes, self.fixed_views)
        check_options(self.loss, self.loss_options, self.precondition)
        one_of(self.optimizer, "optimizer", OPTIMIZERS)
        one_of(self.scaling, "scaling", SCALINGS)
        one_of(self.schedule, "schedule", SCHEDULES)
        one_of(self.precision, "precision", PRECISIONS)
        one_of(self.scope, "scope", SCOPES)
        for probe in self.probes:
            one_of(probe, "probes", PROBES)
        positive_int(self.d, "d")
        positive_int(self.records, "records")
        positive_int(self.probe_times, "probe_times")
        if positive_int(self.batch, "batch") < 2:
            raise InputError("batch", "must be at least 2", self.batch, "losses compare samples")
        if positive_int(self.views_per_image, "views_per_image") % 2 or self.batch % self.repeats:
            rule = "must be even, and half of it must divide the batch"
            raise InputError("views_per_image", rule, self.views_per_image, "2 is a pair of views")
        if self.batch < 2 * self.repeats or (self.repeats > 1 and self.fixed_views):
            rule = "must leave at least two images per step, which are not fixed"
            raise InputError("views_per_image", rule, self.views_per_image, "raise batch")
        check_seed(self.seed)
        if not (isinstance(self.alpha, str) and self.alpha == "auto"):
            number(self.alpha, "alpha", above=0, most=LARGEST_FLOAT)
        number(self.lr, "lr", above=0, most=LARGEST_FLOAT)
        if self.optimizer == "muon":
            check_rate(self.lr, "lr", largest_rate(self.scaling))
            check_rate(self.lr_bias, "lr_bias", LARGEST)
        number(self.momentum, "momentum", least=0, below=1)
        for name in ("pretrain", "size", "target", "lr_bias", "weight_decay", "clip", "final_lr"):
            number(getattr(self, name), name, least=0, most=LARGEST_FLOAT)
        for name in ("warmup_epochs", "steps", "window", "probe_images", "keep", "follow"):
            number(getattr(self, name), name, least=0, most=LONGEST)
        if self.held_out and positive_int(self.held_out, "held_out") < 2:
            raise InputError("held_out", "must be at least 2, or 0", self.held_out)
        if not self.steps:
            number(self.epochs, "epochs", above=0, most=LONGEST)

    @property
    def repeats(self) -> int:
        """How often a batch holds each of its images."""
        return self.views_per_image // 2

    @property
    def start(self) -> float:
        """The largest eigenvalue that alpha = "auto" sets."""
        return self.target or START.get(self.loss, 1e-3)

    def plain(self) -> dict[str, Any]:
        """All settings as values that JSON can hold."""
        return dataclasses.asdict(self)

    def with_settings(self, settings: dict[str, Any]) -> "Recipe":
        """Change settings, given as values or as text; the key `loss_options.temperature` sets one entry of a table.

        A change of the loss clears its options.

        >>> Recipe().with_settings({"lr": "0.5", "hidden": "512,512", "loss_options.lambda_": "1"}).loss_options
        {'lambda_': 1}
        """
        known = {f.name: f for f in dataclasses.fields(self)}
        values: dict[str, Any] = {}
        if settings.get("loss", self.loss) != self.loss:
            values["loss_options"] = {}  # they belong to the previous loss
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
    """Load a recipe by name or from your own .toml file, and change settings."""
    if not isinstance(name, str | Path):
        raise InputError("recipe", "must be a name or a .toml file", shown(name), "see: stairwise train --list")
    name, settings = str(name), instance({} if settings is None else settings, "settings", dict, "give KEY: VALUE")
    path = Path(name) if name.endswith(".toml") else HERE / f"{one_of(name, 'recipe', recipe_names())}.toml"
    try:
        with path.open("rb") as stream:
            stored = tomllib.load(stream)
    except FileNotFoundError:
        raise InputError("recipe", "must exist", path, "see: stairwise train --list") from None
    except UnicodeDecodeError as error:
        raise InputError(str(path), "must be UTF-8 text", error, "save it as UTF-8 in your editor") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(str(path), "must be TOML", error) from error
    return Recipe().with_settings(stored).with_settings(settings)


def recipe_of(run: Run) -> Recipe:
    """The recipe of a run, with defaults for settings that did not exist in its version."""
    return Recipe().with_settings(run.recipe)


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(p.stem for p in HERE.glob("*.toml"))


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Text, tables and lists; numbers are checked with their ranges."""
    origin = get_origin(kind)
    if kind is str and not isinstance(value, str):
        raise InputError(name, "must be text", shown(value))
    if kind is bool:
        flag(value, name)
    if kind is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise InputError(name, "must be a whole number", shown(value))
    if origin is dict and not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
        raise InputError(name, "must be a table with names as keys", shown(value), "give a dict")
    inside = get_origin(get_args(kind)[0]) or get_args(kind)[0] if origin is list else None
    if inside and not (isinstance(value, list) and all(isinstance(v, inside) for v in value)):
        raise InputError(name, f"must be a list of {inside.__name__}", shown(value))
    if inside is int:
        for item in value:
            positive_int(item, name)


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Convert a value, which may be text, to the annotated type of its field."""
    origin = get_origin(kind)
    try:
        if kind is bool:
            return value if isinstance(value, bool) else {"true": True, "false": False}[str(value).lower()]
        if kind == list[list[float]]:
            return [list(item) for item in parsed(value)]
        if origin is list:
            return [get_args(kind)[0](v) for v in (value if isinstance(value, list) else _items(str(value)))]
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
    except (TypeError, ValueError, KeyError, OverflowError):
        remedy = f"set {name}.KEY=VALUE" if origin is dict else ""
        raise InputError(name, f"must be of type {getattr(kind, '__name__', kind)}", repr(value), remedy) from None


def _items(text: str) -> list[str]:
    """The items of a list given as text, with or without brackets and quotes, which a shell may have removed.

    >>> _items("knn,ridge"), _items('["knn", "ridge"]'), _items("[]")
    (['knn', 'ridge'], ['knn', 'ridge'], [])
    """
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [item for part in inside.split(",") if (item := part.strip().strip("\"'"))]


def parsed(value: Any) -> Any:
    """Parse text from the command line as a TOML value, if it is one."""
    if not isinstance(value, str):
        return value
    try:
        return tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return value
