"""Implements the adapter for diffusion_policy and DP3 (`ddpshim.adapters`).

Their workspaces are distributed like any other one-process program (docs/run.md), except for their rollouts.
"""

from __future__ import annotations


def rollouts() -> list[tuple[str, str]]:
    """Return the classes whose subclasses play rollouts, each with its module."""
    return [
        ("diffusion_policy.env_runner.base_image_runner", "BaseImageRunner"),
        ("diffusion_policy.env_runner.base_lowdim_runner", "BaseLowdimRunner"),
        ("diffusion_policy_3d.env_runner.base_runner", "BaseRunner"),
    ]
