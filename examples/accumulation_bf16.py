"""Gradient accumulation, in float32 and in bf16: what changes, and by how much.

    python examples/accumulation_bf16.py                              # one process
    python -m ddpshim run --nproc 2 examples/accumulation_bf16.py     # or torchrun; and --nproc 1

Expect: in float32 the gradients of a batch in 4 parts equal those of the whole batch up to rounding (1e-07 of the
largest), with --nproc 1, 2 and 4; bf16 changes them by about 1%, in parts or not. On several ranks they are sent once
in both cases (in one message, as the policy is small).
"""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import TensorDataset

import ddpshim

BATCH_SIZE = 64


def gradients(policy, forward, batch, num_parts):
    """Return the gradients of the mean loss of `batch`, as one vector, and the loss."""
    policy.zero_grad()
    total = 0.0
    for obs, action in ddpshim.accumulate(batch, policy, steps=num_parts):
        loss = (forward(obs) - action).square().mean() / num_parts
        loss.backward()  # the last part's call reduces the gradients
        total += loss.item()
    return torch.cat([p.grad.flatten() for p in policy.parameters()]), total


def main():
    world = ddpshim.setup(seed=1, options=ddpshim.Options.read(precision="bf16"))
    obs = torch.randn(512, 16)
    dataset = TensorDataset(obs, torch.stack([obs.sum(1).sin(), obs[:, 0] * obs[:, 1]], 1))
    sent = []

    def count_and_reduce(_, bucket):
        sent.append(bucket.index())
        return allreduce_hook(None, bucket)

    policy = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)).to(world.device)
    policy = ddpshim.wrap_parallel(policy, comm_hook=count_and_reduce)
    loader = ddpshim.make_loader(dataset, batch_size=BATCH_SIZE, shuffle=False)
    batch = [x.to(world.device) for x in next(iter(loader))]
    in_float32, in_bf16 = policy.module, policy  # the wrapped policy uses the precision of the options
    gradients(policy, in_float32, batch, 1)  # after the first pass DDP rebuilds its buckets

    exact, _ = gradients(policy, in_float32, batch, 1)
    if world.is_main:
        print("gradients of one global batch   loss      norm      largest difference  messages")
    for name, num_parts, forward in (
        ("float32, the whole batch", 1, in_float32),
        ("float32, in 4 parts", 4, in_float32),
        ("bf16, the whole batch", 1, in_bf16),
        ("bf16, in 4 parts", 4, in_bf16),
    ):
        sent.clear()
        found, loss = gradients(policy, forward, batch, num_parts)
        loss = world.mean(loss)
        if world.is_main:
            difference = (found - exact).abs().max() / exact.abs().max()
            print(f"{name:30s}  {loss:.6f}  {found.norm():.6f}  {difference:.1e}             {len(sent):8d}")
    ddpshim.cleanup()


if __name__ == "__main__":
    main()
