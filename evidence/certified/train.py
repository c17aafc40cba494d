"""A trainer as users write it, with data from a file and a helper of its own, for evidence/certificates.py."""

import argparse
import os

import helper
import library
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--seed", type=int, default=3)
parser.add_argument("--batch", type=int, default=16)
given = parser.parse_args()
torch.manual_seed(given.seed)
with np.load("data.npz") as data:
    dataset = TensorDataset(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))
loader = DataLoader(dataset, given.batch, shuffle=True, num_workers=2, persistent_workers=True)
net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=given.lr)
os.makedirs("out", exist_ok=True)
for epoch in range(4):
    for x, y in loader:
        loss = library.SCALE * helper.loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.6f}", flush=True)
    torch.save(net.state_dict(), "out/last.pth")
print(f"at the end, with dropout: {helper.loss(net(x), y).item():.6f}")  # draws after the last step
