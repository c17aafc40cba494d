"""Explains each rule: what is found, what it causes, what to do, and an example before and after the change."""

from __future__ import annotations

import re
from typing import NamedTuple


class Explanation(NamedTuple):
    """A rule. `severity`: error (hangs, or trains something else) or warning (numbers or files are lost or damaged).

    Rules with `in_single` also read one-process trainers: what will happen with the second rank.
    """

    code: str
    severity: str
    in_single: bool
    found: str
    caused: str
    do: str
    example: str

    def as_text(self) -> str:
        head = f"{self.code} {self.severity}: {self.found}\n  caused: {self.caused}\n  do: {self.do}\n"
        return head + "\n".join(f"    {line}" for line in self.example.splitlines())


# Code, severity, "single" if it is also reported for one-process trainers, what is found; what is caused; what to do.
_TEXT = """
DDP101 error single DataParallel is left in the trainer
Every rank splits its batch over the GPUs of all ranks.
Take DataParallel out and wrap the network once: ddpshim.wrap_parallel(network).
- model = nn.DataParallel(network)
+ model = ddpshim.wrap_parallel(network)

DDP102 error single the network is trained past its wrapper: .module(x), or a method that computes the loss
The wrapper does not see the forward pass: gradients are not averaged, and each rank trains its own model.
Call the wrapper itself, model(batch), or wrap with ddpshim.wrap_parallel, which routes methods.
  model = DistributedDataParallel(network)
  for batch in batches:
-     loss = model.module.compute_loss(batch)
+     loss = model(batch).mean()
      loss.backward()

DDP107 error multi the data is split or a process group started, but no network is wrapped
Gradients are not averaged: each rank trains its own model on its share of the data.
Wrap the network: ddpshim.wrap_parallel(network), or DistributedDataParallel(network).
- model = network
+ model = DistributedDataParallel(network)
  for batch in batches:
      model(batch).mean().backward()

DDP108 error single a loss is divided by a count of the rank's own samples: of a mask, of valid entries
Ranks have different counts, so that the mean over ranks is another loss than that of the whole batch.
Divide by the count of all ranks, world.mean_over(total, count), or use ddpshim.whole_batch(loss).
  for batch, mask in batches:
-     loss = (model(batch) * mask).sum() / mask.sum()
+     loss = world.mean_over((model(batch) * mask).sum(), mask.sum())
      loss.backward()

DDP109 error single a loss compares each sample with the others of its rank (a contrastive loss)
With more ranks each sample is compared with fewer others, which is another loss.
Compute it over the samples of all ranks: ddpshim.whole_batch(loss), or on world.all_gather(features).
  for a, b in batches:
-     scores = model(a) @ model(b).T
+     scores = model(a) @ world.all_gather(model(b)).T
      nn.functional.cross_entropy(scores, torch.arange(len(a))).backward()

DDP201 error multi a DistributedSampler replaces a sampler of the dataset's own
Its weights and its order are lost on several ranks: another distribution is trained.
Keep the order and split it: ddpshim.make_loader(dataset, sampler=sampler).
  sampler = WeightedRandomSampler(weights, len(weights))
- sampler = DistributedSampler(dataset)
- sampler.set_epoch(epoch)
- loader = DataLoader(dataset, sampler=sampler)
+ loader = ddpshim.make_loader(dataset, sampler=sampler)

DDP202 error multi the distributed sampler of the training data does not shuffle
The training data keeps one order in every epoch.
Let it shuffle: DistributedSampler(dataset, shuffle=True), or use ddpshim.make_loader.
- train_sampler = DistributedSampler(dataset, shuffle=False)
+ train_sampler = DistributedSampler(dataset, shuffle=True)
  train_loader = DataLoader(dataset, sampler=train_sampler)
  for epoch in range(epochs):
      train_sampler.set_epoch(epoch)

DDP203 error multi set_epoch is not called for the sampler of the training data, in each epoch and on every rank
Every epoch replays the order of the first.
Call sampler.set_epoch(epoch) at the top of the epoch loop, or use ddpshim.make_loader, which advances itself.
  sampler = DistributedSampler(dataset)
  loader = DataLoader(dataset, sampler=sampler)
  for epoch in range(epochs):
+     sampler.set_epoch(epoch)
      for batch in loader:
          model(batch).mean().backward()

DDP204 error single a DataLoader of training data is not split over the ranks (also: left beside ddpshim.make_loader)
Every rank reads all of the data: an epoch takes as long as on one, and its steps see repeated samples.
Make it with ddpshim.make_loader, or give it a DistributedSampler.
- loader = DataLoader(dataset, batch_size=64, shuffle=True)
+ loader = ddpshim.make_loader(dataset, batch_size=64, shuffle=True)

DDP301 warning single one seed for all ranks, and noise or dropout is drawn during the training
All ranks draw equal numbers: the batch of all ranks has less noise than one of one process.
Build the network with the shared seed, then seed again with seed and rank; ddpshim.setup(seed=...) does both.
- torch.manual_seed(1)
+ torch.manual_seed(hash((1, dist.get_rank())))
  for batch in batches:
      model(batch + torch.randn_like(batch)).mean().backward()

DDP401 warning single every rank writes, deletes or logs to the same path
Files are damaged, a rank fails where another was faster, or a run is logged once for each rank.
Do it on the main rank only: if world.is_main, or if rank == 0; where others need the result, let them wait.
- torch.save(network.state_dict(), "last.pt")
+ if dist.get_rank() == 0:
+     torch.save(network.state_dict(), "last.pt")

DDP502 error multi a collective that only some ranks reach: of torch, or of ddpshim's World (mean, barrier, ...)
Those ranks wait for the others until the timeout.
Take the collective out of the test, so that every rank reaches it.
- if dist.get_rank() == 0:
-     dist.all_reduce(loss)
+ dist.all_reduce(loss)
+ if dist.get_rank() == 0:
      print(loss)

DDP503 error single an exception of the training is caught and swallowed
The failing rank goes on or exits with 0, and the others wait for it.
Raise again, so that the process ends with an exit code that the launcher sees.
  try:
      model(batch).mean().backward()
- except Exception as error:
-     print(error)
+ except Exception as error:
+     raise RuntimeError("training failed") from error

DDP601 error single one GPU is named for every rank: cuda:0, or .cuda() before torch.cuda.set_device
All ranks share that GPU's memory and time, and NCCL refuses two ranks on one GPU.
Use the device of this rank: world.device, or torch.device("cuda", local_rank).
- batch = batch.to("cuda:0")
+ batch = batch.to(torch.device("cuda", local_rank))
"""
_ENTRY = re.compile(r"^(DDP\d+) (\w+) (single|multi) (.*)\n(.*)\n(.*)\n((?:.+\n)+)", re.MULTILINE)
EXPLANATIONS = {
    code: Explanation(code, severity, also == "single", *rest)
    for code, severity, also, *rest in map(re.Match.groups, _ENTRY.finditer(_TEXT))
}
