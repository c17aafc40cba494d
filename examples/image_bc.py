"""A trainer as people write it, for one process: behaviour cloning from images, with BatchNorm and augmentation.

python examples/image_bc.py OUT                              # one process
python -m ddpshim run --nproc 2 examples/image_bc.py OUT     # the same numbers up to rounding, unedited
"""

import math
import os
import random
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

EPOCHS, BATCH_SIZE, SIZE = 10, 32, 32


class Reaching(Dataset):
    """Pictures (3, 32, 32) of a gripper and an object, and the gripper's velocity towards it (2)."""

    def __init__(self, is_augmented, num_samples=700):
        places = np.random.default_rng(0).uniform(5, SIZE - 5, (num_samples, 2, 2))
        rows, columns = np.mgrid[:SIZE, :SIZE]
        squares = (rows - places[..., :1, None]) ** 2 + (columns - places[..., 1:, None]) ** 2
        self.images = np.zeros((num_samples, 3, SIZE, SIZE), np.float32)
        self.images[:, :2] = np.exp(-squares / 4)
        self.actions = ((places[:, 1] - places[:, 0]) / 10).clip(-1, 1).astype(np.float32)
        self.is_augmented = is_augmented

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, action = torch.from_numpy(self.images[index]), torch.from_numpy(self.actions[index])
        if self.is_augmented:
            image = torch.roll(image, (random.randint(-2, 2), random.randint(-2, 2)), (1, 2))
            image = image * (0.8 + 0.4 * torch.rand(3, 1, 1)) + 0.1 * torch.randn(3, 1, 1)
        return image, action


def make_policy():
    layers = []
    for num_in, num_out in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(num_in, num_out, 3, stride=2, padding=1), nn.BatchNorm2d(num_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 2))


def main(out):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    order = torch.randperm(700).tolist()
    train_set = Subset(Reaching(is_augmented=True), order[:600])
    valid_set = Subset(Reaching(is_augmented=False), order[600:])
    train_loader = DataLoader(train_set, BATCH_SIZE, shuffle=True, num_workers=2)
    valid_loader = DataLoader(valid_set, BATCH_SIZE, num_workers=2)
    policy = make_policy().to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
    num_steps = EPOCHS * len(train_loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 + 0.5 * math.cos(math.pi * n / num_steps))
    os.makedirs(out, exist_ok=True)
    best = math.inf
    for epoch in range(EPOCHS):
        policy.train()
        total = 0.0
        for image, action in train_loader:
            image, action = image.to(device), action.to(device)
            loss = F.mse_loss(policy(image), action)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total += loss.item() * len(image)
        policy.eval()
        errors = []
        with torch.no_grad():
            for image, action in valid_loader:
                image, action = image.to(device), action.to(device)
                errors.append((policy(image) - action).abs().mean(1))
        error = torch.cat(errors).mean().item()
        print(f"epoch {epoch}: loss {total / len(train_set):.5f}, validation {error:.5f}")
        if error < best:
            best = error
            torch.save(policy.state_dict(), os.path.join(out, "best.pth"))
    print(f"best validation: {best:.5f}")


if __name__ == "__main__":
    main(sys.argv[1])
