"""Implements the functions that the patch sets of DROID's trainers call, beside those of `ddpshim.robomimic`.

RLDS data is read through octo, once for all ranks: each reads its share of the trajectories before it decodes. The
samples of all ranks are one batch, and train the networks as one process would. But they are not the samples of one
process: octo reads and shuffles in no fixed order, in one process too. So the run is the same experiment as one
process's in distribution, not in its numbers. (On HDF5 data it is in both.)

Without a launcher every function does the same as the line that it replaces. DROID's package is also called robomimic;
it, tensorflow, octo and dlimp are imported inside the functions only.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

from torch.utils.data import DataLoader, IterableDataset

from ddpshim.errors import DataError
from ddpshim.job.passes import Enterable, order_of
from ddpshim.job.world import World, world
from ddpshim.process.job import derive_seed
from ddpshim.process.replaced import replaced
from ddpshim.robomimic import calls
from ddpshim.rows.joined_loader import JoinedLoader


class Epochs(Enterable):
    """`loader` in epochs of `num_steps` steps; each continues the pass where the previous epoch ended.

    Upstream's trainer does the same by keeping its iterator. On HDF5 data a resumed training gets exactly the samples
    that were left. A stream is not entered midway: it begins anew. `len()` is `num_steps`; other attributes are the
    loader's.
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
        """The number of steps of the loader; None for a stream."""
        return len(self._loader) if isinstance(self._loader, Enterable) and self._loader.can_enter() else None

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def order_state(self) -> Optional[dict[str, Any]]:
        return order_of(self._loader) if isinstance(self._loader, Enterable) else None

    def enter(self, epoch: int, step: int, order: Optional[dict[str, Any]] = None, is_inside: bool = False) -> None:
        wanted, self._order = epoch * self._num_steps + step, order
        if wanted != self._next:
            self._next, self._batches = wanted, None

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            length, order, self._order = self.num_steps_of_a_pass, self._order, None
            if length is not None:
                number, first = divmod(self._next, length)
                if order is not None and number and not first:  # enter at a pass's end: torch's sampler may draw there
                    number, first = number - 1, length
                self._loader.enter(number, first, order, is_inside=first > 0)
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
    return calls.run_epoch(data_loader=data_loader_iter, **options), data_loader_iter


def make_dataset_from_rlds(name: str, data_dir: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return octo's dataset of this rank's share of the trajectories, and the statistics of all of them (collective).

    The share is an even part of the split, taken before anything is read or decoded. If no statistics are given, the
    main rank computes them, or finds octo's file of them, for all ranks. Each rank's own would differ, since octo
    reads in no fixed order, and the last digits of a sum depend on the order.

    Raises DataError if the split has fewer trajectories than there are ranks, or ranks have different data.
    """
    from octo.data import dataset as octo_data

    make = octo_data.make_dataset_from_rlds if not world().is_launched else _share_maker(octo_data)
    return make(name, data_dir, **options)  # type: ignore[no-any-return]


def make_interleaved_dataset(
    dataset_kwargs_list: Sequence[dict[str, Any]],
    sample_weights: Optional[Sequence[float]] = None,
    *,
    train: bool,
    **options: Any,
) -> Any:
    """Return octo's mixture of datasets, made of this rank's share of each dataset's trajectories (collective).

    Pass the numbers of one process: the shuffle buffer is divided over the ranks, threads and tf.data's buffer memory
    over the ranks of this node. `rlds_loader` makes the batches. Each rank draws from its shares with the given
    weights, and so do all ranks together. Random choices (mixture, shuffle, subsampling, augmentation) differ between
    ranks and between starts: `tf.random.set_seed` gets a new number each time.

    Raises DataError if a dataset has fewer trajectories than there are ranks, or octo is to make the batches.
    """
    from octo.data import dataset as octo_data

    here, share = world(), {"train": train, **options}
    if not here.is_launched:
        return octo_data.make_interleaved_dataset(dataset_kwargs_list, sample_weights, **share)
    import tensorflow as tf
    from dlimp import DLataset

    share["shuffle_buffer_size"] = _divided(options["shuffle_buffer_size"], here.world_size)
    if options.get("batch_size") is not None:
        raise DataError(
            f"make_interleaved_dataset(batch_size={options['batch_size']}): each rank would take a local batch "
            "for the global one. Leave it None, as DROID's train.py does, and give it to rlds_loader."
        )
    for name in ("traj_transform_threads", "traj_read_threads"):
        if options.get(name) is not None:
            # octo requires at least one for each dataset
            share[name] = max(len(dataset_kwargs_list), _divided(options[name], here.local_world_size))
    frames = dict(options.get("frame_transform_kwargs", {}))
    if frames.get("num_parallel_calls", tf.data.AUTOTUNE) != tf.data.AUTOTUNE:
        frames["num_parallel_calls"] = _divided(frames["num_parallel_calls"], here.local_world_size)
    share["frame_transform_kwargs"] = frames

    tf.random.set_seed(derive_seed(here.broadcast(secrets.randbits(63)), "tf.data", here.rank))
    # octo would drop a dataset that is empty on this rank, and this rank's mixture would differ.
    mix = staticmethod(functools.partial(DLataset.sample_from_datasets, stop_on_empty_dataset=True))
    make_share = replaced(octo_data, "make_dataset_from_rlds", _share_maker(octo_data))
    with make_share, replaced(DLataset, "sample_from_datasets", mix):
        made = octo_data.make_interleaved_dataset(dataset_kwargs_list, sample_weights, **share)
    budget = tf.data.Options()
    budget.autotune.ram_budget = _divided(made.options().autotune.ram_budget, here.local_world_size)
    dataset = made.with_options(budget)
    dataset.dataset_statistics, dataset.sample_weights = made.dataset_statistics, made.sample_weights
    return dataset


def rlds_loader(dataset: Any, batch_size: int, **options: Any) -> Any:
    """Return torch's DataLoader; launched, one whose batches are the rows of all ranks' shares, read once (collective).

    Iterating raises DataError if octo's filters left nothing of this rank's share of a dataset.
    """
    if not world().is_launched:
        return DataLoader(dataset, batch_size=batch_size, **options)
    return JoinedLoader(_Endless(dataset), batch_size, **options)


class _Endless(IterableDataset[Any]):
    """Iterates over `dataset`, and raises at its end: octo repeats its data forever, unless there is none."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        yield from self._dataset
        here = world()
        raise DataError(
            f"The mixture ended on rank {here.rank}: filters (success, language) left this rank no trajectory of "
            f"one dataset; ranks would train on different mixtures. Use fewer than {here.world_size} ranks, or leave "
            "out the dataset with few trajectories."
        )


def _share_maker(octo_data: Any) -> Callable[..., Any]:
    """Return octo's make_dataset_from_rlds, limited to this rank's share; calling it is collective."""
    from dlimp import DLataset

    make, read, here = octo_data.make_dataset_from_rlds, DLataset.from_rlds, world()

    def make_share(name: str, data_dir: str, **options: Any) -> Any:
        if options.get("dataset_statistics") is None:
            options["dataset_statistics"] = here.run_on_main(lambda: make(name, data_dir, **options)[1])
        with replaced(DLataset, "from_rlds", staticmethod(read_share)):
            return make(name, data_dir, **options)

    def read_share(builder: Any, split: Any, **reading: Any) -> Any:
        return read(builder, split=_share_of_split(builder, split, here), **reading)

    return make_share


def _divided(total: int, num_ranks: int) -> int:
    """Return one rank's part of a buffer or of threads that all ranks share, rounded up, so at least 1."""
    return max(1, -(-total // num_ranks))


def _share_of_split(builder: Any, split: Any, here: World) -> Any:
    """Return this rank's contiguous share of `split`, as a split of the same builder (collective)."""
    import tensorflow_datasets as tfds

    num_examples = builder.info.splits[split].num_examples
    facts = {"data": builder.info.full_name, "split": str(split), "number of examples": num_examples}
    if any(theirs != facts for theirs in here.gather(facts)):
        raise DataError(f"Ranks have different splits ({here.gather(facts)}). Give every rank the same data.")
    if num_examples < here.world_size:
        raise DataError(
            f"Split {split} of {builder.info.full_name} has {num_examples} examples for {here.world_size} ranks; "
            f"some ranks would have nothing to train on. Use at most {num_examples} ranks, or leave this dataset out."
        )
    return tfds.even_splits(split, n=here.world_size, drop_remainder=False)[here.rank]
