"""Where records go: a run folder, TensorBoard, or any logger."""

import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from stairwise.checks import InputError, RunWarning
from stairwise.files import save_json
from stairwise.monitor.log import MetricsLog
from stairwise.theory.spectra import alpha_req, effective_rank, grown, participation_ratio

__all__ = ["METRICS", "PICTURE", "RunFolder", "loggers", "scalars"]

METRICS, PICTURE = "metrics.jsonl", "embeddings.json"
SHOWN = 16  # eigenvalues that loggers get
Logger = Callable[[dict[str, float]], None]


class RunFolder:
    """metrics.jsonl, a line a record, and embeddings.json, the newest embeddings in their two leading modes.

    `size`: bytes of metrics.jsonl to go on after; None: begin, and move what another run left there aside.
    """

    def __init__(self, folder: str | Path, size: int | None = None) -> None:
        self.folder = Path(folder)
        if size is None:
            _move_aside(self.folder / METRICS)
        self.metrics = MetricsLog(self.folder / METRICS, size or 0)

    def write(self, record: dict[str, Any]) -> None:
        """Add a record."""
        record = dict(record)
        leading = record.pop("leading", None)
        self.metrics.write(record)
        if leading is not None:
            rounded = np.round(leading, 6 - int(np.ceil(np.log10(max(np.abs(leading).max(), 1e-300)))))
            save_json(self.folder / PICTURE, {"step": record["step"], "t": record["t"], "views": rounded})


def _move_aside(path: Path) -> None:
    if path.is_file() and path.stat().st_size:
        numbers = (path.with_name(f"{path.stem}-{i}{path.suffix}") for i in count(1))
        kept = next(name for name in numbers if not name.exists())
        path.rename(kept)
        warnings.warn(f"{path} held the records of another run; they are in {kept.name} now", RunWarning, stacklevel=4)


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record, its leading eigenvalues and what they say, by flat names, for loggers.

    >>> sorted(scalars({"step": 3, "covariance": np.array([1.0, 0.5])}))
    ['alpha_req', 'covariance/1', 'covariance/2', 'effective_rank', 'grown', 'participation_ratio', 'step']
    """
    found = {name: value for name, value in record.items() if isinstance(value, int | float)}
    for name in ("eigenvalues", "covariance", "normalized", "hidden"):
        found |= {f"{name}/{j + 1}": float(v) for j, v in enumerate(record.get(name, ())) if j < SHOWN}
    spectrum = record.get("covariance")
    if spectrum is not None:
        found["effective_rank"] = float(effective_rank(spectrum))
        found["participation_ratio"] = float(participation_ratio(spectrum))
        found["grown"] = grown(spectrum)[0]
        if (np.asarray(spectrum) > 0).sum() >= 2:
            found["alpha_req"] = alpha_req(spectrum)
    return found


def loggers(log: Any) -> tuple[Path | None, list[Logger]]:
    """The run folder and the loggers among what a user names: a folder, objects with `.log(dict)` (as wandb has) or
    `.add_scalar(name, value, step)` (TensorBoard's SummaryWriter), or a list of these."""
    folder, found = None, []
    for one in log if isinstance(log, list | tuple) else [] if log is None else [log]:
        if isinstance(one, str | Path):
            folder = Path(one)
        elif callable(getattr(one, "log", None)):
            found.append(one.log)
        elif callable(getattr(one, "add_scalar", None)):
            found.append(_board(one))
        else:
            rule = "must be a folder, or have a method .log(dict) or .add_scalar(name, value, step)"
            raise InputError("log", rule, type(one).__name__)
    return folder, found


def _board(writer: Any) -> Logger:
    def log(numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, numbers["step"])

    return log


def send(record: dict[str, Any], to: list[Logger]) -> None:
    """Give a record's numbers to loggers; one that fails is heard of once and left alone, the training goes on."""
    numbers = scalars(record) if to else {}
    for log in list(to):
        try:
            log(numbers)
        except Exception as error:
            to.remove(log)
            warnings.warn(f"a logger failed and gets no more records: {error!r}", RunWarning, stacklevel=3)
