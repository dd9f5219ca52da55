"""`stairwise repair`: show what is wrong in the folder of a run, and repair it."""

from pathlib import Path
from typing import Annotated

import typer

from stairwise.commands.console import Json, print_json


def repair(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    yes: Annotated[bool, typer.Option("--yes", help="Repair it; without this, only show what is wrong.")] = False,
    json_: Json = False,
) -> None:
    """Show what is wrong in the folder of a run; with --yes, repair it. Nothing is lost.

    Damaged checkpoints are renamed to NAME.damaged, a damaged recipe.json is rebuilt from a checkpoint, the rest of a
    line at the end of metrics.jsonl moves to metrics.jsonl.damaged, and unfinished files of killed processes are
    deleted. The exit code is 0 if nothing is wrong or all has been repaired, 1 if something remains, 2 after an error.

    Examples: `stairwise repair runs/photos-bt`, `stairwise repair runs/photos-bt --yes`
    """
    from stairwise.training.repair import examine
    from stairwise.training.repair import repair as repair_run

    found = repair_run(folder) if yes else examine(folder)
    remaining = [finding for finding in found if not yes or finding.mend is None]
    if json_:
        keys = ("path", "problem", "remedy")
        listed = [{key: getattr(f, key) for key in keys} | {"repairable": f.mend is not None} for f in found]
        print_json({"run": folder, "repaired": len(found) - len(remaining), "found": listed})
    elif not found:
        print(f"nothing is wrong in {folder}")
    else:
        for finding in found:
            done = "done: " if yes and finding.mend else "can be repaired: " if finding.mend else ""
            print(f"{finding.path.relative_to(folder)}: {finding.problem}\n    {done}{finding.remedy}")
        if any(finding.mend for finding in remaining):
            print(f"to repair: stairwise repair {folder} --yes")
    if remaining:
        raise typer.Exit(1)
