"""Programs whose networks are replayed as static graphs, each with a trap (`python -m tests.one_process.graphed OUT`).

A static graph keeps the addresses, shapes and numbers of the time when it was recorded.
"""

from __future__ import annotations

import copy
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.one_process.runner import Log, Programs, Trained, main

PROGRAMS = Programs()
_NUM_STEPS = 18  # 3 to learn, record and compare; one replay of the others is compared again
_SIZE = 10


class Net(nn.Module):
    def __init__(self, *layers: nn.Module, inside: Any = None) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.layers, self.inside = nn.Sequential(*layers), inside

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(torch.tanh(self.second(torch.relu(self.first(x)))))
        return self.last(y if self.inside is None else self.inside(self, y))  # type: ignore[no-any-return]


class Training:
    """A network, its optimizer, and what a step consists of; parts are replaced by the traps."""

    def __init__(self, net: nn.Module, log: Log) -> None:
        self.net, self.log, self.kept = net, log, list[Any]()
        self.optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def update(self, loss: Tensor, **options: Any) -> None:
        self.optimizer.zero_grad()
        loss.backward(**options)
        self.optimizer.step()
        self.log(loss)

    def loss(self, net: Any = None) -> Tensor:
        return (self.net if net is None else net)(torch.randn(_SIZE, 6)).square().mean()  # type: ignore[no-any-return]


Step = Callable[[Training, int], None]


def trap(*layers: Callable[[], nn.Module], inside: Any = None) -> Callable[[Step], Step]:
    """Register the program that makes such steps with a network of `layers`."""

    def register(step: Step) -> Step:
        def program(log: Log) -> Trained:
            training = Training(Net(*(make() for make in layers), inside=inside), log)
            for number in range(_NUM_STEPS):
                step(training, number)
            log(torch.rand(2))
            trained = [x for x in training.kept if isinstance(x, nn.Module)]
            return [training.net, *trained]

        PROGRAMS[step.__name__] = program
        return step

    return register


def dropout() -> nn.Module:
    return nn.Dropout(0.3)


def norm() -> nn.Module:
    return nn.BatchNorm1d(12)


@trap(norm, dropout)
def learning_rate_and_probability(of: Training, number: int) -> None:
    of.optimizer.param_groups[0]["lr"] *= 0.9
    of.net.layers[1].p = 0.1 + 0.05 * (number // 9)  # type: ignore[index, union-attr]
    of.update(of.loss())


@trap(inside=lambda net, y: y * net.scale)
def a_rebound_tensor(of: Training, number: int) -> None:
    of.net.scale = torch.full((12,), 1.0 + number)  # type: ignore[assignment]
    of.update(of.loss())


@trap(inside=lambda net, y: y * net.scale)
def a_buffer_that_is_written(of: Training, number: int) -> None:
    if not number:
        of.net.register_buffer("scale", torch.ones(12))
    of.net.scale.mul_(1.1)  # type: ignore[union-attr, operator]
    of.update(of.loss())


def _follows_a_weight(net: Any, y: Tensor) -> Tensor:
    out = y * net.mean.clone()
    with torch.no_grad():
        net.mean.lerp_(net.last.weight.abs().mean(0) + 1, 0.1)
    return out


@trap(inside=_follows_a_weight)
def a_buffer_that_forward_reads_and_writes(of: Training, number: int) -> None:
    if not number:
        of.net.register_buffer("mean", torch.ones(12))
    of.update(of.loss())


@trap()
def a_number_among_inputs(of: Training, number: int) -> None:
    of.update(of.net(torch.randn(_SIZE, 6) * (0.5 + number)).square().mean())


@trap()
def smaller_last_batches(of: Training, number: int) -> None:
    of.update(of.net(torch.randn(_SIZE - 3 * (number % 5 == 4), 6)).square().mean())


@trap()
def another_layout(of: Training, number: int) -> None:
    x = torch.randn(6, _SIZE).t() if number % 5 == 4 else torch.randn(1, 6).expand(_SIZE, 6)
    of.update(of.net(x).square().mean())


@trap(dropout)
def a_weight_that_moves(of: Training, number: int) -> None:
    if number in (7, 12):
        of.net.first.weight.data = 0.5 * of.net.first.weight.data  # type: ignore[union-attr, operator]
    of.update(of.loss())


@trap(norm)
def gradients_that_are_kept(of: Training, number: int) -> None:
    of.update(of.loss())
    of.kept.append(of.net.first.weight.grad)  # type: ignore[union-attr]
    of.log(*(x.norm() for x in of.kept[-4:]))


@trap(dropout)
def accumulation(of: Training, number: int) -> None:
    loss = of.loss()
    (loss / 3).backward()
    of.log(loss)
    if number % 3 == 2:
        of.optimizer.step()
        of.optimizer.zero_grad()


@trap()
def zeros_in_place(of: Training, number: int) -> None:
    of.optimizer.zero_grad(set_to_none=False)
    loss = of.loss()
    loss.backward()
    of.optimizer.step()
    of.log(loss)


@trap(dropout)
def a_second_backward_pass(of: Training, number: int) -> None:
    loss = of.loss()
    if number % 5 == 4:
        loss.backward(retain_graph=True)
        of.log(of.net.last.weight.grad)  # type: ignore[union-attr]
    of.update(loss)


@trap(dropout)
def a_penalty_now_and_then(of: Training, number: int) -> None:
    x = torch.randn(_SIZE, 6, requires_grad=True)
    out = of.net(x)
    loss = out.square().mean()
    if number % 5 == 4:
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = loss + gradient.square().mean()
    of.update(loss)


@trap(norm, dropout)
def two_calls(of: Training, number: int) -> None:
    calls = 1 + (number % 4 == 3)  # also a network that is called a changing number of times
    of.update(sum((of.loss() for _ in range(calls)), torch.zeros(())))


@trap()
def results_that_are_kept(of: Training, number: int) -> None:
    out = of.net(torch.randn(_SIZE, 6))
    of.kept.append(out.detach())
    of.update(out.square().mean())
    of.log(*(x.norm() for x in of.kept[-4:]))


@trap()
def losses_with_their_graph(of: Training, number: int) -> None:
    loss = of.loss()
    of.update(loss)
    of.kept.append(loss)
    of.log(sum(of.kept))


@trap()
def results_that_are_written(of: Training, number: int) -> None:
    out = of.net(torch.randn(_SIZE, 6))
    out += 1
    out[:, 0] = 0
    of.update(out.square().mean())


def _asserts(net: Any, y: Tensor) -> Tensor:
    torch._assert_async((net.last.weight.detach().abs() < net.most).all(), "too large")
    return y


@trap(inside=_asserts)
def an_assertion(of: Training, number: int) -> None:
    of.net.most = 1e3 if number < 15 else -1.0  # type: ignore[assignment]
    try:
        of.update(of.loss())
    except (AssertionError, RuntimeError):
        of.log("failed")


@trap(inside=lambda net, y: y * (1.0 if float(y.detach().sum()) > 0 else 2.0))
def a_number_that_is_read(of: Training, number: int) -> None:
    of.update(of.loss())


@trap(inside=lambda net, y: y * torch.tensor(0.5))
def a_constant_of_the_host(of: Training, number: int) -> None:
    of.update(of.loss())


def _average(of: Training) -> Any:
    if not of.kept:
        of.kept.append(copy.deepcopy(of.net))
    with torch.no_grad():
        for mean, p in zip(of.kept[0].parameters(), of.net.parameters()):
            mean.lerp_(p, 0.1)
    return of.kept[0]


@trap(norm)
def averages_that_are_swapped_in(of: Training, number: int) -> None:
    of.update(of.loss())
    average = _average(of)
    if number % 4 == 3:
        pairs = [*zip(average.parameters(), of.net.parameters())]
        for _ in range(2):
            for mean, p in pairs:
                mean.data, p.data = p.data, mean.data
            with torch.no_grad():
                of.log(of.net.eval()(torch.ones(_SIZE, 6)).sum())
        of.net.train()


@trap(dropout)
def freezing(of: Training, number: int) -> None:
    of.net.first.requires_grad_(number % 12 < 6)  # type: ignore[union-attr, operator]
    of.update(of.loss())


@trap(norm)
def weights_that_are_loaded(of: Training, number: int) -> None:
    if number == 6:
        of.kept.append(copy.deepcopy(of.net.state_dict()))
    if number == 12:
        of.net.load_state_dict(of.kept[0], assign=True)
        of.optimizer = torch.optim.SGD(of.net.parameters(), 0.1)
    of.update(of.loss())


@trap(norm, dropout)
def evaluation_between_steps(of: Training, number: int) -> None:
    of.update(of.loss())
    of.net.eval()
    with torch.no_grad():
        of.log(of.loss())
    of.log(of.loss())
    of.net.train()


@trap(norm)
def a_critic_of_real_and_made(of: Training, number: int) -> None:
    if not of.kept:
        of.kept.append(nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6)))
        of.made = torch.optim.SGD(of.kept[0].parameters(), 0.1)  # type: ignore[attr-defined]
    made = of.kept[0](torch.randn(_SIZE, 4))
    of.update(of.loss() - of.net(made.detach()).mean().tanh())
    loss = of.net(made).mean().tanh()
    of.made.zero_grad()  # type: ignore[attr-defined]
    loss.backward()
    of.made.step()  # type: ignore[attr-defined]
    of.log(loss)


@trap(dropout)
def hooks_of_weights(of: Training, number: int) -> None:
    if number == 2:
        of.net.first.weight.register_hook(lambda gradient: of.log(gradient.norm()))  # type: ignore[union-attr, operator]
        of.net.last.bias.register_hook(lambda gradient: 2 * gradient)  # type: ignore[union-attr, operator]
    of.update(of.loss())


@trap()
def clipping(of: Training, number: int) -> None:
    of.optimizer.zero_grad()
    of.loss().backward()
    of.log(nn.utils.clip_grad_norm_(of.net.parameters(), 0.01))
    of.optimizer.step()


@trap(dropout)
def autocast(of: Training, number: int) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=number % 9 != 8):
        loss = of.net(torch.randn(_SIZE, 6)).float().square().mean()
    of.update(loss)


@trap(dropout, inside=lambda net, y: checkpoint(torch.tanh, y, use_reentrant=False))
def a_checkpoint_inside(of: Training, number: int) -> None:
    of.update(of.loss())


@trap(norm)
def another_dtype(of: Training, number: int) -> None:
    if number in (7, 14):
        of.net.to(torch.float64 if number == 7 else torch.float32)
    of.update(of.net(torch.randn(_SIZE, 6, dtype=of.net.first.weight.dtype)).square().mean())  # type: ignore[union-attr]


@trap(dropout)
def two_networks_in_one_loss(of: Training, number: int) -> None:
    if not of.kept:
        of.kept.append(Net(nn.Dropout(0.1)))
        of.optimizer.add_param_group({"params": [*of.kept[0].parameters()]})
    of.update((of.net(torch.randn(_SIZE, 6)) - of.kept[0](torch.randn(_SIZE, 6))).square().mean())


@trap(inside=lambda net, y: y + 0.1 * torch.randn_like(y) + torch.rand(12))
def numbers_drawn_by_hand(of: Training, number: int) -> None:
    of.update(of.loss())


def _again(net: Any, y: Tensor) -> Tensor:
    for _ in range(3):
        y = torch.tanh(net.second(y))
    return y


@trap(inside=_again)
def a_shared_layer_and_a_penalty(of: Training, number: int) -> None:
    loss = of.loss()  # each use of the layer adds to its gradient, after the penalty
    of.update(loss + 0.01 * sum(p.square().sum() for p in of.net.parameters()))


class _Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.body(x).sin())
        return y, self.head(y).cos().square()


@PROGRAMS.add
def a_result_of_a_result(log: Log) -> Trained:
    net = _Features()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(_NUM_STEPS):
        features, out = net(torch.randn(_SIZE, 6))
        features.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        loss = out.mean() + features.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss)
    return [net]


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.body(x))
        return *(head(y) for head in self.heads), y.argmax(1), *y.chunk(2, 1)


@PROGRAMS.add
def a_loss_of_some_results(log: Log) -> Trained:
    net = _Heads()
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    net.heads[1].weight.register_hook(lambda gradient: log(gradient.norm()))
    for number in range(_NUM_STEPS):
        one, other, places, mean, spread = net(torch.randn(_SIZE, 6))
        loss = F.mse_loss(one, torch.ones(_SIZE, 2)) + (mean * spread).mean()
        if number % 6 < 3:
            loss = loss + other.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss, places, [None if p.grad is None else p.grad.norm().item() for p in net.parameters()])
    return [net]


if __name__ == "__main__":
    main(PROGRAMS)
