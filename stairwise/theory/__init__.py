"""Closed forms in numpy float64. Start with `modes`."""
