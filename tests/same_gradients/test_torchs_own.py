"""torch's own tests of DistributedDataParallel pass with `wrap_parallel` in its place; evidence/ runs them all."""

from __future__ import annotations

import importlib.util

import pytest

from evidence import torch_ddp_tests

QUICK = [
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_comm_hook_logging",
    "test_ddp_forward_backward_hook",
    "test_ddp_namedtuple",
    "test_ddp_returns_tensor_with_no_grad",
]


@pytest.mark.ranks
@pytest.mark.skipif(importlib.util.find_spec("torch.testing._internal") is None, reason="torch without its tests")
@pytest.mark.parametrize("name", QUICK)
def test_wrap_parallel_in_ddps_place(name: str) -> None:
    if name not in torch_ddp_tests.names():
        pytest.skip("this torch has no such test")
    assert torch_ddp_tests.outcome(name, is_wrapped=True) == ""
