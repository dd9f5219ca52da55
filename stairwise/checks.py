"""Checks of arguments, and the error they raise: it names the argument, the rule, the value and the remedy."""

import difflib
import math
import mmap
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]
BLOCK_BYTES = 1 << 26
LARGEST = 1e50  # of weights and γ: γ s², its square and sums of many of them then stay below 1e308
SHOWN = 300  # characters of a value in a message


class InputError(ValueError):
    """Invalid argument; the message says which one, why, and how to fix it.

    >>> raise InputError("n", "must be at least 1", 0, "ask for more pairs")
    Traceback (most recent call last):
    ...
    stairwise.checks.InputError: n must be at least 1 (got 0): ask for more pairs
    """

    def __init__(self, argument: str, rule: str, value: object = None, remedy: str = "") -> None:
        got = "" if value is None else f" (got {shown(value)})"
        super().__init__(f"{argument} {rule}{got}" + (f": {remedy}" if remedy else ""))


class NotConverged(RuntimeError):
    """An iteration has reached its limit of steps; the message says how far it came."""


class TheoryWarning(UserWarning):
    """A law is used outside the conditions under which it is accurate."""


class RunWarning(UserWarning):
    """A problem of a run that does not stop it."""


def shown(value: object) -> str:
    """The value as text for a message, shortened; any value has one, also 10**5000 and objects that fail to print.

    >>> shown(0.5), shown("x" * 1000)[:5], len(shown("x" * 1000))
    ('0.5', 'xxxxx', 300)
    """
    try:
        text = str(value)
    except Exception:  # whole numbers of more than 4300 digits, and whatever a class of the user raises
        text = f"a value of type {type(value).__name__}"
    half = SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[: half - 3]} … {text[-half:]}"


def is_tensor(x: object) -> bool:
    """Whether `x` is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_numpy(x: Any) -> Array:
    """The values of `x` as a numpy array. Tensors are detached and copied to the CPU; bfloat16 becomes float32."""
    if not is_tensor(x):
        return np.asanyarray(x)
    x = x.detach().cpu()
    return np.asarray((x.float() if x.dtype == sys.modules["torch"].bfloat16 else x).numpy())


def instance(x: Any, name: str, kind: type | tuple[type, ...], remedy: str = "") -> Any:
    """Return `x` if it is an object of this class; a class, None or anything else is an error that says so."""
    if isinstance(x, kind):
        return x
    names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
    article = "an" if names[0] in "AEIO" else "a"
    raise InputError(name, f"must be {article} {names}", _typed(x), remedy)


def _typed(x: object) -> str:
    """A short value, or its type, for messages about wrong types."""
    return f"the class {x.__name__}" if isinstance(x, type) else "None" if x is None else f"a {type(x).__name__}"


def finite(x: Array, name: str, most: float | None = None) -> Array:
    """Return `x`; the error names the position of the first NaN, infinity or number larger than `most`."""
    for start, rows in in_blocks(x):
        good = np.isfinite(rows)
        if most is not None and good.all():
            good = np.abs(rows) <= np.float64(most)  # compared in float64, because float16 cannot hold it
        if not good.all():
            where = np.argwhere(~good)[0]
            value = rows[tuple(where)]
            where[0] += start
            rule, remedy = "must be finite", "drop or impute such rows"
            if np.isfinite(value):
                rule, remedy = f"must be at most {most:g} in magnitude", "scale it, so that squares do not overflow"
            raise InputError(f"{name}[{', '.join(map(str, where))}]", rule, value, remedy)
    return x


def in_blocks(x: Array) -> Iterator[tuple[int, Array]]:
    """Yield (first row number, rows) of consecutive blocks of at most 64 MiB in float64.

    Blocks of memory-mapped arrays are copied and their pages released, so that a pass takes constant memory.
    """
    step = max(1, BLOCK_BYTES // (8 * max(1, math.prod(x.shape[1:]))))
    mapped = getattr(x, "_mmap", None)
    shared = getattr(x, "mode", "c") != "c"  # a private mapping may hold changes that are not in the file
    for start in range(0, len(x), step):
        rows = x[start : start + step]
        if mapped is not None:
            rows = np.array(rows)
            if shared and hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)
        yield start, rows


def array(x: ArrayLike, name: str, ndim: int, most: float | None = None) -> Array:
    """`x` as a real, finite array of `ndim` dimensions; a numeric dtype is kept."""
    out = real(x, name)
    if out.ndim != ndim:
        raise InputError(name, f"must be {ndim}-D", f"shape {out.shape}", "reshape it")
    return finite(out, name, most)


def real(x: ArrayLike, name: str) -> Array:
    """`x` as an array of real numbers of any shape, which need not be finite; a dtype up to float64 is kept."""
    try:
        out = as_numpy(x)
    except Exception as error:  # ragged rows, tensors without values, objects that fail to convert
        raise InputError(name, "must be a rectangular array", error, "make all rows equally long") from None
    if isinstance(out, np.ma.MaskedArray):
        raise InputError(name, "must not be masked", None, "fill or drop the masked entries")
    if out.dtype.kind == "c":
        remedy = f"give its real part, or its modulus: np.abs({name})"
        raise InputError(name, "must hold real numbers", f"complex numbers, dtype {out.dtype}", remedy)
    if out.dtype.kind not in "fiub":
        if isinstance(x, int):
            raise InputError(name, "must be at most 1.8e308 in magnitude, as floats are", x, "scale it")
        if out.ndim == 0:
            raise InputError(name, "must be real numbers", _typed(x), "give a number or an array of numbers")
        raise InputError(name, "must hold real numbers", f"dtype {out.dtype}", "convert it with .astype(float)")
    if out.dtype.itemsize > 8:  # long doubles beyond 1e308 would become infinite unnoticed
        with np.errstate(over="ignore"):
            out = out.astype(np.float64)
    return out


def vector(x: ArrayLike, name: str, most: float | None = None) -> NDArray[np.float64]:
    """A finite float64 vector, up to `most` in magnitude; a scalar becomes a vector of length one."""
    out = real(x, name)
    return np.asarray(array(out[None] if out.ndim == 0 else out, name, 1, most), dtype=np.float64)


def matrix(
    x: ArrayLike, name: str, columns: int | None = None, most: float | None = None, empty: bool = False
) -> Array:
    """A finite real matrix, with `columns` columns and numbers up to `most` in magnitude if given."""
    out = array(x, name, 2, most)
    if not empty and 0 in out.shape:
        raise InputError(name, "must not be empty", f"shape {out.shape}", "give at least one row and one column")
    if columns is not None and out.shape[1] != columns:
        raise InputError(name, f"must have {columns} columns, one per feature", f"shape {out.shape}")
    return out


def symmetric(x: ArrayLike, name: str, size: int | None = None, most: float = LARGEST) -> NDArray[np.float64]:
    """A symmetric float64 matrix with numbers up to `most` in magnitude."""
    out = np.asarray(matrix(x, name, size, most), dtype=np.float64)
    if out.shape[0] != out.shape[1] or not np.allclose(out, out.T, rtol=1e-10, atol=1e-12 * np.abs(out).max()):
        raise InputError(name, "must be a symmetric square matrix", f"shape {out.shape}", "use (M + M.T) / 2")
    return (out + out.T) / 2


def pair(x_a: ArrayLike, x_b: ArrayLike) -> tuple[Array, Array]:
    """Two views of the same samples: 2-D, of equal shape, up to 1e24 in magnitude, so that γ is at most LARGEST."""
    a, b = matrix(x_a, "x_a", most=1e24), matrix(x_b, "x_b", most=1e24)
    if a.shape != b.shape:
        raise InputError(
            "x_a and x_b", "must have the same shape", f"{a.shape} and {b.shape}", "row i of each is a view of sample i"
        )
    return a, b


def number(
    x: Any,
    name: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> float:
    """A finite float, > `above`, ≥ `least`, < `below`, ≤ `most`, where given; neither a truth value nor text."""
    try:
        if isinstance(x, bool | np.bool_ | str | bytes):
            raise TypeError
        out = float(x.detach() if is_tensor(x) else x)
    except OverflowError:
        raise InputError(name, "must be at most 1.8e308 in magnitude", x) from None
    except Exception:  # whatever a class of the user raises
        raise InputError(name, "must be a number", _repr(x), "give a plain number, such as 0.5") from None
    if not np.isfinite(out):
        raise InputError(name, "must be finite", out)
    if above is not None and not out > above:
        raise InputError(name, f"must be greater than {above:g}", out)
    if least is not None and not out >= least:
        raise InputError(name, f"must be at least {least:g}", out)
    if below is not None and not out < below:
        raise InputError(name, f"must be less than {below:g}", out)
    if most is not None and not out <= most:
        raise InputError(name, f"must be at most {most:g}", out)
    return out


def scale(x: Any, name: str = "alpha") -> float:
    """The scale of initial weights: a positive number whose logarithm and square can be computed with."""
    out = number(x, name, above=0)
    if not 1e-300 <= out <= LARGEST:
        raise InputError(name, f"must lie between 1e-300 and {LARGEST:g}", out)
    return out


def rate(x: Any, name: str = "lr") -> float:
    """A learning rate: a positive number, not so extreme that t/lr or lr·γ overflow."""
    out = number(x, name, above=0)
    if not 1e-100 <= out <= 1e100:
        raise InputError(name, "must lie between 1e-100 and 1e100", out, "scale time and data")
    return out


def positive_int(x: Any, name: str, most: int | None = None, remedy: str = "") -> int:
    """A whole number from 1 to `most`, or to 2⁶³ − 1."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < 1:
        raise InputError(name, "must be a whole number of at least 1", _repr(x), remedy if most is None else "")
    if x > (sys.maxsize if most is None else most):
        raise InputError(name, f"must be at most {sys.maxsize if most is None else most}", x, remedy)
    return int(x)


def _repr(x: object) -> str:
    try:
        return repr(x)
    except Exception:
        return f"a value of type {type(x).__name__}"


def flag(x: Any, name: str) -> bool:
    """True or False, and nothing that merely counts as one."""
    if not isinstance(x, bool | np.bool_):
        raise InputError(name, "must be True or False", _repr(x), f"write {name}=True")
    return bool(x)


def seed(x: Any, name: str = "seed") -> int:
    """A nonnegative whole number up to 2⁶³ − 1, to seed a random generator."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < 0:
        raise InputError(name, "must be a nonnegative whole number", _repr(x))
    if x > sys.maxsize:
        raise InputError(name, f"must be at most {sys.maxsize}", x)
    return int(x)


def time_vector(t: ArrayLike, *, infinite: bool = True) -> NDArray[np.float64]:
    """Times as a vector; a scalar becomes a vector of length one."""
    out = np.atleast_1d(times(t, infinite=infinite))
    if out.ndim != 1:
        raise InputError("times", "must be a number or a vector", f"shape {out.shape}")
    return out


def times(t: ArrayLike, name: str = "times", *, infinite: bool = True) -> NDArray[np.float64]:
    """Nonnegative times, scalar or array; infinity is allowed if `infinite`."""
    out = np.array(real(t, name), dtype=np.float64)
    bad = np.isnan(out) | (out < 0) | (np.isinf(out) & (not infinite))
    if bad.any():
        first = out[bad].ravel()[0]
        if np.isposinf(first):
            raise InputError(name, "must be finite", first, "use a closed form for the limit")
        raise InputError(name, "must be nonnegative", first, "training starts at t = 0")
    return out


def labels(x: Any, name: str) -> Array:
    """Classes of samples, of any type that can be sorted, as a vector."""
    try:
        out = as_numpy(x)
        np.unique(out)
    except Exception as error:  # ragged rows, tensors without values, objects without an order
        raise InputError(name, "must be a vector of labels", error) from None
    return out


def one_of(x: str, name: str, known: Iterable[str]) -> str:
    """A name from a list; the error shows the list and the closest entry."""
    names = list(known)
    if isinstance(x, str) and x in names:
        return x
    near = difflib.get_close_matches(shown(x), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(name, "is unknown", _repr(x), f"{hint}known: {', '.join(names)}")
