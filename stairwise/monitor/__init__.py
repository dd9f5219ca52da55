"""Spectra of embeddings, accumulated in any training loop."""
