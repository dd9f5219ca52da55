"""recipe.json of a run: what is wrong with it, and its contents anew from a checkpoint."""

import warnings
from pathlib import Path
from typing import Any

from stairwise.checks import InputError, RunWarning, number, positive_int
from stairwise.files import save_json, set_aside
from stairwise.runs.folder import RECIPE
from stairwise.runs.reader import Run
from stairwise.training.checkpoint import Checkpoint
from stairwise.training.continuing import differing
from stairwise.training.recipe import Recipe

COUNTS = ("steps", "batch", "training_images")  # besides the recipe and α, what pages and studies need


def problem_of(folder: Path, stored: Checkpoint) -> str:
    """What is wrong with recipe.json, by itself or beside a checkpoint; empty if nothing is."""
    problem = unreadable(folder)
    if problem:
        return problem
    run = Run(folder)
    try:
        number(run.facts.get("alpha"), "its alpha")
        for name in COUNTS:
            positive_int(run.facts.get(name), f"its {name}")
    except InputError as error:
        return str(error)
    changed = differing(stored, Recipe().plain() | run.recipe)
    if changed:
        return f"its recipe is not that of {stored.path.name}: {changed}"
    known = {"alpha": stored.facts["alpha"]} | stored.facts.get("about", {})
    wrong = [
        name for name in ("alpha", "batch", "training_images") if run.facts[name] != known.get(name, run.facts[name])
    ]
    return f"its {wrong[0]} is not that of {stored.path.name}" if wrong else ""


def unreadable(folder: Path) -> str:
    """Why recipe.json does not hold a recipe; empty if it does."""
    path = folder / RECIPE
    if not path.exists():
        return "it is missing"
    if not path.is_file():
        return "it is not a file"
    try:
        facts = Run(folder).facts
    except InputError as error:
        return f"it is not valid JSON: {error.__cause__}" if error.__cause__ else "it does not hold a table"
    return "" if isinstance(facts.get("recipe"), dict) else "it holds no recipe"


def renewed(folder: Path, stored: Checkpoint, now: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What recipe.json should hold, given the facts of now; and what is wrong with the present one."""
    problem = problem_of(folder, stored)
    if problem:
        return {**stored.facts.get("about", {}), **now, "rebuilt": stored.path.name}, problem
    facts = Run(folder).facts
    longer = now.get("continued", []) != facts.get("continued", [])
    return facts | (now if longer else {}), ""


def from_checkpoint(stored: Checkpoint) -> dict[str, Any] | None:
    """What recipe.json should hold, from a checkpoint alone; None if it was written by version 0.2 or before."""
    about = stored.facts.get("about")
    if about is None:
        return None
    continued = stored.facts.get("continued")
    now = {"recipe": stored.facts["recipe"], **({"continued": continued} if continued else {})}
    return {**about, **now, "rebuilt": stored.path.name}


def write(folder: Path, facts: dict[str, Any], problem: str) -> None:
    """Write recipe.json if it should change; a damaged one is renamed first."""
    path = folder / RECIPE
    if problem:
        kept = f"; it is now {set_aside(path).name}" if path.exists() else ""
        warnings.warn(f"{path} is rebuilt from {facts['rebuilt']}: {problem}{kept}", RunWarning, stacklevel=5)
    elif facts == Run(folder).facts:
        return
    save_json(path, facts, durable=True)
