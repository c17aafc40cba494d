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
from packaging.version import Version
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpshim.errors import SyncError
from ddpshim.job import collectives, noise
from ddpshim.job.collectives import new_group
from ddpshim.job.group import on_cleanup, world
from ddpshim.model import backward, guard
from ddpshim.model.broadcasting import Buffers, broadcast_state
from ddpshim.model.equality import NUM_SENT, Equality, StepAgreement, is_milestone
from ddpshim.model.wrapper import Transparent
from ddpshim.process import devices
from ddpshim.process.job import current

_OF_TORCH = ("process_group", "reducer", "_reducer", "logger")
_HOLD_THE_GROUP = {*_OF_TORCH, "_buffers_to_send", "_equality", "_order", "_unused"}


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


class _FirstGradient:
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

    # Of the class, because other names that are set on a wrapper become its module's.
    num_reductions = _num_passes = 0  # passes reduced, passes begun
    has_unreduced_gradients = False  # a backward pass ran under no_sync()
    _sends_at_once = _is_completing = False  # it is completing between `_finish` and the end of `_complete`
    _keeps_graph = False  # in a backward pass with create_graph
    _with_graph: Sequence[tuple[Any, Any]] = ()  # then: parameters with their gradients
    _missed: Sequence[int] = ()  # indices of parameters without a gradient, in the pass that ends
    _num_steps = 0  # of optimizers
    _rates: Sequence[float] = ()  # the last learning rates
    _buffers_to_send: Optional[Buffers] = None
    _equality: Optional[Equality] = None
    _agreement: Optional[StepAgreement] = None

    def __init__(
        self, module: nn.Module, *, broadcast_buffers: bool, comm_hook: Any, comm_hook_state: Any, **ddp_options: Any
    ) -> None:
        self._begin(module, ddp_options)
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
        if broadcast_buffers and any(child._buffers for child in module.modules()):
            self._buffers_to_send = Buffers(module)
        mine["_unused"] = Unused(len(reduced), self._device)
        mine["_needs_default_stream"] = needs_default_stream(self._device, dist.get_backend())
        # torch.compile then splits graphs where buckets end. It refuses buckets smaller than DDP's first one.
        mine["_splits_graphs"] = hasattr(module, "_orig_mod") and self.bucket_bytes_cap >= 1024 * 1024
        mine["_captured"] = []  # memory that CUDA graphs copy from
        mine["_seen"] = []  # the parameters that got a gradient in this pass
        mine["_pass"] = _FirstGradient(self._arm)
        mine["_accumulators"] = [_accumulator(p) for p in reduced]
        # Builtins. Strong references: a caller who drops the wrapper and uses the module must stay synchronised.
        hooks = functools.partial(getattr, self._pass, "is_begun"), self._seen.append
        mine["_handles"] = [p.register_post_accumulate_grad_hook(hook) for p in reduced for hook in hooks]
        broadcast_state(module)
        guard.own(self, reduced)
        mine["_order"] = current().part(backward.Order)
        mine["_number"] = self._order.add(self)
        if world().options.guard:
            device, optimizers = reduced[0].device, functools.partial(guard.optimizers_of, self)
            self._equality = Equality(module, broadcast_buffers, device, optimizers, guard.companions)
            self._agreement = StepAgreement(type(module).__name__, self._number, device)
        wrapped = current().part(Wrapped)
        if not wrapped:
            on_cleanup(wrapped.unwrap_all)
            backward.watch(wrapped.unfinished)
        wrapped.add(self)

    def _begin(self, module: nn.Module, ddp_options: dict[str, Any]) -> None:
        """Run the constructor of torch's DDP, which makes its reducer."""
        # torch 2.13 renames the option. False: forward sends no buffers (`Buffers` does, after backward).
        names = inspect.signature(DistributedDataParallel.__init__).parameters
        options = {
            **ddp_options,
            "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False,
        }
        if "init_sync" in names:  # from torch 2.2 on
            options["init_sync"] = False  # `broadcast_state` sends the weights, and writes only what differs
        if ignored := _names_of_owned(module):
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        try:
            # Named, because the default is the group that existed when torch's module was imported.
            DistributedDataParallel.__init__(self, module, process_group=dist.group.WORLD, **options)
        finally:
            if ignored:
                del module._ddp_params_and_buffers_to_ignore

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
        if self._device.type != "cpu":  # as by DataParallel
            args, kwargs = devices.moved(args, self._device), devices.moved(kwargs, self._device)
        with self._inside_ddp_forward() if self._splits_graphs else contextlib.nullcontext():
            return Transparent.forward(self, *args, **kwargs)

    def _detach(self) -> None:
        """Stop reducing; the module then trains like a bare one. Local."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        guard.disown(self._reduced)
        self._reducer._remove_autograd_hooks()
        self._order.remove(self._number)
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
            self.has_unreduced_gradients = True
            return False
        self._keeps_graph = torch.is_grad_enabled()
        if self._keeps_graph and not current().holds_whole_batches:
            raise SyncError(
                f"backward(create_graph=True) of {type(self.module).__name__} on a share of the batch: second "
                'derivatives would differ between ranks. Use setup(batch="global"); a penalty on gradients of inputs '
                "only needs torch.autograd.grad(..., create_graph=True), then backward()."
            )
        self._sends_at_once = self._order.join(self._number) and not self._keeps_graph
        if not self.num_reductions:
            noise.begin_training(type(self.module).__name__, current().part(backward.Passes).losses)
        if self._sends_at_once:
            self._reducer.prepare_for_backward([])
        self._num_passes += 1
        return True

    def _finish(self) -> None:
        """End the pass: mark parameters without a gradient as ready, so that all buckets but the last are sent."""
        self._pass.end()
        if self._needs_default_stream:
            check_stream(self._device)
        current().progress.is_reducing = True
        self._is_completing = True
        reduced, missed = self._reduced, []
        if len(self._seen) != len(reduced):
            seen = set(map(id, self._seen))
            missed = [i for i, p in enumerate(reduced) if id(p) not in seen]
        self._missed = ready = missed
        if self._keeps_graph:  # torch's reducer writes in place: only into values, as a mean changes no graph (`Mean`)
            self._with_graph = [(p, p.grad) for p in reduced if p.grad is not None]
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
        self._tell_others([i for i in self._missed if self._reduced[i].grad is None])
        self._reducer._autograd_hook(0)
        self.has_unreduced_gradients = False
        self.num_reductions += 1
        if self._buffers_to_send is not None:
            if self.num_reductions == 1 and self._equality is not None:
                self._equality.look_at_own_buffers()
            self._buffers_to_send.start()  # after the last bucket on every rank: one order of messages
        # Runs after the reducer's own last callback, which is already queued.
        backward.at_end_of_pass(self._complete)

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
            self._agreement.fill(row, self._num_steps, self._rates, bool(unused))
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
        for p, gradient in self._with_graph:
            p.grad = gradient if p.grad is not None else None
        self._with_graph = ()
        if self._buffers_to_send is not None:
            self._buffers_to_send.finish()
        self._is_completing = False
        all_wrapped = current().part(Wrapped)
        if self._num_passes == 1:
            all_wrapped.with_first_buckets.append(self)
        current().progress.end_pass(self._device.type == "cuda" and not devices.is_capturing(self._device))
        if self._equality is not None and self._agreement is not None and not devices.is_capturing(self._device):
            self._agreement.read(self._presence.grad)
            if is_milestone(self.num_reductions):
                self._equality.start(self.num_reductions)
            self._unused.hosts_tell = self._unused.hosts_tell or self._agreement.leave_out
        if all_wrapped.with_first_buckets:
            all_wrapped.rebuild_buckets()

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


def needs_default_stream(device: torch.device, backend: str) -> bool:
    """Whether reduced gradients on `device` are only safe to use on its default stream. Local.

    gloo copies them back on its own streams, and torch's reducer waits for a future that is bound to no stream, so only
    the default stream waits for the copies. Fixed in torch 2.11 (https://github.com/pytorch/pytorch/pull/170812).
    """
    return device.type == "cuda" and backend == "gloo" and Version(torch.__version__).release < (2, 11)


def check_stream(device: torch.device) -> None:
    """Raise SyncError if a backward pass ends on a stream other than the default one of `device`. Local."""
    if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        raise SyncError(
            f"a backward pass on a CUDA stream of its own, through gloo, with torch {torch.__version__}: gradients "
            "would be read before they are copied back from the other ranks, and ranks would train different models. "
            "Upgrade to torch 2.11, give each rank a GPU of its own (then it is nccl), or call backward() outside of "
            "torch.cuda.stream(...)."
        )


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
    return collectives.add_up(tensor, dist.group.WORLD) / world().world_size


class _Hosts:
    """The group for messages between the hosts of a job, made with the first network on a GPU (collective)."""

    def __init__(self) -> None:
        self.group = new_group("gloo")


class Unused:
    """The parameters of one wrapper that no rank used in a backward pass.

    To read the last bucket, a host waits for its GPU, which is then idle until the next kernel. So once a rank leaves a
    parameter out, hosts send each other what was used directly in all later passes, and no host waits for a GPU.

    Attributes:
        hosts_tell: whether hosts send each other what their ranks used; set in the same pass on all ranks.
    """

    def __init__(self, num: int, device: torch.device) -> None:
        """For `num` parameters on `device` (collective)."""
        self._num, self._device, self._hosts, self.hosts_tell = num, device, None, False
        self._told: Any = None  # the message between hosts: (work, 1 for each parameter that a rank used)
        self._own: Sequence[int] = ()
        if device.type != "cpu":
            self._hosts = current().part(_Hosts).group

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
        else:
            used = row
        are_used = used.tolist() if self._own else []
        return [i for i in self._own if not are_used[i]]
