"""Records the order of the parameters of real policies, and the order of their gradients in a backward pass.

    DDPSHIM_UPSTREAM=... python -m benchmarks.gradient_orders

Writes gradient_orders.json beside this file, from which `benchmarks.overlap` emulates these policies. They are
robomimic's, with the sizes of its own configs; the diffusion policy is from 0.5.0 (see patches/README.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("gradient_orders.json")
LOW_DIM = {"robot0_eef_pos": [3], "robot0_eef_quat": [4], "robot0_gripper_qpos": [2], "object": [10]}
IMAGE = {"agentview_image": [3, 84, 84]}
# By release: name, algorithm, keys of the config and their values, shapes of the observations.
POLICIES: dict[str, list[tuple[str, str, dict[str, Any], dict[str, list[int]]]]] = {
    "0.3.0": [
        (
            "transformer",
            "bc",
            {"algo.transformer.enabled": True, "algo.gmm.enabled": True, "train.seq_length": 10},
            LOW_DIM,
        ),
        (
            "image encoder",
            "bc",
            {
                "observation.modalities.obs.rgb": list(IMAGE),
                "observation.encoder.rgb.core_class": "VisualCore",
                "observation.encoder.rgb.core_kwargs.backbone_class": "ResNet18Conv",
                "observation.encoder.rgb.core_kwargs.backbone_kwargs.pretrained": False,
                "observation.encoder.rgb.core_kwargs.feature_dimension": 64,
                "observation.encoder.rgb.core_kwargs.pool_class": "SpatialSoftmax",
                "observation.encoder.rgb.core_kwargs.pool_kwargs.num_kp": 32,
            },
            {**LOW_DIM, **IMAGE},
        ),
    ],
    "0.5.0": [
        (
            "diffusion U-Net",
            "diffusion_policy",
            {
                "train.seq_length": 16,
                "train.frame_stack": 2,
                "algo.optim_params.policy.num_train_batches": 1,
                "algo.optim_params.policy.num_epochs": 1,
            },
            LOW_DIM,
        )
    ],
}


def record(name: str) -> dict[str, list[int]]:
    """Return the sizes of a policy's parameters in its order, and their numbers in the order of their gradients."""
    import robomimic.utils.obs_utils as ObsUtils
    import torch
    from robomimic.algo import algo_factory
    from robomimic.config import config_factory

    _, algo, settings, shapes = next(
        policy for policies in POLICIES.values() for policy in policies if policy[0] == name
    )
    config = config_factory(algo)
    with config.values_unlocked():
        config.observation.modalities.obs.low_dim = list(LOW_DIM)
        for path, value in settings.items():
            *sections, last = path.split(".")
            section = config
            for key in sections:
                section = section[key]
            section[last] = value
    ObsUtils.initialize_obs_utils_with_config(config)
    model = algo_factory(algo, config, obs_key_shapes=shapes, ac_dim=7, device=torch.device("cpu"))
    parameters = [p for p in model.nets["policy"].parameters() if p.requires_grad]
    arrival: list[int] = []
    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: arrival.append(number))
    length = config.train.seq_length
    obs = {key: torch.rand(2, length, *shape) for key, shape in shapes.items()}
    batch = model.process_batch_for_training({"obs": obs, "actions": torch.rand(2, length, 7) * 2 - 1})
    model.set_train()
    model.train_on_batch(batch, epoch=1)
    return {"sizes": [p.numel() for p in parameters], "arrival": arrival}


def main() -> None:
    from evidence.equivalence import source
    from tests.preloaded import environment

    found = {}
    for release, policies in POLICIES.items():
        for name, *_ in policies:
            code = f"import json; from benchmarks.gradient_orders import record; print(json.dumps(record({name!r})))"
            tree = source(release)
            if tree is None:
                raise SystemExit(f"robomimic {release} is neither installed nor under DDPSHIM_UPSTREAM")
            environ = environment(tree)
            ran = subprocess.run(
                [sys.executable, "-c", code], env=environ, check=True, stdout=subprocess.PIPE, text=True
            )
            found[name] = json.loads(ran.stdout.splitlines()[-1])
    FILE.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
