"""Defines the doctor's codes, and a finding with its place, message and fix."""

from __future__ import annotations

import re
from dataclasses import dataclass

# error: the run hangs, or trains or evaluates something else than intended. warning: files, time or numbers are lost
# or damaged. note: possibly intended, or could not be checked. migration: an error or warning that will appear with the
# second rank, in a program that is not distributed yet.
SEVERITIES = ("error", "warning", "migration", "note")


@dataclass(frozen=True)
class Code:
    """One hazard. `fix` is an imperative; `in_single` says whether it is also reported for one-process trainers."""

    code: str
    name: str
    severity: str
    fix: str
    in_single: bool


# Code, name, severity, and "in-single" if it is also reported for one-process trainers; below, the fix.
_TABLE = """
DDP001 unreadable note in-single
    Repair the file, or leave it out with --exclude.
# Training
DDP101 dataparallel-left error in-single
    Take DataParallel out and wrap the network once, after its checkpoint is loaded: ddpshim.wrap_parallel(network).
DDP102 trains-through-module error in-single
    Call the wrapper itself, model(batch), and let forward do this work, or wrap with ddpshim.wrap_parallel.
DDP103 wrapped-non-module error
    Wrap each network that the object holds, for example algo.nets[key] = wrap_parallel(algo.nets[key]).
DDP104 method-on-wrapped error
    Reach it through forward while training, or wrap with ddpshim.wrap_parallel, which routes every method.
DDP105 ema-of-wrapped error in-single
    Make and update the average from the unwrapped network: EMA(model.module).
DDP106 optimizer-order error
    Move and wrap the network first, then make the optimizer, once, from the parameters that will be trained.
DDP107 never-wrapped error
    Wrap the network: DistributedDataParallel(network), or ddpshim.wrap_parallel(network).
DDP108 masked-mean error in-single
    Divide by the count of all ranks, world.mean_over(total, count), or compute over all: ddpshim.whole_batch(loss).
DDP109 compares-samples error in-single
    Compute it over the samples of all ranks: ddpshim.whole_batch(loss), or on world.all_gather(features).
DDP110 backward-alone-in-no-sync warning
    Put the forward pass inside as well: with model.no_sync(): model(batch).mean().backward().
DDP111 average-walks-modules warning in-single
    Pair parameters by their order, and copy buffers: zip(average.parameters(), network.parameters()).
# Data
DDP201 sampler-lost error
    Keep the order that was asked for and split it over the ranks: ddpshim.make_loader(dataset, sampler=sampler).
DDP202 shuffle-from-sampler error
    Tell the distributed sampler to shuffle: DistributedSampler(dataset, shuffle=True), or use ddpshim.make_loader.
DDP203 no-set-epoch error
    Call sampler.set_epoch(epoch) at the top of the epoch loop, or use ddpshim.make_loader, which advances itself.
DDP204 loader-without-share error in-single
    Give the loader a DistributedSampler, or make it with ddpshim.make_loader.
DDP205 iterable-unsharded error in-single
    Yield every world_size-th sample from rank on (and split that over get_worker_info()), or use
    ddpshim.make_loader.
DDP206 batch-per-rank note
    Divide the global batch, batch_size // world_size, or name it batch_size_per_rank and scale the learning rate.
DDP207 schedule-arithmetic warning in-single
    Count optimizer steps: len(loader) of the sharded loader, not the number of samples.
# Randomness
DDP301 one-seed warning in-single
    Build the network with the shared seed, then seed again with a hash of seed and rank, as
    numpy.random.SeedSequence([seed, rank]).generate_state(1)[0]; ddpshim.setup(seed=...) does both.
DDP302 reseed-each-epoch error in-single
    Give the order a generator of its own: torch.Generator().manual_seed(seed + epoch).
DDP303 seed-of-a-node error
    Take the global rank in place of the local one.
DDP304 seed-plus-rank note
    Hash both numbers: numpy.random.SeedSequence([seed, rank]).generate_state(1)[0].
# Files
DDP401 every-rank-writes warning in-single
    Write on the main rank only: if rank == 0.
DDP402 every-rank-prompts error in-single
    Ask before the launch, by an argument; ranks have no terminal.
DDP403 every-rank-logs warning in-single
    Make the logger on the main rank only: if rank == 0.
DDP404 every-rank-deletes error in-single
    Delete on the main rank only, then let all wait: if rank == 0: ...; dist.barrier().
DDP405 path-differs-by-rank error in-single
    Decide the name on the main rank and send it: dist.broadcast_object_list([name]).
# Control
DDP501 bound-on-rank-0 error
    Bind the name on all ranks before the test, or broadcast the value.
DDP502 collective-under-rank-test error
    Take the collective out of the test, so that every rank reaches it.
DDP503 swallowed-exception error in-single
    Print and raise again, so that the process ends with an exit code that the launcher sees.
DDP504 wrapped-evaluation-on-one-rank error
    Evaluate the unwrapped network there: model.module.
DDP505 unreduced-validation warning
    Reduce the sum and the count over the ranks before the mean is compared or logged: dist.all_reduce.
DDP506 decides-alone error
    Bring the ranks together before the test: dist.all_reduce the number, or broadcast the decision.
# Devices
DDP601 hard-coded-device error in-single
    Use the device of this rank: torch.device('cuda', local_rank), after torch.cuda.set_device(local_rank).
DDP602 device-at-import error in-single
    Move this into a function that runs after torch.cuda.set_device(local_rank).
DDP603 local-rank-as-global error
    Use the global rank: dist.get_rank().
DDP604 launcher-variable-overwritten error in-single
    Delete the line: torchrun sets the variable.
# Checkpoints
DDP701 wrapped-keys note in-single
    Save the bare network: model.module.state_dict().
DDP702 replace-module note in-single
    Strip the prefix only: key[len("module."):] if key.startswith("module.") else key.
"""
_ROW = re.compile(r"^(DDP\d+) (\S+) (\w+)( in-single)?\n((?: {4}.*\n)+)", re.MULTILINE)
CODES = {
    code: Code(code, name, severity, " ".join(fix.split()), bool(in_single))
    for code, name, severity, in_single, fix in _ROW.findall(_TABLE)
}


@dataclass(frozen=True)
class Finding:
    """One hazard at one place. Lines and columns count from 1; `fixable` if `--fix` has an edit for it."""

    path: str
    line: int
    column: int
    end_line: int
    code: str
    name: str
    severity: str
    message: str
    fix: str
    fixable: bool

    def as_text(self) -> str:
        return f"{self.path}:{self.line}:{self.column} {self.code} {self.severity} {self.message}\n    fix: {self.fix}"
