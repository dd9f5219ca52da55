"""One file per figure or table: Config, compute, check, draw, page and ALT, the figure's alternative text."""
