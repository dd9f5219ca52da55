"""Libraries of others, as documented: z and h are right, or a warning names the line that is."""

import logging

import pytest

from tests.monitor.libraries import table
from tests.monitor.libraries.harness import names_a_line, verdict
from tests.monitor.libraries.lightly_examples import EXAMPLES
from tests.monitor.libraries.trainers import in_lightning

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("key", table.CASES, ids=": ".join)
def test_right_or_told(key, tmp_path):
    trainer, case = table.CASES[key]
    result = table.outcome(trainer, case, tmp_path)
    assert result.unchanged, "the weights differ"
    assert result.first == "right" or (result.first == "told" and result.named), result
    assert result.second in (None, "right"), result
    assert result.first == "right" or case.z is None or result.second == "right", result
    remedy = "`python -m tests.monitor.libraries --write` writes the table"
    assert table.stored().get(key) == table.cells(trainer, case, result), remedy


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_loss_that_is_named(name, tmp_path):
    """Whoever names the loss gets its arguments if these are z, else a warning, and never an error."""
    line = {"loss": "criterion", "backbone": "backbone"}
    run = in_lightning(EXAMPLES[name], tmp_path, line)
    assert run.error is None
    assert verdict(EXAMPLES[name], run) == "right" or names_a_line(run.said), run.said


def test_the_table_holds_nothing_else():
    assert set(table.stored()) == set(table.CASES)
