"""Closed-form solutions in numpy float64. Start reading at `modes`."""
