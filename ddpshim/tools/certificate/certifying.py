"""Implements `python -m ddpshim run --certify FILE`."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from ddpshim.errors import CertificateError
from ddpshim.launch.runner import Launch, nodes_of_scheduler, run
from ddpshim.tools.certificate import document
from ddpshim.tools.certificate.verifying import set_up

_EXACT, _SAVE_EVERY = "DDPSHIM_EXACT", "DDPSHIM_CHECKPOINT_EVERY_N_STEPS"
_MARKS_OF_A_STRETCH = 5


def certify(path: Path, every: int, job: Launch) -> int:
    """Run `job` with the option exact (default: a virtual rank for each rank), and certify it in `path`.

    A certificate of a start that did not end is continued if this start resumes from one of its checkpoints.

    Raises CertificateError, before anything is started, if `path` certifies a run that ended, or cannot be written.
    """
    path = Path(os.path.abspath(path.expanduser()))
    found = document.read(path) if os.path.lexists(path) else None
    if found is not None and found["is_complete"]:
        raise CertificateError(
            f"{path} certifies a run that has ended; it would have been overwritten, and nothing was started. Name "
            "another file, or move it away with its folder of checkpoints."
        )
    if found is None and document.folder_of(path).exists():
        raise CertificateError(
            f"{document.folder_of(path)} holds checkpoints of another certificate; this one would name them as its "
            "own, and nothing was started. Move the folder away, or name another file."
        )
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise CertificateError(f"{path.parent} is not a folder that can be written to; nothing was started. Make it.")
    seed = secrets.randbits(31)
    if found is not None:  # this start may continue it
        every, seed = found["every"], found["seed"]
        os.environ[_EXACT] = str(found["exact"])
    if not os.environ.get(_EXACT):
        if not job.nproc.isdigit():
            raise CertificateError(
                f"--certify with --nproc {job.nproc}: the number of virtual ranks would follow the machine, and others "
                "could not repeat the run. Give --nproc a number, or set DDPSHIM_EXACT."
            )
        job = nodes_of_scheduler(job, os.environ)
        os.environ[_EXACT] = str(int(job.nproc) * (job.nnodes or 1))
    os.environ.setdefault(_SAVE_EVERY, str(_MARKS_OF_A_STRETCH * every))
    with tempfile.TemporaryDirectory(prefix="ddpshim-certify-") as name:
        set_up(Path(name), path, every, seed)
        return run(job)
