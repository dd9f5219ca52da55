"""Judge a new part, once: `python -m benchmarks.corpus.judge FILE.npz … --part eleventh`.

The files are what `store` has packed. Prints the counts and which goals are met, and stores in docs/results what was
true and what was said at every record of all runs, and the curves of every fourth one. A part that is stored is not
judged again. `python -m benchmarks.corpus.page` then writes the tables of the pages.
"""

import argparse
from multiprocessing import get_context
from pathlib import Path

from benchmarks.corpus.known import save
from benchmarks.corpus.page import by_run, save_words, stored_words, verdict
from benchmarks.corpus.score import NAMES, STORED, replay, score, show
from benchmarks.corpus.store import read, thin

EVERY = 4  # of so many runs the curves of one are stored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--part", choices=NAMES, default=NAMES[-1])
    parser.add_argument("--workers", type=int, help="processes; by default one per core")
    choice = parser.parse_args()
    said = stored_words()
    if choice.part in said:
        parser.error(f"the {choice.part} part has been judged; `benchmarks.corpus.page` writes its tables")
    runs = list({run.name: run for file in choice.files for run in read(file)}.values())
    with get_context("spawn").Pool(choice.workers) as pool:
        said[choice.part] = pool.map(replay, runs, chunksize=8)
    total = score(runs, said[choice.part])
    show(total)
    print(verdict(total), by_run(total), sep="\n\n")
    save(runs, STORED / f"corpus_{choice.part}_truth.npz")
    thin(choice.files, STORED / f"corpus_{choice.part}.npz", EVERY)
    save_words(said)


if __name__ == "__main__":
    main()
