"""Trains on a Ray cluster: ray job submit --working-dir . -- python on_ray.py train.py --config bc.json

Ray's TorchTrainer chooses the machines and GPUs. Each of its workers starts one rank, as a process of its own. Edit the
numbers below; the program saves into a folder that outlives the machines. A restart looks like a start here, so
DDPSHIM_RESUME=always.
"""

import os
import socket
import subprocess
import sys

import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

NUM_RANKS = 8
USE_GPU = True
PROGRAM = sys.argv[1:]  # a script, or -m and a module; then its arguments
FOLDER = os.getcwd()  # with the program, on every machine; or with --working-dir, Ray's copy of it


def rank() -> None:
    # Ray's own group holds MASTER_PORT: the ranks meet at another one, which is free on the machine of rank 0.
    with socket.socket() as free:
        free.bind(("", 0))
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    environ = {**os.environ, "MASTER_PORT": str(port[0]), "PYTHONHASHSEED": "0", "DDPSHIM_RESUME": "always"}
    folder = FOLDER if os.path.isdir(FOLDER) else os.environ.get("RAY_RUNTIME_ENV_CREATE_WORKING_DIR", ".")
    command = [sys.executable, "-u", "-m", "ddpshim.launch.rank", *PROGRAM]
    code = subprocess.run(command, env=environ, cwd=folder, check=False).returncode
    if code:
        raise RuntimeError(f"rank {os.environ['RANK']} ended with exit code {code}: its output is above")


TorchTrainer(
    rank,
    torch_config=TorchConfig(backend="gloo"),  # of Ray's group alone; the ranks choose their own
    scaling_config=ScalingConfig(num_workers=NUM_RANKS, use_gpu=USE_GPU),
    run_config=RunConfig(name="train", failure_config=FailureConfig(max_failures=3)),
).fit()
