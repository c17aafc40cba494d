"""Put `import ddpshim.auto` first in a program, and any launcher starts it as `python -m ddpshim run` does, unedited.

In a rank of torchrun, srun or mpirun this import starts the program again under `ddpshim.launch.rank`. In one process,
in a child of multiprocessing and under `run` itself it does nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from ddpshim.errors import LaunchError


def _start_as_a_rank() -> None:
    if "ddpshim.launch.rank" in sys.modules or multiprocessing.parent_process() is not None:
        return
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a spawned child, before it has a parent
        return
    from ddpshim.trainers.unedited.program import Start, is_launched

    if not is_launched():
        return
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) is None:
        raise LaunchError(
            "import ddpshim.auto in several processes, in a program without a file: no rank could start it again, and "
            "each would train a model of its own. Put the program into a file."
        )
    spec = getattr(main, "__spec__", None)
    program = [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    Start([*program, *sys.argv[1:]]).again(os.environ)


_start_as_a_rank()
