"""Counts how often policies lift the cube in robosuite: `python -m evidence.episodes FILE`, of to_success.py.

FILE describes the checkpoints and the episodes; the answer is written beside it. robomimic is the published release,
and ddpshim cannot be imported.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch


def play(path: str, num_episodes: int, horizon: int, seed: int) -> dict[str, Any]:
    """Play a checkpoint's policy; return successes and lengths of the episodes, and a digest of their start states.

    The environment is new and its generator seeded, so the k-th episode has the same start for every checkpoint.
    """
    import robomimic.utils.file_utils as FileUtils
    import robomimic.utils.train_utils as TrainUtils

    policy, held = FileUtils.policy_from_checkpoint(ckpt_path=path, device=torch.device("cpu"))
    held["env_metadata"]["env_kwargs"]["seed"] = seed
    env, _ = FileUtils.env_from_checkpoint(ckpt_dict=held)
    starts = hashlib.sha256()
    reset = env.reset

    def recorded() -> Any:
        observation = reset()
        starts.update(env.get_state()["states"].tobytes())
        return observation

    env.reset = recorded
    episodes = []
    for episode in range(num_episodes):
        torch.manual_seed(episode)  # a policy with a GMM draws its actions
        episodes.append(TrainUtils.run_rollout(policy=policy, env=env, horizon=horizon, terminate_on_success=True))
    return {
        "successes": sum(int(episode["Success_Rate"]) for episode in episodes),
        "horizons": [int(episode["Horizon"]) for episode in episodes],
        "starts": starts.hexdigest(),
    }


def main() -> None:
    sys.modules["ddpshim"] = None  # type: ignore[assignment]
    torch.set_num_threads(1)
    torch.load = functools.partial(torch.load, weights_only=False)
    file = Path(sys.argv[1])
    task = json.loads(file.read_text())
    found = {path: play(path, **task["episodes"]) for path in task["checkpoints"]}
    file.with_suffix(".found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
