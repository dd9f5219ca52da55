"""The staircase of a finished training, measured from its checkpoints."""

import argparse
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from operator import attrgetter
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from stairwise.checks import InputError, RunWarning, number, one_of, positive_int
from stairwise.data.augment import PIPELINES
from stairwise.data.images import Images, load
from stairwise.data.pairs import view_pairs
from stairwise.data.views import ViewPairs
from stairwise.distributed import choose_device
from stairwise.evaluate.representations import eval_mode
from stairwise.files import regular
from stairwise.monitor.decompose import Spectrum
from stairwise.monitor.spectrum import SpectrumMonitor
from stairwise.nets.encoder import build_encoder
from stairwise.progress import Progress, silent
from stairwise.runs.folder import RunFolder
from stairwise.runs.record import Record

# classes that a checkpoint may hold besides tensors and plain values: settings of a script, which only store them
SETTINGS: list[Any] = [argparse.Namespace, SimpleNamespace]
SETTINGS += [
    (kind, f"{module}.{name}")
    for module in ("pathlib", "pathlib._local")
    for name, kind in (("PosixPath", PurePosixPath), ("WindowsPath", PureWindowsPath))
]
COUNTERS = ("global_step", "step", "iteration", "epoch")  # common names of the step in checkpoints


@dataclass(frozen=True)
class Source:
    """What to measure: the options of `stairwise spectrum`. With an empty `mean` the views are normalized by their own
    statistics; `n` = 0 takes the larger of 4 d and 1024 pairs, but at most one per image."""

    model: str
    checkpoints: str
    data: str
    options: dict[str, Any]
    z: str = ""
    h: str = ""
    views: str = "simclr"
    size: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    n: int = 0
    lr: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """What `measure_checkpoints` did: the number of records, the files skipped, the normalization of the views."""

    records: int
    skipped: list[str]
    mean: list[float]
    std: list[float]


def measure_checkpoints(source: Source, folder: Path, device: str = "auto", progress: Progress = silent) -> Measured:
    """Write metrics.jsonl with one record per checkpoint; all are measured on the same views."""
    one_of(source.views, "views", tuple(PIPELINES))
    number(source.lr, "--lr", above=0)
    matching = glob(source.checkpoints, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute patterns)
    paths = _ordered([Path(p) for p in matching], source.checkpoints)
    where = choose_device(device)
    network = build_encoder(source.model, source.options).to(where)
    images = load(source.data, size=source.size or 64)
    pairs, rows = _pairs(source, images, where, _dimension(network, source, images, where))
    views = list(pairs.fixed_batches(rows))
    last, run = -1, None
    skipped: list[str] = []
    try:
        for i, path in enumerate(paths):
            progress(i, len(paths), path.name)
            try:
                step = _restore(network, path)
                spectrum = _spectrum(network, source, views, path)
            except InputError as error:
                skipped.append(str(error))
                continue
            if step <= last:
                rule, remedy = f"must come after step {last}", "name files by their step, or exclude some"
                raise InputError(str(path), rule, step, remedy)
            run = run or RunFolder(folder)  # created late, because it renames the metrics of an earlier run
            run.write(Record(step=step, t=source.lr * step, checkpoint=path.name, **vars(spectrum)))
            last = step
    finally:
        if run is not None:
            run.close()
    if last < 0:
        found = f"{len(paths)} files, none of which can be measured"
        raise InputError("--checkpoints", "must fit the model", found, f"the first: {skipped[0]}")
    if skipped:
        note = f"{len(skipped)} of {len(paths)} checkpoints skipped, the first because {skipped[0]}"
        warnings.warn(note, RunWarning, stacklevel=2)
    progress(len(paths), len(paths), "done")
    return Measured(len(paths) - len(skipped), skipped, pairs.mean.tolist(), pairs.std.tolist())


def _spectrum(network: nn.Module, source: Source, views: list[tuple[Tensor, Tensor]], path: Path) -> Spectrum:
    monitor = SpectrumMonitor(normalized=True)
    with eval_mode(network), _outputs(network, source) as embed:
        for x_a, x_b in views:
            (h_a, z_a), (h_b, z_b) = embed(x_a), embed(x_b)
            if not bool(torch.isfinite(z_a).all() and torch.isfinite(z_b).all()):
                raise InputError(str(path), "must give finite embeddings", None, "its training has diverged")
            monitor.update(z_a, z_b, h_a, h_b)
    return monitor.compute()


@contextmanager
def _outputs(network: nn.Module, source: Source) -> Iterator[Callable[[Tensor], tuple[Tensor | None, Tensor]]]:
    """Make a function x → (h, z), with hooks on the named submodules."""
    caught: dict[str, Tensor] = {}

    def catch(role: str, _: nn.Module, __: Any, output: Any) -> None:
        caught[role] = output

    hooks = []
    for role in ("z", "h"):
        name = getattr(source, role)
        if name:
            try:
                hooks.append(attrgetter(name)(network).register_forward_hook(partial(catch, role)))
            except AttributeError:
                known = [n for n, _ in network.named_children()]
                raise InputError(f"--{role}", "must name a submodule of the model", name, f"it has {known}") from None

    def embed(x: Tensor) -> tuple[Tensor | None, Tensor]:
        out = network(x)
        h, z = out if isinstance(out, tuple | list) and len(out) == 2 else (None, out)
        z, h = caught.get("z", z), caught.get("h", h)
        if not isinstance(z, Tensor) or z.ndim != 2:
            shape = f"shape {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
            raise InputError("the model's z", "must be 2-D, (samples, d)", shape, "name its submodule with --z")
        return (h.flatten(1).float() if isinstance(h, Tensor) else None), z.float()

    try:
        yield embed
    finally:
        for hook in hooks:
            hook.remove()


def _pairs(source: Source, images: Images, device: torch.device, d: int) -> tuple[ViewPairs, Tensor]:
    """Draws views, and the images of which they are drawn."""
    n = min(positive_int(source.n, "n") if source.n else max(4 * d, 1024), len(images.pixels))
    if n < 2:
        raise InputError("data", "must have at least two images", n)
    rows = torch.linspace(0, len(images.pixels) - 1, n).long()
    pairs = view_pairs(images, source.views, source.size, source.seed, device, mean=source.mean, std=source.std)
    return pairs, rows


def _dimension(network: nn.Module, source: Source, images: Images, device: torch.device) -> int:
    """The dimension of z, measured on two images."""
    few = replace(source, n=2)
    with eval_mode(network), _outputs(network, source) as embed:
        try:
            pairs, rows = _pairs(few, images, device, 1)
            return embed(pairs.fixed(rows)[0])[1].shape[1]
        except InputError:
            raise
        except Exception as error:  # code of the user
            reason = _first_line(error)
            raise InputError("the model", "must accept the views", reason, "set --size, or give --options") from error


def _restore(network: nn.Module, path: Path) -> int:
    """Load a checkpoint into the network and return its step."""
    content = _read(path)
    step = _step(content, path)
    tensors = _flat(content)
    wanted = network.state_dict()
    prefixes = {name.removesuffix(key) for key in list(wanted)[:1] for name in tensors if name.endswith(key)}
    for prefix in sorted(prefixes, key=len):
        state = {key: tensors.get(prefix + key) for key in wanted}
        if all(v is not None and v.shape == wanted[key].shape for key, v in state.items()):
            network.load_state_dict(state)
            return step
    missing = [key for key in wanted if not any(name.endswith(key) for name in tensors)]
    shapes = f"it lacks {', '.join(missing[:3])}" if missing else "shapes differ"
    raise InputError(str(path), "must contain all tensors of the model", shapes, "check --model and --options")


def _read(path: Path) -> dict[str, Any]:
    try:
        if regular(path).suffix == ".safetensors":
            return dict(load_file(path))
        with torch.serialization.safe_globals(SETTINGS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        reason = _first_line(error)
        raise InputError(str(path), "must be a complete checkpoint of plain tensors", reason) from error
    if not isinstance(content, dict):
        raise InputError(str(path), "must contain a dictionary of tensors", type(content).__name__)
    return content


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Tensors of nested dictionaries, by dotted names."""
    flat: dict[str, Tensor] = {}
    for key, value in content.items():
        if isinstance(value, Tensor) and not value.is_complex():  # copying these would drop the imaginary parts
            flat[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
    return flat


def _step(content: dict[str, Any], path: Path) -> int:
    """The step stored in the checkpoint, or else the last number in its name."""
    for key in COUNTERS:
        if isinstance(content.get(key), int):
            return int(content[key])
    numbers = [n for part in (path.parent.name, path.stem) for n in re.findall(r"\d+", part)]  # checkpoint-500/model.pt
    if not numbers:
        raise InputError(str(path), "must contain its step", None, "put the step into its name: model-1000.pt")
    return int(numbers[-1])


def _ordered(paths: list[Path], pattern: str) -> list[Path]:
    """Sort files by the numbers in their names."""
    if not paths:
        raise InputError("--checkpoints", "must match files", pattern, "quote the pattern: 'ckpt/*.pt'")
    return sorted(paths, key=lambda p: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", str(p))])
