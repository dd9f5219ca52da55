"""Stored results of further seeds, docs/results/seedN, agree with the index."""

import shutil
from pathlib import Path

from stairwise.archives import load_arrays
from stairwise.paper import fig7
from stairwise.paper.harness import LARGEST, from_stored, stored_names

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def unlike_the_index(results, folder):
    """What docs/results/README.md, under Further seeds, does not say about results in `results`/seedN, or says wrongly.

    Their row is `| seed N | `NAME` | verdict | … |`; claims that do not hold are named in it, in italics.
    """
    index = (results / "README.md").read_text(encoding="utf-8")
    rows = {tuple(line.split(" | ")[:2]): line for line in index.splitlines() if line.startswith("| seed ")}
    found = []
    for place in sorted(results.glob("seed[1-9]*")):
        for name in stored_names(place):
            result = from_stored(name, folder / place.name, place)
            row = rows.pop((f"| seed {place.name[4:]}", f"`{name}`"), "")
            found += [] if row else [f"{place.name}: {name} is not named"]
            wrong = [claim.text for claim in result.claims if (f"*{claim.text}*" in row) == claim.holds]
            found += [f"{place.name}: {name}: {text}" for text in wrong if row]
            found += [] if ("agrees" in row) == result.holds or not row else [f"{place.name}: {name}: verdict"]
            drawn = (result.folder / "figure.png").stat().st_size > 20_000 and (place / f"{name}.png").is_file()
            found += [] if drawn else [f"{place.name}: {name} is not drawn"]
            small = (place / f"{name}.npz").stat().st_size <= LARGEST
            found += [] if small else [f"{place.name}: {name} is too large"]
    return found + [f"{' | '.join(key)} is not stored" for key in rows]


def test_further_seeds_are_checked_and_named(tmp_path):
    assert unlike_the_index(RESULTS, tmp_path) == []
    any_stored = any(stored_names(place) for place in RESULTS.glob("seed[1-9]*"))
    assert ("None is stored yet." in (RESULTS / "README.md").read_text(encoding="utf-8")) != any_stored


def test_further_seeds_that_are_not_named_are_found(tmp_path):
    results, index = tmp_path / "results", tmp_path / "results" / "README.md"
    (results / "seed1").mkdir(parents=True)
    for name in ("fig7", "fig8"):
        for kind in ("npz", "json", "png"):
            shutil.copy(RESULTS / f"{name}.{kind}", results / "seed1")
    index.write_text("", encoding="utf-8")
    assert unlike_the_index(results, tmp_path) == ["seed1: fig7 is not named", "seed1: fig8 is not named"]
    index.write_text("| seed 1 | `fig7` | agrees |\n| seed 1 | `fig8` | agrees |\n| seed 2 | `fig7` | agrees |\n")
    failed = [claim.text for claim in fig7.check(load_arrays(RESULTS / "fig7.npz")) if not claim.holds]
    assert unlike_the_index(results, tmp_path) == [
        *(f"seed1: fig7: {text}" for text in failed),
        "seed1: fig7: verdict",
        "| seed 2 | `fig7` is not stored",
    ]
    named = " ".join(f"*{text}*" for text in failed)
    index.write_text(f"| seed 1 | `fig7` | does not agree: {named} |\n| seed 1 | `fig8` | agrees |\n")
    assert unlike_the_index(results, tmp_path) == []
    (results / "seed1" / "fig8.png").unlink()
    assert unlike_the_index(results, tmp_path) == ["seed1: fig8 is not drawn"]
