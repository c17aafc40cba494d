"""Joins the job for `setup()`, and leaves it in `cleanup()`; makes no process group (`process_group` does)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Optional, Union

import torch

from ddpshim.errors import WorldError
from ddpshim.job.world import World, has_group, has_launcher, single_device, world  # noqa: F401
from ddpshim.options import Options
from ddpshim.process.job import Door, Job, current, leave, seed_everything

if TYPE_CHECKING:
    from ddpshim.process.launch_env import LaunchEnv


def current_or_new_world() -> World:
    """Return the current World; joins the job as `ddpshim.setup()` does if nothing has yet (then collective)."""
    return current().world or join()


def join(
    door: Optional[Door] = None,
    *,
    backend: Optional[str] = None,
    device: Union[str, torch.device, None] = None,
    timeout_s: Optional[float] = None,
    side_timeout_s: Optional[float] = None,
    seed: Optional[int] = None,
    options: Optional[Options] = None,
) -> World:
    """Join the job by `door`, default that of `setup()`; see `ddpshim.setup` (collective under a launcher)."""
    job = current()
    asked: dict[str, Any] = {"backend": backend, "device": device, "seed": seed, "options": options}
    if job.world is not None:
        if door is not None and job.world.is_launched and job.door.batch != door.batch:
            raise WorldError(
                'setup(batch="global") after setup(): what was built since holds local batches. Give batch to the '
                "first call."
            )
        return _reuse(job, job.world, asked)
    settle_rounding()
    options = Options.read() if options is None else options
    timeout_s = options.timeout_s if timeout_s is None else timeout_s
    side_timeout_s = options.side_timeout_s if side_timeout_s is None else side_timeout_s
    env: Optional[LaunchEnv] = None
    num_restarts = 0
    if has_launcher():
        from ddpshim.process.launch_env import read_counts, read_launch_env

        env = None if has_group() else read_launch_env(os.environ)
        num_restarts = max(read_counts(os.environ).values())
    if not has_group() and (env is None or not env.is_launched):
        if env is not None and env.in_allocation:  # it could be taken for a rank
            from ddpshim.process.say import say

            say(env.reason)
        made = World(device=single_device(device), options=options, _job=job)
    else:
        from ddpshim.job import process_group

        job.door = door or Door()
        process_group.check_options(job.door, options)
        backend = backend or options.backend
        made = process_group.join(job, env, options, backend, device, timeout_s, side_timeout_s)
        if env is None:
            _check_same(made, {**asked, "backend": backend})
    if options.exact is not None:
        from ddpshim.job.precision import compute_alike

        compute_alike(made, options.exact)
    job.world, job.left = replace(made, seed=seed, num_restarts=num_restarts), None
    if seed is not None:
        seed_everything(seed)
    if options.precision != "float32":
        from ddpshim.job.precision import check_first_step

        check_first_step(options.precision, job)
    if made.is_launched:
        process_group.begin(job, job.world, timeout_s, cleanup)
    return job.world


def _reuse(job: Job, made: World, asked: dict[str, Any]) -> World:
    """Return the existing World, with `seed` if it had none. Raises WorldError if the arguments contradict it."""
    seed = asked["seed"]
    is_new = seed is not None and made.seed is None
    if is_new and job.is_split:
        raise WorldError(
            f"setup(seed={seed}) after split_random_streams(): networks were built without that seed, and every "
            "rank would now use the same random numbers. Give the seed to the first setup()."
        )
    _check_same(made, asked)
    if is_new:
        made = job.world = replace(made, seed=seed)
        seed_everything(seed)
    return made


def _check_same(made: World, asked: dict[str, Any]) -> None:
    """Raise WorldError if arguments of `setup` contradict the existing world."""
    for name, value in asked.items():
        existing = getattr(made, name)
        if name == "device" and value is not None:
            value = torch.device(value)
            existing = existing if value.index is not None else torch.device(existing.type)
        if None not in (value, existing) and value != existing:
            raise WorldError(
                f"setup({name}={str(value)!r}), but there is a world with {name}={str(existing)!r} already: one part "
                "of the program would rely on the one, another part on the other. Call setup once, or cleanup() "
                "before the second call."
            )


def settle_rounding() -> None:
    """Make MKL choose now how it rounds tanh, sin, exp and the like, so that this process rounds as others do. Local.

    On some machines a process's first such call is sometimes rounded differently from all later ones.
    """
    for dtype in (torch.float32, torch.float64):
        torch.tanh(torch.zeros(16, dtype=dtype, device="cpu"))  # the default device may be another


def cleanup() -> None:
    """Leave the job: undo what `setup()` made, and nothing that the user made.

    Local. Idempotent; safe in `finally`. While an exception propagates, `ddpshim.abort` still reports it, and an nccl
    group stays until the process ends, since its teardown would wait for other ranks.
    """
    ended = current()
    made = ended.world
    if made is None:
        return
    ended.left, ended.world = made, None
    if made.is_launched:
        from ddpshim.job import process_group

        process_group.leave(ended, made)
    else:
        leave(ended)
