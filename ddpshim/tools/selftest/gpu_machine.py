"""Checks the GPUs of one rank, for the self-test on GPUs: their links, memory, rendering and speed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
import time
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpshim.errors import SyncError, WorldError
from ddpshim.model.parallel import wrap_parallel
from ddpshim.observe.environment import describe
from ddpshim.process.random_streams import shared_random_streams
from ddpshim.tools.selftest.checks import NotRun, Rank
from ddpshim.tools.selftest.policies import Recurrent, Transformer, UNet, data

_SEED = 1
_VERSIONS = ("torch", "CUDA", "ROCm", "cuDNN", "NCCL", "NVIDIA driver")
_MOST_MB_OF_A_NETWORK = 32  # GPU memory in addition to its tensors; a communicator takes hundreds
_LEAST_MB_OF_A_RENDERER = 16
_MOST_OF_DDP = 1.1  # limit on the time of a step, relative to raw DDP
_WIDTHS = {True: (32, 2), False: (768, 8)}  # is the GPU simulated -> (width, layers) of the timed transformer
_SCENE = """<mujoco><visual><global offwidth="2048" offheight="2048"/></visual><worldbody><light pos="0 0 3"/>
<geom type="box" size="2 2 .1" rgba="1 0 0 1"/></worldbody></mujoco>"""


def is_simulated() -> bool:
    """Whether the GPUs are simulated, so that times and memory mean nothing. Local."""
    return torch.version.cuda is None and torch.version.hip is None


def built(make: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Return a network with the same weights on every rank and at every call. Local."""
    with shared_random_streams(_SEED):  # restores each rank's own random stream afterwards
        return make().to(device)


class GpuMachine(Rank):
    """A rank with the checks of its machine."""

    def facts(self) -> str:
        """Return versions and GPUs; raises WorldError if two ranks share a GPU, which nccl refuses."""
        here = torch.cuda.get_device_properties(self.world.device)
        own = (here.name, str(getattr(here, "uuid", self.world.device.index)), f"{here.major}.{here.minor}")
        every = self.world.gather(own)
        uuids = [uuid for _, uuid, _ in every]
        if len(set(uuids)) < len(uuids) and uuids.index(own[1]) != self.world.rank:
            raise WorldError(
                f"rank {self.world.rank} and rank {uuids.index(own[1])} compute on one GPU; each would be half as "
                "fast. Check CUDA_VISIBLE_DEVICES."
            )
        kinds = {f"{name} ({capability})": 0 for name, _, capability in every}
        for name, _, capability in every:
            kinds[f"{name} ({capability})"] += 1
        mig = ", MIG" if any("MIG" in name or uuid.startswith("MIG") for name, uuid, _ in every) else ""
        mixed = "; they differ: the slowest sets the pace" if len(kinds) > 1 else ""
        versions = describe()["versions"]
        has = [f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name)]
        return ", ".join([*has, *(f"{number} x {kind}" for kind, number in kinds.items())]) + mig + mixed

    def links(self) -> str:
        copies = self.peer_to_peer()  # empty on ranks other than 0
        size, measured = self.world.world_size, {}
        pairs = itertools.combinations(range(size), 2)
        for pair in [*pairs] if not self.place.is_quick else [(rank, rank + 1) for rank in range(size - 1)]:
            group = dist.new_group(list(pair))
            seconds = 0.0
            if self.world.rank in pair:
                megabytes = 1 if is_simulated() else 64
                seconds = self._seconds_of_pair(
                    torch.full((megabytes * 250_000,), 1.0, device=self.world.device), group
                )
                # A sum over 2 ranks doubles each number, which is exact in float32.
                measured[pair] = 4 * megabytes * 250_000 / seconds / 1e9
            self.world.barrier()
            dist.destroy_process_group(group)
        every = {pair: speed for those in self.world.gather(measured) for pair, speed in those.items()}
        (a, b), slowest = min(every.items(), key=lambda item: item[1])
        fastest = max(every.values())
        named = f"slowest pair cuda:{a} and cuda:{b} {slowest:.1f} GB/s, fastest {fastest:.1f} GB/s"
        return f"{copies}; all-reduce of two: {named}" if copies else named

    def _seconds_of_pair(self, tensor: Tensor, group: Any) -> float:
        num_rounds = 5
        for _ in range(2):
            dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(num_rounds):
            dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / num_rounds
        expected = 2.0 ** (num_rounds + 2)
        num_wrong = int((tensor != expected).sum())
        if num_wrong:
            raise WorldError(
                f"an all-reduce with its pair gave {num_wrong} wrong numbers of {len(tensor)}; gradients would be "
                "wrong. Set NCCL_P2P_DISABLE=1, and check the board's IOMMU and PCIe ACS settings."
            )
        return seconds

    def memory(self) -> str:
        def outside_of_torch() -> float:
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            return (total - free - torch.cuda.memory_reserved()) / 2**20

        try:
            used = [outside_of_torch()]
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            return NotRun(f"the memory of this GPU cannot be read ({type(error).__name__})")
        kept = []
        for _ in range(5):
            wrapped: Any = wrap_parallel(built(Recurrent, self.world.device))
            wrapped.loss(*self.on_device(torch.float32)).backward()
            kept.append(wrapped)
            used.append(outside_of_torch())
        grown = (used[-1] - used[1]) / 4
        if grown > _MOST_MB_OF_A_NETWORK:
            raise WorldError(
                f"each wrapped network takes {grown:.0f} MB of GPU memory beside its tensors (expected below "
                f"{_MOST_MB_OF_A_NETWORK}): each has a communicator of its own, and cql has five networks. Report this."
            )
        return f"one network {used[1] - used[0]:.0f} MB beside its tensors, each further one {grown:.1f} MB"

    def rendering(self) -> str:
        """Find the GPU that renders by its growth in memory, because EGL and CUDA number GPUs differently."""
        if importlib.util.find_spec("mujoco") is None:
            return NotRun("mujoco is not installed")
        from ddpshim.evaluation.dealing import render_on

        os.environ["MUJOCO_GL"] = "egl"
        render_on(self.world.device.index)
        mujoco = importlib.import_module("mujoco")
        used: list[float] = []
        for rank in range(self.world.local_world_size):  # one at a time: all GPUs' memory is read
            if rank == self.world.local_rank:
                before = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
                model = mujoco.MjModel.from_xml_string(_SCENE)
                state, renderer = mujoco.MjData(model), mujoco.Renderer(model, 2048, 2048)
                mujoco.mj_forward(model, state)
                renderer.update_scene(state)
                picture = renderer.render()
                now = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
                renderer.close()
                used = [(a - b) / 2**20 for a, b in zip(before, now)]
            self.world.barrier()
        if not picture[1024, 1024].any():
            raise WorldError(
                "the picture is black; policies would train on black images. Check the driver's EGL libraries."
            )
        gpu = used.index(max(used))
        if used[gpu] < _LEAST_MB_OF_A_RENDERER:
            return NotRun(f"no GPU's memory grew while EGL rendered ({', '.join(f'{mb:.0f}' for mb in used)} MB)")
        if gpu != self.world.device.index:
            raise WorldError(
                f"rank {self.world.rank} trains on {self.world.device} and renders on cuda:{gpu}, which has another "
                "rank's; rollouts would take its memory and time. Set MUJOCO_EGL_DEVICE_ID for each rank."
            )
        return f"each rank renders on its own GPU ({used[gpu]:.0f} MB there)"

    def overlap(self) -> str:
        kinds: dict[str, Callable[[], nn.Module]] = {
            "U-Net": functools.partial(UNet, 16 if is_simulated() else 512),
            "transformer": functools.partial(Transformer, *_WIDTHS[is_simulated()]),
        }
        said, slow = [], []
        num_steps, num_rounds = (2, 3) if is_simulated() else (10, 7 if self.place.is_quick else 15)
        for name, make in kinds.items():
            ours, theirs = (built(make, self.world.device) for _ in range(2))
            arms: dict[str, Any] = {"ddpshim": wrap_parallel(ours), "DDP": DistributedDataParallel(_Forward(theirs))}
            batch = self.on_device(torch.float32, 4 if is_simulated() else 64)
            times: dict[str, list[float]] = {arm: [] for arm in arms}
            for _ in range(num_rounds + 1):  # the first one rebuilds buckets and warms up; it is not counted
                for arm, wrapped in arms.items():
                    self.world.barrier()
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    for _ in range(num_steps):
                        wrapped.zero_grad()  # no optimizer: ddpshim's guards would refuse raw DDP's gradients
                        (wrapped(*batch) if arm == "DDP" else wrapped.loss(*batch)).backward()
                    torch.cuda.synchronize()
                    times[arm].append((time.perf_counter() - started) / num_steps)
            ratios = sorted(a / b for a, b in zip(times["ddpshim"][1:], times["DDP"][1:]))
            quarter = ratios[len(ratios) // 4], ratios[len(ratios) // 2], ratios[-1 - len(ratios) // 4]
            first = max(self.world.gather(quarter[0]))
            said.append(f"{name} {quarter[1]:.2f} ({quarter[0]:.2f} to {quarter[2]:.2f})")
            slow += [name] if first > _MOST_OF_DDP else []
        if slow and not is_simulated():
            raise SyncError(
                f"a step of {' and '.join(slow)} takes more than {_MOST_OF_DDP} times that of raw DDP "
                f"({', '.join(said)}); training would be slower than without ddpshim. Report this with "
                "the file that --write makes."
            )
        judged = "; a simulated GPU has no times to be judged" if is_simulated() else ""
        return f"a step's time over raw DDP's, median and quartiles: {', '.join(said)}{judged}"

    def on_device(self, dtype: torch.dtype, num_samples: int = 4) -> list[Tensor]:
        """Return this rank's samples of obs and action, on its GPU."""
        whole = data(num_samples * self.world.world_size, dtype)
        return [part[self.world.rank :: self.world.world_size].to(self.world.device) for part in whole]


class _Forward(nn.Module):
    """A policy whose forward returns the loss, as raw DDP requires."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        return self.policy.loss(obs, action)  # type: ignore[operator,no-any-return]
