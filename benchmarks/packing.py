"""What must not be lost of trainings on a machine that is given back: results and logs, in a few files."""

import sys
import tarfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

from stairwise.files import atomic
from stairwise.paper.trained import begun
from stairwise.runs.folder import FOLLOWED, KERNELS, METRICS, RECIPE
from stairwise.runs.reader import Run
from stairwise.training.following import followed_summary

LOG = (METRICS, RECIPE, f"{FOLLOWED}/summary.npz", f"{KERNELS}/**/coming.*")  # of a run
ARCHIVES = 6  # for the logs


def pack_all(out: Path) -> None:
    """Pack what there is, which takes a moment; then sum up what runs have followed, and pack again."""
    pack(out)
    sum_up(out)
    pack(out)


def pack(out: Path) -> None:
    """Write OUT/packed: results with what the commands have said, and the logs of all runs, in a few files each."""
    said = [path for path in [*out.glob("*.txt"), *out.glob("re*/**/*")] if not path.name.startswith(".")]
    _archive(out, "results", sorted(path for path in said if path.suffix != ".png"))
    folders = sorted((out / "runs").glob("*"))
    for i in range(ARCHIVES):
        _archive(out, f"logs-{i + 1}", [path for run in folders[i::ARCHIVES] for path in logs(run)])


def sum_up(out: Path) -> None:
    """Sum up what the runs have followed, which is too large to be packed as it is."""
    for run in sorted((out / "runs").glob("*")):
        try:
            if begun(run):
                followed_summary(Run(run))
        except Exception as error:  # of whatever kind: the other runs must not be lost with this one
            print(f"{run} cannot be summed up: {error}", file=sys.stderr)


def logs(run: Path) -> list[Path]:
    """The files of a run from which figures can be drawn."""
    return [path for pattern in LOG for path in sorted(run.glob(pattern))]


def _archive(out: Path, name: str, paths: Iterable[Path]) -> None:
    with atomic(out / "packed" / f"{name}.tar.gz") as part, tarfile.open(part, "w:gz") as packed:
        for path in paths:
            if path.is_file():
                content = path.read_bytes()  # at once: the file may be replaced meanwhile
                about = tarfile.TarInfo(str(path.relative_to(out)))
                about.size, about.mtime = len(content), int(path.stat().st_mtime)
                packed.addfile(about, BytesIO(content))
