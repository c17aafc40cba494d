"""Models one training step with DDP: ring all-reduce, bucket by bucket, overlapping the backward pass.

Time of a message of B bytes among W ranks: 2 (W-1)/W B/bandwidth + 2 (W-1) latency (Patarasuk and Yuan 2009).
With several nodes of G GPUs, the message is first reduced and scattered inside each node, then reduced between nodes by
G parallel rings that share the node's network, then gathered inside. Not modelled: stragglers, loading of data, other
users of the network, trees instead of rings (with them nccl's latency grows with the logarithm of W).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

BACKWARD_SHARE = 2 / 3  # of a step's compute: backward is twice the work of forward


@dataclass(frozen=True)
class Link:
    """A connection between ranks: bytes per second in one direction, and seconds per hop."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of `gpus_per_node` GPUs: `inside` links two GPUs, `between` is the network of a whole node."""

    name: str
    inside: Link
    between: Link
    gpus_per_node: int = 8

    def all_reduce_s(self, num_bytes: float, world_size: int) -> float:
        """Return the seconds of one all-reduce; 0 for one rank.

        >>> one = Cluster("slow", Link(1e9, 0), Link(1e9, 0))
        >>> one.all_reduce_s(1e9, 2), one.all_reduce_s(1e9, 4)
        (1.0, 1.5)
        """
        inside = min(world_size, self.gpus_per_node)
        nodes = math.ceil(world_size / self.gpus_per_node)
        return _ring_s(num_bytes, inside, self.inside) + _ring_s(num_bytes, nodes, self.between)


def _ring_s(num_bytes: float, world_size: int, link: Link) -> float:
    hops = 2 * (world_size - 1)
    return hops / world_size * num_bytes / link.bytes_per_s + hops * link.latency_s


# 80% of the vendors' figures, in one direction. NVLink 4: 450 GB/s; PCIe 4 x16: 32; InfiniBand NDR: 50 per card, with
# eight cards per node, or one; 10 Gigabit Ethernet: one card per node.
NVLINK, PCIE = Link(0.8 * 450e9, 3e-6), Link(0.8 * 32e9, 6e-6)
CLUSTERS = [
    Cluster("NVLink + InfiniBand", NVLINK, Link(0.8 * 8 * 50e9, 6e-6)),
    Cluster("PCIe + InfiniBand", PCIE, Link(0.8 * 50e9, 6e-6)),
    Cluster("PCIe + 10 GbE", PCIE, Link(0.8 * 1.25e9, 30e-6)),
]


@dataclass(frozen=True)
class Training:
    """The work of a rank between two optimizer steps."""

    num_parameters: float
    compute_s: float  # forward and backward of one pass on one rank
    bucket_bytes: float = 25 * 2**20
    accumulation_steps: int = 1
    bytes_per_parameter: float = 4.0  # 2 with bf16 compression
    overlaps: bool = True
    backward_s: Optional[float] = None  # of one pass; default: BACKWARD_SHARE of `compute_s`

    def step_s(self, world_size: int, cluster: Cluster) -> float:
        """Return the seconds of a step: the passes, plus the part of the reductions that backward does not hide.

        Buckets become ready one after the other during the last backward pass, and are sent one at a time.

        >>> Training(1e6, 0.3).step_s(1, CLUSTERS[0])
        0.3
        """
        alone = self.accumulation_steps * self.compute_s
        total = self.num_parameters * self.bytes_per_parameter
        # `bucket_bytes` is the size of gradients before compression.
        count = max(1, math.ceil(self.num_parameters * 4 / self.bucket_bytes))
        each_s = cluster.all_reduce_s(total / count, world_size)
        backward_s = BACKWARD_SHARE * self.compute_s if self.backward_s is None else self.backward_s
        sent = 0.0
        for number in range(1, count + 1):
            ready = alone - backward_s * (1 - number / count) if self.overlaps else alone
            sent = max(sent, ready) + each_s
        return max(alone, sent)

    def efficiency(self, world_size: int, cluster: Cluster) -> float:
        """Return the share of compute in a step; 1 is perfect scaling at a constant batch per rank."""
        return self.accumulation_steps * self.compute_s / self.step_s(world_size, cluster)
