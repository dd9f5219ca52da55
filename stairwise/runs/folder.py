"""Layout of a run folder, and writing to it."""

import json
import shutil
import warnings
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import RunWarning
from stairwise.files import save_json
from stairwise.runs.log import MetricsLog
from stairwise.runs.record import Record

METRICS = "metrics.jsonl"  # one line per record
PICTURE = "embeddings.json"  # the newest embeddings in their two leading modes
RECIPE = "recipe.json"  # the recipe and the provenance of the run
CHECKPOINTS = "checkpoints"  # the two newest checkpoints
WEIGHTS = "weights"  # weights kept during training, if the recipe sets `keep`
KERNELS = "ntk"  # studies of the tangent kernel
FOLLOWED = "followed"  # embeddings and representations of fixed views, one file per record, if it sets `follow`


class RunFolder:
    """Writes metrics.jsonl and embeddings.json.

    `size`: keep this many bytes of metrics.jsonl and continue after them. None: a new run; when it writes its first
    record, it renames the metrics.jsonl of an earlier run.
    """

    def __init__(self, folder: str | Path, size: int | None = None) -> None:
        self.folder = Path(folder)
        self._log = None if size is None else MetricsLog(self.folder / METRICS, size)

    @property
    def size(self) -> int:
        """Size of metrics.jsonl in bytes."""
        return self._log.size if self._log is not None else 0

    def write(self, record: Record) -> None:
        if self._log is None:
            rename_log(self.folder)
            self._log = MetricsLog(self.folder / METRICS)
        self._log.write(record)
        if record.leading is not None:
            digits = 6 - int(np.ceil(np.log10(max(np.abs(record.leading).max(), 1e-300))))
            views = np.round(record.leading, digits)
            save_json(self.folder / PICTURE, {"step": record.step, "t": record.t, "views": views})

    def sync(self) -> None:
        """Flush the records to disk, before a checkpoint refers to them."""
        if self._log is not None:
            self._log.sync()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def read_picture(folder: Path) -> NDArray[np.float64] | None:
    """Both views of some pairs in their two leading modes, (2, pairs, 2); None if the file is missing or damaged."""
    try:
        views = np.array(json.loads((folder / PICTURE).read_text(encoding="utf-8"))["views"], dtype=np.float64)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return views if views.ndim == 3 and views.shape[::2] == (2, 2) else None


def discard(folder: Path) -> None:
    """Remove all files of a run from its folder, and nothing else."""
    for name in (CHECKPOINTS, WEIGHTS, KERNELS, FOLLOWED):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (METRICS, PICTURE, RECIPE):
        (folder / name).unlink(missing_ok=True)


def rename_log(folder: Path) -> None:
    """Rename the metrics.jsonl of an earlier run, if there is one."""
    path = folder / METRICS
    if path.is_file() and path.stat().st_size:
        numbers = (path.with_name(f"{path.stem}-{i}{path.suffix}") for i in count(1))
        kept = next(name for name in numbers if not name.exists())
        path.rename(kept)
        warnings.warn(f"{path} held the records of another run; they are now in {kept.name}", RunWarning, stacklevel=4)
