"""One file per figure or table of the paper: Config, compute, draw, check. `experiment.CATALOG` lists them."""
