"""Fine-tunes a behaviour-cloning policy from its successes alone (RLOO), with tasks dealt to ranks.

    python -m ddpshim run --nproc 2 examples/rloo/train.py --toy --out out/toy   seconds, needs torch and numpy alone
    python -m ddpshim run --nproc 2 examples/rloo/train.py --out out/lift        needs robosuite and h5py

In each iteration every task has several groups of episodes, and all episodes of a group start from one state. An
episode's advantage is its reward minus the mean of the others in its group (reinforce, leave one out). Groups whose
rewards are all equal are not used. A group's random draws depend only on its task and number: any number of ranks plays
the same groups, and trains the same weights as one process, up to rounding.

In OUT: distributed_training_results.json, ranks/rank_N.jsonl, the newest three policy_N.pth, and `resume`. An
interrupted run resumes when it is started again. See docs/evaluate.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from environments import Lift, Toy
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim
from ddpshim import checkpoint


class Policy(nn.Module):
    """Predicts the mean of an action; normalises observations by the demonstrations' mean and deviation."""

    def __init__(self, env: Any, observations: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", observations.mean(0))
        self.register_buffer("deviation", observations.std(0) + 1e-3)
        sizes = [env.observation_size, 128, 128, env.action_size]
        layers = [layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])
        self.noise = env.noise

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers((observations - self.mean) / self.deviation)

    def log_likelihood(self, observations: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Return the log-likelihood of each action, up to a constant."""
        difference = (actions - self(observations).to(actions.dtype)) / self.noise
        return -0.5 * difference.pow(2).sum(-1)


class Episode(NamedTuple):
    observations: torch.Tensor
    actions: torch.Tensor
    likelihood: torch.Tensor  # log-likelihood of the actions when they were drawn
    is_success: bool


def clone(policy: Any, observations: torch.Tensor, actions: torch.Tensor, num_steps: int) -> None:
    """Train by behaviour cloning, before the fine-tuning."""
    loader = ddpshim.make_loader(TensorDataset(observations, actions), batch_size=240, shuffle=True)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for step in range(num_steps):
        if step % len(loader) == 0:
            batches = iter(loader)
        seen, done = next(batches)
        optimizer.zero_grad()
        with ddpshim.world().autocast():
            loss = (policy(seen) - done).pow(2).mean()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def play(policy: Policy, env: Any, task: str, seed: list[int], num_episodes: int) -> list[Episode]:
    """Play a group: episodes from one start state. The state and the noise are drawn from `seed`."""
    draw, group = np.random.default_rng(seed), []
    start = env.draw_start(task, draw)
    for _ in range(num_episodes):
        observed, is_over, observations, actions = env.reset(start), False, [], []
        while not is_over:
            observations.append(torch.from_numpy(observed).to(torch.get_default_dtype()))
            mean = policy(observations[-1])
            actions.append(mean + policy.noise * torch.from_numpy(draw.standard_normal(len(mean))).to(mean))
            observed, is_over, is_success = env.step(actions[-1].double().numpy())
        seen, done = torch.stack(observations), torch.stack(actions)
        group.append(Episode(seen, done, policy.log_likelihood(seen, done), is_success))
    return group


def group_loss(policy: Policy, group: list[Episode], clip: float) -> torch.Tensor:
    """Return the sum of PPO's clipped loss over a group's episodes, with RLOO's advantages."""
    rewards = torch.tensor([float(episode.is_success) for episode in group])
    advantages = rewards - (rewards.sum() - rewards) / (len(group) - 1)
    total = torch.zeros(())
    for (seen, done, before, _), advantage in zip(group, advantages):
        ratio = (policy.log_likelihood(seen, done) - before).exp()
        total = total - torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
    return total


def update(policy: Any, optimizer: Any, groups: list[list[Episode]], args: argparse.Namespace) -> int:
    """Train on the groups of all ranks; return how many backward passes this rank made (collective)."""
    world, num_passes = ddpshim.world(), 0
    num_all = world.sum(sum(map(len, groups)))  # ranks have unequal numbers of episodes; the mean is over all
    if not num_all:
        return 0  # on all ranks
    # A rank without a valid group has one empty part, because the others wait for its backward pass.
    parts = [groups[i : i + args.groups_at_once] for i in range(0, len(groups), args.groups_at_once)] or [[]]
    for _ in range(args.epochs):
        optimizer.zero_grad()
        for number, part in enumerate(parts):
            with policy.accumulate(is_last=number == len(parts) - 1):  # allows ranks to have unequal numbers of parts
                with world.autocast():
                    total = policy(policy.mean[None]).sum() * 0  # a pass through the wrapper, also without a group
                    for group in part:
                        total = total + group_loss(policy, group, args.clip)
                (total * world.world_size / num_all).backward()  # ranks' gradients are averaged
                num_passes += 1
        nn.utils.clip_grad_norm_(policy.parameters(), args.max_norm)
        optimizer.step()
    return num_passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a point in the plane in place of Lift")
    parser.add_argument("--out", type=Path, default=Path("out/rloo"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--groups", type=int, default=2, help="of each task in an iteration")
    parser.add_argument("--episodes", type=int, default=8, help="of a group")
    parser.add_argument("--epochs", type=int, default=2, help="optimizer steps of an iteration")
    parser.add_argument("--groups-at-once", type=int, default=2, help="in one backward pass; the others accumulate")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--bc-steps", type=int, default=600)
    parser.add_argument("--merge-every", type=int, default=5, help="iterations between two merges of the statistics")
    parser.add_argument("--save-every", type=int, default=10, help="iterations between two files, for going on as well")
    args = parser.parse_args()

    torch.set_num_threads(1)  # a step of this small network ends before a second thread has started
    # Each rank collects its own data. Simulators run on the CPU, and so does this small network.
    world = ddpshim.setup(seed=args.seed, device="cpu")
    if args.toy and world.options.precision == "float32":
        torch.set_default_dtype(torch.float64)  # so that rounding cannot turn a failure into a success
    env = Toy() if args.toy else Lift()
    observations, actions = (torch.from_numpy(x).to(torch.get_default_dtype()) for x in env.demonstrations())
    policy = ddpshim.wrap_parallel(Policy(env, observations))
    # With DDPSHIM_PER_RANK_BATCH=yes, --groups is per rank, and DDPSHIM_LR_RULE=sqrt is a suitable rule.
    is_per_rank = world.options.per_rank_batch
    num_groups = args.groups * (world.world_size if is_per_rank else 1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=ddpshim.scale_lr(args.lr) if is_per_rank else args.lr)
    running = world.running(every_n_steps=args.merge_every)
    objects = {"policy": policy, "optimizer": optimizer, "running": running}
    training = ddpshim.Resumable(args.out / "resume", objects, every_n_steps=args.save_every)
    if not training.restore():
        training.values["curve"] = []
        clone(policy, observations, actions, args.bc_steps)
    own_log = args.out / "ranks" / f"rank_{world.rank}.jsonl"
    own_log.parent.mkdir(parents=True, exist_ok=True)
    show = world.only_main(print)

    for iteration in training.iterations(args.iterations):
        # Spread expensive tasks (long episodes) over the ranks; several ranks may share one task.
        costs = [running.mean(f"steps of {task}") if running.num(f"steps of {task}") else 1.0 for task in env.tasks]
        mine, begin, groups = ddpshim.deal(list(env.tasks), costs), time.perf_counter(), []
        for task, part in mine:
            for number in range(num_groups)[part]:
                seed = [args.seed, iteration, list(env.tasks).index(task), number]
                group = play(policy.module, env, task, seed, args.episodes)
                for episode in group:
                    running.episode(task, episode.is_success)
                    running.add(f"steps of {task}", len(episode.actions))
                is_valid = len({episode.is_success for episode in group}) > 1
                running.count("groups")
                running.count("valid groups", is_valid)
                groups += [group] * is_valid
        played_s = time.perf_counter() - begin
        num_passes = update(policy, optimizer, groups, args)
        row = {
            "iteration": iteration,
            "tasks": [task for task, _ in mine],
            "valid groups": len(groups),
            "backward passes": num_passes,
        }
        with own_log.open("a") as file:
            file.write(json.dumps({**row, "seconds of play": round(played_s, 3)}) + "\n")
        new = running.step()
        if new is not None:  # statistics of all ranks since the last merge
            rates = {task: found["success_rate"] for task, found in new["success_rates"].items()}
            mean = sum(rates.values()) / len(rates)
            training.values["curve"].append({"iterations": iteration + 1, "success_rate": mean, "tasks": rates})
            show(f"to iteration {iteration + 1}: success {mean:.1%}", {task: f"{r:.0%}" for task, r in rates.items()})
            world.run_on_main(write_results, args, training.values["curve"], running.results())
        if (iteration + 1) % args.save_every == 0:
            checkpoint.save(policy.state_dict(), args.out / f"policy_{iteration + 1:06d}.pth")
            checkpoint.keep_newest(args.out, "policy_*.pth", 3)
    training.finish()
    total = sum(p.detach().double().abs().sum().item() for p in policy.parameters())
    show(f"sum of |weights| {total:.10f} on {world.world_size} ranks")
    ddpshim.cleanup()


def write_results(args: argparse.Namespace, curve: list[Any], totals: dict[str, Any]) -> None:
    """Replace the file of results atomically: a reader sees the old file or the new one."""
    settings = {name: str(value) for name, value in vars(args).items()}
    found = {"world_size": ddpshim.world().world_size, "settings": settings, "curve": curve, **totals}
    written = args.out / ".results"
    written.write_text(json.dumps(found, indent=1))
    os.replace(written, args.out / "distributed_training_results.json")


if __name__ == "__main__":
    main()
