"""Runs the commands that a program starts on the main rank only; all ranks get their exit codes and output.

Files that a command writes cannot be redirected: if each rank ran `git rev-parse HEAD >> log`, log would get several
lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Callable, Optional

from ddpshim.trainers.unedited.clock import Clock
from ddpshim.trainers.unedited.holders import in_place
from ddpshim.trainers.unedited.private_files import PrivateFiles

_run, _system, _popen = subprocess.run, os.system, os.popen


class Commands:
    """Replaces os.system, os.popen and the functions of subprocess that wait for a command. Local."""

    def __init__(self, clock: Clock, files: PrivateFiles) -> None:
        self._clock, self._files = clock, files

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within this block, the program's calls use the stand-ins."""
        # subprocess's other functions call these two, on behalf of their callers.
        made: dict[Any, Any] = {subprocess.run: self._stand_in(_run, self._completed)}
        made[subprocess.call] = self._stand_in(subprocess.call, self._code)
        made[os.system] = self._stand_in(_system, self._system)
        made[os.popen] = self._stand_in(_popen, self._stream)
        with in_place({id(real): stand_in for real, stand_in in made.items()}):
            yield

    def _stand_in(self, real: Callable[..., Any], of_all: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            line = self._clock.line_of_program(sys._getframe(1))
            return real(*args, **kwargs) if line is None else of_all(line, *args, **kwargs)

        return stand_in

    def _handed_out(self, line: str, run: Callable[[], Any]) -> Any:
        """Return the main rank's result of `run`; then all ranks see the files that it wrote."""
        result = self._clock.answers_of_main(line, lambda: self._files.shown_to_all(run))
        self._files.see_what_is_shared()
        return result

    def _system(self, line: str, command: Any) -> int:
        return self._handed_out(line, lambda: _system(command))  # type: ignore[no-any-return]

    def _completed(self, line: str, *args: Any, check: bool = False, **kwargs: Any) -> Any:
        """subprocess.run. If the output goes to an open file, each rank writes it to its own file."""
        files = {name: kwargs[name] for name in ("stdout", "stderr") if _is_a_file(kwargs.get(name))}
        kwargs |= dict.fromkeys(files, subprocess.PIPE)
        command = args[0] if args else kwargs.get("args")
        kind, *found = self._handed_out(line, lambda: _outcome(args, kwargs))
        if kind == "failed":
            raise OSError(*found)
        outputs = dict(zip(("stdout", "stderr"), found[1:]))
        for name, file in files.items():
            output = outputs[name] or b""
            descriptor = file if isinstance(file, int) else file.fileno()
            os.write(descriptor, output if isinstance(output, bytes) else output.encode())
            outputs[name] = None
        if kind == "late":
            raise subprocess.TimeoutExpired(command, found[0], *outputs.values())  # type: ignore[arg-type]
        if check and found[0]:
            raise subprocess.CalledProcessError(found[0], command, *outputs.values())  # type: ignore[arg-type]
        return subprocess.CompletedProcess(command, found[0], *outputs.values())  # type: ignore[arg-type]

    def _code(self, line: str, *args: Any, **kwargs: Any) -> int:
        return self._completed(line, *args, **kwargs).returncode  # type: ignore[no-any-return]

    def _stream(self, line: str, command: str, mode: str = "r", buffering: int = -1) -> Any:
        if mode != "r":
            return _popen(command, mode, buffering)
        done = self._completed(line, command, shell=True, text=True, stdout=subprocess.PIPE)
        return _Stream(done.stdout, done.returncode)


class _Stream(io.StringIO):
    """The stream that os.popen returns, of a command that has ended."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self._code = code

    def close(self) -> Optional[int]:  # type: ignore[override]
        super().close()
        return (self._code << 8 if self._code > 0 else self._code) or None


def _is_a_file(given: Any) -> bool:
    return hasattr(given, "fileno") or (isinstance(given, int) and given >= 0)


def _outcome(args: Any, kwargs: Any) -> list[Any]:
    """Run the command and return its outcome as values that can be sent to other ranks."""
    try:
        done = _run(*args, **kwargs)
    except subprocess.TimeoutExpired as error:
        return ["late", error.timeout, error.output, error.stderr]
    except OSError as error:
        return ["failed", error.errno, error.strerror, error.filename]
    return ["done", done.returncode, done.stdout, done.stderr]
