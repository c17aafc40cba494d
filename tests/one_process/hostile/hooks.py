"""What steps in between: checkpoints, functions with a backward pass of their own, hooks, modes and compilers."""

from __future__ import annotations

from typing import Any, Callable, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import SGD
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.one_process.hostile.parts import Net, change, computes, fit, program, trains
from tests.one_process.parts import data, loader, mlp, train
from tests.one_process.runner import Log, Trained


def block(features: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, features), nn.Tanh(), nn.Dropout(0.3), nn.Linear(features, features))


@computes(lambda: {"first": nn.Linear(6, 6), "middle": block(), "last": nn.Linear(6, 1)})
def checkpoint_reentrant(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h = checkpoint(net.middle, h, use_reentrant=True)
    return net.last(h + checkpoint(lambda a, b: a * b.mean(0) + b, h, x, use_reentrant=True))


@computes(lambda: {"middle": block(), "last": nn.Linear(6, 1)})
def checkpoint_not_reentrant(net: Net, x: Tensor) -> Tensor:
    h = checkpoint(net.middle, x, use_reentrant=False)
    coupled = checkpoint(lambda a: a - F.dropout(a, 0.2).mean(0), h, use_reentrant=False)
    return net.last(coupled + checkpoint(net.middle, h, use_reentrant=False, preserve_rng_state=False))


@trains()
def checkpoint_outside_a_network(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    loss = checkpoint(lambda a: F.mse_loss(net(a), y) + a.std(0).mean(), x, use_reentrant=True)
    again = checkpoint(lambda a, scale: (net(a * scale) - y).abs().mean(), x, 0.5, use_reentrant=False)
    return loss + again


class Centred(torch.autograd.Function):
    """Couples rows in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.sum(0) / ctx.rows


class Affine(torch.autograd.Function):
    """Its parameters' gradients are sums over rows, which it computes itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.with_bias = bias is not None
        return x @ weight.t() + (0 if bias is None else bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight = ctx.saved_tensors
        to_x = g @ weight if ctx.needs_input_grad[0] else None
        to_weight = g.t() @ x if ctx.needs_input_grad[1] else None
        return to_x, to_weight, g.sum(0) if ctx.with_bias and ctx.needs_input_grad[2] else None


class SetUp(torch.autograd.Function):
    """The style in which forward has no ctx; several outputs, one of them without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * y, x + y, (x > y).long()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return product * y + total, product * x + total


class Doubled(torch.autograd.Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


@change
def function_that_couples(x: Tensor) -> Tensor:
    return Centred.apply(x) + Centred.apply(x.t()).t()


@computes(lambda: {"one": nn.Linear(6, 6), "last": nn.Linear(6, 1), "scale": nn.Parameter(torch.ones(6))})
def function_with_parameters(net: Net, x: Tensor) -> Tensor:
    h = Affine.apply(x, net.one.weight, net.one.bias).tanh()
    return Affine.apply(Affine.apply(h, net.scale[:, None] * net.one.weight[:, :6]), net.last.weight, net.last.bias)


@change
def function_of_several_outputs(x: Tensor) -> Tensor:
    product, total, larger = SetUp.apply(x, x.flip(0))
    other, _, _ = SetUp.apply(x, torch.ones(len(x), 6))
    return product + larger * 0.1 + other * total


@change
def function_that_writes(x: Tensor) -> Tensor:
    y = x * 1
    z = Doubled.apply(y)
    Doubled.apply(x)
    return y + z + Doubled.apply(x[1:].clone()).sum(0)


class Solved(torch.autograd.Function):
    """Differentiates by itself inside forward (as reentrant checkpoints do)."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = function(x)
            (ctx.slope,) = torch.autograd.grad(out.sum(), x)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, ctx.slope * g


@change
def function_that_differentiates(x: Tensor) -> Tensor:
    return Solved.apply(lambda h: (h * h).tanh() * 0.5, x) + Solved.apply(lambda h: h.softmax(0), x)


@computes(lambda: {"body": nn.Linear(6, 6), "middle": nn.Linear(6, 6), "head": nn.Linear(6, 1)})
def hooks_on_hidden_values(net: Net, x: Tensor) -> Tensor:
    h = net.body(x).tanh()
    h.register_hook(lambda g: g * 0.5)
    k = net.middle(h)
    k.register_hook(lambda g: g / (g.norm() + 1))
    k.register_hook(lambda g: net.log(g.norm(), g.shape[0], g.abs().max()))
    handle = k.register_hook(lambda g: g * 100)
    handle.remove()
    out = net.head(k)
    out.register_hook(lambda g: g.clamp(-0.05, 0.05) - g.mean())
    return out


class _KeepsItsWeight(torch.autograd.Function):
    """Uses a weight, for which it has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 1.5, None


@program
def functions_that_give_no_gradient(log: Log) -> Trained:
    net = Net(lambda net, x: _KeepsItsWeight.apply(net.head(x), net.weight), head=nn.Linear(6, 1))
    net.weight = nn.Parameter(torch.ones(1))
    optimizer = SGD(net.parameters(), 0.1)
    for x, y in loader(*data()):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        log(float(net.weight.grad is None))
    return [net]


@program
def gradients_retained(log: Log) -> Trained:
    hidden: list[Tensor] = []

    def forward(net: Net, x: Tensor) -> Tensor:
        hidden[:] = [net.body(x)]
        hidden[0].retain_grad()
        return net.head(hidden[0].tanh())

    net = Net(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 1))
    optimizer = SGD(net.parameters(), 0.1)
    for step, (x, y) in enumerate(loader(*data())):
        x.requires_grad_(step % 2 == 0)  # else all gradients are of parameters that ranks average
        loss = F.mse_loss(net(x), y)
        loss.retain_grad()
        optimizer.zero_grad()
        loss.backward()
        grad = hidden[0].grad
        log(loss.item(), loss.grad, grad.norm(), grad[0], grad.shape[0], x.grad, x.is_leaf)
        net.head.weight.grad += grad.mean(0)
        optimizer.step()
    return [net]


@program
def optimizer_in_backward(log: Log) -> Trained:
    net = mlp()
    optimizers = {p: SGD([p], 0.1, momentum=0.9) for p in net.parameters()}

    def step(p: Tensor) -> None:
        log(p.grad.norm())
        p.grad.clamp_(-0.1, 0.1)
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x, y in loader(*data()):
        F.mse_loss(net(x), y).backward()
    return [net]


@program
def views_of_parameters(log: Log) -> Trained:
    """Parts of weights have hooks and gradients of their own, and are used with rows and without."""
    weight, level = nn.Parameter(torch.randn(12, 6) / 4), nn.Parameter(torch.randn(1, 6))
    net = nn.Module()
    net.weight, net.level = weight, level
    attend = net.attend = nn.MultiheadAttention(6, 2, batch_first=True)
    optimizer = SGD(net.parameters(), 0.02)
    for i, (x, y) in enumerate(loader(*data(), size=11)):
        one, other = weight.split(6)
        turned = weight.t()[:, 3:9]
        other.register_hook(lambda g: log(g.norm(), g.abs().max()) or 2 * g)
        turned.retain_grad()
        h = (F.linear(x, one) + x @ other + x @ turned + level.expand(len(x), 6)).unsqueeze(1)
        rows = torch.cat([h, h.sin()], 1)
        loss = F.mse_loss(attend(rows, 2 * rows, rows)[0].sum((1, 2)), y[:, 0]) + (one * weight[6:]).square().sum()
        if i % 2:
            part = weight[2:8]
            (slope,) = torch.autograd.grad(F.linear(x, part).tanh().mean(), part, create_graph=True)
            log(slope.norm())
            loss = loss + slope.square().sum()
        optimizer.zero_grad()
        loss.backward()
        log(loss.item(), turned.grad.norm(), weight.grad.norm())
        optimizer.step()
    return [net]


@program
def hooks_on_parameters(log: Log) -> Trained:
    net = mlp()
    mask = (torch.rand(8, 6) > 0.5).to(torch.get_default_dtype())
    net[0].weight.register_hook(lambda g: g * mask)
    net[2].weight.register_hook(lambda g: g.clamp(-0.02, 0.02))
    net[0].bias.register_hook(lambda g: torch.zeros_like(g))
    for p in net.parameters():
        p.register_hook(lambda g: log(g.norm().item(), g.abs().max()))
    return fit(log, net)


@program
def hooks_on_modules(log: Log) -> Trained:
    net = mlp()
    seen: dict[str, Tensor] = {}
    net[0].register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(0),))
    net[0].register_forward_hook(lambda module, args, out: seen.update(first=out))
    net[1].register_forward_hook(lambda module, args, out: out / out.norm())
    net[2].register_forward_hook(lambda module, args, kwargs, out: log(out.mean(), len(args[0])), with_kwargs=True)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(net(x), y) + seen["first"].square().mean()

    return train(log, net, loss_of)


@program
def hooks_on_modules_backward(log: Log) -> Trained:
    net = mlp()

    def backward_hook(module: nn.Module, to_input: tuple[Tensor, ...], of_output: tuple[Tensor, ...]) -> Any:
        log(to_input[0].mean() if to_input[0] is not None else 0, of_output[0].norm(), of_output[0].shape[0])
        return None if to_input[0] is None else (to_input[0] - to_input[0].mean(0),)

    net[1].register_full_backward_hook(backward_hook)
    net[2].register_full_backward_pre_hook(lambda module, of_output: (of_output[0] / of_output[0].abs().max(),))
    net.register_full_backward_hook(backward_hook)
    return fit(log, net)


@trains()
def saved_tensors_packed(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    packed: list[int] = []

    def pack(t: Tensor) -> np.ndarray:
        packed.append(t.numel())
        return t.detach().numpy().copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        loss = F.mse_loss(net(x), y)
    with torch.autograd.graph.save_on_cpu():
        loss = loss + net(x.flip(0)).square().mean()
    return loss


@trains()
def graph_inspected(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    out = net(x)
    loss = F.mse_loss(out, y)
    log(out.requires_grad, out.is_leaf, x.requires_grad, x.is_leaf, out.detach().requires_grad, y.grad_fn is None)
    log(loss.grad_fn is not None, x.grad is None, out._version, out.is_contiguous(), out.stride())
    assert type(x) is Tensor
    return loss


@trains()
def modes_of_gradients(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        best = net(x).argmax(0)
        log(best, net(x).mean())
    with torch.set_grad_enabled(False):
        weights = torch.softmax(-(net(x) - y).square(), 0)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        return (weights * (net(x) - y).square()).sum() + F.mse_loss(net(x[best]), y[best])


@trains(lambda: mlp(out=2))
def hooks_on_several_gradients(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    h = net[1](net[0](x))
    out = net[2](h)
    torch.autograd.graph.register_multi_grad_hook((h, out), lambda grads: log(*[g.norm() for g in grads]))
    out.grad_fn.register_hook(lambda to_inputs, of_outputs: log(of_outputs[0].sum()))
    out.grad_fn.register_prehook(lambda of_outputs: (of_outputs[0] * 0.5,))
    return F.mse_loss(out[:, :1], y) + out[:, 1].var()


@program
def modes_over_functions(log: Log) -> Trained:
    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is F.linear:
                log(out.shape, out.mean())
                out = out * 0.9
            return out

    net = mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with Calls():
            return F.mse_loss(net(x), y)

    return train(log, net, loss_of)


@trains()
def operators_by_their_names(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    aten = torch.ops.aten
    h = aten.mul(x, 2.0) + aten.roll.default(x, [1], [0]) + torch._C._nn.gelu(x)
    h = h + torch._C._VariableFunctions.sub(x, x.mean(0))
    out = aten.linear(aten.tanh(net[0](h)), net[2].weight, net[2].bias)
    aten.add_.Tensor(out.detach(), 0.1)
    log(aten.sum.dim_IntList(x, [0]), aten.sym_size.int(x, 0), aten.mean.default(out))
    return aten.mse_loss(out, y) + torch._VF.chunk(out, 2)[0].mean()


def fresh_compiler(function: Callable[[Log], Trained]) -> Callable[[Log], Trained]:
    """Compile nothing of earlier programs."""

    def run(log: Log) -> Trained:
        torch._dynamo.reset()
        return function(log)

    run.__name__ = function.__name__
    return run


@program
@fresh_compiler
def compiled_eager(log: Log) -> Trained:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    compiled = torch.compile(net, backend="eager")
    out = fit(log, compiled)
    log(*[k.replace("_orig_mod.", "") for k in compiled.state_dict()])
    return [*out, net]


@program
@fresh_compiler
def compiled_in_place(log: Log) -> Trained:
    net = mlp()
    net[0].compile(backend="eager")
    net.compile(backend="aot_eager", dynamic=True)

    @torch.compile(backend="eager", dynamic=True)
    def shift(x: Tensor) -> Tensor:
        x -= x.mean(0)
        x[0] = 0
        return x * 2

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(net(shift(x)), y)
        log(x.sum(0))
        return loss

    return train(log, net, loss_of)


@program
def traced(log: Log) -> Trained:
    net = Net(lambda net, x: net.head((net.body(x) - x.mean(0)).softmax(0)), body=nn.Linear(6, 6), head=nn.Linear(6, 1))
    x, y = data()
    log(torch.jit._get_trace_graph(net, (x[:16],))[1])  # as fvcore counts operations, before the first step
    out = fit(log, torch.jit.trace(net, x[:16]), loader(x, y))
    for a, b in loader(x, y):
        again = torch.jit.trace(net, a, check_trace=False)
        log(F.mse_loss(again(a), b))
    return out


@trains()
def contexts_of_torch(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    with torch.device("cpu"):
        noise = torch.randn(len(x), 6) + torch.zeros_like(x)
        h = x + noise
    kind = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    wide = torch.ones(len(x), 1) * x.to(torch.float64).mean(0)
    torch.set_default_dtype(kind)
    with torch.autograd.profiler.record_function("step"), torch.backends.mkldnn.flags(enabled=False):
        out = net(h + wide.to(kind))
    with torch._C.DisableTorchFunctionSubclass():
        out = out + x.mean(1, keepdim=True) - x.mean()
    return F.mse_loss(out, y)
