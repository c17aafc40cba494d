"""Makes tiny data for each trainer from a seed, in the folder that it reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np


def replay_buffer(path: Path, shapes: dict[str, tuple[int, ...]], lengths: list[int]) -> None:
    """Write a zarr folder for diffusion_policy's ReplayBuffer: `data/KEY` (steps, *shape), `meta/episode_ends`."""
    import zarr

    rng = np.random.default_rng(0)
    root = zarr.open_group(str(path), mode="w")
    data, meta = root.create_group("data"), root.create_group("meta")
    for key, shape in shapes.items():
        values = rng.random((sum(lengths), *shape), dtype=np.float32)
        data.array(key, values * 255 if key == "img" else values, chunks=False)
    meta.array("episode_ends", np.cumsum(lengths))


def pusht(root: Path) -> None:
    shapes = {"keypoint": (9, 2), "state": (5,), "action": (2,), "img": (96, 96, 3)}
    replay_buffer(root / "data/pusht/pusht_cchi_v7_replay.zarr", shapes, [21, 18, 23, 19, 22])


def blockpush(root: Path) -> None:
    shapes = {"obs": (16,), "action": (2,)}
    replay_buffer(root / "data/block_pushing/multimodal_push_seed.zarr", shapes, [21, 18, 23, 19, 22])


def adroit(root: Path) -> None:
    """Write data above the sources, the folder to which DP3's train.py changes."""
    shapes = {"state": (24,), "action": (24,), "point_cloud": (512, 6), "img": (4, 4, 3)}
    replay_buffer(root.parent / "data/adroit_pen_expert.zarr", shapes, [21, 18, 23])


def aloha(root: Path) -> None:
    """Write episodes as ACT records them, in the folder that its constants name, and a ResNet in torch's cache."""
    import h5py
    import torch
    import torchvision

    rng = np.random.default_rng(0)
    folder = root / "<put your data dir here>" / "sim_transfer_cube_scripted"
    folder.mkdir(parents=True)
    for episode in range(50):
        with h5py.File(folder / f"episode_{episode}.hdf5", "w") as file:
            file.attrs["sim"] = True
            file["/action"] = rng.random((12, 14), dtype=np.float32)
            file["/observations/qpos"] = rng.random((12, 14), dtype=np.float32)
            file["/observations/qvel"] = rng.random((12, 14), dtype=np.float32)
            file["/observations/images/top"] = rng.integers(0, 255, (12, 32, 32, 3), dtype=np.uint8)
    torch.manual_seed(0)
    cache = root / "torch_home" / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.save(torchvision.models.resnet18().state_dict(), cache / "resnet18-f37072fd.pth")


def trajectories(root: Path) -> None:
    """Write four walks with images, and visualnav-transformer's two lists that split them."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("a", "b", "c", "d"):
        folder = root / "walks" / name
        folder.mkdir(parents=True)
        steps = 24
        for step in range(steps):
            Image.fromarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(folder / f"{step}.jpg")
        position = np.cumsum(rng.random((steps, 2)), axis=0)
        (folder / "traj_data.pkl").write_bytes(pickle.dumps({"position": position, "yaw": rng.random(steps)}))
    for split, names in {"train": "a\nb\nc\n", "test": "d\n"}.items():
        (root / "splits" / split).mkdir(parents=True)
        (root / "splits" / split / "traj_names.txt").write_text(names)


def umi(root: Path) -> None:
    """Write four episodes with a gripper's camera, as a zip of zarr."""
    import zarr

    rng = np.random.default_rng(0)
    lengths = [14, 12, 15, 13]
    shapes = {"eef_pos": 3, "eef_rot_axis_angle": 3, "gripper_width": 1, "demo_start_pose": 6, "demo_end_pose": 6}
    path = root / "example_demo_session" / "dataset.zarr.zip"
    path.parent.mkdir()
    with zarr.ZipStore(str(path), mode="w") as store:
        group = zarr.group(store)
        data, meta = group.create_group("data"), group.create_group("meta")
        for key, width in shapes.items():
            data.array(f"robot0_{key}", rng.random((sum(lengths), width), dtype=np.float32) / 8, chunks=False)
        images = rng.integers(0, 255, (sum(lengths), 64, 64, 3), dtype=np.uint8)
        data.array("camera0_rgb", images, chunks=(1, 64, 64, 3))
        meta.array("episode_ends", np.cumsum(lengths))


def libero(root: Path) -> None:
    """Write a short demonstration of each of the ten tasks, a config file with the paths, and the script pip makes."""
    import ast

    import h5py
    import torch

    rng = np.random.default_rng(0)
    tree = ast.parse((root / "libero/libero/benchmark/libero_suite_task_map.py").read_text())
    tasks = ast.literal_eval(next(node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)))
    folders = {name: root / "home" / name for name in ("datasets", "init_states", "bddl_files", "assets")}
    for name in ("datasets", "init_states"):
        (folders[name] / "libero_spatial").mkdir(parents=True)
    lines = [f"{name}: {folder}" for name, folder in {"benchmark_root": root / "libero", **folders}.items()]
    (root / "home" / "config.yaml").write_text("\n".join(lines) + "\n")
    command = "import sys\nfrom libero.lifelong.main import main\n\nif __name__ == '__main__':\n    sys.exit(main())\n"
    (root / "home" / "lifelong.main").write_text(command)
    for task in tasks["libero_spatial"]:
        torch.save(np.zeros((2, 4)), folders["init_states"] / "libero_spatial" / f"{task}.pruned_init")
        with h5py.File(folders["datasets"] / "libero_spatial" / f"{task}_demo.hdf5", "w") as file:
            file.create_group("data").attrs["env_args"] = '{"env_name": "none", "type": 1, "env_kwargs": {}}'
            demo, steps = file.create_group("data/demo_0"), 9
            demo.attrs["num_samples"] = steps
            demo["actions"] = rng.random((steps, 7), dtype=np.float32)
            for key in ("agentview_rgb", "eye_in_hand_rgb"):
                demo[f"obs/{key}"] = rng.integers(0, 255, (steps, 32, 32, 3), dtype=np.uint8)
            demo["obs/gripper_states"] = rng.random((steps, 2), dtype=np.float32)
            demo["obs/joint_states"] = rng.random((steps, 7), dtype=np.float32)


def tokens(root: Path) -> None:
    """Write two files of tokens for nanoGPT."""
    rng = np.random.default_rng(0)
    (root / "data/tiny").mkdir()
    for name in ("train", "val"):
        rng.integers(0, 48, 400).astype(np.uint16).tofile(root / f"data/tiny/{name}.bin")
    (root / "data/tiny/meta.pkl").write_bytes(pickle.dumps({"vocab_size": 48}))


def hopper(root: Path) -> None:
    """Write episodes of several lengths for the decision transformer."""
    rng = np.random.default_rng(0)
    shapes = {"observations": (11,), "actions": (3,), "rewards": ()}
    paths = [{name: rng.random((steps, *shape)) for name, shape in shapes.items()} for steps in (9, 17, 30, 12)]
    for path in paths:
        path["terminals"] = np.zeros(len(path["rewards"]), dtype=bool)
    (root / "gym/data/hopper-medium-v2.pkl").write_bytes(pickle.dumps(paths))


def kitchen(root: Path) -> None:
    """Write eight walks of the kitchen, each with its own length, for miniBET and VQ-BeT."""
    import torch

    rng = np.random.default_rng(0)
    folder, steps = root / "kitchen", 24
    folder.mkdir()
    np.save(folder / "observations_seq.npy", rng.random((steps, 8, 60), dtype=np.float32))
    np.save(folder / "actions_seq.npy", rng.random((steps, 8, 9), dtype=np.float32))
    np.save(folder / "existence_mask.npy", (np.arange(steps)[:, None] < rng.integers(14, steps, 8)).astype(np.float32))
    torch.save(torch.zeros(steps, 8, 7), folder / "onehot_goals.pth")


def avoiding(root: Path) -> None:
    """Write three walks of a robot, for d3il."""
    rng = np.random.default_rng(0)
    folder = root / "walks"
    folder.mkdir()
    for name, steps in {"a": 20, "b": 14, "c": 19}.items():
        positions = {key: rng.random((steps, 3)) for key in ("des_c_pos", "c_pos")}
        (folder / f"{name}.pkl").write_bytes(pickle.dumps({"robot": positions}))


def stitched(root: Path) -> None:
    """Write three walks one after the other, for dppo."""
    rng = np.random.default_rng(0)
    lengths = np.array([20, 14, 19])
    folder = root / "data/gym/hopper-medium-v2"
    folder.mkdir(parents=True)
    walks = {name: rng.random((sum(lengths), width)) * 2 - 1 for name, width in {"states": 11, "actions": 3}.items()}
    np.savez(folder / "train.npz", traj_lengths=lengths, **walks)


def aloha_human(root: Path) -> None:
    """Write the episodes of `aloha` where act-plus-plus reads them."""
    aloha(root)
    (root / "data").mkdir()
    folder = root / "<put your data dir here>"
    (folder / "sim_transfer_cube_scripted").rename(root / "data/sim_transfer_cube_human")
    folder.rmdir()


def nothing(root: Path) -> None:
    """Write nothing: the data comes with the trainer, or from the stand-in of a simulator."""


def mnist(root: Path) -> None:
    """Write MNIST's four files with 250 and 60 random digits, beside the trainer's folder as it expects them."""
    rng = np.random.default_rng(0)
    folder = root / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, count in {"train": 250, "t10k": 60}.items():
        images = rng.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(_idx(images))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(_idx(labels))


def mnist_and_results(root: Path) -> None:
    """Write the same, and make the folder for pictures that the VAE expects."""
    mnist(root)
    (root / "vae" / "results").mkdir(exist_ok=True)


def mnist_of_its_own(root: Path) -> None:
    """Write the same where the forward-forward example expects it."""
    mnist(root)
    (root / "data").rename(root / "mnist_forward_forward" / "data")


def pictures(root: Path) -> None:
    """Write pictures of two classes for ImageNet's trainer, and the same as BSDS300 for super_resolution's."""
    from PIL import Image

    rng = np.random.default_rng(0)
    folders = ("imagenet/imagenet/{}/a", "imagenet/imagenet/{}/b", "super_resolution/dataset/BSDS300/images/{}")
    for folder in folders:
        for split, count in {"train": 20, "val": 6, "test": 6}.items():
            (root / folder.format(split)).mkdir(parents=True)
            for number in range(count):
                picture = Image.fromarray(rng.integers(0, 255, (64, 80, 3), dtype=np.uint8))
                picture.save(root / folder.format(split) / f"{number}.png")


def text(root: Path) -> None:
    """Write lines of a few words, for a model of words, and for one of characters."""
    rng = np.random.default_rng(0)
    words = ["O", "God,", "God!", "would", "that", "was", "in", "fair", "mine", "never", "more", "been", "seen"]
    folder = root / "words"
    folder.mkdir()
    for split, count in {"train": 120, "valid": 40, "test": 40}.items():
        lines = "".join(" ".join(line) + "\n" for line in rng.choice(words, (count, 9)))
        (folder / f"{split}.txt").write_text(lines)


def input_text(root: Path) -> None:
    """Write the same to the file that minGPT reads."""
    text(root)
    (root / "words" / "train.txt").rename(root / "input.txt")


def waves(root: Path) -> None:
    import torch

    starts = np.random.default_rng(0).integers(-80, 80, (13, 1))
    torch.save(np.sin((np.arange(30) + starts) / 20), root / "time_sequence_prediction" / "traindata.pt")


def _idx(array: np.ndarray) -> bytes:
    """Return an array in MNIST's format: a magic number, the shape, the values."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">i4").tobytes() + array.tobytes()
