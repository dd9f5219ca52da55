"""`stairwise spectrum`: the staircase of a finished training, from its checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn

from stairwise.commands.console import Json, bar, print_json, print_table, setting

if TYPE_CHECKING:
    from stairwise.evaluate.checkpoints import Measured, Source


def spectrum(
    model: Annotated[str, typer.Option(help="package.module:factory of your network; images → z, or (h, z).")],
    checkpoints: Annotated[str, typer.Option(help="Pattern of files, quoted: 'ckpt/*.pt'; safetensors or torch.")],
    data: Annotated[str, typer.Option(help="cifar10, stl10, photos, a folder of images or array:FILE.npy.")],
    options: Annotated[
        list[str] | None, typer.Option("--options", help="KEY=VALUE for the factory, repeatable.")
    ] = None,
    z: Annotated[str, typer.Option(help="Submodule whose output is z; default: the network's output.")] = "",
    h: Annotated[str, typer.Option(help="Submodule whose output is h.")] = "",
    views: Annotated[str, typer.Option(help="Augmentation pipeline; see docs/training.md.")] = "simclr",
    size: Annotated[int, typer.Option(help="Side of the views in pixels; 0: side of the images.")] = 0,
    mean: Annotated[str, typer.Option(help="Channel means, as in your training: 0.485,0.456,0.406.")] = "",
    std: Annotated[str, typer.Option(help="Channel standard deviations: 0.229,0.224,0.225.")] = "",
    n: Annotated[int, typer.Option(help="Number of pairs; 0: the larger of 4 d and 1024.")] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate, which defines the time t = lr × step.")] = 1.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    folder: Annotated[Path, typer.Option("--out", help="Where to write.")] = Path("spectrum"),
    json_: Json = False,
) -> None:
    """Measure the staircase of a finished training from its checkpoints: spectra, steps and ranks.

    Writes metrics.jsonl and report.html. Nothing is trained, and no code from a checkpoint is run. Prints the mean and
    the standard deviation by which the views were normalized: they should be those of your training.

    Example: `stairwise spectrum --model mynet:build --checkpoints 'ckpt/*.pt' --data cifar10`
    """
    from stairwise.evaluate.checkpoints import Source, measure_checkpoints
    from stairwise.report.run_page import TIMELINE, run_page
    from stairwise.training.recipe import parsed

    chosen = {key: parsed(value) for key, value in (setting(text, "--options") for text in options or [])}
    source = Source(
        model, checkpoints, data, chosen, z, h, views, size, _numbers(mean, "--mean"), _numbers(std, "--std"), n, lr
    )
    with bar("checkpoints", MofNCompleteColumn()) as progress:
        measured = measure_checkpoints(source, folder, device, progress)
    page = run_page(folder)
    page.write(folder / "report.html")
    if json_:
        print_json({"report": folder / "report.html", "says": page.lead, **vars(measured)})
        return
    for table in page.tables:
        if table.title != TIMELINE:
            print_table(table)
    print(f"{_normalization(measured, source)}\n{page.lead}\nreport  {folder / 'report.html'}")


def _normalization(measured: "Measured", source: "Source") -> str:
    shown = [f"{name} {', '.join(f'{v:.3g}' for v in getattr(measured, name))}" for name in ("mean", "std")]
    own = [f"--{name}" for name in ("mean", "std") if not getattr(source, name)]
    remark = f"measured on these images; {' and '.join(own)} take those of your training" if own else "as given"
    return f"views normalized by {' and '.join(shown)} ({remark})"


def _numbers(text: str, name: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        from stairwise.checks import InputError

        raise InputError(name, "must be numbers separated by commas", repr(text)) from None
