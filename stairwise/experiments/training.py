"""`stairwise train`: train by a recipe, draw the staircase, say what was learned."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError, one_of
from stairwise.files import atomic
from stairwise.losses import OF_CORRELATION
from stairwise.monitor.log import read_log
from stairwise.monitor.sinks import METRICS, PICTURE
from stairwise.report.page import Page, Table
from stairwise.report.run_page import run_page
from stairwise.report.watch import Watch
from stairwise.train.loop import Progress, train
from stairwise.train.process import launched_rank
from stairwise.train.recipe import load_recipe
from stairwise.train.run import RECIPE, Run

__all__ = ["Summary", "course_of", "page_of", "summarize", "train_and_draw", "watch"]


def train_and_draw(
    name: str,
    settings: dict[str, Any],
    folder: Path | None,
    device: str,
    minutes: float,
    restart: bool,
    tensorboard: bool,
    progress: Progress,
) -> Run | None:
    """Train; the first process also draws figure.png and returns the run."""
    recipe = load_recipe(name, settings)
    folder = folder or Path("runs") / _folder_name(name, settings)
    run = train(
        recipe,
        folder,
        device=device,
        checkpoint_minutes=minutes,
        restart=restart,
        tensorboard=tensorboard,
        progress=progress,
    )
    if launched_rank() != 0:
        return None
    draw(run)
    return run


def draw(run: Run) -> None:
    """RUN/figure.png."""
    from stairwise.figures.style import style
    from stairwise.figures.training import draw_courses

    with style():
        figure = draw_courses([course_of(run)])
        with atomic(run.folder / "figure.png") as part:
            figure.savefig(part)


def course_of(run: Run, name: str = "") -> Any:
    """A run as it is drawn."""
    from stairwise.figures.training import Course

    key = _spectrum_of(run)
    of = "C" if key == "eigenvalues" else "Cov z"
    return Course(name or run.recipe.loss.replace("_", " "), run.times, run.series("loss"), run.series(key), of)


def page_of(folder: Path, spectrum: str = "") -> Page:
    """The HTML page of a run, of ours or of a loop that a monitor was attached to."""
    if spectrum:
        one_of(spectrum, "--spectrum", ("eigenvalues", "covariance"))
    if folder.is_file():
        raise InputError("run", "must be a folder", folder, "name the folder that holds metrics.jsonl")
    records, bad = read_log(folder / METRICS)
    if not records:
        raise InputError("run", f"must be a folder with a {METRICS} that holds records", folder)
    facts = {"records": f"{bad} damaged lines left out"} if bad else {}
    planned = None
    if (folder / RECIPE).is_file():
        run = Run(folder)
        try:
            spectrum = spectrum or _spectrum_of(run)
            settings = ", ".join(f"{k} = {v}" for k, v in run.facts["recipe"].items() if k != "label")
            facts |= {"recipe": settings, "α": f"{run.facts['alpha']:.4g}"}
            facts |= {key: str(run.facts.get(key)) for key in ("device", "commit", "versions", "made")}
            planned = run.planned()
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(str(folder / RECIPE), "must be as `stairwise train` wrote it", repr(error)) from error
    return run_page(folder.resolve().name, records, spectrum or "covariance", facts, planned, _views(folder / PICTURE))


def _views(path: Path) -> NDArray[np.float64] | None:
    """Embeddings in their two leading modes, if a whole file of them is there."""
    try:
        found = np.array(json.loads(path.read_text(encoding="utf-8"))["views"], dtype=np.float64)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.ndim == 3 and found.shape[::2] == (2, 2) else None


def watch(folder: Path, port: int = 0, spectrum: str = "") -> Watch:
    """A server of the live page of a run, not yet serving; `address` is where it will be."""
    if not folder.is_dir():
        raise InputError("run", "must be a folder", folder, "start the run first, or check its name")
    if spectrum:
        one_of(spectrum, "--spectrum", ("eigenvalues", "covariance"))

    def stamp() -> str:
        """Changes when a file of the run does."""
        found = []
        for name in (METRICS, PICTURE, RECIPE):
            try:
                state = (folder / name).stat()
                found.append(f"{state.st_mtime_ns:x}-{state.st_size:x}")
            except OSError:
                found.append("")
        return ".".join(found)

    return Watch(stamp, lambda: page_of(folder, spectrum), port)


def _spectrum_of(run: Run) -> str:
    """Eigenvalues of C for losses made of it (unless they standardize first), of the covariance for the others."""
    standardized = run.recipe.loss == "barlow_twins" and run.recipe.loss_options.get("batch_norm", True)
    return "eigenvalues" if run.recipe.loss in OF_CORRELATION and not standardized else "covariance"


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers."""

    folder: Path
    facts: dict[str, Any]
    rows: list[tuple[str, str, Any]]

    def table(self) -> Table:
        """For people."""
        return Table("What was learned", ["measured", "value", "unit"], [[n, _text(v), u] for n, u, v in self.rows])

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {"run": self.folder, "alpha": self.facts["alpha"], **{n: v for n, _, v in self.rows}}


def summarize(run: Run) -> Summary:
    """The end of a run."""
    course, last = course_of(run), run.records[-1]
    spectrum = course.spectra[-1]
    rows: list[tuple[str, str, Any]] = [
        ("steps", "", last["step"]),
        ("time t", "Σ lr", last["t"]),
        ("loss, first record", "", float(course.loss[0])),
        ("loss, last record", "", float(course.loss[-1])),
        (f"largest eigenvalue of {course.of}", "", float(spectrum[0])),
        ("eigenvalues above a tenth of it", f"of {len(spectrum)}", int((spectrum > 0.1 * spectrum[0]).sum())),
        ("wall-clock time", "s", last["seconds"]),
        ("rate", "views/s", last["views_per_second"]),
    ]
    for probe in run.recipe.probes:
        accuracy = run.probes(probe)[1]
        if len(accuracy):
            rows.append((f"{probe} accuracy", "%", 100 * float(accuracy[-1])))
    return Summary(run.folder, run.facts, rows)


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{np.float64(value):,.4g}"


def _folder_name(name: str, settings: dict[str, Any]) -> str:
    parts = [Path(name).stem, *(f"{k}={v}" for k, v in settings.items())]
    return re.sub(r"[^\w.,=+-]+", "_", ",".join(parts))[:120]
