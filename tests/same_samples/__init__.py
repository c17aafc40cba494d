"""Ranks train on the samples of one process, in its order."""
