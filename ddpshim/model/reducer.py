"""Reduces the gradients of one network over ranks with torch's DDP, whose reducer each backward pass activates.

torch activates (arms) its reducer in the wrapper's `forward`, so a network that trains through another method, or
runs two backward passes over one forward, is not synchronised, and no error is raised. Here the same reducer is
activated when a backward pass reaches the first parameter of the network. It no longer matters which call built the
graph, what it returned, or whether it went through the wrapper. (Hooks on parameters instead of the forward are an
idea of torch's composable `replicate` and FSDP2; the reducer, its buckets and its overlap with backward are DDP's.)

No Python code runs for each parameter of a step: the hooks are builtins, called from C. torch's search for unused
parameters is off, because it sends one more message and looks up a tensor twice for each parameter. Instead, one
additional gradient in the last bucket lists the parameters that a rank used. Those that no rank used get no gradient,
as in one process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpshim.errors import SyncError
from ddpshim.job import exchange, noise
from ddpshim.job.exchange import new_group
from ddpshim.job.group import on_cleanup, world
from ddpshim.model import backward, guard, send_order, torch_private, unsupported
from ddpshim.model.broadcasting import Buffers, broadcast_state
from ddpshim.model.equality import NUM_SENT, Agreement, Equality, is_milestone
from ddpshim.model.wrapper import Transparent
from ddpshim.process import devices
from ddpshim.process.job import current

_OF_TORCH = {"process_group", "reducer", "_reducer", "logger"}
_HOLD_THE_GROUP = _OF_TORCH | {"_buffers_to_send", "_equality", "_order", "_unused"}


class Wrapped(weakref.WeakSet["DistributedModule"]):
    """The wrapped networks of a job."""

    def __init__(self) -> None:
        super().__init__()
        self.with_first_buckets: list[DistributedModule] = []  # until they are rebuilt, after the first pass

    def unwrap_all(self) -> None:
        for wrapped in list(self):
            DistributedModule._detach(wrapped)
        self.clear()

    def rebuild_buckets(self) -> None:
        """Rebuild the buckets of networks after their first pass, in the order in which gradients arrived (collective).

        torch does so before the second forward, which one rank alone may run. Here it happens at the end of a backward
        pass, for all its networks in one order, because ranks may have reached them in different orders.
        """
        if self.unfinished() is None:
            for wrapped in sorted(self.with_first_buckets, key=lambda wrapped: wrapped._number):
                wrapped._reducer._rebuild_buckets()
            self.with_first_buckets.clear()

    def unfinished(self) -> Optional[str]:
        """Return a network whose gradients are being sent, in a running or an aborted backward pass; else None."""
        return next((type(w.module).__name__ for w in self if w.is_armed or w._is_completing), None)


def is_first() -> bool:
    """Whether no network is wrapped yet in this job. Local."""
    return not current().part(Wrapped)


class _Pass:
    """Has the attribute `is_begun` during a backward pass; the first access begins the pass.

    So a hook that is `getattr` runs Python code only at the first gradient of a pass.
    """

    def __init__(self, begin: Callable[[], bool]) -> None:
        self._begin = begin

    def __getattr__(self, name: str) -> None:
        if name != "is_begun":
            raise AttributeError(name)
        try:
            if self._begin():
                self.__dict__[name] = None  # not under no_sync(): there each gradient calls `_begin`
        except AttributeError as error:  # the hooks' `getattr` has a default (the parameter) and would swallow it
            raise RuntimeError(f"while a backward pass began: {error}") from error

    @property
    def goes_on(self) -> bool:
        return "is_begun" in self.__dict__

    def end(self) -> None:
        self.__dict__.pop("is_begun", None)


class DistributedModule(Transparent, DistributedDataParallel):
    """DDP whose reducer is activated by the backward pass. Made by `wrap_parallel`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        strict: bool,
        same_every_time: bool,
        sync_buffers: bool,
        is_guarded: bool,
        comm_hook: Any,
        comm_hook_state: Any,
        process_group: Any,
        **ddp_options: Any,
    ) -> None:
        torch_private.refuse_unknown_torch()
        self._begin(module, process_group, ddp_options)
        if getattr(comm_hook, "__module__", "").endswith("powerSGD_hook"):
            raise SyncError(
                "PowerSGD sends several messages per bucket, which would be mixed up with the one about unused "
                "parameters. Use a hook with one message per bucket (allreduce, bf16 compression)."
            )
        mine = self.__dict__
        mine["_reducer"], mine["_device"] = self.reducer, self.device
        if comm_hook is not None:
            self.register_comm_hook(comm_hook_state, comm_hook)
        self._modules.pop("module")
        self._show(module)
        reduced: list[nn.Parameter] = self._reduced
        mine["_names"] = {id(p): name for name, p in module.named_parameters()}
        mine["_strict"], mine["_same_every_time"] = strict, same_every_time
        buffers = Buffers(module, process_group) if sync_buffers else None
        homes = [] if buffers is None else buffers.homes
        mine["_buffers_to_send"] = buffers if homes else None
        mine["_usual"] = None  # with static_graph: the parameters that the first backward pass left out
        mine["_unused"] = Unused(len(reduced), self._device, process_group)
        needs = unsupported.needs_default_stream(self._device, dist.get_backend(process_group))
        mine["_needs_default_stream"] = needs
        # torch.compile then splits graphs where buckets end. It refuses buckets smaller than DDP's first one.
        mine["_splits_graphs"] = hasattr(module, "_orig_mod") and self.bucket_bytes_cap >= 1024 * 1024
        mine["_keeps_graph"], mine["_with_graph"] = False, []  # in a backward pass with create_graph: the gradients
        mine["_missed"] = []  # indices of parameters without a gradient, in the pass that ends
        mine["_captured"] = []  # memory that CUDA graphs copy from
        mine["_seen"] = []  # the parameters that got a gradient in this pass
        mine["_pass"], mine["_sends_at_once"] = _Pass(self._arm), False
        mine["_is_completing"] = False  # between `_finish` and the end of `_complete`
        mine["_versions"] = []  # of the parameters at the start of the first pass
        mine["has_unreduced_gradients"] = False  # a backward pass ran under no_sync()
        mine["num_reductions"] = mine["_num_passes"] = 0  # passes reduced, passes begun
        mine["_number"] = current().next_number("networks")
        mine["_num_steps"], mine["_rates"] = 0, []  # optimizer steps; the last learning rates
        mine["_num_answered"] = guard.num_asked()  # comparisons that this rank has requested
        mine["_at_steps"] = None  # `_num_steps` at the last comparison of weights
        optimizers = functools.partial(guard.optimizers_of, self)
        device = reduced[0].device
        mine["_equality"] = Equality(module, homes, process_group, device, is_guarded, optimizers, guard.companions)
        mine["_accumulators"] = [_accumulator(p) for p in reduced]
        # Builtins. Strong references: a caller who drops the wrapper and uses the module must stay synchronised.
        hooks = functools.partial(getattr, self._pass, "is_begun"), self._seen.append
        mine["_handles"] = [p.register_post_accumulate_grad_hook(hook) for p in reduced for hook in hooks]
        broadcast_state(module, process_group)
        guard.own(self, reduced)
        mine["_order"] = send_order.of(process_group)
        place = mine["_place"] = self._order.add(self)
        mine["_agreement"] = Agreement(type(module).__name__, device, place) if self._equality.is_on else None
        if is_first():
            on_cleanup(current().part(Wrapped).unwrap_all)
            backward.watch(current().part(Wrapped).unfinished)
        current().part(Wrapped).add(self)

    def _begin(self, module: nn.Module, process_group: Any, ddp_options: dict[str, Any]) -> None:
        """Run the constructor of torch's DDP, which makes its reducer."""
        signature = inspect.signature(DistributedDataParallel.__init__).parameters
        # torch 2.13 renames the option. False: forward sends no buffers (`Buffers` does, after backward).
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in signature else "broadcast_buffers"
        # `broadcast_state` sends the weights, and writes only what differs.
        options: dict[str, Any] = {**ddp_options, buffers: False}
        undo = contextlib.ExitStack()
        undo.callback(torch_private.ignore_in_wrapper(module, _names_of_owned(module)))
        if "init_sync" in signature:
            options["init_sync"] = False
        else:
            undo.enter_context(torch_private.nothing_sent_at_first())
        with undo:
            DistributedDataParallel.__init__(self, module, process_group=process_group, **options)

    def _build_params_for_reducer(self) -> Any:
        """Return the parameters for torch's reducer, which reverses them: the additional one is first, so sent last."""
        parameters, are_sparse = DistributedDataParallel._build_params_for_reducer(self)
        mine = self.__dict__
        mine["_reduced"] = parameters
        # Its gradient lists the parameters that this rank used, and the numbers of `agreement`.
        mine["_presence"] = nn.Parameter(parameters[0].new_zeros(len(parameters) + NUM_SENT))
        return [self._presence, *parameters], [False, *are_sparse]

    def _build_debug_param_to_name_mapping(self, parameters: Any) -> dict[int, str]:
        """Return the names that torch's reducer prints, with one for the additional parameter."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        return {i: names.get(id(p), "presence") for i, p in enumerate(parameters)}

    def no_sync(self) -> Any:
        """Return a context in which gradients accumulate on each rank; the next pass outside it reduces the sum."""
        return DistributedDataParallel.no_sync(self)

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Raise SyncError: ranks with different numbers of batches would weight samples unequally."""
        raise SyncError(
            "join() is for ranks that run out of batches at different times, which weights samples unequally. "
            "make_loader gives every rank the same number of steps."
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._device.type != "cpu":
            from ddpshim.model import inputs

            # As by DataParallel.
            args, kwargs = inputs.moved(args, self._device), inputs.moved(kwargs, self._device)
        with self._inside_ddp_forward() if self._splits_graphs else contextlib.nullcontext():
            return Transparent.forward(self, *args, **kwargs)

    def _detach(self) -> None:
        """Stop reducing; the module then trains like a bare one. Local."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        guard.disown(self._reduced)
        self._reducer._remove_autograd_hooks()
        self._order.remove(self._place)
        for name in _HOLD_THE_GROUP & self.__dict__.keys():  # cleanup() ends the group's threads
            del self.__dict__[name]

    @property
    def has_sent(self) -> bool:
        """Whether the current backward pass has sent all buckets but the last one."""
        return self.is_armed and self._sends_at_once and len(self._seen) == len(self._reduced)

    @property
    def is_armed(self) -> bool:
        """Whether a backward pass that will be reduced has computed its first gradient and not ended."""
        return bool(self._pass.goes_on)

    def _arm(self) -> bool:
        """Begin a backward pass; activate the reducer if the pass may send at once. Return False under no_sync()."""
        self._seen.clear()
        if not self.require_backward_grad_sync:
            self.__dict__["has_unreduced_gradients"] = True
            return False
        mine = self.__dict__
        mine["_keeps_graph"] = torch.is_grad_enabled()
        if self._keeps_graph and not current().holds_whole_batches:
            raise SyncError(
                f"backward(create_graph=True) of {type(self.module).__name__} on a share of the batch: second "
                'derivatives would differ between ranks. Use setup(batch="global"); a penalty on gradients of inputs '
                "only needs torch.autograd.grad(..., create_graph=True), then backward()."
            )
        mine["_sends_at_once"] = self._order.join(self._place) and not self._keeps_graph
        if not self.num_reductions:
            noise.begin_training(type(self.module).__name__)
            if self._equality.is_on:
                mine["_versions"] = [p._version for p in self._reduced]
        if self._sends_at_once:
            self._reducer.prepare_for_backward([])
        mine["_num_passes"] += 1
        return True

    def _finish(self) -> None:
        """End the pass: mark parameters without a gradient as ready, so that all buckets but the last are sent."""
        mine = self.__dict__
        self._pass.end()
        if self._needs_default_stream:
            unsupported.check_stream(self._device)
        current().progress.is_reducing = True
        mine["_is_completing"] = True
        reduced, missed = self._reduced, []
        if len(self._seen) != len(reduced):
            seen = set(map(id, self._seen))
            missed = [i for i, p in enumerate(reduced) if id(p) not in seen]
        if self._strict or self._same_every_time:
            self._refuse_missed(missed)
        if self._versions:
            backward.check_unchanged(reduced, self._versions, [self._names[id(p)] for p in reduced])
            self._versions.clear()
        mine["_missed"], ready = missed, missed
        if self._keeps_graph:  # torch's reducer writes in place: only into values, as a mean changes no graph (`Mean`)
            mine["_with_graph"] = [(p, p.grad) for p in reduced if p.grad is not None]
            for p, gradient in self._with_graph:
                p.grad = gradient.detach()
        if not self._sends_at_once:
            self._reducer.prepare_for_backward([])
            places = {id(p): i for i, p in enumerate(reduced)}
            ready = [places[key] for key in dict.fromkeys(map(id, self._seen))] + missed  # in order of arrival
        for index in ready:
            self._reducer._autograd_hook(index + 1)

    def _send_last(self) -> None:
        """Send the last bucket, then the buffers; called after `_finish`."""
        mine, missed = self.__dict__, self._missed
        self._tell_others([i for i in missed if self._reduced[i].grad is None])
        self._reducer._autograd_hook(0)
        mine["has_unreduced_gradients"] = False
        mine["num_reductions"] += 1
        if self._same_every_time and self._usual is None:
            mine["_usual"] = set(missed)
        if self._buffers_to_send is not None:
            if self.num_reductions == 1 and self._equality.is_on:
                self._equality.look_at_own_buffers()
            self._buffers_to_send.start()  # after the last bucket on every rank: one order of messages
        # Runs after the reducer's own last callback, which is already queued.
        torch_private.at_end_of_pass(self._complete)

    def _tell_others(self, unused: list[int]) -> None:
        """Write into the additional gradient that `unused` parameters have no gradient on this rank."""
        presence = self._presence
        gradient = presence.grad if presence.grad is not None else torch.empty_like(presence)
        # The copy to a GPU is from pinned memory, so the host does not wait for it.
        on_cpu = gradient.device.type == "cpu"
        pinned: Any = {"dtype": gradient.dtype, "device": "cpu", "pin_memory": gradient.is_cuda}
        row = gradient if on_cpu else torch.empty(len(gradient), **pinned)
        self._unused.tell(row, unused)
        if self._agreement is not None:
            if asks := self._asks():  # noted now, to ask once: on a GPU the answer arrives some passes later
                self.__dict__.update(_num_answered=guard.num_asked(), _at_steps=self._num_steps)
            self._agreement.fill(row, asks, self._num_steps, self._rates, bool(unused))
        if not on_cpu:
            gradient.copy_(row, non_blocking=True)
            if devices.is_capturing(gradient.device):
                self._captured.append(row)
        presence.grad = gradient

    def _complete(self) -> None:
        """After the reduction: set grad=None for parameters that no rank used, and take the main rank's buffers."""
        try:
            self._reducer._check_reducer_finalized()
        except RuntimeError as error:
            self._refuse_stale(error)
        for i in self._unused.of_all(self._presence.grad):
            self._reduced[i].grad = None
        mine, all_wrapped = self.__dict__, current().part(Wrapped)
        for p, gradient in self._with_graph:
            p.grad = gradient if p.grad is not None else None
        mine["_with_graph"] = []
        if self._buffers_to_send is not None:
            self._buffers_to_send.finish()
        mine["_is_completing"] = False
        if self._num_passes == 1:
            all_wrapped.with_first_buckets.append(self)
        current().progress.end_pass(self._device.type == "cuda" and not devices.is_capturing(self._device))
        if self._agreement is not None and not devices.is_capturing(self._device):
            if self._agreement.read(self._presence.grad):
                mine["_num_answered"], mine["_at_steps"] = guard.num_asked(), self._num_steps
                self._equality.start(self.num_reductions)
            self._unused.hosts_tell = self._unused.hosts_tell or self._agreement.leave_out
        if all_wrapped.with_first_buckets:
            all_wrapped.rebuild_buckets()

    def _asks(self) -> bool:
        """Whether this rank requests a comparison of weights in this pass: after `guard.ask`, or before a milestone."""
        if self._num_answered != guard.num_asked():
            return True
        if not self._num_steps:  # no optimizer step yet, or weights are updated by hand
            return is_milestone(self.num_reductions + 1)
        return is_milestone(self._num_steps + 1) and self._at_steps != self._num_steps

    def _refuse_stale(self, error: RuntimeError) -> None:
        pairs = zip(self._reduced, self._accumulators)
        stale = [p for p, accumulator in pairs if p.requires_grad and _accumulator(p) is not accumulator]
        if not stale:
            raise error
        raise SyncError(
            f"parameter '{self._names[id(stale[0])]}' of {type(self.module).__name__} changed its dtype or device "
            "after it was wrapped; torch's reducer no longer sees its gradient, and ranks would train different "
            "models. Convert it before."
        ) from error

    def _refuse_missed(self, missed: list[int]) -> None:
        names = [self._names[id(self._reduced[i])] for i in missed if self._reduced[i].requires_grad]
        if self._strict and names:
            raise SyncError(
                f"parameters {names[:5]}{' and more' if len(names) > 5 else ''} got no gradient in this backward "
                "pass (find_unused_parameters=False); torch would fail in the next step without naming them. Use "
                "find_unused_parameters=True, or freeze them."
            )
        if self._same_every_time and self._usual is not None and set(missed) != self._usual:
            odd = [self._names[id(self._reduced[i])] for i in self._usual.symmetric_difference(missed)]
            raise SyncError(
                f"static_graph=True, but {odd[:5]} changed between used and unused; torch would stop reducing "
                "gradients. Leave static_graph out."
            )

    def check_equality(self) -> None:
        """Raise SyncError if the last comparison found a difference between ranks."""
        if not devices.is_capturing(self._device):
            self._equality.finish()


def _accumulator(parameter: torch.Tensor) -> Any:
    """Return the node of autograd that accumulates the gradient of `parameter`."""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _names_of_owned(module: nn.Module) -> list[str]:
    """Return the names of parameters that another wrapper reduces, in all of DDP's spellings, duplicates included."""
    names = [name for name, p in module.named_parameters(remove_duplicate=False) if guard.is_owned(p)]
    for prefix, child in module.named_modules():
        names += [f"{prefix}.{name}" for name, p in child.named_parameters(recurse=False) if guard.is_owned(p)]
    return names


def average(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean of `tensor` over all ranks, without gradient (collective; not while a backward pass runs)."""
    return exchange.add_up(tensor, dist.group.WORLD) / world().world_size


class _Hosts:
    """The group for messages between the hosts of a job, made with the first network on a GPU."""

    def __init__(self) -> None:
        self.group: Any = None


class Unused:
    """The parameters of one wrapper that no rank used in a backward pass.

    To read the last bucket, a host waits for its GPU, which is then idle until the next kernel. So once a rank leaves a
    parameter out, hosts send each other what was used directly in all later passes, and no host waits for a GPU.

    Attributes:
        hosts_tell: whether hosts send each other what their ranks used; set in the same pass on all ranks.
    """

    def __init__(self, num: int, device: torch.device, group: Any) -> None:
        """For `num` parameters on `device`, with gradients reduced over `group` (collective)."""
        self._num, self._device, self._hosts, self.hosts_tell = num, device, None, False
        self._told: Any = None  # the message between hosts: (work, 1 for each parameter that a rank used)
        self._own: Sequence[int] = ()
        if device.type != "cpu" and group is dist.group.WORLD:
            hosts = current().part(_Hosts)
            hosts.group = self._hosts = hosts.group or new_group("gloo")

    def tell(self, row: torch.Tensor, own: Sequence[int]) -> None:
        """Write 1 into `row` for each parameter, and 0 for those in `own`, unused here (collective, does not wait)."""
        self._own = own
        row.fill_(1)
        if own:
            row[own] = 0
        if self._hosts is not None and (self.hosts_tell or devices.is_capturing(self._device)):
            used = torch.ones(self._num, dtype=torch.uint8, device="cpu")
            used[list(own)] = 0
            self._told = dist.all_reduce(used, dist.ReduceOp.MAX, self._hosts, async_op=True), used

    def of_all(self, row: torch.Tensor) -> list[int]:
        """Return those of `own` that no rank used, from the reduced `row`. The host may wait for other hosts."""
        if self._told is not None:
            (work, used), self._told = self._told, None
            work.wait()
        elif not self._own:
            return []
        elif devices.is_capturing(self._device):
            raise SyncError(
                f"{len(self._own)} parameters without gradient during CUDA graph capture, in a process group other "
                "than the default: whether another rank used them is unknown. Freeze them, or capture with the "
                "default process group."
            )
        else:
            used = row
        are_used = used.tolist() if self._own else []
        return [i for i in self._own if not are_used[i]]
