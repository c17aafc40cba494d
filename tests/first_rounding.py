"""How often the first tanh of a process is rounded otherwise than its second: `python -m tests.first_rounding`.

Intel's MKL chooses how to round such functions when the first of them is called, and on some machines that call has
not waited for the choice. Seen with torch 2.13 on two virtual cores; without MKL there is nothing to see. It is why
`ddpshim.setup` calls one itself.
"""

from __future__ import annotations

import argparse
import os

import torch

from ddpshim.job.group import settle_rounding


def odd_processes(num_processes: int, settled: bool) -> int:
    """How many of so many forked processes give two answers to one question. Local."""
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
