"""Draw matplotlib figures from arrays. This package computes nothing and imports nothing else of stairwise."""
