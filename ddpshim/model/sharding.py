"""Divides a network's parameters, gradients and optimizer state over the ranks, by torch's `fully_shard` (FSDP2).

For networks that do not fit a GPU together with Adam's state. Files are the same as in a plain run: `state_dict` of the
network and of its optimizers collect the parts, and `load_state_dict` divides them again.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import torch
from torch import nn

from ddpshim.errors import SyncError
from ddpshim.job.collectives import Buffers, broadcast_state
from ddpshim.job.group import world
from ddpshim.model import backward, guard
from ddpshim.model.wrapper import BareModule
from ddpshim.process.devices import is_capturing
from ddpshim.process.job import current
from ddpshim.process.observed import Progress, observe
from ddpshim.process.replaced import replaced

# The main rank may write a large file between two calls of `state_dict`. Ranks that hang are found much earlier.
_DEADLINE_S = 3600.0
_USE_ALL = (
    "A sharded network mixes gradients of different parameters: use all of them in every pass (add 0 * output.sum() of "
    "those that are left out), or leave shard out"
)


class _Sharding:
    """The sharded networks of a job, and their parameters before sharding."""

    def __init__(self) -> None:
        self.former: dict[int, tuple[weakref.ref[Any], str]] = {}
        self.networks: list[ShardedModule] = []
        _watch_optimizers(self)


class ShardedModule(guard.Reduced, BareModule):
    """A network of which each rank holds one part; made by `wrap_parallel(module, shard=True)`."""

    # Of the class, because other names that are set on a wrapper become its module's.
    _has_run = False

    def __init__(self, module: nn.Module, methods: Sequence[str], sync_buffers: bool) -> None:
        fsdp = _fsdp()
        broadcast_state(module)
        name_of_class = type(module).__name__  # fully_shard replaces the class
        before = dict(module.named_parameters())
        blocks = {id(child) for parent in module.modules() if isinstance(parent, nn.ModuleList) for child in parent}
        # Inner blocks first: each takes the parameters that no other has taken.
        for child in reversed([child for child in module.modules() if id(child) in blocks]):
            if type(child).forward is not nn.Module.forward and any(True for _ in child.parameters()):
                _fully_shard(fsdp, child)
        _fully_shard(fsdp, module)
        super().__init__(module)
        mine = self.__dict__
        mine["_name"], mine["_syncs"] = name_of_class, True
        mine["_parts"] = dict(module.named_parameters())
        mine["_sent_buffers"] = Buffers(module, sync_buffers)
        module.register_forward_pre_hook(lambda *_: self._note_run())
        for name in methods:
            fsdp.register_fsdp_forward_method(module, name)
            setattr(module, name, _after(self._note_run, getattr(module, name)))
        module.register_state_dict_post_hook(_put_together)
        module.register_load_state_dict_pre_hook(_divide)
        guard.own(self, [p for p in self._parts.values() if p.requires_grad])
        current().part(backward.Passes).after.append(self._after_pass)
        sharding = current().part(_Sharding)
        sharding.networks.append(self)
        sharding.former.update((id(p), (weakref.ref(p), name)) for name, p in before.items())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients accumulate on each rank; the next pass outside it reduces the sum."""
        with contextlib.ExitStack() as after, replaced(self, "_syncs", False) as before:
            after.callback(self.module.set_requires_gradient_sync, before)  # type: ignore[arg-type]
            self.module.set_requires_gradient_sync(False)  # type: ignore[operator]
            yield

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SyncError(
            f"a {self._name} that is sharded (shard=True) was pickled, but this rank holds only a part of it. Save "
            "its state_dict(), called on every rank."
        )

    def _note_run(self) -> None:
        if torch.is_grad_enabled():
            self._has_run = True

    def _after_pass(self) -> None:
        """After a backward pass, check that all ranks reduced the gradients of the same parameters (collective)."""
        if not self._has_run:
            return
        self._has_run = False
        self.has_unreduced_gradients = not self._syncs
        if not self._syncs:
            return
        for name, p in self.module.named_parameters():
            if p is not self._parts[name] and p.grad is not None:
                raise SyncError(
                    f"the gradient of '{name}' of {self._name} was not reduced over the ranks: "
                    "fully_shard found no tensor in the network's output (a torch.distributions object?), so "
                    "ranks would train different models. Return tensors, or name the method that returns the loss: "
                    'wrap_parallel(policy, shard=["compute_loss"]).'
                )
        device = next(iter(self._parts.values())).device
        if world().options.guard and not is_capturing(device):
            used = [i for i, p in enumerate(self._parts.values()) if p.grad is not None]
            guard.agree_on_pass(self._name, used, _USE_ALL)()
        self.num_reductions += 1
        self._sent_buffers.start()
        self._sent_buffers.finish()
        current().part(Progress).end_pass(device.type == "cuda")


def check_shard(others: Sequence[str]) -> None:
    """Refuse `shard` if torch lacks fully_shard, or with arguments that reduce gradients in another way. Local."""
    _fsdp()
    if others:
        raise SyncError(
            f"wrap_parallel(shard=...) with {' and '.join(others)}: fully_shard reduces gradients itself, so the "
            "other would not be used. Leave one of them out."
        )


def _fsdp() -> Any:
    import torch.distributed.fsdp as fsdp

    if not hasattr(fsdp, "fully_shard") or not hasattr(fsdp, "register_fsdp_forward_method"):
        raise SyncError(
            f"wrap_parallel(shard=True) with torch {torch.__version__}, which has no "
            "torch.distributed.fsdp.fully_shard; every rank would hold the whole network. Upgrade to torch 2.6, or "
            "leave shard out."
        )
    if world().backend == "gloo" and not hasattr(fsdp.FSDPModule, "set_force_sum_reduction_for_comms"):
        raise SyncError(
            f"wrap_parallel(shard=True) on CPUs with torch {torch.__version__}, in which gloo returns the sum of the "
            "ranks' gradients in place of their mean. Upgrade to torch 2.8, or leave shard out."
        )
    return fsdp


def _fully_shard(fsdp: Any, module: Any) -> None:
    fsdp.fully_shard(module)
    if world().backend == "gloo":
        module.set_force_sum_reduction_for_comms(True)  # in 2.8 its mean is a sum; now torch itself divides


def _is_part(value: Any) -> bool:
    return hasattr(value, "full_tensor") and hasattr(value, "placements")


def _meet(what: str) -> None:
    here = world()
    of_ranks = here.gather_with_deadline(f"sharded/{what}", None, _DEADLINE_S)
    if missing := [rank for rank in range(here.world_size) if rank not in of_ranks]:
        raise SyncError(
            f"ranks {missing} did not call {what} of a sharded network (shard=True) within {_DEADLINE_S:g} s of rank "
            f"{here.rank}: each rank holds a part of it. Call it on every rank, and write the file only on the main "
            "rank."
        )


def whole(value: Any) -> Any:
    """Return a sharded tensor as a whole, on the CPU; any other value unchanged (collective)."""
    return value.full_tensor().detach().cpu() if _is_part(value) else value


def part(value: Any, like: Any) -> Any:
    """Return this rank's part of the main rank's `value`, divided as `like` (collective)."""
    if not isinstance(value, torch.Tensor) or _is_part(value) or not _is_part(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.detach().to(like.device), like.device_mesh, like.placements)


def _put_together(module: nn.Module, state_dict: Any, prefix: str, _: Any) -> None:
    _meet("state_dict()")
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[key] = whole(state_dict[key])


def _divide(module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    _meet("load_state_dict()")
    for name, p in module.named_parameters(remove_duplicate=False):
        if prefix + name in state_dict:
            state_dict[prefix + name] = part(state_dict[prefix + name], p)


def _after(note: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return method(*args, **kwargs)

    return noted


def _watch_optimizers(sharding: _Sharding) -> None:
    """Make optimizers save whole states, and refuse steps of those made before their network was sharded. Local."""
    save, load = torch.optim.Optimizer.state_dict, torch.optim.Optimizer.load_state_dict

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        owners = current().part(guard.GuardState).owners
        for network in sharding.networks:
            if network.has_unreduced_gradients and any(owners.get(id(p)) is network for p in parameters(optimizer)):
                raise SyncError(
                    f"{type(optimizer).__name__}.step() after a backward pass of {network._name} under no_sync() or "
                    "accumulate(is_last=False): its gradients are not reduced yet, so the step would do nothing. "
                    "Use neither for the last backward pass before a step."
                )
        for p in parameters(optimizer):
            reference, name = sharding.former.get(id(p), (lambda: None, ""))
            if reference() is p:
                raise SyncError(
                    f"{type(optimizer).__name__}.step(): it was made before wrap_parallel(..., shard=True) and "
                    f"holds '{name}' as it was before, which is no longer trained. Make optimizers, and lists of "
                    "parameters, afterwards."
                )

    @functools.wraps(save)
    def state_dict(self: torch.optim.Optimizer) -> Any:
        found = save(self)
        if not any(map(_is_part, parameters(self))):
            return found
        _meet(f"state_dict() of {type(self).__name__}")
        of_all = {key: {name: whole(v) for name, v in state.items()} for key, state in found["state"].items()}
        return {**found, "state": of_all}

    @functools.wraps(load)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: Any) -> None:
        params = parameters(self)
        if any(map(_is_part, params)):
            _meet(f"load_state_dict() of {type(self).__name__}")
            keys = [key for group in state_dict["param_groups"] for key in group["params"]]
            like = dict(zip(keys, params))
            parts = {
                key: {name: part(v, like.get(key)) for name, v in state.items()}
                for key, state in state_dict["state"].items()
            }
            state_dict = {**state_dict, "state": parts}
        load(self, state_dict)

    at_end = current().at_end
    observe(at_end, before_step=check)
    at_end.enter_context(replaced(torch.optim.Optimizer, "state_dict", state_dict))
    at_end.enter_context(replaced(torch.optim.Optimizer, "load_state_dict", load_state_dict))


def parameters(stateful: Any) -> list[Any]:
    """Return the parameters of a network or an optimizer; none of another object. Local."""
    if isinstance(stateful, nn.Module):
        return [*stateful.parameters()]
    return [p for group in getattr(stateful, "param_groups", ()) for p in group["params"]]
