"""One thread per test process, and a schedule for pytest-xdist that shares expensive fixtures.

Workers share no fixtures. Tests whose id is [GROUP:…], and all tests of a file that says `SHARED = True`, go to one
worker; every other test goes to whichever is free.
"""

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # also for the processes that tests start

if find_spec("torchvision"):  # before anything that would import it
    from tests.monitor.libraries.torchvision_on_cpu import import_torchvision

    import_torchvision()


@pytest.fixture(autouse=True, scope="session")
def font_type():
    """The type of fonts in PDF that figures really have. Tests write Type 3, because cutting TrueType fonts down to the
    letters in use takes half a second per figure."""
    from stairwise.figures.style import RC

    kept, RC["pdf.fonttype"] = RC["pdf.fonttype"], 3
    yield kept
    RC["pdf.fonttype"] = kept


@pytest.fixture(autouse=True)
def datasets():
    """Remove the names of images that a test has registered, such as those of the race."""
    from stairwise.data.images import DATASETS

    before = dict(DATASETS)
    yield
    DATASETS.clear()
    DATASETS.update(before)


@cache
def _shared(path: str) -> bool:
    return "\nSHARED = True" in Path(path).read_text(encoding="utf-8")


def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Schedule(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            group = re.search(r"\[(\w+):", nodeid)
            if group:
                return f"{path} {group[1]}"
            return path if _shared(str(config.rootpath / path)) else nodeid

    return Schedule(config, log)
