"""Arguments that describe pairs, shared by `predict` and `embed`."""

from typing import Annotated

import typer

Source = Annotated[
    str, typer.Argument(help="photos, digits, cifar10, stl10, a folder of images, array:FILE.npy, or features x_a.npy.")
]
SourceB = Annotated[str | None, typer.Argument(help="Features of the second view, x_b.npy.")]
Dimension = Annotated[int, typer.Option("-d", "--dimension", help="Embedding dimension.")]
Number = Annotated[int | None, typer.Option(help="Number of images to use; default: 500, or all if fewer.")]
Crop = Annotated[
    int | None, typer.Option(help="Side of the crops in pixels; default: 20, or 5/8 of images smaller than 32.")
]
Pixels = Annotated[str, typer.Option(help="standardize, center or unit (image sources).")]
Size = Annotated[int, typer.Option(help="Side in pixels to which images of a folder are scaled.")]
