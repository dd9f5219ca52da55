"""`stairwise watch`: the live page of a run."""

from typing import Annotated

import typer

from stairwise.commands.console import Interrupted
from stairwise.commands.report import Followed, RunArgument

__all__ = ["watch"]


def watch(
    run: RunArgument,
    port: Annotated[int, typer.Option(help="On this machine; 0 chooses a free one.")] = 8642,
    spectrum: Followed = "",
) -> None:
    """A live page of a run while it trains: its staircase, and which step comes next. Ctrl-C ends it.

    Only this machine can see it. From another one: `ssh -L 8642:localhost:8642 HOST`

    Example: `stairwise watch runs/photos-bt`
    """
    from stairwise.report.live import live_page

    server = live_page(run, port, spectrum)
    print(f"watching {run} at {server.address} (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except Interrupted:
        print("stopped watching; the run goes on")
    finally:
        server.server_close()
