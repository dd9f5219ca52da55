"""Joint-embedding losses: pure functions of the embeddings of two views, and thin modules around them."""

from stairwise.losses.barlow_twins_loss import BarlowTwins, barlow_twins
from stairwise.losses.byol_loss import BYOL, byol
from stairwise.losses.frossl_loss import FroSSL, frossl
from stairwise.losses.preconditioning import precondition
from stairwise.losses.simclr_loss import SimCLR, simclr
from stairwise.losses.spectral_contrastive_loss import SpectralContrastive, spectral_contrastive
from stairwise.losses.spectral_loss import (
    FourthPower,
    Hinged,
    Sharpened,
    Smoothed,
    fourth_power,
    hinged,
    sharpened,
    smoothed,
)
from stairwise.losses.vicreg_loss import VICReg, vicreg

__all__ = [
    "BYOL",
    "MODULES",
    "BarlowTwins",
    "FourthPower",
    "FroSSL",
    "Hinged",
    "Sharpened",
    "SimCLR",
    "Smoothed",
    "SpectralContrastive",
    "VICReg",
    "barlow_twins",
    "byol",
    "fourth_power",
    "frossl",
    "hinged",
    "precondition",
    "sharpened",
    "simclr",
    "smoothed",
    "spectral_contrastive",
    "vicreg",
]

# by their names in recipes
MODULES = {
    "barlow_twins": BarlowTwins,
    "simclr": SimCLR,
    "vicreg": VICReg,
    "frossl": FroSSL,
    "spectral_contrastive": SpectralContrastive,
    "byol": BYOL,
    "sharpened": Sharpened,
    "smoothed": Smoothed,
    "fourth_power": FourthPower,
    "hinged": Hinged,
}
