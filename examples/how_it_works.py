"""Trains an MLP on any number of ranks with the numbers of one process, in plain torch: what ddpshim does, in one file.

    python examples/how_it_works.py
    python -m torch.distributed.run --standalone --nproc_per_node=3 examples/how_it_works.py

Nothing here imports ddpshim. Four rules make a step on W ranks the step of one process:

1. Global order. Every rank draws the same batches of indices, from one seed.
2. Whole draws. Every rank draws the noise of the whole batch, so that all generators stay in one state.
3. Own rows. Rank r of W computes on the r-th of W parts of the batch, and of its noise.
4. Mean of gradients. Ranks have equally many rows, so the mean over ranks of their means is the batch's mean.

The losses of one and of three ranks differ by rounding only, because three ranks add up three parts of a sum.
tests/house/test_examples.py trains the same MLP with ddpshim on 1, 2 and 3 ranks; weights and losses equal those of
this file to the last bit.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 222, 36, 5  # the last batch of an epoch has 6 rows
NUM_MORE = 34  # numbers that ddpshim sends after the gradients, beside one for each parameter; for the last bit only


def make_data():
    """Return observations (N, 8) and actions (N, 2), the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return obs, torch.stack([obs.sum(1), obs.prod(1)], 1)


def make_policy():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def losses_of(policy, obs, action):
    """Return the loss of each row (B,)."""
    return (policy(obs) - action).square().mean(1)


def add_up(numbers, world_size):
    """Return the sum of `numbers` over ranks, on every rank."""
    if world_size > 1:
        dist.all_reduce(numbers)
    return numbers


def reduce_gradients(policy, world_size, is_first):
    """Replace each rank's gradients by their mean over ranks.

    torch's DDP divides before it adds, and sends all gradients of a small network in one message. gloo adds the first
    part of a message in another order of ranks than the second. So with three ranks the last bit of a sum depends on
    the place of a number in the message. The layout here is DDP's: in the first step in the order of the parameters,
    then in the order in which the backward pass computes gradients, from the last layer to the first. Any other layout
    is right too, up to rounding.
    """
    parameters = list(policy.parameters())
    more = torch.zeros(len(parameters) + NUM_MORE)
    order = parameters if is_first else parameters[::-1]
    gradients = [p.grad.flatten() for p in order]
    message = torch.cat([more, *gradients] if is_first else [*gradients, more]) * (1 / world_size)
    add_up(message, world_size)
    start = len(more) if is_first else 0
    for p in order:
        p.grad = message[start : start + p.numel()].view_as(p)
        start += p.numel()


def hash_of(policy):
    """Return a hash of all bits of the weights."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in policy.parameters())).hexdigest()[:16]


def train(rank, world_size):
    """Return the loss of each step, and the hash of the weights."""
    torch.tanh(torch.zeros(16))  # MKL chooses in its first call how it rounds; ddpshim.setup() does this too
    torch.manual_seed(1)
    obs, action = make_data()
    policy = make_policy()  # from one seed: the same weights on every rank
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    batches = DataLoader(range(NUM_SAMPLES), batch_size=BATCH_SIZE, shuffle=True)  # rule 1
    losses = []
    for epoch in range(NUM_EPOCHS):
        for batch in batches:
            num = len(batch) // world_size
            own = slice(rank * num, (rank + 1) * num)
            rows = batch[own]  # rule 3
            noise = 0.1 * torch.randn(len(batch), 8)[own]  # rule 2
            row_losses = losses_of(policy, obs[rows] + noise, action[rows])

            optimizer.zero_grad()
            row_losses.mean().backward()
            reduce_gradients(policy, world_size, is_first=not losses)  # rule 4
            optimizer.step()

            total, count = add_up(torch.stack([row_losses.detach().sum(), torch.tensor(float(len(rows)))]), world_size)
            losses.append((total / count).item())
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.6f}")
    return losses, hash_of(policy)


def main():
    if "WORLD_SIZE" in os.environ:  # torchrun sets it
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses, weights = train(rank, world_size)
    if rank == 0:
        print(f"weights {weights}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
