"""Captures the call of a network on row tensors, and replays it.

torch's Dynamo traces the call with stand-ins of its row tensors, which have the shape of the whole batch. So its graph
is that of one process, and its guards say for how long the graph is what the program's Python would compute. The graph
runs once beside the program's Python, and a tape writes down the calls on blocks. From then on the tape runs in place
of graph and rules, with the parameters, buffers and blocks of the day. Its first replay, and later ones now and then,
are compared with the program's Python, bit by bit, for what no guard sees. Where anything is in doubt the call is
computed by the rules, as ever.

A tape sends what the rules send, in the same order (the statistics of BatchNorm), so ranks need not agree on captures.
A compiled graph could take the tape's place: `_Graph._run`.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import math
import operator
import os
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection
from operator import is_
from typing import Any, NoReturn, Optional

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.parameter import is_lazy

from ddpshim.errors import OptionsError, SyncError
from ddpshim.model.batchnorm import over_ranks
from ddpshim.model.guard import GuardState
from ddpshim.options import Options
from ddpshim.process.job import current
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.process.replaced import replaced
from ddpshim.process.say import count
from ddpshim.rows import at_once, blocks, calls, rules
from ddpshim.rows.calls import Calls, Known, met_by_rows
from ddpshim.rows.graphs import Replayer
from ddpshim.rows.tape import NoMessages, Refused, Results, Tape, are_equal, check_as_python, check_assertion
from ddpshim.rows.tensor import RULES, Counts, Rows, leaves, mapped, memory_of

_MOST_REGIONS = 8  # of a module: by shapes and types of row tensors
_MOST_GRAPHS = 4  # of a region: by what the module's Python does
_AUDITED = {1, 10, 100, 1000}  # replays of a graph that are compared with the program's Python, and each last again
_NAME = "region_"  # with which the names of regions begin
_T = torch.Tensor
Unguarded = tuple[Callable[[], Collection[Any]], list[Any]]  # what returns it now, and as it was then
# Of Dynamo: what its guards leave out by default, and what its graph may not hold.
_CONFIG: dict[str, Any] = {
    "allow_rnn": True,
    "trace_numpy": False,
    "skip_nnmodule_hook_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "use_recursive_dict_tags_for_guards": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,
    "suppress_errors": False,
}
_OF_PYTHON = {operator.add.__module__, len.__module__}  # they call methods of tensors
# Modules of functions that a graph may call. Others set a state, or compute what no rule sees.
_MODULES = {getattr(function, "__module__", None) for function in (*RULES, functional.relu, torch.arange)} | _OF_PYTHON
_MODULES.add("einops.einops")  # its Python calls functions of torch
_STATEFUL: tuple[str, ...] = ("autocast", "inference", "seed", "rng_state", "set_default", "backward", "hook")
_STATEFUL += ("retain_grad", "data_ptr", "requires_grad_", "storage", "numpy", "checkpoint", "assert", "deterministic")
_STATEFUL += ("set_num", "vmap", "jvp")
_HOOKS_OF_ALL = [name for name in vars(nn.modules.module) if name.startswith("_global_") and name.endswith("hooks")]
_KNOWN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<")
_UNSEEN = {"environ", "getenv", "getenvb", "__dict__", "vars", "globals", "locals"}
_HANDLES = {"CHECK_EXC_MATCH", "SETUP_FINALLY", "JUMP_IF_NOT_EXC_MATCH"}
_CONTAINERS = (tuple, list, dict, OrderedDict)
# Of the functions by which code asks whether it is traced, one that no program calls.
_IS_TRACED = getattr(torch._dynamo.eval_frame, "_is_in_optimized_module", torch._utils.is_compiling)
_OURS = {torch._C._set_grad_enabled, torch._dynamo.allow_in_graph(met_by_rows)}


def is_supported() -> bool:
    """Whether this torch has what captures stand on; 2.7 lacks it. Local."""
    places = torch._dynamo.eval_frame, torch._dynamo.variables.torch, torch._dynamo.guards, torch._dynamo.utils
    names = "_debug_get_cache_entry_list", "tracing_state_functions", "GuardManagerWrapper", "get_traced_code"
    if torch._dynamo.config.disable or not all(hasattr(place, name) for place, name in zip(places, names)):
        return False
    return {_IS_TRACED, torch.compiler.is_compiling} <= {*places[1].tracing_state_functions()}


def check_options(options: Options) -> None:
    """Raise OptionsError if `rows_at_once` or `graphs` cannot be: both compute what is captured of a network. Local."""
    asked = [f"rows_at_once={options.rows_at_once}"] if options.rows_at_once is not None else []
    asked += ["graphs=on"] if options.graphs == "on" else []
    others = [f"exact={options.exact}"] if options.exact is not None else []
    others += ["capture=off"] if options.capture == "off" else []
    if asked and (others or len(asked) > 1):
        raise OptionsError(
            f"{' with '.join(asked + others)}: rows_at_once and graphs compute what is captured of a network, one in "
            "pieces of its own, the other whole. They would do nothing, or not what the other one does. Leave one out."
        )
    if asked and not is_supported():
        raise OptionsError(
            f"{asked[0]} with torch {torch.__version__}, which cannot capture what a network computes: it would do "
            "nothing. Use torch 2.8 or later, or leave the option out."
        )


def _make_region(number: int) -> Any:
    """Return the call of a module as a function with code of its own, by which Dynamo keeps what it compiled."""

    def region(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not _IS_TRACED():
            raise Refused("Dynamo leaves it to Python")  # which must not compute with stand-ins
        views: list[Any] = []
        own = _own(args, views), _own(kwargs, views)
        before = _listed(own)
        out = module(*own[0], **own[1])
        after = _listed(own)
        if len(before) != len(after) or any(one is not other for one, other in zip(before, after)):
            torch._dynamo.graph_break()  # it changes a container that it is given, which here is a copy
        return out

    code = region.__code__.replace(co_name=f"{_NAME}{number}")
    return types.FunctionType(code, dict(globals()), "region")  # Dynamo adds to its globals


def _own(value: Any, views: list[Any]) -> Any:
    """Return a copy of the containers with views of the tensors, so that no stand-in is returned or kept."""
    if isinstance(value, _T):
        for given, view in views:  # a tensor may be given more than once
            if given is value:
                return view
        views.append((value, value.view_as(value)))
        return views[-1][1]
    if isinstance(value, (tuple, list)):
        return type(value)([_own(x, views) for x in value])
    if isinstance(value, dict):
        return type(value)([(key, _own(x, views)) for key, x in value.items()])
    return value


def _listed(value: Any) -> list[Any]:
    """Return the items of nested containers, and the keys of mappings."""
    if isinstance(value, dict):
        return [item for key, x in value.items() for item in (key, *_listed(x))]
    return [item for x in value for item in _listed(x)] if isinstance(value, (tuple, list)) else [value]


def _prepare(graph: torch.fx.GraphModule) -> None:
    """Take out the views of `_own`. Raises Refused where the graph does what a tape cannot."""
    for node in [*graph.graph.nodes]:
        is_view = node.op == "call_method" and node.target == "view_as" and node.args[0] is node.args[1]
        if is_view and node.args[0].op == "placeholder":
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
            continue
        if node.target is torch._assert_async:
            node.target = _asserted
            continue
        name, module = str(getattr(node.target, "__name__", node.target)), getattr(node.target, "__module__", None)
        if name == "_log_api_usage_once":
            graph.graph.erase_node(node)
            continue
        if node.op in ("get_attr", "call_module"):
            raise Refused(f"it holds {name}")
        if node.op == "call_function" and module not in _MODULES and node.target not in _OURS:
            raise Refused(f"it calls {name} of {module}")
        if node.op.startswith("call") and any(part in name for part in _STATEFUL):
            raise Refused(f"it calls {name}")
    # Now: a graph that waits for its first call makes it by the module's __call__, which looks at its tensors.
    getattr(graph, "real_recompile", graph.recompile)()


def _asserted(condition: torch.Tensor, message: str) -> None:
    current().part(blocks.State).call(check_assertion, condition, message)


def _blocks(values: Any) -> list[Any]:
    return [x.block if type(x) is Rows else x for x in values]


class _Graph:
    """One graph of Dynamo, and its tape."""

    def __init__(self, region: CapturedCalls, graph: torch.fx.GraphModule, examples: list[Any]) -> None:
        _prepare(graph)
        if any(isinstance(x, Rows) for x in examples):
            raise Refused("it uses a sharded tensor of an earlier call")
        self._region, self._graph = region, graph
        self._places: Optional[list[tuple[int, int]]] = None  # (place, which row tensor) of inputs that are stand-ins
        self._run: Optional[Callable[..., Any]] = None
        self._results: Any = None  # how each output of the tape is made a row tensor; None: there is no tape
        self._num_replays = 0
        self._sources: at_once.Sources = {}

    def __call__(self, *args: Any) -> Any:
        region, given, counts = self._region, [*args], current().part(Counts)
        if self._places is None:
            which = {id(x): i for i, x in enumerate(region.stand_ins)}
            self._places = [(place, which[id(x)]) for place, x in enumerate(args) if id(x) in which]
        for place, number in self._places:
            given[place] = region.rows[number]
        self._num_replays += region.num_pieces > 1 or self._run is not None
        if region.num_pieces > 1:
            return self._in_pieces(given)
        region.has_run = True
        if self._run is None:
            self._beside_python(given, self._recorded)
        if self._is_audited():
            self._beside_python(given, self._replayed)
        num_before = counts.on_rows
        if self._results is None:
            outputs = self._run(*given)
        else:
            for place, number in self._places:
                given[place] = region.rows[number].block
            counts.on_rows += self._num_operations
            outputs = self._as_rows(self._run(*given))
        counts.replayed += counts.on_rows - num_before
        return outputs

    def _is_audited(self) -> bool:
        return self._num_replays in _AUDITED or self._num_replays % max(_AUDITED) == 0

    def _in_pieces(self, given: list[Any]) -> list[Any]:
        region, counts = self._region, current().part(Counts)
        call, num_before = at_once.Call(self._graph, given, region.num_pieces, self._sources), counts.on_rows
        if self._is_audited() or self._num_replays == 2:  # what the first call has changed
            frame: Any = sys._getframe(1)
            while not frame.f_code.co_name.startswith(_NAME):
                frame = frame.f_back
            at_once.check_changes_nothing(frame.f_code)
            try:
                self._sources = call.prove(region.by_python, self._num_replays == 1)
                call = at_once.Call(self._graph, given, region.num_pieces, self._sources)
            except Refused as why:
                self._differs(why)
                raise
        call.check_hooks()
        region.has_run = True
        outputs = call.outputs()
        counts.replayed += counts.on_rows - num_before
        return outputs

    def _differs(self, why: Refused) -> None:
        """Raise SyncError if replays were used that may be wrong."""
        if self._num_replays <= 1 + (self._region.num_pieces > 1):
            return
        self._region.has_run = True
        replays = *_AUDITED, self._num_replays - max(_AUDITED)
        last = max(number for number in replays if number < self._num_replays)
        raise SyncError(
            f"the replay of {self._region.name} was compared with the program's Python after "
            f"{self._num_replays} replays: {why}. Something has changed that torch's guards do not see (a "
            "cache, the environment, what was missing when it was traced), and some steps since the last "
            f"comparison, after {count(last, 'replay')}, may be wrong, and checkpoints saved since. Go on from "
            "an earlier checkpoint, with DDPSHIM_CAPTURE=off."
        ) from None

    def _as_rows(self, outputs: list[Any]) -> list[Any]:
        rows, found = self._region.rows, []
        memories: dict[int, Any] = {}
        for x, of in zip(outputs, self._results):
            if type(of) is tuple:
                dimension, part, owner, group = of
                x = Rows(x, dimension, part, memories.get(group) if owner is None else rows[owner].memory)
                memories[group] = x.memory
            elif of is not None:
                x = rows[of]
            found.append(x)
        return found

    def _how(self, x: Any) -> Any:
        """Return how `_as_rows` makes an output: as it is, as row tensor number i, or by (dimension, part, i, memory).

        There `i` is the number of a row tensor whose memory it shares; outputs of one memory share it.
        """
        if type(x) is not Rows:
            return None
        rows = self._region.rows
        same = next((i for i, one in enumerate(rows) if one is x), None)
        owner = next((i for i, one in enumerate(rows) if one.memory is x.memory), None)
        if owner is None and x.memory.mirrors:
            raise Refused("its results are also gathered")
        return (x.dimension, x.part, owner, id(x.memory)) if same is None else same

    def _beside_python(self, given: list[Any], compute: Callable[..., list[torch.Tensor]]) -> NoReturn:
        """Raise _Computed with what the program's Python returns, after a comparison with `compute`, bit by bit.

        `compute` gets copies of what it may write into, and the messages that the Python has got. Where it differs, the
        call is given up, or if replays were used already, the job.
        """
        region, state, counts = self._region, current().part(blocks.State), current().part(Counts)
        results, device = Results(), region.device
        inputs = [x.clone() if _may_be_written(x) else x for x in given]
        trained = [x for x in given if isinstance(x, _T) and type(x) is not Rows and x.requires_grad]
        before = rank_states(device), state.num_messages, [*map(_num_writes, (*trained, *region.rows))]
        with replaced(state, "tape", results):
            out = region.by_python({})
        after, num_before = rank_states(device), counts.on_rows
        try:
            if state.num_messages != before[1]:
                raise Refused("it gathers a tensor")
            if [*map(_num_writes, (*trained, *region.rows))] != before[2]:
                raise Refused("it writes into its arguments")
            restore_rank_states(before[0], device)
            # Hooks of the program's, as of an activation checkpoint, see what its Python saves for the backward pass.
            with replaced(state, "num_messages", NoMessages()), saved_tensors_hooks(lambda x: x, lambda x: x):
                found = compute(given, inputs, results)
            if not all(are_equal(x, y) for x, y in zip(given, inputs) if x is not y):
                raise Refused("its replay writes other values than its Python")
            check_as_python("replay", found, out, [*given, *region.rows], rank_states(device), after)
        except Refused as why:
            self._differs(why)
            region.refused = str(why)
        finally:
            restore_rank_states(after, device)
            counts.on_rows = num_before
        raise _Computed(out)

    def _recorded(self, given: list[Any], inputs: list[Any], results: Results) -> list[torch.Tensor]:
        """Compute the graph by the rules, and write down the tape; with `exact` the graph itself is replayed."""
        region, counts, state = self._region, current().part(Counts), current().part(blocks.State)
        whole = [(x, copy) for x, copy in zip(given, inputs) if isinstance(x, _T) and type(x) is not Rows]
        versions = [copy._version for _, copy in whole]
        # Where each operation is computed in pieces, no tape can be written.
        tape = Tape(_blocks(inputs), results) if state.factor == state.num_pieces else None
        num_before = counts.on_rows
        with replaced(state, "tape", tape), tape or contextlib.nullcontext():
            outputs = self._graph.forward(*inputs)
        self._num_operations = counts.on_rows - num_before
        changed = [x for (x, copy), version in zip(whole, versions) if copy._version != version]
        mirrors = [m.whole for x in region.rows for m in x.memory.mirrors]
        memories = [memory_of(x) for x in (*(x for x, _ in whole), *mirrors)]
        if any(memories.count(memory_of(x)) > 1 for x in changed):
            raise Refused("it writes into its arguments")
        if tape is None:
            self._run = self._graph.forward
            return _blocks(outputs)
        self._results = [self._how(x) for x in outputs]
        self._text, self._known = tape.text(_blocks(outputs), state.has_graphs)
        self._run = self._compiled({}, graphs=state.has_graphs)
        return _blocks(outputs)

    def _replayed(self, given: list[Any], inputs: list[Any], results: Results) -> list[torch.Tensor]:
        if self._results is None:
            return _blocks(self._run(*inputs))  # type: ignore[misc]
        again = {name: results.again for name, function in self._known.items() if function is over_ranks}
        return self._compiled(again)(*_blocks(inputs))  # type: ignore[no-any-return]

    def _compiled(self, others: dict[str, Any], graphs: bool = False) -> Any:
        known = {**self._known, **others}
        exec(compile(self._text, "<tape>", "exec"), known)
        if graphs:
            made = {name: Replayer(self._region.name, x) for name, x in known.items() if name.startswith("segment")}
            known.update(made)
        return known["run"]


class _Computed(BaseException):
    """Carries what the program's Python has returned out of the call in place of which it ran."""


def _may_be_written(x: Any) -> bool:
    return isinstance(x, _T) and type(x) is not Rows and not x.requires_grad


def _num_writes(x: Any) -> int:
    return x.memory.num_writes if type(x) is Rows else x._version


def _programs(codes: Any) -> list[types.CodeType]:
    """Return those of the traced `codes` that are the program's."""
    einops = f"{os.sep}einops{os.sep}"
    return [code for code in codes or () if not (code.co_filename.startswith(_KNOWN) or einops in code.co_filename)]


def _check_code(codes: list[types.CodeType]) -> None:
    """Raise Refused if the program's Python depends on what no guard of Dynamo sees. Local."""
    for code in codes:
        if names := _UNSEEN & {*code.co_names}:
            raise Refused(f"{code.co_name} reads {min(names)}, of which nobody sees a change")
        if any(step.opname in _HANDLES for step in dis.get_instructions(code)):
            raise Refused(f"{code.co_name} handles exceptions")


def _functions_of(codes: list[types.CodeType]) -> list[Unguarded]:
    """Return what calls take from all functions with these codes: up to torch 2.11 no guard sees it."""
    functions = [x for x in gc.get_referrers(*codes) if type(x) is types.FunctionType]
    if any(type(x) is functools._lru_cache_wrapper for x in gc.get_referrers(*functions)):
        raise Refused("a function caches its results")
    return [(functools.partial(_taken_from, function), [*_taken_from(function)]) for function in functions]


def _taken_from(function: Any) -> tuple[Any, ...]:
    of_keywords = function.__kwdefaults__ or {}
    return function.__name__, function.__defaults__, *of_keywords.values()


def _states_of_eager(original: Callable[[], Any]) -> Callable[[], Any]:
    """Return a stand-in for Dynamo's table: code that asks whether it is compiled hears no, `region` yes. Local."""
    return lambda: {function: found and function is _IS_TRACED for function, found in original().items()}


def _classes_of(module: nn.Module) -> list[Unguarded]:
    """Return the attributes of all classes of a network and of what its modules hold."""
    held = (x for one in module.modules() for x in (one, *vars(one).values()))
    classes = {cls for kind in {type(x) for x in held} for cls in kind.__mro__} - {object, nn.Module}
    return [(vars(cls).values, [*vars(cls).values()]) for cls in classes if cls.__module__ != "builtins"]


class CapturedCalls:
    """The calls of a module with row tensors of one kind."""

    by_python: Callable[[dict[int, Any]], Any]  # makes this call as the program does, with others for some row tensors

    def __init__(self, name: str, rows: list[Rows], num_pieces: int) -> None:
        self.name, self.num_pieces = name, num_pieces  # of the network; in which it is computed
        self._unguarded: list[Unguarded] = []  # Dynamo takes it for granted
        self.rows, self.device = rows, rows[0].block.device  # of this call, in their order
        self.refused = ""  # why it is computed by the rules
        self.has_run = False  # this call has computed something
        self._num_graphs = 0
        with torch._subclasses.FakeTensorMode():  # of the wholes' shapes, without values
            self.stand_ins = [rules.template(x).requires_grad_(x.block.requires_grad) for x in rows]
        self._function = _make_region(current().next_number("captured region"))
        self._compile = torch._dynamo.optimize(self._made, nopython=True, dynamic=False)(self._function)
        config = torch._dynamo.config
        self._config = config.patch({name: value for name, value in _CONFIG.items() if hasattr(config, name)})
        self._compiled: dict[Any, Callable[..., Any]] = {}  # by Dynamo's code

    def _made(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        self._num_graphs += 1
        if self._num_graphs > _MOST_GRAPHS:
            raise Refused("its Python differs from call to call")
        codes = _programs(torch._dynamo.utils.get_traced_code())
        _check_code(codes)
        self._unguarded += _functions_of(codes)
        return _Graph(self, graph, examples)

    def __call__(self, module: nn.Module, rows: list[Rows], args: Any, kwargs: Any) -> Any:
        of = {id(x): stand_in for x, stand_in in zip(rows, self.stand_ins)}
        args, kwargs = mapped(lambda x: of.get(id(x), x), (args, kwargs))
        self.rows, self.has_run = rows, False
        if not all(len(found := now()) == len(then) and all(map(is_, found, then)) for now, then in self._unguarded):
            raise Refused("a class or the defaults of a function were changed")
        try:
            return self._function_for(module, args, kwargs)(module, args, kwargs)
        finally:
            self.rows = []

    def _function_for(self, module: nn.Module, args: Any, kwargs: Any) -> Callable[..., Any]:
        """Return what Dynamo compiled whose guards hold now; else its compiler. (Its own way asks for more first.)"""
        variables = {"module": module, "args": args, "kwargs": kwargs}
        for entry in torch._dynamo.eval_frame._debug_get_cache_entry_list(self._function.__code__):
            if entry.guard_manager.check(variables):
                if entry.code not in self._compiled:
                    self._compiled[entry.code] = types.FunctionType(entry.code, self._function.__globals__, closure=())
                return self._compiled[entry.code]
        return self._compiling

    def _compiling(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        places, name = torch._dynamo.variables.torch, "tracing_state_functions"
        eager = replaced(places, name, _states_of_eager(getattr(places, name)))
        if _is_lazy(module):
            raise Refused("a layer gets its parameters in this call")
        self._unguarded += _classes_of(module)
        with self._config, warnings.catch_warnings(), eager:
            warnings.simplefilter("ignore")
            return self._compile(module, args, kwargs)


def captured(known: Known, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what the call of a network on row tensors returns; capture it, or replay it."""
    of_job = current().part(Calls)
    if not known.regions and not is_supported():
        of_job.least_operations = math.inf  # of no network
        return call(module, *args, **kwargs)
    is_in_pieces = current().part(blocks.State).rows_at_once is not None
    if is_in_pieces:
        of_job.before_wholes()  # else a hook wraps it as this call begins
    given = leaves((args, kwargs))
    rows = [*{id(x): x for x in given if type(x) is Rows}.values()]
    if not rows or not _is_ordinary():
        return call(module, *args, **kwargs)
    num_pieces = at_once.num_pieces(rows[0]) if is_in_pieces else 1
    if is_in_pieces and (num_pieces == 1 or not at_once.may_save(module)):
        return call(module, *args, **kwargs)
    if num_pieces > 1 and any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in module.modules()):
        of_job.counting, known.refused = None, "BatchNorm needs all rows"
        at_once.say_why(type(module).__name__, known.refused)
        return call(module, *args, **kwargs)
    for x in rows:
        if x.memory.mirrors:
            x.memory.pull()
    key = (
        torch.is_grad_enabled(),
        len(current().part(GuardState).owners),  # a wrapper reduces the gradients of these parameters
        *((x.sizes, x.place, x.dtype, x.block.stride(), x.block.requires_grad) for x in rows),
        *(x.block.is_cuda and rules.offset_of_whole(x) for x in rows),  # by which a GPU's kernel of dropout draws
    )
    region = known.regions.get(key)
    if region is None:
        kinds = {(type(x), x.dtype.is_complex) for x in given if isinstance(x, _T)}
        can_stand_in = kinds <= {(Rows, False), (_T, False), (_T, True)} and _are_plain_containers((args, kwargs))
        if _is_lazy(module):
            return call(module, *args, **kwargs)
        if len(known.regions) == _MOST_REGIONS or not can_stand_in:
            if num_pieces > 1:
                at_once.say_why(type(module).__name__, "its calls are of too many kinds")
            return call(module, *args, **kwargs)
        region = known.regions[key] = CapturedCalls(type(module).__name__, rows, num_pieces)
    if region.refused:
        of_job.counting = of_job.counting if num_pieces == 1 else None
        return call(module, *args, **kwargs)

    def by_python(others: dict[int, Any]) -> Any:
        of_job.is_off = calls.is_tracing = False
        try:
            given = mapped(lambda x: others.get(id(x), x), (args, kwargs)) if others else (args, kwargs)
            return call(module, *given[0], **given[1])
        finally:
            of_job.is_off = calls.is_tracing = True

    of_job.is_off = calls.is_tracing = True
    region.by_python, has_graph = by_python, torch.is_grad_enabled()
    try:
        return region(module, rows, args, kwargs)
    except _Computed as made:
        torch.set_grad_enabled(has_graph)  # it may have been refused in the middle of no_grad()
        return made.args[0]
    except Exception as problem:
        torch.set_grad_enabled(has_graph)
        if region.has_run:
            raise
        found = getattr(problem, "inner_exception", problem)
        region.refused = str(found).strip().partition("\n")[0] or type(found).__name__
    finally:
        of_job.is_off = calls.is_tracing = False
        del region.by_python
        if region.refused and all(one.refused for one in known.regions.values()):
            known.refused = region.refused  # its children are looked at from now on
    if num_pieces > 1:
        at_once.say_why(region.name, region.refused)
        of_job.counting = None  # its children are looked at now: all rows may not fit
    return call(module, *args, **kwargs)


def _is_lazy(module: nn.Module) -> bool:
    """Whether the next call draws parameters: Dynamo would undo these draws. Local."""
    return any(map(is_lazy, (*module.parameters(), *module.buffers())))


def _is_ordinary() -> bool:
    """Whether nothing looks at each operation now. Local."""
    return (
        current().part(Counts).is_in_lock_step()
        and not torch.is_inference_mode_enabled()
        and torch._C._current_graph_task_id() < 0
        and not torch._C._is_torch_function_mode_enabled()
        and torch.utils._python_dispatch._get_current_dispatch_mode() is None
        and not any(vars(nn.modules.module).get(name) for name in _HOOKS_OF_ALL)
        and not (current().part(blocks.State).rows_at_once and at_once.is_saved_elsewhere())
    )


def _are_plain_containers(value: Any) -> bool:
    if not isinstance(value, (tuple, list, dict)):
        return True
    return type(value) in _CONTAINERS and all(
        map(_are_plain_containers, value.values() if isinstance(value, dict) else value)
    )
