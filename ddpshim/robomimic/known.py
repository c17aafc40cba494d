"""Lists digests of the code of each robomimic release that ddpshim relies on. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import tokenize
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional


class Release(NamedTuple):
    """A release, or several with the same code."""

    names: str
    sample_digest: str  # of SAMPLE_METHODS
    normalizes_obs: bool  # whether SequenceDataset normalises observations; else the trainer does


RELEASES = (
    Release("0.3.0", "2942cf02e3487831", True),
    Release("0.4.0", "4b587a7f1faca9e8", False),
    Release("0.5.0, and master at d309eae", "81c972ac3cd0bf40", False),
    Release("the robocasa branch at 271a76c", "c3144dba8022da45", False),
)
# The methods of SequenceDataset that make a sample. In the releases above none draws random numbers.
SAMPLE_METHODS = (
    "__len__",
    "__getitem__",
    "get_item",
    "get_sequence_from_demo",
    "get_obs_sequence_from_demo",
    "get_dataset_sequence_from_demo",
    "get_dataset_for_ep",
    "load_dataset_in_memory",
)
BACKPROP_DIGEST = "33cd2d929a81b581"  # of TorchUtils.backprop_for_loss in 0.3.0, 0.4.0, 0.5.0, and master at d309eae
META_METHODS = ("__len__", "__getitem__")
META_DIGEST = "0dc43ea475119bc0"  # of META_METHODS in all releases that have a MetaDataset, except DROID


def release_of(sample_digest: str) -> Optional[Release]:
    """Return the release whose SequenceDataset has this digest; None if it is unknown. Local."""
    return next((release for release in RELEASES if release.sample_digest == sample_digest), None)


@functools.lru_cache(maxsize=32)
def digest(*functions: Any) -> str:
    """Return the digest of the source of plain functions, without blank lines; empty if a source is missing. Local."""
    blocks = []
    for function in functions:
        # inspect.getsource would first search all loaded modules for the function's: a tenth of a second.
        linecache.checkcache(function.__code__.co_filename)
        of_file = linecache.getlines(function.__code__.co_filename, function.__globals__)
        blocks.append(of_file[function.__code__.co_firstlineno - 1 :])
    return _digest(blocks)


def _digest(starts: Sequence[list[str]]) -> str:
    """Return the digest of functions; `starts` has, for each, the lines of its file from the function's first on."""
    lines = []
    for start in starts:
        try:
            block = inspect.getblock(start)
        except (SyntaxError, tokenize.TokenError):
            return ""
        if not block:
            return ""
        lines += [line.rstrip() for line in block if line.strip()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
