"""Spectra accumulated in anybody's training loop."""
