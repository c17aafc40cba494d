"""Replays captured calls of networks as static graphs, for the option `graphs`: the host launches one graph per pass.

A static graph (torch.cuda.CUDAGraph) computes what was recorded once more, at the addresses of that time. A `Replayer`
stands in for a function of tensors: a tape (`capture`), or what is between two of its messages. It calls the function
itself until it knows the layout of gradients; records a forward and a backward pass; compares both with the function in
a later step, bit by bit; and replays them from then on. What a call has that the graphs have not (another layout, a
second backward pass, a moved weight) is computed by the function.

The program gets copies of results and gradients, so it may keep them, and write into them. On a CPU, `CpuGraph` stands
in for CUDA's graphs: it is no faster, and shows what a GPU would compute.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ddpshim.errors import SyncError
from ddpshim.process.job import current
from ddpshim.process.random_streams import changed, rank_states, restore_rank_states
from ddpshim.process.users_line import users_line
from ddpshim.rows.at_once import is_saved_elsewhere
from ddpshim.rows.tape import are_equal, generator, in_modes, modes, nodes_below
from ddpshim.rows.tensor import is_reduced, leaves, memory_of

_T = torch.Tensor
_MOST_RECORDINGS = 4  # of a function, whose weights move or whose gradients change their layout
_MOST_REASONS = 3
_FIRST, _EACH = 10, 1000  # after so many replays one is compared with the function; then after 100, 1000, 2000, ...
_LEARNS, _MOVED = "recording and comparing", "a weight has moved"
_LINE = 64  # bytes: kernels of products choose their order by where in a cache line a tensor begins
_SECOND_ORDER = "gradients of its gradients are computed"
_WAITS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
Function = Callable[..., list[Any]]


class NotStatic(Exception):
    """What a static graph cannot hold."""


class Graphs:
    """Counts the calls with gradients in a job that were replayed, and others by their reason."""

    def __init__(self) -> None:
        self.replayed, self.by_function = 0, Counter[str]()
        self.pool: Any = None  # of a GPU's memory


def summary(refused: dict[str, str]) -> str:
    """Return how many calls ran as static graphs, and why the others did not. Local.

    `refused` says by the name of a network why its calls are not captured.
    """
    found = current().part(Graphs)
    reasons = [f"{num} {why}" for why, num in found.by_function.most_common(_MOST_REASONS)]
    reasons += [f"{name} is not traced: {why}" for name, why in [*refused.items()][:_MOST_REASONS]]
    num = found.replayed + sum(found.by_function.values())
    if not num and not reasons:
        reasons = ["no network got a batch that is traced"]
    replayed = f"DDPSHIM_GRAPHS=on: {found.replayed} of {num} calls were replayed as graphs"
    return replayed + f" (others: {'; '.join(reasons)})" * bool(reasons)


class CpuGraph(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the operations below autograd while it is entered; `replay` computes them into the same memory.

    `known` are the memories that it may use; it adds those of its results.
    """

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known, self._calls, self._kept = known, list[Any](), list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        given = [x for x in leaves((args, kwargs)) if isinstance(x, _T)]
        if func.namespace == "c10d":
            raise NotStatic(f"{func} sends a message")
        by_index = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
        waits = any(x.dtype in (torch.bool, torch.uint8) for x in leaves(args[1])) if by_index else False
        if waits or (not by_index and any(tag in func.tags for tag in _WAITS)):
            raise NotStatic(f"the host waits for {func}")
        if torch.Tag.inplace_view in func.tags:
            raise NotStatic(f"{func} changes a shape in place")
        if not self._known.issuperset(map(memory_of, given)):
            raise NotStatic(f"{func} uses a tensor of the host")
        if len({x.device for x in given} | ({kwargs["device"]} if kwargs.get("device") else set())) > 1:
            raise NotStatic(f"{func} copies between the host and the GPU")
        out = func(*args, **kwargs)
        found = leaves(out)
        self._kept += found  # alive: a memory's number would be given again
        self._known.update(memory_of(x) for x in found if isinstance(x, _T))
        # A view is computed once: the graph keeps its memory.
        if not any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
            self._calls.append((func, args, kwargs, [] if schema.is_mutable else found, torch.is_grad_enabled()))
        return out

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            for func, args, kwargs, into, has_grad in self._calls:
                torch._C._set_grad_enabled(has_grad)  # by which a recurrent layer chooses its kernel
                for x, y in zip(into, leaves(func(*args, **kwargs))):
                    if isinstance(x, _T):
                        x.copy_(y)


class CudaGraph:
    """A graph of CUDA, which is recorded while it is entered; all of a job share a pool of memory."""

    def __init__(self, known: set[int]) -> None:
        of_job = current().part(Graphs)
        of_job.pool = of_job.pool or torch.cuda.graph_pool_handle()
        self._made = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: loaders that pin memory, and nccl's.
        self._recording = torch.cuda.graph(self._made, pool=of_job.pool, capture_error_mode="thread_local")

    def __enter__(self) -> None:
        self._recording.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._recording.__exit__(*error)

    def replay(self) -> None:
        self._made.replay()


class Replayer:
    """Stands in for `function`, which takes and returns tensors; `name` is that of the network."""

    def __init__(self, name: str, function: Function) -> None:
        self.name, self.function = name, function
        self.refused = ""
        self.num_replays = self.compared_at = 0  # of what is recorded now
        self.in_flight: Callable[[], Any] = lambda: None  # the call whose backward pass has not begun
        self._last: list[Any] = []  # inputs of the call before, by weak references
        self._layouts: list[Any] = []  # of the gradients of its results
        self._recorded: Optional[_Recorded] = None
        self._num_recordings = 0

    def __call__(self, *inputs: Any) -> list[Any]:
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
            return self.function(*inputs)
        why = self._why_not(inputs)
        if not why:
            # By nodes of their own: gradients come from the last to the first, as on a rank that replays nothing.
            used = [x.view_as(x) if x.requires_grad else x for x in inputs]
            return list(_Replay.apply(self, self._recorded, inputs, *used))  # type: ignore[no-untyped-call]
        current().part(Graphs).by_function[why] += 1
        outputs = self.function(*inputs)
        self._last = [*map(weakref.ref, inputs)] if why in (_LEARNS, _MOVED) else []
        if why == _LEARNS and not any(self._layouts):
            self._learn(outputs)
        return outputs

    def _why_not(self, inputs: Sequence[Any]) -> str:
        """Return why the function computes this call; or an empty text. Local."""
        if self.refused:
            return self.refused
        if self.in_flight() is not None:
            return "called again before its backward pass"
        device = inputs[0].device.type
        if torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled():
            return "autocast keeps what it casts for other calls: torch.autocast(..., cache_enabled=False)"
        if self._recorded is not None:
            why = self._recorded.why_not(inputs)
            if why == _MOVED:
                self._recorded = None
            return why
        if not any(self._layouts):
            return _LEARNS
        self._record(inputs)
        return self.refused or _LEARNS

    def _learn(self, outputs: list[Any]) -> None:
        """Note the layouts of the gradients that the results get."""
        layouts, passes = [None] * len(outputs), set[int]()

        def note(place: int, gradient: torch.Tensor) -> None:
            passes.add(torch._C._current_graph_task_id())
            if len(passes) > 1:
                self.refused = "a call has several backward passes"
            if torch.is_grad_enabled():
                self.refused = _SECOND_ORDER
            layouts[place] = _layout(gradient)
            self._layouts = layouts

        for place, x in enumerate(outputs):
            if x.requires_grad:
                inspect.unwrap(_T.register_hook)(x, functools.partial(note, place))

    def _record(self, inputs: Sequence[Any]) -> None:
        self._num_recordings += 1
        if self._num_recordings > _MOST_RECORDINGS:
            self.refused = "its weights move, or its gradients change their layout"
            return
        last = [one() for one in self._last] or [None] * len(inputs)
        kept = {i for i, x in enumerate(inputs) if isinstance(x, nn.Parameter) or last[i] is x}
        try:
            self._recorded = _Recorded(self.function, inputs, kept, [*self._layouts])
            self.num_replays = self.compared_at = 0
        except (NotStatic, RuntimeError, NotImplementedError) as why:  # what torch says of a GPU's graphs
            self.refused = str(why).strip().partition("\n")[0]

    def is_due(self) -> bool:
        """Whether a replay is to be compared with the function once more. Local."""
        return self.num_replays >= self.compared_at + min(max(9 * self.compared_at, _FIRST), _EACH)

    def learn_again(self, gradients: Sequence[Any]) -> None:
        """Record anew, with the layouts of these gradients. Local."""
        self._recorded, self._layouts = None, [*map(_layout, gradients)]

    def differs(self, what: str) -> None:
        """Give the graphs up; raise SyncError if replays were used that may be wrong."""
        self.refused = f"{what} of its graph are others than those of its operations"
        if self.num_replays:
            raise SyncError(
                f"the static graph of {self.name} was compared with its operations after {self.num_replays} replays: "
                f"{self.refused}. Steps since the last comparison may be wrong, and checkpoints saved since. Go on "
                "from an earlier checkpoint, with DDPSHIM_GRAPHS=off."
            )


class _Recorded:
    """A forward and a backward pass of a function as static graphs. Raises NotStatic, or an error of torch's.

    `kept` are the places of inputs that are used where they are; others are copied to their place for each call.
    """

    def __init__(self, function: Function, inputs: Sequence[Any], kept: set[int], layouts: list[Any]) -> None:
        self.device, self.layouts = inputs[0].device, layouts
        self._kept = {i: inputs[i].data_ptr() for i in sorted(kept)}
        self._moving = [i for i in range(len(inputs)) if i not in kept]
        self.modes, self._kinds = (modes(self.device), _flags()), self._kinds_of(inputs)
        self.buffers = {i: inputs[i] for i in self._kept if not inputs[i].requires_grad}
        if any(x.layout is not torch.strided or x.is_conj() or x.is_neg() for x in inputs):
            raise NotStatic("it gets a tensor that is no plain memory")
        self._static = [x.data if i in kept else _copied(x) for i, x in enumerate(inputs)]
        # Weights, and how many hooks take their gradients for all ranks.
        self._hooks = {i: int(is_reduced(x)) for i, x in enumerate(inputs) if x.is_leaf and x.requires_grad}
        self._has_gradient = [x.requires_grad for x in inputs]
        self.is_proven = False
        for kind in (CpuGraph, CudaGraph)[: 1 + (self.device.type == "cuda")]:  # the first one says what is not static
            with self.undone() as before:
                self._record(kind, function)
                if kind is CpuGraph:  # torch's BatchNorm writes without a trace
                    self.written |= {i for i, x in self.buffers.items() if not are_equal(x, before[i])}
                    same = all(are_equal(self._static[i], inputs[i]) for i in self._moving)
                    if not same or self.written & {*self._moving}:
                        raise NotStatic("it writes into what it gets")

    @staticmethod
    def _kinds_of(inputs: Sequence[Any]) -> list[Any]:
        return [x.requires_grad if isinstance(x, nn.Parameter) else (_layout(x), x.requires_grad) for x in inputs]

    def why_not(self, inputs: Sequence[Any]) -> str:
        """Return why the graphs do not compute a call with these inputs. Local."""
        if self.has_moved(self.kept_of(inputs)):
            return _MOVED
        if self._kinds_of(inputs) != self._kinds or (modes(self.device), _flags()) != self.modes:
            return "its inputs, or modes of torch, are others"
        if is_saved_elsewhere():
            return "hooks see what is saved for gradients"
        weights = ((inputs[i], num) for i, num in self._hooks.items())
        if any(x._backward_hooks or len(x._post_accumulate_grad_hooks or ()) > num for x, num in weights):
            return "a weight has a hook"  # they would be called in another order
        return ""

    def kept_of(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [inputs[i] for i in self._kept]

    def has_moved(self, kept: Sequence[torch.Tensor]) -> bool:
        return any(x.data_ptr() != address for x, address in zip(kept, self._kept.values()))

    @contextlib.contextmanager
    def undone(self) -> Iterator[dict[int, torch.Tensor]]:
        """Restore buffers and RNG states at the end of the block; yields the buffers' values by place. Local."""
        states, before = rank_states(self.device), {i: x.clone() for i, x in self.buffers.items()}
        try:
            yield before
        finally:
            restore_rank_states(states, self.device)
            for i, x in self.buffers.items():
                x.data.copy_(before[i])  # for autograd, nothing was written

    def _record(self, kind: Any, function: Function) -> None:
        memories = [memory_of(x) for x in self._static]
        known = {*memories}
        self.forward, self._backward = kind(known), kind(known)
        given = [x.detach().requires_grad_(has) for x, has in zip(self._static, self._has_gradient)]
        saved = set[int]()

        def note(x: torch.Tensor) -> torch.Tensor:
            saved.add(memory_of(x))
            return x

        versions = [x._version for x in given]
        with torch.enable_grad(), saved_tensors_hooks(note, lambda x: x), self.forward:
            outputs = function(*given)
        if {*memories} & {memory_of(x) for x in outputs} or _overlap(outputs):
            raise NotStatic("its results share memory")
        if kind is CpuGraph:
            self.written = {i for i, x in enumerate(given) if x._version != versions[i]}
        self.needed = [i for i, memory in enumerate(memories) if memory in saved]
        self._check_reached(given, outputs)
        self.outputs, self.has_gradient = [x.detach() for x in outputs], [x.requires_grad for x in outputs]
        into = [None if one is None else _empty(*one) for one in self.layouts]
        known.update(memory_of(x) for x in into if x is not None)
        self._into, sizes = into, Counter[Any]()
        self._places: list[Any] = []
        with self._backward:
            found = gradients(given, outputs, into)
            for x in found:
                if x is None:
                    self._places.append(None)
                    continue
                first = sizes[x.dtype] + x.data_ptr() % _LINE // x.itemsize
                self._places.append((x.dtype, x.shape, x.stride(), first))
                sizes[x.dtype] = -(-(first + _extent(x)) * x.itemsize // _LINE) * _LINE // x.itemsize
            # In one piece, which is copied by one kernel.
            self._found = {dtype: torch.empty(size, dtype=dtype, device=self.device) for dtype, size in sizes.items()}
            for x, place in zip(found, self._places):
                if x is not None:
                    self._found[x.dtype].narrow(0, place[3], _extent(x)).copy_(_memory(x))

    def _check_reached(self, given: list[Any], outputs: list[Any]) -> None:
        """Raise NotStatic if a result of another network is used for some results only. Local."""
        nodes = [nodes_below(x.grad_fn) for x in outputs if x.grad_fn]
        reached = [{id(getattr(one, "variable", None)) for one in some} for some in nodes]
        for i in self._moving:  # what computes it would be called for a gradient of nothing
            if given[i].requires_grad and not all(id(given[i]) in some for some in reached):
                raise NotStatic("not all results are computed from one of its inputs")

    def take(self, inputs: Sequence[Any]) -> None:
        for i in self._moving:
            _memory(self._static[i]).copy_(_memory(inputs[i]))

    def results(self) -> list[Any]:
        return [*map(_copied, self.outputs)]

    def backward(self, given: Sequence[Any]) -> list[Any]:
        """Return the gradients of inputs by those of results. Local."""
        for mine, x in zip(self._into, given):
            if mine is not None:
                _memory(mine).copy_(_memory(x))
        self._backward.replay()
        fresh = {dtype: x.clone() for dtype, x in self._found.items()}
        # No views: each has a version of its own, by which autograd sees writes.
        return [x and fresh[x[0]].new_empty(0).set_(fresh[x[0]].untyped_storage(), x[3], *x[1:3]) for x in self._places]


class _Replay(torch.autograd.Function):
    """The inputs of a function -> its results, by its graphs; beside them by the function, if they are to be proven."""

    @staticmethod
    def forward(ctx: Any, replayer: Replayer, recorded: _Recorded, originals: Any, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.replayer, ctx.recorded, ctx.weights = replayer, recorded, recorded.kept_of(originals)
        ctx.before, ctx.own = generator(recorded.device).get_state(), None
        recorded.take(inputs)
        if recorded.is_proven and not replayer.is_due():
            recorded.forward.replay()
            found = recorded.results()
        else:
            recorded.is_proven = False
            with recorded.undone():
                recorded.forward.replay()
                now = recorded.results(), rank_states(recorded.device), [x.clone() for x in recorded.buffers.values()]
            leaves, results = by_function(replayer.function, inputs)
            found, after = [x.detach() for x in results], rank_states(recorded.device)
            of_both = zip((*results, *recorded.buffers.values()), (*now[0], *now[2]))
            if not all(are_equal(*pair) for pair in of_both):
                replayer.differs("results")
            if changed(now[1], after):
                replayer.differs("random numbers")
            ctx.own = leaves, results
        replayer.in_flight = weakref.ref(ctx)
        ctx.mark_non_differentiable(*[x for x, has in zip(found, recorded.has_gradient) if not has])
        needed = {*recorded.needed}
        ctx.save_for_backward(*(x if i in needed else None for i, x in enumerate(inputs)))
        ctx.others = [(None, 0) if i in needed else (x, x._version) for i, x in enumerate(inputs)]
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        replayer, recorded, saved = ctx.replayer, ctx.recorded, ctx.saved_tensors
        is_first, own, ctx.own = replayer.in_flight() is ctx, ctx.own, None
        if is_first:
            replayer.in_flight = lambda: None
        if recorded.has_moved(ctx.weights):
            raise SyncError(
                f"{users_line()}: a weight of {replayer.name} got other memory (`p.data = ...`) between a call and its "
                "backward pass. The gradients would be of the old one. Use DDPSHIM_GRAPHS=off."
            )
        fits = [*map(_layout, given)] == recorded.layouts
        if not is_first or torch.is_grad_enabled() or (own is None and not fits):
            if not torch.is_grad_enabled() and not fits:
                replayer.learn_again(given)
            return None, None, None, *_again(ctx, saved, given)
        if own is None:
            replayer.num_replays += 1
            current().part(Graphs).replayed += 1
            return None, None, None, *recorded.backward(given)
        found = gradients(own[0], own[1], given)
        if not fits:
            replayer.learn_again(given)
        elif not replayer.refused:
            recorded.is_proven = all(map(_are_alike, recorded.backward(given), found))
            replayer.compared_at = replayer.num_replays
            if not recorded.is_proven:
                replayer.differs("gradients")
        return None, None, None, *found


def _again(ctx: Any, saved: Sequence[Any], given: Sequence[Any]) -> Any:
    """Return the gradients of a call that is computed once more by its function, with its random numbers. Local.

    For a second backward pass, gradients of gradients, and results of which some are used.
    """
    recorded, device = ctx.recorded, ctx.recorded.device
    inputs = [x if x is not None else other for x, (other, _) in zip(saved, ctx.others)]
    if recorded.written or any(x is not None and x._version != version for x, version in ctx.others):
        raise SyncError(
            f"{users_line()}: a call of {ctx.replayer.name} must be computed again for its gradients (a second "
            "backward pass, create_graph=True, or a loss of other results than before), and a buffer or an input has "
            "another value now. The gradients would be others. Use DDPSHIM_GRAPHS=off."
        )
    now = generator(device).get_state()
    generator(device).set_state(ctx.before)
    has_graph = torch.is_grad_enabled()
    try:
        with in_modes(recorded.modes[0]):
            if not has_graph:
                leaves, results = by_function(ctx.replayer.function, inputs)
            else:
                results = ctx.replayer.function(*inputs)
        if has_graph:
            ctx.replayer.refused = _SECOND_ORDER  # sums of gradients are rounded in another order, but once
            return gradients(inputs, results, given, create_graph=True)
        return gradients(leaves, results, given)
    finally:
        generator(device).set_state(now)


def by_function(function: Function, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return leaves in place of inputs, and the function's results of them, with a graph. Local."""
    with torch.enable_grad():
        given = [x.detach().requires_grad_() if x.requires_grad else x for x in inputs]
        return given, function(*given)


def gradients(inputs: Sequence[Any], outputs: Sequence[Any], given: Sequence[Any], create_graph: bool = False) -> Any:
    """Return the gradients of inputs by those `given` of outputs; None where there is none. Local."""
    pairs = [(x, gradient) for x, gradient in zip(outputs, given) if gradient is not None]
    wanted = [x for x in inputs if x.requires_grad]
    call = functools.partial(inspect.unwrap(torch.autograd.grad), allow_unused=True, create_graph=create_graph)
    found = iter(call([x for x, _ in pairs], wanted, [gradient for _, gradient in pairs]))
    return [next(found) if x.requires_grad else None for x in inputs]


def _flags() -> Any:
    """Return the settings of torch by which it chooses kernels. Local."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    of_attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    of_cudnn = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cuda.cudnn_sdp_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    return of_attention, of_cudnn, deterministic, torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled


def _are_alike(one: Any, other: Any) -> bool:
    return one is other if one is None or other is None else are_equal(one, other)


def _layout(x: Any) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % _LINE)


def _extent(x: torch.Tensor) -> int:
    """Return how much memory a tensor spans, in entries. Local."""
    return 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride())) if x.numel() else 0


def _memory(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as a vector, also that of an expanded tensor, or of one with gaps. Local."""
    return x.detach().as_strided((_extent(x),), (1,))


def _empty(shape: Any, strides: Any, dtype: torch.dtype, device: torch.device, place: int) -> torch.Tensor:
    """Return memory for a tensor of this layout, which begins `place` bytes after a line of cache. Local."""
    first, last = place // dtype.itemsize, sum((size - 1) * step for size, step in zip(shape, strides))
    memory = torch.empty(first + max(0, last) + 1, dtype=dtype, device=device)
    return memory.as_strided(shape, strides, first).detach()


def _copied(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in its layout. Local."""
    made = _empty(*_layout(x))
    _memory(made).copy_(_memory(x))
    return made


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an entry of one tensor is one of another, too. Local."""
    for memory in {memory_of(x) for x in tensors}:
        some = [x for x in tensors if memory_of(x) == memory]
        if len(some) > 1:
            first = min(x.storage_offset() for x in some)
            seen = torch.zeros(
                max(x.storage_offset() + _extent(x) for x in some) - first, dtype=torch.bool, device="cpu"
            )
            for x in some:
                own = seen.as_strided(x.shape, x.stride(), x.storage_offset() - first)
                if own.any():
                    return True
                own.fill_(True)
    return False
