"""Send records to loggers: wandb, TensorBoard, or any object with a method `.log(dict)`."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stairwise.checks import InputError, RunWarning
from stairwise.runs.record import Record
from stairwise.theory.spectra import alpha_req, effective_rank, grown, participation_ratio

SHOWN = 16  # number of eigenvalues per spectrum that are sent to loggers
Logger = Callable[[dict[str, float]], None]


def _scalars(record: Record) -> dict[str, float]:
    """The numbers of a record, its leading eigenvalues and their summaries, by flat names.

    >>> import numpy as np
    >>> sorted(_scalars(Record(step=3, t=0.1, covariance=np.array([1.0, 0.5]))))
    ['alpha_req', 'covariance/1', 'covariance/2', 'effective_rank', 'first_skipped', 'grown', 'participation_ratio',
    'skipped', 'step', 't']
    """
    numbers = {name: value for name, value in record.as_json().items() if isinstance(value, int | float)}
    for name in ("eigenvalues", "covariance", "normalized", "hidden"):
        values = record.spectrum(name)
        if values is not None:
            numbers |= {f"{name}/{j + 1}": float(v) for j, v in enumerate(values[:SHOWN])}
    spectrum = record.spectrum("covariance")
    if spectrum is not None:
        numbers["effective_rank"] = float(effective_rank(spectrum))
        numbers["participation_ratio"] = float(participation_ratio(spectrum))
        numbers["grown"] = grown(spectrum)[0]
        if (spectrum > 0).sum() >= 2:
            numbers["alpha_req"] = alpha_req(spectrum)
    return numbers


def destinations(log: Any) -> tuple[Path | None, list[Logger]]:
    """Split `log` into a run folder and loggers: it is a folder, an object with `.log(dict)` (wandb) or
    `.add_scalar(name, value, step)` (TensorBoard), or a list of these."""
    folder, loggers = None, []
    for one in log if isinstance(log, list | tuple) else [] if log is None else [log]:
        if isinstance(one, str | Path):
            folder = Path(one)
        elif callable(getattr(one, "log", None)):
            loggers.append(one.log)
        elif callable(getattr(one, "add_scalar", None)):
            loggers.append(_board(one))
        else:
            rule = "must be a folder, or have a method .log(dict) or .add_scalar(name, value, step)"
            raise InputError("log", rule, type(one).__name__)
    return folder, loggers


def _board(writer: Any) -> Logger:
    def log(numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, numbers["step"])

    return log


def send(record: Record, loggers: list[Logger]) -> None:
    """Send the numbers of a record to loggers. A logger that fails is reported once and then disabled."""
    numbers = _scalars(record) if loggers else {}
    for log in list(loggers):
        try:
            log(numbers)
        except Exception as error:
            loggers.remove(log)
            warnings.warn(f"a logger failed and has been disabled: {error!r}", RunWarning, stacklevel=3)


def tensorboard_in(folder: Path, step: int) -> Any:
    """Make a TensorBoard writer that continues after `step`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("tensorboard", "must be installed", None, "pip install tensorboard") from error
    return SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)
