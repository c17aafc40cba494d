"""Plays episodes in an environment that is kept between them, in this process or in a separate one."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection
from typing import Any, Callable, NoReturn, Optional

import torch

from ddpshim.checkpoint.background import start_process
from ddpshim.errors import LaunchError, RolloutError
from ddpshim.evaluation import episodes
from ddpshim.job import group
from ddpshim.job.random_streams import shared_random_streams
from ddpshim.job.replaced import replaced
from ddpshim.job.say import described

_NUM_CHECKED = 2  # episodes with `is_checked`
_NICE_WHILE_PLAYING = 19
YIELDS = True  # whether the separate process uses idle cores only; tests on busy machines turn it off
_END_DEADLINE_S = 5.0
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Order:
    """What to play: an environment, a policy, and the rules."""

    make_env: Callable[[], Any]
    policy: Any
    rules: episodes.Rules


class Player:
    """Plays episodes, and keeps the environment. A job has one, and so has its separate process."""

    def __init__(self) -> None:
        self._make_env: Any = None
        self._env: Any = None

    def play(self, order: Order, number: int) -> tuple[Any, Any]:
        """Play an episode; return the fields of its `Episode` and `Shown`. Local."""
        if self._make_env is not order.make_env:
            self.close()
            with shared_random_streams(order.rules.seed):
                self._env = order.make_env()
            self._make_env = order.make_env
        played = episodes.play(self._env, order.policy, order.rules, number, number < _NUM_CHECKED)
        return astuple(played[0]), astuple(played[1])

    def close(self) -> None:
        """Close the environment, if there is one. Local; idempotent."""
        env, self._env, self._make_env = self._env, None, None
        if env is not None and callable(getattr(env, "close", None)):
            env.close()


class PlayerBeside:
    """Plays episodes in a separate process, which uses idle cores only. A job has one.

    The process is started for the first episode and kept. One thread at a time may play.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()  # held by the running evaluation
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._connection: Optional[Connection] = None
        self._has_ended = False

    def ordered(self, order: bytes) -> Callable[[int], Any]:
        """Return a function that plays an episode of a `packed` order; for the thread that holds `turn`."""
        left = [order]

        def play(number: int) -> Any:
            try:
                connection = self._started()
                connection.send((left.pop() if left else None, number))
                played, said, trace = connection.recv()
            except (EOFError, OSError):
                raise self._lost() from None
            if said is None:
                return played
            print(trace, file=sys.stderr, end="", flush=True)
            raise RolloutError(said)

        return play

    def close(self) -> None:
        """Kill the process, even in the middle of an episode. Local; idempotent."""
        self._has_ended = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait(_END_DEADLINE_S)

    def _started(self) -> Connection:
        if self._has_ended:
            raise RolloutError("the job ended before its evaluation in the background did")
        if self._connection is None or self._process is None:
            self._process, self._connection = start_process(_serve, *_program(), YIELDS)
        return self._connection

    def _lost(self) -> RolloutError:
        process, self._process, self._connection = self._process, None, None
        if self._has_ended or process is None:
            return RolloutError("the job ended before its evaluation in the background did")
        code = process.wait(_END_DEADLINE_S)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return RolloutError(
            f"the process that evaluates in the background (pid {process.pid}) ended ({how}); its output is above"
        )


def packed(order: Order) -> bytes:
    """Return an order as it is now, pickled for another process. Local.

    Raises RolloutError if something in it cannot be pickled.
    """
    policy = io.BytesIO()
    try:
        torch.save(order.policy, policy)
        return pickle.dumps((pickle.dumps(order.make_env), policy.getvalue(), pickle.dumps(order.rules), _numerics()))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RolloutError(
            f"the environment's function or the policy cannot be sent to another process ({error}); nothing would "
            "be evaluated in the background. Give evaluate_in_background functions defined at the top level of a "
            "module or the script, or functools.partial of such functions."
        ) from error


def _program() -> tuple[Optional[str], Optional[str]]:
    """Return the module name and file of __main__, whose definitions the separate process needs."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return (spec.name if spec is not None else None), getattr(main, "__file__", None)


def _numerics() -> dict[str, Any]:
    """Return the settings that affect the last bits of results, except the number of threads."""
    return {
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": {name: getattr(torch.backends.cudnn, name) for name in ("allow_tf32", "benchmark", "deterministic")},
    }


def _compute_as(numerics: dict[str, Any]) -> None:
    torch.set_default_dtype(numerics["dtype"])
    torch.set_float32_matmul_precision(numerics["precision"])
    torch.use_deterministic_algorithms(numerics["deterministic"])
    for name, value in numerics["cudnn"].items():
        setattr(torch.backends.cudnn, name, value)


def _serve(descriptor: int, parent: int, name: Optional[str], file: Optional[str], yields: bool) -> None:
    """Answer requests in the separate process, until its parent ends or closes the connection."""
    if yields:
        _give_way()
    group.settle_rounding()
    connection, receiver = Connection(descriptor), _Receiver(name, file)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        # The parent's data workers hold its end of the connection, too, and may outlive it.
        while connection.poll(_LOOK_EVERY_S) or os.getppid() == parent:
            if connection.poll():
                connection.send(receiver.answer(*connection.recv()))
    os._exit(0)


def _give_way() -> None:
    """Use idle cores only. Called after the imports, which would take too long on a busy machine."""
    os.nice(_NICE_WHILE_PLAYING)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class _Receiver:
    """Plays the orders that arrive in the separate process."""

    def __init__(self, name: Optional[str], file: Optional[str]) -> None:
        self._main, self._player = (name, file), Player()
        self._has_main = False
        self._packed_env = b""
        self._order: Any = None

    def answer(self, packed_order: Optional[bytes], number: int) -> tuple[Any, Optional[str], str]:
        """Return the result, None and ""; or, after an error, None, the error and its traceback."""
        try:
            if packed_order is not None:
                self._order = self._unpacked(packed_order)
            return self._player.play(self._order, number), None, ""
        except Exception as error:
            return None, described(error), traceback.format_exc()

    def _unpacked(self, packed_order: bytes) -> Order:
        if b"_main__" in packed_order and not self._has_main:  # __mp_main__ in a child of multiprocessing
            _import_main(*self._main)
            self._has_main = True
        packed_env, policy, rules, numerics = pickle.loads(packed_order)
        _compute_as(numerics)
        is_same = packed_env == self._packed_env  # then its environment is kept
        make_env = self._order.make_env if is_same else pickle.loads(packed_env)
        self._packed_env = packed_env
        return Order(make_env, torch.load(io.BytesIO(policy), weights_only=False), pickle.loads(rules))


def _import_main(name: Optional[str], file: Optional[str]) -> None:
    """Import the program as multiprocessing does for its children, under a name that is not __main__."""
    if name is None and file is None:
        raise RolloutError(
            "the environment's function or the policy is defined in no file (an interactive session), so another "
            "process cannot import it. Define it in a module."
        )
    with replaced(group, "setup", _refuse_setup):
        if name is not None:
            held = runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(str(file))))
            held = runpy.run_path(str(file), run_name="__mp_main__")
    module = types.ModuleType("__mp_main__")
    vars(module).update(held)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _refuse_setup(*args: Any, **options: Any) -> NoReturn:
    raise LaunchError(
        "ddpshim.setup() was called while another process imports the script for its functions, which would train "
        "again. Put the script's main code under `if __name__ == '__main__':`, or its functions into a module."
    )
