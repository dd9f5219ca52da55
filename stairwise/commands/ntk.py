"""`stairwise ntk`: tangent kernels of trained runs, and the embeddings that the theory predicts from them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stairwise.commands.console import Json, bar, print_json, print_table
from stairwise.commands.report import run_folder

if TYPE_CHECKING:
    from stairwise.ntk.study import Drift, Tangent


def ntk(
    runs: Annotated[
        list[Path], typer.Argument(parser=run_folder, help="Folders of finished runs; several are also compared.")
    ],
    n: Annotated[int | None, typer.Option(help="Number of pairs; default: 1000, or all images if fewer.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of images and views.")] = 0,
    precision: Annotated[str, typer.Option(help="float32, tf32, float16 or float64.")] = "float32",
    initial: Annotated[bool, typer.Option(help="Also predict from the kernel at initialization.")] = True,
    keep_kernel: Annotated[bool, typer.Option("--keep-kernel", help="Also store the kernel itself.")] = False,
    over_time: Annotated[
        bool, typer.Option("--over-time", help="Measure its change instead, for runs trained with --set keep=10.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    json_: Json = False,
) -> None:
    """Compute the tangent kernel of trained networks, and how much of their embeddings the theory predicts from it.

    Writes RUN/ntk/tangent.json, tangent.npz and figure.png; with --over-time drift.npz and drift.png.

    Examples: `stairwise ntk runs/photos-bt --n 200`, `stairwise ntk runs/cifar10-*-d50`
    """
    from stairwise.runs.folder import KERNELS
    from stairwise.runs.reader import Run
    from stairwise.training.studies import drift_of, study_of

    studies: dict[Path, Tangent] = {}
    drifts: dict[Path, Drift] = {}
    with bar("") as progress:
        for folder in runs:
            run = Run(folder)
            pairs = n if n is not None else min(1000, run.count("training_images"))
            if over_time:
                drifts[folder] = drift_of(run, pairs, seed, device, precision, progress)
            else:
                studies[folder] = study_of(run, pairs, seed, device, precision, initial, progress)
    files: list[Path] = []
    for folder, one in studies.items():
        files += [*one.write(folder / KERNELS, keep_kernel), *one.draw(folder / KERNELS)]
    for folder, drift in drifts.items():
        files += [*drift.write(folder / KERNELS), *drift.draw(folder / KERNELS)]
    _print(files, studies, drifts, json_)


def _print(files: list[Path], studies: dict[Path, "Tangent"], drifts: dict[Path, "Drift"], json_: bool) -> None:
    from stairwise.ntk.study import compare

    if json_:
        scores = {folder: one.scores for folder, one in studies.items()}
        moved = {folder: {k: v for k, v in vars(drift).items() if k != "name"} for folder, drift in drifts.items()}
        print_json({"files": files, "scores": scores, "over_time": moved})
        return
    for table in (*(one.table() for one in studies.values()), *(drift.table() for drift in drifts.values())):
        print_table(table)
    if len(studies) > 1:
        print_table(compare(list(studies.values())))
    print("\n".join(map(str, files)))
