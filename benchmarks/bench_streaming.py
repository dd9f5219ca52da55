"""How much memory and time does `stairwise predict` take for large feature files?

    python benchmarks/bench_streaming.py [--folder DIR] [--small]

For each size (5000 × 27,648, then 250,000 and 1,000,000 × 512) it writes two files of float32 features, at most 4 GB,
runs the command in a separate process and reads its peak resident memory. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

SIZES = {"5000x27648": (5000, 27_648), "250000x512": (250_000, 512), "1000000x512": (1_000_000, 512)}
SMALL = {"500x2764": (500, 2764), "25000x512": (25_000, 512), "100000x512": (100_000, 512)}


def write_views(folder, n, m, block=1000):
    """Two noisy views of features with a power-law spectrum, written in blocks."""
    scale = (1 + np.arange(m)) ** -0.6
    files = [np.lib.format.open_memmap(folder / f"x_{v}.npy", "w+", np.float32, (n, m)) for v in "ab"]
    for start in range(0, n, block):
        rng = np.random.default_rng(start)
        base = rng.standard_normal((min(block, n - start), m), dtype=np.float32) * scale
        for file in files:
            file[start : start + block] = base + 0.3 * scale * rng.standard_normal(base.shape, dtype=np.float32)
    for file in files:
        file.flush()


# the process reads its own peak, because the one reported to the parent includes the parent's memory before exec
CHILD = """
import re, sys
from pathlib import Path
from stairwise.cli import main
sys.argv = ["stairwise", "predict", "x_a.npy", "x_b.npy", "--json"]
try:
    main()
finally:
    print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1), file=sys.stderr)
"""


def predict(folder):
    """Seconds and peak resident GiB of the command (Linux)."""
    started = perf_counter()
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=folder, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["gamma"][0] > 0
    return perf_counter() - started, int(done.stderr.split()[-1]) / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--small", action="store_true", help="a tenth or less of the sizes")
    options = parser.parse_args()
    summary = {}
    print(f"{'pairs × features':>18}{'files':>10}{'peak':>12}{'time':>10}")
    for name, (n, m) in (SMALL if options.small else SIZES).items():
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            write_views(Path(scratch), n, m)
            took, peak = predict(scratch)
        print(f"{name:>18}{8 * n * m / 2**30:>7.2f} GiB{peak:>8.2f} GiB{took:>8.1f} s", flush=True)
        summary[f"{name}_GiB"] = round(peak, 2)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
