"""`stairwise reproduce`: figures and tables of the paper, run or drawn from stored results."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table as RichTable

from stairwise.commands.console import Json, bar, err, out, print_json, setting

if TYPE_CHECKING:
    from stairwise.paper.harness import Result

__all__ = ["print_claims", "reproduce", "run_with_bar"]


def reproduce(
    name: Annotated[str, typer.Argument(help="Figure, or `all`; see --list.")] = "",
    data: Annotated[str | None, typer.Option(help="Dataset, where the figure uses one.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, repeatable.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where to write.")] = Path("results"),
    force: Annotated[bool, typer.Option("--force", help="Run again even if it has been run.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Try the machinery in seconds; claims are not judged.")
    ] = False,
    stored: Annotated[
        bool, typer.Option("--from-stored", help="Draw what was measured and stored, run nothing.")
    ] = False,
    stored_in: Annotated[
        Path | None, typer.Option("--stored", help="Folder of stored results; default: those of this package.")
    ] = None,
    store_in: Annotated[Path | None, typer.Option("--store", help="Store arrays and figure in this folder.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the figures and their labels.")] = False,
    json_: Json = False,
) -> None:
    """Draw a figure of the paper, keep its arrays, check its claims; a second run reads the first.

    Examples: `stairwise reproduce fig1ab --data cifar10 --set pixels=unit`, `stairwise reproduce all --from-stored`
    """
    from stairwise.paper.harness import from_stored, smoke_settings, store, stored_names, stored_results
    from stairwise.paper.trained import NeedsGPU

    if list_ or not name:
        _list(json_)
        return
    chosen = dict(setting(text) for text in settings or []) | ({"data": data} if data is not None else {})
    names = _checked_names(name, chosen, stored, stored_in, store_in, smoke, force)
    results: list[Result] = []
    missing: list[str] = []
    where = (stored_in or stored_results()) if stored else Path()
    available = stored_names(where) if stored else names
    if stored:
        _check_available(name, available, where)
    for each in names:
        if each not in available:
            missing.append(f"{each} (not stored)")
            continue
        try:
            made = {**smoke_settings(each), **chosen} if smoke else chosen
            result = from_stored(each, folder, where) if stored else run_with_bar(each, folder, made, force)
        except NeedsGPU:
            if name != "all":
                raise
            missing.append(f"{each} (needs a GPU)")
            continue
        results.append(result)
        _show(result, json_, again=result.cached and not stored)
        if store_in is not None:
            store(result, store_in)
    if json_:
        print_json([{"folder": result.folder, **result.record} for result in results])
    if missing:
        err.print(f"left out: {', '.join(missing)}", highlight=False)
    if smoke:
        err.print("a trial on tiny networks: claims are not judged", highlight=False)
    raise typer.Exit(0 if smoke or all(result.holds for result in results) else 1)


def _list(json_: bool) -> None:
    from stairwise.paper.harness import CATALOG, label

    if json_:
        print_json(CATALOG)
        return
    for known, about in CATALOG.items():
        out.print(f"[bold]{known}[/bold]  {about}", highlight=False)
        print(f"{label(known)}\n")


def _checked_names(
    name: str,
    chosen: dict[str, str],
    stored: bool,
    stored_in: Path | None,
    store_in: Path | None,
    smoke: bool,
    force: bool,
) -> list[str]:
    """The figures to draw; refuses options that contradict one another."""
    from stairwise.checks import InputError, one_of
    from stairwise.paper.harness import CATALOG

    if name == "all" and chosen:
        raise InputError("--data and --set", "belong to one figure", name, "name the figure")
    if stored and (chosen or smoke or force or store_in):
        rule = "cannot go with --data, --set, --smoke, --force or --store"
        raise InputError("--from-stored", rule, None, "it draws what is there")
    if stored_in and not stored:
        raise InputError("--stored", "needs --from-stored", stored_in)
    if smoke and store_in:
        raise InputError("--store", "cannot go with --smoke", store_in, "its numbers mean nothing")
    return list(CATALOG) if name == "all" else [one_of(name, "figure", [*CATALOG, "all"])]


def _check_available(name: str, available: list[str], where: Path) -> None:
    from stairwise.checks import InputError

    if not available or (name != "all" and name not in available):
        wanted = "results" if name == "all" else f"{name}.npz and {name}.json"
        remedy = "run it without --from-stored, or name a folder with --stored"
        raise InputError("--from-stored", f"must find {wanted}", where, remedy)


def run_with_bar(name: str, folder: Path, settings: dict[str, Any], force: bool) -> "Result":
    """Run a figure under a progress bar."""
    from stairwise.paper.harness import run

    with bar(name) as progress:
        return run(name, folder, settings, force, progress)


def _show(result: "Result", quiet: bool, again: bool) -> None:
    """Write the page of a result, and print its claims."""
    from stairwise.paper.harness import page

    page(result).write(result.folder / "report.html")
    if not quiet:
        print_claims(result)
        print(f"{result.folder}{' (read back; --force runs it again)' if again else ''}\n")


def print_claims(result: "Result") -> None:
    """What was checked, with colours."""
    table = RichTable("claim", "measured", "predicted", "expected", "holds", title=f"{result.name}: what was checked")
    for column in table.columns[1:4]:
        column.justify = "right"
    for claim in result.claims:
        predicted = "" if claim.predicted is None else f"{claim.predicted:.4g}"
        holds = "[green]yes[/green]" if claim.holds else "[red]NO[/red]"
        table.add_row(claim.text, f"{claim.measured:.4g}", predicted, claim.expected, holds)
    out.print(table)
