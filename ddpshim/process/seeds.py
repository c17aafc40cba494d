"""Derives seeds, and seeds the process's generators."""

import hashlib
import random
import sys
from typing import Union

import torch


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), random, and numpy if it is loaded. Local."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def derive_seed(seed: int, *scope: Union[int, str]) -> int:
    """Return a 63-bit seed derived from `seed` and a purpose, the same on every machine. Local.

    >>> derive_seed(1, "noise", 0) != derive_seed(1, "noise", 1)
    True
    """
    text = "/".join(str(part) for part in (seed, *scope)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
