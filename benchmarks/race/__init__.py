"""An honest race of optimizers and losses: every method tuned alike on held-out training images, then five seeds."""
