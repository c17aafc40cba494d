"""A diffusion policy with an exponential moving average of its weights (EMA), trained on several ranks.

    python examples/diffusion_ema.py                              # one process
    python -m ddpshim run --nproc 2 examples/diffusion_ema.py     # or torchrun; and --nproc 1

Expect: every rank draws the noise of the whole batch, as a single process does, and computes its rows; ranks have equal
weights and an equal EMA, bit for bit; the loss is the single-process loss (compare). By hand, ranks with equal seeds
would all use the same noise, and an EMA of a DistributedDataParallel may never leave its random start.
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import ddpshim

BATCH_SIZE, NUM_EPOCHS, NUM_TIMESTEPS = 64, 12, 50
KEPT = torch.cumprod(1 - torch.linspace(1e-4, 0.2, NUM_TIMESTEPS), 0)  # the action's share at timestep t


class DiffusionPolicy(nn.Module):
    """Predicts the noise in an action (B, 2), from an observation (B, 4) and the timestep (B,)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 128), nn.Mish(), nn.Linear(128, 128), nn.Mish(), nn.Linear(128, 2))

    def forward_train(self, obs, action, noise, t):
        kept = KEPT.to(action)[t, None]
        noisy = kept.sqrt() * action + (1 - kept).sqrt() * noise
        return (self.net(torch.cat([obs, noisy, t[:, None] / NUM_TIMESTEPS], 1)) - noise).square().mean()

    @torch.no_grad()
    def act(self, obs):
        action = torch.randn(len(obs), 2).to(obs)
        for t in reversed(range(NUM_TIMESTEPS)):
            kept, before = KEPT[t].item(), KEPT[t - 1].item() if t else 1.0
            noise = self.net(torch.cat([obs, action, torch.full_like(obs[:, :1], t / NUM_TIMESTEPS)], 1))
            clean = (action - (1 - kept) ** 0.5 * noise) / kept**0.5
            action = before**0.5 * clean.clamp(-2, 2) + (1 - before) ** 0.5 * noise  # DDIM: no noise is added
        return action


def train(world, policy, dataset):
    """Return the EMA, the mean loss of the last epoch, and the first noise."""
    policy = ddpshim.wrap_parallel(policy)
    ema = AveragedModel(ddpshim.unwrap(policy), multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    first = None
    for _ in range(NUM_EPOCHS):
        losses = []
        for obs, action in loader:
            noise, t = torch.randn(len(action), 2), torch.randint(NUM_TIMESTEPS, (len(action),))
            first = noise[0] if first is None else first
            loss = policy.forward_train(*(x.to(world.device) for x in (obs, action, noise.to(action), t)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(policy)
            losses.append(loss.detach())
    return ema.module, torch.stack(losses).mean().item(), first


def main():
    world = ddpshim.setup(seed=1, batch="global")
    torch.set_default_dtype(torch.float64)  # so that rounding cannot explain a visible difference
    obs = torch.randn(2048, 4)
    way = torch.randn(2048, 1).sign()  # two right answers for each observation
    dataset = TensorDataset(obs, torch.cat([way, way * obs[:, :1].tanh()], 1))

    policy = DiffusionPolicy().to(world.device)
    ema, loss, noise = train(world, policy, dataset)
    sizes = [sum(p.abs().sum().item() for p in net.parameters()) for net in (policy, ema)]
    facts = world.gather((noise.tolist(), *sizes))
    with ddpshim.shared_random_streams(seed=4):
        sampled = ema.act(obs[:500].to(world.device))[:, 0]
    print("  rank  first noise         |weights|     |EMA|")
    for rank, (noise, of_policy, of_ema) in enumerate(facts):
        print(f"  {rank:4d}  {noise[0]:+.4f} {noise[1]:+.4f} {of_policy:14.8f} {of_ema:.8f}")
    print(f"  the EMA's actions: {(sampled < 0).double().mean():.0%} left, mean |x| {sampled.abs().mean():.2f}")
    print(f"  loss of the last epoch: {loss:.10f}")
    ddpshim.cleanup()


if __name__ == "__main__":
    main()
