"""Try cases of one kind and print a line of JSON before and after each: `python -m tests.fuzz.worker calls SEED N`.

A crash or a hang in native code ends or stops this process; the one that started it knows the case from the last line.
"""

import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.fuzz import materials
from tests.fuzz.calls import SOURCES
from tests.fuzz.lines import LINES
from tests.fuzz.outcome import Outcome, each, of_call, of_line, of_real_line

BLOCK = 250  # cases per seed: Hypothesis repeats what it likes, the longer the more
MEMORY = 24 << 30  # bytes of address space


def run(
    cases: SearchStrategy[Any], how: Callable[[Any], Outcome], number: int, n: int, write: Callable[[Any], None]
) -> None:
    """Draw n cases, in blocks with seeds of their own, and write each, then how it ended."""
    for start in range(0, n, BLOCK):
        _run_block(cases, how, number + start // BLOCK, min(BLOCK, n - start), write)


def _run_block(
    cases: SearchStrategy[Any], how: Callable[[Any], Outcome], number: int, n: int, write: Callable[[Any], None]
) -> None:
    @seed(number)
    @settings(
        max_examples=n, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(cases)
    def draw(case: Any) -> None:
        write({"case": case})
        write(each(how, case))

    draw()


def main() -> None:
    kind, number, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    stream = os.fdopen(os.dup(1), "w", buffering=1, errors="backslashreplace")
    write = lambda value: print(json.dumps(value), file=stream)  # noqa: E731
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "files"
        os.environ["STAIRWISE_DATA"] = str(folder / "data")
        if kind == "calls":
            run(SOURCES, of_call, number, n, write)
            return
        materials.make(folder)

        def how(line: list[str]) -> Outcome:
            materials.damage(folder)
            return (of_line if kind == "lines" else of_real_line)(line, folder)

        run(LINES, how, number, n, write)


if __name__ == "__main__":
    main()
