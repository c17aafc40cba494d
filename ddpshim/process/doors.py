"""The two meanings of a batch, one class each: `setup(batch=...)` chooses, `current().door` is that of this job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

from ddpshim.errors import OptionsError
from ddpshim.options import Options


@dataclass(frozen=True)
class LocalBatches:
    """`setup()`: each rank holds its share of a batch, as with torch's DistributedDataParallel."""

    batch = "local"  # the argument of `setup`
    computes_alike = False  # all ranks draw and compute what one process would, also what no wrapper has reduced
    wrapper: Optional[Callable[..., Any]] = None  # reduces a network's gradients; None: DistributedDataParallel does
    loader: Optional[Callable[..., Any]] = None  # makes that of `make_loader`; None: one of this rank's shares
    joined: Optional[Callable[..., Any]] = None  # makes that of data of which each rank reads a part of its own

    def check(self, options: Options) -> None:
        """Raise OptionsError for options that cannot do here what they say. Local."""
        if options.exact is not None:
            raise OptionsError(
                f"exact={options.exact} with shares of batches: a mean over a share is rounded by the share's size, so "
                'bits would depend on the number of ranks. Call ddpshim.setup(batch="global"), or start the program '
                "for one process, unedited, by `python -m ddpshim run`."
            )


@dataclass(frozen=True)
class GlobalBatches:
    """`setup(batch="global")` and `run`: every rank runs the program of one process, which holds whole batches."""

    batch = "global"
    computes_alike = True
    wrapper: Callable[..., Any]
    loader: Callable[..., Any]
    joined: Callable[..., Any]

    def check(self, options: Options) -> None:
        """Raise OptionsError for options that cannot do here what they say. Local."""
        changed = options.changed()
        if (name := next((name for name in ("per_rank_batch", "lr_rule") if name in changed), None)) is not None:
            raise OptionsError(
                f"{name}={getattr(options, name)}: the program holds whole batches, as one process does, so it would "
                "do nothing. Leave the option out; batches of a size per rank are for ddpshim.setup(), make_loader and "
                "wrap_parallel (`python -m ddpshim docs MIGRATION`)."
            )


Door = Union[LocalBatches, GlobalBatches]
