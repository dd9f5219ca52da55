"""`KernelSSL`: a scikit-learn estimator of the embedding that an infinitely wide network would learn."""

import sys
import warnings
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils._param_validation import HasMethods, Interval, StrOptions
from sklearn.utils.validation import check_is_fitted

from stairwise.archives import LARGEST
from stairwise.checks import InputError, TheoryWarning, as_numpy, instance, is_tensor, one_of, times
from stairwise.kernel import stored
from stairwise.kernel.arrays import Matrix, check_parameters, checked, like, namespace, refuse_second_view, validated
from stairwise.kernel.fitting import (
    batch,
    first_stream,
    fit_exact,
    fit_precomputed,
    fit_stream,
    is_precomputed,
    planned,
)
from stairwise.kernel.kernels import KERNELS
from stairwise.kernel.landmarks import CHOICES
from stairwise.kernel.models import AbstractModel, Exact, Given, Stream, dual_embedding, total_over_processes
from stairwise.kernel.operators import MEMORY, Blocks
from stairwise.kernel.precision import in_float32
from stairwise.kernel.routes import METHODS, MOST_FEATURES, MOST_MEMORY, SPARE, Route
from stairwise.kernel.solution import Solution
from stairwise.kernel.solvers import SOLVERS
from stairwise.kernel.start import initial_weights
from stairwise.progress import Progress, part, silent
from stairwise.theory.ensemble import Staircase, predict_staircase
from stairwise.theory.laws import evolve


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
        A name ("linear", "rbf", "polynomial", "laplace", "nngp", "ntk", "conv_nngp", "conv_ntk"), an object of
        `stairwise.kernel.kernels`, or a function (X, Y) → matrix. "precomputed": fit takes K̃ (2n, 2n), rows x_1 … x_n,
        x'_1 … x'_n, and transform takes k(x, those) (N, 2n). A pair (k_a, k_b): two modalities with no kernel between
        them (K_XX' = 0).
    method : {"auto", "exact", "nystroem", "features"}, default="auto"
        "exact": from K̃. "nystroem": from k(x, landmarks). "features": from random features (rbf, laplace, nngp of depth
        1). The latter two see each pair once and take memory that does not grow with their number. "auto": exact while
        the upper triangle of K̃ fits into `memory` or a solver is named, Nyström beyond, with a warning. `plan` tells.
    solver : {"auto", "krylov", "cholesky", "features"}, default="auto"
        Of the exact method; `stairwise.kernel.solvers.solve` says what "auto" chooses.
    dtype : {"float64", "float32"}, default="float64"
        Precision of the kernel's values. Iterations and sums are always in float64.
    memory : int, default=4 GiB
        Maximum number of bytes for K̃ in each process. The tiles of a larger K̃ are recomputed.
    n_features : int, default=2000
        Number of landmarks or random features.
    landmarks : {"uniform", "kmeans++", "pivoted"}, default="uniform"
        How landmarks are chosen; see `stairwise.kernel.landmarks.choose`.
    device : str, default=None
        "cuda", "cpu" or "auto": compute there with torch. None: where X is.
    progress : function (done, total, words), default=None
        Is told the method, why and the memory before anything starts, then how far it is; `print` will do.
    random_state : int, default=0
        Seed of landmarks and random features.

    Attributes
    ----------
    eigenvalues_ : ndarray of shape (n_components,)
        γ_j, descending.
    dual_coef_ : of shape (n_points, n_components)
        a_j in columns; points are x_1 … x_n, x'_1 … x'_n (x_1 … x_n if X_b is None), or landmarks, or random features.
    embedding_ : of shape (n_points, n_components)
        Embeddings of those points at no extra cost, 2n γ_j^{1/2} P a_j; exact method only.
    rkhs_norms_ : ndarray of shape (n_components,)
        ‖f_j‖ in the RKHS, γ_j^{-1/2}.
    kernel_ : the kernel with its data-dependent parameters set (a pair for two modalities).
    route_ : the method that was used, why, and how much memory it takes.
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

    _model: AbstractModel
    _solution: Solution | None
    _more: Solution | None
    _parameter_constraints: ClassVar[dict] = {
        "n_components": [Interval(Integral, 1, None, closed="left")],
        "kernel": [StrOptions({*KERNELS, "precomputed"}), callable, tuple, list, HasMethods("fit")],
        "method": [StrOptions(set(METHODS))],
        "solver": [StrOptions({"auto", *SOLVERS})],
        "dtype": [StrOptions({"float64", "float32"})],
        "memory": [Interval(Integral, 1, MOST_MEMORY, closed="both")],
        "n_features": [Interval(Integral, 1, MOST_FEATURES, closed="both")],
        "landmarks": [StrOptions(set(CHOICES))],
        "device": [str, None],
        "progress": [callable, None],
        "random_state": [Interval(Integral, 0, sys.maxsize, closed="both")],
    }

    def __init__(
        self,
        n_components: int = 10,
        *,
        kernel: Any = "rbf",
        method: str = "auto",
        solver: str = "auto",
        dtype: str = "float64",
        memory: int = MEMORY,
        n_features: int = 2000,
        landmarks: str = "uniform",
        device: str | None = None,
        progress: Progress | None = None,
        random_state: int = 0,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.method = method
        self.solver = solver
        self.dtype = dtype
        self.memory = memory
        self.n_features = n_features
        self.landmarks = landmarks
        self.device = device
        self.progress = progress
        self.random_state = random_state

    @in_float32
    def fit(self, X: ArrayLike, y: object = None, *, X_b: ArrayLike | None = None) -> Self:
        """Find the leading modes of the pairs X[i], X_b[i].

        Parameters
        ----------
        X : array-like or torch tensor of shape (n, m)
            First view; or K̃ for kernel="precomputed". The approximate methods read memory-mapped arrays in chunks.
            If torch.distributed has several processes, each gives all rows and works on its share.
        y : ignored, as scikit-learn wants it
        X_b : array-like or torch tensor of shape (n, m_b), default=None
            Second view. None: the second view is X itself.
        """
        if X_b is None and self.kernel != "precomputed":
            refuse_second_view(X, y)
        self._begin(X)
        self.route_ = planned(self, X, X_b)
        tell = self.progress or silent
        tell(0.0, 1.0, str(self.route_))
        if self.method == "auto" and self.route_.method == "nystroem":
            words = f'{self.route_}. method="exact", or more memory=, gives the exact result'
            warnings.warn(words, TheoryWarning, stacklevel=2)
        if self.precomputed_:
            self._model = fit_precomputed(self, X, X_b)
        elif self.route_.method == "exact":
            self._model = fit_exact(self, X, X_b)
        else:
            self._model = fit_stream(self, X, X_b, part(tell, 0.0, 0.9))
        self._solution = self._model.modes(self.n_components, progress=tell, spare=SPARE)
        tell(1.0, 1.0, "done")
        return self

    @in_float32
    def partial_fit(self, X: ArrayLike, y: object = None, *, X_b: ArrayLike | None = None) -> Self:
        """Add pairs to those seen before, in one pass and constant memory; the modes are computed when they are used.

        Landmarks and the kernel's scale come from the first batch, which should be typical and hold more points than
        `n_features`. If torch.distributed has several processes, each adds its own pairs, the first batch of the first
        process decides, and `combine` adds up the sums. After an exact fit it begins anew.
        """
        if X_b is None and self.kernel != "precomputed":
            refuse_second_view(X, y)
        model = getattr(self, "_model", None)
        if not isinstance(model, Stream):
            self._begin(X)
            a, b = batch(self, X, X_b, first=True)
            model = first_stream(self, a, b)
            self.route_ = Route(model.method, "pairs are added batch by batch")
        else:
            a, b = batch(self, X, X_b, first=False)
        model.add(a, b)
        self._to_numpy = not is_tensor(X)
        self._model, self._solution, self._more = model, None, None
        return self

    def combine(self, *others: "KernelSSL", start: "KernelSSL | None" = None) -> Self:
        """Add the sums of other estimators with the same landmarks or random features; without any, of all processes.

        If all of them went on from one file, `start` is that file, loaded: its pairs then count once. Without it such
        estimators are refused. In a process group call it once, in every process, after the last `partial_fit`.
        """
        mine, begun = self._stream(), None if start is None else instance(start, "start", KernelSSL)._stream()
        total = replace(mine, batches=set(mine.batches))  # nothing changes if one of the others is refused
        if not others:
            total_over_processes(total, begun)
        for other in others:
            total.include(instance(other, "others", KernelSSL)._stream(), begun)
        self._model = total
        self._solution = self._more = None
        return self

    def plan(self, X: ArrayLike, X_b: ArrayLike | None = None) -> Route:
        """Which method `fit` will use on this data, why, and how much memory it takes; nothing is computed."""
        check_parameters(self)
        return planned(self, X, X_b)

    @property
    @in_float32
    def solution_(self) -> Solution:
        """The modes with residual, number of products and precision."""
        check_is_fitted(self)
        self._solution = self._solution or self._model.modes(self.n_components, spare=SPARE)
        return self._solution

    @property
    def eigenvalues_(self) -> NDArray[np.float64]:
        """γ_j, descending."""
        return self.solution_.eigenvalues

    @property
    def dual_coef_(self) -> Matrix:
        """a_j in columns."""
        return self.solution_.coefficients

    rkhs_norms_ = property(lambda self: self.eigenvalues_**-0.5, doc="‖f_j‖ in the RKHS.")

    @property
    def embedding_(self) -> Matrix:
        """Embeddings of the fitted points; only the exact method keeps them."""
        check_is_fitted(self)
        if not isinstance(self._model, Exact | Given):
            raise AttributeError(
                f"method={self.route_.method!r} does not keep the embeddings of its points: use transform"
            )
        return dual_embedding(self.solution_, self._model.swaps)

    @property
    def pairs_(self) -> int:
        """Number of pairs seen by an approximate method."""
        check_is_fitted(self)
        if not isinstance(self._model, Stream):
            raise AttributeError("only the approximate methods count their pairs")
        return 0 if self._model.sums is None else self._model.sums.pairs

    @property
    def blocks_(self) -> Blocks:
        """The fitted points and their kernels; only the exact method keeps them."""
        check_is_fitted(self)
        if not isinstance(self._model, Exact):
            raise AttributeError("only the exact method keeps its points")
        return self._model.blocks

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_model")

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
        return self.staircase(alpha, draws=draws).step_quantiles(q)

    def staircase(self, alpha: float, times: ArrayLike | None = None, *, draws: int | None = None) -> Staircase:
        """Loss and eigenvalues of C over time, for Gaussian initializations of scale α (`sw.predict_staircase`)."""
        check_is_fitted(self)
        return predict_staircase(self._modes().eigenvalues, self.n_components, alpha, times, draws=draws)

    def learned_kernel(
        self, X: ArrayLike, Y: ArrayLike | None = None, *, view: str = "a", view_y: str | None = None
    ) -> Matrix:
        """K_emb(x, y) = f(x)·f(y): the kernel after self-supervised learning (Sec. 5.2).

        `view` and `view_y` (default: `view`) say which modality X and Y belong to.
        """
        z = self.transform(X, view=view)
        return z @ (z if Y is None else self.transform(Y, view=view_y or view)).T

    def save(self, path: str | Path) -> None:
        """Write to one .npz file, also between calls of `partial_fit`. Your own kernel functions cannot be saved."""
        check_is_fitted(self)
        stored.save(self, path)

    @classmethod
    def load(cls, path: str | Path, largest: int = LARGEST) -> "KernelSSL":
        """Read a file written by `save`, whose arrays take at most `largest` bytes. Nothing is unpickled."""
        if not str(instance(path, "path", (str, Path))):
            raise InputError("path", "must name a file", "an empty text")
        return stored.load(cls, path, largest)

    def _stream(self) -> Stream:
        check_is_fitted(self)
        if not isinstance(self._model, Stream):
            raise InputError("combine", "needs estimators fitted with partial_fit", self.route_.method)
        return self._model

    def _begin(self, X: object) -> None:
        """Check the parameters and forget an earlier fit."""
        check_parameters(self)
        self.precomputed_ = is_precomputed(self)
        self._to_numpy, self._n_features_out = not is_tensor(X), self.n_components
        self._more = None

    @in_float32
    def _responses(self, X: ArrayLike, view: str, coefficients: Matrix) -> Matrix:
        """g_j·φ(x) of points that belong to `view`, as arrays of the kind that was fitted."""
        number_of_view = ["a", "b"].index(one_of(view, "view", ["a", "b"]))
        width = self._model.features_b
        if width is None or number_of_view == 0:
            x = validated(self, X, reset=False)
        else:
            x = checked(X, self.dtype, "X")
            if x.shape[1] != width:
                raise InputError("X", f"must have {width} features for view b", x.shape[1])
        index = 0 if width is None else number_of_view
        out = self._model.responses(x, index, coefficients, self.memory)
        return as_numpy(out) if self._to_numpy else out

    @in_float32
    def _modes(self) -> Solution:
        """Modes for the dynamics: n_components and up to SPARE more. The fit has found them, unless they were hard."""
        self._more = self._more or self.solution_.more or self._model.modes(self.n_components + SPARE, at_most=True)
        return self._more

    def _start(self, alpha: float | None, init: Any, seed: int) -> tuple[Solution, NDArray[np.float64]]:
        """The modes, and the initial weights in their basis, (d, modes)."""
        if (alpha is None) == (init is None):
            raise InputError("alpha", "or init must be given, but not both", None, "for example alpha=1e-4")
        modes = self._modes()
        return modes, initial_weights(self._model, modes, self.n_components, alpha, init, seed)
