"""`stairwise train`: train a recipe, draw the staircase and print a summary."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import MofNCompleteColumn

from stairwise.commands.console import Json, bar, print_catalog, print_json, print_table, setting

if TYPE_CHECKING:
    from stairwise.runs.reader import Run


def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see --list) or your own .toml file.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE, repeatable; loss_options.temperature=0.1 for tables.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Run folder; default runs/RECIPE.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    minutes: Annotated[float, typer.Option("--checkpoint-minutes", help="Time between checkpoints.")] = 5.0,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the run in the folder.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard files.")] = False,
    patience: Annotated[
        float, typer.Option(help="Seconds without progress in the first steps after which a note says why; 0: never.")
    ] = 120.0,
    list_: Annotated[bool, typer.Option("--list", help="Show the recipes and their labels.")] = False,
    json_: Json = False,
) -> None:
    """Train a network by a recipe and measure its staircase; run the same command again to continue an interrupted run.

    More `steps` or `epochs` continue a shorter run of the same recipe, finished or not. With a cosine schedule its
    later learning rates follow the new length. Any other change needs another --out, or --restart.

    Writes metrics.jsonl (loss, spectra, probes), checkpoints and figure.png. On several GPUs:
    `torchrun --nproc-per-node 4 -m stairwise train stl10-bt`

    Examples: `stairwise train photos-bt`, `stairwise train photos-bt --set steps=800`,
    `stairwise train cifar10-bt-small --set seed=1 --set d=64`
    """
    from stairwise.training.recipe import load_recipe

    if list_ or not recipe:
        _list(json_)
        return
    from stairwise.distributed import launched_rank
    from stairwise.training.loop import train as train_recipe

    chosen = dict(setting(text) for text in settings or [])
    with bar(recipe, MofNCompleteColumn()) as progress:
        run = train_recipe(
            load_recipe(recipe, chosen),
            folder or Path("runs") / _folder_name(recipe, chosen),
            device=device,
            checkpoint_minutes=minutes,
            restart=restart,
            tensorboard=tensorboard,
            progress=progress,
            patience=patience,
        )
    if launched_rank() == 0:  # only one process reports
        _draw(run)
        _print_summary(run, json_)


def _print_summary(run: "Run", json_: bool) -> None:
    from stairwise.table import Table

    rows = _summary(run)
    if json_:
        print_json({"run": run.folder, "alpha": run.facts["alpha"], **{name: value for name, _, value in rows}})
        return
    shown = [[name, _text(value), unit] for name, unit, value in rows]
    print_table(Table("Result", ["measured", "value", "unit"], shown))
    print(f"run     {run.folder}\nfigure  {run.folder / 'figure.png'}")


def _list(json_: bool) -> None:
    from stairwise.training.recipe import load_recipe, recipe_names

    labels = {name: load_recipe(name).label.strip() for name in recipe_names()}
    if json_:
        print_json(labels)
    else:
        print_catalog(dict.fromkeys(labels, ""), labels)


def _draw(run: "Run") -> None:
    from stairwise.figures.style import style
    from stairwise.figures.training import draw_courses
    from stairwise.files import atomic

    with style(), atomic(run.folder / "figure.png") as part:
        draw_courses([_course(run)]).savefig(part)


def _course(run: "Run") -> Any:
    from stairwise.figures.training import Course

    of = "C" if run.followed == "eigenvalues" else "Cov z"
    name = run.recipe["loss"].replace("_", " ")
    return Course(name, run.times, run.series("loss"), run.series(run.followed), of)


def _summary(run: "Run") -> list[tuple[str, str, Any]]:
    """Name, unit and value of each measurement at the end of a run."""
    course, last = _course(run), run.records[-1]
    spectrum, above = course.spectra[-1], int((course.spectra[-1] > 0.1 * course.spectra[-1, 0]).sum())
    d = run.dimensions(run.followed)
    rows: list[tuple[str, str, Any]] = [
        ("steps", "", last.step),
        ("time t", "Σ lr", last.t),
        ("loss, first record", "", float(course.loss[0])),
        ("loss, last record", "", float(course.loss[-1])),
        (f"largest eigenvalue of {course.of}", "", float(spectrum[0])),
        ("eigenvalues above a tenth of it", f"of {d}" + ", or more" * (above == len(spectrum) < d), above),
        ("wall-clock time", "s", last.seconds),
        ("rate", "views/s", last.views_per_second),
    ]
    for probe in run.recipe.get("probes", []):
        accuracy = run.probes(probe)[1]
        if len(accuracy):
            rows.append((f"{probe} accuracy", "%", 100 * float(accuracy[-1])))
    return rows


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{float(value):,.4g}"


def _folder_name(name: str, settings: dict[str, Any]) -> str:
    """A folder for each setting, whatever the length: a longer run continues a shorter one."""
    parts = [Path(name).stem, *(f"{k}={v}" for k, v in settings.items() if k not in {"steps", "epochs"})]
    return re.sub(r"[^\w.,=+-]+", "_", ",".join(parts))[:120]
