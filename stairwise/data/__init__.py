"""Datasets, and the two views of each image that the theory and the networks learn from."""
