"""Gives each rank its rows of the random numbers that one process would draw for the whole batch.

All ranks keep their generators in the state that one process's would have. While a batch is trained on, a draw whose
shape contains the rank's batch size is made for the global batch, and the rank takes its rows. Any other draw is made
as it is. JAX calls random numbers with this property partitionable; torch's DTensor has it in its own random
operations.

If batches are not shares of one process's, each rank gets random streams of its own.

From `share` until `cleanup()` torch's and numpy's random functions are replaced, so that nothing but a draw costs time.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import RandomSampler, SequentialSampler

from ddpshim.errors import DataError
from ddpshim.job.group import world
from ddpshim.job.shares import Sharing
from ddpshim.process.job import current
from ddpshim.process.observed import live_objects
from ddpshim.process.random_streams import seed_own_streams
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say
from ddpshim.process.seeds import derive_seed

BERNOULLI_ = torch.Tensor.bernoulli_
_OF_ONE_NUMBER = ("poisson", "choice", "exponential", "rayleigh", "geometric")
_OF_TWO = ("uniform", "normal", "randint", "binomial", "beta", "gamma", "laplace", "gumbel", "lognormal")
_IN_PLACE = ("normal_", "uniform_", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_", "bernoulli_")
_OF_LAYERS = ("alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
# Which functions draw: (owner, names, the function of `shared_draws` that replaces them, more arguments for it).
_TORCHS: tuple[tuple[Any, tuple[str, ...], str, tuple[Any, ...]], ...] = (
    (torch, ("rand", "randn"), "of_sizes", ()),
    (torch, ("randint",), "sized", (None,)),
    (torch, ("normal",), "normal", ()),
    (torch, ("rand_like", "randn_like", "randint_like"), "like", ()),
    (torch.Tensor, _IN_PLACE, "in_place", ()),
    (torch, ("dropout",), "dropout", ()),
    (functional, ("dropout",), "dropout", ()),
    *((kind, ("forward",), "recurrent", ()) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
    (nn.MultiheadAttention, ("forward",), "attention", ()),
    (torch, ("randperm",), "permutation", ()),
    # Their draws depend on more than a shape: they are computed for the global batch, with ones as the others' rows.
    (functional, (*_OF_LAYERS, "scaled_dot_product_attention"), "of_the_whole", ()),
    (torch, ("bernoulli", "multinomial"), "of_the_whole", ()),
    (torch.Tensor, ("bernoulli", "multinomial"), "of_the_whole", ()),
    # The values determine how many numbers they draw.
    (torch, ("poisson",), "by_value", ("torch.poisson",)),
    (torch, ("binomial",), "by_value", ("torch.binomial",)),
    (torch.distributions.Gamma, ("rsample",), "by_value", ("Gamma.rsample",)),
    (torch.distributions.Dirichlet, ("rsample",), "by_value", ("Dirichlet.rsample",)),
    (functional, ("rrelu",), "by_value", ("functional.rrelu",)),
)
_NUMPYS: tuple[tuple[tuple[str, ...], str, tuple[Any, ...]], ...] = (  # of numpy.random
    (("rand", "randn"), "of_sizes", ()),
    (("random", "random_sample", "standard_normal", "standard_exponential"), "sized", (0,)),
    (_OF_ONE_NUMBER, "sized", (1,)),
    (_OF_TWO, "sized", (2,)),
)


def share() -> None:
    """Share draws among the ranks of this job from now on; `cleanup()` ends it. Local."""
    job = current()
    sharing = job.part(Sharing)
    if sharing.is_on:
        return
    sharing.is_on = True
    job.at_end.enter_context(names_replaced(sharing))


def begin_training(network: str, losses: Any) -> None:
    """In the first backward pass, give ranks their own noise if their batch is not a share of one process's.

    Collective then. Raises DataError if all ranks train on the same batch of a DataLoader that each reads whole.
    """
    sharing = current().part(Sharing)
    if sharing.share is not None or current().holds_whole_batches or not draws_alike():
        return
    here = world()
    use_own_batches()
    given = [losses] if isinstance(losses, torch.Tensor) else losses or ()
    seen = [loss.detach().flatten()[:16].tolist() for loss in given]
    of_ranks = here.gather(seen if _reads_whole_data() else None)
    if here.world_size > 1 and of_ranks[0] and all(theirs == of_ranks[0] for theirs in of_ranks):
        raise DataError(
            f"all ranks train {network} on the same batch (loss {of_ranks[0][0]}): each reads its DataLoader whole, so "
            'ranks would only repeat one process. Use ddpshim.make_loader, or setup(batch="global")'
        )
    if here.is_main:
        say(
            f"{network} is trained on batches that are not the current batch of make_loader: if every rank reads the "
            f"whole data set, the global batch is {here.world_size} times as large, at the same learning rate. Use "
            "make_loader, unless ranks get different data on purpose. From now on each rank draws its own noise, which "
            "differs from one process (option noise)"
        )


def _reads_whole_data() -> bool:
    """Whether a pass over a map-style data set is under way that is no rank's share. Local."""
    from torch.utils.data import dataloader

    passes = live_objects(dataloader._BaseDataLoaderIter)
    samplers = (getattr(one._index_sampler, "sampler", None) for one in passes)
    return any(type(sampler) in (RandomSampler, SequentialSampler) for sampler in samplers)


@contextlib.contextmanager
def names_replaced(sharing: Sharing) -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    numpys = () if numpy is None else ((numpy.random, *kind) for kind in _NUMPYS)
    with contextlib.ExitStack() as stack:
        for owner, names, kind, more in (*_TORCHS, *numpys):
            for name in names:
                original = getattr(owner, name, None)
                if original is not None:
                    stack.enter_context(replaced(owner, name, _stand_in(sharing, original, kind, more)))
        yield


def _stand_in(sharing: Sharing, original: Callable[..., Any], kind: str, more: tuple[Any, ...]) -> Callable[..., Any]:
    """Return `original`, replaced by the function `kind` of `shared_draws` while a batch is trained on."""

    @functools.wraps(original)
    def draw(*arguments: Any, **options: Any) -> Any:
        if sharing.share is None:
            return original(*arguments, **options)
        from ddpshim.job import shared_draws

        return getattr(shared_draws, kind)(sharing, sharing.share, original, *more, *arguments, **options)

    return draw


def draws_alike() -> bool:
    """Return whether ranks draw what one process would, because their batches are shares of its batches. Local."""
    here = world()
    return here.options.noise != "per_rank" and (here.world_size == 1 or not current().has_own_batches)


def split_random_streams() -> None:
    """Give every rank its own random streams: noise, timesteps and dropout differ between ranks from now on.

    Local. Does nothing the second time, without a launcher, or if ranks draw what one process would (option noise). The
    streams derive from `setup`'s seed, else from torch's. Call it after all networks are built; `wrap_parallel` does.
    """
    here, job = world(), current()
    job.has_networks = True
    if job.is_split or not here.is_launched or draws_alike():
        return
    job.is_split = True
    if here.options.noise != "per_rank" and here.is_main:
        return  # the main rank keeps the streams of one process
    base = here.seed if here.seed is not None else torch.initial_seed()
    seed_own_streams(derive_seed(base, "rank", here.rank))


def use_own_batches() -> None:
    """Record that ranks train on batches that are not shares of one process's: each gets its own random streams. Local.

    It gets them now if a network is wrapped already, else when the first one is.
    """
    job = current()
    job.has_own_batches = True
    if job.has_networks:
        split_random_streams()
