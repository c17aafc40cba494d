"""torch's DistributedDataParallel, in a wrapper that looks like the network and prepares it as a backward pass begins.

torch prepares its reducer at the end of DDP's `forward`. A network that trains through another method, or runs two
backward passes over one forward, is then not reduced, and no error is raised. `DistributedModule` calls the same
`prepare_for_backward` when a backward pass begins, so it does not matter which call built the graph.

Parameters may be left out of a pass (`find_unused_parameters=None`). torch's own search for them reads the graph in
each pass, and sends all gradients in one bucket at its end. Here the parameters that got a gradient are listed while
the pass runs. Then the others get a gradient of zeros, which completes torch's buckets.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpshim import lazy
from ddpshim.errors import SyncError
from ddpshim.job import collectives
from ddpshim.model import backward, guard
from ddpshim.model.equality import is_milestone
from ddpshim.model.wrapper import Transparent
from ddpshim.process.devices import moved
from ddpshim.process.job import current
from ddpshim.process.observed import Progress


class _Networks(list["DistributedModule"]):
    """The networks of a job that torch's DDP reduces, in the order in which they were wrapped."""

    def __init__(self) -> None:
        super().__init__()
        passes = current().part(backward.Passes)
        passes.before.append(self._begin)
        passes.after.append(self._end)
        passes.unfinished = lambda: next((type(w.module).__name__ for w in self if w._is_reducing and w._seen), None)

    def _begin(self) -> None:
        for wrapped in self:
            wrapped.begin_pass()

    def _end(self) -> None:
        took_part = [wrapped for wrapped in self if wrapped._seen]
        # Of all networks first: another rank may wait for these buckets before it comes to any other message.
        for wrapped in took_part:
            wrapped.complete_pass()
        groups = [wrapped._ddp.process_group for wrapped in took_part]
        for wrapped, group in zip(took_part, groups):
            wrapped.end_pass(groups.count(group) > 1)
        refusal = next((wrapped._refusal for wrapped in took_part if wrapped._refusal is not None), None)
        for wrapped in took_part:  # their gradients may have been added to those of another
            wrapped._refusal = wrapped._refusal or refusal


class DistributedModule(guard.Reduced, Transparent, nn.Module):
    """A network that torch's DDP reduces. Made by `wrap_parallel`.

    DDP is an attribute and no base class: it looks up `reducer`, `device` and others on itself, and a module may have
    attributes of these names. What the module lacks is found on DDP: `register_comm_hook`, `_get_ddp_logging_data`.
    """

    # Of the class, because other names that are set on a wrapper become its module's.
    _is_prepared = False  # DDP's forward has prepared the reducer since the last pass
    _is_reducing = False  # the pass under way is reduced
    _is_joining = False
    _syncs_in_forward = False  # DDP broadcasts buffers in its forward: for join() and for hooks of buffers
    # Parameters that the pass did not use: the place, and whether there was a gradient of an earlier one.
    _missed: Sequence[tuple[int, Any, bool]] = ()

    def __init__(self, module: nn.Module, find_unused_parameters: Optional[bool], **ddp: Any) -> None:
        nn.Module.__init__(self)
        mine = self.__dict__
        mine["_may_leave_out"] = find_unused_parameters is None
        is_of_all = "process_group" not in ddp and "device_mesh" not in ddp
        if is_of_all:
            ddp["process_group"] = _group()
        with _without_owned(module):
            made = mine["_ddp"] = DistributedDataParallel(
                module, find_unused_parameters=bool(find_unused_parameters), **ddp
            )
        # A message between hosts, for which none waits for its GPU.
        is_gloo = dist.get_backend(made.process_group) == "gloo"
        mine["_hosts"] = made.process_group if is_gloo else collectives.group("gloo")
        self._show(module)
        own = [(name, p) for name, p in module.named_parameters() if p.requires_grad and not guard.is_owned(p)]
        reduced = mine["_reduced"] = [p for name, p in own if name not in made.parameters_to_ignore]
        seen = mine["_seen"] = list[Any]()  # the parameters that got a gradient in this pass
        mine["_accumulators"], mine["_first"] = [*map(_accumulator, reduced)], own[0][1]
        guard.own(self, [p for _, p in own])
        for p in reduced:  # a builtin: no Python code runs for each parameter of a step
            current().at_end.callback(p.register_post_accumulate_grad_hook(seen.append).remove)
        sends_buffers = bool(getattr(made, "forward_sync_buffers", made.broadcast_buffers))
        mine["_sent_buffers"] = collectives.Buffers(module, is_of_all and sends_buffers)
        self._syncs_in_forward = not is_of_all
        if is_of_all:
            self._compares_buffers = sends_buffers
        current().part(_Networks).append(self)
        current().at_end.callback(self._leave_job)

    def __getattr__(self, name: str) -> Any:
        try:
            return Transparent.__getattr__(self, name)
        except AttributeError:
            made = self.__dict__.get("_ddp")
            if made is None or not hasattr(made, name):
                raise
            return getattr(made, name)

    def __setattr__(self, name: str, value: Any) -> None:
        made = self.__dict__.get("_ddp")
        is_ddps = made is not None and name in vars(made) and name != "training"
        if is_ddps and not (hasattr(self.module, name) or hasattr(type(self), name)):
            setattr(made, name, value)  # require_backward_grad_sync
        else:
            Transparent.__setattr__(self, name, value)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        made: Any = self.__dict__["_ddp"]
        device = self._first.device
        if device.type != "cpu":  # as by DataParallel
            args, kwargs = moved(args, device), moved(kwargs, device)
        # Without gradients it is no training: one rank may evaluate alone. During a backward pass a checkpoint repeats
        # it, and preparing the reducer again would forget the gradients that are there.
        is_training = torch.is_grad_enabled() or (made is not None and made.mixed_precision is not None)
        if made is None or not is_training or (passes := current().part(backward.Passes)).depth:
            return self.module(*args, **kwargs)
        backward.check(passes)
        if self._refusal is not None:
            raise self._refusal
        made.require_forward_param_sync = self._syncs_in_forward
        if made.require_backward_grad_sync:
            self.__dict__["_is_prepared"] = True
        return made(*args, **kwargs)

    @property
    def _fills(self) -> bool:
        return self._may_leave_out and not self._ddp.static_graph

    def no_sync(self) -> Any:
        """Return a context in which gradients accumulate on each rank; the next pass outside it reduces the sum."""
        return contextlib.nullcontext() if self._ddp is None else self._ddp.no_sync()

    @contextlib.contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Return torch's context for ranks that run out of batches at different times.

        Afterwards this network is not compared over ranks any more, because they made different numbers of steps.
        """
        self.is_uneven, self._compares_buffers = True, None
        self._is_joining = self._syncs_in_forward = True
        with self._ddp.join(*args, **kwargs):
            yield
        self._is_joining, self._syncs_in_forward = False, hasattr(self._ddp, "buffer_hook")

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        self._ddp._register_buffer_comm_hook(*args, **kwargs)
        self._syncs_in_forward = True

    def begin_pass(self) -> None:
        """Prepare the reducer, if the backward pass that begins may be reduced. Local."""
        if self._refusal is not None:
            raise self._refusal
        self._seen.clear()
        self.__dict__["_is_reducing"] = self._is_prepared or self._ddp.require_backward_grad_sync
        if self._is_reducing and self._reduced:  # none, if all are reduced by `param_to_hook_all_reduce`
            losses = current().part(backward.Passes).losses if self._ddp.find_unused_parameters else []
            self._ddp.reducer.prepare_for_backward([losses] if isinstance(losses, torch.Tensor) else [*losses])

    def complete_pass(self) -> None:
        """After a pass in which this network took part, complete torch's buckets (collective, does not wait long)."""
        if not self._is_reducing:
            self.has_unreduced_gradients = True
            return
        got = set(map(id, self._seen))
        self._check_pass(got)
        if self._fills and self._refusal is None and len(got) != len(self._reduced):
            self._missed = [(i, p, p.grad is not None) for i, p in enumerate(self._reduced) if id(p) not in got]
            _give_zeros([p for _, p, _ in self._missed])

    def end_pass(self, shares_group: bool) -> None:
        """End a pass of which the buckets of all networks are complete (collective)."""
        self._seen.clear()
        if not self._is_reducing:
            return
        self.__dict__.update(_is_prepared=False, _is_reducing=False, has_unreduced_gradients=False)
        if self._refusal is not None:
            return
        if self._fills and not self._is_joining:  # ranks that have joined answer the buckets' messages only
            self._drop_unused(shares_group)
        if self.num_reductions == 0 and not (self._ddp.static_graph or self._is_joining):
            # Else in the second forward, which one rank alone may run, or after a pass of another network began.
            self._ddp.reducer._rebuild_buckets()
        if not self._syncs_in_forward:
            self._sent_buffers.start()
            self._sent_buffers.finish()
        current().part(Progress).end_pass(self._first.device.type == "cuda")
        self._count_reduction()

    def _check_pass(self, got: set[int]) -> None:
        """Record why DDP did not reduce the gradients of this pass: an error at the next step or pass. Local."""
        name = type(self.module).__name__
        if current().part(backward.Passes).keeps_graph:
            self._refusal = backward.second_derivatives(name)
        elif len(got) != len(self._seen) and not self._ddp.static_graph:  # which torch's reducer may not notice
            self._refusal = backward.second_gradient(f"a parameter of {name}")
        elif self._ddp.static_graph and not self._ddp._static_graph_delay_allreduce_enqueued:
            self._refusal = SyncError(
                f"gradients of {name} with static_graph=True were not reduced: its first pass went past the wrapper's "
                "forward, or forward returned no tensor (a torch.distributions object?), and ranks would train "
                "different models. Train through forward and return tensors, or leave static_graph out."
            )
        elif not (self._fills or self._ddp.static_graph or self._ddp.find_unused_parameters):
            missed = {id(p) for p in self._reduced} - got if len(got) != len(self._reduced) else ()
            names = [found for found, p in self.module.named_parameters() if id(p) in missed] if missed else []
            if names:
                self._refusal = SyncError(
                    f"parameter '{names[0]}' of {name} ({len(names)} in all) got no gradient in a backward pass with "
                    "find_unused_parameters=False; the buckets that hold it were not sent, and ranks would train "
                    "different models. Leave find_unused_parameters out, or freeze what is not used."
                )
        elif self.num_reductions < 2 or is_milestone(self.num_reductions):
            for p, accumulator in zip(self._reduced, self._accumulators):
                if p.requires_grad and _accumulator(p) is not accumulator:
                    found = next(n for n, other in self.module.named_parameters() if other is p)
                    self._refusal = SyncError(
                        f"parameter '{found}' of {name} changed its dtype or device after it was wrapped; torch's "
                        "reducer no longer sees its gradient, and ranks would train different models. Convert it "
                        "before."
                    )

    def _drop_unused(self, shares_group: bool) -> None:
        """Set the gradient of parameters that no rank used to None again (collective).

        Each rank tells in one message of bytes which parameters have a gradient: 2 of this pass, 1 of an earlier one.
        It waits if it has missed one. In a group that networks share, those buckets went in another order.
        """
        told, missed = torch.full((len(self._reduced),), 2, dtype=torch.uint8, device="cpu"), self._missed
        for i, _, had_gradient in missed:
            told[i] = had_gradient
        work = dist.all_reduce(told, dist.ReduceOp.MAX, self._hosts, async_op=True)
        if missed:
            work.wait()
            are_used = told.tolist()
            for i, p, _ in missed:
                if not are_used[i]:
                    p.grad = None
                elif are_used[i] == 2 and shares_group:
                    self._refusal = self._refusal or self._in_another_order(p)
        self.__dict__["_missed"] = ()

    def _in_another_order(self, parameter: Any) -> SyncError:
        name = next(name for name, p in self.module.named_parameters() if p is parameter)
        return SyncError(
            f"parameter '{name}' of {type(self.module).__name__} was used by other ranks only, in one backward pass of "
            "several networks whose buckets share a process group; this rank sent them in another order, and gradients "
            "of different parameters were added up. Give each network its own backward pass, or "
            "find_unused_parameters=True."
        )

    def _leave_job(self) -> None:
        """Forget DDP, whose hooks end with it: the module then trains like a bare one. Local."""
        self.__dict__.update(_ddp=None, _hosts=None, _accumulators=[], _compares_buffers=None)


def _give_zeros(parameters: list[Any]) -> None:
    """Accumulate a gradient of zeros, for which torch's hooks of a gradient run. Local."""
    frozen = [p for p in parameters if not p.requires_grad]
    passes = current().part(backward.Passes)
    passes.depth += 1  # no pass of the program's
    try:
        for p in frozen:
            p.requires_grad_(True)
        torch.autograd.backward([p.view_as(p) for p in parameters], [torch.zeros_like(p) for p in parameters])
    finally:
        passes.depth -= 1
        for p in frozen:
            p.requires_grad_(False)


def _accumulator(parameter: torch.Tensor) -> Any:
    """Return the node of autograd that accumulates the gradient of `parameter`. Local."""
    if not parameter.requires_grad:
        return None
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _group() -> Any:
    """Return the process group of a network's buckets (collective).

    With gloo each network has its own: if a rank leaves a part out of one, it sends those buckets later, after those of
    another network. With nccl each group costs memory of the GPU.
    """
    is_first = current().next_number("groups of networks") == 0
    return dist.group.WORLD if is_first or dist.get_backend() != "gloo" else collectives.new_group()


@contextlib.contextmanager
def _without_owned(module: nn.Module) -> Iterator[None]:
    """Make DDP leave out the parameters that another wrapper reduces, in all of its spellings. Local."""
    names = [name for name, p in module.named_parameters(remove_duplicate=False) if guard.is_owned(p)]
    for prefix, child in module.named_modules():
        names += [f"{prefix}.{name}" for name, p in child.named_parameters(recurse=False) if guard.is_owned(p)]
    if not names:
        yield
        return
    before = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [*names, *before])
    try:
        yield
    finally:
        module._ddp_params_and_buffers_to_ignore = before  # type: ignore[assignment]


def check_options(given: Iterable[str]) -> None:
    """Refuse names that the constructor of this torch's DDP does not have. Local."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    for name in given:
        if name not in known or name in ("self", "module"):
            raise TypeError(
                f"wrap_parallel() got an unexpected option '{name}', which torch {torch.__version__}'s "
                "DistributedDataParallel does not have either, and it would have no effect"
                f"{lazy.nearest(name, [*known]) or '. Leave it out.'}"
            )
