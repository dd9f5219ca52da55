"""The one way in which long-running work reports its progress: training, downloads, kernels, figures."""

from collections.abc import Callable

Progress = Callable[[float, float, str], None]  # how much is done, of how much, and a few words


def silent(done: float, total: float, words: str) -> None:
    """Report nothing."""


def part(progress: Progress, start: float, end: float, prefix: str = "") -> Progress:
    """A progress whose whole is the part of `progress` from `start` to `end`, both shares of 1.

    >>> part(lambda done, total, words: print(done / total, words), 0.5, 1.0, "fig1: ")(5, 10, "training")
    0.75 fig1: training
    """

    def report(done: float, total: float, words: str) -> None:
        progress(start + (end - start) * done / total, 1.0, prefix + words)

    return report
