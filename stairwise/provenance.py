"""Record the origin of a result: commit, versions, device and date."""

import hashlib
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import stairwise


def provenance(
    device: str | None = None, packages: tuple[str, ...] = ("numpy", "scipy", "matplotlib")
) -> dict[str, Any]:
    """The origin that is stored with each result; without a git checkout the commit is None, and a digest of the code
    is stored beside it."""
    commit = _commit()
    return {
        "commit": commit,
        **({} if commit else {"code": code_digest()}),
        "versions": {
            "stairwise": stairwise.__version__,
            "python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
        "device": device or f"CPU ({platform.machine()})",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def code_digest(*rooms: str) -> str:
    """A digest of the source of some rooms, or of the whole package: stored results of other code are stale.

    >>> code_digest("theory") == code_digest("theory") != code_digest()
    True
    """
    here = Path(__file__).parent
    folders = [here / room for room in rooms] or [here]
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _commit() -> str | None:
    here = Path(__file__).parent
    try:
        git = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        tracked = subprocess.run(
            [*git[:3], "ls-files", "--error-unmatch", __file__], capture_output=True, check=False, timeout=10
        )
        if tracked.returncode:  # installed inside an unrelated checkout
            return None
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
