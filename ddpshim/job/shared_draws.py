"""Draws random numbers for the global batch, and takes a rank's rows of them: what `noise` puts in torch's place.

Each function takes `sharing`, its `share` (this rank's rows of the current batch), the `original` function of torch or
numpy, and its arguments.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.utils.data import RandomSampler, SequentialSampler

from ddpshim.errors import DataError, SyncError
from ddpshim.job.noise import BERNOULLI_, Share, Sharing, use_own_batches
from ddpshim.job.world import world
from ddpshim.process.job import current, derive_seed
from ddpshim.process.observed import live_objects
from ddpshim.process.random_streams import shared_random_streams
from ddpshim.process.say import say
from ddpshim.process.users_line import users_line

LARGE = 512  # a draw of at least so many numbers is reported if none of its dimensions is the batch
Original = Callable[..., Any]


def of_sizes(sharing: Sharing, share: Share, original: Original, *arguments: Any, **options: Any) -> Any:
    """Draw as torch.rand(2, 3), torch.rand((2, 3)) and numpy.random.rand(2, 3) do."""
    size = options.get("size", arguments)
    shape = tuple(size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size)
    if not shape or "out" in options:
        return original(*arguments, **options)
    options.pop("size", None)
    return _rows_of(sharing, share, shape, lambda where: original(*share.whole(shape, where), **options))


def sized(
    sharing: Sharing, share: Share, original: Original, position: Optional[int], *arguments: Any, **options: Any
) -> Any:
    """Draw as a function with an argument `size` at this position; None: it is the first that is no number."""
    if position is None:
        position = next((i for i, given in enumerate(arguments) if not isinstance(given, (int, float))), sys.maxsize)
    size = arguments[position] if position < len(arguments) else options.get("size")
    if size is None or "out" in options:
        return original(*arguments, **options)
    shape = tuple(size) if isinstance(size, (tuple, list)) else (int(size),)

    def draw(where: Optional[int]) -> Any:
        taken = tuple(share.whole(shape, where))
        if position < len(arguments):
            return original(*arguments[:position], taken, *arguments[position + 1 :], **options)
        return original(*arguments, **{**options, "size": taken})

    return _rows_of(sharing, share, shape, draw)


def normal(
    sharing: Sharing, share: Share, original: Original, mean: Any, std: Any = 1.0, *size: Any, **options: Any
) -> Any:
    """Draw as torch.normal does, for tensors, or for numbers and a size."""
    of_both = [given for given in (mean, std) if isinstance(given, torch.Tensor)]
    if not of_both or "out" in options:
        return sized(sharing, share, original, 2, mean, std, *size, **options)
    shape = torch.broadcast_shapes(*(given.shape for given in of_both))
    wide = (given.expand(shape) if isinstance(given, torch.Tensor) else given for given in (mean, std))
    return of_the_whole(sharing, share, original, *wide, **options)


def like(
    sharing: Sharing, share: Share, original: Original, like: torch.Tensor, *arguments: Any, **options: Any
) -> Any:
    def draw(where: Optional[int]) -> Any:
        return original(like if where is None else _template(share, like, where), *arguments, **options)

    return _rows_of(sharing, share, like.shape, draw)


def in_place(
    sharing: Sharing, share: Share, original: Original, self: torch.Tensor, *arguments: Any, **options: Any
) -> Any:
    where = share.dimension(self.shape)
    if isinstance(self, nn.Parameter):
        return original(self, *arguments, **options)
    if where is None:
        return _alone(sharing, share, self.shape, lambda: original(self, *arguments, **options))
    arguments = tuple(
        share.among_others(given.expand(self.shape), where) if isinstance(given, torch.Tensor) else given
        for given in arguments
    )
    whole = original(_template(share, self, where), *arguments, **options)
    with torch.no_grad():
        return self.copy_(share.rows(whole, where))


def dropout(
    sharing: Sharing,
    share: Share,
    original: Original,
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    *inplace: Any,
    **more: Any,
) -> Any:
    training = more.pop("train", training)  # torch.dropout's name of the argument
    where = share.dimension(input.shape)
    if where is None or not training or not 0 < p < 1:
        if training and 0 < p < 1:
            _name_alike(sharing, share, input.shape)
        return original(input, p, training, *inplace, **more)
    whole = _template(share, input, where)
    if input.device.type == "cpu":  # as torch computes it there, but scaling the rank's own rows only
        kept = share.rows(BERNOULLI_(whole, 1 - p), where) / (1 - p)
    else:
        kept = share.rows(original(whole, p, True), where)
    return input.mul_(kept) if any((*inplace, more.get("inplace"))) else input * kept


def of_the_whole(sharing: Sharing, share: Share, original: Original, *arguments: Any, **options: Any) -> Any:
    tensors = [given for given in (*arguments, *options.values()) if isinstance(given, torch.Tensor)]
    if not tensors or not _draws(original.__name__, arguments, options):
        return original(*arguments, **options)
    where, num_dimensions = share.dimension(tensors[0].shape), tensors[0].dim()
    if where is None:
        _name_alike(sharing, share, tensors[0].shape)
        return original(*arguments, **options)

    def widen(given: Any) -> Any:
        is_one = isinstance(given, torch.Tensor) and given.dim() == num_dimensions
        has_it = is_one and share.dimension(given.shape) == where
        return share.among_others(given, where) if has_it else given

    whole = original(*map(widen, arguments), **{key: widen(given) for key, given in options.items()})
    return share.rows(whole, where)


def recurrent(
    sharing: Sharing, share: Share, original: Original, self: nn.RNNBase, input: Any, hidden: Any = None
) -> Any:
    if not (self.dropout and self.training and self.num_layers > 1):
        return original(self, input, hidden)
    place = 0 if self.batch_first else 1
    if not isinstance(input, torch.Tensor) or input.dim() != 3 or input.shape[place] not in share.sizes:
        _name(sharing, share, "drops units between RNN layers, for packed or different rows", "equal on all ranks")
        return original(self, input, hidden)
    states = () if hidden is None else hidden if isinstance(hidden, tuple) else (hidden,)
    wide = tuple(share.among_others(state, 1) for state in states)
    output, after = original(
        self, share.among_others(input, place), wide if isinstance(hidden, tuple) else (*wide, None)[0]
    )
    rows = functools.partial(share.rows, dimension=1)
    return share.rows(output, place), tuple(map(rows, after)) if isinstance(after, tuple) else rows(after)


def attention(
    sharing: Sharing,
    share: Share,
    original: Original,
    self: nn.MultiheadAttention,
    query: Any,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Call `original`, which draws nothing itself, and record shapes with the batch in dimension 1, of any length."""
    is_known = isinstance(query, torch.Tensor) and query.dim() == 3 and not self.batch_first
    if not is_known or query.shape[1] not in share.sizes:
        return original(self, query, *arguments, **options)
    sharing.sequence_first.add(tuple(query.shape[:2]))
    sharing.share = share._replace(sequence_first=())  # inside, the batch is the first dimension
    try:
        return original(self, query, *arguments, **options)
    finally:
        sharing.share = share


def by_value(sharing: Sharing, share: Share, original: Original, called: str, *arguments: Any, **options: Any) -> Any:
    name = called.split(".")[-1]
    if not _draws(name, arguments, options):
        return original(*arguments, **options)
    shape = options.get("sample_shape", arguments[1] if len(arguments) > 1 else ()) if name == "rsample" else ()
    where = share.dimension(shape)
    if where is not None:  # one distribution for all samples: each sample's draw equals one process's
        return share.rows(original(arguments[0], share.whole(shape, where)), where)
    _name(sharing, share, f"draws by {called}, as many numbers as its values need", "each rank's own")
    seed = int(torch.randint(2**62, (), device="cpu"))
    with shared_random_streams(derive_seed(seed, share.rank)):
        return original(*arguments, **options)


def permutation(sharing: Sharing, share: Share, original: Original, n: int, *arguments: Any, **options: Any) -> Any:
    asks = str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0]
    if n == share.num_rows and asks != "torchvision":  # ColorJitter
        mixed = "permutes the batch: on several ranks only samples of the same rank are mixed"
        _name(sharing, share, mixed, "equal on all ranks")
    return original(n, *arguments, **options)


def _rows_of(sharing: Sharing, share: Share, shape: Sequence[int], draw: Callable[[Optional[int]], Any]) -> Any:
    """Return this rank's rows of a draw, whose argument is the dimension of the batch; None draws `shape` alone."""
    where = share.dimension(shape)
    if where is None:
        return _alone(sharing, share, shape, lambda: draw(None))
    drawn = share.rows(draw(where), where)
    return drawn.clone() if isinstance(drawn, torch.Tensor) else drawn


def _draws(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether this call of a function of `of_the_whole` or `by_value` draws at all."""
    if name == "scaled_dot_product_attention":
        return bool(options.get("dropout_p", arguments[4] if len(arguments) > 4 else 0.0))
    if "dropout" in name:
        default = name.startswith("dropout")  # the others' default is False
        return bool(options.get("training", arguments[2] if len(arguments) > 2 else default))
    if name == "rrelu":
        return bool(options.get("training", arguments[3] if len(arguments) > 3 else False))
    return True


def _template(share: Share, like: torch.Tensor, where: int) -> torch.Tensor:
    """Return ones for the global batch in the memory layout of `like`: torch draws in the order of memory."""
    whole = share.whole(like.shape, where)
    strides = like.stride()
    others = [stride for stride, size in zip(strides[1:], like.shape[1:]) if size > 1]
    if where == 0 and like.shape[0] == 1 < whole[0] and strides[0] in others:  # (1, L, E) or (L, 1, E) transposed
        raise SyncError(
            f"{users_line()} draws for one row on a rank, whose strides {strides} do not show the memory layout of the "
            'whole batch: its draws would differ from one process. Use setup(batch="global"), or fewer ranks.'
        )
    order = sorted(range(like.dim()), key=lambda i: (-strides[i], i))
    sizes = [1 if strides[i] == 0 else whole[i] for i in order]  # an expanded dimension has no memory
    made = torch.ones(sizes, dtype=like.dtype, device=like.device)
    return made.permute(sorted(range(like.dim()), key=order.__getitem__)).expand(whole)


def _alone(sharing: Sharing, share: Share, shape: Sequence[int], draw: Callable[[], Any]) -> Any:
    """Return a draw without the batch in its shape: equal on all ranks if it is small or numpy's, else this rank's own,
    and reported once.

    It always draws from the shared generators, so that they keep the state of one process's.
    """
    drawn = draw()
    if math.prod(shape) < LARGE or not isinstance(drawn, torch.Tensor):
        _name_alike(sharing, share, shape)
        return drawn
    sizes = " x ".join(map(str, shape))
    _name(sharing, share, f"draws {sizes} numbers, but no dimension is the batch ({share.num_rows})", "each rank's own")
    with shared_random_streams(derive_seed(share.rank, str(drawn.reshape(-1)[:4].tolist()))):
        return draw()


def _name_alike(sharing: Sharing, share: Share, shape: Sequence[int]) -> None:
    """Report a draw that is equal on all ranks and may differ from one process's."""
    if math.prod(shape) < LARGE:
        _report_small_draw(sharing, share)
        return
    sizes = " x ".join(map(str, shape))
    what = f"draws for {sizes} numbers, but no dimension is the batch ({share.num_rows})"
    _name(sharing, share, what, "equal on all ranks")


def _name(sharing: Sharing, share: Share, what: str, whose: str) -> None:
    """Report once, on rank 0, the line of code of a draw that one process would make differently."""
    line = users_line()
    if line not in sharing.named and share.rank == 0:
        say(f"{line} {what}; these draws are {whose}, and one process would draw differently (option noise)")
    sharing.named.add(line)


class _SmallDraws:
    """The small draws on the first batch of a job, by line of code."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.num_rows = 0
        self.of_line: dict[str, int] = {}
        self.are_read = False


def _report_small_draw(sharing: Sharing, share: Share) -> None:
    """Count a draw; on the second batch, report lines that drew as often as this rank had rows. Rank 0 only; local."""
    counts = current().part(_SmallDraws)
    if counts.are_read or share.rank:
        return
    if counts.batch in (None, sharing.last):
        counts.batch, counts.num_rows = sharing.last, share.num_rows
        line = users_line()
        counts.of_line[line] = counts.of_line.get(line, 0) + 1
        return
    counts.are_read = True
    for line, num in counts.of_line.items():
        if num == counts.num_rows > 1:
            say(
                f"{line} drew {num} times on the {num} rows of this rank: if it is in a loop over samples, all ranks "
                "draw the same, and one process would draw differently (option noise)"
            )


def begin_own_batches(network: str, losses: Any) -> None:
    """Give each rank its own noise, because their batches are no shares; see `noise.begin_training` (collective)."""
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
