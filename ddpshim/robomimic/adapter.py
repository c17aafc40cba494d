"""Implements the adapter for robomimic (`ddpshim.adapters`)."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional

from ddpshim.reading import read_bytes

if TYPE_CHECKING:
    from ddpshim.data.loader_builder import Fetcher

_ITS_NEWEST_PYTHON = (3, 11)
# Works beside any torch, with --no-deps; newer versions fail except with their own torch.
TORCHVISION = "torchvision==0.16.2" if sys.version_info[:2] <= _ITS_NEWEST_PYTHON else None
OTHER_TORCHVISION = "the torchvision that belongs to your torch: https://pytorch.org/get-started/previous-versions"


def fetcher(dataset: Any) -> Optional[Fetcher]:
    """Return the fetcher for a SequenceDataset, a MetaDataset or a subclass; None for other datasets."""
    from ddpshim.robomimic import batches

    return batches.WindowFetcher(dataset) if batches.concerns(dataset) else None


def problems(module: str, arguments: Sequence[str]) -> Iterator[str]:
    """A config that does not exist, and torchvision, without which robomimic's networks cannot be imported."""
    if module != "robomimic.scripts.train":
        return
    config = _config_of(arguments)
    if config is not None and not os.path.exists(config):
        yield (
            f"--config {config} does not exist (in {os.getcwd()}): no rank could read it. Correct the path; `python "
            "-m ddpshim example` writes a config to try."
        )
    if importlib.util.find_spec("robomimic") and not importlib.util.find_spec("torchvision"):
        needed = f"pip install --no-deps {TORCHVISION}" if TORCHVISION else OTHER_TORCHVISION
        yield f"torchvision is not installed, which robomimic imports: no rank could start. Install it: {needed}"


def batch_size(arguments: Sequence[str]) -> Optional[int]:
    """From the config file."""
    try:
        return int(json.loads(read_bytes(_config_of(arguments) or ""))["train"]["batch_size"])
    except (OSError, ValueError, TypeError, KeyError):  # no config, or one without it: the trainer's own default
        return None


def _config_of(arguments: Sequence[str]) -> Optional[str]:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        found: Optional[str] = parser.parse_known_args(arguments)[0].config
    except argparse.ArgumentError:  # --config without a value: the trainer prints its usage
        return None
    return found
