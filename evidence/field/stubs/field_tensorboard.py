"""Replaces torch.utils.tensorboard: each scalar becomes a line of scalars.jsonl."""

import json
import os


class SummaryWriter:
    def __init__(self, log_dir, **ignored):
        os.makedirs(log_dir, exist_ok=True)
        self.file = open(os.path.join(log_dir, "scalars.jsonl"), "w")  # noqa: SIM115

    def add_text(self, *ignored, **more):
        pass

    def add_scalar(self, name, value, step):
        self.file.write(json.dumps({name: float(value), "step": step}) + "\n")

    def close(self):
        self.file.close()
