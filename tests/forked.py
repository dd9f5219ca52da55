"""Python commands in processes that are forked from one which has imported torch already: two seconds less for each.

codes = run_forked(["-c", code, argument], [environment of the first process, environment of the second])
"""

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path


def run_forked(command, environments, seconds=120.0):
    """Exit codes of `python command`, run once per environment at the same time; what they print is printed here."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        order = {"command": [str(part) for part in command], "environments": environments, "seconds": seconds}
        server.stdin.write(json.dumps(order | {"output": folder}) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        for printed in sorted(Path(folder).iterdir()):
            print(printed.read_text(errors="replace"), end="", file=sys.stderr)
    return codes


@cache
def _server():
    command = [sys.executable, "-m", "tests.forked"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # read when torch is imported
    root = Path(__file__).parent.parent
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
    )
    atexit.register(server.communicate)  # closes its input, at which it ends
    return server


def serve():
    """Fork processes on request, and answer with their exit codes; returns the command in those, None at the end."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        children = []
        for i, environment in enumerate(order["environments"]):
            pid = os.fork()
            if pid == 0:
                answers.close()
                _become(environment, Path(order["output"]) / str(i))
                return order["command"]
            children.append(pid)
        answers.write(json.dumps(_codes(children, time.monotonic() + order["seconds"])) + "\n")
        answers.flush()
    return None


def _become(environment, output):
    os.environ.clear()
    os.environ.update(environment)
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_CREAT)):
        os.dup2(os.open(path, flags), number)
    os.dup2(1, 2)


def _codes(children, deadline):
    """Exit codes as of `subprocess`; a process that is late is killed."""
    found = {}
    while len(found) < len(children):
        for pid in (pid for pid in children if pid not in found):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                found[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, 9)
        time.sleep(0.01)
    return [found[pid] for pid in children]


def run(command):
    """Do what `python command` does, for a script or `-c code`, after `-W action`."""
    if command[0] == "-W":
        warnings.simplefilter(command[1])
        command = command[2:]
    if command[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *command[2:]], ""
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    for name in ("torch.distributed", "torch._dynamo", "stairwise.monitor.spectrum", "stairwise.training.loop"):
        import_module(name)  # optimizers import torch._dynamo
    wanted = serve()
    if wanted:
        run(wanted)
