"""Batches of robomimic's sequence datasets against its own samples, collated by torch, bit for bit."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import ddpshim
from ddpshim import datasets, sequences

h5py = pytest.importorskip("h5py")

pytestmark = pytest.mark.robomimic
OBS = ("eef_pos", "eef_quat", "object")
IMAGES = ("agentview_image",)
LENGTHS = (12, 3, 1, 7, 9)
KEYS = ("actions", "rewards", "missing")


def make_file(path: Path, lengths: tuple[int, ...] = LENGTHS, **storage: Any) -> Path:
    """Demonstrations of these lengths, some of them of less than a window, with filter keys and pictures."""
    draw = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number, length in enumerate(lengths):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = length
            demo.create_dataset("actions", data=draw.normal(size=(length, 7)), **storage)
            demo.create_dataset("gripper", data=draw.normal(size=(length, 1)), **storage)
            demo.create_dataset("rewards", data=draw.integers(0, 5, length), **storage)
            for group in ("obs", "next_obs"):
                demo.create_dataset(f"{group}/eef_pos", data=draw.normal(size=(length, 3)), **storage)
                demo.create_dataset(f"{group}/eef_quat", data=draw.normal(size=(length, 4)).astype("f4"), **storage)
                demo.create_dataset(f"{group}/object", data=draw.normal(size=(length, 10)), **storage)
                pictures = draw.integers(0, 256, (length, 5, 4, 3), dtype=np.uint8)
                demo.create_dataset(f"{group}/agentview_image", data=pictures, **storage)
        names = [f"demo_{number}".encode() for number in range(len(lengths))]
        file["mask/train"], file["mask/valid"] = names[::2], names[1::2]
    return path
