"""One file per figure or table of the paper: Config, compute, draw, check. `catalog` lists them."""
