"""Latent actions from pairs of images: vector quantization, a contrastive loss, augmentation."""

import argparse
import csv
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    """Two images of a moving dot, each shifted at random by up to two pixels, and the way the dot went."""

    def __init__(self, num_pairs):
        made = torch.Generator().manual_seed(7)
        self.at = torch.randint(4, 12, (num_pairs, 2), generator=made)
        self.by = torch.randint(-3, 4, (num_pairs, 2), generator=made)

    def __len__(self):
        return len(self.at)

    def picture(self, at):
        image = torch.zeros(1, 16, 16)
        image[0, at[0] - 1 : at[0] + 2, at[1] - 1 : at[1] + 2] = 1.0
        return torch.roll(image, tuple(torch.randint(-2, 3, (2,)).tolist()), (1, 2)) + 0.05 * torch.randn(1, 16, 16)

    def __getitem__(self, index):
        return self.picture(self.at[index]), self.picture(self.at[index] + self.by[index]), self.by[index]


class Quantizer(nn.Module):
    """Codes that follow the means of the vectors that chose them; a code that nobody chooses is drawn anew."""

    def __init__(self, num_codes, width):
        super().__init__()
        self.register_buffer("codes", torch.randn(num_codes, width))
        self.register_buffer("used", torch.ones(num_codes))
        self.register_buffer("total", self.codes.clone())

    def forward(self, z):
        chosen = torch.cdist(z, self.codes).argmin(1)
        quantized = self.codes[chosen]
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(chosen, len(self.codes)).to(z.dtype)
                self.used.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(one_hot.t() @ z, alpha=0.1)
                self.codes.copy_(self.total / self.used.clamp(min=1e-3).unsqueeze(1))
                unused = (self.used < 0.5).nonzero().flatten()
                if len(unused):
                    self.codes[unused] = z[torch.randint(len(z), (len(unused),))]
        commitment = F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), commitment, chosen


class LatentActions(nn.Module):
    def __init__(self, width=32, num_codes=16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.SiLU()
        )
        self.latent = nn.Sequential(nn.Flatten(), nn.Linear(256, width), nn.Dropout(0.1))
        self.action = nn.Linear(2 * width, 8)
        self.quantizer = Quantizer(num_codes, 8)
        self.ahead = nn.Sequential(nn.Linear(width + 8, 64), nn.SiLU(), nn.Linear(64, width))
        self.probe = nn.Linear(8, 2)

    def forward(self, before, after, by):
        now, then = self.latent(self.encoder(before)), self.latent(self.encoder(after))
        code, commitment, chosen = self.quantizer(self.action(torch.cat([now, then], 1)))
        predicted = F.normalize(self.ahead(torch.cat([now, code], 1)), dim=1)
        scores = predicted @ F.normalize(then, dim=1).t() / 0.1  # the other pairs of the batch are the negatives
        contrast = F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        probe = F.mse_loss(self.probe(code.detach()), by.float())
        return contrast + 0.25 * commitment + probe, contrast, chosen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LatentActions().to(device)
    loader = DataLoader(Pairs(300), batch_size=50, shuffle=True, num_workers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.epochs * len(loader))
    best, rows = float("inf"), []
    for epoch in range(args.epochs):
        model.train()
        losses, codes = [], set()
        for before, after, by in loader:
            loss, contrast, chosen = model(before.to(device), after.to(device), by.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(contrast.item())
            codes.update(chosen.tolist())
        mean = sum(losses) / len(losses)
        rows.append({"epoch": epoch, "contrast": f"{mean:.6f}", "codes": len(codes)})
        print(f"epoch {epoch}: contrast {mean:.6f}, {len(codes)} codes used", flush=True)
        if mean < best:
            best = mean
            torch.save(model.state_dict(), os.path.join(args.out, "best.pth"))
    with open(os.path.join(args.out, "log.csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
