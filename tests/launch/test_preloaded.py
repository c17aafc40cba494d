"""The process that the tests' interpreters are forked from outlives those who ask it and are killed."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.preloaded import environment, preloaded, start_afresh

HEAD_BYTES = 8


@pytest.mark.parametrize("num_bytes", [0, HEAD_BYTES + 5, None], ids=["nothing", "a part", "all"])
def test_who_is_killed_while_it_asks_takes_nobody_along(tmp_path: Path, num_bytes: int | None) -> None:
    request = {"argv": ["-c", "import time; time.sleep(600)"], "environ": {}, "folder": str(tmp_path), "files": []}
    message = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(preloaded().socket)
        asking.sendall((len(message).to_bytes(HEAD_BYTES, "little") + message)[:num_bytes])
    code, said = start_afresh(["-c", "import sys; print('forked', sys.argv)", "x"], environment(), tmp_path, 60)
    assert (code, said) == (0, "forked ['-c', 'x']\n")
