"""Certifies a run: `run --certify FILE` records what it was and did; `check --certificate FILE` repeats a part of it.

The option exact makes the bits independent of the number of ranks, so a part of a run on many ranks can be repeated,
and compared bit for bit, on few.
"""
