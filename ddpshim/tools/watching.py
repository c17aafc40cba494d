"""Records the inputs and outputs of each step of a trainer in this process, as JSON lines.

Recording does not change the program's results. `python -m ddpshim.tools.watching` runs the user's program as the one
process of a proof.
"""

from __future__ import annotations

import builtins
import contextlib
import fnmatch
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import posix
import signal
import sys
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ddpshim.failures.unsynced_check import graph_of
from ddpshim.model.wrapper import bare_key, is_compiling
from ddpshim.process.job import current
from ddpshim.process.observed import called, live_modules, observe
from ddpshim.process.random_streams import digest
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say
from ddpshim.process.users_line import users_line
from ddpshim.rows.probe import DRAWS, probed
from ddpshim.rows.tensor import Counts
from ddpshim.shares.sharded import Shares
from ddpshim.tools.new_files import NewFiles
from ddpshim.trainers.unedited.private_files import switch_loggers_off
from ddpshim.trainers.unedited.program import run_as_main

SETTINGS = "settings.json"
ONE = "one"  # name of the run in one process; the ranks' runs are "rank_0", "rank_1", ...
AGAIN = "again"  # of another run in one process
NUM_SIGNS = 8
_MAX_BATCHES = 1000
_COARSE = 1e-4  # the last bit of bfloat16 and float16 is larger
_UNKNOWN = ("loader", "is_share", "shuffles", "num_batches", "num_samples")
_NO_PASS = {"sampler": "", "pass_number": 0, **dict.fromkeys(_UNKNOWN)}


@dataclass(frozen=True)
class ProofSettings:
    """How many steps are compared, and how long processes wait for each other."""

    steps: int = 20  # the process ends when any optimizer has made this many
    num_ranks: int = 2
    timeout_s: float = 300.0
    is_nudged: bool = False  # results of modules differ in the last bit


class StepRecorder:
    """Sees what this process does in its steps, not what its forked children do; `folder`: of all processes."""

    def __init__(self, folder: Path, run: str = "") -> None:
        self._folder, self._process, self._undo = folder, os.getpid(), contextlib.ExitStack()
        self._rank, self._num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self._run = run or f"rank_{self._rank}"
        self._own_s = 0.0  # spent for what this sees

    def _observe(self, **calls: Callable[..., None]) -> None:
        """Start calling functions: `observed.observe`, in this process."""

        def here(call: Callable[..., None], *args: Any) -> None:
            if os.getpid() == self._process:
                begun = time.perf_counter()
                call(*args)
                self._own_s += time.perf_counter() - begun

        observe(self._undo, **{moment: functools.partial(here, call) for moment, call in calls.items()})

    def _leave_no_traces(self) -> None:
        """Record new files, so that they can be removed, and let the program ask no server and no user."""
        switch_loggers_off()
        NewFiles(self._folder).install()
        self._undo.enter_context(replaced(builtins, "input", lambda prompt="": "n"))

    def _end_with_peers(self, timeout_s: float) -> NoReturn:
        """End this process and its data workers once all ranks have noted their end."""
        (self._folder / f"{self._run}.over").touch()
        end, peers = time.monotonic() + timeout_s, f"{self._run.partition('_')[0]}*.over"
        # A peer may still be receiving the last gradients from this one. (By `posix`: where other ranks see the main
        # rank's files, a look at a file asks it, and it may have ended.)
        while len(fnmatch.filter(posix.listdir(self._folder), peers)) < self._num_ranks and time.monotonic() < end:
            time.sleep(0.02)
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a data worker is killed
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def is_failure(error: Optional[BaseException]) -> bool:
    """Whether the program failed, if `error` ends it."""
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def losses_of(tensors: Any) -> list[torch.Tensor]:
    """Return the numbers among what a backward pass starts from."""
    return [root for root in ([tensors] if hasattr(tensors, "numel") else tensors) if root.numel() == 1]


class RankRecorder(StepRecorder):
    """Records the steps of a process of a proof: of the one process, or by default of this rank."""

    def __init__(self, folder: Path, run: str = "") -> None:
        super().__init__(folder, run)
        self._settings = ProofSettings(**json.loads((folder / SETTINGS).read_text()))
        self._file = (folder / f"{self._run}.jsonl").open("a", buffering=1)
        self._optimizers: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # number, steps
        self._trained: list[list[Any]] = []  # parameters, by the number of their optimizer
        self._groups: list[Any] = []  # process groups, which thus stay alive until the program has ended
        self._loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # the number of the first pass
        # Of a pass: what is known of it, and the indices of its batches to come.
        self._passes: weakref.WeakKeyDictionary[Any, tuple[Any, Iterator[Any]]] = weakref.WeakKeyDictionary()
        self._drawn: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()  # of a sampler's last pass
        self._num_steps = self._num_batches = self._num_passes = 0
        self._stepping: Any = None
        self._is_due = self._has_begun = self._has_unseen_state = False

    def __enter__(self) -> None:
        self._leave_no_traces()

        def see_pass(loader: Any, batches: Any) -> None:
            self._num_passes += 1
            number, sampler = self._loaders.setdefault(loader, self._num_passes), loader.batch_sampler
            samples = getattr(sampler, "sampler", loader.sampler)
            about = {
                "loader": number,
                "sampler": type(samples).__name__,
                "is_share": isinstance(sampler, Shares),
                "shuffles": getattr(samples, "shuffle", None),
                "pass_number": self._num_passes,
                # Not the loader's own length: asked for that of an iterable dataset, it warns in later passes.
                "num_batches": _length(samples if sampler is None else sampler),
                "num_samples": _length(samples),
            }
            is_seen = isinstance(sampler, BatchSampler)
            self._passes[batches] = about, iter(self._drawn.get(sampler, ()) if is_seen else ())
            if number == self._num_passes and is_seen:
                self._probe(loader)

        of_torch = BatchSampler.__iter__

        def see_indices(sampler: Any) -> Iterator[list[Any]]:
            self._drawn[sampler] = drawn = list[Any]()  # which grows (data workers get some in advance)

            def note(indices: list[Any]) -> list[Any]:
                drawn.append([*map(repr, indices)])
                return indices

            return map(note, of_torch(sampler))

        self._undo.enter_context(replaced(DataLoader, "__iter__", called(DataLoader.__iter__, after=see_pass)))
        self._undo.enter_context(replaced(BatchSampler, "__iter__", see_indices))
        self._observe(
            before_batch=lambda batches: self._see_state(),
            batch=self._see_batch,
            backward=self._see_loss,
            before_step=self._before_step,
            after_step=self._after_step,
        )
        if self._settings.is_nudged:
            self._undo.callback(torch.nn.modules.module.register_module_forward_hook(_nudged).remove)
        if self._run not in (ONE, AGAIN):  # for the others `check` itself waits
            limit = threading.Timer(self._settings.timeout_s, self._give_up)
            limit.daemon = True
            limit.start()

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        if os.getpid() == self._process:
            if is_failure(error):
                self._write("failed", error=f"{type(error).__name__}: {error}"[:200])
            self._see_state(is_last=True)
            (self._folder / f"{self._run}.over").touch()
        self._undo.close()

    def _write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "t": self._num_steps, **values}) + "\n")

    # Inputs

    def _see_batch(self, batches: Any, batch: Any) -> None:
        if self._num_batches >= _MAX_BATCHES:
            return
        self._num_batches += 1
        known, indices = self._passes.get(batches) or (_NO_PASS, iter(()))
        about = {"samples": samples_of(batch), "indices": next(indices, None), **known}
        self._write("batch", **about, streams=self._own_streams(), place=users_line())

    def _probe(self, loader: Any) -> None:
        """Record a few samples, drawn from equal random numbers, if that makes them functions of their index."""
        if not current().door.computes_alike and not isinstance(loader.dataset, IterableDataset):
            found = probed(loader)
            if found.why == DRAWS:
                # From torch's generator torch seeds all those of data workers.
                streams = digest("torch") if loader.num_workers else digest(*found.draws)
                self._write("drawn", loader=self._loaders[loader], samples=dict(found.samples), streams=streams)

    def _own_streams(self) -> Optional[int]:
        """Return a number for the state of this rank's own random streams; None if they are those of one process."""
        if current().door.computes_alike:
            return None
        states = [torch.default_generator.get_state()]
        states += [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        return zlib.crc32(b"".join(state.numpy().tobytes() for state in states))

    # Outputs

    def _see_loss(self, tensors: Any) -> None:
        self._see_state()
        if not self._has_begun:  # networks are wrapped and still have their initial weights
            self._has_begun = True
            # No buffers: the forward pass has already changed them.
            begun = {name: sketch(t) for name, t in _networks() if t.requires_grad}
            self._write("begun", tensors=begun)
        dtype, losses = str(of_graph(tensors)).partition(".")[2], [float(loss.detach()) for loss in losses_of(tensors)]
        self._write("loss", losses=losses, dtype=dtype, streams=self._own_streams(), place=users_line())

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping is not None:
            return
        self._stepping = optimizer
        params = [p for group in optimizer.param_groups for p in group["params"]]
        first: dict[str, Any] = {}
        number, _ = self._optimizers.setdefault(optimizer, [len(self._trained), 0])
        if number == len(self._trained):
            self._trained.append(params)
            first = {"names": self._names(params), "weights": [*map(sketch, params)]}
        self._write(
            "gradients",
            optimizer=number,
            gradients=[sketch(p.grad) for p in params],
            lr=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            place=users_line(),
            **first,
        )

    def _names(self, params: list[Any]) -> list[str]:
        """Return the parameters' names: of several the longest, that in the outermost module."""
        self._groups += [each.process_group for each in live_modules() if isinstance(each, DistributedDataParallel)]
        known = sorted(((name.partition(".")[2], tensor) for name, tensor in _networks()), key=lambda own: len(own[0]))
        names = {id(tensor): name for name, tensor in known}
        return [names.get(id(p)) or f"parameter {i}" for i, p in enumerate(params)]

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping, known = None, self._optimizers[optimizer]
        known[1] += 1
        self._num_steps += 1
        seconds, weights = time.perf_counter() - self._own_s, [*map(sketch, self._trained[known[0]])]
        here, is_alike = current().world, current().door.computes_alike
        replayed = current().part(Counts).replayed if here and is_alike and here.options.capture != "off" else None
        about = {"seconds": round(seconds, 4), "replayed": replayed, "place": users_line()}
        self._write("step", optimizer=known[0], weights=weights, **about)
        self._has_unseen_state = True
        self._is_due = self._is_due or known[1] >= self._settings.steps

    def _see_state(self, is_last: bool = False) -> None:
        """Record the networks' other tensors, once per step, late enough that averages (EMA, targets) were updated."""
        if self._has_unseen_state:
            self._has_unseen_state = False
            trained = {id(p) for params in self._trained for p in params}
            self._write("state", tensors={name: sketch(tensor) for name, tensor in _networks(trained)})
        if self._is_due:
            self._write("cut")
            if not is_last:
                self._end_with_peers(self._settings.timeout_s)

    def _give_up(self) -> None:
        """End a rank that has not made its steps in time: it may wait for another one forever."""
        line = users_line(sys._current_frames().get(threading.main_thread().ident or 0))
        say(
            f"rank {self._rank} made {self._num_steps} of {self._settings.steps} steps in "
            f"{self._settings.timeout_s:g} s, and is at {line}: ranks wait for each other forever, or need a longer "
            "--timeout",
            directly=True,
        )
        os._exit(1)


def _length(sampler: Any) -> Optional[int]:
    with contextlib.suppress(TypeError, NotImplementedError, AttributeError, ValueError):  # the program's own sampler
        return len(sampler)
    return None


def samples_of(batch: Any) -> list[str]:
    """Return a hash of each sample in a batch; none if the batch holds no tensors.

    A sample is one row of every tensor whose first dimension equals that of the batch's first tensor.
    """
    strided = (t.detach() for t in _tensors(batch) if t.dim() and t.layout == torch.strided)
    tensors = [t for t in strided if not (t.is_nested or t.is_quantized or t.is_meta)]
    bits = (t.resolve_conj().resolve_neg().cpu() for t in tensors if len(t) == len(tensors[0]) and t.numel())
    rows = [t.reshape(len(t), -1).contiguous().view(torch.uint8).numpy() for t in bits]
    return [hashlib.blake2b(b"".join(sample), digest_size=6).hexdigest() for sample in zip(*rows)]


def _tensors(batch: Any) -> Iterator[Any]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)


def _nudged(module: torch.nn.Module, args: Any, result: Any) -> Any:
    """Return the result of a module with the last bit of some numbers changed, towards zero: a probability stays one.

    Not whole numbers, which the program may round, nor what is not trained, or too coarse, or traced.
    """
    if torch.jit.is_tracing() or is_compiling() or not isinstance(result, torch.Tensor) or result.is_nested:
        return result
    is_trained = result.requires_grad and not result.is_leaf and result.numel() > 0
    if not is_trained or result.is_complex() or result.layout != torch.strided:
        return result
    eps = torch.finfo(result.dtype).eps
    if eps > _COARSE:
        return result
    some = (_signs(result.numel()) & 1).reshape(result.shape).to(result.device, result.dtype)
    return torch.where(result == result.round(), result, result * (1 - 2 * eps * some))


@functools.lru_cache(maxsize=64)
def _signs(size: int) -> torch.Tensor:
    # A bit of each byte is the sign of an entry. A hash: torch's random functions may be replaced in this process.
    return torch.frombuffer(bytearray(hashlib.shake_256().digest(size)), dtype=torch.uint8)


def sketch(tensor: Optional[torch.Tensor]) -> Optional[list[float]]:
    """Return the norm of `tensor` followed by its sketch, from which `judging` tells how far two differ; None for None.

    A sketch is the sum of a tensor's entries with random signs, for eight sets of signs: the root mean square of the
    differences of two sketches estimates the norm of the tensors' difference (Alon, Matias and Szegedy, "The space
    complexity of approximating the frequency moments", 1996). Uses none of the program's random generators.
    """
    if tensor is None:
        return None
    with torch.no_grad():
        values = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
        flat = values.reshape(-1).to("cpu", torch.float64)
        if not flat.numel():
            return [0.0] * (1 + NUM_SIGNS)
        signs = _signs(flat.numel())
        return [float(flat.norm()), *(float(flat.where(signs >> i & 1 > 0, -flat).sum()) for i in range(NUM_SIGNS))]


def of_graph(losses: Any) -> torch.dtype:
    """Return the coarsest floating dtype among the results from which `losses` were computed. Local.

    With autocast it is bfloat16 or float16, although losses and gradients are float32. Only results that need a
    gradient are looked at: a frozen network in bfloat16 gives every process the same features.
    """
    results = (about for node in graph_of(losses) for about in getattr(node, "_input_metadata", None) or ())
    dtypes = (dtype for about in results if (dtype := getattr(about, "dtype", None)) and dtype.is_floating_point)
    coarsest: torch.dtype = max((torch.float32, *dtypes), key=lambda dtype: torch.finfo(dtype).eps)
    return coarsest


def _networks(trained: Container[int] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the parameters and buffers of all networks but those with ids in `trained`, by names equal in all runs.

    The names are "Class~hash#number.name"; the hash is over the names and shapes of the network's tensors. Networks
    with equal hashes are only numbered, and two runs may number them differently.
    """
    modules, wrappers = live_modules(), (DataParallel, DistributedDataParallel)
    shown = [m for m in modules if not (isinstance(m, wrappers) or type(m).__module__.startswith("ddpshim."))]
    inner = {id(child) for module in shown for child in vars(module)["_modules"].values()}
    counts = Counter[Any]()
    for module in (module for module in shown if id(module) not in inner):
        every = itertools.chain(module.named_parameters(), module.named_buffers())
        tensors = [(bare_key(name), tensor) for name, tensor in every if id(tensor) not in trained]
        if tensors:
            kind = (type(module).__name__, tuple((name, tuple(t.shape)) for name, t in tensors))
            counts[kind] += 1
            which = f"{type(module).__name__}~{zlib.crc32(repr(kind).encode()):08x}#{counts[kind]}"
            yield from ((f"{which}.{name}", tensor) for name, tensor in tensors)


if __name__ == "__main__":  # with a folder, the name of the run, and the program with its arguments
    with RankRecorder(Path(sys.argv[1]), sys.argv[2]):
        run_as_main(sys.argv[3:])
