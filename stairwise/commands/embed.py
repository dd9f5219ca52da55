"""`stairwise embed`: compute embeddings without training and write them to files."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stairwise.commands.console import Json, bar, err, print_json, print_table
from stairwise.commands.sources import Crop, Dimension, Number, Pixels, Size, Source, SourceB

if TYPE_CHECKING:
    from stairwise.data.pairs import RowPairs
    from stairwise.kernel.estimator import KernelSSL
    from stairwise.progress import Progress
    from stairwise.table import Table

TIMEOUT = 600.0  # seconds that processes of torchrun wait for one another
SHOWN = 2000  # pairs in the figure
CHUNK = 8192  # pairs that are embedded at a time


def embed(
    source: Source = "photos",
    source_b: SourceB = None,
    d: Dimension = 10,
    kernel: Annotated[
        str,
        typer.Option(
            help="linear, rbf, polynomial, laplace, nngp, ntk; for images conv_nngp, conv_ntk; "
            "two (rbf,laplace) for two modalities."
        ),
    ] = "rbf",
    alpha: Annotated[float, typer.Option(help="Scale of the initialization, for the step times.")] = 1e-4,
    n: Number = None,
    crop: Crop = None,
    pixels: Pixels = "standardize",
    size: Size = 64,
    method: Annotated[
        str, typer.Option(help="auto (by size), exact, nystroem, features (random ones).", rich_help_panel="Many pairs")
    ] = "auto",
    count: Annotated[
        int, typer.Option("--features", help="Number of landmarks or random features.", rich_help_panel="Many pairs")
    ] = 2000,
    landmarks: Annotated[
        str, typer.Option(help="uniform, kmeans++, pivoted.", rich_help_panel="Many pairs")
    ] = "uniform",
    memory: Annotated[
        float, typer.Option(help="GiB for the kernel matrix, per process.", rich_help_panel="Many pairs")
    ] = 4.0,
    dtype: Annotated[
        str, typer.Option(help="float64 or float32, of the kernel's values.", rich_help_panel="Many pairs")
    ] = "float64",
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda; default: numpy on the CPU.", rich_help_panel="Many pairs")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the crops, landmarks and random features.")] = 0,
    folder: Annotated[Path, typer.Option("--out", help="Where to write.")] = Path("embedding"),
    json_: Json = False,
) -> None:
    """Compute the embeddings that an infinitely wide network would learn from pairs, without training it.

    Writes z_a.npy, z_b.npy, spectrum.json, figure.png and model.npz (for `KernelSSL.load`).

    Before it starts it says which method it uses, why, and how much memory that takes. With torchrun, processes share
    the work.

    Examples: `stairwise embed photos --kernel ntk`, `stairwise embed x_a.npy x_b.npy -d 32 --out embedding`,
    `torchrun --nproc-per-node 2 -m stairwise embed x_a.npy x_b.npy --memory 16`
    """
    from stairwise.checks import number, one_of, positive_int
    from stairwise.data.pairs import read_pairs
    from stairwise.files import check_folder
    from stairwise.kernel.estimator import KernelSSL
    from stairwise.kernel.kernels import KERNELS
    from stairwise.kernel.landmarks import CHOICES
    from stairwise.kernel.routes import METHODS

    check_folder(folder, "--out")  # before the work, not after it
    names = [one_of(name.strip(), "kernel", KERNELS) for name in kernel.split(",")]
    est = KernelSSL(
        positive_int(d, "d"),
        kernel=names[0] if len(names) == 1 else tuple(names),
        method=one_of(method, "method", METHODS),
        n_features=positive_int(count, "features"),
        landmarks=one_of(landmarks, "landmarks", CHOICES),
        memory=int(number(memory, "memory", above=0) * 2**30) or 1,
        dtype=one_of(dtype, "dtype", ["float64", "float32"]),
        device=device,
        random_state=seed,
    )
    pairs = read_pairs(source, source_b, n=n, crop=crop, pixels=pixels, size=size, seed=seed)
    with _processes(device), _progress() as progress:
        files, table, summary = _embedded(est, pairs, alpha, folder, progress)
    if not files:  # another process prints
        return
    if json_:
        print_json({"files": files, **summary})
        return
    print_table(table)
    print("\n".join(map(str, files)))


def _processes(device: str | None) -> AbstractContextManager[None]:
    """The group of the processes that torchrun has started, if it has."""
    import os

    if "RANK" not in os.environ:
        return nullcontext()
    from stairwise.distributed import choose_device, process_group

    return process_group(choose_device(device or "cpu"), TIMEOUT)


def _progress() -> AbstractContextManager["Progress"]:
    """A bar in the first process; the others are silent."""
    from stairwise.kernel.processes import place
    from stairwise.progress import silent

    return nullcontext(silent) if place()[0] else bar("embedding")


def _embedded(
    est: "KernelSSL", pairs: "RowPairs", alpha: float, folder: Path, progress: "Progress"
) -> tuple[list[Path], "Table", dict[str, Any]]:
    """Fit and write; the first of several processes returns the files."""
    import warnings

    from rich.markup import escape

    from stairwise.checks import TheoryWarning
    from stairwise.kernel.processes import place
    from stairwise.progress import part

    first = place()[0] == 0
    if first:
        err.print(escape(str(est.plan(pairs.x_a, pairs.x_b))), highlight=False, soft_wrap=True)
    told = part(progress, 0.0, 0.8)
    est.set_params(progress=lambda done, total, words: told(done, total, words if done else ""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TheoryWarning)  # the line above says that it is approximate
        est.fit(pairs.x_a, X_b=pairs.x_b)
    table, summary = _table(pairs, est, alpha), _summary(pairs, est, alpha)
    files = _write(est, pairs, alpha, summary, folder, part(progress, 0.8, 1.0)) if first else []
    return files, table, summary


def _table(pairs: "RowPairs", est: "KernelSSL", alpha: float) -> "Table":
    from stairwise.table import Table

    low, middle, high = est.step_times(alpha)
    rows = [
        [str(j + 1), f"{g:.4g}", f"{middle[j]:.4g}", f"{low[j]:.4g} – {high[j]:.4g}"]
        for j, g in enumerate(est.eigenvalues_)
    ]
    title = f"{pairs.name}: {len(pairs.x_a):,} pairs, {est.kernel_}"
    return Table(title, ["mode", "γ", "step at t", "90 % of initializations"], rows)


def _summary(pairs: "RowPairs", est: "KernelSSL", alpha: float) -> dict[str, Any]:
    """All results except the embeddings, for scripts."""
    low, middle, high = est.step_times(alpha)
    solution = est.solution_
    return {
        "source": pairs.name,
        "pairs": len(pairs.x_a),
        "method": est.route_.method,
        "why": est.route_.reason,
        "bytes": est.route_.bytes,
        "kernel": str(est.kernel_),
        "gamma": est.eigenvalues_,
        "alpha": alpha,
        "step_times": {"q05": low, "median": middle, "q95": high},
        "solver": {"name": solution.solver, "residual": solution.residual, "products": solution.products},
    }


def _write_embeddings(est: "KernelSSL", pairs: "RowPairs", folder: Path, progress: "Progress") -> None:
    """z_a.npy and z_b.npy: those that an exact fit has found, or chunk by chunk."""
    import numpy as np

    from stairwise.checks import as_numpy
    from stairwise.files import atomic

    n, d = len(pairs.x_a), len(est.eigenvalues_)
    found = getattr(est, "embedding_", None)
    for i, (view, x) in enumerate(zip("ab", (pairs.x_a, pairs.x_b), strict=True)):
        with atomic(folder / f"z_{view}.npy") as part:
            z = np.lib.format.open_memmap(part, "w+", np.float64, (n, d))
            for start in range(0, n, CHUNK):
                progress(i * n + start, 2 * n, f"z_{view}.npy")
                rows = slice(start, min(start + CHUNK, n))
                z[rows] = est.transform(x[rows], view=view) if found is None else as_numpy(found[i * n :][rows])
            z.flush()


def _write(
    est: "KernelSSL", pairs: "RowPairs", alpha: float, summary: dict[str, Any], folder: Path, progress: "Progress"
) -> list[Path]:
    import numpy as np

    from stairwise.figures.modes import draw_embedding
    from stairwise.figures.style import style
    from stairwise.files import atomic, save_json

    folder.mkdir(parents=True, exist_ok=True)
    _write_embeddings(est, pairs, folder, progress)
    est.save(folder / "model.npz")
    t = np.linspace(0, 1.3 * est.step_times(alpha, 0.95)[0].max(), 400)
    spectra = np.median(est.staircase(alpha, t).spectra, axis=0)
    points = np.concatenate([np.load(folder / f"z_{view}.npy", mmap_mode="r")[:SHOWN] for view in "ab"])
    with style(), atomic(folder / "figure.png") as part:
        draw_embedding(est.eigenvalues_, points, t, spectra).savefig(part)
    save_json(folder / "spectrum.json", summary)
    return [folder / name for name in ("figure.png", "model.npz", "spectrum.json", "z_a.npy", "z_b.npy")]
