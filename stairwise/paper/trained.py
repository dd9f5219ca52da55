"""Training runs for figures and tables: read from a folder of runs, or trained (or resumed) in it.

The run of the recipe DATA-METHOD-KIND, such as `stl10-bt-small`, is in the folder RUNS/stl10-bt-small.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from stairwise.checks import InputError, one_of
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress, part
from stairwise.report.page import Line, Panel
from stairwise.runs.folder import METRICS, RECIPE
from stairwise.runs.reader import Run
from stairwise.staircase.steps import Steps, detect_steps
from stairwise.table import Table
from stairwise.theory.spectra import grown
from stairwise.training import continuing
from stairwise.training.loop import train
from stairwise.training.recipe import Recipe, load_recipe, recipe_names, recipe_of

Floats = NDArray[np.float64]
METHODS = {"bt": "Barlow Twins", "simclr": "SimCLR", "vicreg": "VICReg"}
SMALL, STANDARD, D50, FAST, LARGE = "-small", "", "-d50", "-small-fast", "-d50-large"

RATES = {"fast": "twice the rate", "x4": "four times the rate", "x8": "eight times the rate"}
TITLES = METHODS | {f"{m}-{kind}": f"{title}, {rate}" for m, title in METHODS.items() for kind, rate in RATES.items()}
KINDS = {"standard": STANDARD, "small": SMALL, "fast": FAST, "x4": "-small-x4", "x8": "-small-x8"}
FROM_SMALL = tuple(KINDS)[1:]  # kinds of runs from small initialization
KINDS |= {"plain": "-plain-x4"}  # standard initialization, and everything else as in x4
OTHER_KINDS = {kind: f"runs at {rate}" for kind, rate in RATES.items()} | {"plain": "runs that are plain"}
HELD = {"eigenvalues": "C", "covariance": "the covariance"}
FREE = continuing.FREE | {"graph", "channels_last", "compile"}  # settings in which a run may differ from its recipe
RECORDS, MODES = 150, 96  # greatest number of records and modes that are stored of a spectrum over time,
FIRST = 12  # and number of modes of which all records are stored
SMOKE: dict[str, Any] = {
    "data": "photos",
    "pretrain": 400,
    "size": 16,
    "encoder": "resnet18",
    "encoder_options": {"stem": "small", "width": 4},
    "hidden": [16],
    "d": 8,
    "batch": 32,
    "steps": 40,
    "warmup_epochs": 0.0,
    "records": 20,
    "window": 64,
    "probes": ["knn"],
    "probe_times": 4,
    "held_out": 64,
    "follow": 16,
    "keep": 2,
    "precision": "float32",
}


class NeedsGPU(InputError):
    """A missing run cannot be trained without a GPU in reasonable time."""


@dataclass(frozen=True)
class RunsConfig:
    """Which runs to use, and their folder.

    Attributes:
        data: stl10 (the paper's) or cifar10.
        methods: any of bt, simclr and vicreg, separated by commas.
        runs: folder of the runs.
        kinds: kinds of runs that the experiment needs, unless it has a setting `only`, which names others.
        smoke: tiny networks on photographs, for a test that takes seconds; its numbers mean nothing.
        run_seed: of the runs; those of other seeds than 0 are in RUNS/NAME-seedN.
        unfinished: take runs that have not ended as far as they have come.
    """

    kinds: ClassVar[tuple[str, ...]] = ()

    data: str = "stl10"
    methods: str = "bt,simclr,vicreg"
    runs: str = "runs"
    device: str = "auto"
    smoke: bool = False
    run_seed: int = 0
    unfinished: bool = False

    def chosen(self) -> list[str]:
        return [one_of(name.strip(), "methods", METHODS) for name in self.methods.split(",")]

    def folder(self, method: str, kind: str) -> Path:
        seed = f"-seed{self.run_seed}" if self.run_seed else ""
        return Path(self.runs) / f"{'smoke' if self.smoke else self.data}-{method}{kind}{seed}"

    def source(self) -> str:
        """A text that changes when the runs change."""
        only = str(getattr(self, "only", ""))
        kinds = [KINDS.get(name.strip(), name) for name in only.split(",")] if only else self.kinds
        files = [self.folder(m, kind) / METRICS for m in self.chosen() for kind in kinds]
        return " ".join(f"{p.parent.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files if p.is_file())


def obtain(config: RunsConfig, kind: str, progress: Progress, span: tuple[float, float] = (0.0, 1.0)) -> dict[str, Run]:
    """Runs of the chosen methods, by method; those that are missing or have not ended are trained, unless the setting
    `unfinished` takes them as they are. `kind` is the suffix of the recipe."""
    runs = {}
    methods = config.chosen()
    for i, method in enumerate(methods):
        low, high = (span[0] + (span[1] - span[0]) * k / len(methods) for k in (i, i + 1))
        name = f"{'stl10' if config.smoke else one_of(config.data, 'data', ('stl10', 'cifar10'))}-{method}{kind}"
        folder = config.folder(method, kind)
        recipe = load_recipe(name, (SMOKE if config.smoke else {}) | {"seed": config.run_seed})
        differing = _differing(Run(folder), recipe) if (folder / RECIPE).is_file() else []
        if differing and not config.smoke:  # smoke runs of an older version are trained again
            remedy = "use another folder with --set runs=FOLDER, or train it again"
            raise InputError(str(folder), "must contain a run of its recipe", ", ".join(differing), remedy)
        if config.unfinished and not begun(folder):
            raise InputError(str(folder), "must have begun", "no record yet", "leave out unfinished=true to train it")
        if differing or not (finished(folder) or config.unfinished):
            _need_a_gpu(config, name)
            share = part(progress, low, high, f"{name} ")
            train(recipe, folder, device=config.device, restart=bool(differing), progress=share)
        runs[method] = Run(folder)
    return runs


def chosen_kinds(only: str, methods: list[str], usual: Sequence[str], possible: Iterable[str] = KINDS) -> list[str]:
    """Kinds of runs that a figure uses: those of its setting `only`, separated by commas, or the usual ones."""
    kinds = [one_of(name.strip(), "only", possible) for name in only.split(",")] if only else list(usual)
    for kind in set(kinds) - {"standard", "small"}:
        some = [m for m in METHODS if f"stl10-{m}{KINDS[kind]}" in recipe_names()]
        if not set(methods) <= set(some):
            rule = f"must be {' or '.join(some)} for {OTHER_KINDS[kind]}"
            raise InputError("methods", rule, ",".join(methods), f"set methods={some[0]}")
    return kinds


def run_name(method: str, kind: str) -> str:
    """Name of a run in figures of runs from small initialization, a key of `TITLES`."""
    return method if kind == "small" else f"{method}-{kind}"


def obtain_small(config: RunsConfig, kinds: Sequence[str], progress: Progress) -> dict[str, Run]:
    """Runs of these kinds of all chosen methods, by `run_name`."""
    runs: dict[str, Run] = {}
    for i, kind in enumerate(kinds):
        made = obtain(config, KINDS[kind], progress, (i / len(kinds), (i + 1) / len(kinds)))
        runs |= {run_name(method, kind): run for method, run in made.items()}
    return runs


def begun(folder: Path) -> bool:
    """Whether a folder holds a run with at least one record."""
    return (folder / RECIPE).is_file() and bool(Run(folder).records)


def finished(folder: Path) -> bool:
    """Whether a folder holds a run that has come to its end."""
    run = Run(folder) if (folder / RECIPE).is_file() else None
    return run is not None and bool(run.records) and run.records[-1].step >= int(run.facts["steps"])


def _differing(run: Run, recipe: Recipe) -> list[str]:
    """Settings in which a run differs from a recipe, the first four, except those that do not change the training."""
    have, want = recipe_of(run).plain(), recipe.plain()
    differing = [k for k in want if k not in FREE and have[k] != want[k]]
    parts = ["it was made longer on the way"] if run.facts.get("continued") else []  # by another schedule
    return [f"{k} = {have[k]!r} there, {want[k]!r} in the recipe" for k in differing[:4]] + parts


def _need_a_gpu(config: RunsConfig, name: str) -> None:
    if not config.smoke and config.device == "auto" and not torch.cuda.is_available():
        raise NeedsGPU(
            "device",
            f"must be a GPU: {name} takes minutes there, and days on a CPU",
            "no GPU here",
            "use --smoke for a quick test, --from-stored to draw stored measurements, or --set device=cpu",
        )


def about(runs: dict[str, Run]) -> dict[str, Any]:
    """Provenance of runs, as JSON in an array."""
    keys = ("alpha", "steps", "commit", "device", "made")
    facts = {}
    for name, run in runs.items():
        last = run.records[-1]
        facts[name] = {"recipe": run.folder.name, **{k: run.facts.get(k) for k in keys}, "seconds": last.seconds}
        facts[name]["end"] = {
            k: round(float(last.value(k)), 5) for k in ("loss", "knn", "logistic") if last.value(k) is not None
        }
        facts[name] |= {key: run.recipe[key] for key in ("seed", "data")}
        facts[name]["pretrain"] = run.facts["training_images"]
        facts[name] |= {"code": run.facts["code"]} if "code" in run.facts else {}  # where there is no commit
        facts[name] |= {"reached": last.step} if last.step < int(run.facts["steps"]) else {}
    return {"about": np.array(json.dumps(facts, default=str))}


def methods_in(arrays: Arrays) -> list[str]:
    return list(json.loads(str(arrays["about"])))


def so_far(arrays: Arrays, name: str) -> str:
    """How far a run has come that had not ended, for its title; otherwise empty.

    >>> so_far({"about": np.array('{"bt": {"steps": 200, "reached": 90}, "simclr": {"steps": 200}}')}, "bt")
    ', 45 % of its training'
    """
    one = json.loads(str(arrays["about"]))[name]
    return f", {100 * one['reached'] / one['steps']:.0f} % of its training" if "reached" in one else ""


def title(arrays: Arrays, name: str, titles: Mapping[str, str] = TITLES) -> str:
    """The title of a run, and how far it has come if it had not ended."""
    return titles[name] + so_far(arrays, name)


def foretold(arrays: Arrays, name: str) -> bool:
    """Whether a run is one of those of which docs/results/predictions.md speaks: on STL-10, of seed 0."""
    one = json.loads(str(arrays["about"]))[name]
    return (one["data"], one["seed"]) == ("stl10", 0)


def spread(draws: NDArray) -> str:
    """Mean and standard deviation over draws, as text.

    >>> spread(np.array([0.1, 0.2, 0.3])), spread(np.array([0.5])), spread(np.array([0.5, np.nan]))
    ('0.200 ± 0.100', '0.500', '–')
    """
    if np.isnan(draws).any():
        return "–"
    return f"{draws.mean():.3f}" + (f" ± {draws.std(ddof=1):.3f}" if len(draws) > 1 else "")


def runs_table(arrays: Arrays) -> Table:
    rows = [
        [
            str(one["recipe"]),
            f"{float(one['alpha']):.3g}",
            (f"{one['reached']:,} of " if "reached" in one else "") + f"{int(one['steps']):,}",
            f"{float(one['seconds']):.0f} s",
            str(one["device"]),
            str(one["seed"]),
            f"{one['data']}, {one['pretrain']:,} images",
        ]
        for one in json.loads(str(arrays["about"])).values()
    ]
    return Table("Runs", ["recipe", "α", "steps", "time", "device", "seed", "trained on"], rows)


def _thinned(t: Floats, spectra: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """At most 150 records of at most 96 modes, including all leading ones, and the indices of the modes."""
    rows = np.unique(np.linspace(0, len(t) - 1, min(RECORDS, len(t))).round().astype(int))
    d = spectra.shape[1]
    first = np.arange(min(d, MODES // 2))
    rest = np.geomspace(len(first), d - 1, MODES - len(first)).round().astype(int) if d > len(first) else first[:0]
    modes = np.unique(np.concatenate([first, rest]))
    return t[rows], spectra[np.ix_(rows, modes)].astype(np.float32), modes


def curves(prefix: str, run: Run, series: str) -> dict[str, Any]:
    """Loss and one spectrum of a run over time, thinned, and the steps detected in all records."""
    t, spectra = run.times, run.series(series)
    steps = detect_steps(t, spectra)
    short, lam, modes = _thinned(t, spectra)
    return {
        f"{prefix}.t": short,
        f"{prefix}.lam": lam,
        f"{prefix}.modes": modes,
        f"{prefix}.loss": np.interp(short, t, run.series("loss")),
        f"{prefix}.steps": np.stack([steps.times, steps.modes, steps.rise_times, steps.levels, steps.events]),
        f"{prefix}.grown": np.array(grown(spectra[-1])),
        f"{prefix}.d": run.dimensions(series),
        f"{prefix}.every": np.column_stack([t, spectra[:, :FIRST]]).astype(np.float32),
    }


def lighter(arrays: Arrays, most: int) -> Arrays:
    """The arrays, with `most` modes of each spectrum over time that has more: three quarters leading, others spread."""
    lighter_ones = dict(arrays)
    for key, modes in arrays.items():
        prefix, dot, name = key.rpartition(".")
        if dot and name == "modes" and len(modes) > most:
            leading = np.arange(3 * most // 4)
            rest = np.linspace(len(leading), len(modes) - 1, most - len(leading)).round().astype(int)
            kept = np.concatenate([leading, rest])
            lighter_ones |= {key: modes[kept], f"{prefix}.lam": arrays[f"{prefix}.lam"][:, kept]}
    return lighter_ones


def unseen(prefix: str, run: Run) -> dict[str, Any]:
    """Number of grown modes of C and of the covariance at the end, on training batches and on images not trained on,
    (2, 2); and the leading eigenvalues on the latter."""
    rows, spectra = [], []
    for series in HELD:
        _, held = run.probes(f"held_{series}")
        if len(held):
            here = run.series(series)[-1]
            rows.append([grown(here)[0], grown(held[-1][: len(here)])[0]])
            spectra.append(held[-1][:MODES].astype(np.float32))
    return {f"{prefix}unseen": np.array(rows), f"{prefix}unseen.lam": np.array(spectra)} if rows else {}


def unseen_claims(arrays: Arrays, prefix: str, words: str) -> list[Claim]:
    """Check that as many modes have grown on images not trained on."""
    counts = zip(HELD.values(), arrays.get(f"{prefix}unseen", ()), strict=False)
    return [
        Claim.close(f"{words}grown modes of {of}, on images not trained on", float(other), float(here), 1)
        for of, (here, other) in counts
    ]


def steps_of(arrays: Arrays, prefix: str) -> Steps:
    """The steps stored by `curves`."""
    times, modes, rises, levels, events = arrays[f"{prefix}.steps"]
    return Steps(times, modes.astype(np.int64), rises, levels, events.astype(np.int64))


def steps_table(arrays: Arrays, spectra: dict[str, str]) -> Table:
    """All steps of the given spectra; `spectra` maps prefixes to names."""
    rows = []
    for prefix, name in spectra.items():
        steps = steps_of(arrays, prefix)
        rows += [
            [name, str(mode + 1), f"{t:,.0f}", f"{rise:.3g}", f"{level:.3g}"]
            for mode, t, rise, level in zip(steps.modes, steps.times, steps.rise_times, steps.levels, strict=True)
        ]
    return Table("Steps", ["eigenvalues of", "mode", "t", "rise time", "plateau"], rows)


def spectrum_panels(arrays: Arrays, prefixes: Sequence[tuple[str, str]]) -> list[Panel]:
    """One interactive chart per spectrum over time."""
    panels = []
    for prefix, title in prefixes:
        t, lam, modes = (arrays[f"{prefix}.{k}"] for k in ("t", "lam", "modes"))
        lines = [
            Line(f"mode {j + 1}", t, lam[:, i].astype(float), (i, len(modes)), legend=False)
            for i, j in enumerate(modes)
        ]
        panels.append(
            Panel(title, "time t = Σ lr", "eigenvalue", lines, marks=list(steps_of(arrays, prefix).times), log=True)
        )
    return panels
