"""A script with DataParallel, to be converted. Its argument is a mistake that is made in every process."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    data = TensorDataset(x, x[:, :2].exp())
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    model = nn.DataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        for obs, action in DataLoader(data, batch_size=24, shuffle=True):
            out = model(obs + 0.1 * torch.randn_like(obs))
            loss = (out - action).square().mean()
            if "largest" in sys.argv:
                loss = (out - action).square().max()
            optimizer.zero_grad()
            loss.backward()  # largest
            optimizer.step()


if __name__ == "__main__":
    main()
