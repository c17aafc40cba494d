"""Implements the adapter for LeRobot (`ddpshim.trainers.interface.Adapter`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpshim.trainers.interface import StandIns


def stand_ins() -> StandIns:
    """Return the stand-ins for `lerobot_train` of an installed, unedited LeRobot."""
    from ddpshim.lerobot.stand_ins import at_config

    return at_config
