"""Rows of benchmarks that train several runs: kept from call to call in one file, and printed at the end."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import stairwise as sw
from stairwise.files import save_json
from stairwise.runs.reader import Run
from stairwise.training.loop import Diverged
from stairwise.training.recipe import Recipe

Row = dict[str, Any]


def stored_rows(path: Path | None) -> list[Row]:
    """Rows that an earlier call has written to a JSON file; none if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path and path.exists() else []


def replaced(rows: Sequence[Row], new: Sequence[Row], order: Sequence[str]) -> list[Row]:
    """The rows with those of one run (its name and seed) replaced or added, in the order of names, then of seeds.

    >>> replaced([{"run": "b"}, {"run": "a", "x": 0}], [{"run": "a", "x": 1}], ["a", "b"])
    [{'run': 'a', 'x': 1}, {'run': 'b'}]
    """
    others = [row for row in rows if _run(row) != _run(new[0])]
    return sorted([*others, *new], key=lambda row: (order.index(row["run"]), row.get("seed", 0)))


def _run(row: Row) -> tuple[str, int]:
    return row["run"], row.get("seed", 0)


def keep(rows: Sequence[Row], new: Row, order: Sequence[str], path: Path | None) -> list[Row]:
    """Print a row as JSON, put it in its place among the others, and write all of them to a file, if one is given."""
    print(json.dumps(new), flush=True)
    whole = replaced(rows, [new], order)
    if path:
        save_json(path, {"runs": whole})
    return whole


def trained(recipe: Recipe, folder: Path) -> Run | None:
    """Train a recipe in a folder, or take its finished run; None if it diverges."""
    try:
        return sw.train(recipe, folder)
    except Diverged:
        return None


def show(header: Sequence[str], cells: Sequence[Sequence[str]], rows: Sequence[Row]) -> None:
    """Print a table as a page can hold it, and the rows as one line of JSON."""
    for line in (header, ["---"] * len(header), *cells):
        print("| " + " | ".join(line) + " |")
    print(json.dumps(rows))
