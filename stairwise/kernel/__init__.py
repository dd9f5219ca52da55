"""Self-supervised learning without training: kernels, the pair operator and its leading modes, an estimator."""
