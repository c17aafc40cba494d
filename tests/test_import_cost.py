"""What importing ddpshim loads."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, torch
before = set(sys.modules)
import ddpshim
alone = {name.partition(".")[0] for name in set(sys.modules) - before}
for name in ddpshim.__all__:
    getattr(ddpshim, name)
print(sorted(alone))
print(*sorted(set(sys.modules) - before))
"""


def test_all_public_names_load_neither_dynamo_nor_fsdp_nor_anything_foreign() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True)
    alone, loaded = ran.stdout.splitlines()
    assert alone == "['ddpshim']"
    names = loaded.split()
    assert "ddpshim.parallel" in names
    assert [name for name in names if name.startswith(("torch._dynamo", "torch.distributed.fsdp"))] == []
    assert {name.partition(".")[0] for name in names} <= {"ddpshim", "torch", *sys.stdlib_module_names}
