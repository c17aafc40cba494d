"""Implements the adapter for openpi (`ddpshim.trainers.interface.Adapter`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpshim.trainers.interface import StandIns


def stand_ins() -> StandIns:
    """Return the stand-ins for `scripts/train_pytorch.py` of an unedited openpi."""
    from ddpshim.openpi.stand_ins import at_config

    return at_config
