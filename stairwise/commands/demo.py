"""`stairwise demo`: a trained and a predicted staircase in seconds."""

from pathlib import Path
from typing import Annotated

import typer

from stairwise.commands.console import Json, print_json, print_table
from stairwise.commands.reproduce import print_claims, run_with_bar


def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where to write.")] = Path("demo"),
    data: Annotated[str, typer.Option(help="Dataset; the default needs no download.")] = "photos",
    json_: Json = False,
) -> None:
    """Train a linear model on photographs in seconds and compare its staircase with the prediction.

    Example: `stairwise demo --out demo`
    """
    from stairwise.paper import fig1ab
    from stairwise.paper.harness import page

    result = run_with_bar("fig1ab", folder, {"data": data}, force=True)
    report = folder / "report.html"
    page(result).write(report)
    if json_:
        print_json({"report": report, "figure": result.folder / "figure.png", **result.record})
    else:
        print_table(fig1ab.table(result.arrays))
        print_claims(result)
        print(f"figure  {result.folder / 'figure.png'}\nreport  {report}")
    raise typer.Exit(0 if result.holds else 1)
