"""Measures the CPU time that `import ddpshim` adds to `import torch`, in new processes, in alternation.

"alone" is the import itself, which does not load torch; "all names" then uses every public name, which loads everything
that a training imports. Bytecode exists, as after `pip install`. The first call of `wrap_parallel` costs torch's own
time: the constructor of DistributedDataParallel imports torch._dynamo ("DDP").
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import Result, alternate, main, median_and_quartiles

ROOT = Path(__file__).resolve().parent.parent
NAMES = "for name in ddpshim.__all__: getattr(ddpshim, name)"
ARMS = {  # code that runs before, and code that is measured
    "alone": ("import torch", "import ddpshim"),
    "all names": ("import torch", f"import ddpshim\n{NAMES}"),
    "DDP": ("import ddpshim, torch\n" + NAMES, "import torch._dynamo"),
}
CLOCK = "import time\n{before}\nbegin = time.process_time()\n{measured}\nprint(time.process_time() - begin)"


def run(quick: bool = False) -> Iterator[Result]:
    """Yield the cost of the import, of all names, and of torch's own import for the first wrapper."""
    for arm in ARMS:
        seconds(arm)  # writes the bytecode, and brings the files into the system's cache
    found = alternate({arm: functools.partial(seconds, arm) for arm in ARMS}, 3 if quick else 15)
    for arm, what, target in (
        ("alone", "import ddpshim", 0.1),
        ("all names", "import ddpshim and every public name", 0.1),
        ("DDP", "import torch._dynamo, which torch's DDP does when it is first made", None),
    ):
        middle, quartiles = median_and_quartiles(found[arm])
        yield Result("import_cost", what, middle, "s of CPU", quartiles, at_most=target)


def seconds(arm: str) -> float:
    """Return the CPU time in a new process; other programs do not count."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPATH"] = str(ROOT)
    code = CLOCK.format(before=ARMS[arm][0], measured=ARMS[arm][1])
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    return float(ran.stdout)


if __name__ == "__main__":
    main(run, __doc__)
