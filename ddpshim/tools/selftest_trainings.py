"""Three small trainings in float64, a program for one process; it writes its losses and weights as JSON.

The self-test runs a copy of it, plain and through `python -m ddpshim run`, so it knows nothing of ranks. The last batch
of an epoch is smaller, and few numbers of ranks divide the others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_NUM_SAMPLES, _BATCH_SIZE, _NUM_EPOCHS = 64, 26, 3


class Noisy(TensorDataset):
    """Images (3, 8, 8), each with its sum; reading one draws noise."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        images, numbers = self.tensors
        return images[index] + 0.1 * torch.randn(images.shape[1:], dtype=images.dtype), numbers[index]


def _train(net: nn.Module, num_workers: int = 0) -> dict[str, list[float]]:
    net = net.to(DEVICE, torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses = []
    drawn = torch.randn(_NUM_SAMPLES, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(Noisy(drawn, drawn.sum((1, 2, 3))), _BATCH_SIZE, shuffle=True, num_workers=num_workers)
    for _ in range(_NUM_EPOCHS):
        for images, numbers in loader:
            images, numbers = images.to(DEVICE), numbers.to(DEVICE)
            noisy = images + 0.1 * torch.randn_like(images)
            loss = nn.functional.smooth_l1_loss(net(noisy)[:, 0], numbers)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    net.eval()
    return {"losses": losses, "weights": [x for tensor in net.state_dict().values() for x in tensor.flatten().tolist()]}


def main(file: Path) -> None:
    """Train, and write the results to `file`."""
    torch.manual_seed(1)
    mlp = (nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    conv = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 1))
    found = {
        "dropout": _train(nn.Sequential(*mlp)),
        "BatchNorm": _train(nn.Sequential(*conv)),
        "data workers": _train(nn.Sequential(nn.Flatten(), nn.Linear(192, 1)), num_workers=2),
    }
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
