"""Emulate two nodes on this machine: two agents, as on two machines, each with its own ranks.

    python examples/two_nodes.py

On two real machines, start the same trainer on each of them (see also examples/launch/two_nodes.sh):

    python -m ddpshim run --nnodes 2 --node-rank 0 --master-addr HOST0 --nproc 2 examples/two_nodes.py
    python -m ddpshim run --nnodes 2 --node-rank 1 --master-addr HOST0 --nproc 2 examples/two_nodes.py

Expect: four ranks on two nodes, each with its part of every batch, and equal weights; both agents exit with code 0.
In any case they are ended after two minutes.
"""

import os
import socket
import subprocess
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim

NUM_NODES, RANKS_OF_NODE, DEADLINE_S = 2, 2, 120


def train():
    """Train on each rank, as on one node."""
    world = ddpshim.setup(seed=1)
    obs = torch.randn(400, 6)
    policy = ddpshim.wrap_parallel(nn.Linear(6, 1).to(world.device))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    loader = ddpshim.make_loader(TensorDataset(torch.arange(400), obs), batch_size=40, shuffle=True)
    seen = []
    for index, x in loader:
        loss = (policy(x.to(world.device)) - x.sum(1, keepdim=True).to(world.device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += index.tolist()
    weight = policy.weight.detach().double().abs().sum().item()
    facts = world.gather((world.node_rank, world.local_rank, os.getppid(), seen, weight))
    if world.is_main:
        print(f"{world.world_size} ranks, loss of rank 0 {loss.item():.6f}")
        print("rank  node  local rank  started by process  samples       |weights|")
        for rank, (node, local, agent, samples, weight) in enumerate(facts):
            print(f"{rank:4d}  {node:4d}  {local:10d}  {agent:18d}  {len(samples):7d}  {weight:.8f}")
        print(f"samples seen: {len({i for _, _, _, samples, _ in facts for i in samples})} of {len(obs)}")
    ddpshim.cleanup()


def emulate():
    """Start an agent for each node, wait for both, and end them after the deadline."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meet = ["--nnodes", str(NUM_NODES), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    launch = [sys.executable, "-m", "ddpshim", "run", *meet, "--nproc", str(RANKS_OF_NODE), "--no-logs", "--grace", "5"]
    agents = [subprocess.Popen([*launch, "--node-rank", str(node), __file__]) for node in range(NUM_NODES)]
    try:
        codes = [agent.wait(DEADLINE_S) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # has no effect on one that has ended
            agent.wait()
    print(f"exit codes of the agents: {codes}")
    return max(codes)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        sys.exit(emulate())
