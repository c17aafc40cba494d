"""Converts scripts for nn.DataParallel while they run."""
