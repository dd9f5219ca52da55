"""Run figures and tables; results are cached by configuration and code, and written atomically."""

import dataclasses
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import numpy as np

from stairwise.archives import load_arrays, save_arrays
from stairwise.checks import InputError, one_of
from stairwise.data.images import fingerprint
from stairwise.files import atomic, save_json
from stairwise.progress import Progress, silent
from stairwise.provenance import code_digest, provenance
from stairwise.report.page import Page, Picture
from stairwise.table import Table

LARGEST = 300e3  # bytes of a stored result
LONGEST = 120  # letters of a folder's name
ELSEWHERE = "cifar10"  # a folder within that of the results: the same experiments with other data
PLACES = {"runs", "device"}  # settings that do not affect the result

Arrays = dict[str, np.ndarray]

CATALOG = {
    "fig1": "banner: a linear model and a ResNet learn one dimension at a time (Fig. 1)",
    "fig1ab": "the linear model's staircase, predicted and measured (Fig. 1A,B)",
    "fig1cd": "a ResNet's staircase, Barlow Twins from small initialization (Fig. 1C,D)",
    "fig2ab": "a nonlinear network's staircase, and its tangent kernel's prediction (Fig. 2A,B)",
    "fig2cf": "SimCLR and VICReg from small initialization (Fig. 2C–F)",
    "fig3": "standard initialization: grown and waiting modes (Fig. 3)",
    "fig4": "histograms of eigenvalues (Fig. 4)",
    "fig5": "hidden representations rise with the embeddings (Fig. 5)",
    "fig6": "entries of A(t), integrated and in closed form (Fig. 6)",
    "fig7": "probes during training, standard and small initialization (Fig. 7)",
    "fig8": "symmetry breaking: why self-supervised learning has steps (Fig. 8)",
    "fig9": "landscapes modified for speed (Fig. 9)",
    "byol": "does BYOL step? Online network, predictor and target (a footnote of the paper)",
    "sharpness": "how stepwise is standard initialization? Three losses, three seeds (a footnote of the paper)",
    "table1": "embeddings predicted from the tangent kernel (Table 1)",
    "table2": "alignment of the methods with each other (Table 2)",
    "coming": "does the kernel of a half-trained network predict the modes that come next?",
    "kernelpca": "SSL as kernel PCA: how many dimensions, how long, which modes first",
    "width": "the wider the network, the better its tangent kernel predicts it",
    "batch": "how many dimensions a batch can carry, predicted and measured",
    "muon": "two rules, two staircases: gradient flow and spectral flow (Muon) on the same data",
    "halves": "two modalities: match the halves of digits",
    "landmarks": "many points: landmarks and random features against the exact kernel solution",
}


@dataclass(frozen=True)
class Claim:
    """One checked statement: the measured value, the predicted value, and the expected range."""

    text: str
    measured: float
    expected: str
    holds: bool
    predicted: float | None = None

    @classmethod
    def at_most(cls, text: str, measured: float, bound: float, predicted: float | None = None) -> "Claim":
        return cls(text, float(measured), f"≤ {bound:g}", bool(measured <= bound), predicted)

    @classmethod
    def at_least(cls, text: str, measured: float, bound: float) -> "Claim":
        return cls(text, float(measured), f"≥ {bound:g}", bool(measured >= bound))

    @classmethod
    def between(cls, text: str, measured: float, low: float, high: float) -> "Claim":
        return cls(text, float(measured), f"{low:g} … {high:g}", bool(low <= measured <= high))

    @classmethod
    def note(cls, text: str, measured: float, predicted: float | None = None) -> "Claim":
        """A number to report, whatever it is."""
        return cls(text, float(measured), "any", True, predicted)

    @property
    def judged(self) -> bool:
        """Whether it counts as a check: notes that hold do not."""
        return self.expected != "any" or not self.holds

    @classmethod
    def close(cls, text: str, measured: float, predicted: float, within: float) -> "Claim":
        off = abs(measured - predicted)
        return cls(text, float(measured), f"± {within:g}", bool(off <= within), float(predicted))


@dataclass(frozen=True, eq=False)
class Result:
    """The files and the claims of an experiment."""

    name: str
    folder: Path
    arrays: Arrays
    claims: list[Claim]
    record: dict[str, Any]
    cached: bool

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)


def claims_table(claims: list[Claim]) -> Table:
    rows = [
        [
            claim.text,
            f"{claim.measured:.4g}",
            "" if claim.predicted is None else f"{claim.predicted:.4g}",
            claim.expected,
            "yes" if claim.holds else "NO",
        ]
        for claim in claims
    ]
    return Table("What was checked", ["claim", "measured", "predicted", "expected", "holds"], rows)


def stored_results() -> Path:
    """The folder of stored results: in the installed package, or docs/results in a checkout."""
    installed = Path(__file__).parent / "results"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "docs" / "results"


def smoke_settings(name: str) -> dict[str, Any]:
    """Settings with which the figure takes seconds; its claims need not hold then."""
    module = _module(name)
    return ({"smoke": True} if hasattr(module.Config, "smoke") else {}) | getattr(module, "SMOKE", {})


def label(name: str) -> str:
    """The experiment's docstring: command, time, expected outcome."""
    return (_module(name).__doc__ or "").strip()


def run(
    name: str, out: Path, settings: dict[str, Any] | None = None, force: bool = False, progress: Progress = silent
) -> Result:
    """Run an experiment, or read its result if `out` contains one of the same configuration.

    Writes NAME[,setting=value…]/ with arrays.npz, figure.png, figure.pdf and, last, check.json.
    """
    module = _module(name)
    config = _configure(module, settings or {})
    folder = out / _folder_name(name, config)
    record = _stored(folder, config)
    if record is not None and not force:
        arrays = load_arrays(folder / "arrays.npz")
        with suppress(KeyError):  # the experiment has changed since: run it again
            return Result(name, folder, arrays, module.check(arrays), record, cached=True)
    started = perf_counter()
    arrays = {key: np.asarray(value) for key, value in module.compute(config, progress).items()}
    seconds = perf_counter() - started
    save_arrays(folder / "arrays.npz", arrays)
    claims = module.check(arrays)
    _save_figure(module, arrays, folder)
    record = {
        "experiment": name,
        "config": dataclasses.asdict(config),
        "claims": [dataclasses.asdict(claim) for claim in claims],
        "source": _source(config),
        "code": code_digest(),
        "seconds": round(seconds, 2),
        **provenance(),
    }
    save_json(folder / "check.json", record)
    return Result(name, folder, arrays, claims, record, cached=False)


def from_stored(name: str, out: Path, stored: Path) -> Result:
    """Draw and check stored measurements again, from `stored`/NAME.npz and NAME.json into `out`/NAME,stored."""
    module, stored = _module(name), place_of(name, stored)
    record = json.loads((stored / f"{name}.json").read_text(encoding="utf-8"))
    arrays = load_arrays(stored / f"{name}.npz")
    folder = out / f"{name},stored"
    save_arrays(folder / "arrays.npz", arrays)
    claims = module.check(arrays)
    _save_figure(module, arrays, folder)
    record["claims"] = [dataclasses.asdict(claim) for claim in claims]
    save_json(folder / "check.json", record)
    return Result(name, folder, arrays, claims, record, cached=True)


def stored_names(stored: Path) -> list[str]:
    """Experiments with stored results in a folder, in order."""
    return [name for name in CATALOG if (stored / f"{name}.npz").is_file() and (stored / f"{name}.json").is_file()]


def place_of(name: str, stored: Path) -> Path:
    """Where the results of an experiment are: in a folder, or in its folder of other data, if they are only there."""
    return (
        stored / ELSEWHERE if name not in stored_names(stored) and name in stored_names(stored / ELSEWHERE) else stored
    )


def joined(result: Result, stored: Path) -> Result:
    """The result together with the stored one of other runs; runs that are in both are taken from this one."""
    if result.name not in stored_names(stored):
        return result
    module, before = _module(result.name), load_arrays(stored / f"{result.name}.npz")
    if "about" not in before or "about" not in result.arrays:
        raise InputError("--join", "needs results of trained runs", result.name, "leave it out")
    about = [json.loads(str(arrays["about"])) for arrays in (before, result.arrays)]
    sources = sorted({str(one.get("data")) for runs in about for one in runs.values()})
    if len(sources) > 1:
        raise InputError("--join", "must join runs on the same images", ", ".join(sources), "store without it")
    if not hasattr(module.Config, "seeds"):  # which a figure of several seeds has
        _refuse_other_seeds(_seeds(before), _seeds(result.arrays), stored)
    _refuse_shorter(*about)
    kept = {key: array for key, array in before.items() if _run_of(key, {**about[0], **about[1]}) not in about[1]}
    arrays = kept | result.arrays | {"about": np.array(json.dumps(about[0] | about[1]))}
    arrays = module.joined(arrays) if hasattr(module, "joined") else arrays
    (result.folder / "check.json").unlink(missing_ok=True)  # the folder no longer holds what its settings say
    save_arrays(result.folder / "arrays.npz", arrays)
    _save_figure(module, arrays, result.folder)
    claims = module.check(arrays)
    record = result.record | {"claims": [dataclasses.asdict(claim) for claim in claims]}
    return dataclasses.replace(result, arrays=arrays, claims=claims, record=record)


def _refuse_shorter(there: dict[str, dict[str, Any]], here: dict[str, dict[str, Any]]) -> None:
    """Refuse runs that had not ended if the same run is stored and has come farther, or has ended."""
    for name, one in here.items():
        before = there.get(name, {"reached": 0})
        if "reached" in one and before.get("reached", one["steps"]) > one["reached"]:
            rule = f"must not replace {name}, which has come farther"
            raise InputError("--join", rule, f"{one['reached']} steps here", "let it go on, or store it elsewhere")


def _run_of(key: str, runs: Iterable[str]) -> str | None:
    """The run that an array is of: the longest name with which its key begins.

    >>> _run_of("simclr-x4.z.t", ["simclr", "simclr-x4"]), _run_of("bt.small.grown", ["bt small"]), _run_of("d", ["bt"])
    ('simclr-x4', 'bt small', None)
    """
    begins = {run: tuple(name + end for name in (run, run.replace(" ", ".")) for end in ".-") for run in runs}
    return max((run for run in runs if key.startswith(begins[run])), key=len, default=None)


def store(result: Result, stored: Path) -> list[Path]:
    """Store a result as NAME.npz, NAME.json and NAME.png; it does not replace runs of other seeds."""
    size = (result.folder / "arrays.npz").stat().st_size
    if size > LARGEST:
        raise InputError(result.name, f"must be at most {LARGEST / 1e3:.0f} kB to be stored", f"{size / 1e3:.0f} kB")
    if result.name in stored_names(stored):
        _refuse_other_seeds(_seeds(load_arrays(stored / f"{result.name}.npz")), _seeds(result.arrays), stored)
    save_arrays(stored / f"{result.name}.npz", result.arrays)
    config = {k: v for k, v in result.record["config"].items() if k not in PLACES}
    left_out = {"claims", "source"} | ({"code"} if result.record.get("commit") else set())
    record = {k: v for k, v in result.record.items() if k not in left_out}
    save_json(stored / f"{result.name}.json", record | {"config": config})
    with atomic(stored / f"{result.name}.png") as part:
        part.write_bytes((result.folder / "figure.png").read_bytes())
    return [stored / f"{result.name}.{suffix}" for suffix in ("npz", "json", "png")]


def check_place(name: str, settings: dict[str, Any], stored: Path) -> None:
    """Refuse, before the work, to store runs where those of another seed are."""
    config = _configure(_module(name), settings)
    if hasattr(config, "run_seed") and not hasattr(config, "seeds") and name in stored_names(stored):
        _refuse_other_seeds(_seeds(load_arrays(stored / f"{name}.npz")), {config.run_seed}, stored)


def _seeds(arrays: Arrays) -> set[int]:
    """Seeds of the trained runs in the arrays."""
    runs = json.loads(str(arrays["about"])) if "about" in arrays else {}
    return {int(one.get("seed", 0)) for one in runs.values()}


def _refuse_other_seeds(there: set[int], here: set[int], stored: Path) -> None:
    if here and there - here:
        old, new = (" and ".join(str(seed) for seed in sorted(seeds)) for seeds in (there, here))
        rule = f"must not replace or join runs of other seeds than {new}"
        raise InputError("--store", rule, f"seed {old} in {stored}", f"name another folder, such as seed{max(here)}")


def page(result: Result) -> Page:
    """The HTML page of an experiment: the module's page, with its figure and its claims."""
    module = _module(result.name)
    config = _configure(module, result.record["config"])
    facts = {
        "command": f"stairwise reproduce {result.name}" + _arguments(config),
        "configuration": ", ".join(f"{k} = {v}" for k, v in result.record["config"].items()),
        "time": f"{result.record['seconds']:g} s on {result.record['device']}"
        + (", without the training of the runs below" if "about" in result.arrays else ""),
        "versions": ", ".join(f"{k} {v}" for k, v in result.record["versions"].items()),
        "commit": str(result.record["commit"] or "not in a git checkout"),
        "made": result.record["made"],
    }
    made: Page = module.page(result.arrays)
    picture = Picture(result.folder / "figure.png", module.ALT)
    return dataclasses.replace(
        made, tables=[*made.tables, claims_table(result.claims)], pictures=[picture], facts=facts
    )


def _module(name: str) -> ModuleType:
    one_of(name, "experiment", CATALOG)
    return import_module(f"stairwise.paper.{name}")


def _configure(module: ModuleType, settings: dict[str, Any]) -> Any:
    """Make the module's Config from settings given as values or as text."""
    known = {field.name: field for field in dataclasses.fields(module.Config)}
    values = {}
    for key, value in settings.items():
        one_of(key, "setting", known)
        kind: type = type(known[key].default)
        try:
            values[key] = {"true": True, "false": False}[str(value).lower()] if kind is bool else kind(value)
        except (TypeError, ValueError, KeyError):
            raise InputError(key, f"must be of type {kind.__name__}", repr(value)) from None
    return module.Config(**values)


def _changed(config: Any) -> dict[str, Any]:
    return {f.name: v for f in dataclasses.fields(config) if (v := getattr(config, f.name)) != f.default}


def _folder_name(name: str, config: Any) -> str:
    parts = [name, *(f"{k}={v}" for k, v in _changed(config).items())]
    whole = re.sub(r"[^\w.,=+-]+", "_", ",".join(parts))
    return whole if len(whole) <= LONGEST else f"{whole[: LONGEST - 9]}-{sha256(whole.encode()).hexdigest()[:8]}"


def _arguments(config: Any) -> str:
    return "".join(f" --data {v}" if k == "data" else f" --set {k}={v}" for k, v in _changed(config).items())


def _stored(folder: Path, config: Any) -> dict[str, Any] | None:
    """The record of a finished run of this configuration by this code."""
    try:
        record = json.loads((folder / "check.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    complete = all((folder / name).is_file() for name in ("arrays.npz", "figure.png", "figure.pdf"))
    same = record.get("config") == dataclasses.asdict(config) and record.get("source") == _source(config)
    return record if complete and same and record.get("code") == code_digest() else None


def _source(config: Any) -> str:
    """A text that changes when the data or the runs change."""
    if hasattr(config, "source"):
        return str(config.source())
    return fingerprint(config.data) if hasattr(config, "data") else ""


def _save_figure(module: ModuleType, arrays: Arrays, folder: Path) -> None:
    from stairwise.figures.style import style

    with style():
        figure = module.draw(arrays)
        for suffix in ("png", "pdf"):
            with atomic(folder / f"figure.{suffix}") as part:
                figure.savefig(part)
            figure.set_layout_engine("none")  # it is laid out by now, and the second file keeps that
