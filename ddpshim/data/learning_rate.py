"""Scales learning rates for batches that grow with the number of ranks."""

import math
from typing import Optional

from ddpshim.errors import DataError
from ddpshim.job.group import world as current_world


def scale_lr(lr: float, rule: Optional[str] = None, world_size: Optional[int] = None) -> float:
    """Return the learning rate for training with `per_rank_batch=True`.

    W ranks then train on batches W times as large, in 1/W of the steps. "linear" multiplies by W (SGD: Goyal et al.
    2017, with a warm-up), "sqrt" by the square root of W (Adam and similar), "none" does not change it. With a global
    batch, the default of :func:`make_loader`, batches and steps do not change: use "none". Local; with one process
    every rule returns `lr`.

    >>> scale_lr(1e-4, "linear", world_size=4)
    0.0004
    >>> scale_lr(1e-4, "sqrt", world_size=4)
    0.0002

    Args:
        rule: default the world's option `lr_rule` if its `per_rank_batch` is on, else linear.
        world_size: W; default the current world's.

    Raises:
        DataError: the rule is unknown.
    """
    if rule is None:
        options = current_world().options
        rule = options.lr_rule if options.per_rank_batch else "linear"
    size = current_world().world_size if world_size is None else world_size
    factors = {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}
    if rule not in factors:
        raise DataError(f"rule={rule!r} is not a learning-rate rule. Use linear, sqrt or none.")
    return lr * factors[rule]
