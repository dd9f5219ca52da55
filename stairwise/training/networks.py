"""Networks of recipes and runs: newly built, initial, final, and kept during training."""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from stairwise.checks import InputError, instance, positive_int
from stairwise.data.images import fingerprint, load
from stairwise.data.pairs import view_pairs
from stairwise.data.views import ViewPairs
from stairwise.evaluate.representations import eval_mode
from stairwise.nets.encoder import Network, build_encoder, build_network
from stairwise.nets.initial import scale_parameters
from stairwise.runs.folder import CHECKPOINTS, WEIGHTS
from stairwise.runs.reader import Run
from stairwise.training import checkpoint
from stairwise.training.recipe import Recipe, recipe_of

LARGEST = 4  # times the full size: views in `sizes`, so that a slip does not fill the memory


def network_of(recipe: Recipe, view_shape: tuple[int, ...]) -> Network:
    """Build the network of a recipe, with random weights, for views of shape (channels, height, width)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        encoder = build_encoder(recipe.encoder, recipe.encoder_options)
        sample = torch.zeros(2, *view_shape)
        network = build_network(encoder, sample, recipe.hidden, recipe.d, recipe.head_norm, recipe.head_bias).float()
        _check_sizes(network, recipe, view_shape)
        return network


def _check_sizes(network: Network, recipe: Recipe, view_shape: tuple[int, ...]) -> None:
    """Try the encoder with views of every side in `sizes`."""
    most = LARGEST * view_shape[1]
    for side in dict.fromkeys(int(side) for _, side in recipe.sizes if side != view_shape[1]):
        if side > most:
            raise InputError("a side in sizes", f"must be at most {most}, {LARGEST} times the full size", side)
        try:
            with eval_mode(network):
                network(torch.zeros(2, view_shape[0], side, side))
        except Exception as error:  # code of the user
            reason = (str(error) or type(error).__name__).splitlines()[0]
            remedy = f"{reason}; leave sizes out, or use a convolutional encoder with global pooling, such as resnet18"
            raise InputError("sizes", "need an encoder that takes views of every one of them", side, remedy) from error


def load_network(run: Run) -> Network:
    """The network of the newest checkpoint, in evaluation mode on the CPU."""
    instance(run, "run", Run, "use sw.Run(FOLDER)")
    return _restored(run, _newest(run))


def initial_network(run: Run) -> Network:
    """The initial network of a run, rebuilt from its recipe and α, in evaluation mode on the CPU."""
    recipe = recipe_of(run)
    network = network_of(recipe, _newest(run).facts["view_shape"])
    if run.facts["alpha"] != 1:
        scale_parameters(network, float(run.facts["alpha"]), recipe.scope)
    return network.eval()


def kept_networks(run: Run) -> Iterator[tuple[int, float, Network]]:
    """Step, t and network for all weights that the run has kept (`keep` in the recipe)."""
    for path in reversed(checkpoint.every(run.folder / WEIGHTS)):
        state = checkpoint.load(path)
        yield state.facts["step"], state.facts["t"], _restored(run, state)


def fixed_views(run: Run, n: int, seed: int, device: torch.device, views: str = "") -> Tensor:
    """Two views of n training images, fixed by the seed, first views first, (2n, channels, size, size).

    `views`: a pipeline of augmentations instead of the run's own, so that several runs get one and the same tensor."""
    recipe, training = recipe_of(run), run.count("training_images")
    if positive_int(n, "n") > training:
        raise InputError("n", f"must be at most {training}, the number of training images", n, f"n = {training}")
    rows = torch.randperm(training, generator=torch.Generator().manual_seed(seed))[:n]
    source = _source(recipe.data, fingerprint(recipe.data), recipe.size, views or recipe.views, device, training)
    pairs = source.with_seed(seed)
    both = [pairs.fixed(some, i) for i, some in enumerate(rows.split(256))]
    return torch.cat([a for a, _ in both] + [b for _, b in both])


@lru_cache(maxsize=1)
def _source(data: str, version: str, size: int, views: str, device: torch.device, training: int) -> ViewPairs:
    """Images on the device and their statistics, kept for the next study; `version` changes when their files do."""
    return view_pairs(load(data, size=size or 64), views, size, 0, device, training=training)


def _newest(run: Run) -> checkpoint.Checkpoint:
    state = checkpoint.newest(run.folder / CHECKPOINTS)
    if state is None:
        raise InputError("run", "must have a checkpoint", run.folder, "wait for its first checkpoint")
    return state


def _restored(run: Run, state: checkpoint.Checkpoint) -> Network:
    network = network_of(recipe_of(run), state.facts["view_shape"])
    network.load_state_dict(state.part("objective.network"))
    return network.eval()
