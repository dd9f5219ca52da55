"""Train the corpus and store its curves: `python -m benchmarks.corpus.make --images cifar10=FILE.npz --out FOLDER`.

Each run is a dictionary of settings, drawn from the number of the run. Runs with the same loss, data and architecture
form a group, and whole groups are in one part of the corpus, so that nothing is tuned on a neighbour of a run that is
reported: the first two parts share their architectures (`held` tells them apart), from the eighth on each part has
images of its own, and every other part has an architecture of its own. `images.py` makes or reads the images.
A run that has a file in the folder is not trained again.
"""

import argparse
import json
import time
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stairwise as sw
from benchmarks.corpus.images import Source
from benchmarks.corpus.methods import FAULTS_OF, Method, build, factor, optimizer_of
from benchmarks.corpus.store import read

RECORDS = 60
LOSSES = tuple(FAULTS_OF)
SMALL = ("barlow_twins", "barlow_twins_norm", "simclr", "vicreg", "spectral")  # small initialization makes a staircase
ARCHITECTURES = {"mlp": ("digits", "photos", "cifar10"), "resnet": ("photos", "cifar10"), "vit": ("digits", "cifar10")}
ARCHITECTURES["cnn"] = ARCHITECTURES["mixer"] = ("digits", "photos", "cifar10")
ARCHITECTURES |= {"shallow": ("digits", "photos"), "recurrent": ("digits", "photos", "cifar10")}
ARCHITECTURES["patches"] = ARCHITECTURES["recurrent"]
STEPS = {"cnn": (720, 1200), "mixer": (720, 1200), "mlp": (900, 1800), "resnet": (600, 1080), "vit": (600, 1080)}
STEPS |= {"shallow": (720, 1200), "recurrent": (540, 840), "patches": (420, 660), "gated": (540, 840)}
# images of the last parts, which are trained for fewer steps
LATE = ("stl10", "leaves", "clouds", "strokes", "closeups")
LATE_STEPS = STEPS | {"cnn": (480, 720), "mixer": (420, 660), "mlp": (540, 1080), "resnet": (360, 600)}
LATE_STEPS |= {"shallow": (540, 840), "vit": (300, 480)}
DONE = {"mlp": 2400, "recurrent": 1200, "patches": 900}  # steps to learn all they can; else 1800
LATE_DONE = dict.fromkeys(STEPS, 1200) | dict.fromkeys(("mixer", "resnet", "vit"), 720)
# share of runs that normalize z, with these losses:
UNIT = {"shallow": 0.6, "recurrent": 0.4, "patches": 0.4} | dict.fromkeys(LATE, 0.4)
NORMALIZED = ("simclr", "spectral", "byol", "simsiam")
RATES = {  # of SGD with momentum 0.9
    "barlow_twins": 0.01,
    "barlow_twins_norm": 0.01,
    "simclr": 0.05,
    "vicreg": 0.005,
    "spectral": 0.01,
    "byol": 0.05,
    "simsiam": 0.05,
    "dino": 0.02,
}
REPEATS = {
    "mlp": {
        "standard": 4,
        "small": 4,
        "finished": 3,
        "slow": 1,
        "frozen": 1,
        "large": 2,
        "fault": 4,
        "midway": 2,
    },
    "resnet": {"standard": 2, "small": 2, "finished": 1, "slow": 1, "large": 1, "fault": 2, "midway": 1},
    "vit": {"standard": 1, "small": 1, "finished": 1, "frozen": 1, "large": 1, "fault": 2},
}


# added later, for narrower intervals: healthy runs, and runs that surely finish
MORE = {"mlp": {"done": (0, 6), "standard": (4, 8), "small": (4, 7)}}
# each made after the words had been judged on all runs before, with an architecture that none of these has
THIRD = {"cnn": {"standard": (0, 6), "small": (0, 4), "done": (0, 3), "fault": (0, 2), "midway": (0, 1)}}
LAST = {"mixer": THIRD["cnn"]}
MORE_OF_LAST = {"mixer": {"done": (3, 8), "standard": (6, 9)}}  # for narrower intervals, with nothing changed
STILL_MORE = {"mixer": {"fault": (2, 6), "midway": (1, 4)}}
# made after a review: one part to choose rules on, and one to judge them that has every scenario
FIFTH = {"shallow": {"standard": (0, 3), "fault": (0, 4), "midway": (0, 2), "done": (0, 1)}}
SIXTH = {
    "recurrent": {
        **{"standard": (0, 5), "small": (0, 4), "finished": (0, 2), "done": (0, 8), "slow": (0, 1), "frozen": (0, 1)},
        **{"large": (0, 2), "fault": (0, 6), "midway": (0, 7)},
    }
}
# made after the sixth part had been judged, to judge rules that were changed with it in view
SEVENTH = {"patches": SIXTH["recurrent"] | {"done": (0, 6), "fault": (0, 10), "midway": (0, 10)}}
# made after the seventh part had been judged: all architectures, on images that no other part has
CHEAP = {"standard": (0, 4), "small": (0, 3), "finished": (0, 1), "done": (0, 3), "slow": (0, 1), "frozen": (0, 1)}
CHEAP |= {"large": (0, 1), "fault": (0, 5), "midway": (0, 5)}
DEAR = CHEAP | {"standard": (0, 2), "small": (0, 1), "done": (0, 1), "fault": (0, 3), "midway": (0, 3)}
EIGHTH = {name: DEAR if name in ("resnet", "vit", "mixer") else CHEAP for name in ARCHITECTURES}
# made after the eighth part had been judged, to judge rules that were changed with it in view
NINTH = dict.fromkeys(("mlp", "cnn", "shallow", "recurrent", "patches"), CHEAP)
# made after the ninth part had been judged, for narrower intervals, with nothing changed
MANY = CHEAP | {"standard": (0, 14), "small": (0, 10), "done": (0, 6), "slow": (0, 2), "frozen": (0, 2)}
TENTH = dict.fromkeys(NINTH, MANY | {"fault": (0, 8), "midway": (0, 8)})
# defined after the tenth part had been judged, before any rule was changed: two kinds of images, one of them real, and
# an architecture that no part has had
ARCHITECTURES["gated"] = ()
HALF = CHEAP | {"small": (0, 4), "done": (0, 2), "fault": (0, 4), "midway": (0, 4)}
ELEVENTH = dict.fromkeys((*NINTH, "gated"), HALF)
# images that only one part has
OWN = {"stl10": EIGHTH, "leaves": NINTH, "clouds": TENTH, "strokes": ELEVENTH, "closeups": ELEVENTH}


def settings() -> list[dict[str, Any]]:
    """All runs of the corpus."""
    first = {name: {scenario: (0, k) for scenario, k in table.items()} for name, table in REPEATS.items()}
    runs: list[dict[str, Any]] = []
    shared = (first, MORE, THIRD, LAST, MORE_OF_LAST, STILL_MORE, FIFTH, SIXTH, SEVENTH)
    parts: list[tuple[dict[str, Any], tuple[str, ...]]] = [(tables, ()) for tables in shared]
    for tables, own in [*parts, *((tables, (data,)) for data, tables in OWN.items())]:
        for architecture, table in tables.items():
            for s, data in enumerate(own or ARCHITECTURES[architecture]):
                for k, loss in enumerate(LOSSES):
                    held = (k + s + list(ARCHITECTURES).index(architecture)) % 2 == 1
                    for scenario, numbers in table.items():
                        if scenario == "small" and loss not in SMALL:
                            continue
                        for i in range(*numbers):
                            run = _draw(len(runs), loss, data, architecture, scenario, i)
                            group = f"{loss}-{data}-{architecture}"
                            runs.append(
                                run
                                | {
                                    "name": f"{group}-{scenario}{i}",
                                    "group": group,
                                    "held": held,
                                    "later": tables is MORE,
                                }
                            )
    return runs


def _draw(seed: int, loss: str, data: str, architecture: str, scenario: str, i: int) -> dict[str, Any]:
    """Random settings of one run."""
    rng = np.random.default_rng(seed)
    d = int(rng.choice([8, 16, 32, 64, 128, 512], p=[0.2, 0.25, 0.27, 0.17, 0.08, 0.03]))
    optimizer = str(rng.choice(["sgd", "lars", "adam"], p=[0.45, 0.2, 0.35]))
    lr = {"sgd": RATES[loss], "lars": 0.15, "adam": 1e-3}[optimizer] * 2 ** rng.uniform(-1, 1)
    steps = int(rng.integers(*(LATE_STEPS if data in LATE else STEPS)[architecture]) // RECORDS * RECORDS)
    run = {
        "seed": seed,
        "loss": loss,
        "data": data,
        "architecture": architecture,
        "scenario": scenario,
        "d": d,
        "optimizer": optimizer,
        "lr": float(lr),
        "batch": int(rng.choice([64, 128, 256])),
        "steps": steps,
        "schedule": str(rng.choice(["constant", "cosine"], p=[0.7, 0.3])),
        "norm": bool(rng.random() < 0.6),
        "alpha": 1.0,
        "classes": 0,
        "fault": "",
        "fault_at": 0.0,
    }
    run |= _of_scenario(run, rng, i)
    if architecture in UNIT or data in UNIT:
        run |= {"unit": bool(loss in NORMALIZED and rng.random() < UNIT.get(data, UNIT.get(architecture, 0.0)))}
    return run


def _of_scenario(run: dict[str, Any], rng: np.random.Generator, i: int) -> dict[str, Any]:
    """Settings of the i-th run of a group and scenario that differ from those of a standard one."""
    d, lr, steps, loss = (run[name] for name in ("d", "lr", "steps", "loss"))
    match run["scenario"]:
        case "small":
            return {"alpha": float(10 ** rng.uniform(-3.5, -1.5)), "schedule": "constant"}
        case "finished":  # either few dimensions, or views of one class, which share no more than their class
            few = bool(rng.random() < 0.4)
            size = {
                "d": int(rng.choice([4, 8])) if few else max(d, 16),
                "classes": 0 if few else int(rng.integers(3, 8)),
            }
            return size | {"steps": 2 * steps, "schedule": "constant", "alpha": float(10 ** rng.uniform(-2, 0))}
        case "done":
            few = run["data"] != "digits" or i % 2 == 0
            size = {"d": int(rng.choice([3, 4, 6])) if few else max(d, 16)}
            size |= {"classes": 0 if few else int(rng.integers(3, 6))}
            way = {"optimizer": "adam", "lr": 1e-3 * 2 ** rng.uniform(-0.5, 1), "norm": True}
            steps = (LATE_DONE if run["data"] in LATE else DONE).get(run["architecture"], 1800)
            way |= {"steps": steps}
            return size | way | {"schedule": "constant", "alpha": float(10 ** rng.uniform(-1.5, 0)), "batch": 128}
        case "slow":
            return {"lr": lr * 1e-4, "alpha": float(10 ** rng.uniform(-3, 0))}
        case "frozen":
            return {"lr": 0.0}
        case "large":
            return {"lr": lr * float(10 ** rng.uniform(1.5, 4))}
        case "fault":
            return {"fault": FAULTS_OF[loss][i % 2], "d": max(d, 16)}
        case "midway":
            fault = {"fault": FAULTS_OF[loss][i % 2], "d": max(d, 16)}
            return fault | {"fault_at": float(rng.uniform(0.3, 0.5)), "schedule": "constant"}
    return {}


def train(run: dict[str, Any], files: Mapping[str, Path], device: str) -> dict[str, np.ndarray]:
    """Train one run, and return its records."""
    torch.manual_seed(run["seed"])
    generator = torch.Generator(device).manual_seed(run["seed"])
    side = {"photos": 16, "cifar10": 32, "stl10": 16}.get(run["data"], 8)
    wide = {"vit": True, "resnet": run["data"] != "stl10", "mlp": run["data"] == "photos"}
    side = side if wide.get(run["architecture"]) else 8
    source = Source(run["data"], side, run["classes"], files, device, generator)
    network = build(run["architecture"], source.side, source.channels, run["d"], run["norm"])
    with torch.no_grad():
        for p in network[1][-1].parameters():
            p.mul_(run["alpha"])
    method = Method(network, run["loss"], run["d"], run.get("unit", False)).to(device)
    optimizer = optimizer_of(run["optimizer"], method.trained(), run["lr"])
    monitor, rows, t, losses = sw.SpectrumMonitor(), [], 0.0, []
    every = run["steps"] // RECORDS
    for step in range(run["steps"]):
        optimizer.param_groups[0]["lr"] = run["lr"] * factor(step, run["steps"], run["schedule"])
        fault = run["fault"] if step >= run["fault_at"] * run["steps"] else ""
        loss, z_a, z_b = method(*source.pair(run["batch"]), fault)
        monitor.collect(z_a.detach(), z_b.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        method.after_step()
        t += optimizer.param_groups[0]["lr"] or 1e-3  # a frozen run still has a time
        losses.append(loss.detach())
        if (step + 1) % every == 0:
            rows.append(_measured(monitor, run["d"], step + 1, t, torch.stack(losses).mean().item()))
            losses = []
            monitor.reset()
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _measured(monitor: sw.SpectrumMonitor, d: int, step: int, t: float, loss: float) -> dict[str, Any]:
    try:
        s = monitor.compute()
        values = {"eigenvalues": s.eigenvalues, "covariance": s.covariance, "mean_square": s.mean_square}
        values |= {"positive": s.positive, "negative": s.negative, "batch": s.batch}
    except Exception:  # nothing finite since the last record
        none = np.full(d, np.nan)
        values = {"eigenvalues": none, "covariance": none}
        values |= dict.fromkeys(("mean_square", "positive", "negative", "batch"), np.nan)
    return {"step": step, "t": t, "loss": loss} | values


def _work(job: tuple[dict[str, Any], Mapping[str, Path], Path, str, float]) -> str:
    run, files, out, device, stop = job
    target = out / f"{run['name']}.npz"
    if target.exists() or time.time() > stop:
        return ""
    torch.set_num_threads(1)
    began = time.perf_counter()
    try:
        arrays = train(run, files, device)
    except Exception as error:  # one run must not stop the others
        return f"FAILED {run['name']}: {error!r}"
    followed = "eigenvalues" if run["loss"] == "barlow_twins" else "covariance"
    arrays["trace_c"], arrays["trace_cov"] = arrays["eigenvalues"].sum(axis=1), arrays["covariance"].sum(axis=1)
    arrays["lam"] = arrays.pop(followed)
    arrays.pop("covariance" if followed == "eigenvalues" else "eigenvalues")
    arrays["settings"] = np.array(json.dumps(run))
    partial = target.with_suffix(".part.npz")
    np.savez(partial, **arrays)
    partial.replace(target)
    return (
        f"{time.perf_counter() - began:6.1f} s  {run['name']}  loss {arrays['loss'][0]:.3g} → {arrays['loss'][-1]:.3g}"
    )


def _image_file(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    return name, Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    about = "NAME=FILE.npz with pixels (N, 32, 32, 3) and labels (N,), for cifar10, stl10 and closeups; may be repeated"
    parser.add_argument("--images", type=_image_file, action="append", default=[], help=about)
    parser.add_argument("--out", type=Path, default=Path("local/corpus"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default=",".join(ARCHITECTURES), help="architectures, separated by commas")
    parser.add_argument("--data", default="digits,photos,cifar10", help="images, separated by commas")
    parser.add_argument("--but", type=Path, help="a packed file whose runs are not trained again")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after this long")
    parser.add_argument("--more", action="store_true", help="only the runs that were added later")
    parser.add_argument("--every", type=int, default=1, help="train every k-th run only")
    parser.add_argument("--backwards", action="store_true", help="last runs first, beside another process")
    choice = parser.parse_args()
    choice.out.mkdir(parents=True, exist_ok=True)
    chosen = [run for run in settings() if run["architecture"] in choice.only.split(",")]
    wanted = [run for run in chosen if run["data"] in choice.data.split(",") and (run["later"] or not choice.more)]
    order = np.random.default_rng(0).permutation(len(wanted))[:: choice.every]  # an interrupted corpus is balanced
    order = order[::-1] if choice.backwards else order
    trained = {run.name for run in read(choice.but)} if choice.but else set()
    stop = time.time() + 60 * choice.minutes
    files = dict(choice.images)
    jobs = [(wanted[i], files, choice.out, choice.device, stop) for i in order if wanted[i]["name"] not in trained]
    with get_context("spawn").Pool(choice.workers) as pool:
        for k, line in enumerate(pool.imap_unordered(_work, jobs)):
            if line:
                print(f"{k + 1}/{len(jobs)} {line}", flush=True)


if __name__ == "__main__":
    main()
