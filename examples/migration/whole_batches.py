"""trainer.py on several ranks, with the numbers of a single process: three lines differ. See MIGRATION.md."""

import argparse
import copy
import time
from pathlib import Path

import ddpshim
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


class Policy(nn.Module):
    """Predicts the noise in an action, as diffusion policies do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward_train(self, obs, actions, noise_scale):
        noise = noise_scale * torch.randn_like(actions)
        return (self.net(torch.cat([obs, actions + noise], 1)) - noise).square().mean()


def make_data():
    """Return a training set (obs: (N, 8), actions: (N, 2)), weights that balance its two parts, a validation set."""
    obs = torch.randn(2400, 8)
    data = TensorDataset(obs, torch.stack([obs.sum(1), obs.prod(1)], 1))
    weights = torch.tensor([1 / 400] * 400 + [1 / 1600] * 1600)
    return torch.utils.data.Subset(data, range(2000)), weights, torch.utils.data.Subset(data, range(2000, 2400))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--noise", type=float, default=1.0)
    args = parser.parse_args()
    ddpshim.setup(batch="global")
    torch.manual_seed(1)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    train_set, weights, valid_set = make_data()
    policy = Policy().to(device)
    ema = copy.deepcopy(policy)
    policy = ddpshim.wrap_parallel(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    sampler = WeightedRandomSampler(weights, len(train_set))
    loader = DataLoader(train_set, batch_size=100, sampler=sampler, drop_last=True)
    valid_loader = DataLoader(valid_set, batch_size=100)
    folder = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    best = float("inf")
    try:
        for epoch in range(args.epochs):
            losses = []
            for obs, actions in loader:
                loss = policy.module.forward_train(obs.to(device), actions.to(device), args.noise)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                for average, weight in zip(ema.parameters(), policy.module.parameters()):
                    average.data.lerp_(weight.data, 0.05)
                losses.append(loss.item())
            train_loss = sum(losses) / len(losses)
            with torch.no_grad():
                valid = [ema.forward_train(o.to(device), a.to(device), args.noise).item() for o, a in valid_loader]
            valid_loss = sum(valid) / len(valid)
            print(f"epoch {epoch}: loss {train_loss:.6f}, validation {valid_loss:.6f}")
            with open(folder / "log.txt", "a") as log:
                log.write(f"{epoch} {train_loss} {valid_loss}\n")
            if valid_loss < best:
                best = valid_loss
                torch.save({"policy": policy.module.state_dict(), "ema": ema.state_dict()}, folder / "best.pth")
    except Exception as error:
        print(f"training failed: {error}")


if __name__ == "__main__":
    main()
