"""`stairwise predict`: predict the staircase of a linear model before training."""

from pathlib import Path
from typing import Annotated

import typer

from stairwise.commands.console import Json, err, print_json, print_table
from stairwise.commands.sources import Crop, Number, Pixels, Size, Source, SourceB


def predict(
    source: Source = "photos",
    source_b: SourceB = None,
    d: Annotated[
        int | None, typer.Option("-d", "--dimension", help="Embedding dimension; default: 10, or fewer on small data.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="Scale of the Gaussian initial weights.")] = 1e-7,
    lr: Annotated[float | None, typer.Option(help="Learning rate of descent; default: flow.")] = None,
    optimizer: Annotated[
        str, typer.Option(help="sgd: W ← W − lr ∇L. muon: W ← W + lr polar(−∇L), the spectral rule.")
    ] = "sgd",
    n: Number = None,
    crop: Crop = None,
    pixels: Pixels = "standardize",
    size: Size = 64,
    draws: Annotated[int, typer.Option(help="Number of random initializations for the intervals.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of crops and draws.")] = 0,
    figure: Annotated[Path | None, typer.Option("--out", help="Also draw it to this .png, .pdf or .svg file.")] = None,
    json_: Json = False,
) -> None:
    """Predict when a linear model will learn each dimension, from pairs alone, before any training.

    Prints the eigenvalues γ of Γ, the time of every step with a 90 % interval over initializations, the largest stable
    learning rate 1/(4γ₁), and the staircase of the loss. All of it is for the linear model f(x) = W x: a deep network
    learns its dimensions one by one, too, but at other times. Under SGD step times go as 1/γ, under Muon as 1/√γ.

    Examples: `stairwise predict photos -d 8`, `stairwise predict my/images --out p.png`,
    `stairwise predict x_a.npy x_b.npy --lr 0.01 --json`, `stairwise predict photos --optimizer muon`
    """
    from stairwise.data.pairs import read_pairs
    from stairwise.files import check_target
    from stairwise.outlook.predict import FORMATS
    from stairwise.outlook.predict import predict as predict_pairs

    if figure is not None:
        check_target(figure, "--out", FORMATS)  # before the work, not after it
    with err.status("reading pairs and computing the leading modes of Γ"):
        pairs = read_pairs(source, source_b, n=n, crop=crop, pixels=pixels, size=size, seed=seed)
        outlook = predict_pairs(pairs.x_a, pairs.x_b, d, alpha, lr, optimizer, draws=draws, seed=seed, name=pairs.name)
    if figure is not None:
        outlook.draw(figure)
    if json_:
        print_json(outlook.summary())
        return
    print_table(outlook.table())
    print(outlook.text())
    if figure is not None:
        print(f"figure  {figure}")
