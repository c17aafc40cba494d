"""Runs an unedited program as `python` would; decides whether to distribute it, and joins the job at `import torch`.

Before a program runs, its file and the local modules that it imports are read for how it distributes itself. Modules
that only a configuration names are found while it runs: `joining.py`. This file imports no torch.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import os
import runpy
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.machinery import PathFinder, SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, NoReturn, Optional

from ddpshim import adapters, variables
from ddpshim.errors import LaunchError, OptionsError, SyncError
from ddpshim.process.launch_env import read_launch_env
from ddpshim.process.replaced import after_import, replaced
from ddpshim.process.say import say
from ddpshim.process.users_line import users_line

if TYPE_CHECKING:
    from ddpshim.job.world import World

BEGAN = "began"  # a file in RUN_DIR that is made when `run` begins
_MOST_FILES = 2000
_UNREAD = {*sys.builtin_module_names, "ddpshim"}  # packages whose files say nothing about the program
# Packages that distribute a program, if its own file imports them.
_DISTRIBUTORS = {
    *("lightning", "pytorch_lightning", "lightning_fabric", "deepspeed", "horovod", "colossalai"),
    *("composer", "mpi4py", "torch_xla"),
}
_JOINS = {"init_process_group", "init_device_mesh"}
_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}
# Variables that make a process a rank, which the program cannot change, by their beginnings.
_OF_JOB = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_", "TORCHELASTIC_", "PMI"),
    *("OMPI_", "MV2_", "MPI_LOCAL", "SLURM_", "SUBMITIT_", variables.PREFIX, "CUDA_VISIBLE_DEVICES"),
)
_RANK = ["-m", "ddpshim.launch.rank"]
_execve = os.execve


@dataclass
class Start:
    """How this rank was started, so that it can be restarted."""

    argv: Sequence[str]
    joins: bool = False  # whether its file calls a function that makes a process group
    at_failure: Callable[[Exception], None] = lambda error: None  # called if the program fails
    # Leaves the job, and restores replaced names (collective); if asked, removes files that the program has made.
    leave: Callable[[bool], None] = lambda removes_new: None
    file: str = ""  # of the program, as a real path; "" if it is not known
    folder: str = field(default_factory=os.getcwd)
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    time: float = field(default_factory=time.time)
    process: int = field(default_factory=os.getpid)

    def again(self, environ: Mapping[str, str], options: Optional[Sequence[str]] = None) -> NoReturn:
        """Replace this process by a rank that runs the program, by default with the options of this Python. Local."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if options is None:
            options = [*["-O"] * sys.flags.optimize, *(f"-W{option}" for option in sys.warnoptions)]
        _execve(sys.executable, [sys.executable, "-u", *options, *_RANK, *self.argv], environ)

    def execv(self, real: Callable[..., Any], path: Any, args: Any, env: Optional[Mapping[Any, Any]] = None) -> Any:
        """os.execv or os.execve of the program. Its own file starts again as a rank (collective).

        Raises SyncError for all else, which would run once for each rank.
        """
        given = () if env is None else (env,)
        if os.getpid() != self.process or not (isinstance(path, int) or os.access(path, os.X_OK)):
            return real(path, args, *given)  # of a forked child; or an error, after which os.execvp tries another path
        found = "" if isinstance(path, int) else os.fsdecode(path)
        argv, options = [*map(os.fsdecode, args)][1:], list[str]()
        if os.path.realpath(found) == self.file:
            argv = [found, *argv]
        elif _is_this_python(found):
            while argv and argv[0].startswith("-") and argv[0] not in ("-m", "-c", "-"):
                num = 1 + (argv[0] in ("-W", "-X"))
                options, argv = options + argv[:num], argv[num:]
            argv = argv[2:] if argv[:2] == _RANK else argv  # of sys.orig_argv
        else:
            argv = []
        if not argv or file_of(argv) != self.file:
            raise SyncError(
                f"{users_line()}: os.exec* replaces the program by {[found, *args[1:]]}; each rank would run that for "
                "itself, outside of the job, and write the same files. Start another program by subprocess.run, "
                "which only the main rank does; the program itself may start again, by this Python."
            )
        folder = os.getcwd()
        self.leave(False)
        os.chdir(folder)
        kept = os.environ if env is None else {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
        environ = {"PYTHONHASHSEED": "0"} | {name: kept[name] for name in kept if not name.startswith(_OF_JOB)}
        environ |= {name: value for name, value in self.environ.items() if name.startswith(_OF_JOB)}
        Start(argv).again(environ, options)


def patched(argv: Sequence[str]) -> Optional[Sequence[str]]:
    """Return `argv` so that it runs the module that a patch set changes, which is patched in memory from now on. Local.

    Returns None for other programs, and for all with DDPSHIM_UNEDITED=on or off.
    """
    is_module = argv[0] == "-m"
    names = argv[1].split(".") if is_module else os.path.realpath(argv[0]).split(os.sep)
    if not is_launched() or _wanted() != "auto" or adapters.packages().keys().isdisjoint(names):
        return None
    from ddpshim.trainers import patching_in_memory

    module, rest = (argv[1], argv[2:]) if is_module else (patching_in_memory.module_of(argv[0]), argv[1:])
    return ["-m", module, *rest] if module is not None and patching_in_memory.patch_program(module) else None


@contextlib.contextmanager
def distributed(argv: Sequence[str]) -> Iterator[Optional[Start]]:
    """Within this block, the program `argv` is distributed, unless it distributes itself; yields None if it is not.

    If so, collective: the job is joined at once, so that files are written once; when the program imports torch, if its
    files import isaacgym, which refuses to be imported after torch, or if they never import torch and ask for a rank.
    """
    if not is_launched() or _wanted() == "off":
        yield None
        return
    file = file_of(argv)
    sources = Sources(file or None)
    if sources.own_way is not None and _wanted() != "on":
        if not sources.by_ddpshim and read_launch_env(os.environ).rank == 0:
            say(
                f"{sources.own_way}: taken for a program that distributes itself, and left alone. Its batch size is "
                "then often that of each rank: another experiment than one process (`python -m ddpshim docs "
                "other_codebases`). DDPSHIM_UNEDITED=on distributes it as a single-process program; off leaves it "
                "alone without this line"
            )
        yield None
        return
    start = Start(argv, sources.joins, file=file)
    with contextlib.ExitStack() as until:
        for real in (os.execv, os.execve):  # Python's others call these
            until.enter_context(replaced(os, real.__name__, functools.partial(start.execv, real)))

        def begin() -> None:
            if os.getpid() == start.process:
                from ddpshim.trainers.unedited.joining import joined

                until.enter_context(joined(start))

        after_import("torch", begin)
        asks_for_rank = sources.asks_for_rank and "torch" not in sources.packages
        if not asks_for_rank and "isaacgym" not in sources.packages:
            importlib.import_module("torch")
        yield start


def run_as_main(argv: Sequence[str]) -> None:
    """Run `script.py ARGS` or `-m package.module ARGS` in this process as `python` would."""
    is_module = argv[0] == "-m"
    name, *arguments = argv[is_module:]
    sys.argv = [name, *arguments]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):  # python -P (3.11) puts no folder there
        sys.path[0] = os.path.dirname(os.path.abspath(name))
    if name.endswith((".pyc", ".pyz", ".zip")):
        runpy.run_path(os.path.abspath(name), run_name="__main__")
        return
    # As `python name` does: `__file__` is absolute and sys.argv[0] is as given; runpy makes them equal.
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(name)
    main.__loader__ = SourceFileLoader("__main__", main.__file__)
    sys.modules["__main__"] = main
    exec(main.__loader__.source_to_code(main.__loader__.get_data(main.__file__), main.__file__), vars(main))


def join(**given: Any) -> World:
    """Join the job as `ddpshim.setup(batch="global", **given)`, which calls this (collective).

    One process loads nothing of what several ranks need.
    """
    from ddpshim.job import group

    if not group.has_group() and not read_launch_env(os.environ).is_launched:
        return group.join(**given)
    from ddpshim.trainers.unedited.joining import join_edited

    return join_edited(**given)


def is_launched() -> bool:
    """Whether this process is a rank of a job. Local."""
    try:
        return read_launch_env(os.environ).is_launched
    except LaunchError:
        return False  # `setup` raises this error if the program calls it


def _wanted() -> str:
    choice = os.environ.get(variables.UNEDITED, "").strip().lower() or "auto"
    if choice not in variables.ALLOWED[variables.UNEDITED]:
        raise OptionsError(
            f"{variables.UNEDITED}={choice!r}: whether to distribute the program is unclear. Use on or off."
        )
    return choice


def _is_this_python(path: str) -> bool:
    """Whether it is `sys.executable`, or another name in its folder: that of a virtual environment links elsewhere."""
    ours, path = (os.path.abspath(one) for one in (sys.executable, path))
    return os.path.dirname(ours) == os.path.dirname(path) and os.path.realpath(ours) == os.path.realpath(path)


def file_of(argv: Sequence[str]) -> str:
    """Return the real path of the file that `python *argv` runs; "" if there is none."""
    file = module_file(argv[1]) if argv[0] == "-m" and argv[1:] else argv[0]
    return os.path.realpath(file) if file else ""


def module_file(name: str) -> Optional[str]:
    """Return the file that `python -m name` runs, found without importing any of it; None if there is none. Local."""
    with contextlib.suppress(ValueError, ImportError):
        first, *rest = name.split(".")
        spec = importlib.util.find_spec(first)
        for part in [*rest, "__main__"]:
            inside = spec.submodule_search_locations if spec is not None else None
            if inside is None and part == "__main__":  # no package
                break
            # By the last part: by the full name, a folder without __init__.py needs its parent imported.
            spec = None if inside is None else PathFinder.find_spec(part, inside)
        return None if spec is None else spec.origin
    return None


class Sources:
    """What the files of a program say: its own, and the local modules that they import."""

    def __init__(self, program: Optional[str]) -> None:
        """`program`: its file; None if there is no file to read."""
        self.own_way: Optional[str] = None  # how it distributes itself, with file and line; None: it does not seem to
        self.by_ddpshim = False  # it does so through ddpshim
        self.joins = False  # its own file calls a function that makes a process group, perhaps only under a launcher
        self.asks_for_rank = False  # a file names a variable of a rank
        self.packages = set[str]()  # what the files import, by the first part of the name
        if program is None or not program.endswith(".py"):
            return
        roots = [os.path.dirname(os.path.abspath(program)), *(path or os.getcwd() for path in sys.path)]
        self._roots = [root for root in dict.fromkeys(roots) if not _is_installed(root)]
        pending = [os.path.abspath(program)]
        seen: set[str] = set()
        while pending and len(seen) < _MOST_FILES and self.own_way is None:
            path = pending.pop(0)
            if path in seen:
                continue
            seen.add(path)
            try:
                with open(path, "rb") as file:
                    tree = ast.parse(file.read())
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                continue  # it is not Python
            imports, names = [*_imports(path, tree)], {*_names(tree)}
            self.own_way = _first_of({"ddpshim"}, path, imports)
            self.by_ddpshim = self.own_way is not None
            if len(seen) == 1:  # the program
                self.own_way = self.own_way or _first_of(_DISTRIBUTORS, path, imports) or _joins(path, tree)
                self.joins = not _JOINS.isdisjoint(names)
            self.asks_for_rank |= not _OF_RANKS.isdisjoint(names)
            self.packages |= {name.partition(".")[0] for name, _ in imports}
            for name, _ in imports:
                if name.partition(".")[0] not in _UNREAD:
                    pending += self._files_of(name)

    def _files_of(self, name: str) -> Iterator[str]:
        """Yield the files that `import name` executes, without installed packages."""
        folders = self._roots
        for part in name.split("."):
            spec = PathFinder.find_spec(part, folders)
            if spec is not None and str(spec.origin).endswith(".py"):
                yield str(spec.origin)
            if spec is None or not spec.submodule_search_locations:
                return
            folders = [*spec.submodule_search_locations]


def _is_installed(folder: str) -> bool:
    paths = sysconfig.get_paths()
    installed = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    inside = any(os.path.join(folder, "").startswith(os.path.join(path, "")) for path in installed)
    return inside or not {"site-packages", "dist-packages"}.isdisjoint(folder.split(os.sep)) or folder.endswith(".zip")


def _imports(path: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the modules that a file imports, and the lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            yield from ((f"{module}.{alias.name}".strip("."), node.lineno) for alias in node.names)


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the functions, attributes and texts that a file uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, (ast.Attribute, ast.Constant)):
            yield node.attr if isinstance(node, ast.Attribute) else str(node.value)


def _joins(path: str, tree: ast.Module) -> Optional[str]:
    """Say which function a file calls, under no condition, that makes a process group; None if there is none."""
    ifs = [node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp))]
    if_main = [node for node in ifs if any(getattr(name, "id", "") == "__name__" for name in ast.walk(node.test))]
    conditional = {inside for node in ifs if node not in if_main for inside in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node not in conditional:
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if name in _JOINS:
                return f"{os.path.basename(path)} calls {name}"
    return None


def _first_of(packages: Set[str], path: str, imports: Sequence[tuple[str, int]]) -> Optional[str]:
    """Say where a file first imports one of `packages`; None if it does not."""
    for name, line in imports:
        if name.partition(".")[0] in packages and name != "ddpshim.auto":
            return f"{os.path.basename(path)}:{line} imports {name.partition('.')[0]}"
    return None


def _absolute(path: str, node: ast.ImportFrom) -> str:
    """Return the module of a `from` import; a relative one is resolved from the outermost folder with __init__.py."""
    if not node.level:
        return node.module or ""
    parts: list[str] = []
    folder = os.path.dirname(path)
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, name = os.path.split(folder)
        parts.insert(0, name)
    return ".".join(filter(None, [*parts[: len(parts) - node.level + 1], node.module]))
