"""Loads robomimic's datasets on all ranks, with statistics that one rank computed.

robomimic and h5py are imported inside the functions only.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable

from torch.utils.data import DataLoader, default_collate

from ddpshim.data import node_memory
from ddpshim.data.loader import make_loader
from ddpshim.data.sharded_loader import ShardedLoader
from ddpshim.errors import DataError
from ddpshim.job.world import world_of_shares
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say_once
from ddpshim.robomimic import batches, node_cache


def load_data_for_training(config: Any, obs_keys: Any, **options: Any) -> tuple[Any, Any]:
    """Return upstream's datasets for training and validation; launched, with one cache per node (then collective).

    Statistics for normalising observations and actions need a pass over the file: one rank computes them for all.

    Raises DataError if the node has no room for the cache.
    """
    import robomimic.utils.dataset as Datasets
    import robomimic.utils.train_utils as TrainUtils

    here = world_of_shares()
    load = functools.partial(TrainUtils.load_data_for_training, config, **options)
    if not here.is_launched:
        return load(obs_keys=obs_keys)  # type: ignore[no-any-return]
    kinds = [getattr(Datasets, kind) for kind in ("SequenceDataset", "MetaDataset") if hasattr(Datasets, kind)]
    names = ("normalize_obs", "get_action_stats")
    computed = {(kind, name): vars(kind)[name] for kind in kinds for name in names if name in vars(kind)}
    asking: list[Any] = []  # on the main rank, the dataset whose statistics are being computed

    def asked(dataset: Any, compute: Callable[[Any], Any]) -> Any:
        asking.append(dataset)
        try:
            return compute(dataset)
        finally:
            asking.pop()

    def on_main(dataset: Any, compute: Callable[[Any], Any]) -> Any:
        # Inside `compute` calls are local: a dataset of datasets calls each of its parts, thousands in DROID's.
        return compute(dataset) if asking else here.run_on_main(asked, dataset, compute)

    with contextlib.ExitStack() as undo:
        for (kind, name), compute in computed.items():
            undo.enter_context(replaced(kind, name, functools.partialmethod(on_main, compute)))
        datasets = _load_once_a_node(load, obs_keys, Datasets.SequenceDataset, config)
        for dataset in datasets:
            if hasattr(dataset, "get_action_normalization_stats"):
                dataset.get_action_normalization_stats()  # upstream would compute them when they are first used
    return datasets


def _load_once_a_node(load: Callable[..., Any], obs_keys: Any, kind: Any, config: Any) -> tuple[Any, Any]:
    """Return the datasets of `load`, with one cache per node, or upstream's own if they might differ (collective)."""
    here, keys = world_of_shares(), list(obs_keys)
    if not _is_shared(config):
        return load(obs_keys=obs_keys)  # type: ignore[no-any-return]
    with node_cache.without_cache(kind) as waiting:
        datasets = load(obs_keys=obs_keys)
    problem = node_cache.share(waiting, here)
    if problem is None:
        for dataset in filter(None, datasets):  # before the loader, which would allocate its own arrays
            batches.attach(dataset)
        return datasets  # type: ignore[no-any-return]
    if here.is_main:
        say_once(f"{problem}: each rank loads its own copy, as upstream does")
    return load(obs_keys=keys)  # type: ignore[no-any-return]


def _is_shared(config: Any) -> bool:
    """Whether ranks of a node share one cache: launched, with a cache, and neither disabled nor unsupported. Local."""
    here = world_of_shares()
    wanted = config.train.hdf5_cache_mode is not None and here.options.node_memory
    return wanted and here.is_launched and node_memory.is_supported()


def loader(**options: Any) -> DataLoader[Any]:
    """Return torch's DataLoader with upstream's arguments; launched, `make_loader` with the same (then collective).

    Launched, workers persist over epochs if the dataset's code is known to draw no random numbers (a persistent worker
    continues its random stream, a new one starts another), and batches for a GPU are pinned.

    Raises DataError if the batch does not split over the ranks, or the dataset has no whole batch. In the latter case
    upstream, in one process, fails with an empty StopIteration, or silently skips validation.
    """
    dataset, batch_size, stays = options["dataset"], options["batch_size"], options.get("persistent_workers", False)
    here = world_of_shares()
    if here.is_launched and options.get("drop_last") and len(dataset) < batch_size:
        num_ranks = here.world_size
        largest = len(dataset) // num_ranks * num_ranks
        lower = f"lower train.batch_size to {largest}, " if largest else ""
        raise DataError(
            f"{_source(dataset)}: {len(dataset)} samples, fewer than a batch of {batch_size} (train.batch_size, of "
            f"all {num_ranks} ranks together, for training and validation). robomimic drops incomplete batches, so an "
            f"epoch would have no step. Name a filter key with more demonstrations, {lower}or, if this is the "
            "validation set, set experiment.validate to false."
        )
    if here.is_launched:
        is_plain = options.get("worker_init_fn") is None and options.get("collate_fn") in (None, default_collate)
        can_stay = bool(options.get("num_workers")) and is_plain and batches.is_known(dataset)
        options["persistent_workers"] = options.get("persistent_workers") or can_stay
        options["pin_memory"] = options.get("pin_memory") or here.device.type == "cuda"
    made = make_loader(**options)
    if isinstance(made, ShardedLoader):
        made.restarts_workers = not stays
    return made


def _source(dataset: Any) -> str:
    """Return the source of the samples of `dataset`, in the config's terms."""
    parts = getattr(dataset, "datasets", [dataset])
    keys = [part.filter_by_attribute for part in parts]
    of = ["all demonstrations" if key is None else f"filter key {key!r}" for key in keys]
    more = [f"{len(parts) - 3} more"] if len(parts) > 3 else []
    return " + ".join([*(f"{which} of {part.hdf5_path}" for which, part in zip(of, parts[:3])), *more])
