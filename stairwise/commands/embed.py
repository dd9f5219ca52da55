"""`stairwise embed`: compute embeddings without training and write them to files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stairwise.commands.console import Json, err, print_json, print_table
from stairwise.commands.sources import Crop, Dimension, Number, Pixels, Size, Source, SourceB

if TYPE_CHECKING:
    from stairwise.kernel.estimator import KernelSSL
    from stairwise.table import Table


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
    seed: Annotated[int, typer.Option(help="Seed of the crops.")] = 0,
    folder: Annotated[Path, typer.Option("--out", help="Where to write.")] = Path("embedding"),
    json_: Json = False,
) -> None:
    """Compute the embeddings that an infinitely wide network would learn from pairs, without training it.

    Writes z_a.npy, z_b.npy, spectrum.json, figure.png and model.npz (for `KernelSSL.load`).

    Examples: `stairwise embed photos --kernel ntk`, `stairwise embed x_a.npy x_b.npy -d 32 --out embedding`
    """
    import numpy as np

    from stairwise.checks import one_of, positive_int
    from stairwise.data.pairs import read_pairs
    from stairwise.files import check_folder
    from stairwise.kernel.estimator import KernelSSL
    from stairwise.kernel.kernels import KERNELS

    check_folder(folder, "--out")  # before the work, not after it
    with err.status("computing the modes of the kernel"):
        pairs = read_pairs(source, source_b, n=n, crop=crop, pixels=pixels, size=size, seed=seed)
        names = [one_of(name.strip(), "kernel", KERNELS) for name in kernel.split(",")]
        est = KernelSSL(positive_int(d, "d"), kernel=names[0] if len(names) == 1 else tuple(names))
        est.fit(np.asarray(pairs.x_a), X_b=np.asarray(pairs.x_b))
        table, summary = _table(pairs.name, est, alpha), _summary(pairs.name, est, alpha)
        files = _write(est, alpha, summary, folder)
    if json_:
        print_json({"files": files, **summary})
        return
    print_table(table)
    print("\n".join(map(str, files)))


def _table(name: str, est: "KernelSSL", alpha: float) -> "Table":
    from stairwise.table import Table

    low, middle, high = est.step_times(alpha)
    rows = [
        [str(j + 1), f"{g:.4g}", f"{middle[j]:.4g}", f"{low[j]:.4g} – {high[j]:.4g}"]
        for j, g in enumerate(est.eigenvalues_)
    ]
    title = f"{name}: {len(est.embedding_) // 2:,} pairs, {est.kernel_}"
    return Table(title, ["mode", "γ", "step at t", "90 % of initializations"], rows)


def _summary(name: str, est: "KernelSSL", alpha: float) -> dict[str, Any]:
    """All results except the embeddings, for scripts."""
    low, middle, high = est.step_times(alpha)
    solution = est.solution_
    return {
        "source": name,
        "pairs": len(est.embedding_) // 2,
        "kernel": str(est.kernel_),
        "gamma": est.eigenvalues_,
        "alpha": alpha,
        "step_times": {"q05": low, "median": middle, "q95": high},
        "solver": {"name": solution.solver, "residual": solution.residual, "products": solution.products},
    }


def _write(est: "KernelSSL", alpha: float, summary: dict[str, Any], folder: Path) -> list[Path]:
    import numpy as np

    from stairwise.figures.modes import draw_embedding
    from stairwise.figures.style import style
    from stairwise.files import atomic, save_json

    folder.mkdir(parents=True, exist_ok=True)
    for view, z in zip("ab", np.split(est.embedding_, 2), strict=True):
        with atomic(folder / f"z_{view}.npy") as part, part.open("wb") as stream:
            np.save(stream, z, allow_pickle=False)
    est.save(folder / "model.npz")
    t = np.linspace(0, 1.3 * est.step_times(alpha, 0.95)[0].max(), 400)
    spectra = est.spectrum_at(t, alpha=alpha)
    with style(), atomic(folder / "figure.png") as part:
        draw_embedding(est.eigenvalues_, est.embedding_, t, spectra).savefig(part)
    save_json(folder / "spectrum.json", summary)
    return [folder / name for name in ("figure.png", "model.npz", "spectrum.json", "z_a.npy", "z_b.npy")]
