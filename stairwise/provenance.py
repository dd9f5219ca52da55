"""Record the origin of a result: commit, versions, device and date."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import stairwise

__all__ = ["provenance"]


def provenance(
    device: str | None = None, packages: tuple[str, ...] = ("numpy", "scipy", "matplotlib")
) -> dict[str, Any]:
    """The origin that is stored with each result."""
    return {
        "commit": _commit(),
        "versions": {
            "stairwise": stairwise.__version__,
            "python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
        "device": device or f"CPU ({platform.machine()})",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


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
