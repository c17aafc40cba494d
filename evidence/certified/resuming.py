"""A trainer with two optimizers that resumes by itself, for evidence/certificates.py: STOP_AT=N sends it a SIGTERM."""

import argparse
import os
import signal

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
given = parser.parse_args()
world = ddpshim.setup(seed=3, batch="global")
with np.load("data.npz") as data:
    dataset = TensorDataset(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))
loader = ddpshim.make_loader(dataset, batch_size=16, shuffle=True, num_workers=2)
net = ddpshim.wrap_parallel(nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(net.parameters(), lr=given.lr)
critic = ddpshim.wrap_parallel(nn.Linear(6, 1))
slower = torch.optim.Adam(critic.parameters(), lr=given.lr)
objects = {"net": net, "optimizer": optimizer, "critic": critic, "slower": slower}
training = ddpshim.Resumable("progress", objects)
training.restore()
stop_at, num_steps = int(os.environ.get("STOP_AT", -1)), training.epoch * len(loader) + training.step
for epoch in range(training.epoch, 4):
    for x, y in training.steps(loader, epoch):
        if num_steps == stop_at and world.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
        num_steps += 1
        if num_steps % 9 == 0:
            loss = nn.functional.mse_loss(critic(x), y)
            slower.zero_grad()
            loss.backward()
            slower.step()
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
training.finish()
ddpshim.cleanup()
