"""Exports the functions that the patch sets of DROID's trainers call, beside those of `ddpshim.robomimic`."""

from ddpshim.droid.calls import Epochs, cuda, data_parallel, load_checkpoint, run_epoch, tokenize

__all__ = ["Epochs", "cuda", "data_parallel", "load_checkpoint", "run_epoch", "tokenize"]
