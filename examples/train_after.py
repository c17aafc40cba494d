"""The trainer of train_before.py, distributed: `python -m ddpshim run --nproc 2 train_after.py`, or python alone.

Three lines differ. The program holds the whole batch, as before; each rank computes its rows of it.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddpshim


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward_train(self, obs):  # trained through a method other than forward, as in robomimic
        return torch.distributions.Normal(self.net(obs), 1.0)


def main():
    ddpshim.setup(batch="global")
    torch.manual_seed(1)
    obs = torch.randn(2000, 8)
    dataset = TensorDataset(obs, torch.stack([obs.sum(1), obs.prod(1)], 1))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = ddpshim.wrap_parallel(Policy().to(device))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=100, shuffle=True)
    for epoch in range(5):
        for x, y in loader:
            loss = -policy.forward_train(x.to(device)).log_prob(y.to(device)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    torch.save(policy.state_dict(), "policy.pth")


if __name__ == "__main__":
    main()
