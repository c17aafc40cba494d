"""What importing ddpshim loads."""

from __future__ import annotations

import subprocess
import sys

from tests.preloaded_commands import patience

CODE = """
import sys, torch
before = set(sys.modules)
import ddpshim
print(*sorted(set(sys.modules) - before))
for name in ddpshim.__all__:
    getattr(ddpshim, name)
print(*sorted(set(sys.modules) - before))
"""


def test_no_public_name_loads_dynamo_fsdp_or_anything_foreign() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=patience(240), check=True
    )
    alone, all_names = (line.split() for line in ran.stdout.splitlines())
    assert alone == ["ddpshim", "ddpshim.errors", "ddpshim.lazy", "ddpshim.version"]
    assert "ddpshim.model.parallel" in all_names
    assert [name for name in all_names if name.startswith(("torch._dynamo", "torch.distributed.fsdp"))] == []
    if sys.version_info >= (3, 10):  # before, Python does not say what is its own
        ours = {"ddpshim", "packaging", "torch"}
        assert {name.partition(".")[0] for name in all_names} <= {*ours, *sys.stdlib_module_names}
