"""`stairwise reproduce`: figures and tables of the paper, computed or drawn from stored results."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stairwise.commands.console import Json, bar, err, out, print_catalog, print_json, print_table, setting

if TYPE_CHECKING:
    from stairwise.paper.harness import Result


Smoke = Annotated[bool, typer.Option("--smoke", help="Test the code in seconds; claims are not judged.")]
Stored = Annotated[bool, typer.Option("--from-stored", help="Draw stored measurements instead of running.")]
StoredIn = Annotated[
    Path | None, typer.Option("--stored", help="Folder of stored results; default: those of this package.")
]
Join = Annotated[bool, typer.Option("--join", help="With --store: add these runs to the stored result of others.")]
StoreIn = Annotated[Path | None, typer.Option("--store", help="Also store arrays and figure in this folder.")]


def reproduce(
    name: Annotated[str, typer.Argument(help="Figure, or `all`; see --list.")] = "",
    data: Annotated[str | None, typer.Option(help="Dataset, if the figure uses one.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, repeatable.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where to write.")] = Path("results"),
    force: Annotated[bool, typer.Option("--force", help="Run again even if there is a result.")] = False,
    smoke: Smoke = False,
    stored: Stored = False,
    stored_in: StoredIn = None,
    store_in: StoreIn = None,
    join: Join = False,
    list_: Annotated[bool, typer.Option("--list", help="Show the figures and their labels.")] = False,
    json_: Json = False,
) -> None:
    """Compute a figure of the paper, store its arrays and check its claims; a second run reads the stored result.

    Examples: `stairwise reproduce fig1ab --data cifar10 --set pixels=unit`, `stairwise reproduce all --from-stored`
    """
    from stairwise.paper.harness import check_place, joined, store, stored_results

    if list_ or not name:
        _list(json_)
        return
    chosen = dict(setting(text) for text in settings or []) | ({"data": data} if data is not None else {})
    names = _checked_names(name, chosen, stored, stored_in, store_in, smoke, force)
    _check_join(join, store_in)
    if store_in is not None:
        for one in names:
            check_place(one, chosen, store_in)
    where = (stored_in or stored_results()) if stored else None
    began = perf_counter()
    results: list[Result] = []
    missing: list[str] = []
    for result in _results(names, folder, chosen, where, force, smoke, missing):
        result = joined(result, store_in) if join and store_in is not None else result
        results.append(result)
        _show(result, json_, again=result.cached and not stored)
        if store_in is not None:
            store(result, store_in)
    if json_:
        print_json([{"folder": result.folder, **result.record} for result in results])
    if missing:
        err.print(f"left out: {', '.join(missing)}", highlight=False)
    (err if json_ else out).print(
        _tally(results, perf_counter() - began, judged=not smoke), highlight=False, soft_wrap=True, markup=False
    )
    if smoke:
        err.print("this was a quick test of the code: claims are not judged", highlight=False)
    raise typer.Exit(0 if smoke or all(result.holds for result in results) else 1)


def _tally(results: Sequence["Result"], seconds: float, judged: bool = True) -> str:
    """How many figures were made and how many checks held; those that failed are named. Notes are not checks."""
    made = f"{len(results)} figure{'' if len(results) == 1 else 's'}"
    checks = [(result.name, claim) for result in results for claim in result.claims if claim.judged]
    failed = [f"{name}: {claim.text}" for name, claim in checks if not claim.holds]
    if not judged:
        return f"{made} made in {seconds:.0f} s"
    held = f"{len(checks) - len(failed)} of {len(checks)} checks held"
    return "\n  failed: ".join([f"{made} made in {seconds:.0f} s, {held}", *failed])


def _results(
    names: list[str],
    folder: Path,
    chosen: dict[str, str],
    where: Path | None,
    force: bool,
    smoke: bool,
    missing: list[str],
) -> Iterator["Result"]:
    """Run figures, or draw them from the stored results in `where`; those left out are added to `missing`."""
    from stairwise.checks import InputError
    from stairwise.paper.harness import from_stored, place_of, smoke_settings, stored_names
    from stairwise.paper.trained import NeedsGPU

    available = [name for name in names if where is None or name in stored_names(place_of(name, where))]
    if where is not None and not set(names) & set(available):
        wanted = f"{names[0]}.npz and {names[0]}.json" if len(names) == 1 else "results"
        remedy = "run it without --from-stored, or name a folder with --stored"
        raise InputError("--from-stored", f"must find {wanted}", where, remedy)
    for name in names:
        if name not in available:
            missing.append(f"{name} (not stored)")
            continue
        if where is not None:
            yield from_stored(name, folder, where)
            continue
        try:
            result = run_with_bar(name, folder, (smoke_settings(name) if smoke else {}) | chosen, force)
        except NeedsGPU:
            if len(names) == 1:
                raise
            missing.append(f"{name} (needs a GPU)")
            continue
        yield result


def _list(json_: bool) -> None:
    from stairwise.paper.harness import CATALOG, label

    if json_:
        print_json(CATALOG)
    else:
        print_catalog(CATALOG, {name: label(name) for name in CATALOG})


def _checked_names(
    name: str,
    chosen: dict[str, str],
    stored: bool,
    stored_in: Path | None,
    store_in: Path | None,
    smoke: bool,
    force: bool,
) -> list[str]:
    """The figures to draw; raises an error if options contradict each other."""
    from stairwise.checks import InputError, one_of
    from stairwise.paper.harness import CATALOG

    if name == "all" and chosen:
        raise InputError("--data and --set", "belong to one figure", name, "name a single figure")
    if stored and (chosen or smoke or force or store_in):
        rule = "cannot be combined with --data, --set, --smoke, --force or --store"
        raise InputError("--from-stored", rule, None, "it only draws stored results")
    if stored_in and not stored:
        raise InputError("--stored", "needs --from-stored", stored_in)
    if smoke and store_in:
        raise InputError("--store", "cannot be combined with --smoke", store_in, "its numbers mean nothing")
    return list(CATALOG) if name == "all" else [one_of(name, "figure", [*CATALOG, "all"])]


def _check_join(join: bool, store_in: Path | None) -> None:
    from stairwise.checks import InputError

    if join and store_in is None:
        raise InputError("--join", "needs --store", None, "name the folder of the stored results")


def run_with_bar(name: str, folder: Path, settings: dict[str, Any], force: bool) -> "Result":
    from stairwise.files import check_folder
    from stairwise.paper.harness import run

    check_folder(folder, "--out")  # before the work, not after it
    with bar(name) as progress:
        return run(name, folder, settings, force, progress)


def _show(result: "Result", quiet: bool, again: bool) -> None:
    """Write the page of a result, and print its claims."""
    from stairwise.paper.harness import page

    page(result).write(result.folder / "report.html")
    if not quiet:
        print_claims(result)
        print(f"{result.folder}{' (read back from an earlier run; --force runs it again)' if again else ''}\n")


def print_claims(result: "Result") -> None:
    from stairwise.paper.harness import claims_table
    from stairwise.table import Table

    claims, colored = claims_table(result.claims), {"yes": "[green]yes[/green]", "NO": "[red]NO[/red]"}
    rows = [[*row, colored[holds]] for *row, holds in claims.rows]
    print_table(Table(f"{result.name}: what was checked", claims.header, rows))
