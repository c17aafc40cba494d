"""An iterable dataset (a stream, shards on a disk) split over ranks and data workers: each item decoded once.

    python examples/iterable.py                              # one process with two workers
    python -m ddpshim run --nproc 2 examples/iterable.py     # or torchrun; and --nproc 1, 3

Expect: in each epoch all 96 items, each decoded by one worker of one rank, equally many on each rank, in a new order.
Without `shard_iterable`, each worker of each rank would yield all of them.
"""

import os

import torch
from torch.utils.data import DataLoader, IterableDataset

import ddpshim

NUM_ITEMS, BATCH_SIZE, NUM_WORKERS = 96, 8, 2


class Records(IterableDataset):
    """Replace this by your stream: it yields what is cheap to read (a path, raw bytes), shuffled in each pass."""

    def __iter__(self):
        yield from torch.randperm(NUM_ITEMS).tolist()


def decode(record):
    """Replace this by expensive work (decompressing, cropping): done only for this worker's share."""
    return {"record": record, "obs": torch.full((4,), float(record)), "process": os.getpid()}


def main():
    world = ddpshim.setup(seed=1)
    share = ddpshim.shard_iterable(Records(), decode)
    loader = DataLoader(share, batch_size=BATCH_SIZE // world.world_size, num_workers=NUM_WORKERS)
    for epoch in range(2):
        share.set_epoch(epoch)  # also reaches the loader's workers
        batches = list(loader)
        records = torch.cat([batch["record"] for batch in batches]).tolist()
        processes = torch.cat([batch["process"] for batch in batches]).tolist()
        by_worker = [processes.count(process) for process in sorted(set(processes))]
        seen = world.gather((records, by_worker))
        if world.is_main:
            together = [record for records, _ in seen for record in records]
            once = sorted(together) == list(range(NUM_ITEMS))
            print(f"epoch {epoch}: {len(together)} items of {NUM_ITEMS}, {'each once' if once else 'NOT each once'}")
            for rank, (records, by_worker) in enumerate(seen):
                print(f"  rank {rank}: {len(records)} items, by worker {by_worker}, the first: {records[:6]}")
    ddpshim.cleanup()


if __name__ == "__main__":
    main()
