"""Gradients that are asked for or changed, and unusual steps, optimizers and parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, hessian, jacrev, jvp, vmap
from torch.optim import SGD, Adam

from tests.one_process.hostile.parts import Net, fit, program, trains
from tests.one_process.parts import data, loader, mlp, steps, train
from tests.one_process.runner import Log, Trained


@program
def gradients_of_parameters(log: Log) -> Trained:
    net, unused = mlp(), nn.Parameter(torch.ones(2))
    for x, y in loader(*data()):
        loss = F.mse_loss(net(x), y)
        grads = torch.autograd.grad(loss, [*net.parameters(), unused], retain_graph=True, allow_unused=True)
        log(loss, grads[-1] is None, torch.stack([g.norm() for g in grads[:-1]]).norm())
        again = torch.autograd.grad(loss, tuple(net.parameters()))
        with torch.no_grad():
            for p, g, h in zip(net.parameters(), grads, again):
                p -= 0.05 * (g + h)
                p.grad = g
    return [net]


@trains(lambda: mlp(out=2))
def jacobian_rows(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    out = net(x)
    rows = [torch.autograd.grad(out[:, i].sum(), x, create_graph=True)[0] for i in range(2)]
    batched = torch.autograd.grad(
        out, x, torch.eye(2)[:, None].expand(2, len(x), 2), is_grads_batched=True, retain_graph=True
    )
    jacobian = torch.stack(rows, 1)
    log(batched[0][1, 0], jacobian[0])
    return F.mse_loss(out[:, :1], y) + (jacobian @ jacobian.mT - torch.eye(2)).square().mean()


@trains()
def maml_by_hand(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    half = len(x) // 2
    weights = dict(net.named_parameters())
    inner = F.mse_loss(functional_call(net, weights, (x[:half],)), y[:half])
    grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    adapted = {k: w - 0.3 * g for (k, w), g in zip(weights.items(), grads)}
    log(inner)
    return F.mse_loss(functional_call(net, adapted, (x[half:],)), y[half:])


@program
def gradients_of_each_sample(log: Log) -> Trained:
    net = mlp()

    def loss_of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(net, weights, (x[None],)), y[None])

    optimizer = SGD(net.parameters(), 0.1)
    for x, y in loader(*data()):
        weights = {k: p.detach() for k, p in net.named_parameters()}
        grads, losses = vmap(grad_and_value(loss_of_one), in_dims=(None, 0, 0))(weights, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        scale = (1 / norms).clamp(max=1)  # differential privacy
        log(losses, norms)
        for k, p in net.named_parameters():
            p.grad = torch.einsum("b,b...->...", scale, grads[k]) / len(x) + 0.01 * torch.randn_like(p)
        optimizer.step()
    return [net]


@trains(lambda: mlp(out=2))
def functional_transforms(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    each = vmap(jacrev(net))(x)
    _, along = jvp(net, (x,), (torch.ones_like(x),))
    log(vmap(hessian(lambda row: net(row).sum()))(x[:2]).sum(0), vmap(lambda row: row @ row)(x))
    noisy = vmap(lambda row: row + 0.1 * torch.randn_like(row), randomness="different")(x)
    return F.mse_loss(net(noisy)[:, :1], y) + each.square().mean() + along.mean(0).square().sum()


@trains()
def forward_derivatives(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        out = torch.autograd.forward_ad.unpack_dual(net(dual))
        log(out.tangent[0], out.tangent.mean())
    return F.mse_loss(out.primal, y) + out.tangent.square().mean()


@program
def lbfgs_closures(log: Log) -> Trained:
    net = mlp()
    optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=4, history_size=3, line_search_fn="strong_wolfe")
    for x, y in loader(*data()):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            log(loss.item())
            return loss

        log(optimizer.step(closure))
    return [net]


@program
def gradients_changed_before_the_step(log: Log) -> Trained:
    net = mlp()
    optimizer = Adam(net.parameters(), 0.01, eps=1e-3)
    for x, y in loader(*data()):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        log(nn.utils.clip_grad_norm_(net.parameters(), 0.5), sum(p.grad.abs().sum() for p in net.parameters()))
        nn.utils.clip_grad_value_(net.parameters(), 0.1)
        for p in net.parameters():
            p.grad += 0.01 * torch.randn_like(p.grad)
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))
            p.grad.data.mul_(0.5)
        net[2].bias.grad = None
        net[0].bias.grad = net[0].weight.grad.sum(1)
        optimizer.step()
    return [net]


@program
def several_backward_calls(log: Log) -> Trained:
    net = mlp(out=2)
    optimizer = SGD(net.parameters(), 0.05)
    for x, y in loader(*data()):
        optimizer.zero_grad(set_to_none=False)
        out = net(x)
        F.mse_loss(out[:, :1], y).backward(retain_graph=True)
        out[:, 1].square().mean().backward(retain_graph=True)
        out.backward(torch.full_like(out, 0.01), retain_graph=True)
        torch.autograd.backward([out[:, 0].mean(), out[:, 1].sum()], [None, torch.tensor(0.1)], retain_graph=True)
        out[0].sum().backward(inputs=list(net[0].parameters()))
        log(net[0].weight.grad.sum())
        optimizer.step()
    return [net]


@program
def parameters_without_gradients(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.body(x).tanh()
        if h.mean() > 0:
            return net.a(h)
        return net.b(h)

    net = Net(forward, body=nn.Linear(6, 6), a=nn.Linear(6, 1), b=nn.Linear(6, 1), unused=nn.Linear(3, 3))
    net.body.bias.requires_grad_(False)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(net(x), y)
        log(*[k for k, p in net.named_parameters() if p.grad is None])
        return loss

    out = train(log, net, loss_of)
    log(*[k for k, p in net.named_parameters() if p.grad is None])
    return out


@program
def unfrozen_later(log: Log) -> Trained:
    net = mlp()
    net[0].requires_grad_(False)
    optimizer = SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    for i, loss in enumerate(steps(optimizer, lambda x, y: F.mse_loss(net(x), y))):
        log(loss, net[0].weight.grad is None)
        if i == 1:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.05})
    return [net]


@program
def replay_buffer(log: Log) -> Trained:
    buffer, goals, net, size = torch.zeros(30, 6), torch.zeros(30, 1), mlp(), 0
    priorities = torch.ones(30)
    optimizer = SGD(net.parameters(), 0.1)
    for x, y in loader(*data(), size=7):
        for i in range(len(x)):
            buffer[size % 30] = x[i]
            goals[size % 30] = y[i]
            size += 1
        drawn = torch.multinomial(priorities[: min(size, 30)], 7, replacement=True)
        out = net(buffer[drawn])
        errors = (out - goals[drawn]).square()[:, 0]
        optimizer.zero_grad()
        errors.mean().backward()
        optimizer.step()
        priorities[drawn] = errors.detach() + 0.01
        buffer[drawn[0]] *= 0.9
        log(errors, priorities.sum(), net(buffer[torch.randint(0, size if size < 30 else 30, (5,))]).mean())
    return [net, buffer, priorities]


@program
def initialised_by_the_first_batch(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        if not net.ready:
            with torch.no_grad():
                net.shift.copy_(-x.mean(0))
                net.scale.data = 1 / (x.std(0) + 0.1)
            net.ready = True
        return net.body((x + net.shift) * net.scale) + net.other(x)

    body = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(1))
    net = Net(forward, ready=False, body=body, other=nn.Linear(6, 1))
    net.shift, net.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
    x, _ = data()
    net(x[:7])
    with torch.no_grad():
        net.other.weight = nn.Parameter(net(x[:7]).mean() * x[:1])
    return fit(log, net)


@program
def one_backward_for_an_epoch(log: Log) -> Trained:
    net = mlp()
    optimizer = SGD(net.parameters(), 0.1)
    for _ in range(2):
        outs, total = [], 0.0
        for x, y in loader(*data()):
            outs.append(net(x))
            total = total + F.mse_loss(outs[-1], y, reduction="sum")
        joined = torch.cat(outs)
        loss = total / len(joined) + (joined.std() - 1).square() + (outs[0][:2] - outs[-1]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss, len(joined))
    return [net]


@program
def networks_that_differentiate_inside(log: Log) -> Trained:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = torch.zeros(len(x), 4, requires_grad=True)
            for _ in range(3):
                energy = (net.energy(torch.cat([x, z], 1)).square() + z.square()).sum()
                z = z - 0.3 * torch.autograd.grad(energy, z, create_graph=True)[0]
            weight = net.fast * 1
            inner = F.mse_loss(x @ weight, x.roll(1, 0))  # test-time training on the batch
            weight = weight - torch.autograd.grad(inner, weight, create_graph=True)[0]
        return net.head(z) + net.out(x @ weight)

    parts = {"energy": mlp(10), "head": nn.Linear(4, 1), "out": nn.Linear(6, 1)}
    net = Net(forward, fast=nn.Parameter(torch.randn(6, 6) / 3), **parts)
    out = fit(log, net)
    with torch.no_grad():
        log(net(data()[0][:7]))
    return out


@program
def gradients_that_keep_their_graph(log: Log) -> Trained:
    """AdaHessian's step, then a penalty on `.grad`, added to gradients of a pass before."""
    net, scale = nn.Sequential(mlp(), nn.LayerNorm(1)), nn.Parameter(torch.ones(1))
    parameters = [*net.parameters(), scale]
    optimizer = SGD(parameters, 0.02)
    for x, y in loader(*data(), size=14):
        optimizer.zero_grad()
        F.l1_loss(net(x) * scale, y).backward()
        loss = F.mse_loss(net(x) * scale, y)
        loss.backward(create_graph=True)
        signs = [torch.randint(0, 2, p.shape) * 2.0 - 1 for p in parameters]
        grads = [p.grad for p in parameters]
        products = torch.autograd.grad(grads, parameters, grad_outputs=signs, retain_graph=True)
        (sum(g.square().sum() for g in grads if g is not None) * 0.1).backward()
        with torch.no_grad():
            for p, product, sign in zip(parameters, products, signs):
                p.grad.add_((product * sign).abs(), alpha=0.1)
        optimizer.step()
        log(loss, scale.grad, products[-1])
    return [net, scale]


@program
def third_derivatives(log: Log) -> Trained:
    """Of a loss with a gradient of its own, and by way of `.grad`."""
    net, seed = mlp(), nn.Parameter(torch.ones(()))
    parameters = [*net.parameters(), seed]
    optimizer = SGD(parameters, 0.01)
    for number, (x, y) in enumerate(loader(*data(), size=14)):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        if number % 2:
            (loss * seed).backward(create_graph=True)
            grads = [p.grad for p in parameters if p.grad is not None]
            optimizer.zero_grad()
        else:
            grads = [*torch.autograd.grad(loss, parameters[:-1], seed, create_graph=True)]
        turns = torch.autograd.grad(sum(g.square().sum() for g in grads), parameters, create_graph=True)
        (0.1 * sum(turn.square().sum() for turn in turns)).backward()
        optimizer.step()
        log(loss, seed.grad, turns[0])
    return [net, seed]
