"""Compares row tensors with wholes for torch's own sample inputs: `python -m evidence.rows_by_op_db 2 [operation ...]`.

Needs the package expecttest. About 600 operations, each as a function, method and in place, with the rows in each
dimension; it prints what differs, and which operations are never computed on rows.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests import row_cases
from tests.ranks import run_ranks

NUM_PER_LAUNCH = 60
MOST_CASES = 24  # for an operation and type
UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
OF_TWO_ROWS = {"squeeze", "normal"}  # a block of one row would lose its dimension, or draw in another order


def _info() -> list[Any]:
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if not op.name.startswith(("_refs", "ops."))]


def problems_of(op: Any, dtype: torch.dtype, most_cases: int) -> list[str]:
    """Return how an operation differs on row tensors (collective)."""
    needs_gradients = dtype is torch.float64 and op.supports_autograd
    torch.manual_seed(1)
    found, num_cases, num_ranks = [], 0, torch.distributed.get_world_size()
    try:
        samples = [*op.sample_inputs("cpu", dtype, requires_grad=needs_gradients)]
    except Exception as error:
        return [f"no samples: {error!r:.80}"]
    functions = {"": op.op, "method": op.method_variant, "in place": op.inplace_variant}
    for sample in samples:
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        for place in row_cases.variants((args, kwargs), num_ranks):
            for only_first in (False, True):
                for kind, function in functions.items():
                    num_cases += 1
                    if function is None or num_cases > most_cases:
                        continue
                    cut = row_cases.cutting(*place, only_first)
                    differs = row_cases.problem(
                        function, args, kwargs, cut, needs_gradients, only_first, op.name in UNINITIALISED, False
                    )
                    if differs:
                        shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in row_cases.flat(args)]
                        found.append(f"{kind} {differs} | rows {place} {only_first} of {shapes} {kwargs} {dtype}")
    return found


def compared(first: int, last: int, names: list[str], progress: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return (problems by operation, operations that are never on rows), of this part of torch's list (collective)."""
    from ddpshim.rows import blocks, calls, dimensions

    warnings.simplefilter("ignore")
    found: dict[str, list[str]] = {}
    never = []
    with calls.installed(), Path(f"{progress}{torch.distributed.get_rank()}").open("a") as file:
        for op in [op for op in _info() if not names or op.name in names][first:last]:
            file.write(f"{op.name} {op.variant_test_name}\n")
            file.flush()
            # Many samples have two or three rows. A block of one row has no layout, which is not compared here.
            blocks.LEAST_ROWS = dimensions.LEAST_ROWS = 2 if op.name in OF_TWO_ROWS else 1
            blocks.part_of.cache_clear()
            before = row_cases.num_on_rows()
            for dtype in (torch.float64, torch.int64, torch.bool, torch.complex128):
                if dtype in op.dtypes:
                    found.setdefault(op.name, []).extend(problems_of(op, dtype, MOST_CASES))
            if row_cases.num_on_rows() == before:
                never.append(op.name)
    return {name: all_ for name, all_ in found.items() if all_}, never


def main(num_ranks: int, names: list[str], progress: str = "/tmp/rows_by_op_db.") -> None:
    num = len([op for op in _info() if not names or op.name in names])
    all_never = []
    for first in range(0, num, NUM_PER_LAUNCH):
        try:
            results = run_ranks(compared, num_ranks, first, first + NUM_PER_LAUNCH, names, progress, timeout_s=400)
        except Exception as error:
            print(f"FAILED from {first}: {str(error)[-1500:]}", flush=True)
            for rank in range(num_ranks):
                print("  rank", rank, Path(f"{progress}{rank}").read_text().splitlines()[-1], flush=True)
            continue
        for rank, (found, _) in enumerate(results):
            for name, differs in found.items():
                print(f"{name} on rank {rank}: {len(differs)}: " + "\n    ".join(differs[:3]), flush=True)
        all_never += results[0][1]
    print("never on rows:", " ".join(sorted(set(all_never))))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
