"""A typical trainer for nn.DataParallel, without any code for ranks.

python -m ddpshim run --nproc-per-node 2 examples/any_trainer/train_dataparallel.py
"""

import os

import torch
from torch import nn
from torch.nn import DataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split


def evaluate(model, loader, device):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            out = model(x.to(device))
            loss += nn.functional.cross_entropy(out, y.to(device), reduction="sum").item()
            correct += (out.argmax(1).cpu() == y).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)


def main():
    torch.manual_seed(1)
    x = torch.randn(2000, 8)
    dataset = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    train_set, valid_set = random_split(dataset, [1600, 400])
    train_loader = DataLoader(train_set, batch_size=100, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=150)

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = DataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    os.makedirs("checkpoints", exist_ok=True)
    best = float("inf")
    for epoch in range(8):
        model.train()
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        valid_loss, accuracy = evaluate(model, valid_loader, device)
        scheduler.step(valid_loss)
        print(f"epoch {epoch}: validation loss {valid_loss:.6f}, accuracy {accuracy:.4f}")
        if valid_loss < best:
            best = valid_loss
            torch.save({"epoch": epoch, "model": model.state_dict()}, "checkpoints/best.pth")

    model.load_state_dict(torch.load("checkpoints/best.pth")["model"])
    print("best: loss {:.6f}, accuracy {:.4f}".format(*evaluate(model, valid_loader, device)))


if __name__ == "__main__":
    main()
