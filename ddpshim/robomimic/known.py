"""Lists digests of the code of each robomimic release that ddpshim relies on. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import inspect
import tokenize
from typing import Any

# By the digest of SAMPLE_METHODS: whether SequenceDataset normalises observations; else the trainer does.
RELEASES = {
    "2942cf02e3487831": True,  # 0.3.0
    "4b587a7f1faca9e8": False,  # 0.4.0
    "81c972ac3cd0bf40": False,  # 0.5.0, and master at d309eae
    "c3144dba8022da45": False,  # the robocasa branch at 271a76c
}
# The methods of SequenceDataset that make a sample. In the releases above none draws random numbers.
SAMPLE_METHODS = (
    *("__len__", "__getitem__", "get_item", "get_sequence_from_demo", "get_obs_sequence_from_demo"),
    *("get_dataset_sequence_from_demo", "get_dataset_for_ep", "load_dataset_in_memory"),
)
BACKPROP_DIGEST = "33cd2d929a81b581"  # of TorchUtils.backprop_for_loss in 0.3.0, 0.4.0, 0.5.0, and master at d309eae
META_METHODS = ("__len__", "__getitem__")
META_DIGEST = "0dc43ea475119bc0"  # of META_METHODS in all releases that have a MetaDataset, except DROID


@functools.lru_cache(maxsize=32)
def digest(*functions: Any) -> str:
    """Return the digest of the source of plain functions, without blank lines; empty if a source is missing. Local."""
    try:
        lines = [line.rstrip() for function in functions for line in inspect.getsourcelines(function.__code__)[0]]
    except (OSError, SyntaxError, tokenize.TokenError):
        return ""
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:16]
