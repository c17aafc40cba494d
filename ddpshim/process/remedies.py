"""Says what a user can do: in a trainer that calls ddpshim, and in a program of which every rank runs the whole."""

from __future__ import annotations

from ddpshim.process.job import current

_SAME = (
    "Every rank runs the whole program, so a decision in it differed between ranks: by a file, a variable or a "
    "generator that ddpshim does not see, or by the rank: `loss.item()` belongs before `if world.is_main`, not into it "
    "(`python -m ddpshim docs run`)"
)

# By name: the text for an edited trainer, and for a program that is unedited, or has setup(batch="global").
REMEDIES = {
    "same passes": (
        "Let every rank make the same backward passes and call the same collectives; work of one rank alone belongs in "
        "World.run_on_main",
        _SAME,
    ),
    "same end": (
        "Give every rank the same number of batches (make_loader does), and let no rank leave a loop, or the program, "
        "early",
        _SAME,
    ),
    "same calls": ("Let every rank make the same calls of World, make_loader and the like, in the same order", _SAME),
    "same steps": (
        "Iterate over make_loader's loaders in the same way on every rank; skip no batch, step or network on one rank "
        "alone; step schedulers with numbers of all ranks. To look at data on one rank, use a separate DataLoader",
        _SAME,
    ),
    "same weights": (
        "pass seed= to ddpshim.setup(), build every network before the first wrap_parallel, or make the copies "
        "afterwards",
        "they were drawn from a generator that ddpshim does not see; seed it",
    ),
    "same state": (
        "Build, load and change networks and optimizers equally on every rank, step schedulers with numbers of all "
        "ranks, and let every gradient come from loss.backward()",
        _SAME,
    ),
    "a batch": ("no batch from make_loader", "a batch"),
    "wrap": ("wrap_parallel", "the first training step"),
    "device": ("ddpshim.world().device", "device"),
    "gpu": ("Use ddpshim.world().device instead of a fixed 'cuda:0'", "Use 'cuda' instead of a fixed number"),
    "buffer": (
        "is updated from each rank's own samples, but only the main rank's is kept, which saw one share of the batch. "
        "Update it from all ranks' samples (ddpshim.world().mean, .all_gather)",
        "differs between ranks, though each computed it from whole batches: it was drawn or rounded differently. All "
        "ranks get the main rank's. Seed the generator that it is drawn from",
    ),
    "autocast": (
        "The module that wrap_parallel returns uses it in its forward in training mode; if a loss calls other methods, "
        "compute it in `with ddpshim.world().autocast():`. Leave the option out if the program has its own autocast",
        "A network uses it in its forward in training mode, not in other methods. Leave the option out, and compute "
        "the loss under torch.autocast",
    ),
}


def remedy(name: str) -> str:
    """Return the text `name` for the mode of the current job. Local."""
    return REMEDIES[name][current().holds_whole_batches]
