"""Draws random numbers for the global batch, and takes a rank's rows of them: what `noise` puts in torch's place.

Each function takes `sharing`, whose share is this rank's, the `original` function of torch or numpy, and its arguments.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, Callable

import torch
from torch import nn

from ddpshim.errors import SyncError
from ddpshim.job.noise import BERNOULLI_
from ddpshim.job.shares import Share, Sharing
from ddpshim.process.job import current
from ddpshim.process.random_streams import shared_random_streams
from ddpshim.process.say import say
from ddpshim.process.seeds import derive_seed
from ddpshim.process.users_line import users_line

LARGE = 512  # a draw of at least so many numbers is reported if none of its dimensions is the batch


def factory(sharing: Sharing, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if sharing.share is None or "out" in options:
        return original(*arguments, **options)
    shape = _size_of(arguments, options)
    where = sharing.share.dimension(shape)
    if where is None:
        return _alone(sharing, shape, lambda: original(*arguments, **options))
    options.pop("size", None)
    return sharing.share.rows(original(sharing.share.whole(shape, where), **options), where).clone()


def randint(sharing: Sharing, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    place = next((i for i, given in enumerate(arguments) if not isinstance(given, (int, float))), None)
    if sharing.share is None or "out" in options or (place is None and "size" not in options):
        return original(*arguments, **options)
    shape = tuple(options["size"] if place is None else arguments[place])
    where = sharing.share.dimension(shape)
    if where is None:
        return _alone(sharing, shape, lambda: original(*arguments, **options))
    whole = sharing.share.whole(shape, where)
    if place is None:
        options["size"] = whole
    else:
        arguments = (*arguments[:place], whole, *arguments[place + 1 :])
    return sharing.share.rows(original(*arguments, **options), where).clone()


def normal(
    sharing: Sharing, original: Callable[..., Any], mean: Any, std: Any = 1.0, size: Any = None, **options: Any
) -> Any:
    if sharing.share is None or "out" in options:
        sized = {} if size is None else {"size": size}
        return original(mean, std, **sized, **options)
    if size is None:
        given = mean if isinstance(mean, torch.Tensor) else std
        of_both = [part.shape for part in (mean, std) if isinstance(part, torch.Tensor)]
        size = torch.broadcast_shapes(*of_both)
        options = {"dtype": given.dtype, "device": given.device, **options}
    where = sharing.share.dimension(tuple(size))
    if where is None:
        widened = torch.zeros(size, **{key: given for key, given in options.items() if key != "generator"}) + mean
        return _alone(sharing, tuple(size), lambda: original(widened, std))
    generator = {key: options.pop(key) for key in ("generator",) if key in options}
    unit = original(0.0, 1.0, sharing.share.whole(size, where), **generator, **options)
    with torch.no_grad():  # as torch computes it: times the deviation, then plus the mean
        return sharing.share.rows(unit, where).mul(std).add(mean)


def like(sharing: Sharing, original: Callable[..., Any], like: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    if sharing.share is None:
        return original(like, *arguments, **options)
    where = sharing.share.dimension(like.shape)
    if where is None:
        return _alone(sharing, like.shape, lambda: original(like, *arguments, **options))
    whole = original(_template(sharing.share, like, where), *arguments, **options)
    return sharing.share.rows(whole, where).clone()


def in_place(
    sharing: Sharing, original: Callable[..., Any], self: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor:
    if sharing.share is None or isinstance(self, nn.Parameter):
        return original(self, *arguments, **options)  # type: ignore[no-any-return]
    where = sharing.share.dimension(self.shape)
    if where is None:
        return _alone(sharing, self.shape, lambda: original(self, *arguments, **options))  # type: ignore[no-any-return]
    arguments = tuple(
        sharing.share.among_others(given.expand(self.shape), where) if isinstance(given, torch.Tensor) else given
        for given in arguments
    )
    whole = original(_template(sharing.share, self, where), *arguments, **options)
    with torch.no_grad():
        return self.copy_(sharing.share.rows(whole, where))


def dropout(
    sharing: Sharing,
    original: Callable[..., Any],
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    *inplace: Any,
    **more: Any,
) -> Any:
    if "train" in more:  # torch.dropout's name of the argument
        training = more.pop("train")
    if sharing.share is None or not training or not 0 < p < 1:
        return original(input, p, training, *inplace, **more)
    where = sharing.share.dimension(input.shape)
    if where is None:
        _name_alike(sharing, input.shape)
        return original(input, p, training, *inplace, **more)
    whole = _template(sharing.share, input, where)
    if input.device.type == "cpu":  # as torch computes it there, but scaling the rank's own rows only
        kept = sharing.share.rows(BERNOULLI_(whole, 1 - p), where) / (1 - p)
    else:
        kept = sharing.share.rows(original(whole, p, True), where)
    return input.mul_(kept) if any((*inplace, more.get("inplace"))) else input * kept


def of_the_whole(sharing: Sharing, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    at_hand = sharing.share
    tensors = [given for given in (*arguments, *options.values()) if isinstance(given, torch.Tensor)]
    if at_hand is None or not tensors or not _draws(original.__name__, arguments, options):
        return original(*arguments, **options)
    where = at_hand.dimension(tensors[0].shape)
    if where is None:
        _name_alike(sharing, tensors[0].shape)
        return original(*arguments, **options)

    num_dimensions = tensors[0].dim()

    def widen(given: Any) -> Any:
        is_one = isinstance(given, torch.Tensor) and given.dim() == num_dimensions
        has_it = is_one and at_hand.dimension(given.shape) == where
        return at_hand.among_others(given, where) if has_it else given

    whole = original(*map(widen, arguments), **{key: widen(given) for key, given in options.items()})
    return at_hand.rows(whole, where)


def recurrent(sharing: Sharing, original: Callable[..., Any], self: nn.RNNBase, input: Any, hidden: Any = None) -> Any:
    at_hand = sharing.share
    if at_hand is None or not (self.dropout and self.training and self.num_layers > 1):
        return original(self, input, hidden)
    place = 0 if self.batch_first else 1
    if not isinstance(input, torch.Tensor) or input.dim() != 3 or input.shape[place] not in at_hand.sizes:
        _name(sharing, "drops units between RNN layers, for packed or different rows", "equal on all ranks")
        return original(self, input, hidden)
    states = () if hidden is None else hidden if isinstance(hidden, tuple) else (hidden,)
    wide = tuple(at_hand.among_others(state, 1) for state in states)
    output, after = original(
        self, at_hand.among_others(input, place), wide if isinstance(hidden, tuple) else (*wide, None)[0]
    )
    rows = functools.partial(at_hand.rows, dimension=1)
    return at_hand.rows(output, place), tuple(map(rows, after)) if isinstance(after, tuple) else rows(after)


def attention(
    sharing: Sharing,
    original: Callable[..., Any],
    self: nn.MultiheadAttention,
    query: Any,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Call `original`, which draws nothing itself, and record shapes with the batch in dimension 1, of any length."""
    at_hand = sharing.share
    is_known = at_hand is not None and isinstance(query, torch.Tensor) and query.dim() == 3
    if at_hand is None or not is_known or self.batch_first or query.shape[1] not in at_hand.sizes:
        return original(self, query, *arguments, **options)
    sharing.sequence_first.add(tuple(query.shape[:2]))
    sharing.share = at_hand._replace(sequence_first=())  # inside, the batch is the first dimension
    try:
        return original(self, query, *arguments, **options)
    finally:
        sharing.share = at_hand


def by_value(sharing: Sharing, original: Callable[..., Any], called: str, *arguments: Any, **options: Any) -> Any:
    here = current().world
    if sharing.share is None or here is None or not _draws(called.split(".")[-1], arguments, options):
        return original(*arguments, **options)
    sample_shape = _sample_shape(arguments, options) if called.endswith("rsample") else ()
    where = sharing.share.dimension(sample_shape)
    if where is not None:  # one distribution for all samples: each sample's draw equals one process's
        return sharing.share.rows(original(arguments[0], sharing.share.whole(sample_shape, where)), where)
    _name(sharing, f"draws by {called}, as many numbers as its values need", "each rank's own")
    seed = int(torch.randint(2**62, (), device="cpu"))
    with shared_random_streams(derive_seed(seed, here.rank)):
        return original(*arguments, **options)


def permutation(sharing: Sharing, original: Callable[..., Any], n: int, *arguments: Any, **options: Any) -> Any:
    asks = str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0]
    if sharing.share is not None and n == sharing.share.num_rows and asks != "torchvision":  # ColorJitter
        _name(
            sharing,
            "permutes the batch: on several ranks only samples of the same rank are mixed",
            "equal on all ranks",
        )
    return original(n, *arguments, **options)


def sized(sharing: Sharing, original: Callable[..., Any], position: int, *arguments: Any, **options: Any) -> Any:
    size = options.get("size", arguments[position] if len(arguments) > position else None)
    if sharing.share is None or size is None:
        return original(*arguments, **options)
    shape = tuple(size) if isinstance(size, (tuple, list)) else (int(size),)
    where = sharing.share.dimension(shape)
    if where is None:
        _name_alike(sharing, shape)
        return original(*arguments, **options)
    options["size"] = tuple(sharing.share.whole(shape, where))
    return sharing.share.rows(original(*arguments[:position], **options), where)


def of_dimensions(sharing: Sharing, original: Callable[..., Any], *shape: int) -> Any:
    where = None if sharing.share is None or not shape else sharing.share.dimension(shape)
    if sharing.share is None or where is None:
        _name_alike(sharing, shape)
        return original(*shape)
    return sharing.share.rows(original(*sharing.share.whole(shape, where)), where)


def _size_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, ...]:
    """Return the size from the arguments of torch.rand."""
    if "size" in options:
        return tuple(options["size"])
    if len(arguments) == 1 and not isinstance(arguments[0], int):
        return tuple(arguments[0])
    return tuple(arguments)


def _sample_shape(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, ...]:
    given = options.get("sample_shape", arguments[1] if len(arguments) > 1 else ())
    return tuple(given)


def _draws(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether this call of a function of `_WHOLE` or `_BY_VALUE` draws at all."""
    if name == "scaled_dot_product_attention":
        return bool(options.get("dropout_p", arguments[4] if len(arguments) > 4 else 0.0))
    if "dropout" in name:
        default = name.startswith("dropout")  # the others' default is False
        return bool(options.get("training", arguments[2] if len(arguments) > 2 else default))
    if name == "rrelu":
        return bool(options.get("training", arguments[3] if len(arguments) > 3 else False))
    return True


def _template(at_hand: Share, like: torch.Tensor, where: int) -> torch.Tensor:
    """Return ones for the global batch in the memory layout of `like`: torch draws in the order of memory."""
    whole = at_hand.whole(like.shape, where)
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


def _alone(sharing: Sharing, shape: Sequence[int], draw: Callable[[], Any]) -> Any:
    """Return a draw without the batch in its shape: equal on all ranks if it is small, else this rank's own, and
    reported once.

    It always draws from the shared generators, so that they keep the state of one process's.
    """
    drawn = draw()
    if math.prod(shape) < LARGE:
        _name_alike(sharing, shape)
        return drawn
    assert sharing.share is not None
    sizes, num_rows = " x ".join(map(str, shape)), sharing.share.num_rows
    _name(sharing, f"draws {sizes} numbers, but no dimension is the batch ({num_rows})", "each rank's own")
    with shared_random_streams(derive_seed(sharing.share.rank, str(drawn.reshape(-1)[:4].tolist()))):
        return draw()


def _name_alike(sharing: Sharing, shape: Sequence[int]) -> None:
    """Report a draw that is equal on all ranks and may differ from one process's."""
    at_hand = sharing.share
    sizes = " x ".join(map(str, shape))
    if at_hand is not None and math.prod(shape) >= LARGE:
        what = f"draws for {sizes} numbers, but no dimension is the batch ({at_hand.num_rows})"
        _name(sharing, what, "equal on all ranks")
    else:
        _report_small_draw(sharing)


def _name(sharing: Sharing, what: str, whose: str) -> None:
    """Report once the line of code of a draw that one process would make differently."""
    line = users_line()
    if line not in sharing.named:
        sharing.named.add(line)
        if sharing.share is not None and sharing.share.rank == 0:
            say(f"{line} {what}; these draws are {whose}, and one process would draw differently (option noise)")


class _Counts:
    """The small draws on the first batch of a job, by line of code."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.num_rows = 0
        self.of_line: dict[str, int] = {}
        self.are_read = False


def _report_small_draw(sharing: Sharing) -> None:
    """Count a draw; on the second batch, report lines that drew as often as this rank had rows. Rank 0 only; local."""
    counts = current().part(_Counts)
    if counts.are_read or sharing.share is None or sharing.share.rank:
        return
    if counts.batch in (None, sharing.last):
        counts.batch, counts.num_rows = sharing.last, sharing.share.num_rows
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
