"""Defines `Rows`, a tensor with the shape of the whole batch that holds this rank's block of rows.

An operation that is row-wise by definition (`rules`) is computed on the blocks. Any other operation gathers first and
is computed whole on every rank: slower, and right. Memory is shared as in one process: a whole tensor that shares
memory with a row tensor (a slice across rows, the argument of a network) is its mirror. What is written into one is
copied into the other before the next use.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn, Optional

import torch

from ddpshim.errors import SyncError
from ddpshim.job import news
from ddpshim.model.guard import GuardState
from ddpshim.process.devices import mapped as mapped
from ddpshim.process.job import current
from ddpshim.process.observed import live
from ddpshim.process.replaced import replaced
from ddpshim.process.users_line import users_line
from ddpshim.rows import arriving, blocks
from ddpshim.rows.blocks import GatherBlocks, Part, Scatter

RULES: dict[Any, Callable[..., Any]] = {}  # by function of torch; a rule may return NotImplemented
_T = torch.Tensor
# They give away the address of a tensor's memory.
_EXPOSING = {
    *("numpy", "__array__", "data_ptr", "const_data_ptr", "mutable_data_ptr", "storage", "untyped_storage"),
    *("__dlpack__", "share_memory_"),
}
_UNCOUNTED = {"apply_", "map_", "map2_"}  # they write into the first argument, and its version stays
_MOST_NODES = 32  # of a graph, to look at
_ARRIVING = (torch.float32, torch.float64)  # autocast computes others in another type
_DETACHING = {"detach", "lift_fresh", "alias", "_to_copy"}


class Counts:
    """Counts of a job's operations on row tensors, and whether all ranks make them."""

    def __init__(self) -> None:
        self.on_rows = self.replayed = 0  # operations that were computed on blocks; how many of them by a tape
        self.refused: dict[str, str] = {}  # why calls were not captured, by the name of the network
        self.gathered: Counter[tuple[str, str]] = Counter()  # number, by line of the program and function
        self.num_bytes: Counter[tuple[str, str]] = Counter()  # of the wholes, in the same way
        self.num_workers, self.has_drawn = 0, False  # of loaders: the most of one; whether samples of one draw
        self.is_fetching = self.is_alone = self.is_searching = False  # within the contexts below
        self.lock: Callable[[], str] = str  # returns the file whose lock this rank holds, for which others wait, or ""
        self._thread, self._process = threading.get_ident(), os.getpid()

    def is_in_lock_step(self) -> bool:
        """Whether all ranks run this code at the same point, so that collectives meet. Local."""
        return self.is_in_own_thread() and not (self.is_fetching or self.is_alone or self.lock())

    def is_in_own_thread(self) -> bool:
        is_backward = torch._C._current_graph_task_id() >= 0  # in autograd's own threads
        return (is_backward or threading.get_ident() == self._thread) and os.getpid() == self._process

    def _flagged(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a flag is set. Local."""
        # Another thread is in lock step with nobody anyway, and would take the flag from this one, or leave it set.
        return replaced(self, name, True) if threading.get_ident() == self._thread else contextlib.nullcontext()

    alone = functools.partialmethod(_flagged, "is_alone")  # this rank does what others do not, so it must not gather
    fetching = functools.partialmethod(_flagged, "is_fetching")  # a loader produces a batch
    searching = functools.partialmethod(_flagged, "is_searching")  # this rank walks all modules, in its own order


class _Mirror:
    """A whole tensor of which `rows` is this rank's block, and which the program may read or change.

    `is_source`: whether the block was cut from it: then it is the tensor of the program, with all its gradient.
    """

    def __init__(self, rows: Rows, whole: torch.Tensor, is_exposed: bool, is_source: bool = False) -> None:
        self.block, self.dim, self.part, self.whole = rows.block, rows.dimension, rows.part, whole
        self.is_exposed, self.is_source = is_exposed or whole.is_inference(), is_source
        self.note()

    def is_of(self, rows: Rows) -> bool:
        """Whether the block of `rows` is this one, in memory and in shape. Local."""
        if (self.dim, self.part) != (rows.dimension, rows.part):
            return False
        one, other = self.block, rows.block
        return one is other or (shares_memory(one, other) and _view_of(one) == _view_of(other))

    def has_changed(self) -> bool:
        """Whether the program has written into the whole since the last copy: the same answer on all ranks. Local."""
        if self.is_exposed:
            return not torch.equal(self.whole.detach(), self.known)
        return bool(self.whole._version != self.known)

    def pull(self) -> None:
        """Copy the whole's rows into the block. Local."""
        part = cut(self.whole, self.dim, self.part)
        if part.data_ptr() != self.block.data_ptr():
            self.block.copy_(part)
        self.note()

    def push(self) -> None:
        """Copy all ranks' blocks into the whole (collective)."""
        own_rows = blocks.own(self.whole, self.dim, self.part)
        shares = own_rows.data_ptr() == self.block.data_ptr()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not shares):
            self.whole.copy_(gathered(self.block, self.dim, self.part))
        self.note()

    def note(self) -> None:
        self.known: Any = self.whole.detach().clone() if self.is_exposed else self.whole._version


class RowsMemory:
    """What row tensors that share memory have in common."""

    __slots__ = ("mirrors", "num_writes")

    def __init__(self) -> None:
        self.num_writes = 0  # through a row tensor
        self.mirrors: list[_Mirror] = []

    def pull(self) -> None:
        """Copy what the program has written into mirrors (collective if something was written)."""
        for mirror in self.mirrors:
            if mirror.has_changed():
                mirror.pull()
                self.wrote(except_for=mirror)

    def wrote(self, except_for: Optional[_Mirror] = None) -> None:
        """Note that the blocks were written; copy them into the mirrors (collective if there are any)."""
        self.num_writes += 1
        for mirror in self.mirrors:
            if mirror is not except_for:
                mirror.push()


class Rows(torch.Tensor):
    """A row tensor."""

    block: torch.Tensor  # this rank's rows; part of this rank's graph
    dimension: int  # of the rows
    part: Part  # how it is divided
    place: tuple[Part, int]  # the part, and the dimension counted from the last one, which is 1
    sizes: torch.Size
    memory: RowsMemory  # shared with all row tensors that share its memory
    cached: Optional[tuple[Any, torch.Tensor, int]]  # the whole, with what it depends on, and its version

    @staticmethod
    def __new__(cls, block: torch.Tensor, dimension: int, part: Part, memory: Optional[RowsMemory] = None) -> Rows:
        size = list(block.shape)
        size[dimension] = part.size
        made: Rows = _T._make_wrapper_subclass(cls, size, dtype=block.dtype, device=block.device)
        made.block, made.dimension, made.part = block, dimension, part
        made.place, made.sizes = (part, len(size) - dimension), torch.Size(size)
        made.memory, made.cached = memory or RowsMemory(), None
        return made

    # Asked most, so without the way through __torch_function__.
    shape = property(lambda self: self.sizes)
    dtype = property(lambda self: self.block.dtype)
    device = property(lambda self: self.block.device)
    ndim = property(lambda self: len(self.sizes))

    def dim(self) -> int:
        return len(self.sizes)

    def size(self, dim: Any = None) -> Any:
        if type(dim) is int or dim is None:
            return self.sizes if dim is None else self.sizes[dim]
        return super().size(dim)

    def __len__(self) -> int:
        return self.sizes[0]

    def as_subclass(self, cls: Any) -> Any:
        return whole(self, "as_subclass").as_subclass(cls)  # torch does not pass it on to __torch_function__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is not None:
            out = rule(func, args, kwargs)
            if out is not NotImplemented:
                return out
        return on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Gather for code that bypasses __torch_function__: C++ extensions, torch.tensor(x)."""
        name = func.overloadpacket.__name__
        found = [x for x in leaves((args, kwargs or {})) if isinstance(x, Rows)]
        if torch.is_grad_enabled() and name not in _DETACHING and any(x.block.requires_grad for x in found):
            raise SyncError(
                f"{users_line()}: {func} got a sharded batch in a way that ddpshim does not see "
                "(a C++ extension?), so its gradient would be lost. Give it x.clone() of a tensor "
                "outside the network, or set DDPSHIM_ROWS=off: every rank then computes whole batches."
            )
        with torch.no_grad():
            return on_whole(func, args, kwargs or {})


class EndedRows(Rows):
    """A row tensor whose job has ended: no rank has the whole."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any = (), args: Any = (), kwargs: Any = None) -> NoReturn:
        raise SyncError(
            f"{users_line()}: {getattr(func, '__name__', func)} of a sharded batch, after the job has ended (in "
            "atexit, a finalizer, or after cleanup()): each rank has only its local shard. Read it before: "
            "float(loss), x.tolist(), x.numpy()."
        )

    __torch_dispatch__ = __torch_function__

    def as_subclass(self, cls: Any) -> NoReturn:
        type(self).__torch_function__("as_subclass")


def end_rows() -> None:
    """Make each row tensor, or loss under way, that outlives the job an error where it is used. Local."""
    for one in (*live(Rows), *live(arriving.Arriving)):
        if type(one) is not EndedRows:
            one.__class__ = EndedRows


def leaves(value: Any) -> list[Any]:
    """Return the items of nested tuples, lists and dicts. Local."""
    if isinstance(value, (tuple, list)):
        return [leaf for inner in value for leaf in leaves(inner)]
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [value]


def write_back(copies: list[Any]) -> None:
    """Write into the containers that `mapped` copied what a function has written into their copies. Local."""
    for container, made, given in copies:
        if isinstance(container, dict):
            for key in given.keys() - made.keys():
                del container[key]
            container.update((key, item) for key, item in made.items() if key not in given or given[key] is not item)
        elif len(made) != len(given) or any(new is not old for new, old in zip(made, given)):
            before = {id(new): old for new, old in zip(given, container)}
            container[:] = [before.get(id(item), item) for item in made]


def parameters_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves from which torch's functions compute `tensor`; none if it takes many, or others. Local."""
    if tensor.is_leaf:
        return [tensor]
    found, left = list[torch.Tensor](), [tensor.grad_fn]
    for num, node in enumerate(left):
        if num == _MOST_NODES or isinstance(node, torch.autograd.function.BackwardCFunction):
            return []
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        elif node is not None:
            left += [before for before, _ in node.next_functions]
    return found


def is_reduced(tensor: torch.Tensor) -> bool:
    """Whether a wrapper averages the gradients of the parameters from which `tensor` is computed, or is one. Local.

    Its own gradient may then be this rank's until the pass ends: a backward pass is linear, so the mean is the same.
    """
    owners, found = current().part(GuardState).owners, parameters_of(tensor)
    return bool(found) and all(id(one) in owners for one in found)


def cut(whole: torch.Tensor, dim: int, part: Part) -> torch.Tensor:
    """Return this rank's block of `whole`, as part of its graph (its backward pass is collective)."""
    state = current().part(blocks.State)
    is_alone = state.is_in_piece or (state.ranks.size == 1 and not state.is_exact)
    if whole.requires_grad and torch.is_grad_enabled() and not is_alone and not is_reduced(whole):
        made: torch.Tensor = state.call(Scatter.apply, whole, dim, part)
        return made
    return blocks.own(whole, dim, part)


def gathered(block: torch.Tensor, dim: int, part: Part) -> torch.Tensor:
    """Return the whole of the ranks' blocks, as part of their graph (collective)."""
    state = current().part(blocks.State)
    if state.ranks.size == 1 and not state.is_exact:
        return block.clone()
    if block.requires_grad and torch.is_grad_enabled():
        made: torch.Tensor = GatherBlocks.apply(block, dim, part)  # type: ignore[no-untyped-call]
        return made
    return blocks.gather(block, dim, part)


def is_plain(value: Any) -> bool:
    """Whether `value` is a tensor in ordinary memory, and of no class of the program. Local."""
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        return False
    return value.layout is torch.strided and not value.is_nested and not value.is_quantized


def divided(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return a row tensor with the values and the memory of `whole`, which must be equal on all ranks. Local.

    Returns `whole` itself if it cannot be divided: fewer than two rows for a rank, or no plain tensor.
    """
    if not is_plain(whole):
        return whole
    part = blocks.part_of(whole.shape[dim])
    if part is None:
        return whole
    block = cut(whole, dim, part)
    if not block.is_contiguous() and whole.is_contiguous():
        block = block.contiguous()
    rows = Rows(block, dim, part)
    rows.memory.mirrors.append(_Mirror(rows, whole, False, is_source=True))
    return rows


def whole(rows: Rows, why: str = "") -> torch.Tensor:
    """Return the whole of a row tensor, computed at most once (collective)."""
    arriving.land()  # the same rows may be on their way
    if (known := _known(rows)) is not None:
        return known
    _note_gather(rows, why)
    made = gathered(rows.block, rows.dimension, rows.part)
    rows.cached = _key(rows), made, _version(made)
    return made


def _known(rows: Rows) -> Optional[torch.Tensor]:
    """Return the whole of a row tensor if this rank has it (collective if the program wrote into a mirror)."""
    rows.memory.pull()
    for mirror in rows.memory.mirrors:
        if mirror.is_of(rows):
            if not rows.block.requires_grad or not torch.is_grad_enabled():
                return mirror.whole.detach() if mirror.whole.requires_grad else mirror.whole
            if mirror.whole.requires_grad:
                return mirror.whole
    if rows.cached is not None and rows.cached[0] == _key(rows) and _version(rows.cached[1]) == rows.cached[2]:
        return rows.cached[1]
    return None


def _key(rows: Rows) -> Any:
    return rows.memory.num_writes, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def total(rows: Rows, func: Callable[[torch.Tensor], torch.Tensor], why: str) -> torch.Tensor:
    """Return `func`, the mean or the sum, of the whole of a row tensor (collective; does not wait for a loss)."""
    state = current().part(blocks.State)
    waits = state.ranks.size == 1 or state.is_exact or state.tape is not None or rows.dtype not in _ARRIVING
    waits = waits or not (rows.block.requires_grad and torch.is_grad_enabled())
    waits = waits or type(state.num_messages) is not int  # a replay is compared, and may send nothing
    if waits or torch._C._current_graph_task_id() >= 0 or _known(rows) is not None:
        return func(whole(rows, why))
    place, begun = _note_gather(rows, why), list[Callable[[], Any]]()
    kind = zlib.crc32(repr((rows.part, rows.dimension, rows.sizes, rows.dtype, why)).encode())
    news.tell((0, kind), lambda told: None, False, f"gathers for {why} at {place}", kind)
    if not news.is_foreseen():
        news.settle()
    made: torch.Tensor = GatherBlocks.apply(rows.block, rows.dimension, rows.part, begun)  # type: ignore[no-untyped-call]
    rows.cached = _key(rows), made, _version(made)
    number: torch.Tensor = arriving.begin(func, made, begun)
    return number


def _note_gather(rows: Rows, why: str) -> str:
    """Count what is gathered next; return where. Raises SyncError where ranks would gather at different times."""
    counts = current().part(Counts)
    if not counts.is_in_lock_step():
        raise SyncError(
            f"{users_line()}: a sharded batch is used in another thread or process, or in "
            "code that one rank runs alone, at a time that differs between ranks. Read it in the main thread, "
            "outside of datasets and rollouts: batch.clone(), float(loss)."
        )
    place = users_line(), why
    counts.gathered[place] += 1
    counts.num_bytes[place] += rows.numel() * rows.block.element_size()
    return place[0]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Return `func` of the wholes, computed on every rank (collective). What it changes in place is changed."""
    found: list[tuple[Rows, torch.Tensor, int]] = []
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        name = str(getattr(func.__self__, "__name__", name))  # of an attribute

    def plain(value: Any) -> Any:
        if isinstance(value, Rows):
            made = whole(value, name)
            found.append((value, made, _version(made)))
            return made
        return value

    args, kwargs = mapped(plain, args), mapped(plain, kwargs)
    out = func(*args, **kwargs)
    for rows, made, version in found:
        has_changed = _version(made) != version or (name in _UNCOUNTED and made is args[0])
        if made.is_inference():
            is_other = not torch.equal(blocks.own(made, rows.dimension, rows.part), rows.block)
            on_ranks = torch.tensor([is_other], dtype=torch.int32, device=made.device)
            has_changed = bool(blocks.added_up(on_ranks).item())
        if has_changed:
            if made.shape != rows.shape or made.dtype != rows.dtype:
                raise SyncError(
                    f"{users_line()}: {name} changed the shape or type of a sharded batch in place. "
                    "Use the variant that returns a new tensor"
                )
            written(rows, made)
    if not found:
        return out
    if name in _EXPOSING:
        rows, made, _ = found[0]
        rows.memory.mirrors.append(_Mirror(rows, made, True))
    by_memory = {memory_of(made): (rows, made) for rows, made, _ in found}

    def shared(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, Rows):
            return value
        known = by_memory.get(memory_of(value))
        if known is None:
            return value
        rows, made = known
        if value is made:
            return rows
        if not any(mirror.whole is made for mirror in rows.memory.mirrors):
            rows.memory.mirrors.append(_Mirror(rows, made, False))
        return value

    return mapped(shared, out)


def written(rows: Rows, made: torch.Tensor) -> None:
    """Copy a changed whole into the block (collective if there are mirrors)."""
    for mirror in rows.memory.mirrors:
        if mirror.whole is made or memory_of(mirror.whole) == memory_of(made):
            mirror.pull()
            rows.memory.wrote(except_for=mirror)
            return
    rows.block.copy_(cut(made, rows.dimension, rows.part))
    rows.memory.wrote()
    rows.cached = _key(rows), made, _version(made)


def _view_of(x: torch.Tensor) -> Any:
    """Return what tells apart views of one memory. Local."""
    return x.dtype, x.shape, x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(memory_of(one) == memory_of(other))


def memory_of(tensor: torch.Tensor) -> Any:
    """Return what tensors that share memory have in common. Local."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse
        return id(tensor)
