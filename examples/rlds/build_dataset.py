"""Write a small RLDS dataset in DROID's schema, with tensorflow-datasets' own writer and no network access.

    python examples/rlds/build_dataset.py FOLDER --name droid --episodes 51 --files 3

Every frame can be identified: its cartesian_position begins with (episode, step) / 128, which is exact in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

CAMERAS = ("wrist_image_left", "exterior_image_1_left", "exterior_image_2_left")
SCALE = 128


def features(height: int) -> Any:
    """Return the features that the public DROID release declares (there images are 180 pixels high)."""
    image = tfds.features.Image(shape=_shape(height), dtype=np.uint8, encoding_format="jpeg")
    parts = {"cartesian_position": 6, "gripper_position": 1, "joint_position": 7}
    velocities = {"cartesian_velocity": 6, "gripper_velocity": 1, "joint_velocity": 7}

    def vectors(sizes: dict[str, int]) -> dict[str, Any]:
        return {name: tfds.features.Tensor(shape=(size,), dtype=np.float64) for name, size in sizes.items()}

    step = {
        "observation": {**dict.fromkeys(CAMERAS, image), **vectors(parts)},
        "action_dict": vectors({**parts, **velocities}),
        "action": tfds.features.Tensor(shape=(7,), dtype=np.float64),
        "language_instruction": tfds.features.Text(),
        "language_instruction_2": tfds.features.Text(),
        "language_instruction_3": tfds.features.Text(),
        "discount": tfds.features.Scalar(dtype=np.float32),
        "reward": tfds.features.Scalar(dtype=np.float32),
        **{name: tfds.features.Scalar(dtype=np.bool_) for name in ("is_first", "is_last", "is_terminal")},
    }
    metadata = {"file_path": tfds.features.Text(), "recording_folderpath": tfds.features.Text()}
    return tfds.features.FeaturesDict({"steps": tfds.features.Dataset(step), "episode_metadata": metadata})


def episodes(num_episodes: int, num_steps: int, height: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield successful episodes with an instruction; their images are noise."""
    random = np.random.default_rng(seed)
    for episode in range(num_episodes):
        length = int(random.integers(num_steps, 2 * num_steps + 1))
        path = f"/data/success/{episode:04d}"
        yield {
            "steps": [_step(random, episode, step, length, height) for step in range(length)],
            "episode_metadata": {"file_path": f"{path}/trajectory.h5", "recording_folderpath": f"{path}/recordings"},
        }


def _shape(height: int) -> tuple[int, int, int]:
    return (height, height * 16 // 9, 3)


def _step(random: np.random.Generator, episode: int, step: int, length: int, height: int) -> dict[str, Any]:
    where = np.array([episode, step, SCALE * step / length, 0, 0, 0]) / SCALE
    target = where + np.r_[random.normal(scale=0.01, size=3), random.uniform(-1, 1, size=3)]
    position = {"cartesian_position": where, "gripper_position": [step / length], "joint_position": np.zeros(7)}
    images = {camera: random.integers(0, 256, _shape(height), dtype=np.uint8) for camera in CAMERAS}
    return {
        "observation": {**position, **images},
        "action_dict": {
            **position,
            "cartesian_position": target,
            "cartesian_velocity": target - where,
            "gripper_velocity": [1 / length],
            "joint_velocity": np.zeros(7),
        },
        "action": np.r_[target, step / length],
        "language_instruction": f"do task {episode % 3}",
        "language_instruction_2": "",
        "language_instruction_3": "",
        "discount": 1.0,
        "reward": float(step == length - 1),
        "is_first": step == 0,
        "is_last": step == length - 1,
        "is_terminal": step == length - 1,
    }


def build(
    folder: str, name: str = "droid", num_episodes: int = 51, num_files: int = 3, num_steps: int = 10, height: int = 18
) -> None:
    """Write `folder`/`name`/1.0.0 with one split, train; episodes have `num_steps` to twice `num_steps` steps."""
    tfds.dataset_builders.store_as_tfds_dataset(
        name=name,
        version="1.0.0",
        features=features(height),
        split_datasets={"train": list(enumerate(episodes(num_episodes, num_steps, height, seed=len(name))))},
        data_dir=folder,
        download_config=tfds.download.DownloadConfig(num_shards=num_files),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--name", default="droid")
    parser.add_argument("--episodes", type=int, default=51)
    parser.add_argument("--files", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of an episode, to twice as many")
    parser.add_argument("--height", type=int, default=18, help="of the images, in pixels")
    given = parser.parse_args()
    build(given.folder, given.name, given.episodes, given.files, given.steps, given.height)
