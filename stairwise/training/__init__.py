"""Train networks: the loop, its set-up, objectives, optimizers, checkpoints and recipes."""
