"""One file per figure or table: Config, compute, draw, check."""
