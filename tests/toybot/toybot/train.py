"""Trains a policy by behavioural cloning, keeps its average, and writes a log and a checkpoint."""

import argparse
import copy
import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader

from toybot.data import Windows


class Policy(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(8 * window, 32), nn.ReLU(), nn.Linear(32, 2))

    def compute_loss(self, batch):
        return nn.functional.mse_loss(self.net(batch["obs"]), batch["actions"])


def train(args):
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    os.makedirs(args.out)
    policy = Policy(window=4).to(device)
    average = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    loader = DataLoader(Windows(20, 33, 4), batch_size=args.batch_size, shuffle=True, drop_last=True)
    with open(os.path.join(args.out, "log.jsonl"), "w") as log:
        for epoch in range(args.epochs):
            losses = []
            for batch in loader:
                loss = policy.compute_loss({key: value.to(device) for key, value in batch.items()})
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for mean, value in zip(average.parameters(), policy.parameters()):
                        mean.lerp_(value, 0.1)
                losses.append(loss.item())
            log.write(json.dumps({"epoch": epoch, "loss": sum(losses) / len(losses)}) + "\n")
    torch.save({"policy": policy.state_dict(), "average": average.state_dict()}, os.path.join(args.out, "policy.pth"))
    print("trained")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
