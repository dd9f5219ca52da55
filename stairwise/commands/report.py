"""`stairwise report`: write the page of one or more runs to one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from stairwise.commands.console import Json, print_json, print_table


def run_folder(text: str) -> Path:
    """The folder of a run; an empty name, such as that of an unset variable, is not the current folder."""
    if not text.strip():
        raise typer.BadParameter("must be the folder of a run (got ''): for this folder write .")
    return Path(text)


RunArguments = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        parser=run_folder,
        help="Folders of runs, written by `stairwise train` or by a monitor; several are compared.",
    ),
]
Followed = Annotated[
    str, typer.Option("--spectrum", help="eigenvalues (of C) or covariance; default: the one for the run's loss.")
]


def report(
    runs: RunArguments,
    target: Annotated[
        Path | None,
        typer.Option("--out", help="HTML file; default RUN/report.html, for several runs report.html in this folder."),
    ] = None,
    spectrum: Followed = "",
    json_: Json = False,
) -> None:
    """Write the staircase of a run to one HTML file: its state, steps taken, steps expected, ranks; or compare runs.

    Examples: `stairwise report runs/photos-bt`, `stairwise report runs/a runs/b --out both.html`
    """
    from stairwise.files import check_target
    from stairwise.report.runs_page import runs_page

    if target is not None:
        check_target(target, "--out")  # before the work, not after it
    page = runs_page(runs, spectrum)
    target = target or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    page.write(target)
    if json_:
        compared = [dict(zip(table.header, row, strict=True)) for table in page.summary for row in table.rows]
        print_json({"report": target, "says": page.lead} | ({"runs": compared} if compared else {}))
        return
    for table in page.summary:
        print_table(table)
    print(f"{page.lead}\nreport  {target}")
