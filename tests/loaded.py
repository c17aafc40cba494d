"""Lists the files of ddpshim that the smallest trainer loads, and their lines: `python -m tests.loaded`.

It runs examples/train_after.py as a launched world of one.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import tempfile
from pathlib import Path

from tests.ranks import free_port

ROOT = Path(__file__).resolve().parent.parent


def loaded() -> dict[str, int]:
    """Return the number of lines of each module of ddpshim that this process has loaded. Local."""
    files = {name: getattr(module, "__file__", None) for name, module in sorted(sys.modules.items())}
    ours = {name: file for name, file in files.items() if name.partition(".")[0] == "ddpshim" and file is not None}
    return {name: len(Path(file).read_text(encoding="utf-8").splitlines()) for name, file in ours.items()}


def main() -> None:
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)  # it writes policy.pth
        runpy.run_path(str(ROOT / "examples" / "train_after.py"), run_name="__main__")
        os.chdir(ROOT)
    found = loaded()
    for name, lines in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{lines:5d}  {name}")
    print(f"{sum(found.values()):5d}  lines in {len(found)} modules")


if __name__ == "__main__":
    main()
