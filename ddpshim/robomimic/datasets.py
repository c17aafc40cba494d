"""Loads robomimic's datasets with one cache for the ranks of a node.

robomimic and h5py are imported inside the functions only.
"""

from __future__ import annotations

import functools
from typing import Any

from ddpshim.job.world import world
from ddpshim.process.say import say_once
from ddpshim.robomimic import batches, node_cache, node_memory


def load_data_for_training(config: Any, obs_keys: Any, **options: Any) -> tuple[Any, Any]:
    """Return upstream's datasets for training and validation; launched, with one cache per node (then collective).

    Raises DataError if the node has no room for the cache.
    """
    import robomimic.utils.dataset as Datasets
    import robomimic.utils.train_utils as TrainUtils

    here, keys = world(), list(obs_keys)
    load = functools.partial(TrainUtils.load_data_for_training, config, **options)
    wanted = config.train.hdf5_cache_mode is not None and here.options.node_memory
    if not (wanted and here.world_size > 1 and node_memory.is_supported()):
        return load(obs_keys=obs_keys)  # type: ignore[no-any-return]
    with node_cache.without_cache(Datasets.SequenceDataset) as waiting:
        datasets = load(obs_keys=obs_keys)
    problem = node_cache.share(waiting, here)
    if problem is None:
        for dataset in filter(None, datasets):  # before the loader, which would allocate its own arrays
            batches.attach(dataset)
        return datasets  # type: ignore[no-any-return]
    if here.is_main:
        say_once(f"{problem}: each rank loads its own copy, as upstream does")
    return load(obs_keys=keys)  # type: ignore[no-any-return]
