"""Exports the functions that robomimic's patch sets call, in place of a line of robomimic each; and is its adapter."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional

from ddpshim import lazy

if TYPE_CHECKING:
    from ddpshim.adapters import Fetcher

# Loaded on first use: a process that only needs the adapter must not import them.
_CALLS = ("failed", "finish", "get_exp_dir", "has_checkpoint", "load_data_for_training", "resume", "rollout_with_stats")
_HOMES = {**dict.fromkeys((*_CALLS, "run_epoch"), "calls"), "deal_episodes": "rollout"}

__all__ = sorted(_HOMES)

TORCHVISION = "the torchvision that belongs to your torch: https://pytorch.org/get-started/previous-versions"
if sys.version_info < (3, 12):  # this one works beside any torch; newer versions fail except with their own torch
    TORCHVISION = "pip install --no-deps torchvision==0.16.2"


def __getattr__(name: str) -> Any:
    return lazy.load(__name__, _HOMES, name, globals())


# The adapter (`ddpshim.adapters`)


def fetcher(dataset: Any) -> Optional[Fetcher]:
    """Return the fetcher for a SequenceDataset, a MetaDataset or a subclass; None for other datasets."""
    from ddpshim.robomimic import batches

    return batches.WindowFetcher(dataset) if batches.concerns(dataset) else None


def problems(module: str, arguments: Sequence[str]) -> Iterator[str]:
    """A config that does not exist, and torchvision, without which robomimic's networks cannot be imported."""
    if module != "robomimic.scripts.train":
        return
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config")
    config = None
    with contextlib.suppress(argparse.ArgumentError):  # --config without a value: the trainer prints its usage
        config = parser.parse_known_args(arguments)[0].config
    if config is not None and not os.path.exists(config):
        yield (
            f"--config {config} does not exist (in {os.getcwd()}): no rank could read it. Correct the path; `python "
            "-m ddpshim example` writes a config to try."
        )
    if importlib.util.find_spec("robomimic") and not importlib.util.find_spec("torchvision"):
        yield f"torchvision is not installed, which robomimic imports: no rank could start. Install it: {TORCHVISION}"
