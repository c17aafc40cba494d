"""Writes evidence/gpus.md from files of `selftest --gpu`: `python -m evidence.gpu_page FILE... --write PAGE`.

Without a file, the page says that no GPU was tested. The page's files are kept in evidence/gpus/.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpshim.tools.selftest.gpu import CHECKS, FAILED, NOT_RUN, PASSED, public

ROOT = Path(__file__).resolve().parent.parent
PAGE, FILES = ROOT / "evidence" / "gpus.md", ROOT / "evidence" / "gpus"
MEASURED = ("all-reduce", "links", "memory", "overlap", "exception", "stop", "kill", "robomimic")

NOTHING = """**No real GPU has been tested yet.** Except for rendering, all checks below run on two simulated GPUs in
the tests (robomimic: by hand). That tests the script and the order of calls, but not real nccl, kernels, times or
memory. Until this page has a file of a real machine, statements about GPUs come from torch's sources.
"""

HEAD = """# Test your GPUs

{state}
## Run the test

```
python -m ddpshim selftest --gpu --write gpus.json            # about ten minutes; nothing else on the GPUs
python -m ddpshim selftest --gpu --quick --write gpus.json    # about two: without robomimic, fewer rounds
```

Then **send the file** in an issue, or in a pull request that adds it to `evidence/gpus/`, especially if a check fails.
It holds the kind and number of GPUs, the versions of torch, CUDA, NCCL and the driver, and the result of each check. It
holds no machine names, user names or folders; it is short, so read it before you send it.

`python -m evidence.gpu_page evidence/gpus/*.json --write evidence/gpus.md` writes this page.

The exit code is 0 if no check failed. A check that cannot run prints "not run" with the reason and does not count as
passed; with one rank these are all checks that compare ranks. More ranks than GPUs (`--nproc 3` with one) share them
through gloo: then what needs a GPU for each rank is not run. Without a GPU the command exits at once. After a failed
check the others run on new ranks. A failure names its rank and device.

## What is checked
"""

LIMITS = """## How numbers are compared

- Weights are compared with one process that trains with plain torch, the same seed and the global batch. The difference
  is divided by the largest change of a weight. float64: below 1e-9. float32: below 1e-3, because kernels add parts of a
  batch in another order; TensorFloat-32 is off (NVIDIA_TF32_OVERRIDE=0), cuDNN is deterministic. An unreduced gradient
  gives 0.02 (RNN).
- Waits for the GPU: six steps under `torch.cuda.set_sync_debug_mode("error")`, after sixteen for warm-up. Within four
  steps of 1, 2, 10, 100 and every 1000 guards compare weights, which waits once; logging a number waits too.
- Communicators: GPU memory outside torch's allocator, before and after each of five networks. Other programs on the GPU
  disturb it.
- Step time relative to plain DDP: forward and backward, alternating; median and quartiles of the ratios. It fails if
  the lower quartile is above 1.1.
- Failures: a job whose rank 1 raises, allocates too much, stops (SIGSTOP) and is killed, each after a restart. It
  fails if rank 1 is not named in time (20, 20, 60 and 60 seconds), or if other ranks still run after 90 seconds.
- Rendering, if MuJoCo is installed: the GPU whose memory grows while a picture is rendered through EGL. Never run.
"""


class Refused(Exception):
    """A file cannot be used for the page."""


def read(path: Path) -> dict[str, Any]:
    """Return the content of one machine's file; raise Refused if it has no real GPU, or contains private names."""
    try:
        found = json.loads(path.read_text())
        versions, checks, schema = found["versions"], found["checks"], found["schema"]
        texts = [found["date"], *versions.values(), *found["GPUs"].values(), *(check["detail"] for check in checks)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(
            f"{path.name} is no file of `selftest --gpu --write` ({type(error).__name__}: {error})"
        ) from error
    if schema != 1:
        raise Refused(f"{path.name} has schema {schema}, and this reads 1: write it with this version of ddpshim")
    if not versions.get("CUDA") and not versions.get("ROCm"):
        raise Refused(f"{path.name} is of a torch without CUDA: its GPUs are simulated, and prove nothing of real ones")
    named = [text for text in texts if public(text) != text]
    if named:
        raise Refused(f"{path.name} names a machine, a user or a folder: {named[0][:80]!r}. Take it out first")
    return dict(found)


def page(machines: Sequence[dict[str, Any]]) -> str:
    """Return the whole page, as Markdown."""
    state = NOTHING if not machines else "\n".join(_table(machines)) + "\n"
    parts = [HEAD.format(state=state), *_checks(), LIMITS]
    for number, machine in enumerate(machines, 1):
        parts += ["", f"## {number}. {_name(machine)}", "", *_details(machine)]
    return "\n".join(parts).rstrip() + "\n"


def _name(machine: dict[str, Any]) -> str:
    kinds = [description.partition(",")[0] for description in machine["GPUs"].values()]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def _table(machines: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "Each line is a machine that somebody tested, in the order in which files came.",
        "",
        "| machine | ranks | torch | CUDA | NCCL | driver | ddpshim | when | passed | failed | not run |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for number, machine in enumerate(machines, 1):
        has = machine["versions"]
        versions = [has.get(name) or "" for name in ("torch", "CUDA", "NCCL", "NVIDIA driver", "ddpshim")]
        versions[1] = versions[1] or f"ROCm {has.get('ROCm')}"
        outcomes = [check["outcome"] for check in machine["checks"]]
        counts = [str(outcomes.count(outcome)) for outcome in (PASSED, FAILED, NOT_RUN)]
        ended = "" if machine["is_complete"] else ", ended early"
        when = f"{machine['date']}{', quick' if machine['is_quick'] else ''}{ended}"
        shared = ", which share it through gloo" if machine["num_ranks"] > len(machine["GPUs"]) else ""
        row = [f"{number}. {_name(machine)}", f"{machine['num_ranks']}{shared}", *versions, when, *counts]
        lines.append(f"| {' | '.join(map(_cell, row))} |")
    return lines


def _checks() -> list[str]:
    """Return the table of checks."""
    shown = [check for check in CHECKS if check.name != "rendezvous"]
    lines = ["| check | what it shows if it passes | ranks |", "|---|---|---|"]
    for check in shown:
        quick = "" if check.is_quick else " (not with --quick)"
        own = ", a GPU each" if check.needs_own else ""
        lines.append(f"| {check.name} | {check.proves}{quick} | {check.num_ranks}{own} |")
    return lines


def _details(machine: dict[str, Any]) -> list[str]:
    """Return the table of checks that failed, were not run, or measured something."""
    lines = ["| check | outcome | seconds | found |", "|---|---|---|---|"]
    for check in machine["checks"]:
        if check["outcome"] != PASSED or check["name"] in MEASURED:
            culprit = "" if check["rank"] is None else f"rank {check['rank']}, {check['device']}: "
            found = f"{culprit}{check['detail']}".strip().splitlines() or [""]
            said = found[0] if len(found) == 1 else f"{found[0]} ... {found[-1]}"
            lines.append(f"| {check['name']} | {check['outcome']} | {check['seconds']:.1f} | {_cell(said)} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(argv: Sequence[str]) -> int:
    """Write or print the page; return 1 if a file was refused."""
    parser = argparse.ArgumentParser(prog="python -m evidence.gpu_page", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    arguments = parser.parse_args(argv)
    try:
        text = page([read(path) for path in arguments.files])
    except Refused as refused:
        print(f"{refused}; nothing was written.", file=sys.stderr)
        return 1
    if arguments.write is None:
        print(text, end="")
    else:
        arguments.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
