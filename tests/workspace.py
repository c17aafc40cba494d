"""A small one-process trainer in the style of diffusion_policy's workspaces, without any code for ddpshim."""

import copy
import datetime
import json
import os
import pathlib
import threading

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    """Windows of 4 steps of some episodes: 30 of 42 are for training, so the last batch of 8 is incomplete."""

    def __init__(self, start, stop):
        rng = np.random.default_rng(3)
        self.steps = rng.random((46, 5)).astype(np.float32)
        self.start, self.stop = start, stop

    def __len__(self):
        return self.stop - self.start

    def __getitem__(self, index):
        window = torch.from_numpy(self.steps[self.start + index : self.start + index + 4])
        return {"obs": window[:, :3], "action": window[:, 3:]}


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.Dropout(0.1), nn.Mish(), nn.Linear(32, 8))

    def compute_loss(self, batch):
        noise = torch.randn(batch["action"].shape)
        amount = torch.rand(len(noise), 1, 1)
        noisy = batch["action"] * (1 - amount) + noise * amount
        predicted = self.net(torch.cat([batch["obs"], noisy], dim=-1).flatten(1))
        return nn.functional.mse_loss(predicted.view_as(noise), noise)

    def predict_action(self, obs):
        action = torch.randn(len(obs), 4, 2)
        return self.net(torch.cat([obs, action], dim=-1).flatten(1)).view_as(action)


class JsonLogger:
    def __init__(self, path):
        try:
            self.file = open(path, "r+", buffering=1)  # noqa: SIM115
        except FileNotFoundError:
            self.file = open(path, "w+", buffering=1)  # noqa: SIM115
        self.file.seek(0, os.SEEK_END)

    def log(self, row):
        self.file.write(json.dumps(row) + "\n")


class Workspace:
    def __init__(self):
        torch.manual_seed(42)
        self.model = Policy()
        self.ema_model = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.output = pathlib.Path("outputs", datetime.datetime.now().strftime("%Y.%m.%d-%H.%M.%S.%f"))
        self.kept = {}

    def save(self, path):
        path.parent.mkdir(parents=False, exist_ok=True)
        states = {
            key: copy.deepcopy(value.state_dict())
            for key, value in self.__dict__.items()
            if hasattr(value, "state_dict")
        }
        thread = threading.Thread(target=lambda: torch.save(states, path.open("wb")))
        thread.start()

    def keep_best(self, score, epoch):
        """Keep at most two files, named by their scores; remove the worst."""
        path = self.output / "checkpoints" / f"epoch={epoch:03d}-score={score:.4f}.ckpt"
        if len(self.kept) == 2:
            worst = min(self.kept, key=self.kept.get)
            if score <= self.kept[worst]:
                return
            del self.kept[worst]
            os.remove(worst)
        self.kept[path] = score
        self.save(path)

    def run(self, num_epochs=3):
        loader = DataLoader(Windows(0, 30), batch_size=8, shuffle=True)
        val_loader = DataLoader(Windows(30, 42), batch_size=8)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, len(loader) * num_epochs)
        self.output.mkdir(parents=True)
        logger = JsonLogger(self.output / "logs.json.txt")
        first, step = None, 0
        for epoch in range(num_epochs):
            losses = []
            for batch in loader:
                first = batch if first is None else first
                loss = self.model.compute_loss(batch)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                schedule.step()
                with torch.no_grad():
                    for mean, new in zip(self.ema_model.parameters(), self.model.parameters()):
                        mean.lerp_(new, 0.2)
                losses.append(loss.item())
                step += 1
                logger.log({"step": step, "train_loss": losses[-1], "lr": schedule.get_last_lr()[0]})
            self.model.eval()
            with torch.no_grad():
                val_loss = np.mean([self.model.compute_loss(batch).item() for batch in val_loader])
                error = nn.functional.mse_loss(self.ema_model.predict_action(first["obs"]), first["action"]).item()
            self.save(self.output / "checkpoints" / "latest.ckpt")
            self.keep_best(float(val_loss) - error, epoch)
            logger.log(
                {"epoch": epoch, "train_loss": float(np.mean(losses)), "val_loss": float(val_loss), "error": error}
            )
            self.model.train()


if __name__ == "__main__":
    Workspace().run()
