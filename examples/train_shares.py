"""train_before.py with shares of batches, as for DDP: `python -m ddpshim run --nproc 2 train_shares.py`."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward_train(self, obs):  # trained through a method other than forward, as in robomimic
        return torch.distributions.Normal(self.net(obs), 1.0)


def main():
    world = ddpshim.setup(seed=1)
    obs = torch.randn(2000, 8)
    dataset = TensorDataset(obs, torch.stack([obs.sum(1), obs.prod(1)], 1))
    device = world.device
    policy = ddpshim.wrap_parallel(Policy().to(device))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    loader = ddpshim.make_loader(dataset, batch_size=100, shuffle=True, drop_last=False)
    for epoch in range(5):
        for x, y in loader:
            loss = -policy.forward_train(x.to(device)).log_prob(y.to(device)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss = world.mean_over(loss * len(x), len(x)).item()
        if world.is_main:
            print(f"epoch {epoch}: loss {loss:.4f}")
    if world.is_main:
        torch.save(policy.state_dict(), "policy.pth")
    ddpshim.cleanup()


if __name__ == "__main__":
    main()
