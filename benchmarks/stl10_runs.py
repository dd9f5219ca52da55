"""The STL-10 runs behind the paper's figures and tables that are left, three at a time on one GPU.

    python -m benchmarks.stl10_runs PART [--out runs/stl10] [--dry]

    PART    runs                                                            figures and tables
    tables  Barlow Twins at batch 256, SimCLR and VICReg with d = 50        Tables 1 and 2, coming
    curves  SimCLR, standard, and small at four times its rate              Figs. 2C-F, 3, 4, 5, 7, coming
            VICReg, standard and small; BYOL, standard and small            the same, and byol
    seeds   seed 1 of SimCLR (at four times its rate) and VICReg, small     Figs. 2C-F, 5, 7
            SimCLR with a warm-up on CIFAR-10, seeds 1 and 2                sharpness

Each part is meant for half an hour of one H200. `tables` took 23 minutes, ten of them for its tables; `curves` and
`seeds` have not been made to their ends. Figures are joined with the stored ones: OUT/results begins as a copy of
docs/results, and seed 1 has a folder of its own in it. Runs are in OUT/runs; the same command continues them. A run
that fails does not stop the others. OUT/times.txt says what ended with which status: a figure ends with 1 if one of its
claims does not hold. The command itself ends with 1 if a run or a figure failed. --dry prints what would be done.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from benchmarks.bench_engine import multi_process_service
from stairwise.paper.harness import stored_names, stored_results
from stairwise.paper.trained import KINDS

STAIRWISE = (sys.executable, "-m", "stairwise")
AT_ONCE = 3  # trainings together are no faster than one alone; what they do between updates is
HELD = (0, 1)  # exit status of a figure that was made, whether or not its claims hold


@dataclass(frozen=True)
class Drawn:
    """A figure or table and its settings."""

    name: str
    settings: tuple[str, ...]
    seed: int = 0

    def command(self, out: Path) -> list[str]:
        settings = [*self.settings, f"runs={out / 'runs'}", *([f"run_seed={self.seed}"] if self.seed else [])]
        return [*STAIRWISE, "reproduce", self.name, *_set(settings), "--out", str(out / "work")]


@dataclass(frozen=True)
class Chain:
    """A run, and what is drawn of it once it has ended; without a recipe, figures train their own short runs."""

    recipe: str
    figures: tuple[Drawn, ...]
    seed: int = 0

    @property
    def folder(self) -> str:
        return f"{self.recipe}-seed{self.seed}" if self.seed else self.recipe

    def command(self, out: Path) -> list[str]:
        settings = ["compile=true", *([f"seed={self.seed}"] if self.seed else [])]
        return [*STAIRWISE, "train", self.recipe, "--out", str(out / "runs" / self.folder), *_set(settings)]


def _set(settings: Iterable[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def small(method: str, seed: int = 0, kind: str = "small") -> Chain:
    only = f"only={kind}"
    figures = tuple(Drawn(name, (f"methods={method}", only), seed) for name in ("fig2cf", "fig5", "fig7"))
    return Chain(f"stl10-{method}{KINDS[kind]}", figures, seed)


def standard(method: str) -> Chain:
    figures = [("fig3", ()), ("fig4", ()), ("fig7", ("only=standard",))]
    return Chain(f"stl10-{method}", tuple(Drawn(name, (f"methods={method}", *more)) for name, more in figures))


def byol(suffix: str, kind: str) -> Chain:
    return Chain(f"stl10-byol{suffix}", (Drawn("byol", (f"only={kind}",)),))


def d50(method: str, suffix: str = "", *more: str) -> Chain:
    table = Drawn("table1", (f"methods={method}", "batches=3", "lengths=true", *more))
    return Chain(f"stl10-{method}-d50{suffix}", (table,))


def coming(method: str, *more: str, seed: int = 0) -> Drawn:
    return Drawn("coming", (f"methods={method}", *more), seed)


TABLES = (d50("bt", "-large", "large=true"), d50("simclr"), d50("vicreg"))
CURVES = (  # in this order, so that the end of the lease cuts off what has been measured best already
    standard("simclr"),
    small("simclr", kind="x4"),
    small("vicreg"),
    byol("", "standard"),
    byol("-small", "small"),
    standard("vicreg"),
)
SEEDS = (small("simclr", seed=1, kind="x4"), small("vicreg", seed=1))
WARM = tuple(Drawn("sharpness", ("methods=simclr", "control=warm", "seeds=1"), seed) for seed in (1, 2))
PARTS = {
    "tables": TABLES,
    "curves": CURVES,
    "seeds": (*SEEDS, Chain("", WARM)),
}
AFTER: dict[str, dict[Drawn, tuple[Chain, ...]]] = {  # figures that need the runs of several chains, or that can wait
    "tables": {
        Drawn("table2", ("large=true", "batches=3")): TABLES,
        coming("bt", "d50=true"): TABLES,
        coming("vicreg", "d50=true"): TABLES,
    },
    "curves": {coming("vicreg"): CURVES, coming("simclr", "only=x4"): CURVES},
    "seeds": {},
}


@dataclass(eq=False)
class Work:
    """The commands of a part: chains beside one another; figures are stored one at a time, because they are joined.

    Attributes:
        after: figures, and the chains that must have been made before.
        made: chains whose run was trained and whose figures were drawn.
    """

    out: Path
    environment: dict[str, str]
    after: Mapping[Drawn, tuple[Chain, ...]] = field(default_factory=dict)
    dry: bool = False
    storing: threading.Lock = field(default_factory=threading.Lock)
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    made: set[Chain] = field(default_factory=set)
    ending: threading.Lock = field(default_factory=threading.Lock)
    stopped: bool = False
    begun: float = field(default_factory=monotonic)

    def chain(self, chain: Chain) -> bool:
        """Train, and then draw; nothing is drawn of a run that failed."""
        trained = not chain.recipe or self._call(chain.folder, chain.command(self.out)) == 0
        if not trained:
            return False
        drawn = [self.draw(figure) for figure in chain.figures]
        return all(drawn + [self.draw(figure) for figure in self._after(chain)])

    def _after(self, chain: Chain) -> list[Drawn]:
        """The figures of several chains for which this one was the last; asked once those of its own are drawn."""
        with self.ending:
            self.made.add(chain)
            return [one for one, needed in self.after.items() if chain in needed and self.made.issuperset(needed)]

    def draw(self, figure: Drawn) -> bool:
        """Measure beside other runs; then store with a second call, which finds everything measured."""
        command = figure.command(self.out)
        if self._call(figure.name, command) not in HELD:
            return False
        apart = figure.seed and figure.name != "sharpness"  # which holds several seeds
        place = self.out / "results" / (f"seed{figure.seed}" if apart else "")
        with self.storing:
            return self._call(figure.name, [*command, "--store", str(place), "--join"]) in HELD

    def stop(self) -> None:
        """End all commands; trainings write a checkpoint first."""
        self.stopped = True
        for process in tuple(self.running):
            process.terminate()

    def _call(self, name: str, command: list[str]) -> int:
        if self.dry:
            print(*command[len(STAIRWISE) - 1 :])
            return 0
        if self.stopped:
            return -signal.SIGTERM
        with (self.out / f"{name}.txt").open("ab") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
            self.running.add(process)
            if self.stopped:  # since it was asked
                process.terminate()
            status = process.wait()
            self.running.discard(process)
        with (self.out / "times.txt").open("a") as times:
            times.write(f"{monotonic() - self.begun:.0f} s: {name} ended with {status}\n")
        return status


def begin(out: Path) -> None:
    """Make OUT/results, whole or not at all."""
    results, part = out / "results", out / "results.part"
    if results.is_dir():
        return
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in stored_names(stored_results()):
        for suffix in ("npz", "json"):
            shutil.copy(stored_results() / f"{name}.{suffix}", part)
    part.rename(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS, metavar="PART")
    parser.add_argument("--out", type=Path, default=Path("runs/stl10"))
    parser.add_argument("--dry", action="store_true", help="print the commands")
    options = parser.parse_args()
    out, chains = options.out.absolute(), PARTS[options.part]
    if options.dry:
        work = Work(out, {}, AFTER[options.part], dry=True)
        for chain in chains:
            work.chain(chain)
        return
    begin(out)
    with tempfile.TemporaryDirectory() as pipes, multi_process_service(pipes) as shared:
        if shared is None:
            print("NVIDIA's multi-process service could not be started: runs take turns on the GPU", file=sys.stderr)
        work = Work(out, shared or dict(os.environ), AFTER[options.part])
        signal.signal(signal.SIGTERM, lambda *_: work.stop())
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                done = list(pool.map(work.chain, chains))
            except KeyboardInterrupt:  # which the commands receive themselves
                work.stopped = True
                raise
    print((out / "times.txt").read_text(), end="")
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
