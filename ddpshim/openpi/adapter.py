"""Is openpi's adapter: answers what ddpshim asks of one (`ddpshim.trainers.interface.Adapter`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpshim.trainers.interface import StandIns


def stand_ins() -> StandIns:
    """For `scripts/train_pytorch.py` of an openpi that nobody edits."""
    from ddpshim.openpi.stand_ins import at_config

    return at_config
