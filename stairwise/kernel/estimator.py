"""`KernelSSL`: a scikit-learn estimator of the embedding that an infinitely wide network would learn."""

import json
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils._param_validation import HasMethods, Interval, StrOptions
from sklearn.utils.validation import check_is_fitted, validate_data

from stairwise.checks import InputError, number, one_of, times
from stairwise.files import load_arrays, plain, save_arrays
from stairwise.kernel.arrays import Matrix, as_numpy, cast, checked, is_tensor, like, namespace, stack
from stairwise.kernel.kernels import KERNELS, describe, resolve
from stairwise.kernel.kernels import linear as LinearKernel
from stairwise.kernel.operators import MEMORY, AbstractPairs, Blocks, DensePairs, FeaturePairs
from stairwise.kernel.solvers import SOLVERS, Solution, refuse_large, solve
from stairwise.kernel.tiles import build_pairs
from stairwise.theory.ensemble import predict_staircase
from stairwise.theory.laws import evolve

FORMAT = 1  # version of the saved files
SPARE = 20  # number of modes beyond n_components, which compete with the last ones during training


class KernelSSL(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    r"""Self-supervised learning without training (Prop. 5.1 and App. B.2).

    Given pairs of views and a kernel, computes the embedding that gradient flow on ‖C − I‖² reaches from small init:
    f_j(x) = γ_j^{-1/2} Σ_i a_ij k(x_i, x), with P K̃ a = 2n γ a over both views. Of all embeddings with C = I on the
    pairs it has the smallest RKHS norm. With X_b = None both views are the same: kernel PCA without centring.

    Parameters
    ----------
    n_components : int, default=10
        Embedding dimension d.
    kernel : str, kernel object, callable, "precomputed", or a pair of these, default="rbf"
        A name ("linear", "rbf", "polynomial", "laplace", "nngp", "ntk"), an object of `stairwise.kernel.kernels`, or a
        function (X, Y) → matrix. "precomputed": fit takes K̃ (2n, 2n), rows x_1 … x_n, x'_1 … x'_n, and transform takes
        k(x, those) (N, 2n). A pair (k_a, k_b): two modalities with no kernel between them (K_XX' = 0).
    solver : {"auto", "krylov", "cholesky", "features"}, default="auto"
        `stairwise.kernel.solvers.solve` says what "auto" chooses.
    dtype : {"float64", "float32"}, default="float64"
        Precision of the kernel matrix. The solver always iterates in float64.
    memory : int, default=4 GiB
        Maximum number of bytes for K̃. A larger K̃ is recomputed in strips.

    Attributes
    ----------
    eigenvalues_ : ndarray of shape (n_components,)
        γ_j, descending.
    dual_coef_ : of shape (n_points, n_components)
        a_j in columns; points are x_1 … x_n, x'_1 … x'_n (or x_1 … x_n if X_b is None).
    embedding_ : of shape (n_points, n_components)
        Embeddings of those points at no extra cost: 2n γ_j^{1/2} P a_j.
    rkhs_norms_ : ndarray of shape (n_components,)
        ‖f_j‖ in the RKHS, γ_j^{-1/2}.
    kernel_ : the kernel with its data-dependent parameters set (a pair for two modalities).
    solution_ : the `Solution` with residual, number of products, precision and `trusted`.
    n_features_in_ : number of features of X.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> base = rng.standard_normal((200, 5))
    >>> X_a, X_b = (base + 0.1 * rng.standard_normal(base.shape) for _ in "ab")
    >>> est = KernelSSL(n_components=3).fit(X_a, X_b=X_b)
    >>> z_a, z_b = est.transform(X_a), est.transform(X_b)
    >>> C = (z_a.T @ z_b + z_b.T @ z_a) / (2 * len(z_a))
    >>> bool(np.allclose(C, np.eye(3)))
    True
    """

    _parameter_constraints: ClassVar[dict] = {
        "n_components": [Interval(Integral, 1, None, closed="left")],
        "kernel": [StrOptions({*KERNELS, "precomputed"}), callable, tuple, list, HasMethods("fit")],
        "solver": [StrOptions({"auto", *SOLVERS})],
        "dtype": [StrOptions({"float64", "float32"})],
        "memory": [Interval(Integral, 1, None, closed="left")],
    }

    def __init__(
        self,
        n_components: int = 10,
        *,
        kernel: Any = "rbf",
        solver: str = "auto",
        dtype: str = "float64",
        memory: int = MEMORY,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.solver = solver
        self.dtype = dtype
        self.memory = memory

    def fit(self, X: ArrayLike, y: object = None, *, X_b: ArrayLike | None = None) -> Self:
        """Find the leading modes of the pairs X[i], X_b[i].

        Parameters
        ----------
        X : array-like or torch tensor of shape (n, m)
            First view; or K̃ for kernel="precomputed".
        y : ignored
        X_b : array-like or torch tensor of shape (n, m_b), default=None
            Second view. None: the second view is X itself.
        """
        self._validate_params()
        self.precomputed_ = isinstance(self.kernel, str) and self.kernel == "precomputed"
        pairs = self._fit_precomputed(X, X_b) if self.precomputed_ else self._fit_views(X, X_b)
        self._n_features_out = self.n_components
        self.solution_ = solve(pairs, self.n_components, self.solver)
        self.eigenvalues_ = self.solution_.eigenvalues
        self.dual_coef_ = self.solution_.coefficients
        scale = like(pairs.size * np.sqrt(self.eigenvalues_), self.dual_coef_)
        self.embedding_ = pairs.swap(self.dual_coef_) * scale
        self.rkhs_norms_ = self.eigenvalues_**-0.5
        # a precomputed K̃ is not stored, so the extra modes for the dynamics are computed now
        self._more = self._spare_modes(pairs) if self.precomputed_ else None
        return self

    def transform(self, X: ArrayLike, view: str = "a") -> Matrix:
        """Embeddings (N, n_components) of new points. With two modalities `view` says which one they belong to.

        For kernel="precomputed", X holds k(x, fitted points), (N, n_points).
        """
        check_is_fitted(self)
        return self._responses(X, view, self.dual_coef_ / like(np.sqrt(self.eigenvalues_), self.dual_coef_))

    def transform_at(
        self,
        X: ArrayLike,
        t: ArrayLike,
        *,
        alpha: float | None = None,
        init: Any = None,
        law: str = "logistic",
        lr: float | None = None,
        random_state: int = 0,
        view: str = "a",
    ) -> Matrix:
        """Embeddings at training times t from small initialization, shape (*t.shape, N, n_components).

        Parameters
        ----------
        t : array-like of times (learning rate × step); infinity allowed.
        alpha : scale of a random Gaussian initialization in feature space.
        init : instead of `alpha`, the values of the initial function on the fitted points, (n_points, n_components), or
            a network (any callable) that returns them when called with each fitted view.
        law : "logistic" or "aligned"; see `closed_form`.
        lr : learning rate, for gradient descent instead of flow.
        """
        check_is_fitted(self)
        moments = times(t, "t")
        modes, u = self._start(alpha, init, random_state)
        _, moved = evolve(u, modes.eigenvalues, np.atleast_1d(moments).ravel(), law, lr, weights=True)
        assert moved is not None
        responses = self._responses(X, view, modes.coefficients)  # g_j · φ(x)
        out = namespace(responses).einsum("tdr,nr->tnd", like(moved, responses), responses)
        return out.reshape(*moments.shape, *out.shape[1:])

    def spectrum_at(
        self,
        t: ArrayLike,
        *,
        alpha: float | None = None,
        init: Any = None,
        law: str = "logistic",
        lr: float | None = None,
        random_state: int = 0,
    ) -> NDArray[np.float64]:
        """Eigenvalues of C at times t, (*t.shape, n_components). Arguments as for `transform_at`."""
        check_is_fitted(self)
        moments = times(t, "t")
        modes, u = self._start(alpha, init, random_state)
        spectra, _ = evolve(u, modes.eigenvalues, np.atleast_1d(moments).ravel(), law, lr)
        return spectra.reshape(*moments.shape, self.n_components)

    def step_times(
        self, alpha: float, q: ArrayLike = (0.05, 0.5, 0.95), *, draws: int | None = None
    ) -> NDArray[np.float64]:
        """Quantiles of each step's time over Gaussian initializations of scale α, (len(q), n_components)."""
        check_is_fitted(self)
        gamma = self._modes().eigenvalues
        return predict_staircase(gamma, self.n_components, alpha, draws=draws).step_quantiles(q)

    def learned_kernel(
        self, X: ArrayLike, Y: ArrayLike | None = None, *, view: str = "a", view_y: str | None = None
    ) -> Matrix:
        """K_emb(x, y) = f(x)·f(y): the kernel after self-supervised learning (Sec. 5.2).

        `view` and `view_y` (default: `view`) say which modality X and Y belong to.
        """
        z = self.transform(X, view=view)
        return z @ (z if Y is None else self.transform(Y, view=view_y or view)).T

    def save(self, path: str | Path) -> None:
        """Write to one .npz file without pickled objects. Your own kernel functions cannot be saved."""
        check_is_fitted(self)
        kernels = "precomputed" if self.precomputed_ else [describe(k) for k in self.blocks_.kernels]
        solution = self.solution_
        facts = {
            "format": FORMAT,
            "n_components": self.n_components,
            "kernels": kernels,
            "shared": self.precomputed_ or self.blocks_.shared,
            "dtype": self.dtype,
            "solver": self.solver,
            "n_features_in": int(self.n_features_in_),
            "swaps": self.swaps_,
            "memory": self.memory,
            "solution": [solution.residual, solution.products, solution.solver, solution.precision],
        }
        if self.precomputed_:
            more = self._modes()
            parts = {"more_eigenvalues": more.eigenvalues, "more_coef": as_numpy(more.coefficients)}
        else:
            parts = {f"part{i}": as_numpy(p) for i, p in enumerate(self.blocks_.parts)}
        arrays = {"eigenvalues": self.eigenvalues_, "dual_coef": as_numpy(self.dual_coef_)}
        save_arrays(path, {"facts": np.array(json.dumps(plain(facts))), **arrays, **parts})

    @classmethod
    def load(cls, path: str | Path) -> "KernelSSL":
        """Read a file written by `save`. Nothing is unpickled."""
        stored = load_arrays(path)
        try:
            facts = json.loads(str(stored["facts"]))
            if facts["format"] != FORMAT:
                raise InputError(
                    str(path), f"must have format {FORMAT}", facts["format"], "load it with the version that wrote it"
                )
            return cls._restore(stored, facts)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise InputError(str(path), "must be a file written by KernelSSL.save", repr(error)) from error

    @classmethod
    def _restore(cls, stored: dict[str, np.ndarray], facts: dict[str, Any]) -> "KernelSSL":
        precomputed = facts["kernels"] == "precomputed"
        kernels = () if precomputed else tuple(KERNELS[name](**values) for name, values in facts["kernels"])
        kernel = "precomputed" if precomputed else kernels[0] if facts["shared"] else kernels
        est = cls(
            facts["n_components"], kernel=kernel, solver=facts["solver"], dtype=facts["dtype"], memory=facts["memory"]
        )
        est.precomputed_, est.swaps_, est.n_features_in_ = precomputed, facts["swaps"], facts["n_features_in"]
        est.eigenvalues_, est.dual_coef_ = stored["eigenvalues"], stored["dual_coef"]
        est.rkhs_norms_, est._n_features_out, est._more = est.eigenvalues_**-0.5, facts["n_components"], None
        est.solution_ = Solution(est.eigenvalues_, est.dual_coef_, *facts["solution"])
        half = len(est.dual_coef_) // 2
        swapped = np.roll(est.dual_coef_, half, axis=0) if est.swaps_ else est.dual_coef_
        est.embedding_ = swapped * len(swapped) * np.sqrt(est.eigenvalues_)
        if precomputed:
            est._more = Solution(stored["more_eigenvalues"], stored["more_coef"], *facts["solution"])
        else:
            parts = tuple(stored[f"part{i}"] for i in range(len(kernels)))
            est.blocks_ = Blocks(parts, kernels, facts["shared"], facts["dtype"])
            est.kernel_ = kernel
        return est

    # --- fitting

    def _fit_precomputed(self, X: ArrayLike, X_b: ArrayLike | None) -> AbstractPairs:
        if X_b is not None:
            raise InputError("X_b", 'must be None for kernel="precomputed"', None, "X is already K̃ of both views")
        given = str(getattr(X, "dtype", "float64"))
        K = self._validated(X, reset=True)
        xp = namespace(K)
        if K.shape[0] != K.shape[1]:
            raise InputError("X", "must be a square kernel matrix", f"shape {tuple(K.shape)}", "or choose a kernel=")
        if K.shape[0] % 2:
            raise InputError("X", "must have an even number of rows: K̃ of x_1 … x_n, x'_1 … x'_n", K.shape[0])
        scale = float(abs(K).max())
        if float(abs(K - K.T).max()) > 1e-8 * scale + 100 * float(xp.finfo(K.dtype).eps) * scale:
            raise InputError("X", "must be a symmetric kernel matrix", None, "symmetrize it: (K + K.T) / 2")
        self.swaps_ = True
        single = given.endswith(("float32", "float16"))
        pairs = DensePairs((K + K.T) / 2, swaps=True, precision=float(np.finfo(np.float32).eps) if single else 0.0)
        if pairs.size <= 5000:  # beyond, the solver notices
            pairs.refuse_indefinite("X")
        return pairs

    def _fit_views(self, X: ArrayLike, X_b: ArrayLike | None) -> AbstractPairs:
        a = self._validated(X, reset=True)
        two = isinstance(self.kernel, tuple | list)
        if two and (len(self.kernel) != 2 or X_b is None):
            raise InputError(
                "kernel", "as a pair needs two kernels and X_b", self.kernel, "or one kernel for both views"
            )
        b = a if X_b is None else self._second(X_b, a, like_first=not two)
        self.swaps_ = X_b is not None
        if two:
            kernels = tuple(resolve(kernel, part) for kernel, part in zip(self.kernel, (a, b), strict=True))
            self.kernel_: Any = kernels
        else:
            both = a if X_b is None else namespace(a).concatenate([a, b])
            self.kernel_ = resolve(self.kernel, both)
            kernels = (self.kernel_,) if X_b is None else (self.kernel_, self.kernel_)
        parts = (a,) if X_b is None else (a, b)
        self.blocks_ = Blocks(parts, kernels, shared=not two, dtype=self.dtype)
        return self._operator()

    def _operator(self) -> AbstractPairs:
        """K̃ as features, dense or tiled, depending on kernel, solver and memory."""
        blocks = self.blocks_
        explicit = blocks.shared and isinstance(blocks.kernels[0], LinearKernel) and self.solver in ("auto", "features")
        if explicit and (self.solver == "features" or blocks.parts[0].shape[1] <= blocks.size):
            return FeaturePairs(namespace(blocks.parts[0]).concatenate(list(blocks.parts)), self.swaps_)
        if self.solver == "cholesky":
            refuse_large(blocks.size)
            return DensePairs(blocks.matrix(), self.swaps_)
        return build_pairs(blocks, self.swaps_, self.memory)

    def _second(self, X_b: ArrayLike, a: Matrix, like_first: bool) -> Matrix:
        b = checked(X_b, self.dtype, "X_b")
        if is_tensor(a) != is_tensor(b) or (is_tensor(a) and a.device != b.device):
            raise InputError("X and X_b", "must both be numpy arrays, or torch tensors on one device")
        if len(a) != len(b):
            raise InputError("X and X_b", "must have the same number of rows", f"{len(a)} and {len(b)}")
        if like_first and a.shape[1] != b.shape[1]:
            rule = "must have the same number of features for one kernel"
            raise InputError("X and X_b", rule, f"{a.shape[1]} and {b.shape[1]}", "give a pair of kernels")
        return b

    def _validated(self, X: ArrayLike, reset: bool) -> Matrix:
        if is_tensor(X):
            out = checked(X, self.dtype, "X")
            if reset:
                self.n_features_in_ = out.shape[1]
            elif out.shape[1] != self.n_features_in_:
                raise InputError("X", f"must have {self.n_features_in_} features", out.shape[1])
            return out
        return validate_data(self, X, reset=reset, dtype=np.dtype(self.dtype))

    # --- prediction

    def _points(self, X: ArrayLike, view: str) -> tuple[Matrix, int]:
        """The points, checked and converted to the array type of the fit, and the index of their part."""
        part = ["a", "b"].index(one_of(view, "view", ["a", "b"]))
        fitted = self.dual_coef_
        if is_tensor(fitted) and not is_tensor(X):
            X = like(np.asarray(X, dtype=self.dtype), fitted)
        elif is_tensor(X) and not is_tensor(fitted):
            X = as_numpy(X)
        if self.precomputed_ or part == 0 or self.blocks_.shared:
            return self._validated(X, reset=False), 0
        x = checked(X, self.dtype, "X")
        if x.shape[1] != self.blocks_.parts[1].shape[1]:
            raise InputError("X", f"must have {self.blocks_.parts[1].shape[1]} features for view b", x.shape[1])
        return x, 1

    def _responses(self, X: ArrayLike, view: str, coefficients: Matrix) -> Matrix:
        """k(x, fitted points) times coefficients, in strips that fit into memory."""
        x, part = self._points(X, view)
        strip = max(1, self.memory // (32 * len(coefficients)))
        parts = []
        for start in range(0, len(x), strip):
            some = x[start : start + strip]
            rows = some if self.precomputed_ else self.blocks_.rows(some, part)
            parts.append(cast(rows, "float64") @ coefficients)
        return parts[0] if len(parts) == 1 else stack(parts)

    def _modes(self) -> Solution:
        """Modes for the dynamics: n_components and up to SPARE more, computed on first use."""
        if self._more is None:
            self._more = self._spare_modes(self._operator())
        return self._more

    def _spare_modes(self, pairs: AbstractPairs) -> Solution:
        return solve(pairs, min(self.n_components + SPARE, pairs.size), self.solver, at_most=True)

    def _start(self, alpha: float | None, init: Any, seed: int) -> tuple[Solution, NDArray[np.float64]]:
        """The modes, and the initial weights in their basis, u_j = Σ_i f₀(x_i) a_ij, (d, modes)."""
        if (alpha is None) == (init is None):
            raise InputError("alpha", "or init must be given, but not both", None, "for example alpha=1e-4")
        modes = self._modes()
        d, r = self.n_components, len(modes.eigenvalues)
        if alpha is not None:
            u = number(alpha, "alpha", above=0) * np.random.default_rng(seed).standard_normal((d, r))
        else:
            if callable(init):
                if self.precomputed_:
                    raise InputError("init", 'must be values for kernel="precomputed"', None, "the points are unknown")
                init = stack([init(points) for points in self.blocks_.parts])
            values = as_numpy(checked(init, "float64", "init"))
            if values.shape != (len(modes.coefficients), d):
                rule = f"must have shape {(len(modes.coefficients), d)}: values on the fitted points"
                raise InputError("init", rule, values.shape)
            u = values.T @ as_numpy(modes.coefficients)
        start = float(np.linalg.eigvalsh((u * modes.eigenvalues) @ u.T)[-1])
        if not start < 1:
            name = "alpha" if init is None else "init"
            raise InputError(name, "must start with all eigenvalues of C below 1", f"{start:.3g}", "scale it down")
        return modes, u
