"""Implements the adapter for robomimic (`ddpshim.trainers.interface.Adapter`)."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Optional

from ddpshim.errors import DdpShimError
from ddpshim.robomimic import known

if TYPE_CHECKING:
    from ddpshim.data.fetching import Fetcher
    from ddpshim.trainers.interface import StandIns


def fetcher(dataset: Any) -> Optional[Fetcher]:
    """Return the fetcher for a SequenceDataset, a MetaDataset or a subclass; None for other datasets."""
    from ddpshim.robomimic import batches

    return batches.Fetcher(dataset) if batches.concerns(dataset) else None


def draws_by_weight(sampler: Any) -> bool:
    """Whether `sampler` is robomimic 0.5's version of torch's WeightedRandomSampler, which allows more categories."""
    kind = type(sampler)
    # A fork's class of the same name may draw in another way; the names that its code uses would differ.
    return (kind.__module__, kind.__name__) == ("robomimic.utils.dataset", "CustomWeightedRandomSampler") and set(
        kind.__iter__.__code__.co_names
    ) == known.WEIGHTED_SAMPLER_NAMES


def trainer() -> list[tuple[str, str]]:
    """Return the functions that run robomimic's own training; other programs only use its networks and files."""
    return [("robomimic.utils.train_utils", "run_epoch"), ("robomimic.scripts.train", "train")]


def stand_ins() -> StandIns:
    """Return the stand-ins for functions of an installed, unedited robomimic."""
    from ddpshim.robomimic import stand_ins

    return stand_ins


def state_of_files() -> str:
    """Return the state of the installed package's files, or that robomimic is not installed."""
    from ddpshim.trainers.patching.files import status

    if importlib.util.find_spec("robomimic") is None:
        return "robomimic is not installed"
    try:
        found = status("robomimic")
    except DdpShimError as error:
        return str(error)
    return f"{found.state} ({found.patch_set.name}{', the nearest' if found.state == 'unknown' else ''})"


def new_release(tree: str) -> tuple[list[str], int]:
    """Compare a tree of another release with the known ones, for maintainers; see `new_release.compared`."""
    from ddpshim.robomimic.new_release import compared

    return compared(tree)
