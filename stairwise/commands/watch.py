"""`stairwise watch`: serve the live page of a run."""

from typing import Annotated

import typer

from stairwise.commands.console import Interrupted
from stairwise.commands.report import Followed, RunArgument


def watch(
    run: RunArgument,
    port: Annotated[int, typer.Option(help="Port on this machine; 0 chooses a free one.")] = 8642,
    spectrum: Followed = "",
) -> None:
    """Serve a live page of a run during training: its staircase and the next steps. Ctrl-C stops it.

    It can be viewed on this machine only. From another machine: `ssh -L 8642:localhost:8642 HOST`

    Example: `stairwise watch runs/photos-bt`
    """
    from stairwise.report.live import live_page

    server = live_page(run, port, spectrum)
    print(f"watching {run} at {server.address} (Ctrl-C stops it)", flush=True)
    try:
        server.serve_forever()
    except Interrupted:
        print("stopped watching; the run continues")
    finally:
        server.server_close()
