"""SSL without training: kernels, the pair operator, its leading modes, and a scikit-learn estimator."""
