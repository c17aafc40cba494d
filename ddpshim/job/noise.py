"""Records which rows of the current batch are this rank's, and gives it its rows of the random numbers of the batch.

`make_loader` deals out the batches of one process: rank r's n rows are those from row r * n on of the global batch.

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
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import nn
from torch.nn import functional

from ddpshim.job.world import world
from ddpshim.process.job import current, derive_seed
from ddpshim.process.random_streams import seed_own_streams
from ddpshim.process.replaced import replaced

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


class Share(NamedTuple):
    """A rank's rows of a batch."""

    rank: int
    world_size: int
    num_rows: int  # on this rank
    others: tuple[int, ...] = ()  # rows on this rank in the current batches of other loaders
    sequence_first: Collection[tuple[int, ...]] = ()  # the first two sizes of tensors with the batch in dimension 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows that a batch on this rank may have."""
        return (self.num_rows, *self.others)

    def own(self, num: int) -> Any:
        """Return the index of this rank's entries among `num` of the global batch."""
        each = num // self.world_size
        return slice(self.rank * each, (self.rank + 1) * each)

    def num_samples(self, num_rows: int) -> Optional[int]:
        """Return to how many samples `num_rows` rows belong, with one or several rows each; None if to no batch."""
        if num_rows in self.sizes:
            return num_rows
        return next((size for size in self.sizes if num_rows and num_rows % size == 0), None)

    def dimension(self, shape: Sequence[int]) -> Optional[int]:
        """Return the dimension of the batch in `shape`; None if no dimension is the batch."""
        if tuple(shape[:2]) in self.sequence_first and shape[1] in self.sizes:
            return 1
        if len(shape) and self.num_samples(shape[0]) is not None:
            return 0
        return next((number for number, size in enumerate(shape) if size in self.sizes), None)

    def whole(self, shape: Sequence[int], dimension: Optional[int]) -> list[int]:
        """Return `shape` for the global batch; unchanged if no dimension is the batch."""
        return [size * self.world_size if i == dimension else size for i, size in enumerate(shape)]

    def rows(self, drawn: Any, dimension: int) -> Any:
        """Return this rank's rows of `drawn`, a tensor or array for the global batch."""
        return drawn[(slice(None),) * dimension + (self.own(drawn.shape[dimension]),)]

    def among_others(self, own: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return `own` in its rows of the global batch, and ones elsewhere, which are valid in every distribution."""
        whole = own.new_ones(self.whole(own.shape, dimension))
        whole[(slice(None),) * dimension + (self.own(whole.shape[dimension]),)] = own
        return whole


class Position(NamedTuple):
    """The latest batch of a pass over a loader."""

    loader: int  # its number in the order in which loaders were made
    epoch: int
    step: int
    num_samples: Optional[int]  # of the whole pass, on all ranks


class Sharing:
    """The state of a job's random draws, of which each rank gets its rows.

    Attributes:
        share: this rank's rows of the current batch; None between batches.
        under_way: the rows of the latest batch of each pass that may still be trained on.
    """

    def __init__(self) -> None:
        self.share: Optional[Share] = None
        self.is_on = False
        self.sequence_first: set[tuple[int, ...]] = set()  # for `Share`
        self.named: set[str] = set()  # the lines of code that were reported
        self.last: tuple[Optional[Position], str] = None, ""  # of the current batch, also if its pass was deleted
        self.under_way: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def begin_batch(num_rows: int, of: Optional[object] = None) -> None:
    """Record that each rank now trains on `num_rows` samples of a global batch, which the pass `of` returned. Local."""
    job = current()
    assert job.world is not None
    sharing = job.part(Sharing)
    if of is not None:
        sharing.under_way[of] = num_rows
        sharing.last = getattr(of, "position", None), getattr(of, "called", "")
    others = tuple(sorted({*sharing.under_way.values()} - {num_rows}))
    sharing.share = Share(job.world.rank, job.world.world_size, num_rows, others, sharing.sequence_first)


def positions() -> list[tuple[Position, str]]:
    """Return (position, line that made the loader) of each pass that feeds the training. Local."""
    sharing = current().part(Sharing)
    places = {(getattr(of, "position", None), getattr(of, "called", "")) for of in sharing.under_way} | {sharing.last}
    return sorted((position, called) for position, called in places if position is not None)


def end_batch(of: Optional[object] = None) -> None:
    """Record that there is no current batch and the pass `of` is over: draws are now equal on all ranks. Local."""
    sharing = current().part(Sharing)
    sharing.share, sharing.last = None, (None, "")
    if of is not None:
        sharing.under_way.pop(of, None)


def at_hand() -> Optional[Share]:
    """Return this rank's share of the current batch; None between batches. Local."""
    return current().part(Sharing).share


def has_share() -> bool:
    """Return whether the current computation is for this rank's share of a batch. Local."""
    sharing = current().part(Sharing)
    return sharing.share is not None or (torch.is_grad_enabled() and not current().holds_whole_batches)


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
    if at_hand() is None and not current().holds_whole_batches and draws_alike():
        from ddpshim.job.shared_draws import begin_own_batches

        begin_own_batches(network, losses)


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
