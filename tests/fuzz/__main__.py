"""`python -m tests.fuzz --n 10000`: hostile commands and calls, real command lines, faults; prints a tally."""

import argparse
import json
import select
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.outcome import BAD, SECONDS

CHUNK = 250  # cases per seed; a crash or a hang in native code costs the rest of its chunk
SILENCE = 4 * SECONDS  # seconds without a line after which a worker is in native code for good


def chunk(kind: str, seed: int, n: int) -> list[dict[str, Any]]:
    """Outcomes of n cases, tried in a process of their own."""
    command = [sys.executable, "-m", "tests.fuzz.worker", kind, str(seed), str(n)]
    outcomes, under_way, ended = [], None, "crash"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0) as worker:
        assert worker.stdout is not None
        while True:
            if not select.select([worker.stdout], [], [], SILENCE)[0]:
                ended = "hang"
                worker.kill()
                break
            line = worker.stdout.readline()
            if not line:
                break
            entry = json.loads(line)
            under_way = None if "kind" in entry else entry["case"]
            outcomes += [entry] if "kind" in entry else []
    if under_way is not None or worker.returncode:
        outcomes.append({"case": under_way, "kind": ended, "detail": f"exit code {worker.returncode}"})
    return outcomes


def tried(kind: str, seed: int, n: int) -> tuple[Counter[str], list[str]]:
    """Number of outcomes of each kind, and what failed, once per reason."""
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    for number, start in enumerate(range(0, n, CHUNK)):
        for entry in chunk(kind, seed + number, min(CHUNK, n - start)):
            counts[entry["kind"]] += 1
            if entry["kind"] in BAD:
                case = (
                    entry["case"] if isinstance(entry["case"], str) else "stairwise " + shlex.join(entry["case"] or [])
                )
                reason = f"{entry['kind']}: {entry['detail']}"
                failures.setdefault(reason[-90:], f"{kind} seed {seed + number}: {case}\n    {reason}")
        print(f"{kind}: {sum(counts.values())} of {n}: {dict(counts)}", file=sys.stderr, flush=True)
    return counts, list(failures.values())


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--n", type=int, default=1000, help="commands and calls, a fifth of them commands")
    options.add_argument("--lines", type=int, default=200, help="real command lines")
    options.add_argument("--faults", type=int, default=200, help="kills, interrupts and injected errors")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    wanted = {"calls": chosen.n - chosen.n // 5, "lines": chosen.n // 5, "real lines": chosen.lines}
    tally, failures = {}, []
    for kind, n in wanted.items():
        counts, failed = tried(kind, chosen.seed, n) if n else (Counter(), [])
        tally[kind] = dict(counts)
        failures += failed
    if chosen.faults:
        from tests.fuzz.faults import trials

        with tempfile.TemporaryDirectory() as folder:
            tally["faults"] = trials(chosen.faults, chosen.seed, Path(folder))
        problems = tally["faults"].pop("problems")
        failures += [f"faults seed {p['seed']} {p['faults']}: {p['problem']}\n    {p['detail']}" for p in problems]
    print("\n".join(failures))
    print(json.dumps(tally, ensure_ascii=False))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
