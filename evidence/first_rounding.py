"""Counts processes whose first tanh is rounded differently from the second: `python -m evidence.first_rounding`.

Intel's MKL selects its implementation at the first call of such a function, and on some machines that call does not
wait for the selection. Seen with torch 2.13 on two virtual cores; never without MKL. Therefore `ddpshim.setup` calls
such a function itself.
"""

from __future__ import annotations

import argparse
import os

import torch

from ddpshim.job.group import settle_rounding


def odd_processes(num_processes: int, settled: bool) -> int:
    """Return how many of `num_processes` forked processes compute two different results of one tanh. Local."""
    asked = torch.randn(100, 35, generator=torch.Generator().manual_seed(0))
    num_odd = 0
    for _ in range(num_processes):
        pid = os.fork()
        if not pid:
            if settled:
                settle_rounding()
            os._exit(0 if torch.equal(torch.tanh(asked), torch.tanh(asked)) else 1)
        num_odd += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return num_odd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=500, metavar="N", help="of each kind (500)")
    num = parser.parse_args().processes
    for settled in (False, True):
        print(f"{'after' if settled else 'without'} settle_rounding: {odd_processes(num, settled)} of {num} processes")


if __name__ == "__main__":
    main()
