"""`stairwise watch`: serve the live page of one or more runs."""

from typing import Annotated

import typer

from stairwise.commands.console import Interrupted
from stairwise.commands.report import Followed, RunArguments


def watch(
    runs: RunArguments,
    port: Annotated[int, typer.Option(help="Port on this machine; 0 chooses a free one.")] = 8642,
    spectrum: Followed = "",
) -> None:
    """Serve a live page of one or more runs during training: their staircases and next steps. Ctrl-C stops it.

    It can be viewed on this machine only. From another machine: `ssh -L 8642:localhost:8642 HOST`

    Example: `stairwise watch runs/photos-bt`
    """
    from stairwise.report.live import live_page

    server = live_page(runs, port, spectrum)
    print(f"watching {', '.join(map(str, runs))} at {server.address} (Ctrl-C stops it)", flush=True)
    try:
        server.serve_forever()
    except Interrupted:
        print("stopped watching; the run continues")
    finally:
        server.server_close()
