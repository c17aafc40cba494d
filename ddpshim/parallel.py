"""`wrap_parallel`: DistributedDataParallel whose gradients are reduced whatever method trained.

torch arms its reducer in the wrapper's `forward`, so a network that trains through another method, or
runs two backward passes over one forward, is not synchronised, and nothing says so. Here the same
reducer is armed when a backward pass reaches the first parameter of the network. The call that built
the graph, and what it returned, do not matter any more; neither does whether it went through the
wrapper. (The idea of hooking the parameters rather than the forward is that of torch's composable
`replicate` and FSDP2; the reducer, its buckets and its overlap with backward are DDP's own.)
"""

from __future__ import annotations

import copy
import inspect
import operator
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ddpshim.errors import SyncError
from ddpshim.group import World, current_or_new_world, on_cleanup, split_random_streams

_PREFIXES = ("module", "_orig_mod")  # what DataParallel, DDP and torch.compile put before their child's keys
_BUFFER_BUCKET_BYTES = 250 * 1024 * 1024

# Which DistributedModule reduces a parameter's gradient. Keyed by identity: tensors compare by element.
_owners: Any = WeakIdKeyDictionary()
_wrapped: weakref.WeakSet[DistributedModule] = weakref.WeakSet()
_step_check: list[Any] = []  # the handle of the optimizer check, while it is registered


def wrap_parallel(
    module: nn.Module,
    *,
    find_unused_parameters: bool = True,
    static_graph: bool = False,
    gradient_as_bucket_view: bool = True,
    bucket_cap_mb: Optional[float] = None,
    broadcast_buffers: bool = True,
    comm_hook: Any = None,
    comm_hook_state: Any = None,
    process_group: Any = None,
    world: Optional[World] = None,
) -> Any:
    """`module`, trained in parallel: by DDP in a world of several ranks, else by DataParallel, else bare.

    Collective in a world of several ranks: parameters and buffers become the main rank's, and each rank
    gets a random stream of its own (see `ddpshim.split_random_streams`). DataParallel is taken by one
    process without a launcher that sees several GPUs and whose module is on a GPU. Whatever comes back
    has `.module`; attributes, methods and indexing reach the module; `state_dict` keys are the bare
    module's. The module itself is not changed and may be used beside the wrapper: its gradients are
    reduced all the same.

    Args:
        find_unused_parameters: True, parameters that a backward pass leaves out keep their gradient
            (None stays None unless another rank used them). False, leaving one out is an error that
            names it.
        static_graph: a promise that every backward pass uses the same parameters; breaking it is an
            error. (torch's own static_graph leaves methods that return torch.distributions unsynchronised.)
        gradient_as_bucket_view: gradients live in the communication buckets; saves one copy of them.
        bucket_cap_mb: size of a bucket; default torch's.
        broadcast_buffers: after each synchronised backward pass buffers become the main rank's.
        comm_hook: for `DistributedDataParallel.register_comm_hook`, with `comm_hook_state`.
        process_group: the ranks that share gradients; default all.

    Raises:
        SyncError: parameters on another device than this rank's, or not the same ones on every rank.
    """
    here = world or current_or_new_world()
    if isinstance(module, (DistributedModule, DataParallelModule, BareModule)):
        return module
    if isinstance(module, DistributedDataParallel):
        raise SyncError(
            f"wrap_parallel got a {type(module).__name__}; its gradients would be reduced twice. Pass the module "
            "inside it (.module) and drop the other wrapper."
        )
    if isinstance(module, DataParallel):
        module = module.module
    if here.world_size == 1:
        split_random_streams()
        several = not here.is_launched and torch.cuda.is_available() and torch.cuda.device_count() > 1
        if several and any(p.is_cuda for p in module.parameters()):
            return DataParallelModule(module)
        return BareModule(module)
    _check_device(module, here)
    if process_group is None:
        _check_same_structure(module, here)
    if all(not p.requires_grad or p in _owners for p in module.parameters()):
        broadcast_state(module, process_group)
        split_random_streams()
        return BareModule(module)
    wrapped = DistributedModule(
        module,
        strict=not find_unused_parameters,
        same_every_time=static_graph,
        sync_buffers=broadcast_buffers,
        process_group=process_group,
        gradient_as_bucket_view=gradient_as_bucket_view,
        **({} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}),
    )
    if comm_hook is not None:
        wrapped.register_comm_hook(comm_hook_state, comm_hook)
    split_random_streams()
    return wrapped


def unwrap(module: nn.Module) -> nn.Module:
    """The network inside any of ddpshim's or torch's parallel wrappers and torch.compile; itself if bare. Local."""
    inner: Any = module
    while True:
        if isinstance(inner, (_Transparent, DistributedDataParallel, DataParallel)):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        else:
            return inner  # type: ignore[no-any-return]


class _Transparent:
    """A wrapper that has its module's parameters, children, attributes and keys, under the same names.

    It shares the module's dictionaries rather than holding it as a child, so no traversal
    (`named_parameters`, an EMA, a parent's `state_dict`) finds another tree than that of the bare module.
    """

    module: nn.Module

    def _show(self, module: nn.Module) -> None:
        mine = self.__dict__
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            mine[name] = getattr(module, name)
        mine["module"] = module
        kept = {"reducer", "process_group", "require_backward_grad_sync", "device"}
        for name in [n for n in mine if not n.startswith("_") and n not in kept and n != "module"]:
            if hasattr(module, name):
                del mine[name]  # torch's own `dim`, `logger` and the like must not hide the module's
        for name in dir(type(module)):
            theirs = getattr(type(module), name)
            if not callable(theirs) or name.startswith("_") or name in _Transparent.__dict__:
                continue
            if hasattr(type(self), name) and theirs is not getattr(nn.Module, name, None):
                mine[name] = getattr(module, name)  # a method of the module that torch's wrapper has, too

    def __getattr__(self, name: str) -> Any:
        if "module" not in self.__dict__:
            # While torch's own constructor runs: nn.Module's look-up in its own dictionaries.
            return nn.Module.__getattr__(self, name)  # type: ignore[arg-type]
        return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "module" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            nn.Module.__setattr__(self, name, value)  # type: ignore[arg-type]
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode; the module's own flag, not a second one."""
        module = self.__dict__.get("module")
        return True if module is None else module.training

    @training.setter
    def training(self, mode: bool) -> None:
        module = self.__dict__.get("module")
        if module is not None:
            module.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        self.module.train(mode)
        return self

    def eval(self) -> Any:
        self.module.eval()
        return self

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self.module._apply(fn, *args, **kwargs)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The bare module's state, with its keys, however many ranks there are."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load keys as the bare module has them, or as DataParallel, DDP or torch.compile would write them."""
        return self.module.load_state_dict(portable_keys(state_dict, self.module), *args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        # Reached when a parent module loads: keys below `prefix` are ours, in the caller's own dict.
        mine = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
        renamed = {old: new for old, new in _new_keys(mine, self.module).items() if new != old}
        values = {new: state_dict.pop(prefix + old) for old, new in renamed.items()}
        state_dict.update({prefix + new: value for new, value in values.items()})
        self.module._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.module[key] = value  # type: ignore[operator]

    def __contains__(self, key: Any) -> bool:
        return key in self.module  # type: ignore[operator]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.module)

    def __dir__(self) -> Iterable[str]:
        return sorted(set(super().__dir__()) | set(dir(self.module)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Unpickles to the bare module, with nothing of ddpshim in the file.
        return operator.getitem, ([self.module], 0)


class BareModule(_Transparent, nn.Module):
    """One process, or nothing to reduce: the module behind the interface of the other two."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._show(module)


class DataParallelModule(_Transparent, DataParallel):  # type: ignore[type-arg]
    """One process on several GPUs: `forward` is spread over them, any other method runs on the first."""

    def __init__(self, module: nn.Module) -> None:
        DataParallel.__init__(self, module)
        self._modules.pop("module")
        self._show(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return DataParallel.forward(self, *args, **kwargs)


class DistributedModule(_Transparent, DistributedDataParallel):
    """DDP whose reducer is armed by the backward pass. Made by `wrap_parallel`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        strict: bool,
        same_every_time: bool,
        sync_buffers: bool,
        process_group: Any,
        **ddp_options: Any,
    ) -> None:
        signature = inspect.signature(DistributedDataParallel.__init__).parameters
        # torch 2.13 renames the option; both spell "do not broadcast buffers in forward", which we never use.
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in signature else "broadcast_buffers"
        options: dict[str, Any] = {**ddp_options, buffers: False}
        owned = [name for name, p in module.named_parameters() if p in _owners]
        if owned:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, owned)
        # Finding unused parameters keeps the first buckets for good, so nothing collective is left in forward
        # and one rank alone may run it. torch would search each graph for them; see _arm for why it need not.
        try:
            DistributedDataParallel.__init__(
                self,
                module,
                process_group=process_group,
                find_unused_parameters=True,
                **options,
            )
        finally:
            if owned:
                del module._ddp_params_and_buffers_to_ignore
        self._modules.pop("module")
        self._show(module)
        mine = self.__dict__
        torchs: Any = self  # private parts of torch's wrapper, untyped
        reduced: list[nn.Parameter] = torchs._build_params_for_reducer()[0]
        mine["_reduced"] = reduced
        mine["_names"] = {id(p): name for name, p in module.named_parameters()}
        mine["_strict"], mine["_same_every_time"] = strict, same_every_time
        mine["_buffers_follow"] = sync_buffers
        mine["_usual"] = None  # with static_graph: the parameters that the first backward pass used
        mine["_armed"] = False  # between the first gradient of a backward pass and its end
        mine["_used"] = set()
        mine["has_unreduced_gradients"] = False  # a backward pass ran under no_sync()
        mine["num_reductions"] = 0
        with torch.enable_grad():
            # One cheap graph that reaches every parameter: with it torch's search finds nothing unused.
            mine["_everything"] = [p.expand_as(p) for p in reduced]
        mine["_handles"] = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(reduced)]
        for p in reduced:
            _owners[p] = weakref.ref(self)
        broadcast_state(module, process_group)
        _watch_optimizers()
        _wrapped.add(self)
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified in DDP")

    def detach(self) -> None:
        """Stop reducing: the module is bare again. `cleanup()` calls it. Local."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for p in self._reduced:
            _owners.pop(p, None)
        self.reducer._remove_autograd_hooks()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cuda":
            from torch.nn.parallel.scatter_gather import scatter_kwargs

            index = self.device.index
            (args,), (kwargs,) = scatter_kwargs(
                args, kwargs, [index]
            )  # inputs on the CPU follow, as under DataParallel
        return self.module(*args, **kwargs)

    def _hook(self, index: int) -> Any:
        """What runs when the gradient of parameter `index` is complete in this pass, before torch's own hook."""
        # Strong on purpose: a caller who drops the wrapper and goes on with the module stays synchronised.
        mine, used = self.__dict__, self._used

        def hook(_: torch.Tensor) -> None:
            if not mine["_armed"]:
                self._arm()
            elif index in used:
                raise SyncError(
                    f"parameter '{self._names[id(self._reduced[index])]}' got a second gradient in a backward pass of "
                    f"{type(self.module).__name__}; it was reduced already, and ranks would differ from here on. An "
                    "exception inside an earlier backward pass was caught (let it end the job), or weights are shared "
                    "between reentrant checkpoints (use use_reentrant=False)."
                )
            used.add(index)

        return hook

    def _arm(self) -> None:
        """Make torch's reducer expect every parameter in the backward pass that is running."""
        mine = self.__dict__
        self._used.clear()
        if not self.require_backward_grad_sync:
            mine["has_unreduced_gradients"] = True
            return
        mine["_armed"] = True
        self.reducer.prepare_for_backward(self._everything)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """End of the pass: hand the reducer the parameters that it did not meet, so that all buckets go out."""
        mine = self.__dict__
        mine["_armed"] = False
        missed = [i for i in range(len(self._reduced)) if i not in self._used]
        if missed:
            self._refuse_missed(missed)
        reducer: Any = self.reducer
        for index in missed:
            reducer._autograd_hook(index)
        mine["has_unreduced_gradients"] = False
        mine["num_reductions"] += 1
        if self._same_every_time and self._usual is None:
            mine["_usual"] = set(missed)
        if self._buffers_follow and any(True for _ in self.module.buffers()):
            # After the reducer's own last callback, which is queued by now: every rank is here.
            torch.autograd.Variable._execution_engine.queue_callback(self._broadcast_buffers)

    def _refuse_missed(self, missed: list[int]) -> None:
        names = [self._names[id(self._reduced[i])] for i in missed if self._reduced[i].requires_grad]
        if self._strict and names:
            raise SyncError(
                f"parameters {names[:5]}{' and more' if len(names) > 5 else ''} got no gradient in this backward pass "
                "(find_unused_parameters=False); torch would stop in the next step without saying which. Use "
                "find_unused_parameters=True, or freeze them."
            )
        if self._same_every_time and self._usual is not None and set(missed) != self._usual:
            odd = [self._names[id(self._reduced[i])] for i in self._usual.symmetric_difference(missed)]
            raise SyncError(
                f"static_graph=True, but {odd[:5]} changed between used and unused; torch would train "
                "unsynchronised from here on. Drop static_graph."
            )

    def _broadcast_buffers(self) -> None:
        torchs: Any = self
        torchs._distributed_broadcast_coalesced(list(self.module.buffers()), _BUFFER_BUCKET_BYTES, 0)


def portable_keys(state_dict: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """`state_dict` with the keys that `module` has, whichever wrappers wrote or will read it. Local.

    Whole path segments are compared, never substrings, and a key that the module has is left alone: a
    child that is called `module` survives. Unknown keys are kept, for torch to complain about.

    >>> list(portable_keys({"module.weight": 0, "module.bias": 0}, nn.Linear(1, 1)))
    ['weight', 'bias']
    """
    new = _new_keys(state_dict, module)
    return {new[key]: value for key, value in state_dict.items()}


def _new_keys(keys: Iterable[str], module: nn.Module) -> dict[str, str]:
    """For each key the one that `module` knows it by, or itself."""
    keys, own = list(keys), module.state_dict()
    if all(key in own for key in keys):
        return {key: key for key in keys}
    for prefix in _PREFIXES:
        cut = len(prefix) + 1
        if all(key.startswith(prefix + ".") and key[cut:] in own for key in keys):
            return {key: key[cut:] for key in keys}
    by_bare: dict[str, list[str]] = {}
    for key in own:
        by_bare.setdefault(_bare_key(key), []).append(key)
    candidates = {key: [key] if key in own else by_bare.get(_bare_key(key), []) for key in keys}
    return {key: found[0] if len(found) == 1 else key for key, found in candidates.items()}


def _bare_key(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _PREFIXES)


def _check_device(module: nn.Module, here: World) -> None:
    """Refuse parameters that are on another rank's GPU, or on the CPU where nccl moves gradients."""
    for name, p in module.named_parameters():
        if p.is_cuda and here.device.type == "cuda" and p.device != here.device:
            raise SyncError(
                f"parameter '{name}' is on {p.device}, but rank {here.rank} computes on {here.device}; ranks would "
                "share a GPU and wait for each other. Use ddpshim.world().device in place of a fixed 'cuda:0'."
            )
        if not p.is_cuda and here.backend == "nccl":
            raise SyncError(
                f"parameter '{name}' is on {p.device}, and nccl only reduces GPU memory. Call "
                ".to(ddpshim.world().device) before wrap_parallel."
            )


def _check_same_structure(module: nn.Module, here: World) -> None:
    """Refuse modules that differ between ranks by name; warn where their values did (collective)."""
    mine = {name: (tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()}
    with torch.no_grad():
        sums = {name: float(p.double().sum()) for name, p in module.named_parameters()}
    everyone = here.gather((mine, sums))
    for rank, (theirs, _) in enumerate(everyone):
        odd = [name for name in {**everyone[0][0], **theirs} if everyone[0][0].get(name) != theirs.get(name)]
        if odd:
            raise SyncError(
                f"ranks 0 and {rank} wrap different {type(module).__name__}s: '{odd[0]}' is "
                f"{everyone[0][0].get(odd[0], 'missing')} and {theirs.get(odd[0], 'missing')}; their gradients would "
                "be added across different parameters. Build the same network on every rank."
            )
    first = everyone[0][1]
    differing = [
        name for name in first if any(sums[name] != first[name] and sums[name] == sums[name] for _, sums in everyone)
    ]
    if differing and here.is_main:
        warnings.warn(
            f"weights differed between ranks before wrap_parallel (first: '{differing[0]}'); the main rank's were "
            "taken. Copies made earlier (an EMA, a target network) still differ: pass seed= to ddpshim.setup(), "
            "build every network before the first wrap_parallel, or make the copies afterwards.",
            stacklevel=3,
        )


def broadcast_state(module: nn.Module, process_group: Any = None) -> None:
    """Make all parameters and buffers the main rank's, frozen ones included (collective)."""
    group: Any = process_group if process_group is not None else dist.group.WORLD
    tensors = [t.detach() for t in (*module.parameters(), *module.buffers())]
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        dist._broadcast_coalesced(group, same, _BUFFER_BUCKET_BYTES, 0)


def _watch_optimizers() -> None:
    """Have every optimizer step checked for gradients that no reducer has seen, until `cleanup()`."""
    if _step_check:
        return
    on_cleanup(_forget)
    if os.environ.get("DDPSHIM_GUARD") != "0":
        _step_check.append(register_optimizer_step_pre_hook(_check_step))


def _forget() -> None:
    while _step_check:
        _step_check.pop().remove()
    for wrapped in list(_wrapped):
        wrapped.detach()


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before a step whose gradients were not reduced over the ranks."""
    owners = set()
    for number, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            owner = _owners.get(p)
            if owner is None:
                raise SyncError(
                    f"{type(optimizer).__name__}.step(): parameter {position} of group {number} "
                    f"({_describe(p)}) has a gradient that is this rank's alone; ranks would train different models. "
                    "Pass the module that holds it to wrap_parallel (again, if it was unfrozen or added after the "
                    "wrap), before training."
                )
            owners.add(owner)
    for reference in owners:
        wrapped = reference()
        if wrapped is None:
            continue
        name = type(wrapped.module).__name__
        if wrapped._armed:
            raise SyncError(
                f"{type(optimizer).__name__}.step(): a backward pass of {name} never finished (an exception inside it "
                "was caught?); its peers still wait for its gradients. Let the exception end the job."
            )
        if wrapped.has_unreduced_gradients:
            raise SyncError(
                f"{type(optimizer).__name__}.step() after a backward pass of {name} under no_sync(); ranks would "
                "step on different gradients. Leave no_sync() for the last backward pass before a step."
            )
        if wrapped.num_reductions == 0:
            raise SyncError(
                f"{type(optimizer).__name__}.step(): the gradients of {name} never went through a backward pass "
                "(torch.autograd.grad, or .grad set by hand); ranks would train different models. Call "
                "loss.backward()."
            )


def _describe(p: torch.Tensor) -> str:
    """The parameter's name where a wrapped module knows it, else its shape."""
    for wrapped in _wrapped:
        for name, other in wrapped.module.named_parameters():
            if other is p:
                return f"'{name}' of {type(wrapped.module).__name__}"
    return f"shape {tuple(p.shape)}, in no wrapped module"
