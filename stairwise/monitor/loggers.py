"""Send records to loggers: wandb, TensorBoard, or any object with a method `.log(dict)`.

All names begin with `stairwise/`, so that nothing of ours falls into the user's own `loss` or `step`. Next to the
numbers of a record go the words about it (`monitor.commentary`), for loggers that take text.
"""

import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stairwise.checks import InputError, RunWarning
from stairwise.runs.record import Record
from stairwise.theory.spectra import (
    alpha_req,
    effective_rank,
    effective_rank_bounds,
    participation_ratio,
    participation_ratio_bounds,
)

PREFIX = "stairwise/"
STEP = f"{PREFIX}step"
SHOWN = 16  # number of eigenvalues per spectrum that are sent to loggers
Values = dict[str, float | str]
Logger = Callable[[Values], None]


def named_numbers(record: Record) -> dict[str, float]:
    """The numbers of a record, its leading eigenvalues and their summaries, by the names that loggers show.

    >>> import numpy as np
    >>> list(named_numbers(Record(step=3, t=0.1, covariance=np.array([1.0, 0.5]))))[:5]
    ['stairwise/step', 'stairwise/t', 'stairwise/skipped', 'stairwise/first_skipped', 'stairwise/covariance/1']
    """
    return {f"{PREFIX}{name}": value for name, value in _numbers(record).items()}


def _numbers(record: Record) -> dict[str, float]:
    known = record.as_json().items()
    numbers = {name: value for name, value in known if isinstance(value, int | float) and name != "planned_updates"}
    for name in ("eigenvalues", "covariance", "normalized", "hidden"):
        values = record.spectrum(name)
        if values is not None:
            numbers |= {f"{name}/{j + 1}": float(v) for j, v in enumerate(values[:SHOWN])}
    numbers |= _summaries(record, "covariance", "") | _summaries(record, "hidden", "hidden_")
    spectrum = record.spectrum("covariance")
    if spectrum is not None and (spectrum > 0).sum() >= 2:
        numbers["alpha_req"] = alpha_req(spectrum)
    return numbers


def _summaries(record: Record, name: str, prefix: str) -> dict[str, float]:
    """Ranks of a spectrum; their bounds, `…_low` and `…_high`, if it holds the leading eigenvalues only."""
    spectrum, d = record.spectrum(name), record.size(name)
    if spectrum is None:
        return {}
    if len(spectrum) == d:
        ranks = {"effective_rank": effective_rank(spectrum), "participation_ratio": participation_ratio(spectrum)}
        return {f"{prefix}{label}": float(value) for label, value in ranks.items()}
    measures = {"effective_rank": effective_rank_bounds, "participation_ratio": participation_ratio_bounds}
    bounds = {label: measure(spectrum, record.total(name), d) for label, measure in measures.items()}
    return {
        f"{prefix}{label}_{end}": float(value)
        for label, both in bounds.items()
        for end, value in zip(("low", "high"), both, strict=True)
    }


def destinations(log: Any) -> tuple[Path | None, list[Logger]]:
    """Split `log` into a run folder and loggers: it is a folder, an object with `.log(dict)` (wandb) or
    `.add_scalar(name, value, step)` (TensorBoard), or a list of these."""
    folder, loggers = None, []
    for one in log if isinstance(log, list | tuple) else [] if log is None else [log]:
        if isinstance(one, str | Path):
            if folder is not None:
                raise InputError(
                    "log", "must name one folder at most", f"{folder} and {one}", "attach a second monitor"
                )
            folder = Path(one)
        elif callable(getattr(one, "log", None)):
            loggers.append(_wandb(one) if _is_wandb(one) else _rows(one))
        elif callable(getattr(one, "add_scalar", None)):
            loggers.append(_board(one))
        else:
            rule = "must be a folder, or have a method .log(dict) or .add_scalar(name, value, step)"
            raise InputError("log", rule, repr(one), 'write log="run", or give a wandb run or a SummaryWriter')
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InputError("log", "must be a folder", f"the file {folder}", "give another name")
    return folder, loggers


def only_numbers(values: Values) -> dict[str, float]:
    """The values without text."""
    return {name: value for name, value in values.items() if not isinstance(value, str)}


def _rows(logger: Any) -> Logger:
    """Log rows of numbers and text; if a row fails with text and not without, of numbers alone from then on."""
    takes_text = True

    def log(values: Values) -> None:
        nonlocal takes_text
        numbers = only_numbers(values)
        try:
            logger.log(dict(values) if takes_text else numbers)
        except Exception as error:
            if not takes_text or len(numbers) == len(values):
                raise
            logger.log(numbers)
            takes_text = False
            _warn_without_text(error)

    return log


def _board(writer: Any) -> Logger:
    takes_text = callable(getattr(writer, "add_text", None))

    def log(values: Values) -> None:
        nonlocal takes_text
        numbers = only_numbers(values)
        for name, value in numbers.items():
            if name != STEP:  # it is the axis
                writer.add_scalar(name, value, numbers[STEP])
        try:
            for name in [name for name in values if takes_text and name not in numbers]:
                writer.add_text(name, values[name], numbers[STEP])
        except Exception as error:
            takes_text = False
            _warn_without_text(error)

    return log


def _warn_without_text(error: Exception) -> None:
    """Never raises, because a logger that does is given up; where warnings are errors, it is said on stderr."""
    words = f"a logger does not take text and gets numbers only: {error!r}"
    try:
        warnings.warn(words, RunWarning, stacklevel=5)
    except Warning:
        print(f"stairwise: {words}", file=sys.stderr)


def _is_wandb(one: Any) -> bool:
    """Whether this looks like a wandb run, or the module `wandb` while a run is active."""
    try:
        return hasattr(one, "define_metric") and "commit" in inspect.signature(one.log).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False


def _wandb(run: Any) -> Logger:
    """Log to a wandb run without moving its step counter, which belongs to the user's own calls of `log`.

    Numbers wait (`commit=False`) for the user's next call. If there was none since our last record, that record is
    committed first: it would be overwritten otherwise.
    """
    run = (getattr(run, "run", None) or run) if inspect.ismodule(run) else run
    run.define_metric(f"{PREFIX}*", step_metric=STEP)
    waiting_since: list[Any] = []

    def log(values: Values) -> None:
        now = getattr(run, "step", None)
        if waiting_since == [now]:
            run.log({}, commit=True)
            now = getattr(run, "step", None)
        run.log(values, commit=False)
        waiting_since[:] = [now]

    return log


def send(record: Record, loggers: list[Logger], said: Values) -> None:
    """Send a record, and what is said about it, to loggers, by names under `stairwise/`.

    A logger that fails is reported once and disabled.
    """
    values: Values = {}
    if loggers:
        values = {**named_numbers(record), **{f"{PREFIX}{name}": value for name, value in said.items()}}
    for log in list(loggers):
        try:
            log(values)
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
