"""Checks that a trainer is the same experiment on several ranks as in one process: `python -m ddpshim check`.

The trainer runs in one process, again in one process with rounding errors added to each gradient, and on the ranks.
Each process records the inputs and outputs of every step; the records are compared afterwards.
"""
