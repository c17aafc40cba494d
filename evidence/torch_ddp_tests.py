"""Runs torch's own tests of DistributedDataParallel on two CPU ranks, with `wrap_parallel` in its place.

    python -m evidence.torch_ddp_tests [--names test_a,test_b] [--write]

The tests are those of torch.testing._internal.distributed.distributed_test whose name contains "ddp" or
"DistributedDataParallel", rewritten for CPUs: `cuda()` becomes `cpu()`, `device_ids` become None, and decorators that
skip a test without GPUs are left out. DDP itself runs what fails with `wrap_parallel`; what it does not pass either,
for want of a GPU, is not counted. The check that each network is wrapped is off: some train one alone. `--write` writes
torch_ddp_tests.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.util
import marshal
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
import types
import unittest
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

from tests.preloaded_commands import patience

MODULE = "torch.testing._internal.distributed.distributed_test"
TABLE = Path(__file__).with_suffix(".md")
DEADLINE_S = 70
ON_GPU = re.compile("rank|gpu|device")  # what a test moves to its GPU is moved to
# Why a test fails with wrap_parallel that passes with DDP.
OWN_ERROR = "asks for the words of torch's error; ours names the parameter, in the pass in which it got no gradient"
COUNT = "counts torch's messages in a profile; wrap_parallel sends one more a pass, by which ranks tell what they used"
PRIVATE = "reads private names of torch's DDP from the wrapper"
REASONS = {
    "test_DistributedDataParallel": "goes on with a pickled copy as a DDP; a copy of what wrap_parallel returns is the "
    "bare network, which loads anywhere",
    "test_DistributedDataParallel_requires_grad": "expects an error for a network without trained parameters, which "
    "wrap_parallel leaves as it is",
    "test_ddp_ignore_params_arg": "not explained: with static_graph, torch's reducer finds a pass that has not ended",
    "test_ddp_create_graph": "backward(create_graph=True) on a share is refused, with the remedy",
    "test_ddp_native_mixed_precision_ignored_params": PRIVATE,
    "test_ddp_logging_data_cpu": "expects buckets of 25 MB; on CPUs wrap_parallel chooses smaller ones",
    "test_ddp_profiling_autograd_profiler": COUNT,
    "test_ddp_profiling_torch_profiler": COUNT,
    "test_ddp_unused_params_rebuild_buckets_exception": "expects an error for a parameter that no rank uses, which "
    "trains with wrap_parallel",
    "test_ddp_control_flow_same_across_ranks": OWN_ERROR,
    "test_ddp_control_flow_different_across_ranks": OWN_ERROR,
    "test_ddp_multiple_nested_unused_params_error": "expects an error for a parameter that no rank uses, which "
    "trains with wrap_parallel",
    "test_ddp_multiple_nested_unused_params_err_ignore_params": "the same",
    "test_detect_ddp_is_actually_static": PRIVATE,
    "test_ddp_remove_autograd_hooks": "repeats a backward pass after an exception in it, which is refused: other ranks "
    "wait for the first",
    "test_ddp_broadcast_buffers_deprecation_warning": "expects torch's warning about an option that wrap_parallel sets",
}


def is_of_ddp(name: str) -> bool:
    return name.startswith("test_") and ("ddp" in name.lower() or "DistributedDataParallel" in name)


class _OnCpu(ast.NodeTransformer):
    """Rewrites a test for CPUs, and calls `wrap` where it makes a DistributedDataParallel."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        kept = [one for one in node.decorator_list if ast.unparse(one).startswith(("with_dist_debug", "property"))]
        node.decorator_list = kept if is_of_ddp(node.name) else node.decorator_list
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        said = ast.unparse(node.func)
        if said.rpartition(".")[2] in ("DistributedDataParallel", "DDP") and "super" not in said:
            node.func = ast.Name("wrap", ast.Load())
        for keyword in node.keywords:
            if keyword.arg in ("device_ids", "output_device"):
                keyword.value = ast.Constant(None)
            elif keyword.arg in ("device", "map_location"):
                keyword.value = ast.Constant("cpu")
        if said.startswith(("torch.cuda.", "torch.accelerator.")):
            node = ast.parse("contextlib.nullcontext()", mode="eval").body  # type: ignore[assignment]
        elif said.endswith(".cuda"):
            node.func.attr, node.args = "cpu", []  # type: ignore[attr-defined]
        elif said == "torch.device" or (
            said.endswith(".to") and ON_GPU.search("".join(map(ast.unparse, node.args[:1])))
        ):
            node.args = [ast.Constant("cpu")]
        return node


def _source() -> str:
    """Return the file of torch's tests."""
    found = importlib.util.find_spec(MODULE)
    assert found is not None
    assert found.origin is not None
    return found.origin


@functools.cache
def _rewritten() -> bytes:
    """Return the code of torch's tests, rewritten."""
    tree = _OnCpu().visit(ast.parse(Path(_source()).read_text()))
    return marshal.dumps(compile(ast.fix_missing_locations(tree), _source(), "exec"))


def _cases(code: bytes, wrap: Callable[..., Any]) -> Any:
    """Return the module of torch's tests, with `wrap` in DDP's place."""
    module = sys.modules["rewritten"] = types.ModuleType("rewritten")  # tests pickle networks of this module
    vars(module).update(wrap=wrap, contextlib=contextlib, __file__=_source())
    exec(marshal.loads(code), vars(module))
    vars(module)["init_multigpu_helper"] = lambda size, backend: {rank: [rank] for rank in range(size)}
    return module


def _run(rank: int, name: str, is_wrapped: bool, folder: str, code: bytes) -> None:
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE="2",
        TEMP_DIR=folder,
        GLOO_SOCKET_IFNAME="lo",
        DDPSHIM_GUARD="0",
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
    )
    if importlib.util.find_spec("expecttest") is None:  # torch's tests of DDP use unittest's class only
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        vars(sys.modules["expecttest"])["TestCase"] = unittest.TestCase
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ddpshim

    torch.set_num_threads(1)

    def wrap(module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **given: Any) -> Any:
        if not is_wrapped:
            return DistributedDataParallel(module, device_ids, output_device, *args, **given)
        return ddpshim.wrap_parallel(module, sync_batchnorm=False, **given)

    try:
        store = dist.FileStore(f"{folder}/store", 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        timeout = timedelta(seconds=40)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
        if is_wrapped:
            ddpshim.setup(device="cpu")
        module = _cases(code, wrap)
        kind = type("Case", (module.DistributedTest._DistTestBase, module.TestDistBackend), {"rank": rank})
        case = kind(name)
        case.rank, case.file_name = rank, f"{folder}/file"
        case._barrier = lambda *_, **__: dist.barrier()
        module.Barrier.init = lambda: None
        getattr(case, name).__func__(case) if hasattr(getattr(case, name), "__func__") else getattr(case, name)()
        if is_wrapped:
            ddpshim.cleanup()
        why = ""
    except unittest.SkipTest as skip:
        why = f"skipped: {skip}"
    except BaseException:  # a test may exit
        why = traceback.format_exc(limit=-4)
    Path(folder, f"rank{rank}").write_text(why)
    os._exit(0)


def outcome(name: str, is_wrapped: bool) -> str:
    """Return why a test fails; empty if it passes on both ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["evidence.torch_ddp_tests", "torch._dynamo", "ddpshim.model.ddp", "ddpshim.checkpoint.resume"]
    )
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_run, args=(rank, name, is_wrapped, folder, _rewritten())) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(patience(DEADLINE_S))
            process.kill()
        files = [Path(folder, f"rank{rank}") for rank in range(2)]
        found = [file.read_text() if file.exists() else "a rank ended or hangs" for file in files]
    return next(filter(None, found), "")


def names() -> list[str]:
    return [
        node.name
        for node in ast.walk(ast.parse(Path(_source()).read_text()))
        if isinstance(node, ast.FunctionDef) and is_of_ddp(node.name)
    ]


def table(found: dict[str, str]) -> str:
    """Return the page of results; `found`: why each test that DDP passes fails, or an empty text."""
    num_passed = sum(not why for why in found.values())
    rows = [f"| {name} | {f'fails: {REASONS.get(name, why)}' if why else 'passes'} |" for name, why in found.items()]
    return "\n".join(
        [
            "# torch's own tests of DDP, with `wrap_parallel` in its place",
            "",
            f"Written by `python -m evidence.torch_ddp_tests --write`: {num_passed} of {len(found)} pass.",
            "",
            "| test | with wrap_parallel |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def main(chosen: Iterable[str], writes: bool) -> None:
    found: dict[str, str] = {}
    for name in chosen:
        why = outcome(name, True)
        if why and (plain := outcome(name, False)):
            print(f"{name}: DDP itself: {plain.strip().splitlines()[-1][:150]}", flush=True)
            continue
        found[name] = why.strip().splitlines()[-1][:200].replace("|", "/") if why else ""
        print(f"{name}: {why or 'passes'}", flush=True)
    print(f"{sum(not why for why in found.values())} of {len(found)}")
    if writes:
        TABLE.write_text(table(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", default="")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    main([name for name in given.names.split(",") if name] or names(), given.write)
