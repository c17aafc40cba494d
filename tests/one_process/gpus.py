"""What programs for one process do on a GPU and nowhere else: AMP, cuDNN's own noise, graphs, streams, pinned batches.

`python -m tests.one_process.gpus OUT` (see runner.py). Without a GPU the same programs run on the CPU. 50 samples in
batches of 16: the last has 2 rows.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from tests.one_process.runner import Log, Programs, Trained, main

PROGRAMS = Programs()
program = PROGRAMS.add
IS_ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_ON_GPU else "cpu")


def loader(*shapes: tuple[int, ...], **options: Any) -> DataLoader[Any]:
    """Return 50 samples of normal numbers, whose last shape is the target's, in batches of 16."""
    return DataLoader(TensorDataset(*(torch.randn(50, *shape) for shape in shapes)), 16, shuffle=True, **options)


def mlp(features: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)).to(DEVICE)


def fit(
    log: Log,
    net: nn.Module,
    batches: Any = None,
    loss_of: Callable[[Any, Tensor, Tensor], Tensor] = lambda net, x, y: F.mse_loss(net(x), y),
) -> Trained:
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    batches = batches or loader((6,), (1,))
    for _ in range(2):
        for x, y in batches:
            loss = loss_of(net, x.to(DEVICE), y.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
    return [net]


def fitted(loss_of: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    """Register the program that trains an MLP by this loss."""
    PROGRAMS[loss_of.__name__] = lambda log: fit(log, mlp(), loss_of=loss_of)


def loss_in_bfloat16(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=IS_ON_GPU):
        out = net(x)
    return F.mse_loss(out.float(), y)


@program
def pinned_by_workers(log: Log) -> Trained:
    net = mlp()
    batches = loader((6,), (1,), num_workers=2, pin_memory=IS_ON_GPU, persistent_workers=True)
    optimizer = AdamW(net.parameters(), 1e-3, **({"fused": True} if IS_ON_GPU else {}))
    for _ in range(2):
        for x, y in batches:
            x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
            loss = F.mse_loss(net(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            log(loss.item())
    return [net]


@program
def mixed_precision_with_a_scaler(log: Log) -> Trained:
    net = mlp()
    optimizer, scaler = SGD(net.parameters(), 0.05), torch.cuda.amp.GradScaler(enabled=IS_ON_GPU)
    for x, y in loader((6,), (1,)):
        with torch.autocast(DEVICE.type, torch.float16 if IS_ON_GPU else torch.bfloat16, enabled=IS_ON_GPU):
            loss = F.mse_loss(net(x.to(DEVICE)), y.to(DEVICE))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        log(loss.item(), scaler.get_scale())
    return [net]


@program
def channels_last(log: Log) -> Trained:
    convolutions = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(2)
    net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64, 1))
    net = net.to(DEVICE, memory_format=torch.channels_last)
    shape = (3, 12, 12)
    return fit(
        *(log, net, loader(shape, (1,))),
        lambda net, x, y: F.mse_loss(net(x.contiguous(memory_format=torch.channels_last)), y),
    )


@program
def images_shifted_at_random(log: Log) -> Trained:
    """DrQ's augmentation: a grid, shifted for each sample."""

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        num, _, size, _ = x.shape
        x = F.pad(x, (2, 2, 2, 2), "replicate")
        at = torch.linspace(-1, 1, size + 4, device=x.device)[:size]
        grid = torch.stack(torch.meshgrid(at, at, indexing="xy"), -1).expand(num, -1, -1, -1)
        shift = torch.randint(0, 5, (num, 1, 1, 2), device=x.device, dtype=x.dtype) * 2 / (size + 4)
        return F.mse_loss(net(F.grid_sample(x, grid + shift, align_corners=False)), y)

    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 1)).to(DEVICE)
    return fit(log, net, loader((3, 12, 12), (1,)), loss)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 16, 2, batch_first=True, dropout=0.3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, kernel: str = "") -> None:
        super().__init__()
        self.first, self.last, self.kernel = nn.Linear(6, 3 * 32), nn.Linear(32, 1), kernel

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.first(x).chunk(3, -1))
        with contextlib.ExitStack() as chosen:
            if self.kernel and IS_ON_GPU:
                kernel = getattr(torch.nn.attention.SDPBackend, self.kernel)
                chosen.enter_context(torch.nn.attention.sdpa_kernel([kernel]))
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return self.last(out.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]


PROGRAMS.update(
    plain=lambda log: fit(log, mlp()),
    data_parallel=lambda log: fit(log, nn.DataParallel(mlp())),
    mixed_precision_bfloat16=lambda log: fit(log, mlp(), loss_of=loss_in_bfloat16),
    lstm_with_dropout=lambda log: fit(log, Recurrent().to(DEVICE), loader((7, 6), (1,))),
    attention_with_dropout=lambda log: fit(log, Attention().to(DEVICE), loader((8, 6), (1,))),
    attention_with_dropout_efficient=lambda log: fit(
        log, Attention("EFFICIENT_ATTENTION").to(DEVICE), loader((8, 6), (1,))
    ),
    attention_with_dropout_flash=lambda log: fit(
        log, Attention("FLASH_ATTENTION").to(DEVICE), loader((8, 6), (1,)), loss_in_bfloat16
    ),
)


@fitted
def noise_of_all_kinds(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    drawn = [torch.randn_like(x), torch.rand(x.shape, device=x.device), torch.empty_like(x).exponential_()]
    drawn += [torch.bernoulli(torch.full_like(x, 0.3)), torch.normal(x, 0.1), torch.empty_like(x).cauchy_().tanh()]
    drawn += [torch.poisson(x.abs()), torch.empty_like(x).log_normal_(0, 0.1), x[torch.randperm(len(x)).to(DEVICE)]]
    drawn += [x[torch.randperm(len(x), device=x.device)], torch.multinomial(x.softmax(1), 6).float()]
    drawn += [torch.distributions.Beta(x.abs() + 1, 2.0).rsample(), F.gumbel_softmax(x, hard=True)]
    return F.mse_loss(net(sum(drawn) / len(drawn)), y)


@fitted
def large_draws(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """More numbers than a GPU draws at once: its threads draw several, in a pattern of the whole tensor."""
    noise = torch.randn(len(x), 200_000, device=x.device)
    kept = F.dropout(torch.ones(len(x), 200_000, device=x.device), 0.4)
    return F.mse_loss(net(x + noise[:, :6] + noise[:, -6:] + kept[:, -6:]), y)


@program
def generator_on_the_gpu(log: Log) -> Trained:
    generator = torch.Generator(DEVICE).manual_seed(3)

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(net(x + 0.1 * torch.randn(x.shape, generator=generator, device=x.device)), y)

    return fit(log, mlp(), loss_of=loss)


@program
def noise_before_and_after_on_the_host(log: Log) -> Trained:
    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(net(x + 0.1 * torch.randn(x.shape).to(DEVICE)), y + 0.1 * torch.randn_like(y))

    trained = fit(log, mlp(), loss_of=loss)
    log(torch.rand(2), torch.rand(2, device=DEVICE), torch.get_rng_state().sum())
    return trained


@program
def another_stream(log: Log) -> Trained:
    if not IS_ON_GPU:
        return fit(log, mlp())
    side = torch.cuda.Stream()

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x = x * 2 + 1
        torch.cuda.current_stream().wait_stream(side)
        return F.mse_loss(net(x), y)

    return fit(log, mlp(), loss_of=loss)


@program
def graph_of_an_evaluation(log: Log) -> Trained:
    net = mlp()
    trained = fit(log, net)
    if not IS_ON_GPU:
        return trained
    held = torch.randn(16, 6, device=DEVICE)
    net.eval()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            net(held)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = net(held)
        held.copy_(torch.ones(16, 6, device=DEVICE))
        graph.replay()
    log(out)
    return trained


@program
def compiled(log: Log) -> Trained:
    net = mlp()
    fast = torch.compile(net)
    return fit(log, net, None, lambda _, x, y: F.mse_loss(fast(x), y))


@program
def compiled_function(log: Log) -> Trained:
    @torch.compile
    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(net(x + 0.1 * torch.randn_like(x)), y)

    return fit(log, mlp(), loss_of=loss)


@program
def compiled_in_one_piece(log: Log) -> Trained:
    """The compiler finds nothing that it cannot compile: else parts would be computed, and drawn, without it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = mlp()
    fast = torch.compile(net, backend="eager")
    trained = fit(log, net, None, lambda _, x, y: F.mse_loss(fast(x), y))
    log(sum(torch._dynamo.utils.counters["graph_break"].values()))
    return trained


@fitted
def dropout_of_expanded_rows(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    repeated = F.dropout(net[0](x)[:, None].expand(-1, 3, -1), 0.3)  # type: ignore[index]
    return F.mse_loss(net[-1](repeated.mean(1)), y)  # type: ignore[index]


@program
def compiled_to_graphs(log: Log) -> Trained:
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)).to(DEVICE)
    fast = torch.compile(net, mode="reduce-overhead")
    batches = DataLoader(TensorDataset(torch.randn(48, 6), torch.randn(48, 1)), 16, shuffle=True)
    return fit(log, net, batches, lambda _, x, y: F.mse_loss(fast(x), y))


@program
def average_of_weights_on_the_host(log: Log) -> Trained:
    net = mlp()
    average = copy.deepcopy(net).cpu()

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), net.parameters()):
                slow.lerp_(fast.cpu(), 0.1)
        return F.mse_loss(net(x), y)

    return [*fit(log, net, loss_of=loss), average]


if __name__ == "__main__":
    main(PROGRAMS)
