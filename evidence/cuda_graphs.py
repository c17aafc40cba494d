"""Compares training steps on a GPU with the same in CUDA graphs: `python -m evidence.cuda_graphs [NETWORKS]`.

In one process, with the networks of main_thread_train.py in real widths: forward and backward pass in the graphs of
`torch.cuda.make_graphed_callables`; loader, loss, optimizer and EMA as they are. Prints, for each network, whether the
weights of NUM_STEPS steps are equal to the last bit and, in alternation, a step's time and CPU time of its threads.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from evidence.main_thread_train import BATCH_SIZE, DEVICE, NETWORKS, PARTS, Trainer, _make, backward_s

NUM_STEPS, NUM_ROUNDS, WARM_UP = 200, 3, 20


def trainer_of(name: str, has_graphs: bool) -> Trainer:
    torch.manual_seed(0)
    net, tensors = _make(name)
    trainer = Trainer("plain", name, net, tensors)
    if has_graphs:
        batch = [part[:BATCH_SIZE].to(DEVICE) for part in tensors]
        actions = batch[-1]
        timestep = torch.randint(0, 100, (len(actions),), device=DEVICE)
        inputs: dict[str, Any] = {"unet": (actions, timestep, batch[0]), "act": batch, "bc_rnn_gmm": batch}
        state = {key: value.clone() for key, value in net.state_dict().items()}
        trainer.net = torch.cuda.make_graphed_callables(net, tuple(inputs.get(name, (batch[0],))))
        net.load_state_dict(state)  # warm-up moves the statistics of BatchNorm
        trainer.optimizer.zero_grad()
    return trainer


def weights_after(name: str, has_graphs: bool) -> str:
    trainer = trainer_of(name, has_graphs)
    torch.manual_seed(1)
    for _ in range(NUM_STEPS):
        trainer.step()
    whole = b"".join(value.cpu().numpy().tobytes() for value in trainer.net.state_dict().values())
    return hashlib.sha256(whole).hexdigest()[:16]


def times(trainer: Trainer) -> tuple[float, float]:
    """Return a step's time and its main thread's CPU time, in ms."""
    for _ in range(WARM_UP):
        trainer.step()
    trainer.spent.clear()
    torch.cuda.synchronize()
    began, of_backward = time.perf_counter(), backward_s()
    for _ in range(NUM_STEPS):
        trainer.step()
    torch.cuda.synchronize()
    wall = time.perf_counter() - began
    computed = sum(trainer.spent[part] for part in PARTS) + backward_s() - of_backward
    return 1000 * wall / NUM_STEPS, 1000 * computed / NUM_STEPS


def compare(name: str) -> str:
    hashes = [weights_after(name, has_graphs) for has_graphs in (False, False, True)]
    trainers = [trainer_of(name, has_graphs) for has_graphs in (False, True)]
    rounds = [[times(trainer) for trainer in trainers] for _ in range(NUM_ROUNDS)]
    plain, graphs = ([statistics.median(part) for part in zip(*arm)] for arm in zip(*rounds))
    equal = [
        f"{what} {'equal' if one == hashes[0] else 'differ'}" for what, one in zip(("again", "graphs"), hashes[1:])
    ]
    return (
        f"{name}: {', '.join(equal)}; a step {plain[0]:.2f} ms, in graphs {graphs[0]:.2f}; threads that compute "
        f"{plain[1]:.2f}, {graphs[1]:.2f}"
    )


def main(names: str = ",".join(NETWORKS)) -> None:
    first, *others = names.split(",")
    if others:  # what fails in a capture leaves the process unusable
        for name in (first, *others):
            subprocess.run([sys.executable, "-m", "evidence.cuda_graphs", name], check=False)
        return
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        print(compare(first), flush=True)
    except RuntimeError as problem:
        print(f"{first}: not captured: {str(problem).partition(chr(10))[0]}; {problem.__context__}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
