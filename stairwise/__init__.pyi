from stairwise import losses as losses
from stairwise.checks import InputError as InputError
from stairwise.checks import TheoryWarning as TheoryWarning
from stairwise.dynamics.descent import gradient_descent as gradient_descent
from stairwise.dynamics.flow import gradient_flow as gradient_flow
from stairwise.evaluate.probes import probe_curve as probe_curve
from stairwise.kernel import kernels as kernels
from stairwise.kernel.estimator import KernelSSL as KernelSSL
from stairwise.losses import precondition as precondition
from stairwise.monitor.spectrum import SpectrumMonitor as SpectrumMonitor
from stairwise.ntk.empirical import empirical_ntk as empirical_ntk
from stairwise.ntk.predict import predict_embeddings as predict_embeddings
from stairwise.outlook.predict import predict as predict
from stairwise.runs.reader import Run as Run
from stairwise.staircase.advice import advise as advise
from stairwise.staircase.clock import Clock as Clock
from stairwise.staircase.forecast import forecast_steps as forecast_steps
from stairwise.staircase.steps import detect_steps as detect_steps
from stairwise.theory import landscapes as landscapes
from stairwise.theory.alignment import gaussian_init as gaussian_init
from stairwise.theory.conditions import check_conditions as check_conditions
from stairwise.theory.correlation import Correlation as Correlation
from stairwise.theory.ensemble import predict_staircase as predict_staircase
from stairwise.theory.laws import closed_form as closed_form
from stairwise.theory.modes import Modes as Modes
from stairwise.theory.solutions import top_spectral_weights as top_spectral_weights
from stairwise.theory.spectra import subspace_alignment as subspace_alignment
from stairwise.theory.trajectory import Trajectory as Trajectory
from stairwise.training.loop import train as train
from stairwise.training.networks import load_network as load_network
from stairwise.training.recipe import Recipe as Recipe
from stairwise.training.recipe import load_recipe as load_recipe

__version__: str
__all__: list[str]
