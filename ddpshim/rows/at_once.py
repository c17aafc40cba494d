"""Computes captured calls of networks on some rows at once, for the option `rows_at_once`: a batch need not fit.

A rank's rows are divided into pieces, as if more ranks had one each. The graph of a call (`capture`) is computed for
one piece after the other, without what its gradients need, and the results are joined. The backward pass computes each
piece again, with what its gradients need, which it then frees. Rules compute the rows of any rank; so what they compute
without a message they compute for a piece. A graph that needs a message (BatchNorm, a mean over the batch) is refused:
then the parts of its network are captured, each by itself.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ddpshim.errors import SyncError
from ddpshim.model.mean_gradients import moved_back, order_in_memory
from ddpshim.process.job import current
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say_on_main
from ddpshim.process.users_line import users_line
from ddpshim.rows import blocks, rules, tape
from ddpshim.rows.blocks import Part, Ranks
from ddpshim.rows.tape import NoMessages, Refused, check_assertion
from ddpshim.rows.tensor import Rows, mapped, memory_of

_T = torch.Tensor
_ODD = 0x1E3779B97F4A7C15, 0x3C6EF372FE94F82B  # of a hash, by rows and columns: products and sums wrap around
_IN_CACHE = 1 << 18  # bytes
_MOST_COPIED = 1 << 22  # bytes of a buffer; a larger one is compared before the backward pass
# Of the code that Dynamo makes: what changes something besides its results.
_STORES = {f"{what}_{where}" for what in ("STORE", "DELETE") for where in ("ATTR", "SUBSCR", "GLOBAL", "DEREF")}
_CHANGING = {"update", "extend", "append", "clear", "pop", "add", "insert", "remove", "discard", "popitem", "setattr"}
_CHANGING |= {"appendleft", "extendleft", "setdefault", "setstate", "seed", "next", "__next__", "send"}
_OF_DYNAMO = {"record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit"}  # its other helpers change something


def say_why(name: str, why: str) -> None:
    """Say once of a network, and why, that its call is not computed in pieces. Local."""
    say_on_main(f"DDPSHIM_ROWS_AT_ONCE: {name} is computed for all rows at once, or part by part: {why}")


def may_save(module: nn.Module) -> bool:
    """Whether the module may compute more than a result of its inputs, which stay anyway. Local."""
    is_layer = type(module).__module__.startswith("torch.nn.modules.") and next(module.children(), None) is None
    return not is_layer or isinstance(module, nn.RNNBase)


def num_pieces(rows: Rows) -> int:
    """Return into how many pieces the rows of each rank are divided; 1 without the option. Local."""
    most, (_, size) = current().part(blocks.State).rows_at_once, blocks.ranks()
    if most is None or rows.part.outer > 1 or rows.device.type == "meta":
        return 1
    of_ranks = [end - start for start, end in (rows.part.bounds(rank, size) for rank in range(size))]
    return max(1, min(-(-max(of_ranks) // most), min(of_ranks) // blocks.LEAST_ROWS))


def is_saved_elsewhere() -> bool:
    """Whether hooks see what is saved for gradients, as an activation checkpoint's do, which computes again itself."""
    autograd: Any = torch._C._autograd
    return bool(autograd._top_saved_tensors_default_hooks(True)) or not autograd._saved_tensors_hooks_is_enabled()


def check_changes_nothing(code: types.CodeType) -> None:
    """Raise Refused if what Dynamo made of a call changes an object of the program. Local."""
    helpers = {name for name in code.co_names if callable(getattr(torch._dynamo.utils, name, None))} - _OF_DYNAMO
    if helpers or _CHANGING & {*code.co_names} or _STORES & {step.opname for step in dis.get_instructions(code)}:
        raise Refused("it changes an attribute or a container")


class _Alone:
    """In place of a tape, while a piece is computed."""

    def call(self, function: Any, args: Any) -> Any:
        """Compute what is one call for a tape, or refuse it: it is of all ranks."""
        if function is not check_assertion:
            raise Refused("it needs all rows")
        return function(*args)

    mask = staticmethod(blocks.own_rows)


Sources = dict[int, frozenset[int]]  # of each result with a gradient: the places of inputs from which it is computed


class Call(_Alone):
    """A call of a graph, for which a rank's rows are divided into `num` pieces; `sources` is what `prove` returned."""

    def __init__(self, graph: torch.fx.GraphModule, given: list[Any], num: int, sources: Sources) -> None:
        self._graph, self._num, self._state, self._sources = graph, num, current().part(blocks.State), sources
        self._ranks = self._state.ranks
        first = next(x for x in given if type(x) is Rows)
        fine, self.device = blocks.part_of(first.part.num_rows, self._ranks.size * num), first.device
        if fine is None or any(type(x) is Rows and x.part != self.coarse(fine) for x in given):
            raise Refused("its inputs have different rows")
        self._part = fine
        self._modes, self._before = tape.modes(self.device), tape.generator(self.device).get_state()
        self._given, self._original = [self._kept(x) for x in given], given
        self._seen = dict[int, torch.Tensor]()  # traits, by place
        self._lasts = [type(x) is not Rows and x is y for x, y in zip(self._given, given)]  # also without this call
        self._trained = sorted(set[int]().union(*sources.values()))
        self._masks: list[tuple[torch.Tensor, ...]] = []  # scale, state of the generator after it, bits of each piece
        self._num_masks, self._number = 0, 0

    @staticmethod
    def _kept(x: Any) -> Any:
        """Return what the backward pass uses of an input: a small buffer as it is now. Local."""
        is_buffer = type(x) is _T and not x.requires_grad and x.nbytes <= _MOST_COPIED
        return x.clone() if is_buffer else x

    # How rows are divided.
    def coarse(self, part: Part) -> Part:
        return Part(part.outer, part.cuts[:: self._num])

    def _rank_for(self, number: int) -> Ranks:
        return Ranks(self._ranks.rank * self._num + number, self._ranks.size * self._num)

    def _rows_of(self, block: torch.Tensor, dim: int, part: Part, number: int) -> torch.Tensor:
        """Return the rows of a piece in a block of this rank: a view with one dimension more. Local."""
        first, (start, end) = self.coarse(part).bounds(*self._ranks)[0], part.bounds(*self._rank_for(number))
        apart: torch.Tensor = block.unflatten(dim, (part.outer, -1))
        return apart.narrow(dim + 1, start - first, end - start)

    def _piece(self, rows: Rows, number: int, source: Optional[torch.Tensor] = None) -> Rows:
        """Return a piece of an input: of `source`, or one that begins a graph of its own. Local."""
        part, dim, block = self._part, rows.dimension, rows.block
        piece = self._rows_of(block.detach() if source is None else source, dim, part, number).flatten(dim, dim + 1)
        if block.stride(dim) < max(block.stride()) and 0 not in block.stride():  # gaps that the whole does not have
            order = order_in_memory(piece)
            piece = moved_back(piece.permute(order).contiguous(), order)
        return Rows(piece if source is not None else piece.requires_grad_(block.requires_grad), dim, part)

    # One piece.
    @contextlib.contextmanager
    def _computing(self, number: int, instead: _Alone) -> Iterator[None]:
        """Within this block, rules compute the rows of a piece, and what needs other rows is refused."""
        size, state = self._ranks.size * self._num, self._state
        as_rank = {"ranks": self._rank_for(number), "num_pieces": size, "is_in_piece": True, "tape": instead}
        with contextlib.ExitStack() as undo:
            for name, value in {**as_rank, "num_messages": NoMessages(), "mask": instead.mask}.items():
                undo.enter_context(replaced(state, name, value))
            yield

    def mask(self, draw: Callable[[], torch.Tensor], rows: Rows) -> torch.Tensor:
        """Return this piece's rows of what `draw` returns, which has zeros, and one other number. Local.

        It is drawn once, as one process draws it, and kept as bits.
        """
        if self._num_masks == len(self._masks):
            state, whole, bits = self._state, draw(), list[torch.Tensor]()
            for number in range(self._num):
                with replaced(state, "ranks", self._rank_for(number)):
                    bits.append(_packed(blocks.own(whole, rows.dimension, rows.part)))
            self._masks.append((whole.max(), tape.generator(self.device).get_state(), *bits))
        scale, after, *bits = self._masks[self._num_masks]
        self._num_masks += 1
        tape.generator(self.device).set_state(after)
        return _unpacked(bits[self._number], rows.block, scale)

    def _run(self, number: int, given: list[Any]) -> list[Any]:
        self._num_masks, self._number = 0, number
        tape.generator(self.device).set_state(self._before)
        with self._computing(number, self), tape.in_modes(self._modes):
            return list(self._graph.forward(*given))

    # The graph is proven to be of rows, and what the program's Python computes.
    def prove(self, by_python: Callable[[dict[int, Rows]], Any], is_first: bool) -> Sources:
        """Compare the first piece with what the program's Python returns for it, bit by bit. Raises Refused.

        `is_first`: the graph may write into what it gets, so copies are tried.
        """
        before = rank_states(self.device)
        own = {i: self._piece(x, 0) for i, x in enumerate(self._original) if type(x) is Rows}
        inputs = [own.get(i, x) for i, x in enumerate(self._original)]
        copies = [*inputs]
        for i, x in enumerate(inputs):
            if isinstance(x, _T):
                one = _block(x).detach().clone() if is_first else _block(x).detach()
                one.requires_grad_(_block(x).requires_grad)
                copies[i] = Rows(one, x.dimension, x.part) if type(x) is Rows else one
        tensors = {i: _block(x) for i, x in enumerate(copies) if isinstance(x, _T)}
        versions = {i: x._version for i, x in tensors.items()}
        try:
            results = self._run_as_first(copies)
            same = self._results_of(copies, results)
            if {i: x._version for i, x in tensors.items()} != versions:
                raise Refused("it writes into its arguments")
            made = {i: _block(x).grad_fn for i, x in enumerate(results) if isinstance(x, _T) and same[i] is None}
            sources = _sources({i: node for i, node in made.items() if node is not None}, tensors)
            del results, copies
            restore_rank_states(before, self.device)
            found = [x.block if type(x) is Rows else x for x in self._run_as_first(inputs)]
            after = rank_states(self.device)
            restore_rank_states(before, self.device)
            with self._computing(0, _Alone()), _nothing_saved():
                out = by_python({id(x): own[i] for i, x in enumerate(self._original) if i in own})
            tape.check_as_python("graph", found, out, inputs, rank_states(self.device), after)
            return sources
        finally:
            restore_rank_states(before, self.device)

    def _run_as_first(self, given: list[Any]) -> list[Any]:
        with self._computing(0, _Alone()), _nothing_saved(), tape.in_modes(self._modes):
            return list(self._graph.forward(*given))

    def _results_of(self, given: list[Any], outputs: list[Any]) -> list[Any]:
        """Return for each output the place of the input that it is, or None. Raises Refused. Local."""
        places = {id(x): i for i, x in enumerate(given)}
        known = [memory_of(_block(x)) for x in given if isinstance(x, _T)]
        for x in outputs:
            if isinstance(x, _T) and id(x) not in places:
                if memory_of(_block(x)) in known:
                    raise Refused("its results share memory")
                if type(x) is Rows and self._strides(x, x.block.shape[x.dimension]) != [*x.block.stride()]:
                    raise Refused("a result has gaps in memory")
                known.append(memory_of(_block(x)))
        return [places.get(id(x)) if isinstance(x, _T) else None for x in outputs]

    def check_hooks(self) -> None:
        """Raise Refused if a hook would be called without a gradient, as a loss may use some results only. Local."""
        partly = [i for i in self._trained if not all(i in places for places in self._sources.values())]
        if any(_block(self._original[i])._backward_hooks for i in partly):
            raise Refused("a tensor has a hook, and not all results are computed from it")

    # All pieces.
    def outputs(self) -> list[Any]:
        """Return what the graph returns, computed in pieces, with a graph that computes them again."""
        given, trained = self._original, self._trained
        starts = {i: given[i].detach().requires_grad_() for i in trained if type(given[i]) is not Rows}
        made: list[Any] = []
        same: list[Any] = []
        for number in range(self._num):
            inputs = self._inputs(number, starts)
            with _nothing_saved():
                found = self._run(number, inputs)
            if number == 0:
                same = self._results_of(inputs, found)
                made = [self._empty(x) if type(x) is Rows else x for x in found]
                firsts = found
            for x, into, place in zip(found, made, same):
                if type(x) is Rows and place is None:
                    _write(x, self._rows_of(into.data, x.dimension, x.part, number))
        where = [*self._sources]
        if where:
            used = {i: _block(x) for i, x in enumerate(self._given) if isinstance(x, _T)}
            self._seen = {i: _traits(x) for i, x in used.items()}
            with torch.enable_grad():
                uses = [given[i] if type(given[i]) is Rows else rules.used_by_rows(given[i]) for i in trained]
                # By nodes of their own: hooks of gradients are called from the last to the first, as without pieces.
                tensors = [_block(x).view_as(_block(x)) for x in uses]
                joined: Any = _Computed.apply(self, [made[i] for i in where], *tensors)  # type: ignore[no-untyped-call]
            for i, one in zip(where, joined):
                made[i] = one
        results = []
        for x, block, place in zip(firsts, made, same):
            if place is not None:
                results.append(given[place])
            elif type(x) is Rows:
                results.append(Rows(block, x.dimension, self.coarse(x.part)))
            else:
                results.append(block)
        return results

    def _inputs(self, number: int, starts: dict[int, torch.Tensor]) -> list[Any]:
        """Return the inputs of a piece; `starts` has those that begin a graph, by place."""
        found: list[Any] = []
        for i, x in enumerate(self._given):
            if type(x) is Rows:
                found.append(self._piece(x, number, starts.get(i)))
            else:
                found.append(starts.get(i, x.detach() if isinstance(x, _T) else x))
        return found

    def _empty(self, first: Rows) -> torch.Tensor:
        """Return memory for all rows of a result, of which `first` is the first piece, in its layout. Local."""
        start, end = self.coarse(first.part).bounds(*self._ranks)
        sizes, num = [*first.block.shape], first.part.outer * (end - start)
        sizes[first.dimension] = num
        return torch.empty_strided(sizes, self._strides(first, num), dtype=first.dtype, device=first.device)

    @staticmethod
    def _strides(piece: Rows, num: int) -> list[int]:
        """Return the strides of a dense tensor with the dimensions of a piece in their order, but `num` rows. Local."""
        strides, step = [0] * piece.dim(), 1
        for i in reversed(order_in_memory(piece.block)):
            if piece.block.stride(i):  # else it is expanded
                strides[i], step = step, step * max(1, num if i == piece.dimension else piece.block.shape[i])
        return strides

    def lasts(self, number: int) -> bool:
        """Whether the input with this number among the trained ones is there also without this call. Local."""
        return self._lasts[self._trained[number]]

    def take(self) -> list[torch.Tensor]:
        """Return the tensors that live for the backward pass only, and hold them no longer. Local."""
        found: list[torch.Tensor] = []

        def taken(x: Any) -> Any:
            if not isinstance(x, _T):
                return x
            found.append(_block(x).data)  # with no version: `_check_unchanged` looks at what is needed
            return _Hole(x.dimension if type(x) is Rows else None, _block(x).requires_grad)

        self._given = [x if lasts else taken(x) for x, lasts in zip(self._given, self._lasts)]
        self._masks, self._original = mapped(taken, self._masks), []
        return found

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hold what `take` has returned. Local."""
        left, part = iter(tensors), self.coarse(self._part)

        def held(x: Any) -> Any:
            if type(x) is not _Hole:
                return x
            made = next(left).detach().requires_grad_(x.has_gradient)
            return made if x.dimension is None else Rows(made, x.dimension, part)

        self._given, self._masks = [held(x) for x in self._given], mapped(held, self._masks)

    def gradients(self, given: Any, tensors: Any) -> list[Any]:
        """Return the gradients of `tensors` by those of results. With create_graph all graphs are kept."""
        where, trained = [*self._sources], self._trained
        asked = set[int]().union(*(self._sources[i] for i, gradient in zip(where, given) if gradient is not None))
        self._check_unchanged({*self._seen} - {*trained} | asked)
        keeps, now = torch.is_grad_enabled(), tape.generator(self.device).get_state()
        rows = {i: x for i, x in enumerate(self._given) if type(x) is Rows}
        sources = {i: x.view_as(x) for i, x in zip(trained, tensors)} if keeps else {}
        starts = sources or {i: x.detach().requires_grad_() for i, x in zip(trained, tensors) if i not in rows}
        total: dict[int, Any] = {}
        for number in range(self._num):
            inputs, ends, own = self._inputs(number, starts), list[torch.Tensor](), list[torch.Tensor]()
            outputs = self._run(number, inputs)
            for i, gradient in zip(where, given):
                x = outputs[i]
                if gradient is not None and type(x) is Rows:
                    ends.append(x.block)
                    part = self._rows_of(gradient, x.dimension, x.part, number)
                    own.append(part.flatten(x.dimension, x.dimension + 1))
                elif gradient is not None and number == 0:  # it is the same for each piece
                    ends.append(x)
                    own.append(gradient)
            del outputs, x
            if not ends:
                continue
            if keeps:
                wanted = [sources[i] for i in trained]
                found = inspect.unwrap(torch.autograd.grad)(ends, wanted, own, create_graph=True, allow_unused=True)
                for i, one in zip(trained, found):
                    total[i] = one if total.get(i) is None else total[i] if one is None else total[i] + one
                continue
            inspect.unwrap(torch.autograd.backward)(ends, own)
            for i in rows.keys() & {*trained}:
                piece = inputs[i]
                if piece.block.grad is not None:
                    into = total[i] = torch.zeros_like(rows[i].block) if i not in total else total[i]
                    place = self._rows_of(into, piece.dimension, piece.part, number)
                    place.copy_(piece.block.grad.unflatten(piece.dimension, (piece.part.outer, -1)))
        tape.generator(self.device).set_state(now)
        return [total.get(i) if keeps or i in rows else starts[i].grad for i in trained]

    # The backward pass computes pieces again: their inputs must not have changed.
    def _check_unchanged(self, places: set[int]) -> None:
        """Raise SyncError if one of these inputs has another value now, so that pieces would differ. Local."""
        now = {i: _block(self._given[i]) for i in places}
        then = torch.stack([self._seen[i] for i in places])
        if not torch.equal(then, torch.stack([_traits(x) for x in now.values()])):
            raise SyncError(
                f"{users_line()}: a weight, or what a network got, was written into after the network used it, and "
                "before its gradient was computed. With DDPSHIM_ROWS_AT_ONCE the network is computed again for that, "
                "and the gradient would be another one. Write after backward(), or leave DDPSHIM_ROWS_AT_ONCE out."
            )


class _Computed(torch.autograd.Function):
    """A graph's inputs -> its results, computed in pieces, and once more in the backward pass."""

    @staticmethod
    def forward(ctx: Any, call: Call, made: list[torch.Tensor], *tensors: Any) -> Any:
        ctx.call, ctx.kept, ctx.frees = call, tensors, len(made) == 1  # several may each have a backward pass
        if ctx.frees:  # as autograd frees what other nodes have saved
            ctx.kept = [x if call.lasts(i) else None for i, x in enumerate(tensors)]  # a weight may change if unused
            ctx.save_for_backward(*(None if call.lasts(i) else x for i, x in enumerate(tensors)), *call.take())
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        call, tensors = ctx.call, ctx.kept
        if ctx.frees:
            saved = ctx.saved_tensors
            tensors = [x if kept is None else kept for x, kept in zip(saved, ctx.kept)]
            call.put(saved[len(tensors) :])
        try:
            return None, None, *call.gradients(gradients, tensors)
        finally:
            if ctx.frees:
                call.take()


class _Hole:
    """In place of a tensor that autograd holds; `dimension` of the rows, if it is a row tensor."""

    def __init__(self, dimension: Optional[int], has_gradient: bool) -> None:
        self.dimension, self.has_gradient = dimension, has_gradient


def _sources(results: dict[int, Any], inputs: dict[int, torch.Tensor]) -> Sources:
    """Return from which inputs results with these nodes are computed. Raises Refused if one is from another. Local."""
    place_of, found = {id(x): i for i, x in inputs.items()}, Sources()
    for number, node in results.items():
        seen = tape.nodes_below(node)
        if seen & {*results.values()} or [*results.values()].count(node) > 1:
            raise Refused("a result is computed from another one")  # of whose gradient the graph would not know
        reached = {place_of.get(id(getattr(one, "variable", None))) for one in seen}
        found[number] = frozenset(place for place in reached if place is not None)
    return found


def _nothing_saved() -> Any:
    """Return a context in which graphs are made without what gradients need."""
    return saved_tensors_hooks(lambda x: None, lambda x: x)


def _block(x: Any) -> torch.Tensor:
    return x.block if type(x) is Rows else x


def _write(piece: Rows, into: torch.Tensor) -> None:
    """Copy a piece to its place in a result; what is expanded there, once. Local."""
    own = piece.block.detach().unflatten(piece.dimension, (piece.part.outer, -1))
    for dim in [i for i, step in enumerate(into.stride()) if not step]:
        into, own = into.narrow(dim, 0, 1), own.narrow(dim, 0, 1)
    into.copy_(own)


def _packed(mask: torch.Tensor) -> torch.Tensor:
    """Return where a tensor is not zero, as bits. Local."""
    bits = (mask != 0).flatten()
    bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _unpacked(packed: torch.Tensor, like: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """Return a tensor of zeros, and of `one` where bits are set, in the shape and layout of another. Local."""
    numbers = torch.arange(256, dtype=torch.int32, device=packed.device).unsqueeze(1)
    table = (numbers >> torch.arange(8, dtype=torch.int32, device=packed.device) & 1) * one
    bits = torch.embedding(table, packed.int()).flatten()[: like.numel()].view(like.shape)
    return bits if like.is_contiguous() else torch.empty_like(like).copy_(bits)


def _traits(x: torch.Tensor) -> torch.Tensor:
    """Return a hash of the bits of a tensor, and of their places. Local."""
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    if not x.numel():
        return torch.zeros((), dtype=torch.int64, device=x.device)
    table = x.reshape(len(x), -1) if x.dim() > 1 else x.reshape(1, -1)
    if x.element_size() < 4:
        table = table.view(torch.int16 if x.element_size() == 2 else torch.uint8).int()
    table = table.contiguous().view(torch.int32)
    rows, columns = (
        torch.arange(1, num + 1, device=x.device).mul_(odd).bitwise_xor_(odd >> 9)
        for num, odd in zip(table.shape, _ODD)
    )
    few, columns = 1 + _IN_CACHE // (4 * table.shape[1]), columns.int()
    sums = torch.cat([(some * columns).sum(1, dtype=torch.int32) for some in table.split(few)])
    return (sums * rows).sum()
