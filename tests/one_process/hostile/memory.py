"""What writes to a batch in place, reaches its memory by another name, or keeps it."""

from __future__ import annotations

import io

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam

from tests.one_process.hostile.parts import Net, change, changed, fit, logged_change, program
from tests.one_process.parts import data, loader, mlp, train
from tests.one_process.runner import Log, Trained


@change
def rows_indexed_in_place(x: Tensor) -> Tensor:
    rows, columns = torch.randint(len(x), (9,)), torch.randint(6, (9,))
    x.index_put_((rows, columns), torch.rand(9, dtype=x.dtype), accumulate=True)
    x[torch.arange(len(x)), x.argmax(1)] = 0
    two = torch.tensor([0, len(x) - 1])
    x.index_add_(0, two, torch.ones(2, 6), alpha=0.5)
    x.index_copy_(0, two, x[two.flip(0)].clone())
    x.index_fill_(0, two[:1], 0.1)
    x.index_fill_(1, torch.tensor([2]), 0.2)
    x[[0, -1]] = x[[-1, 0]]
    x[torch.randperm(len(x))] = x.clone() * 0.5
    return x


@program
def out_arguments(log: Log) -> Trained:
    buffer, mean = torch.zeros(16, 6), torch.empty(6)

    def change(x: Tensor) -> Tensor:
        plain = x.detach()
        torch.mul(plain, 0.5, out=plain)
        torch.add(plain, 1, out=buffer[: len(x)])
        torch.mean(plain, 0, out=mean)
        both = torch.empty(0)
        torch.cat([plain, plain], out=both)
        values, places = torch.empty(0), torch.empty(0, dtype=torch.long)
        torch.sort(plain, 0, out=(values, places))
        return x + buffer[: len(x)] * mean + both[len(x) :] + values * 0.1

    return changed(log, change)


@change
def data_written(x: Tensor) -> Tensor:
    x.data[0] = 0
    x.data.mul_(0.5)
    x.data[:, 1].clamp_(0)
    h = x * 1
    h.data = h.data.flip(0) * 2
    return x + h


@change
def asarray_written(x: Tensor) -> Tensor:
    torch.from_dlpack(x.detach())[1].mul_(2)
    np.from_dlpack(x.detach().clone())
    np.asarray(x.detach())[0] = 0.5
    np.clip(x.detach(), -1, 1, out=x.detach().numpy())
    memoryview(x.detach().numpy())[0, 1] = 0.1
    return x


@program
def numpy_array_written_later(log: Log) -> Trained:
    inputs, targets = (t.numpy() for t in data())
    array = np.zeros((10, 6), inputs.dtype)
    batch, net = torch.from_numpy(array), mlp()
    optimizer = SGD(net.parameters(), 0.1)
    for i in range(0, 50, 10):
        array[:] = inputs[i : i + 10]
        first = net(batch)
        array *= 0.5
        loss = F.mse_loss(net(batch) + first.detach(), torch.from_numpy(targets[i : i + 10]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss.item(), array.sum())
    return [net, batch]


@change
def shape_changed_in_place(x: Tensor) -> Tensor:
    x.unsqueeze_(1)
    x.squeeze_(1).t_()
    x[0] = 0.5
    x.transpose_(0, 1)
    return x


@change
def storage_replaced(x: Tensor) -> Tensor:
    plain = x.detach().clone()
    plain.resize_(len(x) + 1, 6)[-1] = 0
    other = torch.empty(0)
    other.set_(plain)
    other.untyped_storage().copy_(plain.flip(0).contiguous().untyped_storage())
    return x + plain[:-1]


@change
def reinterpreted_written(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.view(len(x), 3, 2))
    pairs.mul_(1j)
    torch.view_as_real(pairs)[0] = 0.5
    x.detach().view(torch.uint8)[-1].zero_()
    return x


@logged_change
def foreach_in_place(log: Log, x: Tensor) -> Tensor:
    parts = [x.detach(), x.detach()[1:], torch.ones(len(x), 6)]
    torch._foreach_mul_(parts, 0.5)
    torch._foreach_add_(parts[:1], parts[2:])
    log(*torch._foreach_norm(parts))
    return x + 0.5


@program
def added_to_plain_tensors(log: Log) -> Trained:
    sums, total, per_sample, net = torch.zeros(6), torch.zeros(()), torch.zeros(16, 1), mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        nonlocal total
        out = net(x)
        losses = (out - y).square()
        sums.add_(x.sum(0))
        sums.lerp_(x[0], 0.1)
        per_sample[: len(x)] += losses.detach()
        total += losses.sum().detach()
        total.addcmul_(out.detach().mean(), y.mean())
        log(sums, total)
        return losses.mean()

    return [*train(log, net, loss_of), sums, total, per_sample]


@program
def same_batch_twice(log: Log) -> Trained:
    inputs, targets = data()
    net, batches = mlp(), list(loader(inputs, targets, size=7))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.9)
        y[0] = 0
        return F.mse_loss(net(x), y)

    return train(log, net, loss_of, batches * 2) + [x for x, _ in batches]


@program
def tensors_as_keys(log: Log) -> Trained:
    net, weights, order = mlp(), {}, []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        weights[x] = y.mean().item()
        weights[y] = x.mean().item()
        order.append(x)
        log(len(weights), weights[x], x in weights, hash(x) == hash(x), hash(x) == hash(y), {y: 1}.get(y))
        log(any(x is t for t in order), id(x) == id(order[-1]))
        return F.mse_loss(net(x), y) * weights[order[0]]

    return train(log, net, loss_of)


@program
def parameters_made_of_rows(log: Log) -> Trained:
    net = mlp()
    for x, y in loader(*data()):
        p = nn.Parameter(x[:, :3].clone())
        pixels = x.clone().requires_grad_()
        state = nn.Parameter(net(x).detach())
        optimizer = Adam([p, pixels, state, *net.parameters()], 0.01, eps=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.mse_loss(net(pixels + torch.cat([p, p], 1)) + state, y) + p.square().sum()
            loss.backward()
            log(loss, p.grad.shape, p.grad.norm(), pixels.grad[0], state.grad.mean())
            nn.utils.clip_grad_norm_([p, pixels, state], 0.1)
            optimizer.step()
        log(p, isinstance(p, nn.Parameter), p.is_leaf, pixels.mean(0))
    return [net, p, pixels, state]


@program
def buffers_made_of_rows(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        if hasattr(net, "last") and len(net.last) == len(x):
            x = x + 0.1 * net.last
        net.register_buffer("last", x.detach() * 2)
        net.body[0].shift = x.mean(0)
        return net.body(x + net.body[0].shift)

    net = Net(forward, body=mlp())
    out = fit(log, net)
    torch.save(net.state_dict(), file := io.BytesIO())
    file.seek(0)
    log(*torch.load(file, weights_only=True).values(), net.last.shape)
    return out


@change
def applied_by_python(x: Tensor) -> Tensor:
    plain = x.detach().clone()
    plain.apply_(lambda v: v * 0.5 + 0.1)
    plain.map_(x.detach().clone(), lambda a, b: a + b)
    shared = x.detach().clone().share_memory_()
    shared[0] = 0
    return x + plain + shared


@program
def aliases_of_outputs(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = net.body(x) * 1
        return h, h, h[:, :2]

    net = Net(forward, body=nn.Linear(6, 4))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        a, b, c = net(x)
        with torch.no_grad():
            b.add_(1)
        c.mul_(2)
        log(a is b, x.view_as(x) is x, x.to(x.dtype) is x, x.contiguous() is x, x.detach() is x)
        log(x.cpu() is x, x.requires_grad_(False) is x)
        return F.mse_loss(a[:, :1], y) + (a - b).square().sum() + a.square().mean() * 0.1

    return train(log, net, loss_of)
