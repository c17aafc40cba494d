"""Implements the functions that the patch sets of DROID's trainers call; each replaces a line of the trainer.

Without a launcher every function here does exactly what that line did. DROID's package is also called robomimic;
it is imported inside the functions only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Optional, Union

import torch
from torch import nn
from torch.utils.data import IterableDataset

import ddpshim.robomimic.calls as adapter
from ddpshim.data.numbered import Enterable, order_of
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.job.world import world_of_shares
from ddpshim.process.devices import bind_device
from ddpshim.process.launch_env import read_launch_env


def cuda() -> Union[str, torch.device]:
    """Return the device that "cuda" means for this rank, even before `start`: its own GPU, or the CPU. Local.

    From here on a bare "cuda" and `.cuda()` mean the same GPU. Without a launcher it is the current GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    env = read_launch_env(os.environ)
    return bind_device(env.rank, env.local_rank) if env.is_launched else "cuda"


class _Held(nn.Module):
    """Holds a network as DataParallel does, on one device: the same keys, the same `.module`, the same calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def data_parallel(module: nn.Module, **options: Any) -> nn.Module:
    """Return torch's DataParallel with upstream's arguments; launched, a module with its `.module` and keys.

    Local: `ddpshim.robomimic.prepare` reduces the gradients. Published checkpoints have these keys.
    """
    return _Held(module) if world_of_shares().is_launched else nn.DataParallel(module, **options)


def tokenize(tokenizer: Any, texts: list[str], **options: Any) -> Any:
    """Return `tokenizer(texts, padding=True)`, padded to the longest text of the whole batch (collective).

    Upstream sums the language model's outputs over all tokens, including padding, so the embedding of a text depends
    on the longest text in its batch.
    """
    here = world_of_shares()
    if here.world_size > 1:
        own = tokenizer(texts, **{**options, "padding": False, "return_tensors": None})["input_ids"]
        everyones = here.begin_gather([max(map(len, own))])(here.options.timeout_s)
        options.update(padding="max_length", max_length=max(longest for [longest] in everyones))
    return tokenizer(texts, **options)


def load_checkpoint(path: str) -> Any:
    """Return the checkpoint at `path`, as upstream reads it; launched, in CPU memory. Local.

    Its tensors are saved for cuda:0, where each rank would keep a copy during the whole training.
    """
    from robomimic.utils.file_utils import maybe_dict_from_checkpoint

    if world_of_shares().is_launched:
        return torch.load(os.path.expanduser(path), map_location="cpu")
    return maybe_dict_from_checkpoint(ckpt_path=path)


class Epochs(Enterable):
    """`loader` in epochs of `num_steps` steps; each continues the pass where the previous epoch ended.

    Upstream's trainer does the same by keeping its iterator. A stream continues, too, but a restarted training begins
    it anew. `len()` is `num_steps`; other attributes are the loader's.
    """

    def __init__(self, loader: Any, num_steps: int) -> None:
        self._loader, self._num_steps = loader, num_steps
        self._next = 0  # the next step, counted from the first epoch
        self._batches: Any = None
        self._order: Optional[dict[str, Any]] = None  # the resumed run's, until its pass begins

    def __len__(self) -> int:
        return self._num_steps

    @property
    def num_steps_of_a_pass(self) -> Optional[int]:
        """The number of steps of the loader; None for a stream, which cannot be entered midway."""
        is_stream = isinstance(self._loader.dataset, IterableDataset)
        return len(self._loader) if isinstance(self._loader, ShardedLoader) and not is_stream else None

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        wanted = epoch * self._num_steps + start_step
        if wanted != self._next:
            self._next, self._batches = wanted, None

    def order_state(self) -> Optional[dict[str, Any]]:
        return order_of(self._loader) if isinstance(self._loader, Enterable) else None

    def restore_order(self, state: Optional[dict[str, Any]], is_inside: bool) -> None:
        self._order = state

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            length, order, self._order = self.num_steps_of_a_pass, self._order, None
            if length is not None:
                number, first = divmod(self._next, length)
                if order is not None and number and not first:  # enter at a pass's end: torch's sampler may draw there
                    number, first = number - 1, length
                self._loader.set_epoch(number, first)
                self._loader.restore_order(order, is_inside=first > 0)
            self._batches = iter(self._loader)
        while True:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._batches = iter(self._loader)
                batch = next(self._batches)
            self._next += 1
            yield batch


def run_epoch(*, data_loader: Any, data_loader_iter: Epochs, **options: Any) -> tuple[dict[str, float], Epochs]:
    """Call `ddpshim.robomimic.run_epoch`; return its log, and the iterator to pass to the next call."""
    return adapter.run_epoch(data_loader=data_loader_iter, **options), data_loader_iter
