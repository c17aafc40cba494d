"""Holds the rules about files, prompts, loggers and deletions that every rank would repeat."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Optional, Union

from ddpshim.tools.doctor.meaning import speaks_of_rank
from ddpshim.tools.doctor.rules import Case, Hit, rule, text_of
from ddpshim.tools.doctor.source import Function, Unit, argument, constant, identifiers, last_name

_WRITERS = {
    "torch.save": 1,
    "numpy.save": 0,
    "numpy.savez": 0,
    "numpy.savez_compressed": 0,
    "numpy.savetxt": 0,
    "json.dump": 1,
    "pickle.dump": 1,
    "yaml.dump": 1,
    "yaml.safe_dump": 1,
    "joblib.dump": 1,
    "shutil.copy": 1,
    "shutil.copyfile": 1,
    "shutil.copy2": 1,
    "shutil.copytree": 1,
    "shutil.move": 1,
    "omegaconf.OmegaConf.save": 1,
    "matplotlib.pyplot.savefig": 0,
    "imageio.imwrite": 0,
    "imageio.mimsave": 0,
    "imageio.mimwrite": 0,
    "imageio.get_writer": 0,
    "cv2.imwrite": 0,
    "cv2.VideoWriter": 0,
    "torchvision.utils.save_image": 1,
    "safetensors.torch.save_file": 1,
    "os.mkdir": 0,
    "os.rename": 0,
    "os.replace": 0,
    "os.symlink": 1,
}
_WRITING_METHODS = {"write_text", "write_bytes", "to_csv", "to_pickle", "to_parquet", "save_pretrained", "symlink_to"}
_LOGGERS = {
    "torch.utils.tensorboard.SummaryWriter",
    "torch.utils.tensorboard.writer.SummaryWriter",
    "tensorboardX.SummaryWriter",
    "tensorboard.SummaryWriter",
    "wandb.init",
    "mlflow.start_run",
    "comet_ml.Experiment",
    "comet_ml.start",
    "neptune.init_run",
    "neptune.init",
    "aim.Run",
    "swanlab.init",
    "clearml.Task.init",
}
_OWN_PATHS = {
    "getpid",
    "tempfile",
    "mkdtemp",
    "mkstemp",
    "uuid4",
    "gettempdir",
    "TemporaryDirectory",
    "NamedTemporaryFile",
}
_LOG_NAMES = re.compile(
    r"(?i)^(print|debug|info|warning|warn|error|critical|exception|log|write|writelines|rank0_print)$"
)
_PATH_CALLS = {"join", "Path", "makedirs", "mkdir", "open", "SummaryWriter", "joinpath"}
_PATH_NAMES = re.compile(r"(?i)(dir|path|folder|file|run|exp|stamp|time_?str|now_?str|name|suffix|prefix|version)")


@rule("DDP401")
def every_rank_writes(case: Case) -> Iterator[Hit]:
    names = {name.rpartition(".")[2] for name in _WRITERS} | _WRITING_METHODS | {"open", "File", "makedirs", "mkdir"}
    for unit, call in case.calls(*names):
        target = _written(call, unit, case)
        if (
            target is None
            or identifiers(target) & {"devnull", "/dev/null", "fileno", "stdout"}
            or _is_shared_file(target, call, unit, case)
            or _names_rank(target, unit, case)
        ):
            continue
        if case.on_every_rank(call, unit) and not _needs_argument(call, unit, case):
            yield Hit(unit, call, f"Every rank runs {text_of(call)}, on the same path at the same time.")


def _written(call: ast.Call, unit: Unit, case: Case) -> Optional[ast.expr]:
    """The path (or file) that the call writes, None where it only reads."""
    name, tail = unit.source.qualified(call.func), last_name(call.func)
    if name in ("open", "io.open", "gzip.open", "h5py.File"):
        mode = argument(call, "mode", 1)
        is_write = isinstance(constant(mode), str) and any(c in str(constant(mode)) for c in "wax")
        return argument(call, "file", 0) or argument(call, "name", 0) if is_write else None
    if name in _WRITERS:
        found = argument(call, "f", _WRITERS[name])
        return found or next(
            (k.value for k in call.keywords if k.arg in ("dst", "fname", "path", "filename", "stream", "fp")), None
        )
    if name == "os.makedirs":
        return None if _is_true(argument(call, "exist_ok", 2)) else argument(call, "name", 0)
    if isinstance(call.func, ast.Attribute):
        if tail == "mkdir":
            is_path = not _is_true(argument(call, "exist_ok", 2)) and name != "os.mkdir"
            return call.func.value if is_path else None
        if tail == "open" and not name.endswith("os.open"):
            # av.open(path, mode="w") beside path.open("w")
            is_module = isinstance(call.func.value, ast.Name) and call.func.value.id in unit.source.names
            target = argument(call, "file", 0) if is_module else call.func.value
            asked = constant(argument(call, "mode", 1 if is_module else 0))
            is_write = asked in ("w", "wb", "a", "ab", "x", "xb", "wt", "at")
            return target if is_write else None
        if tail in ("write_text", "write_bytes", "symlink_to"):
            return call.func.value
        if tail in _WRITING_METHODS and not case.program.defines(tail):  # what it writes is seen inside, else
            return call.args[0] if call.args else None
    return None


def _is_true(node: Optional[ast.expr]) -> bool:
    return node is not None and constant(node) is True


def _needs_argument(node: ast.AST, unit: Unit, case: Case) -> bool:
    """Whether a test around the node asks for a parameter that is None by default, and no caller passes it."""
    if unit.is_module:
        return False
    function: Function = unit.node  # type: ignore[assignment]
    arguments = function.args
    pairs = [*zip(reversed([*arguments.posonlyargs, *arguments.args]), reversed(arguments.defaults))]
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults) if d is not None]
    optional = {
        a.arg for a, default in pairs if constant(default) in (None, False) and isinstance(default, ast.Constant)
    }
    tests = [a.test for a in unit.source.above(node) if isinstance(a, ast.If)]
    for name in optional & {n for test in tests for n in identifiers(test)}:
        position = unit.parameters.index(name) - (unit.owner is not None)
        sites = case.meaning.sites_of(unit)
        if sites and not any(argument(call, name, position) is not None or _spreads(call) for _, call in sites):
            return True
    return False


def _spreads(call: ast.Call) -> bool:
    return any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)


def _is_shared_file(target: ast.expr, call: ast.Call, unit: Unit, case: Case) -> bool:
    """Whether the target is an open file or buffer: what opened it is the finding."""
    if not isinstance(target, ast.Name):
        return isinstance(target, ast.Call) and last_name(target.func) == "open"
    for _, binding in case.meaning.reaching(target, unit):
        value = binding.value
        if isinstance(binding.statement, (ast.With, ast.AsyncWith)):
            return True
        if isinstance(value, ast.Call) and last_name(value.func) in (
            "open",
            "BytesIO",
            "StringIO",
            "NamedTemporaryFile",
            "TemporaryFile",
            "mkstemp",
        ):
            return True
    return target.id in ("f", "fp", "file", "buffer", "buf", "fout", "stream", "sys.stdout")


def _names_rank(target: ast.expr, unit: Unit, case: Case, depth: int = 0) -> bool:
    """Whether each rank (or process) has a path of its own."""
    if speaks_of_rank(target) or identifiers(target) & _OWN_PATHS:
        return True
    if depth == 3:
        return False
    names = [n for n in ast.walk(target) if isinstance(n, ast.Name)]
    return any(
        b.value is not None and _names_rank(b.value, u, case, depth + 1)
        for n in names
        for u, b in case.meaning.reaching(n, unit)
    )


@rule("DDP402")
def every_rank_prompts(case: Case) -> Iterator[Hit]:
    for unit, call in case.calls("input"):
        if isinstance(call.func, ast.Name) and "input" not in unit.parameters and case.on_every_rank(call, unit):
            yield Hit(
                unit, call, f"Every rank waits for an answer to {text_of(call)}, and none of them has a terminal."
            )


@rule("DDP403")
def every_rank_logs(case: Case) -> Iterator[Hit]:
    for unit, call in case.calls(*(name.rpartition(".")[2] for name in _LOGGERS)):
        named = {k.arg for k in call.keywords}
        is_alias = (
            last_name(call.func) == "init" and "project" in named
        )  # `self.wandb = wandb`, then `self.wandb.init(...)`
        if unit.source.qualified(call.func) not in _LOGGERS and not is_alias:
            continue
        values = [*call.args, *(k.value for k in call.keywords)]
        if any(speaks_of_rank(v) for v in values) or argument(call, "group") is not None:
            continue
        if case.on_every_rank(call, unit):
            yield Hit(unit, call, f"Every rank opens {text_of(call.func)} and logs the same run again.")


@rule("DDP404")
def every_rank_deletes(case: Case) -> Iterator[Hit]:
    for unit, call in case.calls("rmtree", "remove", "unlink", "rmdir", "removedirs"):
        name, tail = unit.source.qualified(call.func), last_name(call.func)
        if name in ("shutil.rmtree", "os.remove", "os.unlink", "os.rmdir", "os.removedirs"):
            target = argument(call, "path", 0)
        elif tail in ("unlink", "rmdir") and isinstance(call.func, ast.Attribute) and not call.args:
            target = call.func.value
        else:
            continue
        if target is not None and not _names_rank(target, unit, case) and case.on_every_rank(call, unit):
            yield Hit(
                unit, call, f"Every rank runs {text_of(call)}: one deletes what another still uses, or finds it gone."
            )


@rule("DDP405")
def path_differs_by_rank(case: Case) -> Iterator[Hit]:
    for unit, call in case.calls("strftime", "isoformat", "ctime", "now", "utcnow", "today"):
        if not _is_clock(call, unit) or unit.name in ("__repr__", "__str__"):
            continue
        use = _path_use(call, unit)
        if use and case.on_every_rank(call, unit):
            yield Hit(unit, call, f"Each rank reads its own clock: {text_of(call)} in {use} may differ between ranks.")

    yield from _hydra_folder(case)


def _hydra_folder(case: Case) -> Iterator[Hit]:
    """A script whose hydra config puts the time into the folder of the run."""
    source = case.program.entry
    for unit in (source.module, source.main):
        for call in unit.all(ast.Call):
            if source.qualified(call.func) != "hydra.main":
                continue
            wanted = _own_configs(argument(call, "config_name", 1), case)
            found = next(((c, n) for c, n in case.tree.clocks if c in wanted), None)
            if found is not None:
                yield Hit(
                    unit,
                    call,
                    f"Each rank makes a run folder of its own: ${{now:}} in {found[0].name} line {found[1]} is read "
                    "from its clock.",
                )


def _own_configs(name: Optional[ast.expr], case: Case) -> set[Path]:
    """The configs that a script is started with: the named one, else those that name its classes, else any."""
    entry, configs = case.program.entry, case.tree.configs
    is_own = name is not None and "__file__" in identifiers(name)
    stem = entry.path.stem if is_own else str(constant(name)).rpartition("/")[2].partition(".")[0]
    named = {c for c in configs if c.stem == stem}
    targeted = {c for each in entry.classes for _, c in case.tree.targets.get(each, [])}
    return named or targeted or (set() if entry.classes else set(configs))


def _is_clock(call: ast.Call, unit: Unit) -> bool:
    name, tail = unit.source.qualified(call.func), last_name(call.func)
    if name == "time.strftime":
        return len(call.args) < 2 or bool(identifiers(call.args[1]) & {"localtime", "gmtime", "time"})
    if tail in ("now", "utcnow", "today"):
        is_spelt_out = isinstance(unit.source.parents.get(call), ast.Attribute)  # strftime of it is looked at instead
        return name.startswith("datetime.") and not is_spelt_out
    return isinstance(call.func, ast.Attribute) and bool(
        {"now", "utcnow", "today", "fromtimestamp"} & identifiers(call.func.value)
    )


def _path_use(node: ast.AST, unit: Unit, depth: int = 0) -> str:
    """Where a time ends up in a path: the expression or the name; "" for what is only printed or subtracted."""
    child, is_text = node, isinstance(node, ast.Call) and last_name(node) not in ("now", "utcnow", "today")
    for parent in unit.source.above(node):
        if isinstance(parent, ast.Call) and child is not parent.func:
            name = last_name(parent.func)
            if _LOG_NAMES.match(name) or name.startswith("broadcast"):
                return ""
            if name in _PATH_CALLS:
                return text_of(parent, 40)
        is_text = is_text or isinstance(parent, ast.JoinedStr)
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Div):
            return text_of(parent, 40)
        if isinstance(parent, ast.keyword) and parent.arg and _PATH_NAMES.search(parent.arg):
            return parent.arg
        if isinstance(parent, (ast.Assign, ast.AnnAssign)):
            return _bound_path(parent, unit, is_text or depth > 0, depth)
        if isinstance(parent, ast.Return):
            return f"the value of {unit.name}()" if _PATH_NAMES.search(unit.name) else ""
        if isinstance(parent, ast.stmt):
            return ""
        child = parent
    return ""


def _bound_path(assign: Union[ast.Assign, ast.AnnAssign], unit: Unit, is_text: bool, depth: int) -> str:
    targets = assign.targets if isinstance(assign, ast.Assign) else [assign.target]
    for target in targets:
        name = last_name(target)
        if _is_sent({name}, unit):
            return ""
        if is_text and re.search(r"(?i)(dir|path|folder|file)", name):
            return name
        if is_text and isinstance(target, ast.Attribute) and re.search(r"(?i)name$|suffix$|run_id$", name):
            return text_of(target, 40)
        if not isinstance(target, ast.Name) or depth > 2:
            continue
        for use in unit.all(ast.Name):
            if use.id == name and isinstance(use.ctx, ast.Load) and use.lineno >= assign.lineno:
                found = _path_use(use, unit, depth + 1)
                if found:
                    return f"{name}, in {found}" if depth == 0 and name not in found else found
    return ""


def _is_sent(names: set[str], unit: Unit) -> bool:
    """Whether the main rank's value is broadcast."""
    return any(
        last_name(call.func).startswith("broadcast") and identifiers(call) & names for call in unit.all(ast.Call)
    )
