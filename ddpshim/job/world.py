"""Defines `World`: this process's place in its job, frozen. What its collectives do is in `job.collectives`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar, Union, cast

import torch
import torch.distributed as dist

from ddpshim.errors import WorldError
from ddpshim.options import Options
from ddpshim.process.job import Job, current

if TYPE_CHECKING:
    from ddpshim.job.running import Running

# With these the variables of launchers begin: `process.launch_env` knows them, and which launcher sets which.
_OF_LAUNCHERS = (
    *("DDPSHIM_LAUNCHER", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_"),
    *("SLURM_", "SUBMITIT_", "OMPI_", "MV2_", "PMI_"),
)
T = TypeVar("T")
N = TypeVar("N", float, torch.Tensor)


@dataclass(frozen=True)
class World:
    """This process's place in its job. Get it from `setup()`, later from `ddpshim.world()`.

    The collectives (`barrier`, `mean`, `sum`, `gather`, `broadcast`, `run_on_main`) must be reached by every rank. They
    carry Python values over a separate CPU group, so numbers stay exact, and a rank may work alone for `side_timeout_s`
    (a rollout, a save) while the others wait. In one process they return at once.

    Attributes:
        rank: this process's number in the job, 0 to `world_size` - 1.
        local_rank: its number on its node, 0 to `local_world_size` - 1.
        node_rank: the number of its node.
        device: the device on which it computes.
        backend: torch's name of the backend that carries gradients; None without a group.
        launcher: what started the job, "none" in a plain `python train.py`.
        seed: the argument of `setup`.
        num_restarts: how often a launcher or scheduler has started this job before.
        options: the `Options` of the run.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: Optional[str] = None
    launcher: str = "none"
    seed: Optional[int] = None
    num_restarts: int = 0
    options: Options = field(default_factory=Options, repr=False)
    _job: Job = field(default_factory=Job, repr=False, compare=False)

    @property
    def is_restarted(self) -> bool:
        """Whether a launcher or scheduler has started this job before (torchrun --max-restarts, SLURM's requeue)."""
        return self.num_restarts > 0

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints, writes and decides: global rank 0."""
        return self.rank == 0

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process, even as a single rank (torchrun --nproc_per_node=1)."""
        return self.launcher != "none"

    def autocast(self) -> Any:
        """Return a context that runs forward and loss in the precision of `options`. Local.

        The module that `wrap_parallel` returns enters it in `forward` in training mode; if a loss calls other methods,
        compute it in `with world.autocast():`. Weights, gradients and optimizers stay float32. Casts of weights are not
        cached, so an optimizer may step inside. With a precision other than float32, an optimizer step before the first
        use raises OptionsError.
        """
        from ddpshim.job import precision

        return precision.autocast(self)

    def only_main(self, obj: T) -> T:
        """Return `obj` on the main rank; on the others a stand-in that accepts every call and does nothing. Local.

        For objects that print or write: loggers, W&B runs, top-k managers, context managers. Pass the factory, or else
        every rank creates the object: `run = world.only_main(wandb.init)(project="lift")`, `with
        world.only_main(JsonLogger)(path) as log: ...`. The stand-in is false and empty, so a loop over it ends at once:
        loop over the loader itself, and give a progress bar `disable=not world.is_main`.

        If the program branches on a value, broadcast the main rank's, else ranks diverge: `path =
        world.broadcast(top_k.get_ckpt_path(metrics))`.
        """
        return obj if self.is_main else cast(T, self._over_ranks.StandIn())

    def running(self, every_n_steps: int = 1) -> Running:
        """Return statistics and counts that are merged over the ranks every n steps; see `Running`. Local."""
        from ddpshim.job.running import Running

        return Running(self, every_n_steps)

    def barrier(self) -> None:
        """Wait until every rank has called it, for up to `side_timeout_s` (collective)."""
        self.gather(None, "barrier")

    def gather(self, value: T, what: str = "gather") -> list[T]:
        """Return every rank's value, in rank order, on every rank (collective); WorldError if `what` differs.

        Numbers, text, bytes, tensors, arrays, and tuples, lists, sets and mappings of them are sent as they are; other
        objects are pickled, unless the option `trust_peers` is off.
        """
        return [value] if self.world_size == 1 else cast("list[T]", self._over_ranks.gather(self, value, what))

    def broadcast(self, value: T, src: int = 0, what: Optional[str] = None) -> T:
        """Return the value of rank `src`, on every rank (collective). Other ranks' arguments are ignored.

        Raises WorldError if `src` is not a rank of this world, or if `src` or `what` differs.
        """
        if not 0 <= src < self.world_size:
            raise WorldError(
                f"broadcast from src={src} in a world of {self.world_size}; every rank would wait for a sender that "
                f"does not exist. Use a rank from 0 to {self.world_size - 1}."
            )
        return value if self.world_size == 1 else cast(T, self._over_ranks.broadcast(self, value, src, what))

    def sum(self, value: Any) -> Any:
        """Return the sum over ranks of a number, a tensor, or a mapping of these (collective).

        Integers add exactly, floats with one rounding (math.fsum), tensors in float64 or int64. Raises WorldError if
        ranks hold different keys or shapes, or something that cannot be added.
        """
        from ddpshim.job.running import on_cpu, reduce

        return reduce(self.gather(on_cpu(value)), mean=False, like=value)

    def mean(self, value: Any) -> Any:
        """Return the mean over ranks (collective); see `sum`. A mean of integers is a float.

        Every rank counts once: with 2 entries on one rank and 1 on another, the one weighs as much as the two. For the
        mean over entries, use `mean_over`, or sum both totals and counts (`sum`, `running`).
        """
        from ddpshim.job.running import on_cpu, reduce

        return reduce(self.gather(on_cpu(value)), mean=True, like=value)

    def mean_over(self, total: N, count: Any) -> N:
        """Return the mean over the entries of all ranks; `total` is the sum over this rank's (collective).

        For a loss or a logged number. A mean over samples, or over valid entries (padding masks, sample weights, valid
        steps), divides by a number that differs between ranks; if each rank took its own mean, entries on ranks with
        few would weigh more. The result is the same on all ranks, and the mean of their gradients is its gradient. A
        rank without entries (count 0) must still run the network, on an empty batch: the others wait for its backward
        pass.

        >>> World().mean_over(torch.tensor(6.0), 3)
        tensor(2.)

        Args:
            total: a tensor without dimensions, or one value for each of several losses; or a number, which travels as
                in `sum`.
            count: the number of this rank's entries, or the sum of their weights; a number or a tensor.
        """
        if not isinstance(total, torch.Tensor):
            of_all = self.sum({"total": float(total), "count": float(count)})
            return cast(N, of_all["total"] / of_all["count"])
        wide = torch.promote_types(total.dtype, torch.float32)  # counts above 256 are not exact in bfloat16
        if isinstance(count, torch.Tensor):
            num = count.detach().to(total.device, wide)
        else:
            num = total.detach().new_full((), count, dtype=wide)  # written on the device: a copy to it would block
        return total / num if self.world_size == 1 else cast(N, self._over_ranks.mean_over(self, total, num))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, in the order of one process's batch (collective). Differentiable.

        For losses that compare samples (InfoNCE) or normalise over the batch: compute them on the gathered rows, on
        every rank. Each row's gradient is summed over the ranks and returned to the row's rank; as DDP then takes the
        mean over ranks, gradients equal those of one process. Raises DataError, on all ranks, if they have different
        numbers of rows.

        Args:
            x: (B, ...), of the same shape on every rank. With one process it is returned as it is.
        """
        return x if self.world_size == 1 else cast(torch.Tensor, self._over_ranks.all_gather(self, x))

    def count(self, name: str, by: int = 0) -> int:
        """Add `by` to the counter `name`; returns its sum over all ranks so far. Local: does not wait.

        Counters start at 0 in each world that `setup()` makes.
        """
        if self._job.store is None:
            self._job.store = dist.HashStore()
        from ddpshim.process import messages

        return int(self._job.store.add(messages.key(f"count/{name}"), by))

    def gather_with_deadline(self, name: str, value: T, deadline_s: float) -> dict[int, T]:
        """Return the values of the ranks that call this within the deadline, by rank. Never hangs (collective).

        With a deadline of 0 a rank stores its value and does not wait. Ranks that have left the job are not waited for.
        """
        if self.world_size == 1:
            return {0: value}
        return cast("dict[int, T]", self._over_ranks.gather_with_deadline(self, name, value, deadline_s))

    def run_on_main(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `function` on the main rank only; every rank gets its result (collective).

        An exception on the main rank is raised there as it is, and as WorldError everywhere else.
        """
        if self.world_size == 1:
            return function(*args, **kwargs)
        return cast(T, self._over_ranks.run_on_main(self, function, *args, **kwargs))

    @property
    def _over_ranks(self) -> Any:
        """The functions for several ranks, which one process does not load."""
        from ddpshim.job import collectives

        return collectives


def world() -> World:
    """Return the current World: the one that `setup()` made, else that of a single process. Local; starts nothing.

    After `cleanup()` it is the last World, so the rank stays known. Raises WorldError if a launcher started this
    process and `setup()` was not called: each rank would act as the only one.
    """
    if (last := current().world or current().left) is not None:
        return last
    is_rank = has_group()
    if not is_rank and has_launcher():
        from ddpshim.process.launch_env import read_launch_env  # here: a plain process does not need it

        is_rank = read_launch_env(os.environ).is_launched
    if is_rank:
        raise WorldError(
            "ddpshim.world() was called before ddpshim.setup() in a launched process; every rank would act as the "
            "only one. Call ddpshim.setup() first."
        )
    return World(device=single_device())


def has_launcher() -> bool:
    """Return whether variables of a launcher or a scheduler are set; the process may be no rank. Local."""
    return any(name.startswith(_OF_LAUNCHERS) for name in os.environ)


def has_group() -> bool:
    """Return whether this process has torch's default process group. Local."""
    return dist.is_available() and dist.is_initialized()


def single_device(device: Union[str, torch.device, None] = None) -> torch.device:
    """Return the device of a program without a launcher: the first GPU if one exists, else the CPU. Local."""
    return torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
