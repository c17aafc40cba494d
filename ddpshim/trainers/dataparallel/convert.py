"""Runs an unedited script for nn.DataParallel and DataLoader as one rank (`run --convert dataparallel`).

Before the program is imported two of torch's names get other classes. The network in an `nn.DataParallel` is given to
`wrap_parallel`; a pass over a `DataLoader` is that of `make_loader` where it trains, and whole on every rank where it
evaluates, since what a script adds up there it takes for the whole. The rest is in docs/converting.md.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, TypeVar

import torch
from torch import nn
from torch.nn import parallel as torch_parallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import data as torch_data

from ddpshim.data.loader import make_loader
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.errors import DataError, OptionsError, SyncError
from ddpshim.job import noise, shares, unshared
from ddpshim.job.group import cleanup, draws_alike, on_cleanup, setup, world
from ddpshim.job.random_streams import derive_seed
from ddpshim.job.replaced import replaced
from ddpshim.job.say import say_once
from ddpshim.job.world import World
from ddpshim.model import guard
from ddpshim.model.parallel import wrap_parallel
from ddpshim.trainers.dataparallel.one_writer import OneWriter

T_co = TypeVar("T_co", covariant=True)

KINDS = ("dataparallel",)
_END = object()
_PASSED_ON = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)
# Nodes between a loss and what it was summed from.
_ELEMENTWISE = {"AddBackward0", "SubBackward0", "NegBackward0", "MulBackward0", "DivBackward0", "ToCopyBackward0"}


@dataclass
class _State:
    """What the converted names of one program share."""

    networks: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # in the program's DataParallels
    training: weakref.WeakSet[DataLoader[Any]] = field(default_factory=weakref.WeakSet)  # their pass has not ended
    checked: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)
    source: Optional[DataLoader[Any]] = None  # gave the last batch
    is_split: bool = False  # that batch
    is_reading: bool = False  # a loader is asked for a batch just now
    num_split: int = 0  # loaders that were split


_state: _State


@contextlib.contextmanager
def converted(kind: str) -> Iterator[None]:
    """In it, a program that is imported finds the converted names; joins the job and leaves it (collective).

    Raises OptionsError for a `kind` that there is not.
    """
    global _state
    if kind not in KINDS:
        raise OptionsError(
            f"--convert {kind}: there is no such conversion; the program would train one model on each rank. "
            f"Use {' or '.join(KINDS)}."
        )
    started = time.time()
    _see_one_gpu(int(os.environ.get("LOCAL_RANK", 0)))
    # A script without a seed is another run each time, but the same on all ranks: weights, splits of the data.
    seed = setup().broadcast(secrets.randbits(62))
    here = setup(seed=seed)
    if not draws_alike():
        raise OptionsError(
            f"--convert {kind} with order={here.options.order}, noise={here.options.noise}: a script draws its "
            "splits of the data and its evaluations on each rank, and they would differ. Leave both options out."
        )
    noise.share(trains_whole_batches=True)
    _state = _State()
    undo = contextlib.ExitStack()
    for module in (nn, torch_parallel, sys.modules["torch.nn.parallel.data_parallel"]):
        undo.enter_context(replaced(module, "DataParallel", DataParallel))
    for module in (torch_data, torch_data.dataloader):
        undo.enter_context(replaced(module, "DataLoader", DataLoader))
    if here.world_size > 1:
        undo.enter_context(OneWriter(here, started, lambda: _state.is_reading).installed())
        unshared.leave_to_others()
        on_cleanup(register_optimizer_step_pre_hook(_check_step).remove)
        _watch_losses()
        if here.device.type == "cuda":
            _show_gpus(here.local_world_size)
    try:
        yield
        here.barrier()  # peers may still ask for what the main rank has saved, and rank 0 may be who answers
    except SystemExit as error:
        if not error.code:
            here.barrier()
        raise
    finally:
        undo.close()
        cleanup()


class DataParallel(torch_parallel.DataParallel[Any]):
    """torch's, on this rank's device alone; the gradients of `module` are reduced over the ranks (collective).

    Keys, attributes and forward are torch's own. `device_ids`, `output_device` and `dim` say how GPUs divide a batch;
    here loaders have divided it.
    """

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        _refuse_robomimic("nn.DataParallel")
        device = world().device
        super().__init__(module, [device.index] if device.type == "cuda" else None, dim=dim)
        wrap_parallel(module)
        _state.networks.add(module)


# So that a model which was saved whole is one of torch's where it is loaded.
DataParallel.__module__, DataParallel.__qualname__ = torch_parallel.DataParallel.__module__, "DataParallel"


class DataLoader(torch_data.DataLoader[T_co]):
    """torch's, in all that it shows; its passes are split over the ranks where they train in an order that is drawn.

    A pass trains if it begins with gradients enabled and a network of the program in training mode.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_robomimic("DataLoader")
        super().__init__(*args, **kwargs)
        self._place = _place()
        self._split: Optional[ShardedLoader] = None

    def __iter__(self) -> Any:
        trains = torch.is_grad_enabled() and any(net.training for net in _state.networks)
        is_split = trains and _is_drawn(self)
        if is_split and self._split is None:
            self._split = _split(self)
        batches = self._split.__iter__ if is_split and self._split is not None else super().__iter__
        return batches() if world().world_size == 1 else _pass(self, batches, is_split, trains)


def _pass(loader: DataLoader[Any], begin: Callable[[], Iterator[Any]], is_split: bool, trains: bool) -> Iterator[Any]:
    """The batches of one pass over `loader`; collective at its end where it trains.

    What is drawn for a batch that is split is each rank's rows of what one process would draw. All else is drawn alike
    on all ranks: whole passes, also where they shuffle or augment, splits of the data, networks that are built.
    """
    batches: Any = None
    with contextlib.nullcontext() if is_split else shares.without_batch():
        while True:
            _state.is_reading = True
            try:
                batches = begin() if batches is None else batches
                batch = next(batches, _END)
            finally:
                _state.is_reading = False
            if batch is _END:
                _state.training.discard(loader)
                break
            if trains:
                _state.training.add(loader)
            if trains or not _state.training:  # else it is a look at other data between a batch and its step
                _state.source, _state.is_split = loader, is_split
            yield batch
    if trains:
        guard.check_equal_steps(f"a pass over the DataLoader of {loader._place}")


def _is_drawn(loader: DataLoader[Any]) -> bool:
    """Whether the order of `loader` is anything but 0, 1, 2, ..."""
    if isinstance(loader.dataset, torch_data.IterableDataset):
        return False
    batches = loader.batch_sampler
    makes_batches = loader.batch_size is not None or batches is None or type(batches) is torch_data.BatchSampler
    sampler = getattr(batches, "sampler", loader.sampler) if makes_batches else batches
    return type(sampler) is not torch_data.SequentialSampler


def _split(loader: DataLoader[Any]) -> ShardedLoader:
    """`loader`, split over the ranks (collective)."""
    here = world()
    _check_same_indices(loader, here)
    batching: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_size is None and loader.batch_sampler is not None:
        batching = {"batch_sampler": loader.batch_sampler}
    elif _is_plain_shuffle(loader):
        batching["shuffle"] = True
    else:
        batching["sampler"] = loader.sampler
    seed = torch.initial_seed() if loader.generator is None else loader.generator.initial_seed()
    _state.num_split += 1  # two datasets of one size are not to be met in one order
    made: Any = make_loader(
        loader.dataset,
        **batching,
        **{name: getattr(loader, name) for name in _PASSED_ON if hasattr(loader, name)},
        seed=derive_seed(seed, "loader", _state.num_split),
    )
    if here.world_size > 1:
        _say(
            f"{loader._place}: training passes over this DataLoader are split, each rank sees 1/{here.world_size} of "
            "the samples; so are sums that the program takes over such a pass"
        )
    return made  # type: ignore[no-any-return]


def _is_plain_shuffle(loader: Any) -> bool:
    sampler = loader.sampler
    if type(sampler) is not torch_data.RandomSampler or sampler.data_source is not loader.dataset:
        return False
    return not sampler.replacement and sampler._num_samples is None


def _check_same_indices(loader: DataLoader[Any], here: World) -> None:
    """Raise DataError where ranks hold different parts of the data (collective)."""
    inner, mine = loader.dataset, []
    while isinstance(inner, torch_data.Subset):
        mine.append(hash(tuple(int(index) for index in inner.indices)))
        inner = inner.dataset
    everyones = here.gather(mine)
    odd = next((rank for rank, theirs in enumerate(everyones) if theirs != everyones[0]), None)
    if odd is not None:
        raise DataError(
            f"{loader._place}: the Subsets of ranks 0 and {odd} have different indices; a sample would be for training "
            "on one rank and for validation on another. Draw the split from torch's, numpy's or Python's global "
            "generator, or with a seed of its own (np.random.default_rng(0))."
        )


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before a step that only this rank would make; say, once, where it has nothing to gain from its peers."""
    step = f"{type(optimizer).__name__}.step()"
    if not _state.networks:
        raise SyncError(
            f"{step}, and the program has made no nn.DataParallel; every rank would train a model of its own. Make one "
            "in any case, not only `if torch.cuda.device_count() > 1`: on one GPU and on the CPU it changes nothing."
        )
    if optimizer not in _state.checked:
        _state.checked.add(optimizer)
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            if not guard.is_owned(p):
                raise SyncError(
                    f"{step}: a parameter of shape {tuple(p.shape)} is in no nn.DataParallel; its gradient is this "
                    "rank's alone, and ranks would train different models. Put the whole network that is trained into "
                    "nn.DataParallel."
                )
    if _state.source is None:
        raise SyncError(
            f"{step}, and no DataLoader has given a batch; every rank would compute whole batches, and where they are "
            "drawn at random others than its peers. Let a DataLoader with shuffle=True or a sampler give them."
        )
    if not _state.is_split:
        _say(
            f"{_state.source._place}: a step was made on a batch of this DataLoader, which every rank computes whole "
            "(it is sequential or iterable, or its pass began in eval mode): the same result as that of one process, "
            "and no faster. With shuffle=True, or a sampler, it is split"
        )


def _watch_losses() -> None:
    """Have `loss.backward()` look for sums over samples: ranks average their gradients."""
    backward: Any = torch.Tensor.backward

    def checked(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if _state.is_split:
            _check_loss(self)
        backward(self, *args, **kwargs)

    torch.Tensor.backward = checked  # type: ignore[method-assign]


def _check_loss(loss: torch.Tensor) -> None:
    found = sums(loss.grad_fn)
    for name, is_loss, is_divided in found:
        if is_loss and not is_divided:
            raise SyncError(
                f'the loss is a sum over the samples of a batch ({name}, reduction="sum"), of which each rank has its '
                f"share; gradients are averaged over the ranks and would be 1/{world().world_size} of those of the "
                "unconverted program. Divide it by the number of samples that it was summed over (len of the batch)."
            )
        if is_loss or not is_divided:
            _say(
                f"the loss contains a sum ({name}); if it is over samples, and not divided by the number that this "
                "rank has of them (len of the batch, not a constant), gradients are too small by the number of ranks"
            )


def sums(node: Any) -> set[tuple[str, bool, bool]]:
    """The sums in a loss with this `grad_fn`: (name, whether it is a loss function's own, whether divided). Local."""
    found: set[tuple[str, bool, bool]] = set()
    waiting, seen = [(node, False)], set()
    while waiting:
        node, is_divided = waiting.pop()
        if node is None or (node, is_divided) in seen:
            continue
        seen.add((node, is_divided))
        name = node.name()
        if name in _ELEMENTWISE:
            waiting += [(inner, is_divided or name == "DivBackward0") for inner, _ in node.next_functions]
        elif getattr(node, "_saved_reduction", None) == 2:  # as at::Reduction has it
            found.add((name, True, is_divided))
        elif name == "SumBackward0":
            found.add((name, False, is_divided))
    return found


def _see_one_gpu(local_rank: int) -> None:
    """Leave this process one GPU: what a script calls "cuda:0" is then this rank's. Before CUDA starts. Local."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
    elif visible.strip():
        gpus = visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank % len(gpus)].strip()


def _show_gpus(num_gpus: int) -> None:
    """Tell the program, but not torch, that there are `num_gpus`: many wrap their network only if there are several."""
    count = torch.cuda.device_count

    def device_count() -> int:
        asks = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        return count() if asks in ("torch", "ddpshim") else num_gpus

    torch.cuda.device_count = device_count


def _refuse_robomimic(name: str) -> None:
    if "robomimic.utils.train_utils" in sys.modules:  # else its networks are parts of somebody else's trainer
        raise OptionsError(
            f"{name} under --convert dataparallel, in a program that has imported robomimic's trainer; metrics, "
            "checkpoints and rollouts would be taken for those of one process. Leave --convert out: ddpshim has its "
            "own way with robomimic (README.md)."
        )


def _place() -> str:
    """Where the program made what is being made: file and line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _say(text: str) -> None:
    """Print `text` once, on the main rank."""
    if world().is_main:
        say_once(text)
