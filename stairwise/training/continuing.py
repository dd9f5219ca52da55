"""What may change when a run continues: nothing that has shaped its course so far; but it may become longer."""

from dataclasses import replace
from typing import Any

from stairwise.checks import InputError
from stairwise.training.checkpoint import Checkpoint
from stairwise.training.recipe import Recipe
from stairwise.training.schedule import Schedule
from stairwise.training.setup import Calendar, Material

FREE = {"label", "keep", "held_out", "follow"}  # settings that do not change the training
LENGTH = {"epochs", "steps"}  # settings of the length, which may grow


def check_same(stored: Checkpoint, recipe: Recipe) -> None:
    """Refuse to continue a run by another recipe; `continued_calendar` judges its length."""
    changes = differing(stored, recipe.plain())
    if changes:
        rule, remedy = "contains a run of another recipe", "give another --out, or --restart"
        raise InputError("run folder", rule, f"{stored.path}: {changes}", remedy)


def differing(stored: Checkpoint, here: dict[str, Any]) -> str:
    """Settings that differ between a checkpoint and `here` and shape the training, in words; empty if none does."""
    there = Recipe().plain() | stored.facts["recipe"]  # defaults for settings that are newer
    keys = [k for k in here if k not in FREE | LENGTH and there.get(k) != here[k]]
    return ", ".join(f"{k} = {there.get(k)!r} there, {here[k]!r} here" for k in keys[:4])


def continued_calendar(
    recipe: Recipe, material: Material, stored: Checkpoint | None
) -> tuple[Calendar, list[list[int]]]:
    """The calendar of a run, and [step, new number of steps] for every time that it was made longer."""
    size = material.training, material.batch
    if stored is None:
        return Calendar(recipe, *size), []
    continued = [*stored.facts.get("continued", [])]
    before, total = _steps_before(recipe, stored, *size), Calendar(recipe, *size).total
    if total < before:
        remedy = f"ask for at least {before} steps, give another --out, or --restart"
        raise InputError("run folder", "contains a longer run", f"{before} steps there, {total} here", remedy)
    if total > before:
        continued.append([stored.facts["step"], total])
    return Calendar(recipe, *size, begun=continued[-1][0] if continued else 0), continued


def note_of_length(recipe: Recipe, material: Material, stored: Checkpoint, schedule: Schedule) -> str:
    """What changes for a run that is made longer, in words."""
    step, before = stored.facts["step"], _steps_before(recipe, stored, material.training, material.batch)
    note = f"the run of {before} steps goes on after step {step}, up to step {schedule.total}"
    if recipe.sizes:
        note += f"; from here on views have the sizes of a run of {schedule.total} steps"
    if schedule.kind == "constant":
        return note
    last = recipe.lr * replace(schedule, total=before).factor(max(step - 1, 0))
    now = recipe.lr * schedule.factor(step)
    return (
        f"{note}; from here on the learning rate follows the schedule of {schedule.total} steps (it was {last:.3g} and "
        f"is now {now:.3g}), so the end differs from that of a run begun with {schedule.total} steps: "
        "--restart begins anew"
    )


def _steps_before(recipe: Recipe, stored: Checkpoint, training: int, batch: int) -> int:
    there: dict[str, Any] = {k: stored.facts["recipe"].get(k, getattr(Recipe(), k)) for k in LENGTH}
    return Calendar(replace(recipe, **there), training, batch).total
