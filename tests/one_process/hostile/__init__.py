"""Programs for one process, each of which may find a way around row tensors.

`python -m tests.one_process.hostile OUT` (see runner.py). No program knows of ranks, and on any number of ranks each
must end as on one. Of batches of 16, 10 or 7 of 50 samples, ranks get unequal shares and sometimes no row.
"""

from tests.one_process.hostile import draws, files, hooks, layers, memory, processes, shapes, training  # noqa: F401
from tests.one_process.hostile.parts import PROGRAMS  # noqa: F401
