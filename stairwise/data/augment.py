r"""Random views, computed in batches on the training device with separate random parameters per image.

Images are stored as (N, H, channels, W). In this layout cropping, resizing and flipping together are two batched matrix
products without a copy, and so is blurring. Each image has its own matrices; their rows are the weights of the input
pixels in an output pixel (Pillow's antialiased bilinear or bicubic filter), and a flip reverses the rows.

Colour operations follow torchvision's definitions, in random order per image. On a GPU pixels are float16, which is
eight times finer than uint8, to which Pillow rounds after each operation.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stairwise.checks import InputError, one_of

FILTERS = ("bilinear", "bicubic")
GRAY = (0.299, 0.587, 0.114)
TRIES = 10  # as in torchvision, before falling back to a central crop
Range = tuple[float, float]


@dataclass(frozen=True)
class View:
    """Parameters of one random view. Operations are applied in the order of the fields.

    Attributes:
        scale: fraction of the image area that a crop covers; None: crops of the output size, without resizing.
        ratio: width / height of the crop, log-uniform.
        flip, gray, blur, solarize: probabilities.
        jitter: probability of changing colours; `strengths` are of brightness, contrast, saturation and hue.
        sigma: standard deviation of the blur in pixels, uniform.
        resample: "bilinear" or "bicubic".
    """

    scale: Range | None = (0.2, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.8
    strengths: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    gray: float = 0.2
    blur: float = 0.5
    sigma: Range = (0.1, 2.0)
    solarize: float = 0.0
    resample: str = "bilinear"

    def __post_init__(self) -> None:
        one_of(self.resample, "resample", FILTERS)
        for name in ("flip", "jitter", "gray", "blur", "solarize"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(name, "must be a probability", getattr(self, name))


def _barlow(blur: float, solarize: float) -> View:
    """The published views of Barlow Twins and VICReg (bicubic, full range of scales)."""
    return View((0.08, 1.0), strengths=(0.4, 0.4, 0.2, 0.1), blur=blur, solarize=solarize, resample="bicubic")


PIPELINES = {
    "simclr": (View(), View()),
    "barlow": (_barlow(1.0, 0.0), _barlow(0.1, 0.2)),
    "simclr-small": (View(blur=0), View(blur=0)),  # 32 px: no blur, as in SimCLR's paper
    "simclr-small-wide": (View((0.08, 1.0), blur=0), View((0.08, 1.0), blur=0)),
    "barlow-small": (
        View(strengths=(0.4, 0.4, 0.2, 0.1), blur=0),
        View(strengths=(0.4, 0.4, 0.2, 0.1), blur=0, solarize=0.2),
    ),
    "crop": (View(None, flip=0, jitter=0, gray=0, blur=0), View(None, flip=0, jitter=0, gray=0, blur=0)),
    "none": (View((1.0, 1.0), (1.0, 1.0), 0, 0, gray=0, blur=0), View((1.0, 1.0), (1.0, 1.0), 0, 0, gray=0, blur=0)),
}


def to_layout(pixels: Tensor) -> Tensor:
    """(N, H, W, channels) → (N, H, channels, W), contiguous."""
    return pixels.transpose(2, 3).contiguous()


def augment(images: Tensor, view: View, size: int, generator: torch.Generator, mean: Tensor, std: Tensor) -> Tensor:
    """One random view of each image.

    Arguments:
        images: (N, H, channels, W), uint8 or floats in [0, 1].
        size: side of the square output.
        generator: random generator on the device of the images.
        mean, std: per channel, (channels,), to normalize the result.

    Returns:
        (N, channels, size, size); channels-last and float16 on a GPU, contiguous and float32 on a CPU.

    Example:
        >>> images = torch.randint(256, (8, 32, 3, 32), dtype=torch.uint8)
        >>> out = augment(images, View(), 24, torch.Generator().manual_seed(0), torch.zeros(3), torch.ones(3))
        >>> out.shape, out.dtype
        (torch.Size([8, 3, 24, 24]), torch.float32)
    """
    n, height, channels, width = images.shape
    # `_jitter` treats groups of consecutive images alike, so shuffle the images, and restore their order at the end
    order = torch.rand(n, device=images.device, generator=generator).argsort()
    x = unit(images[order])
    rows, columns = crop_matrices(n, height, width, size, view, generator, images.device)
    x = _resample(x, rows, columns)
    if view.scale is not None:
        x = x.clamp(0, 1)  # bicubic overshoots
    if view.jitter:
        x = _jitter(x, view, generator)
    if view.gray and channels == 3:
        x = torch.where(_chosen(n, view.gray, x, generator), _gray(x), x)
    if view.blur:
        W = blur_matrices(_uniform(n, view.sigma, x, generator), size)
        W = torch.where(_chosen(n, view.blur, x, generator).view(n, 1, 1), W, torch.eye(size, device=x.device))
        x = _resample(x, W, W)
    if view.solarize:
        x = torch.where(_chosen(n, view.solarize, x, generator) & (x >= 0.5), 1 - x, x)
    x = (x - mean.view(1, 1, -1, 1).to(x)) / std.view(1, 1, -1, 1).to(x)
    out = torch.empty((n, size, size, channels), dtype=x.dtype, device=x.device)
    out[order] = x.transpose(2, 3)
    return _laid_out(out.permute(0, 3, 1, 2))


def full_view(images: Tensor, size: int, mean: Tensor, std: Tensor, crop: bool = False) -> Tensor:
    """The image resized to `size`, or its centre (`crop`), normalized: the input of probes."""
    n, height, _, width = images.shape

    def matrices(side: int) -> Tensor:
        kept = size if crop else side
        start, length = (torch.full((n,), float(v), device=images.device) for v in ((side - kept) // 2, kept))
        return resize_matrices(start, length, side, size, "bilinear")

    rows, columns = matrices(height), matrices(width)
    x = _resample(unit(images), rows, columns)
    x = (x - mean.view(1, 1, -1, 1).to(x)) / std.view(1, 1, -1, 1).to(x)
    return _laid_out(x.permute(0, 2, 1, 3))


def _laid_out(x: Tensor) -> Tensor:
    """Channels-last on a GPU, because convolutions are faster. Contiguous on a CPU, because channels-last is not faster
    and strided 1 × 1 convolutions of few channels can be wrong there (torch 2.13 on CPUs without AVX-512)."""
    return x.contiguous(memory_format=torch.channels_last if x.is_cuda else torch.contiguous_format)


def unit(images: Tensor) -> Tensor:
    """Pixels scaled to 0 … 1: float16 on a GPU, else float32."""
    kind = torch.float16 if images.is_cuda else torch.float32
    return images.to(kind) / 255 if images.dtype == torch.uint8 else images.to(kind)


def crop_matrices(
    n: int, height: int, width: int, size: int, view: View, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Matrices (n, size, height) and (n, size, width) that crop, resize and flip at random."""
    top, left, h, w = crop_boxes(n, height, width, size, view, generator, device)
    rows = resize_matrices(top, h, height, size, view.resample)
    columns = resize_matrices(left, w, width, size, view.resample)
    flipped = torch.rand(n, device=device, generator=generator) < view.flip
    return rows, torch.where(flipped.view(n, 1, 1), columns.flip(1), columns)


def crop_boxes(
    n: int, height: int, width: int, size: int, view: View, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, height and width of random crops, (n,) each, whole numbers (torchvision's RandomResizedCrop)."""

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device, generator=generator)

    if view.scale is None:
        if size > min(height, width):
            raise InputError("size", f"must be at most {min(height, width)}, the side of the images", size)
        h = w = torch.full((n,), float(size), device=device)
    else:
        area = height * width * (view.scale[0] + (view.scale[1] - view.scale[0]) * draw(n, TRIES))
        low, high = (math.log(r) for r in view.ratio)
        ratio = (low + (high - low) * draw(n, TRIES)).exp()
        ws, hs = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        fits = (ws >= 1) & (ws <= width) & (hs >= 1) & (hs <= height)
        first = fits.float().argmax(dim=1, keepdim=True)
        # if no try fits, use the largest central crop of the nearest allowed ratio
        shape = min(max(width / height, view.ratio[0]), view.ratio[1])
        spare_w, spare_h = min(width, round(height * shape)), min(height, round(width / shape))
        any_fits = fits.any(dim=1)
        h = torch.where(any_fits, hs.gather(1, first).squeeze(1), float(spare_h))
        w = torch.where(any_fits, ws.gather(1, first).squeeze(1), float(spare_w))
        top = torch.where(any_fits, (draw(n) * (height - h + 1)).floor(), ((height - h) / 2).floor())
        left = torch.where(any_fits, (draw(n) * (width - w + 1)).floor(), ((width - w) / 2).floor())
        return top, left, h, w
    return (draw(n) * (height - h + 1)).floor(), (draw(n) * (width - w + 1)).floor(), h, w


def resize_matrices(start: Tensor, length: Tensor, total: int, size: int, resample: str) -> Tensor:
    """Weights (n, size, total) that resize pixels start … start + length − 1 of `total` to `size`, like Pillow.

    Output pixel i is at (i + ½) length/size. The filter is widened by length/size if that exceeds 1 (antialiasing) and
    truncated at the edges of the crop.
    """
    device = start.device
    step = (length / size).view(-1, 1, 1)
    wide = step.clamp_min(1)
    centre = start.view(-1, 1, 1) + (torch.arange(size, device=device).view(1, -1, 1) + 0.5) * step
    pixel = torch.arange(total, device=device).view(1, 1, -1)
    x = ((pixel + 0.5 - centre) / wide).abs()
    weights = _triangle(x) if resample == "bilinear" else _cubic(x)
    inside = (pixel >= start.view(-1, 1, 1)) & (pixel < (start + length).view(-1, 1, 1))
    weights = torch.where(inside, weights, 0.0)
    return weights / weights.sum(dim=2, keepdim=True)


def blur_matrices(sigma: Tensor, size: int) -> Tensor:
    """Gaussian weights (n, size, size) with the given standard deviations; images are mirrored at their edge pixels."""
    i = torch.arange(size, device=sigma.device).view(1, -1, 1)
    j = torch.arange(size, device=sigma.device).view(1, 1, -1)
    last = size - 1
    # one mirror image per side is enough, because sigma is well below the image side
    images = [(i - j, j >= 0), (i + j, j > 0), (i - 2 * last + j, j < last)]
    s = sigma.view(-1, 1, 1).float()
    weights = sum(torch.where(real, torch.exp(-0.5 * (apart / s) ** 2), 0.0) for apart, real in images)
    assert isinstance(weights, Tensor)
    return weights / weights.sum(dim=2, keepdim=True)


def _resample(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows · x · columnsᵀ for each image and channel; x is (n, H, channels, W)."""
    n, height, channels, width = x.shape
    x = x.reshape(n, height * channels, width) @ columns.to(x).transpose(1, 2)
    x = rows.to(x) @ x.reshape(n, height, -1)
    return x.view(n, rows.shape[1], channels, columns.shape[1])


def _triangle(x: Tensor) -> Tensor:
    return (1 - x).clamp_min(0)


def _cubic(x: Tensor, a: float = -0.5) -> Tensor:
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _chosen(n: int, probability: float, x: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.rand(n, device=x.device, generator=generator) < probability).view(n, 1, 1, 1)


def _uniform(n: int, bounds: Range, x: Tensor, generator: torch.Generator) -> Tensor:
    return bounds[0] + (bounds[1] - bounds[0]) * torch.rand(n, device=x.device, generator=generator)


def _gray(x: Tensor) -> Tensor:
    r, g, b = x.unbind(2)
    return (GRAY[0] * r).add_(g, alpha=GRAY[1]).add_(b, alpha=GRAY[2]).unsqueeze(2)


def _jitter(x: Tensor, view: View, generator: torch.Generator) -> Tensor:
    """Change brightness, contrast, saturation and hue in random order per image, for a random subset of images.

    The first three blend the image with black, its mean gray or its gray version, so one formula computes them in any
    order per image. The hue is turned after 0, 1, 2 or 3 of them, each for a quarter of the shuffled images, so that it
    is computed once per image and shapes are fixed.
    """
    n, colours = len(x), x.shape[2] == 3
    on = _chosen(n, view.jitter, x, generator).view(n, 1)
    spread = torch.where(on, 2 * torch.rand((n, 4), device=x.device, generator=generator) - 1, 0.0)
    # images with one channel have no saturation and no hue
    strengths = view.strengths if colours else (*view.strengths[:2], 0.0, 0.0)
    factors = torch.stack([1 + s * spread[:, i] for i, s in enumerate(strengths[:3])], dim=1).clamp_min(0)
    order = torch.rand((n, 3), device=x.device, generator=generator).argsort(dim=1)
    for k in range(4):
        quarter = slice(k * n // 4, (k + 1) * n // 4)
        if strengths[3]:
            x[quarter] = turn_hue(x[quarter], strengths[3] * spread[quarter, 3])
        if k < 3:
            x = _blend(x, order[:, k], factors.gather(1, order[:, k : k + 1]))
    return x


def _blend(x: Tensor, operation: Tensor, factor: Tensor) -> Tensor:
    """factor · x + (1 − factor) · (0, mean gray or gray) for operation 0, 1 or 2; clamped."""
    gray = _gray(x) if x.shape[2] == 3 else x
    mean = gray.mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float32)
    f, which = factor.view(-1, 1, 1, 1), operation.view(-1, 1, 1, 1)
    constant = torch.where(which == 1, (1 - f) * mean, 0.0).to(x)
    share = torch.where(which == 2, 1 - f, 0.0).to(x)
    return torch.addcmul(torch.addcmul(constant, share, gray), f.to(x), x).clamp_(0, 1)


def turn_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of images (n, H, 3, W) by the fraction `shift` (n,) of a full circle; keep value and saturation.

    With V the largest channel, δ its distance to the smallest and H the hue in sixths of the circle, channel c is
    V − δ clamp(min(k, 4 − k), 0, 1), k = (c + H) mod 6, c = 5, 3, 1.
    """
    r, g, b = x.unbind(2)
    high, low = torch.maximum(torch.maximum(r, g), b), torch.minimum(torch.minimum(r, g), b)
    delta = high - low
    red, green = high == r, high == g
    apart = torch.where(red, g - b, torch.where(green, b - r, r - g))
    base = torch.where(red, 0.0, torch.where(green, 2.0, 4.0)).to(x)
    hue = (apart / delta.clamp_min(1e-4)).add_(base).add_(6 * shift.view(-1, 1, 1).to(x))
    k = hue.unsqueeze(2) + torch.arange(5, 0, -2, device=x.device, dtype=x.dtype).view(1, 1, 3, 1)
    k.remainder_(6).sub_(2).abs_().neg_().add_(2).clamp_(0, 1)  # clamp(min(k, 4 − k), 0, 1) for k mod 6
    return torch.addcmul(high.unsqueeze(2), delta.unsqueeze(2), k, value=-1)
