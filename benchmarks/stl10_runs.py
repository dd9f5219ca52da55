"""The STL-10 runs behind the paper's figures and tables that are left, three at a time on one GPU.

    python -m benchmarks.stl10_runs PART [PART …] [--out runs/stl10] [--minutes M] [--dry]
    python -m benchmarks.stl10_runs PART [PART …] --pack | --rescue

    PART    runs                                                            figures and tables
    tables  Barlow Twins at batch 256, SimCLR and VICReg with d = 50        Tables 1 and 2, coming
    curves  SimCLR, small at four times its rate; VICReg, small             Figs. 2C-F, 5, 7, coming
            SimCLR and VICReg, standard                                     Figs. 3, 4, 7
            BYOL, small and standard                                        byol
    seeds   Barlow Twins, standard start, else as at four times its rate    Fig. 7
            seed 1 of VICReg and SimCLR, small                              Figs. 2C-F, 5, 7
    controls  SimCLR on CIFAR-10: with a warm-up, seeds 1 and 2, and        sharpness
              without momentum, seeds 0 to 2

A part is meant for half an hour of one H200. `tables` and `curves` took 23 minutes, `controls` three. `seeds` has not
been made; its last run, which has a constant rate, is cut off by --minutes, and what it has is drawn from its log.
Figures are joined with the stored ones: OUT/results begins as a copy of docs/results, and seed 1 has a folder of its
own in it. Runs are in OUT/runs; the same command continues them. A run that fails goes on from its last checkpoint or,
if it has none, is tried without compilation and CUDA graphs, once and not if it diverged; it does not stop the others.
OUT/times.txt says what ended with which status: a figure ends with 1 if one of its claims does not hold. The command
itself ends with 1 if a run or a figure failed. --dry prints what it would do. --minutes stops everything after this
time: trainings write a checkpoint, and all is packed.

At the end OUT/packed holds what must not be lost, in at most seven files: results.tar.gz (without pictures, which
`stairwise reproduce all --from-stored` draws), and the logs of all runs. --pack does this at any time, in seconds; all
figures can be drawn from the logs elsewhere. --rescue also draws what runs have measured so far, in OUT/rescued, those
first that have not ended; it ends with 1 if a figure could not be drawn, or if the stored run has come farther. Both
train nothing, and may be called while the same command is at work.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

from benchmarks.bench_engine import multi_process_service
from benchmarks.packing import logs, pack, pack_all
from stairwise.data.images import load
from stairwise.paper.harness import stored_names, stored_results
from stairwise.paper.trained import KINDS, begun, finished
from stairwise.runs.folder import CHECKPOINTS, RECIPE
from stairwise.runs.reader import Run
from stairwise.training.checkpoint import every
from stairwise.training.following import followed_summary
from stairwise.training.recipe import load_recipe

STAIRWISE = (sys.executable, "-m", "stairwise")
AT_ONCE = 3  # trainings together are no faster than one alone; what they do between updates is
DRAWING = 3  # figures and studies at once, beside the trainings
HELD = (0, 1)  # exit status of a figure that was made, whether or not its claims hold
THREADS = {"OMP_NUM_THREADS": "2"}  # of a figure: with all cores each, decompositions of several get in their own way
COMPILED, PLAIN_STEPS = ("compile=true",), ("compile=false", "graph=false")
UNFINISHED = ("unfinished=true",)
WEEK = 7 * 24 * 60.0  # minutes
GRACE = 60.0  # seconds that commands have to end by themselves


@dataclass(frozen=True)
class Drawn:
    """A figure or table and its settings."""

    name: str
    settings: tuple[str, ...]
    seed: int = 0

    def command(self, out: Path, runs: str = "runs", more: tuple[str, ...] = ()) -> list[str]:
        settings = [*self.settings, *more, f"runs={out / runs}", *([f"run_seed={self.seed}"] if self.seed else [])]
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

    def command(self, out: Path, how: tuple[str, ...] = COMPILED) -> list[str]:
        # weights on the way are for studies, which further seeds have none of
        settings = [*how, *([f"seed={self.seed}", "keep=0"] if self.seed else [])]
        place = ["--out", str(out / "runs" / self.folder), "--checkpoint-minutes", "2"]
        return [*STAIRWISE, "train", self.recipe, *place, *_set(settings)]


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


def coming(method: str, *more: str) -> Drawn:
    return Drawn("coming", (f"methods={method}", *more))


TABLES = (d50("bt", "-large", "large=true"), d50("simclr"), d50("vicreg"))
X4, VICREG = small("simclr", kind="x4"), small("vicreg")
PLAIN = Chain(f"stl10-bt{KINDS['plain']}", (Drawn("fig7", ("methods=bt", "only=plain")),))
CONTROLS = (
    *(Drawn("sharpness", ("methods=", "control=warm", "seeds=1"), seed) for seed in (1, 2)),
    Drawn("sharpness", ("methods=", "control=plain")),
)
PARTS = {
    "tables": TABLES,
    # in this order, so that the end of the lease cuts off what matters least
    "curves": (X4, VICREG, byol("-small", "small"), standard("simclr"), standard("vicreg"), byol("", "standard")),
    "seeds": (PLAIN, small("vicreg", seed=1), small("simclr", seed=1)),
    "controls": (Chain("", CONTROLS),),
}
# studies, begun when the last of their runs has ended: they need its weights
AFTER: dict[str, dict[Drawn, tuple[Chain, ...]]] = {
    "tables": {
        Drawn("table2", ("large=true", "batches=3")): TABLES,
        coming("bt", "d50=true"): TABLES[:1],
        coming("vicreg", "d50=true"): TABLES[2:],
    },
    "curves": {coming("vicreg"): (VICREG,), coming("simclr", "only=x4"): (X4,)},
    "seeds": {},
    "controls": {},
}


@dataclass(eq=False)
class Work:
    """The commands of a part: chains beside one another; figures are stored one at a time, because they are joined.

    Attributes:
        runs: name of the folder in OUT that figures read.
        results: name of the folder in OUT in which figures are stored.
        more: settings of all figures.
        after: studies that have not begun, and the chains that they need.
        trained: chains whose run has come to its end.
    """

    out: Path
    environment: dict[str, str]
    runs: str = "runs"
    results: str = "results"
    more: tuple[str, ...] = ()
    dry: bool = False
    after: dict[Drawn, tuple[Chain, ...]] = field(default_factory=dict)
    storing: threading.Lock = field(default_factory=threading.Lock)
    choosing: threading.Lock = field(default_factory=threading.Lock)
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    trained: set[Chain] = field(default_factory=set)
    stopped: bool = False
    begun: float = field(default_factory=monotonic)

    def make(self, chains: Iterable[Chain]) -> bool:
        """Make the chains and the studies that they allow; whether nothing has failed."""
        if self.dry:
            done = [self.train(chain) and self.finish(chain) for chain in chains]
            return all(done) and not self.after
        with ThreadPoolExecutor(DRAWING) as drawing, ThreadPoolExecutor(AT_ONCE) as training:

            def begin_drawing(chain: Chain) -> Future[bool] | None:
                return drawing.submit(self.finish, chain) if self.train(chain) else None

            try:
                drawn = list(training.map(begin_drawing, chains))
                done = [one is not None and one.result() for one in drawn]
            except KeyboardInterrupt:  # which the commands receive themselves
                self.stopped = True
                raise
        return all(done) and not self.after

    def train(self, chain: Chain) -> bool:
        """Train a run to its end; if it fails, once more: from its checkpoint, or without what may have failed."""
        if not chain.recipe:
            return True
        folder = self.out / "runs" / chain.folder
        if self._call(chain.folder, chain.command(self.out, how(folder))) == 0:
            return True
        if self.stopped or diverged(folder):
            return False
        again = how(folder) if every(folder / CHECKPOINTS) else PLAIN_STEPS
        return self._call(chain.folder, chain.command(self.out, again)) == 0

    def finish(self, chain: Chain) -> bool:
        """Make the studies that waited for this run alone, which need its weights; then draw its figures."""
        with self.choosing:
            self.trained.add(chain)
            studies = [study for study, needed in self.after.items() if self.trained.issuperset(needed)]
            for study in studies:
                del self.after[study]
        drawn = [self.draw(figure) for figure in (*studies, *chain.figures)]
        return all(drawn)

    def draw(self, figure: Drawn) -> bool:
        """Measure beside other runs; then store with a second call, which finds everything measured."""
        command = figure.command(self.out, self.runs, self.more)
        if self._call(figure.name, command) not in HELD:
            return False
        apart = figure.seed and figure.name != "sharpness"  # which holds several seeds
        place = self.out / self.results / (f"seed{figure.seed}" if apart else "")
        with self.storing:
            return self._call(figure.name, [*command, "--store", str(place), "--join"]) in HELD

    def stop(self) -> None:
        """End all commands; trainings write a checkpoint first. What has not ended after a while is killed."""
        self.stopped = True
        for process in tuple(self.running):
            process.terminate()
        last = threading.Timer(GRACE, self._kill)
        last.daemon = True
        last.start()

    def _kill(self) -> None:
        for process in tuple(self.running):
            process.kill()

    def _call(self, name: str, command: list[str]) -> int:
        if self.dry:
            print(*command[len(STAIRWISE) - 1 :])
            return 0
        if self.stopped:
            return -signal.SIGTERM
        beside = "" if self.results == "results" else f"{self.results}, "
        environment = self.environment | (THREADS if "reproduce" in command else {})
        with (self.out / f"{name}.txt").open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            self.running.add(process)
            if self.stopped:  # since it was asked
                process.terminate()
            status = process.wait()
            self.running.discard(process)
        with (self.out / "times.txt").open("a") as times:
            times.write(f"{monotonic() - self.begun:.0f} s: {beside}{name} ended with {status}\n")
        return status


def how(folder: Path) -> tuple[str, ...]:
    """Settings with which a run goes on: those with which it was begun. New ones are compiled."""
    plain = every(folder / CHECKPOINTS) and not Run(folder).recipe["compile"]
    return PLAIN_STEPS if plain else COMPILED


def diverged(folder: Path) -> bool:
    """Whether the last record of a run says that its loss was not finite."""
    return begun(folder) and "failed" in Run(folder).records[-1].extra


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


def rescue(out: Path, chains: Iterable[Chain]) -> bool:
    """Draw all begun runs of recipes as far as they have come, in OUT/rescued with the figures of OUT/results, and
    pack; whether nothing has failed. Figures read copies of the runs, OUT/frozen, which do not change meanwhile."""
    pack(out)
    for name in ("frozen", "rescued"):
        shutil.rmtree(out / name, ignore_errors=True)
    some = [chain for chain in chains if (out / "runs" / chain.folder / RECIPE).is_file()]
    with ThreadPoolExecutor() as pool:
        frozen = dict(zip(some, pool.map(partial(_freeze, out), some), strict=True))
    pack(out)
    shutil.copytree(out / "results", out / "rescued", ignore=shutil.ignore_patterns(".*"))
    work = Work(out, dict(os.environ), "frozen", "rescued", UNFINISHED)
    drawn: list[bool] = []
    for state in ("going on", "ended"):
        figures = [figure for chain in some if frozen[chain] == state for figure in chain.figures]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            drawn += pool.map(work.draw, figures)
        pack(out)
    return all(drawn) and "damaged" not in frozen.values()


def _freeze(out: Path, chain: Chain) -> str:
    """Sum up what a run has followed, and copy what figures read of it; its state."""
    run, copy = (out / runs / chain.folder for runs in ("runs", "frozen"))
    try:
        if not begun(run):
            return "not begun"
        followed_summary(Run(run))
        for path in logs(run):
            place = copy / path.relative_to(run)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
        return "ended" if finished(copy) else "going on"
    except Exception as error:  # of whatever kind: the other runs must not be lost with this one
        print(f"{run} cannot be drawn: {error}", file=sys.stderr)
        shutil.rmtree(copy, ignore_errors=True)
        return "damaged"


def _minutes(text: str) -> float:
    if not 0 < (minutes := float(text)) <= WEEK:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {WEEK:g}, a week; got {text}")
    return minutes


def main() -> None:
    begun_at = monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", choices=PARTS, metavar="PART", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("runs/stl10"))
    parser.add_argument("--minutes", type=_minutes, default=WEEK, help="stop after this time, and pack what there is")
    parser.add_argument("--dry", action="store_true", help="print the commands")
    parser.add_argument("--pack", action="store_true", help="pack what runs have measured so far")
    parser.add_argument("--rescue", action="store_true", help="draw and pack what runs have measured so far")
    options = parser.parse_args()
    out, chains = options.out.absolute(), [chain for part in options.parts for chain in PARTS[part]]
    after = {figure: needed for part in options.parts for figure, needed in AFTER[part].items()}
    if options.dry:
        Work(out, {}, dry=True, after=after).make(chains)
        return
    begin(out)
    if options.rescue:
        sys.exit(0 if rescue(out, chains) else 1)
    if options.pack:
        pack_all(out)
        return
    for data in sorted({load_recipe(chain.recipe).data if chain.recipe else "cifar10" for chain in chains}):
        load(data)  # before anything begins: must it be fetched first?
    with tempfile.TemporaryDirectory() as pipes, multi_process_service(pipes) as shared:
        if shared is None:
            print("NVIDIA's multi-process service could not be started: runs take turns on the GPU", file=sys.stderr)
        work = Work(out, shared or dict(os.environ), after=after)
        signal.signal(signal.SIGTERM, lambda *_: work.stop())
        limit = threading.Timer(max(0.0, begun_at + 60 * options.minutes - monotonic()), work.stop)
        limit.start()
        try:
            done = work.make(chains)
        finally:
            limit.cancel()
            pack_all(out)
    print((out / "times.txt").read_text(), end="")
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
