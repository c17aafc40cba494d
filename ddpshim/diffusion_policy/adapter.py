"""Is the adapter of diffusion_policy and DP3: answers what ddpshim asks of one (`ddpshim.trainers.interface.Adapter`).

Their workspaces are programs for one process like any other (docs/any_trainer.md); rollouts are what differs.
"""

from __future__ import annotations


def trainer() -> list[tuple[str, str]]:
    """None: whoever imports the package runs a workspace, which is distributed as it is."""
    return []


def rollouts() -> list[tuple[str, str]]:
    """The classes whose subclasses play rollouts, each with its module."""
    return [
        ("diffusion_policy.env_runner.base_image_runner", "BaseImageRunner"),
        ("diffusion_policy.env_runner.base_lowdim_runner", "BaseLowdimRunner"),
        ("diffusion_policy_3d.env_runner.base_runner", "BaseRunner"),
    ]
