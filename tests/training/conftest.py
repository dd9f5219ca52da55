"""Datasets that benchmarks offer to recipes are gone after a test."""

import pytest

from stairwise.data.images import DATASETS


@pytest.fixture(autouse=True)
def _own_datasets():
    before = dict(DATASETS)
    yield
    for name in DATASETS.keys() - before.keys():
        del DATASETS[name]
