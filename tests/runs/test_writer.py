"""The background writer: order, errors, nothing lost."""

import threading

import pytest

from stairwise.runs.folder import RunFolder
from stairwise.runs.log import read_log
from stairwise.runs.record import Record
from stairwise.runs.writer import BackgroundWriter


def test_records_come_back_in_order_and_are_written(tmp_path):
    writer, caller = BackgroundWriter(RunFolder(tmp_path)), threading.get_ident()
    threads = []

    def make(i):
        threads.append(threading.get_ident())
        return Record(step=i, t=float(i))

    for i in range(5):
        writer.submit(lambda i=i: make(i))
    assert [record.step for record, error in writer.wait() if error is None] == list(range(5))
    writer.close()
    assert caller not in threads
    assert [record.step for record in read_log(tmp_path / "metrics.jsonl")[0]] == list(range(5))


def test_finished_does_not_wait():
    writer, gate = BackgroundWriter(), threading.Event()

    def slow():
        gate.wait(10)
        return Record(step=1, t=1.0)

    writer.submit(slow)
    assert list(writer.finished()) == []
    assert len(writer) == 1
    gate.set()
    assert [record.step for record, _ in writer.wait()] == [1]
    writer.close()


def test_errors_of_the_disk_come_with_the_record(tmp_path):
    (tmp_path / "file").touch()
    writer = BackgroundWriter(RunFolder(tmp_path / "file"))  # no folder can be there
    writer.submit(lambda: Record(step=1, t=1.0))
    ((record, error),) = writer.wait()
    assert record.step == 1
    assert isinstance(error, OSError)
    writer.close()


def test_errors_of_the_work_are_raised_once():
    writer = BackgroundWriter()
    writer.submit(lambda: 1 / 0)
    writer.submit(lambda: Record(step=2, t=1.0))
    with pytest.raises(ZeroDivisionError):
        list(writer.wait())
    assert [record.step for record, _ in writer.wait()] == [2]
    writer.close()
