"""Exports the functions that robomimic's patch sets call; each replaces a line of robomimic."""

from __future__ import annotations

from typing import Any

from ddpshim import lazy

# Loaded on first use: a process that only needs the adapter must not import the trainer's functions.
_CALLS = ("failed", "finish", "get_exp_dir", "has_checkpoint", "load_data_for_training", "resume", "rollout_with_stats")
_HOMES = {**dict.fromkeys((*_CALLS, "run_epoch"), "calls"), "deal_episodes": "rollout"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    return lazy.load(__name__, _HOMES, name, globals())
