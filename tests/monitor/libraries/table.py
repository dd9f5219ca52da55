"""The table of libraries in docs/staircase.md: written from what ran, and compared with it by the tests.

python -m tests.monitor.libraries --write    run all cases, and write the table
"""

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.corpus.page import markdown
from tests.monitor.libraries.harness import Case, Run, same, verdict
from tests.monitor.libraries.lightly_examples import EXAMPLES
from tests.monitor.libraries.shape_cases import IN_HUGGING_FACE, IN_LIGHTNING, IN_PLAIN_LOOPS, UNDER_DDP
from tests.monitor.libraries.trainers import in_hugging_face, in_lightning, in_plain_loop, under_ddp

PAGE = Path(__file__).parents[3] / "docs" / "staircase.md"
BETWEEN = re.compile(r"(<!-- libraries -->\n).*?(\n<!-- end -->)", re.S)
HEAD = ["library", "method", "line", "recorded"]
LIGHTLY = "lightly 1.6"

CASES = {(LIGHTLY, name): (in_lightning, case) for name, case in EXAMPLES.items()}
CASES |= {key: (in_lightning, case) for key, case in IN_LIGHTNING.items()}
CASES |= {key: (in_hugging_face, case) for key, case in IN_HUGGING_FACE.items()}
CASES |= {key: (under_ddp, case) for key, case in UNDER_DDP.items()}
CASES |= {key: (in_plain_loop, case) for key, case in IN_PLAIN_LOOPS.items()}
NAMES = {in_lightning: "SpectrumCallback", in_hugging_face: "SpectrumTrainerCallback"}


class Outcome(NamedTuple):
    """What came of a case.

    Attributes:
        first, second: verdicts on the documented line, and on the one to use instead.
        named: a warning names that line, or says that there is no pair of views.
        unchanged: the weights are those of a training without the monitor.
        said: all warnings.
    """

    first: str
    second: str | None
    named: bool
    unchanged: bool
    said: list[str]


def outcome(trainer: Any, case: Case, folder: Path) -> Outcome:
    """Train alone, with the documented line, and, where a warning names another, with that."""
    alone: Run = trainer(case, folder / "alone", None)
    if alone.error is not None:
        raise alone.error
    watched = trainer(case, folder / "watched", case.line)
    first, second, unchanged = verdict(case, watched), None, same(alone.weights, watched.weights)
    if first == "told" and case.instead is not None:
        other = replace(case, line=case.instead, by_hand=not case.instead)
        run = trainer(other, folder / "instead", case.instead)
        second, unchanged = verdict(other, run), unchanged and same(alone.weights, run.weights)
    return Outcome(first, second, names(watched.said, case), unchanged, watched.said)


def names(said: list[str], case: Case) -> bool:
    """Whether one of the warnings names the line to use instead."""
    words = [f'{k}="{v}"' if isinstance(v, str) else f"{k}=" for k, v in (case.instead or {}).items()] or ["update("]
    if case.z is None:
        words = ["pair of views"]
    return any(all(word in message for word in words) for message in said)


def written(trainer: Any, line: dict[str, Any]) -> str:
    """A line as it is written in a script."""
    quote = '"{}"' if trainer in NAMES else "model.{}"
    parts = [f"{k}={quote.format(v) if isinstance(v, str) else '…'}" for k, v in line.items()]
    parts += [] if trainer in NAMES else ["…"]
    return f"`{NAMES.get(trainer, 'attach')}({', '.join(parts)})`"


def cells(trainer: Any, case: Case, result: Outcome) -> tuple[str, str]:
    """Line and what it records."""
    line, by_hand = written(trainer, case.line), "`watch.update(z_a, z_b, loss=loss)`"
    recorded = "z" + (f" of {case.views}" if case.views else "") + (", h" if case.h is not None else "")
    if any("backbone was not seen" in message for message in result.said) and result.first == "right":
        recorded += "; it says that h is not seen"
    if result.first == "right":
        return (f"{line}, {by_hand}" if case.by_hand else line), recorded
    if result.first == "told" and result.named and case.z is None:
        return line, "nothing; it says that there is no pair of views"
    if (result.first, result.second) == ("told", "right") and result.named:
        return (written(trainer, case.instead) if case.instead else by_hand), f"{recorded}; {line} names this line"
    return line, f"first {result.first}, then {result.second}, named: {result.named}"


def table(rows: dict[tuple[str, str], tuple[str, str]]) -> str:
    """Methods with the same line and outcome share a row."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for (library, method), (line, recorded) in rows.items():
        groups.setdefault((library, line, recorded), []).append(method)
    return markdown([HEAD, *([lib, ", ".join(names), line, what] for (lib, line, what), names in groups.items())])


def stored() -> dict[tuple[str, str], tuple[str, str]]:
    """What the page says, by library and method."""
    found = BETWEEN.search(PAGE.read_text(encoding="utf-8"))
    rows = [line.strip("| ").split(" | ") for line in found[0].splitlines()[3:-1]]
    return {(library, method): (line, what) for library, names, line, what in rows for method in names.split(", ")}


def write() -> None:
    rows = {}
    for key, (trainer, case) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            result = outcome(trainer, case, Path(folder))
        rows[key] = cells(trainer, case, result)
        print(*key, "|", *rows[key], "" if result.unchanged else "TRAINING CHANGED", flush=True)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BETWEEN.sub(lambda m: m[1] + table(rows) + m[2], page), encoding="utf-8")
