"""Adds up gradients over virtual ranks in one order, so that their sum has the same bits on any number of ranks.

At the end of a backward pass, every virtual rank's gradient is divided into one part per rank. Each rank receives its
part from all virtual ranks, adds them from the first to the last, and sends the sum to the others. With one virtual
rank per process this sends as many bytes as a ring.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn

from ddpshim.errors import SyncError
from ddpshim.job import exchange, noise
from ddpshim.job.group import world
from ddpshim.job.world import World
from ddpshim.model import backward, guard
from ddpshim.model.broadcasting import broadcast
from ddpshim.model.equality import NUM_SENT, Agreement
from ddpshim.process.job import current
from ddpshim.process.observed import observe
from ddpshim.process.replaced import replaced

_MESSAGE_BYTES = 16 * 1024 * 1024  # per virtual rank
_SHARED_BYTES = 4 * 1024 * 1024  # the same, in shared memory
_NUM_COMPARED = 64  # numbers of a gradient


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
        made.shared_sum = _shared_memory(here, here.options.exact)
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
    flags = torch.zeros(num + NUM_SENT, dtype=torch.uint8, device=here.device)
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


class RunningSum:
    """Adds up gradients during backward passes, in a job of one process and in the memory of one gradient.

    As in gradient accumulation, torch adds each virtual rank's gradient to the sum of the previous ones, which is the
    order in which several processes add them. Covered are parameters whose gradient was None before the pass.

    Afterwards the first virtual rank has the mean in its own memory, and the others share one copy of it. A step that
    changes its gradients (clips them) would change that copy once for each of them, so it is restored between turns.

    Args:
        copies: for each virtual rank, its parameters; the list grows and shrinks with the virtual ranks.
    """

    def __init__(self, copies: Sequence[Sequence[nn.Parameter]]) -> None:
        self._copies = copies
        self._totals: dict[int, torch.Tensor] = {}
        self._begins: list[tuple[int, set[int]]] = []  # passes in progress: virtual rank, sums that it may begin
        self._means: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the first virtual rank's, the others'
        self._versions: dict[int, int] = {}  # of the first virtual rank's mean, when its turn began
        self._before: dict[int, torch.Tensor] = {}  # the others' means when their first turn began
        self._is_fresh = False  # the first one had at most one turn since the means were made

    def before_backward(self, number: int) -> None:
        """Let virtual rank `number` add to existing sums, and begin a sum for other parameters. Local."""
        if number == 0:
            self._totals.clear()
        begins: set[int] = set()
        for index, parameter in enumerate(self._copies[number]):
            if parameter.grad is None:
                parameter.grad = self._totals.get(index)
                if parameter.grad is None:
                    begins.add(index)
                continue
            if index in self._totals:
                raise SyncError(
                    f"before a backward pass, virtual rank {number} of this process has a gradient of shape "
                    f"{tuple(parameter.shape)} left, and those before it have none: the step clears gradients only "
                    "for some samples. Clear them always, or never."
                )
            if number and index in self._means and parameter.grad is self._means[index][1]:
                parameter.grad = parameter.grad.clone()  # so that its own gradient is added to a copy
        if number == 0:
            for index in begins & self._means.keys():
                del self._means[index]
        self._begins.append((number, begins))
        if len(self._begins) > 1:
            # Passes overlap: nested ones (checkpointing), or ones that exchange values midway (BatchNorm). Their
            # gradients would not be added one after another.
            for _, of_pass in self._begins:
                of_pass.clear()

    def after_backward(self, number: int, touched: set[int]) -> None:
        """Record the sums that virtual rank `number` began. Local."""
        latest = max(i for i, (of, _) in enumerate(self._begins) if of == number)
        for index in self._begins.pop(latest)[1] & touched:
            gradient = self._copies[number][index].grad
            assert gradient is not None
            self._totals[index] = gradient

    def take_mean(self, index: int, num: int, touched: Sequence[set[int]]) -> bool:
        """Set all gradients of parameter `index` to its sum / `num`; return False if there is no sum. Local."""
        total = self._totals.pop(index, None)
        if total is None or total.layout != torch.strided:
            return False
        if not all(index in own for own in touched):
            total.add_(0.0)  # several processes add 0 for a rank without a gradient: -0 becomes 0
        total.div_(num)
        mean = total.clone() if len(self._copies) > 1 else total
        for parameters in self._copies[1:]:
            parameters[index].grad = mean
        self._copies[0][index].grad = total
        self._means[index], self._versions[index] = (total, mean), total._version
        self._is_fresh = True
        return True

    def begin_turn(self, number: int) -> None:
        """Restore the shared means that the virtual rank before `number` has changed. Local."""
        if number == 1 and len(self._copies) > 2:
            self._before = {index: self._means[index][1].clone() for index in self._means if self._is_changed(index)}
            self._is_fresh = False
        elif number > 1:
            for index, before in self._before.items():
                self._means[index][1].copy_(before)
        elif number == 0:
            self._before.clear()
            self._versions = {index: first._version for index, (first, _) in self._means.items()}

    def clear(self) -> None:
        """Drop all sums and means, when virtual ranks end. Local."""
        self._begins.clear()
        for kept in (self._totals, self._means, self._before, self._versions):
            kept.clear()

    def _is_changed(self, index: int) -> bool:
        first, other = self._means[index]
        if self._copies[0][index].grad is not first:
            return False
        if self._is_fresh and first._version == self._versions.get(index):  # .data changes no version
            every = first.numel() // _NUM_COMPARED + 1
            return not torch.equal(first.reshape(-1)[::every], other.reshape(-1)[::every])
        return first._version != self._versions.get(index)


class SharedSum:
    """Adds up tensors of several processes of one machine through shared memory.

    Sockets would copy every byte through the kernel twice. Here each process writes its tensors into the place of its
    virtual ranks, of which there are `num_leaves`, adds up one part of all processes' tensors, and reads the sums.

    There are two halves, used in turn, so that no process writes where another may still read.
    """

    def __init__(self, memory: torch.Tensor, num_leaves: int, here: World) -> None:
        self._halves = memory.view(2, num_leaves, -1)
        self._here, self._num_sums = here, 0

    def means(self, leaves: Sequence[Sequence[torch.Tensor]], mean: Callable[[Sequence[torch.Tensor]], Any]) -> None:
        """Overwrite this process's tensors with `mean` of all virtual ranks' tensors (collective).

        Args:
            leaves: for each virtual rank of this process, its tensors, all of one dtype.
            mean: writes the mean of a list of tensors into the first one.
        """
        flat = [[tensor.reshape(-1) for tensor in of_virtual] for of_virtual in leaves]
        for part in _parts([tensor.numel() for tensor in flat[0]], _SHARED_BYTES // flat[0][0].element_size()):
            self._means_of([[of_virtual[i][start:end] for i, start, end in part] for of_virtual in flat], mean)
        for tensor, its in zip(chain.from_iterable(leaves), chain.from_iterable(flat)):
            if tensor.data_ptr() != its.data_ptr():  # not contiguous, so `its` is a copy
                tensor.copy_(its.view(tensor.shape))

    def _means_of(self, leaves: Sequence[Sequence[torch.Tensor]], mean: Callable[..., Any]) -> None:
        num, sizes = self._here.world_size, [tensor.numel() for tensor in leaves[0]]
        half = self._halves[self._num_sums % 2].view(leaves[0][0].dtype)
        self._num_sums += 1
        for i, of_virtual in enumerate(leaves):
            mine = half[self._here.rank + i * num]
            torch.cat(list(of_virtual), out=mine[: sum(sizes)])
        self._wait()
        each = -(-sum(sizes) // num)
        start, end = self._here.rank * each, min((self._here.rank + 1) * each, sum(sizes))
        if start < end:
            mean(half[:, start:end].unbind(0))  # written into the first virtual rank's place
        self._wait()
        for of_virtual in leaves:
            for tensor, value in zip(of_virtual, half[0, : sum(sizes)].split(sizes)):
                tensor.copy_(value)

    def _wait(self) -> None:
        dist.barrier()


def _shared_memory(here: World, num_leaves: int) -> Optional[SharedSum]:
    """Return memory shared by the ranks if all of them are on this machine's CPU; else None (collective)."""
    if here.world_size == 1 or here.local_world_size != here.world_size or here.device.type != "cpu":
        return None
    size = 2 * num_leaves * _SHARED_BYTES
    path = here.broadcast(_allocate(size) if here.is_main else None)
    memory = None if path is None else torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    here.barrier()
    if path is not None and here.is_main:
        os.unlink(path)  # the memory stays while a process has it mapped
    return None if memory is None else SharedSum(memory, num_leaves, here)


def _parts(sizes: Sequence[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield groups of (index of a tensor, start, end) that have at most `limit` numbers together."""
    group: list[tuple[int, int, int]] = []
    room = limit
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + room)
            group.append((i, start, end))
            room -= end - start
            start = end
            if not room:
                yield group
                group, room = [], limit
    if group:
        yield group


def _allocate(size: int) -> Optional[str]:
    """Return the path of a file in memory with `size` bytes allocated; None if there is no room."""
    with contextlib.suppress(OSError, AttributeError):
        handle, path = tempfile.mkstemp(prefix="ddpshim-sum-", dir="/dev/shm")
        try:
            os.posix_fallocate(handle, 0, size)
            return path
        except OSError:
            os.unlink(path)
        finally:
            os.close(handle)
    return None
