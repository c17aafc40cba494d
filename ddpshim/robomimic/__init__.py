"""Lists what the patch sets of robomimic call, each in place of the line it replaces."""

from __future__ import annotations

from typing import Any

from ddpshim import lazy

# Loaded when first used: a process that asks what robomimic's adapter offers may have no use for a trainer's calls.
_HOMES = {
    "copyfile": "calls",
    "deal_episodes": "rollout",
    "device_or": "calls",
    "failed": "calls",
    "finish": "calls",
    "get_exp_dir": "calls",
    "has_checkpoint": "calls",
    "is_main": "calls",
    "load_data_for_training": "datasets",
    "loader": "datasets",
    "main_computes": "calls",
    "main_decides": "calls",
    "main_only": "calls",
    "mean_over_ranks": "calls",
    "plays_rollouts": "rollout",
    "prepare": "calls",
    "quiet": "calls",
    "resume": "calls",
    "rollout_with_stats": "calls",
    "run_epoch": "calls",
    "same_on_all_ranks": "calls",
    "save_model": "calls",
    "start": "calls",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    return lazy.load(__name__, _HOMES, name, globals())
