"""The command line: registers the commands and does nothing else."""

from typing import Annotated

import typer

from stairwise import __version__
from stairwise.commands import data
from stairwise.commands.console import run_app
from stairwise.commands.demo import demo
from stairwise.commands.embed import embed
from stairwise.commands.ntk import ntk
from stairwise.commands.predict import predict
from stairwise.commands.repair import repair
from stairwise.commands.report import report
from stairwise.commands.reproduce import reproduce
from stairwise.commands.spectrum import spectrum
from stairwise.commands.train import train
from stairwise.commands.watch import watch

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")
for command in (demo, predict, embed, train, watch, report, repair, spectrum, ntk, reproduce):
    app.command()(command)
app.add_typer(data.app, name="data")


def _version(asked: bool) -> None:
    if asked:
        print(f"stairwise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Predict, measure and speed up the way self-supervised networks learn: one dimension at a time."""


def main() -> None:
    """Entry point of the `stairwise` command."""
    run_app(app)
