"""Every public function and class, with every hostile value in every argument: a finite result or an InputError."""

import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch

import stairwise as sw
from stairwise.checks import RunWarning, as_numpy
from tests.hostile import calls, hostile, public_names

SECONDS = 10.0  # per call
# documented: steps that are never taken, and what comes after the end of a schedule
INFINITE = ("step_times", "predict", "predict, muon", "predict_staircase", "predict_staircase, muon", "Clock")


def cases():
    for name, call in calls().items():
        for argument in call[1] if call else ():
            yield pytest.param(name, argument, id=f"{name}-{argument}")


def numbers(result, depth=0):
    """All floating-point arrays in a result."""
    if isinstance(result, torch.Tensor):
        yield result.detach().double().numpy()
    elif isinstance(result, float | complex | np.ndarray | np.generic):
        yield np.asarray(result)
    elif depth < 4 and is_dataclass(result) and not isinstance(result, type):
        yield from (n for f in fields(result) for n in numbers(getattr(result, f.name), depth + 1))
    elif depth < 4 and isinstance(result, Mapping):
        yield from (n for one in result.values() for n in numbers(one, depth + 1))
    elif depth < 4 and isinstance(result, list | tuple):
        yield from (n for one in result for n in numbers(one, depth + 1))


def excused(name, argument, what, value, outcome):
    """What is neither a finite result nor an InputError, and right."""
    if name.startswith("losses.") or name == "precondition":
        # NaN and inf in embeddings are passed on, because a check would make the GPU wait at every step
        given = isinstance(value, torch.Tensor) and not bool(value.isfinite().all())
        return given and outcome in ("NaN", "inf")
    if outcome == "inf":
        with np.errstate(over="ignore"):
            repeated = argument in ("t", "times") and not np.isfinite(as_numpy(value).astype(float)).all()
        return repeated or name.rpartition(".")[2] in INFINITE or name.startswith("Clock.")
    return (name, argument, what, outcome) in {
        ("Clock", "seconds", "None", "NaN"),  # documented: unknown
        ("KernelSSL", "kernel", "function", "TypeError"),  # the user's own function raises
        ("KernelSSL, many pairs", "kernel", "function", "TypeError"),
        ("KernelSSL, random features", "kernel", "function", "TypeError"),
        ("KernelSSL, many pairs", "progress", "function", "TypeError"),
        ("KernelSSL, many pairs", "progress", "class", "TypeError"),
        ("KernelSSL.load", "path", "text", "FileNotFoundError"),
        ("KernelSSL.load", "path", "path", "FileNotFoundError"),
    }


def says_why(error, arguments, argument):
    """Whether the message has a rule, and names an argument of the call or what was made from one."""
    named = [*arguments, argument, "x_a", "X", "lr", "kernel", "views", "n_components", "Γ"]
    named += ["monitor", "recipe", "parameter", "KernelSSL", "alpha", "s_bar", "seed", "option", "d"]
    return "must" in str(error) or "is unknown" in str(error) or "need" in str(error), any(
        re.search(rf"(?<!\w)-*{re.escape(one)}", str(error)) for one in named
    )


def tried(function, arguments, argument, value):
    """What is wrong with the outcome of a call, and its words; nothing if it is finite or an error that says why."""
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("error")
            for expected in (RunWarning, sw.TheoryWarning):
                warnings.simplefilter("always", expected)
            result = function(**arguments | {argument: value})
    except sw.InputError as error:
        return ("" if all(says_why(error, arguments, argument)) else "no argument or rule is named"), str(error)
    except (Exception, SystemExit) as error:
        return type(error).__name__, str(error)[:200]
    found = [one for one in numbers(result) if one.dtype.kind in "fc"]
    if any(one.category is RunWarning for one in heard) or all(np.isfinite(one).all() for one in found):
        return "", ""
    return "NaN" if any(np.isnan(one).any() for one in found) else "inf", "in the result"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "argument"), list(cases()))
def test_a_finite_result_or_an_error_that_names_the_argument(name, argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function, arguments = calls()[name]
    faults = []
    for what, value in hostile(arguments[argument]):
        began = time.perf_counter()
        outcome, words = tried(function, arguments, argument, value)
        if outcome and not excused(name, argument, what, value, outcome):
            faults.append(f"{what}: {outcome}: {words}")
        if time.perf_counter() - began > SECONDS:
            faults.append(f"{what}: took {time.perf_counter() - began:.0f} s")
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults)


def test_every_public_name_is_tried():
    tried = set(calls())
    assert set(public_names()) <= tried, "add a valid call of it to tests/hostile.py"


@pytest.mark.parametrize("name", [name for name, call in calls().items() if call])
def test_the_valid_call_is_valid(name, tmp_path, monkeypatch):
    """Otherwise the hostile value would not be what is refused."""
    monkeypatch.chdir(tmp_path)
    function, arguments = calls()[name]
    if any(str(value).startswith("nowhere") or isinstance(value, sw.Run) for value in arguments.values()):
        pytest.skip("needs files")
    result = function(**arguments)
    assert all(np.isfinite(found).all() for found in numbers(result) if found.dtype.kind in "fc")
