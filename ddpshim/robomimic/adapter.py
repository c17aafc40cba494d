"""Is robomimic's adapter: answers what ddpshim asks of one (`ddpshim.trainers.interface.Adapter`)."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Optional

from ddpshim.errors import DdpShimError
from ddpshim.robomimic import known

if TYPE_CHECKING:
    from pathlib import Path

    from ddpshim.data.fetching import Fetcher
    from ddpshim.trainers.interface import StandIns


def fetcher(dataset: Any) -> Optional[Fetcher]:
    """For SequenceDataset, MetaDataset and what is derived from them."""
    from ddpshim.robomimic import batches

    return batches.Fetcher(dataset) if batches.concerns(dataset) else None


def draws_by_weight(sampler: Any) -> bool:
    """Whether `sampler` is robomimic 0.5's stand-in for torch's WeightedRandomSampler, for more categories."""
    kind = type(sampler)
    # Of a tree of its own, whose class may do something else, the names tell.
    return (kind.__module__, kind.__name__) == ("robomimic.utils.dataset", "CustomWeightedRandomSampler") and set(
        kind.__iter__.__code__.co_names
    ) == known.WEIGHTED_SAMPLER_NAMES


def trainer() -> list[tuple[str, str]]:
    """What runs robomimic's own training; other programs borrow its networks and files."""
    return [("robomimic.utils.train_utils", "run_epoch"), ("robomimic.scripts.train", "train")]


def stand_ins() -> StandIns:
    """For the functions of an installed robomimic that nobody edits."""
    from ddpshim.robomimic import stand_ins

    return stand_ins


def state_of_files() -> str:
    """Of the modules of this process, else of the installed package; \"not installed\" where there is none."""
    from ddpshim.trainers.import_hook import set_in_memory
    from ddpshim.trainers.patching.files import status

    in_memory = set_in_memory("robomimic")
    if in_memory is not None:
        return f"in memory: {in_memory}"
    if importlib.util.find_spec("robomimic") is None:
        return "robomimic is not installed"
    try:
        found = status("robomimic")
    except DdpShimError as error:
        return str(error)
    if found.state == "not applied":
        return f"files as released ({found.patch_set.name}); a launched training is patched in memory"
    return f"{found.state} ({found.patch_set.name}{', the nearest' if found.state == 'unknown' else ''})"


def logged(folder: Path) -> list[dict[str, Any]]:
    """From logs/log.txt."""
    from ddpshim.robomimic.logged import logged

    return logged(folder)


def new_release(tree: str) -> tuple[list[str], int]:
    """What a tree of another release has that is not known, for maintainers."""
    from ddpshim.robomimic.new_release import compared

    return compared(tree)
