"""Wraps the networks that a program trains through its optimizers, and checks its backward passes.

A network is the outermost nn.Module that holds parameters of an optimizer. Copies of it (an EMA, a target network) are
not wrapped, but compared between ranks.
"""

from __future__ import annotations

import gc
import math
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, Optional

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from ddpshim.errors import SyncError
from ddpshim.job import news
from ddpshim.job.group import world
from ddpshim.model import guard
from ddpshim.model.backward import Passes
from ddpshim.model.equality import is_milestone
from ddpshim.model.parallel import wrap_parallel
from ddpshim.model.wrapper import Transparent, is_compiling
from ddpshim.observe.step_times import StepTimes
from ddpshim.process.job import current
from ddpshim.process.observed import live_modules
from ddpshim.process.say import say, say_on_main, size
from ddpshim.process.users_line import users_line
from ddpshim.rows.calls import Calls
from ddpshim.rows.gradients import plain
from ddpshim.rows.tensor import Counts
from ddpshim.trainers.unedited.children import refuse_training

_ROUNDING = 1e-3
_DEADLINE_S = 600.0
_NUM_PLACES = 3
_LEAST_GATHERS = 100  # a short program's are not worth a line
_LEAST_STEPS = 50
_MUCH = 25.0  # percent of a step


def say_what_was_divided() -> None:
    """Print, on the main rank, which share of the operations was computed on rows and replayed, and what gathered."""
    counts = current().part(Counts)
    num = sum(counts.gathered.values())
    if world().options.graphs == "on":
        from ddpshim.rows import graphs

        say_on_main(graphs.summary(counts.refused))
    if not world().is_main or counts.on_rows + num < _LEAST_GATHERS:
        return
    most = [
        f"{os.path.basename(line)} ({name or 'read'}, {times} times, {size(counts.num_bytes[line, name])})"
        for (line, name), times in counts.gathered.most_common(_NUM_PLACES)
    ]
    percent, share = 100 * counts.on_rows / (counts.on_rows + num), counts.replayed / max(1, counts.on_rows)
    gathered = f"; gathered at {', '.join(most)}" if most else ""
    refused = "; ".join(f"{name}: {reason}" for name, reason in [*counts.refused.items()][:_NUM_PLACES])
    why = f" ({refused})" if share < 0.5 and refused else ""
    replayed = f", {100 * share:.0f}% of them traced and replayed{why}" if counts.replayed or refused else ""
    if world().world_size > 1:
        say(f"{percent:.0f}% of tensor operations ran sharded{replayed}{gathered}")
    _say_where_time_went(counts)
    if torch.initial_seed() == current().part(Networks).drawn_seed:
        say(
            "the program does not seed torch (torch.manual_seed): initial weights, sample order and random numbers "
            "differ in each run, in a single process too, and so do losses"
        )
    elif world().options.exact is None and (world().world_size > 1 or world().options.rows_at_once):
        one = "a single process" if world().options.draws == "one_process" else "DDPSHIM_DRAWS=sample on one rank"
        say(
            f"float32 losses agree with {one} to 6-8 digits at first, and to fewer later, because rounding differences "
            "grow (python -m ddpshim docs same_experiment)"
        )


def _say_where_time_went(counts: Counts) -> None:
    """Print how long a step took, how much of it this rank waited, and for what; and what may help, if that is much."""
    times, here = current().part(StepTimes), world()
    found = times.read(since=times.after_warm_up)
    total = sum(found["seconds"].values())
    if times.after_warm_up is None or found["steps"] < _LEAST_STEPS or not total:  # the program may stop its clock
        return
    percent = {part: 100 * seconds / total for part, seconds in found["seconds"].items()}
    spent = f"{percent['data_wait']:.0f}% of it waiting for data"
    if here.device.type == "cpu" and here.world_size > 1:  # a host does not wait for a GPU's messages
        spent += f", {percent['message_wait']:.0f}% for other ranks"
    hint = ": fewer ranks may be as fast" * (percent["message_wait"] >= _MUCH)
    if percent["data_wait"] >= _MUCH:
        from ddpshim.process.machine import num_cores

        if here.local_world_size * (1 + counts.num_workers) < num_cores():
            hint = f": more data workers than num_workers={counts.num_workers} may make it faster"
        elif counts.has_drawn:
            hint = ": DDPSHIM_DRAWS=sample lets each rank load its own samples only, with other random numbers"
    say(f"a step took {1000 * total / found['steps']:.1f} ms, {spent}{hint}")


def _may_wrap() -> bool:
    is_in_main_thread = threading.current_thread() is threading.main_thread()
    return torch.is_grad_enabled() and is_in_main_thread and torch._C._functorch.peek_interpreter_stack() is None


class Networks:
    """The networks that one program trains."""

    def __init__(self) -> None:
        self.drawn_seed: Optional[int] = None  # with which ranks began, if the program gave none
        self.wrapped: list[nn.Module] = []  # the outermost modules
        self.num_passes = 0  # outermost backward passes since an optimizer got parameters; at its first step, 1
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._places = weakref.WeakKeyDictionary[torch.optim.Optimizer, str]()  # their lines
        # Those that got parameters since the last `wrap`: kept, since ranks drop what is dead at different times.
        self._new = dict[torch.optim.Optimizer, None]()
        self._before_forward: Any = None
        self._process = os.getpid()

    def take_note(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer that just got parameters, so that its networks are wrapped. Local."""
        self._places.setdefault(optimizer, users_line())
        self._new[optimizer], self.num_passes = None, 0
        if self._before_forward is None:
            self._before_forward = register_module_forward_pre_hook(self._wrap_before_forward)
            warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")  # that one
        current().part(Calls).before_wholes = self._wrap_before_wholes

    def note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before the first step of an optimizer: its training may have begun with the last pass. Local."""
        self._refuse_in_child()
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            self.num_passes = 1

    def _refuse_in_child(self) -> None:
        # Not in a dataset's: it may step an optimizer of its own, also in its workers, which are forked as it fetches.
        if os.getpid() != self._process and not current().part(Counts).is_fetching:
            refuse_training(self._process)

    def begin_pass(self, tensors: Any) -> None:
        """Before a backward pass, wrap new networks and compare the loss (collective)."""
        if os.getpid() != self._process:  # a pass without networks that are wrapped is the child's own
            if self.wrapped:
                self._refuse_in_child()
        elif not is_compiling() and not current().part(Passes).depth:  # not in a pass of a checkpoint, inside another
            self.wrap()
            self.num_passes += 1
            if is_milestone(self.num_passes):
                self._check_alike([tensors] if isinstance(tensors, torch.Tensor) else tensors)

    def _check_alike(self, given: Any) -> None:
        """Raise SyncError if ranks computed different losses (collective)."""
        news.settle()  # names a rank that is elsewhere, for whose loss this one would wait
        own = [float(plain(loss).detach().double().sum()) for loss in given]
        found = world().gather_with_deadline("losses", own, _DEADLINE_S)
        expected = next(iter(found.values()))
        for rank, theirs in found.items():
            pairs = zip(expected, theirs)
            are_close = all(math.isclose(x, y, rel_tol=_ROUNDING) or (x != x and y != y) for x, y in pairs)
            if not are_close or len(expected) != len(theirs):
                raise SyncError(
                    f"{users_line()}: rank 0 computed the loss {expected} and rank {rank} {theirs}; every "
                    "rank runs the whole program, so it should be the same on all, and the step would be wrong. Draw "
                    "batches from torch's, numpy's or Python's global generator, or with a fixed seed "
                    "(np.random.default_rng(0)), or take them from a DataLoader."
                )
        if len(found) < world().world_size:
            raise SyncError(
                f"{users_line()}: of {world().world_size} ranks only {[*found]} reached this backward pass "
                f"within {_DEADLINE_S:g} s; the others do something else. The decision must be the same on all ranks: "
                "it must not depend on a clock or on entropy."
            )

    def forget(self) -> None:
        """Remove the hook on the forward passes of all modules. Local."""
        if self._before_forward is not None:
            self._before_forward.remove()
            self._before_forward = None

    def _wrap_before_forward(self, module: nn.Module, inputs: Any) -> None:
        # The backward pass would be too late: wrapping sends the main rank's weights, but the graph has the old ones.
        # First ask for torch.compile: it would trace this hook, and compute in parts what it compiles whole otherwise.
        if is_compiling() or not _may_wrap() or not module._parameters:
            return
        if not _ids(self._new).isdisjoint(map(id, module._parameters.values())):
            self.wrap()

    def _wrap_before_wholes(self) -> None:
        if _may_wrap() and self._new:
            self.wrap()

    def wrap(self) -> None:
        """Wrap the networks of new optimizers (collective if one has new parameters)."""
        if lock := current().part(Counts).lock():
            raise SyncError(
                f"{users_line()}: a network is trained while this rank holds the lock of {lock}, which all ranks "
                "share; the others would wait for the lock, and this rank for them. Release it before training, or "
                "lock a file beside the program: of those each rank has its own."
            )
        if is_compiling() or not self._new or os.getpid() != self._process:
            return
        self.forget()
        new, self._new = self._new, {}
        with torch._C.DisableTorchFunction():  # the program's own modes
            for optimizer in new:
                self._wrap_for(optimizer)

    def _wrap_for(self, optimizer: torch.optim.Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        missing = [p for p in params if not guard.is_owned(p)]
        if not missing:
            return
        if world().world_size == 1:
            current().has_networks = True
            return
        self._check_order(optimizer, missing)
        gc.collect()  # ranks collect garbage at different times, so dead modules would differ between ranks
        modules = [module for module in live_modules() if not isinstance(module, Transparent)]
        children = {id(child) for module in modules for child in module._modules.values()}
        roots = [module for module in modules if id(module) not in children]
        place, counts = self._places[optimizer], current().part(Counts)
        with counts.searching():
            chosen = choose(roots, missing)
        for root in chosen:
            if isinstance(root, torch.jit.ScriptModule):
                continue  # it is computed whole, and so are its gradients
            number = sum(p.numel() for p in root.parameters() if p.requires_grad)
            say_on_main(
                f"{place}: {type(root).__name__} ({number:,} parameters), stepped by "
                f"{type(optimizer).__name__}, is trained by all ranks together"
            )
            try:
                wrap_parallel(root)
            except SyncError as error:
                raise SyncError(f"{place}: {error}") from error
            self.wrapped.append(root)
        with counts.searching():
            self._watch_copies(roots)

    def _check_order(self, optimizer: torch.optim.Optimizer, params: list[Any]) -> None:
        """Raise SyncError if ranks gave an optimizer parameters in different orders (collective)."""
        told = world().gather([(tuple(p.shape), _sum_of([p])) for p in params if not is_lazy(p)])
        if any(theirs != told[0] and sorted(theirs) == sorted(told[0]) for theirs in told):
            raise SyncError(
                f"{self._places[optimizer]}: {type(optimizer).__name__} got its parameters in another order on another "
                "rank, as from a set of objects, whose order is that of addresses: a rank would train one network with "
                "the gradients and the state of another. Give it a list in the order of the program."
            )

    def _watch_copies(self, roots: list[nn.Module]) -> None:
        """Watch copies, which have a wrapped module's shapes; report those that differ already (collective)."""
        known = {shapes_of(module) for root in self.wrapped for module in root.modules()} - {()}
        owned = {id(p) for root in self.wrapped for p in root.parameters()}
        owned |= current().part(guard.GuardState).owners.keys()
        owned |= _ids([*self._places])  # a network of a later optimizer is no copy
        copies = [
            root
            for root in roots
            if not any(p.is_meta or is_lazy(p) or id(p) in owned for p in root.parameters())
            and shapes_of(root) in known
        ]
        facts = [repr((type(copy).__name__, shapes_of(copy), _sum_of(copy.parameters()))) for copy in copies]
        counts = [Counter(found) for found in world().gather(facts)]
        for fact, copy in sorted(zip(facts, copies), key=lambda pair: pair[0]):
            if any(count[fact] != counts[0][fact] for count in counts):
                say_on_main(
                    f"a {type(copy).__name__} that looks like a copy of a trained network differs between ranks; it "
                    "is not checked"
                )
            elif counts[0][fact] == 1:  # of equal ones, ranks don't know which is which
                guard.watch(copy)


def _ids(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the ids of parameters."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def choose(roots: Iterable[nn.Module], params: list[Any]) -> list[nn.Module]:
    """Return the modules of `roots` that hold `params`. Local.

    If several hold a parameter, the one with most of `params`, then the largest. The order of `roots` differs between
    ranks and must decide nothing: the places of parameters in `params` do, then values, if only frozen ones differ. A
    tensor in no module (a temperature, a latent) needs no wrapper: `ddpshim.rows` adds up its gradient over ranks.
    """
    places = {id(p): place for place, p in enumerate(params)}
    wanted, chosen = {*places.values()}, list[nn.Module]()
    held = [(root, [places.get(id(p), -1) for p in root.parameters()]) for root in roots]
    held = [(root, own) for root, own in held if not wanted.isdisjoint(own)]

    def order(one: tuple[nn.Module, list[int]]) -> tuple[Any, ...]:
        root, own = one
        return -len(wanted.intersection(own)), -len(own), own, str(type(root)), _sum_of(root.parameters())

    for root, own in sorted(held, key=order):
        if not wanted.isdisjoint(own):
            chosen.append(root)
            wanted.difference_update(own)
    return chosen


def shapes_of(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the names and shapes of a module's parameters."""
    return tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


def _sum_of(params: Iterable[Any]) -> float:
    with torch.no_grad():
        return sum(float(p.detach().abs().double().sum()) for p in params if not (p.is_meta or is_lazy(p)))
