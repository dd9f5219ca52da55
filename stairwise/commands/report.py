"""`stairwise report`: write the page of a run to one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from stairwise.commands.console import Json, print_json

RunArgument = Annotated[Path, typer.Argument(help="Folder of a run, written by `stairwise train` or by a monitor.")]
Followed = Annotated[
    str, typer.Option("--spectrum", help="eigenvalues (of C) or covariance; default: the one for the run's loss.")
]


def report(
    run: RunArgument,
    target: Annotated[Path | None, typer.Option("--out", help="HTML file; default RUN/report.html.")] = None,
    spectrum: Followed = "",
    json_: Json = False,
) -> None:
    """Write the staircase of a run to one HTML file: steps taken, steps expected, ranks, and advice.

    Example: `stairwise report runs/photos-bt`
    """
    from stairwise.report.run_page import run_page

    page = run_page(run, spectrum)
    target = target or run / "report.html"
    page.write(target)
    if json_:
        print_json({"report": target, "says": page.lead})
    else:
        print(f"{page.lead}\nreport  {target}")
