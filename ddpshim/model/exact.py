"""Adds up gradients over virtual ranks in one order, so that their sum has the same bits on any number of ranks.

At the end of a backward pass, every virtual rank's gradient is divided into one part per rank. Each rank receives its
part from all virtual ranks, adds them from the first to the last, and sends the sum to the others. With one virtual
rank per process this sends as many bytes as a ring.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from torch import nn

from ddpshim.errors import SyncError
from ddpshim.job import exchange, noise
from ddpshim.job.group import world
from ddpshim.job.world import World
from ddpshim.model import backward, guard, shared_sum
from ddpshim.model.broadcasting import broadcast
from ddpshim.model.running_sum import RunningSum
from ddpshim.model.shared_sum import SharedSum
from ddpshim.model.step_check import NUM, Agreement
from ddpshim.process.job import current
from ddpshim.process.observed import observe
from ddpshim.process.replaced import replaced

_MESSAGE_BYTES = 16 * 1024 * 1024  # per virtual rank


class Networks:
    """The networks whose gradients are reduced in a job with the option `exact`.

    Attributes:
        parameters: those whose gradients are added up, in the order in which their networks were wrapped.
        copies: `parameters`, then their copies for each further virtual rank of this process.
        touched: for each virtual rank, the indices of gradients that the current backward pass has changed.
        modules: for each virtual rank, the wrapped modules, for their buffers.
    """

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.modules: list[list[nn.Module]] = [[]]
        self.copies: list[list[nn.Parameter]] = [self.parameters]
        self.touched: list[set[int]] = [set()]
        self.running_sum = RunningSum(self.copies)  # used in a job of one process
        self.agreement = Agreement("a network", torch.device("cpu"))
        self.checked: set[Optional[int]] = set()  # virtual ranks whose first backward pass was checked
        self.shared_sum: Optional[SharedSum] = None

    def watch(self, number: int, first: int = 0) -> None:
        """Record which gradients of virtual rank `number` change, from parameter `first` on. Local."""
        touched = self.touched[number]
        for index, parameter in enumerate(self.copies[number][first:], first):
            parameter.register_post_accumulate_grad_hook(functools.partial(_note, touched, index))


def _note(touched: set[int], index: int, parameter: torch.Tensor) -> None:
    touched.add(index)


def networks() -> Networks:
    """Return the networks whose gradients are reduced in this job. Local."""
    return current().part(Networks)


def reduce(module: nn.Module) -> None:
    """From now on, average the gradients of `module` over virtual ranks after each backward pass (collective)."""
    made, job = networks(), current()
    first, known = len(made.parameters), set(map(id, made.parameters))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            made.parameters.append(parameter)
            made.names.append(name)
    made.modules[0].append(module)
    made.watch(0, first)
    guard.watch(module)
    if job.next_number("exact reduction") == 0:
        here = world()
        assert here.options.exact is not None
        made.shared_sum = shared_sum.make(here, here.options.exact)
        backward.watch(lambda: None)
        job.at_end.enter_context(replaced(torch.autograd, "backward", _stand_in(made, torch.autograd.backward)))
        if here.options.guard:
            observe(job.at_end, before_step=functools.partial(_check_step, made))


def _check_step(made: Networks, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    backward.check_step(optimizer)
    parameters = {id(parameter) for copy in made.copies for parameter in copy}
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        if id(parameter) not in parameters:
            raise SyncError(
                f"{type(optimizer).__name__}.step(): a parameter of shape {tuple(parameter.shape)} is in no wrapped "
                "network, so its gradient is this virtual rank's alone. Give wrap_parallel every network that is "
                "trained (DDPSHIM_GUARD=0 turns this check off)."
            )


def _stand_in(made: Networks, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduced(*arguments: Any, **options: Any) -> None:
        playing = exchange.turns()
        number = None if playing is None else playing.now
        own = made.copies[number or 0]
        is_first = number not in made.checked and world().options.guard
        versions = [parameter._version for parameter in own] if is_first else []
        made.checked.add(number)
        if playing is None or number is None:
            original(*arguments, **options)
            backward.check_unchanged(own, versions, made.names)
            if made.touched[0]:
                _check_whole()
                _add_up(made, [made.touched[0]])
            return
        is_alone = world().world_size == 1
        if is_alone:
            made.running_sum.before_backward(number)
        original(*arguments, **options)
        backward.check_unchanged(own, versions, made.names)
        _check_own(made, number)
        if is_alone:
            made.running_sum.after_backward(number, made.touched[number])
        playing.meet("the end of a backward pass", made.touched[number], functools.partial(_add_up, made))

    return reduced


def _check_whole() -> None:
    here = world()
    if here.options.exact != here.world_size:
        raise SyncError(
            f"a backward pass outside of a step of virtual ranks, with exact={here.options.exact} on "
            f"{here.world_size} ranks: each rank would train on several virtual ranks' samples at once, so rounding "
            "would depend on the number of ranks. Mark the training step (ddpshim.virtual_step), or start "
            f"{here.options.exact} ranks; they may share GPUs."
        )
    noise.begin_training("a network")


def _check_own(made: Networks, number: int) -> None:
    for other, touched in enumerate(made.touched):
        if other != number and touched and not made.touched[number]:
            index = min(touched)
            raise SyncError(
                f"virtual rank {number} of this process trained virtual rank {other}'s '{made.names[index]}': "
                "gradients of several virtual ranks would be mixed. Give ddpshim.virtual_step all objects that the "
                "step uses, and let the step take them as arguments."
            )


def _add_up(made: Networks, touched: list[set[int]]) -> None:
    """Set all virtual ranks' gradients to their mean (collective)."""
    here = world()
    assert here.options.exact is not None
    indices = sorted(_touched_anywhere(made, set().union(*touched), here))
    with torch.no_grad():
        take_mean = functools.partial(made.running_sum.take_mean, num=here.options.exact, touched=touched)
        indices = [index for index in indices if here.world_size > 1 or not take_mean(index)]
        for own in touched:
            own.clear()
        for same in _messages(made, indices):
            leaves = [[_gradient(copy[index]) for index in same] for copy in made.copies]
            if here.world_size == 1:
                for of_parameter in zip(*leaves):
                    _spread(_mean(of_parameter, here), of_parameter)
            elif made.shared_sum is not None:
                made.shared_sum.means(leaves, functools.partial(_mean, here=here))
            else:
                _add_up_over_ranks(leaves, here)
        _take_first_buffers(made, here)
    current().progress.end_pass(is_on_gpu=False)


def _take_first_buffers(made: Networks, here: World) -> None:
    """Copy the first virtual rank's buffers to all others, as DDP copies the main rank's (collective)."""
    for of_virtual in zip(*made.modules):
        first = list(of_virtual[0].buffers())
        if here.world_size > 1 and first:
            broadcast([buffer.data for buffer in first])
        for module in of_virtual[1:]:
            for buffer, its in zip(first, module.buffers()):
                its.data.copy_(buffer)


def _mean(parts: Sequence[torch.Tensor], here: World) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    assert here.options.exact is not None
    return total.div_(here.options.exact)


def _spread(mean: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
    for gradient in gradients:
        if gradient is not mean:
            gradient.copy_(mean)


def _add_up_over_ranks(leaves: list[list[torch.Tensor]], here: World) -> None:
    num, sizes = here.world_size, [gradient.numel() for gradient in leaves[0]]
    each = -(-sum(sizes) // num)
    sent = leaves[0][0].new_zeros(num, len(leaves), each)
    flat = sent.new_zeros(num * each)
    for i, of_virtual in enumerate(leaves):
        torch.cat([gradient.reshape(-1) for gradient in of_virtual], out=flat[: sum(sizes)])
        sent[:, i] = flat.view(num, each)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    total = _mean([*exchange.in_order_of_numbers([list(of_rank) for of_rank in received])], here).clone()
    dist.all_gather(list(flat.view(num, each).unbind(0)), total)
    for of_virtual in leaves:
        for gradient, mean in zip(of_virtual, flat[: sum(sizes)].split(sizes)):
            gradient.copy_(mean.view(gradient.shape))


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.layout != torch.strided:
        raise SyncError(
            "a sparse gradient with the option exact: its terms have no fixed order of addition. Build the "
            "embedding with sparse=False."
        )
    return parameter.grad


def _touched_anywhere(made: Networks, own: set[int], here: World) -> set[int]:
    if here.world_size == 1:
        return own
    current().progress.is_reducing = True
    num = len(made.parameters)
    flags = torch.zeros(num + NUM, dtype=torch.uint8, device=here.device)
    flags[list(own)] = 1
    made.agreement.fill(flags)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    if here.options.guard:
        made.agreement.read(flags)
    return set(flags[:num].nonzero().flatten().tolist())


def _messages(made: Networks, indices: Sequence[int]) -> Iterator[list[int]]:
    """Yield `indices` in groups of one dtype and device and of bounded size."""
    filling: dict[Any, tuple[list[int], int]] = {}
    for index in indices:
        parameter = made.parameters[index]
        kind = parameter.dtype, parameter.device
        same, num_bytes = filling.pop(kind, ([], 0))
        more = parameter.numel() * parameter.element_size()
        if same and num_bytes + more > _MESSAGE_BYTES:
            yield same
            same, num_bytes = [], 0
        filling[kind] = [*same, index], num_bytes + more
    yield from (same for same, _ in filling.values())
