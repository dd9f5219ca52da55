"""One of two processes: losses and gradients of its half of a batch, for test_losses.py."""

import os
import socket
import subprocess
import sys

import numpy as np
import torch
import torch.distributed as dist

import stairwise as sw
from stairwise.distributed import rank, world
from stairwise.losses import MODULES


def run_two(*command):
    """Run a Python command as two processes of one group; exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([sys.executable, *command], env={**os.environ, **group, "RANK": str(r)}) for r in range(2)
    ]
    return [worker.wait(120) for worker in workers]


def leave():
    """End the group and this process. DistributedDataParallel keeps the group's threads, and one of them may ask for
    the interpreter while it ends, which aborts (https://github.com/pytorch/pytorch/issues/190489)."""
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def cases():
    """Every loss, plain and preconditioned."""
    found = {name: module() for name, module in MODULES.items()}
    for power in (0.5, 1.0):
        found[f"stretched {power}"] = lambda a, b, p=power: sw.losses.vicreg(*sw.precondition(a, b, 0.2, p))
    return found


def data():
    rng = np.random.default_rng(0)
    x_a, x_b = (torch.tensor(rng.standard_normal((16, 6))) for _ in "ab")
    W = torch.tensor(rng.standard_normal((6, 4)), requires_grad=True)
    return x_a, x_b, W


def joint(loss, part=slice(None)):
    """Loss of a linear model on these rows and its gradient."""
    x_a, x_b, W = data()
    value = loss(torch.tanh(x_a[part] @ W), torch.tanh(x_b[part] @ W))
    value.backward()
    return float(value.detach()), W.grad.numpy()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    half = 16 // world()
    found = {}
    for name, loss in cases().items():
        value, gradient = joint(loss, slice(rank() * half, (rank() + 1) * half))
        found |= {f"{name}.loss": value, f"{name}.gradient": gradient}
    np.savez(f"{sys.argv[1]}/{rank()}.npz", **found)
    dist.destroy_process_group()
