"""Runs ddpshim's portable parts without the modules and functions that Windows lacks, and prints the results as JSON.

tests/tools/test_command_line.py starts it in its own folder. torch is imported first: on Windows it uses other code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.utils.data import TensorDataset

MODULES = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "posix", "syslog", "_posixshmem")
SIGNALS = ("ALRM", "CHLD", "CONT", "HUP", "KILL", "PIPE", "QUIT", "STOP", "TSTP", "USR1", "USR2")
IN_SIGNAL = ("alarm", "pthread_kill", "pthread_sigmask", "setitimer", "siginterrupt", "sigwait")
IN_OS = """
    fork forkpty register_at_fork setsid getsid killpg getpgid setpgid getuid geteuid getgid getegid uname nice
    sched_getaffinity sched_setaffinity mkfifo memfd_create pipe2 getloadavg sysconf chown fchdir pread pwrite
    posix_fallocate getxattr listxattr eventfd fdatasync O_NOFOLLOW O_DIRECTORY O_CLOEXEC O_NONBLOCK
"""
PATCH = [["patch", *words, "--target", "tree"] for words in (["check"], ["apply"], ["status"], ["revert"])]
WORK = [["example"], ["report", "recorded", "--markdown"]]
START_RANKS = [["run", "train.py"], ["check", "train.py"], ["selftest"]]


def take_away() -> None:
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for owner, names in ((signal, IN_SIGNAL), (signal, [f"SIG{name}" for name in SIGNALS]), (os, IN_OS.split())):
        for name in names:
            vars(owner).pop(name, None)
    for owner, name in ((os, "stat"), (os, "open"), (os, "readlink"), (os, "listdir"), (os, "scandir"), (io, "open")):
        setattr(owner, name, _without_proc(getattr(owner, name)))


def _without_proc(whole: Callable[..., Any]) -> Callable[..., Any]:
    def less(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return whole(path, *args, **kwargs)

    return less


def train() -> list[float]:
    import ddpshim
    from ddpshim import checkpoint

    ddpshim.setup(seed=1)
    policy = ddpshim.wrap_parallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    data = TensorDataset(torch.randn(8, 2), torch.ones(8, 1))
    loader = ddpshim.make_loader(data, batch_size=4, shuffle=True)
    losses = []
    with ddpshim.record("recorded"):
        progress = ddpshim.Resumable("progress", {"policy": policy, "optimizer": optimizer})
        for epoch in range(2):
            for x, y in progress.steps(loader, epoch):
                loss = (policy(x) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        progress.finish()
    checkpoint.save(policy.state_dict(), "policy.pth")
    checkpoint.save_in_background({"large": torch.zeros(10_000_000)}, "large.pth")
    checkpoint.flush()
    ddpshim.cleanup()
    return losses


def tried(call: Callable[[], Any]) -> list[Any]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            result = call()
        except SystemExit as error:
            result = error.code
        except Exception:
            result = traceback.format_exc()
    return [result, out.getvalue(), err.getvalue()]


def main() -> None:
    release = importlib.util.find_spec("robomimic")
    if release is not None:
        shutil.copytree(str(release.submodule_search_locations[0]), "tree/robomimic")  # type: ignore[index]
    take_away()
    import ddpshim
    import ddpshim.__main__ as command_line

    answers = {"import": tried(lambda: len([getattr(ddpshim, name) for name in ddpshim.__all__]))}
    answers["train"] = tried(train)
    answers["share"] = tried(lambda: ddpshim.shared_arrays({}, lambda arrays, part, num: None))
    for argv in [*WORK, *(PATCH if release is not None else []), *START_RANKS]:
        answers[" ".join(argv)] = tried(lambda argv=argv: command_line.main(argv))  # type: ignore[misc]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
