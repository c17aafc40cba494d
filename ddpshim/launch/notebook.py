"""The cell magic `%%ddpshim`: runs a notebook's cell on several ranks as a program, and returns its variables.

The program has the cell's lines at their numbers. Its first line gets what the cell uses of the notebook: imports,
functions and classes as the statements of their cells, variables as pickles in a private folder.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import ctypes
import hashlib
import inspect
import marshal
import os
import pickle
import shlex
import signal
import subprocess
import symtable
import sys
import tempfile
from collections.abc import Iterator, Set
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple, Optional

import torch
from torch.utils.data import DataLoader

from ddpshim.errors import RankError
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.process.say import say

_CALL = "__import__('ddpshim.launch.notebook', fromlist=['']).{}(globals())"  # `import` would mean a program of `setup`
_ANNOTATIONS = annotations.compiler_flag
_PLAN = "__ddpshim__"  # a name in the program
_MADE_BY_RANKS = (DataLoader, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


class CellError(RankError):
    """The cell did not run to its end on ranks; no variable of the notebook was changed."""

    def _render_traceback_(self) -> list[str]:  # asked by IPython, which would show lines of this file
        return [f"{type(self).__name__}: {self}"]


class Statement(NamedTuple):
    """A statement at the top level of a cell that imports or defines `names`."""

    names: list[str]
    node: ast.stmt
    code: CodeType

    @property
    def imports(self) -> bool:
        return isinstance(self.node, (ast.Import, ast.ImportFrom))

    def makes(self, name: str, value: Any) -> bool:
        """Whether it makes the value that the notebook has now."""
        if self.imports:
            names: dict[str, Any] = {}
            with contextlib.suppress(Exception):
                exec(self.code, names)
            return names.get(name, _PLAN) is value
        codes, made = _codes(value), [self.code]
        for code in made:  # grows
            made += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        return codes is not None and all(code in made for code in codes)


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook the cell magic `%%ddpshim`: what `%load_ext ddpshim` calls. Local."""

    def ddpshim(line: str, cell: str) -> None:
        """%%ddpshim [NPROC] [OPTIONS OF run]: run the cell on NPROC ranks, by default one for each GPU."""
        words, source = shlex.split(line), "\n" + cell
        nproc = words.pop(0) if words and not words[0].startswith("-") else "gpu"
        with tempfile.TemporaryDirectory(prefix="ddpshim-cell-") as folder:
            own = _give(shell, source, folder)
            _run(["--nproc", nproc, *words, os.path.join(folder, "cell.py")])
            _take(shell.user_ns, own, folder)

    shell.register_magic_function(ddpshim, "cell")


def _statements(source: str, file: str, flags: int) -> Iterator[Statement]:
    for node in ast.parse(source, "the cell").body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
            code: CodeType = compile(ast.Module([node], []), file, "exec", flags, dont_inherit=True)
            yield Statement(sorted(_names(node)[2]), node, code)


def _of_all_cells(shell: Any, folder: str, flags: int) -> Iterator[Statement]:
    """Yield the statements of the notebook's cells, and write the cells into `folder`, for tracebacks."""
    for number, source in enumerate(shell.user_ns.get("In", ())):
        with contextlib.suppress(SyntaxError, ValueError):
            for call in ast.walk(ast.parse(source)):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "run_cell_magic":
                    name, _, body = map(ast.literal_eval, call.args)
                    source = "\n" * (name == "ddpshim") + body
            file = Path(folder, f"cell_{number}.py")
            file.write_text(source, encoding="utf-8")
            yield from _statements(source, str(file), flags)


def _names(node: ast.stmt) -> tuple[set[str], set[str], set[str]]:
    """Return the global names that a statement reads, now or when its functions are called; now; and that it binds."""
    tables = [symtable.symtable(ast.unparse(node), "<cell>", "exec")]
    bound = {one.get_name() for one in tables[0].get_symbols() if one.is_assigned() or one.is_imported()}
    steps = [one.target for one in ast.walk(node) if isinstance(one, ast.AugAssign)]
    read, now = {target.id for target in steps if isinstance(target, ast.Name)}, set[str]()
    for table in tables:  # grows
        tables += table.get_children()
        symbols, in_function = table.get_symbols(), table.get_type() == "function"
        symbols = [one for one in symbols if one.is_referenced() and (one.is_global() or not in_function)]
        (read if in_function else now).update(one.get_name() for one in symbols)
    return (read | now) - {getattr(node, "name", "")}, now, bound


def _codes(value: Any) -> Optional[list[CodeType]]:
    """Return the code of a function or class of the notebook; None for other values."""
    value = inspect.unwrap(value) if callable(value) else value
    if not isinstance(value, (FunctionType, type)) or value.__module__ != "__main__":
        return None
    if isinstance(value, FunctionType):
        return [value.__code__]
    members = [getattr(one, "__func__", getattr(one, "fget", one)) for one in vars(value).values()]
    functions = [inspect.unwrap(one) for one in members if isinstance(one, FunctionType)]
    codes = [one.__code__ for one in functions if isinstance(one, FunctionType) and one.__module__ == "__main__"]
    return [code for code in codes if not code.co_filename.startswith("<")]  # those that dataclass makes


def _dump(value: Any, file: Any, refused: tuple[type, ...] = ()) -> set[str]:
    """Write a pickle, and return the names of the program's functions and classes in it (collective in a program)."""
    names = set[str]()

    class Pickler(pickle.Pickler):
        def reducer_override(self, part: Any) -> Any:
            if isinstance(part, refused):
                raise pickle.PicklingError(f"a {type(part).__name__}, which the ranks must create")
            if isinstance(part, (type, FunctionType)):
                if part.__module__.startswith("ddpshim."):
                    raise pickle.PicklingError(f"a {part.__name__} of the ranks: create it again")
                names.update([part.__qualname__.partition(".")[0]] * (part.__module__ == "__main__"))
            return NotImplemented

    torch.save(value, file, SimpleNamespace(Pickler=Pickler, __name__="pickle"), 4)
    return names


def _hash(value: Any, refused: tuple[type, ...] = ()) -> tuple[set[str], bytes]:
    """Return what `_dump` does, and the pickle's hash (collective in a program). Raises what pickling does."""
    hashed = hashlib.blake2b()
    names = _dump(value, SimpleNamespace(write=hashed.update, flush=bool), refused)
    return names, hashed.digest()


def _write(folder: str, name: str, head: dict[str, Any], variables: dict[str, Any], early: Set[str]) -> None:
    """Write `variables`, and apart those that statements need which define the classes of others (as `_dump`)."""
    first = {one: variables[one] for one in sorted(early & variables.keys()) if not _hash(variables[one])[0]}
    for file, content in ((name, {**head, "early": first, "names": [*variables]}), (f"{name}.variables", variables)):
        _dump(content, os.path.join(folder, file))


def _load(folder: str, name: str, map_location: Any) -> Any:
    # A pickle of our own, in a folder that is this user's alone.
    return torch.load(os.path.join(folder, name), map_location, weights_only=False)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


def _give(shell: Any, source: str, folder: str) -> list[Statement]:
    """Write the program, and what it uses of the notebook. Return what the cell itself imports and defines."""
    read, bound, hidden = set[str](), set[str](), shell.user_ns_hidden
    for node in ast.parse(source, "the cell").body:
        reads, _, binds = _names(node)
        read, bound = read | reads - bound, bound | binds
    flags = shell.compile.flags & _ANNOTATIONS
    own = [*_statements(source, shell.compile.cache(source, shell.execution_count), flags)]
    cells = [*_of_all_cells(shell, folder, flags)]
    used, variables, refused = list[Statement](), dict[str, Any](), dict[str, str]()
    pending = sorted(read)
    for number, name in enumerate(pending):  # grows
        value = shell.user_ns.get(name)
        if name not in shell.user_ns or hidden.get(name, _PLAN) is value or name in pending[:number]:
            continue
        found = [one for one in cells if name in one.names and one.makes(name, value)]
        used += found if found and found[-1].imports else found[-1:]  # `import a.b` and `import a.c` both make `a`
        pending += [inner for one in found[-1:] for inner in _names(one.node)[0]]
        if not found:
            try:
                if _codes(value) is not None:
                    raise pickle.PicklingError("no cell defines it as it is now")
                pending += _hash(value, _MADE_BY_RANKS)[0]
                variables[name] = value
            except Exception as error:
                refused[name] = str(error) or type(error).__name__
    if lacking := [f"{name} ({reason})" for name, reason in refused.items() if name not in bound]:
        raise CellError(
            f"the cell uses names of other cells that ranks cannot get: {'; '.join(lacking)}. It would fail there, so "
            "nothing was started. Create them in this cell, or import them from a file."
        )
    used.sort(key=cells.index)
    defined, imports = ([one for one in used if one.imports is imports] for imports in (False, True))
    plan: dict[str, Any] = {"defined": [marshal.dumps(one.code) for one in defined], "states": rank_states(_device())}
    plan["known"] = {name for one in (*used, *own) for name in one.names}
    plan["needed"] = {name for one in own for name in _names(one.node)[1]}
    _write(folder, "given", plan, variables, {name for one in defined for name in _names(one.node)[1]})
    first = ["from __future__ import annotations"] * bool(flags) + [ast.unparse(one.node) for one in imports]
    program = f"{'; '.join([*dict.fromkeys(first), _CALL.format('enter')])}{source}\n{_CALL.format('leave')}\n"
    Path(folder, "cell.py").write_text(program, encoding="utf-8")
    return own


def _run(words: list[str]) -> None:
    """Run the program, and show its output. Raises CellError unless it ends with 0, KeyboardInterrupt at Ctrl-C."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    end_with_parent, decoder = ctypes.CDLL(None).prctl, codecs.getincrementaldecoder("utf-8")("replace")
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpshim", "run", *words],
        env={**os.environ, "PYTHONPATH": path, "MPLBACKEND": "Agg"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # or Ctrl-C would reach it twice, and a second one kills ranks
        preexec_fn=lambda: end_with_parent(1, signal.SIGTERM),  # PR_SET_PDEATHSIG: also when the kernel is restarted
    )
    is_interrupted, chunk = False, b"-"
    while chunk:
        try:
            chunk = os.read(process.stdout.fileno(), 1 << 16)  # type: ignore[union-attr]
            sys.stdout.write(decoder.decode(chunk))
            sys.stdout.flush()
        except KeyboardInterrupt:
            is_interrupted = True
            process.send_signal(signal.SIGINT)
    code = process.wait()
    if is_interrupted:
        raise KeyboardInterrupt
    if code:
        raise CellError(
            f"`run` ended with exit code {code}, and its last lines say why; no variable of the notebook was changed. "
            "Correct the cell, and run it again."
        )


def enter(program: dict[str, Any]) -> None:
    """Give a program what it uses of the notebook: called by its first line. Local."""
    folder = os.path.dirname(program["__file__"])

    def device(storage: Any, location: str) -> Any:
        return storage.cuda() if location.startswith("cuda") else storage  # the rank's own GPU

    plan = program[_PLAN] = _load(folder, "given", device)
    program.update(plan["early"])
    for code in plan["defined"]:
        exec(marshal.loads(code), program)
    program.update(_load(folder, "given.variables", device))
    plan["given"] = {name: _hash(program[name])[1] for name in plan["names"]}
    restore_rank_states(plan["states"], _device())


def leave(program: dict[str, Any]) -> None:
    """Write a program's variables for the notebook, on the main rank: called by its last line (collective)."""
    plan, back, refused = program.pop(_PLAN), dict[str, Any](), dict[str, str]()
    if program["__name__"] != "__main__" or os.environ.get("RANK", "0") != "0":  # it is hidden from unedited programs
        return
    states, refers = rank_states(_device()), dict[str, set[str]]()
    for name, value in [*program.items()]:
        if name.startswith("_") or name in plan["known"]:
            continue
        try:
            names, digest = _hash(value)
            if lacking := names - plan["known"]:
                raise pickle.PicklingError(f"{', '.join(lacking)} is not defined at the top level of a cell")
            if digest != plan["given"].get(name):
                back[name], refers[name] = value, names
        except Exception as error:
            refused[name] = str(error) or type(error).__name__
    folder = os.path.dirname(program["__file__"])
    _write(folder, "back", {"states": states, "refers": refers, "refused": refused}, back, plan["needed"])


def _take(variables: dict[str, Any], own: list[Statement], folder: str) -> None:
    """Put into the notebook what the cell imports and defines, and the variables that the program left."""
    if not os.path.exists(os.path.join(folder, "back")):
        say("the cell ended by sys.exit, so no variable came back. Let it reach its last line")
        return
    back = _load(folder, "back", "cpu")
    refused, lacking = back["refused"], dict[str, Any]()
    variables.update(back["early"])
    for one in own:
        try:
            exec(one.code, variables)
        except Exception as error:
            refused.update(dict.fromkeys(one.names, repr(error)))
            lacking.update({name: type(name, (), {}) for name in one.names if name not in variables})
    variables.update(lacking)  # so that the others can be unpickled
    loaded = _load(folder, "back.variables", "cpu")
    for name in lacking:
        del variables[name]
    for name, names in back["refers"].items():
        if needed := names & refused.keys():
            refused[name] = f"it needs {', '.join(needed)}"
        else:
            variables[name] = loaded[name]
    restore_rank_states(back["states"], _device())
    names = [name for name in (*back["names"], *(name for one in own for name in one.names)) if name not in refused]
    say(f"back from the main rank: {', '.join(names) or 'no variable'}")
    for name, reason in refused.items():
        say(f"{name} did not come back: {reason}")
