"""Measures peak memory and time with the option rows_at_once, beside the same program with a smaller batch.

    python -m evidence.memory [--quick]

Each training is a process of its own on a CPU, with one thread; its peak is that of its resident memory. The target is
that of a batch of as many rows, and the inputs, results and targets of all rows, with their gradients.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from evidence import results
from evidence.results import Result

BATCH, DEADLINE_S = 128, 400
NAMES = ("conv", "unet", "transformer", "dropout", "batchnorm")  # the last two: with dropout; conv with BatchNorm


def _make(name: str) -> tuple[Any, Callable[[int], Any]]:
    """Return a network, and a function that draws inputs and targets."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    def norm(width: int) -> nn.Module:
        return nn.BatchNorm2d(width) if name == "batchnorm" else nn.GroupNorm(4, width)

    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(before, after, 3, padding=1), norm(after), nn.SiLU()),
            *(nn.Conv2d(after, after, 3, padding=1), norm(after), nn.SiLU()),
        )

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.lower, self.middle = block(3, 16), block(16, 32), block(32, 64)
            self.upper, self.up, self.last = block(96, 32), block(48, 16), nn.Conv2d(16, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.down(x)
            b = self.lower(F.avg_pool2d(a, 2))
            h = F.interpolate(self.middle(F.avg_pool2d(b, 2)), scale_factor=2)
            h = F.interpolate(self.upper(torch.cat([h, b], 1)), scale_factor=2)
            return self.last(self.up(torch.cat([h, a], 1)))  # type: ignore[no-any-return]

    if name in ("conv", "batchnorm"):
        layers = [block(3 if i == 0 else 16, 16) for i in range(5)]
        net: Any = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
        return net, lambda n: (torch.randn(n, 3, 48, 48), torch.randn(n, 10))
    if name == "unet":
        return UNet(), lambda n: (torch.randn(n, 3, 48, 48), torch.randn(n, 3, 48, 48))
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1 if name == "dropout" else 0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return net, lambda n: (torch.randn(n, 64, 128), torch.randn(n, 64, 128))


def train(name: str, batch: int, num_steps: int, out: str) -> None:
    """Train, and write peak memory (MB), CPU time of a step (s), the loss, and bytes of what stays for all rows."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, draw = _make(name)
    optimizer, seconds = torch.optim.SGD(net.parameters(), 0.01), list[float]()
    for _ in range(num_steps):
        x, y = draw(batch)
        since = time.process_time()
        made = net(x)
        loss = F.mse_loss(made, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.process_time() - since)
        stays = sum(one.numel() * 4 for one in (x, y, made, made)) / 2**20
        last = loss.item()
        del loss, made
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    weights = [float(p.detach().double().sum()) for p in net.parameters()]
    found = {"peak": peak, "s": min(seconds), "loss": last, "stays": stays, "weights": weights}
    Path(out).write_text(json.dumps(found))


def measure(name: str, batch: int, num_rows: int, num_steps: int) -> dict[str, Any]:
    """Train in a process of its own: plainly if `num_rows` is 0, else under `run` with the option."""
    launched = ["-m", "ddpshim", "run", "--nproc", "1"] if num_rows else []
    variables = {"DDPSHIM_ROWS_AT_ONCE": str(num_rows)} if num_rows else {}
    command = [*launched, str(Path(__file__).resolve()), name, str(batch), str(num_steps)]
    return results.measured(command, variables, DEADLINE_S)


def run(quick: bool, names: Iterable[str] = NAMES) -> Iterator[Result]:
    num_steps = 2 if quick else 4
    for name in names:
        whole = measure(name, BATCH, 0, num_steps)
        for parts in (4, 16):
            some, found = measure(name, BATCH // parts, 0, num_steps), measure(name, BATCH, BATCH // parts, num_steps)
            most = some["peak"] + found["stays"] - some["stays"]
            apart = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(whole["weights"], found["weights"]))
            note = f"{found['peak']:.0f} MB; all rows {whole['peak']:.0f}, batch {BATCH // parts} {some['peak']:.0f}"
            note += f"; sums of weights differ by {apart:.0e}"
            what = f"{name}, batch {BATCH}, {BATCH // parts} rows at once"
            limits = (None, None) if name == "batchnorm" else (1.15, 1.4)  # which needs all rows
            yield Result("memory", f"peak memory, {what}", found["peak"] / most, "x", at_most=limits[0], note=note)
            at = f"{whole['s']:.2f} s whole"
            yield Result("memory", f"CPU time, {what}", found["s"] / whole["s"], "x", at_most=limits[1], note=at)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        results.main(run, __doc__)
