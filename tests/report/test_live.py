"""The live page: its answers, the requests it refuses, and a browser that draws it."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from stairwise.checks import InputError
from stairwise.report.live import LivePage, live_page
from stairwise.report.page import Page
from stairwise.report.pool import WAITING, WORKERS
from stairwise.runs.folder import RunFolder
from stairwise.runs.record import Record


def write_records(folder, first, last, size=0):
    t = np.linspace(0, 6, 300)
    lam = 1 / (1 + 1e6 * np.exp(-8 * np.outer(t, [2.0, 0.8, 0.25])))
    run = RunFolder(folder, size)
    views = np.random.default_rng(0).standard_normal((2, 20, 2))
    for i in range(first, last):
        loss = float(((1 - lam[i]) ** 2).sum())
        spectra = {"covariance": lam[i], "eigenvalues": lam[i] - 0.01}
        run.write(Record(step=10 * i, t=t[i], seconds=2.0 * i, loss=loss, leading=views, **spectra))
    run.close()
    return run.size


@contextmanager
def serving(*folders, **options):
    server = live_page(folders, **options)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def ask(server, path="/", method="GET", host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer, answer.read()


def test_page_and_data(tmp_path):
    size = write_records(tmp_path, 0, 200)
    with serving(tmp_path) as server:
        answer, page = ask(server)
        assert answer.status == 200
        assert b"const live = true" in page
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        answer, first = ask(server, "/data.json")
        tag = answer.headers["ETag"]
        assert answer.headers["X-Status"] == "200 records"
        assert 'class="badge"' in json.loads(first)["lead"]
        titles = re.findall("<h2>(.*?)</h2>", json.loads(first)["charts"])
        assert "Embeddings in their two leading modes" in titles
        assert ask(server, "/data.json", If_None_Match=tag)[0].status == 304
        write_records(tmp_path, 200, 300, size)
        answer, later = ask(server, "/data.json", If_None_Match=tag)
        assert answer.status == 200
        assert json.loads(later)["tables"] != json.loads(first)["tables"]
        assert json.loads(later)["layout"] == json.loads(first)["layout"]
        answer, nothing = ask(server, "/data.json", method="HEAD")
        assert (answer.status, nothing) == (200, b"")
        assert b"plotly" in ask(server, "/plotly.js")[1][:2000].lower()


def test_a_line_that_is_being_written(tmp_path):
    write_records(tmp_path, 0, 100)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 1000, "t": 2.')
    (tmp_path / "embeddings.json").write_text('{"views": [[[1')
    with serving(tmp_path) as server:
        answer, data = ask(server, "/data.json")
    assert answer.headers["X-Status"] == "100 records, 1 damaged lines left out"
    assert "leading modes" not in json.loads(data)["charts"]


def test_before_the_first_record(tmp_path):
    with serving(tmp_path) as server:
        assert "Waiting" in json.loads(ask(server, "/data.json")[1])["title"]
        assert ask(server)[0].status == 200
        write_records(tmp_path, 0, 50)
        assert "Staircase" in json.loads(ask(server, "/data.json")[1])["title"]


def test_several_runs(tmp_path):
    """A run that has not started waits on the page of the others."""
    first, second = tmp_path / "Läufe ✓\n" / "run", tmp_path / "b" / "run"
    write_records(first, 0, 200)
    second.mkdir(parents=True)
    with serving(first, second) as server:
        data = json.loads(ask(server, "/data.json")[1])
        assert "Läufe ✓\n/run" in data["summary"]
        assert "not started" in data["summary"]
        write_records(second, 0, 100)
        answer, later = ask(server, "/data.json")
        assert answer.headers["X-Status"] == "L?ufe ??/run: 200 records; b/run: 100 records"
        assert "not started" not in json.loads(later)["summary"]
    with pytest.raises(InputError, match="given once"):
        live_page([second, tmp_path / "b" / ".." / "b" / "run"])


def test_the_page_is_built_when_it_is_asked_for(tmp_path, monkeypatch):
    write_records(tmp_path, 0, 200)
    built = []
    monkeypatch.setattr("stairwise.report.live.runs_page", lambda *a, **k: built.append(a) or Page("t", "lead"))
    with serving(tmp_path) as server:
        assert not built
        ask(server)
        ask(server, "/data.json")
        assert len(built) == 1


def test_refusals(tmp_path):
    write_records(tmp_path, 0, 20)
    (tmp_path / "secret").write_text("secret")
    with serving(tmp_path) as server:
        for path in (
            "/secret",
            "/../secret",
            "/%2e%2e/secret",
            "//secret",
            "/metrics.jsonl",
            "/etc/passwd",
            "/data.json/../secret",
        ):
            answer, body = ask(server, path)
            assert answer.status == 404
            assert b"secret" not in body
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "127.0.0.1:1", ""):
            assert ask(server, host=host or " ")[0].status == 403
        assert ask(server, host=f"localhost:{server.server_port}")[0].status == 200
        assert ask(server, method="POST")[0].status == 501
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(InputError, match="another watcher"):
            live_page([tmp_path], port=server.server_port)
    with pytest.raises(InputError, match="65535"):
        live_page([tmp_path], port=70000)
    with pytest.raises(InputError, match="folder"):
        live_page([tmp_path / "nowhere"])


def knock(server, request=b"GET /data.json HTTP/1.0\r\nHost: 127.0.0.1:%d\r\n\r\n"):
    """An open connection that has sent its request."""
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
    connection.sendall(request % server.server_port if b"%d" in request else request)
    return connection


def answer_of(connection):
    with connection, connection.makefile("rb") as stream:
        return stream.read()


def test_200_connections_at_once(tmp_path):
    """All are open before the first is answered; every one gets the page, or a 503 that says when to come back."""
    go = threading.Event()
    server = LivePage(lambda: "now", lambda: go.wait(20) and Page("t", "lead"))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    before = threading.active_count()
    thread.start()
    connections = [knock(server) for _ in range(200)]
    while not server._refused:  # the last of them are not accepted yet
        time.sleep(0.01)
    assert threading.active_count() <= before + 1
    go.set()
    answers = [answer_of(connection) for connection in connections]
    server.shutdown()
    codes = Counter(answer.split(b" ", 2)[1] for answer in answers)
    assert codes[b"200"] + codes[b"503"] == 200
    assert codes[b"200"] >= WORKERS + WAITING - 1
    assert codes[b"503"] > 0
    assert all(b"\r\nRetry-After: 1\r\n" in answer for answer in answers if b" 503 " in answer)
    assert not server._due
    server.server_close()


def test_slow_clients_do_not_keep_others_out(tmp_path, monkeypatch):
    """Connections that never finish their request are cut off, although each sends a byte now and then."""
    monkeypatch.setattr("stairwise.report.pool.READ_SECONDS", 0.2)
    write_records(tmp_path, 0, 20)
    with serving(tmp_path) as server:
        slow = [knock(server, b"GET / HT") for _ in range(2 * WORKERS)]
        assert ask(server)[0].status == 200
        for connection in slow:
            with suppress(OSError):  # a reset is fine
                assert answer_of(connection) == b""


def test_command_line(tmp_path):
    write_records(tmp_path, 0, 20)
    command = [sys.executable, "-m", "stairwise", "watch", tmp_path, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", line).group(1))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert "the run continues" in out
    assert err == ""
    assert process.returncode == 0


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_draws_in_a_browser(tmp_path):
    """All charts are drawn, and later records appear without a reload."""
    size = write_records(tmp_path, 0, 200)
    with serving(tmp_path) as server:
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
        command = ["chromium", *flags.split(), "--virtual-time-budget=20000", f"--user-data-dir={tmp_path / 'profile'}"]
        command += ["--dump-dom", server.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as browser:
            time.sleep(1.0)
            write_records(tmp_path, 200, 300, size)
            dom = browser.communicate(timeout=120)[0]
    assert "live, 300 records" in dom
    assert len(re.findall(r'class="trace scatter', dom)) > 8
    assert dom.count('class="points"') > 0
    assert 'class="trace bars' in dom
