"""Noise, dropout and distributions: one process draws as many numbers in the order of the whole's layout."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

from tests.one_process.hostile.parts import change, changed, logged_change, program, trains
from tests.one_process.parts import mlp
from tests.one_process.runner import Log, Trained


@change
def like_expanded(x: Tensor) -> Tensor:
    wide = x[:, None].expand(-1, 3, -1)
    tall = x[0].expand(len(x), -1)
    return x + 0.1 * (torch.randn_like(wide).sum(1) + torch.rand_like(tall) + torch.randint_like(x[:, :1], 5))


@logged_change
def multinomial_of_rows(log: Log, x: Tensor) -> Tensor:
    p = x.detach().softmax(1)
    places = torch.multinomial(p, 2) + torch.multinomial(p, 2, replacement=True)
    rows = p[:, 0].multinomial(len(x), replacement=True)
    log(places, rows)
    return x.gather(1, places % 6).repeat(1, 3) + x[rows]


@trains(lambda: mlp(out=4))
def squashed_gaussian(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    mean, scale = net(x).chunk(2, -1)
    normal = distributions.Normal(mean, F.softplus(scale) + 0.1)
    policy = distributions.Independent(
        distributions.TransformedDistribution(normal, distributions.TanhTransform(cache_size=1)), 1
    )
    action = policy.rsample()
    prior = distributions.Normal(torch.zeros(2), torch.ones(2))
    log(normal.sample((2,)), policy.log_prob(action.detach()).mean())
    return (action - y).square().mean() + 0.01 * distributions.kl_divergence(normal, prior).sum(-1).mean()


@logged_change
def many_distributions(log: Log, x: Tensor) -> Tensor:
    p = F.softplus(x) + 0.5
    drawn = distributions.Beta(p[:, :1], p[:, 1:2]).rsample() + distributions.Gamma(p, 1.0).rsample()
    drawn = drawn + distributions.Dirichlet(p).rsample() + distributions.Laplace(x, p).rsample()
    eye = torch.eye(6).expand(len(x), 6, 6)
    drawn = drawn + distributions.MultivariateNormal(x, eye * p[:, None]).rsample()
    drawn = drawn + distributions.RelaxedOneHotCategorical(torch.tensor(1.0), logits=x).rsample()
    log(distributions.Bernoulli(logits=x).sample(), distributions.OneHotCategorical(logits=x).sample())
    return x + 0.1 * (drawn + distributions.StudentT(4.0, x, p).sample())


@program
def own_generator(log: Log) -> Trained:
    generator = torch.Generator().manual_seed(3)

    def change(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        x.detach()[:, :2].normal_(generator=generator)
        x.detach()[1:].bernoulli_(0.5, generator=generator)
        log(
            torch.randperm(len(x), generator=generator),
            torch.bernoulli(x.detach().sigmoid(), generator=generator).sum(),
        )
        return x + noise + torch.rand_like(x)

    return changed(log, change)


@trains(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1)))
def generator_state_read(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = net(x)
    log(torch.get_rng_state()[:64], torch.initial_seed())
    torch.set_rng_state(state)
    assert torch.equal(first, net(x))
    with torch.random.fork_rng():
        torch.manual_seed(len(x))
        first = first + net(x + torch.randn_like(x))
    log(torch.rand(2), random.random(), np.random.rand())
    return F.mse_loss(first, y)


@change
def draws_of_three_libraries(x: Tensor) -> Tensor:
    n = x.shape[0]
    noise = torch.as_tensor(np.random.randn(n, 6), dtype=x.dtype) + random.gauss(0, 1)
    picked = random.sample(range(n), n // 2)
    places = torch.from_numpy(np.random.permutation(n))
    return (
        x[places]
        + 0.1 * noise
        + x[picked].mean(0)
        + x[np.random.choice(n, n)] * random.choice(x.detach()[:, :1].tolist())[0]
    )


@trains(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)))
def repeated_for_samples(net: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
    stacked = net(x.repeat(3, 1)).view(3, -1, 1)
    wide = net(x.expand(3, *x.shape))
    each = net(x.repeat_interleave(2, 0)).view(len(x), 2, 1)
    log(stacked.std(0).mean(), wide.var(0).mean(), each.mean(1)[0])
    return (stacked.logsumexp(0) + wide.mean(0) + each.mean(1) - y).square().mean()
