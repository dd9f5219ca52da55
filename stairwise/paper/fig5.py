"""Fig. 5: from small initialization, hidden representations rise in steps at the same times as the embeddings.

    stairwise reproduce fig5                      uses the runs of fig1cd and fig2cf
    stairwise reproduce fig5 --set methods=bt --set fast=true    Barlow Twins, and the same at twice the learning rate
    stairwise reproduce fig5 --set methods=bt --set only=x4      one run alone; --store FOLDER --join adds it
    stairwise reproduce fig5 --data cifar10
    stairwise reproduce fig5 --smoke              seconds on a CPU, photographs; its numbers mean nothing

Trained on 9000 of STL-10's 13,000 labelled images (docs/results/stl10.md); the paper used 105,000.
Top: eigenvalues of the embeddings (of C for Barlow Twins, of the covariance for the others), bottom: of the covariance
of the representations before the head. Expected from the paper: the changes of their total variances correlate with
almost no lag, and more than if one is shifted in time. In our runs this correlation is weak. The shape of the spectrum
of h, and the share of h along each new mode of z on fixed views, are scored against shifted times: z of at least 4.
In runs that have followed fixed views, which all new ones do, the share alone is judged and the others are notes. So
are the score of z itself, for comparison; the score without the step on which it leans most; and two controls: the
share along the modes of other steps that are not near, and along directions that are chosen in the same way, but
between the steps.
"""

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stairwise.checks import InputError
from stairwise.figures.training import Layers, draw_layers
from stairwise.paper import trained
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Page
from stairwise.runs.reader import Run
from stairwise.staircase.events import Events, share_events, spectrum_events
from stairwise.staircase.growth import Rest
from stairwise.staircase.shares import Shares
from stairwise.staircase.steps import coupling
from stairwise.table import Table
from stairwise.training.following import followed_summary

OPENING = 0.06  # share of the time that one comparison leaves out, because everything grows at first
ALONG, CONTROL = "share of h along new modes", "share of h along directions between steps"
OWN = "share of z along new modes, for comparison"
WITHOUT, ELSEWHERE = f"{ALONG}, without the best step", "share of h along the modes of other steps"
ENOUGH = 24  # records, for a score
LATER = {"vicreg": 3.0}  # z without its first step, at its end; written on 2026-11-19 (docs/results/predictions.md)
LEFT_OUT = (".every", ".loss")  # arrays of curves that are not shown here
ALT = "Eigenvalues of embeddings and of hidden representations over training time."


@dataclass(frozen=True)
class Config(trained.RunsConfig):
    """E4, E6 and E8 of the paper; fast: also Barlow Twins at twice the learning rate; only: these kinds of runs."""

    kinds = (trained.SMALL, trained.FAST)
    fast: bool = False
    only: str = ""


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Both spectra over time, and their total variances."""
    if config.fast and config.chosen() != ["bt"]:
        raise InputError("methods", "must be bt if fast is true", config.methods, "set only one of them")
    usual = ["small", *(["fast"] if config.fast else [])]
    kinds = trained.chosen_kinds(config.only, config.chosen(), usual, trained.FROM_SMALL)
    runs = trained.obtain_small(config, kinds, progress)
    arrays = trained.about(runs)
    for method, run in runs.items():
        series = "eigenvalues" if method.startswith("bt") else "covariance"
        both = trained.curves(f"{method}.z", run, series) | trained.curves(f"{method}.h", run, "hidden")
        arrays |= {name: array for name, array in both.items() if not name.endswith(LEFT_OUT)}
        total = [_variance(run, name) for name in (series, "hidden")]
        arrays[f"{method}.total"] = np.stack([run.times, *total]).astype(np.float32)
        arrays |= _shares(method, run)
        arrays[f"{method}.shape"] = _shape(arrays, method)
    return arrays


def _shares(method: str, run: Run) -> dict[str, Any]:
    """Number of followed images and, if there are steps, the shares of z and h along each new mode; nothing of runs
    that were made before views were followed."""
    follow = int(run.recipe.get("follow", 0))
    found = followed_summary(run)
    if not found and not follow:
        return {}
    if not found:
        remedy = "copy RUN/followed or its summary.npz, too, or train it again"
        raise InputError(str(run.folder), f"must have the {follow} images that it has followed", "none", remedy)
    views = {f"{method}.followed": np.array(follow)}
    if "share.h" not in found:
        return views
    views[f"{method}.share.t"] = found["t"].astype(np.float32)
    for name in ("share.times", "share.z", "share.h", "control.times", "control.h"):
        if name in found:
            views[f"{method}.{name}"] = found[name].astype(np.float16 if found[name].ndim > 1 else np.float32)
    return views


def events(arrays: Arrays, method: str) -> dict[str, Events]:
    """Scores against shifted times: of the shape of h's spectrum, and of the shares of h along new modes, if known."""
    key = f"{method}.shape"
    score, shifted, z, lag, count = arrays[key] if key in arrays else _shape(arrays, method)
    found = {"shape of the spectrum of h": Events(score, shifted, z, int(lag), int(count))} if count else {}
    if f"{method}.share.h" in arrays and len(arrays[f"{method}.share.t"]) > ENOUGH:
        shares = along(arrays, method)
        found[ALONG], found[OWN] = shares.events, shares.own
        if len(shares.times) > 1:
            found[WITHOUT] = shares.without_best
            if (elsewhere := shares.elsewhere) is not None:
                found[ELSEWHERE] = elsewhere
        if f"{method}.control.h" in arrays:
            t, h, times = (arrays[f"{method}.{x}"].astype(float) for x in ("share.t", "control.h", "control.times"))
            found[CONTROL] = share_events(t, h, times)
    return found


def _shape(arrays: Arrays, method: str) -> NDArray:
    """Score of the shape of h's spectrum, as `Events` has it; zeros without steps."""
    times = trained.steps_of(arrays, f"{method}.z").times
    t, lam = (arrays[f"{method}.h.{x}"].astype(float) for x in ("t", "lam"))
    if not len(times) or len(t) <= ENOUGH:
        return np.zeros(5)
    return np.array(astuple(spectrum_events(t, lam, times)))


def along(arrays: Arrays, method: str) -> Shares:
    """The stored shares along new modes."""
    return Shares(*(arrays[f"{method}.share.{x}"].astype(float) for x in ("t", "times", "z", "h")))


def _variance(run: Run, name: str) -> NDArray:
    """Sum of all positive eigenvalues over time, (T,), also of those not recorded."""
    lam = run.series(name)
    return Rest.of(lam, run.totals(name), run.dimensions(name)).totals(lam)[:, 0]


def together(arrays: Arrays, method: str) -> dict[str, tuple[float, ...]]:
    """For each part of the time: correlation of the changes of total variance, its 99 % quantile by chance, the
    correlation at the best lag, and that lag as a share of the whole time."""
    t, z, h = arrays[f"{method}.total"].astype(float)
    correlations: dict[str, tuple[float, ...]] = {}
    for when, late in (("", t >= 0), (", without the opening", t > OPENING * t[-1])):
        one = coupling(t[late], z[late, None], h[late, None])
        correlations[when] = (one.unshifted, one.by_chance, one.correlation, one.lag / (t[-1] - t[0]))
    return correlations


def joined(arrays: Arrays) -> Arrays:
    """Fewer modes of each run, so that all runs together can be stored; scores of older runs are kept as they were."""
    runs = trained.methods_in(arrays)
    missing = [m for m in runs if f"{m}.shape" not in arrays]
    shown = {key: array for key, array in arrays.items() if not key.endswith(LEFT_OUT)}  # stored before they were
    most = 24 if len(runs) <= 5 else 20 if len(runs) <= 6 else 12
    return trained.lighter(shown, most) | {f"{m}.shape": _shape(arrays, m) for m in missing}


def check(arrays: Arrays) -> list[Claim]:
    claims = []
    for m in trained.methods_in(arrays):
        followed = f"{m}.followed" in arrays
        for when, numbers in together(arrays, m).items():
            claims += (_notes if followed else _judged)(trained.title(arrays, m), when, *numbers)
        scores = {what: found.z for what, found in events(arrays, m).items()}
        for what, z in ((scores | {ALONG: scores.get(ALONG, np.nan)}) if followed else scores).items():
            text = f"{trained.title(arrays, m)}: {what}, z against shifted times"
            judged = what == ALONG or not followed  # slow steps hardly change the shape, but the share
            early = bool(trained.so_far(arrays, m)) and not z >= 4  # more may come
            claims.append(Claim.at_least(text, z, 4) if judged and not early else Claim.note(text, z))
        ended = followed and not trained.so_far(arrays, m)
        if m in LATER and ended and trained.foretold(arrays, m) and WITHOUT in scores:
            text = f"{trained.title(arrays, m)}: {ALONG}, z without the first step, predicted later"
            claims.append(Claim.at_least(text, along(arrays, m).without_first.z, LATER[m]))
    return claims


def _judged(title: str, when: str, unshifted: float, chance: float, _: float, lag: float) -> list[Claim]:
    text, bound = f"{title}: the same, against chance{when}", f"> {chance:.3f}, 99 % of shifts in time"
    return [
        Claim.at_least(f"{title}: correlation of the changes{when}", unshifted, 0.5),
        Claim(text, unshifted, bound, unshifted > chance),
        Claim.at_most(f"{title}: |best lag|, as a share of the whole time{when}", abs(lag), 0.02),
    ]


def _notes(title: str, when: str, unshifted: float, chance: float, _: float, lag: float) -> list[Claim]:
    """The same numbers of a run that is judged by what it has followed."""
    return [
        Claim.note(f"{title}: correlation of the changes{when}", unshifted),
        Claim.note(f"{title}: 99 % of shifts in time stay below{when}", chance),
        Claim.note(f"{title}: |best lag|, as a share of the whole time{when}", abs(lag)),
    ]


def events_table(arrays: Arrays) -> Table:
    rows = []
    for m in trained.methods_in(arrays):
        for what, found in events(arrays, m).items():
            pair = f"{along(arrays, m).correlation:.2f}" if what == ALONG else "–"
            rows.append(
                [
                    trained.title(arrays, m),
                    what,
                    str(found.count),
                    f"{found.score:.2f}",
                    f"{found.shifted:.2f}",
                    f"{found.z:.1f}",
                    pair,
                ]
            )
    header = [
        "method",
        "what moves",
        "steps",
        "at the steps",
        "at shifted times",
        "z",
        "correlation with the embeddings' share",
    ]
    return Table("What moves at the steps of the embeddings", header, rows)


def table(arrays: Arrays) -> Table:
    rows = []
    for m in trained.methods_in(arrays):
        for when, (unshifted, chance, correlation, lag) in together(arrays, m).items():
            rows.append(
                [
                    trained.title(arrays, m) + when,
                    f"{unshifted:.3f}",
                    f"{chance:.3f}",
                    f"{correlation:.3f}",
                    f"{100 * lag:+.2f} %",
                ]
            )
    header = ["method", "correlation", "99 % of shifts stay below", "at the best lag", "that lag, of the whole time"]
    return Table("Embeddings and representations", header, rows)


def draw(arrays: Arrays) -> Figure:
    return draw_layers([_layers(arrays, m) for m in trained.methods_in(arrays)])


def _layers(arrays: Arrays, method: str) -> Layers:
    t, z = arrays[f"{method}.z.t"], arrays[f"{method}.z.lam"]
    of = "C" if method.startswith("bt") else "Cov z"
    around = along(arrays, method).around() if f"{method}.share.h" in arrays else None
    steps = trained.steps_of(arrays, f"{method}.z").times
    return Layers(trained.title(arrays, method), t, z, arrays[f"{method}.h.lam"], of, steps, around)


def page(arrays: Arrays) -> Page:
    layers = [
        (f"{m}.{x}", f"{trained.title(arrays, m)}, {name}")
        for m in trained.methods_in(arrays)
        for x, name in (("z", "embeddings"), ("h", "representations"))
    ]
    return Page(
        "Hidden representations step with the embeddings",
        "Eigenvalues of the embeddings and of the representations before the head, over training time.",
        trained.spectrum_panels(arrays, layers),
        [table(arrays), events_table(arrays), trained.runs_table(arrays)],
    )
