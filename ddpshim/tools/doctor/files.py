"""Holds the rules about writes, prompts, loggers and deletions that every rank would repeat."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Optional

from ddpshim.tools.doctor.meaning import speaks_of_rank
from ddpshim.tools.doctor.nodes import argument, constant, identifiers, last_name, spreads, values_of, words_of
from ddpshim.tools.doctor.paths import clocks
from ddpshim.tools.doctor.rules import Case, Hit, call_rule, rule, text_of
from ddpshim.tools.doctor.source import Unit

# Functions that write to the path in their first argument, and in their second.
_WRITES_FIRST = words_of(
    "numpy.save numpy.savez numpy.savez_compressed numpy.savetxt matplotlib.pyplot.savefig imageio.imwrite "
    "imageio.mimsave imageio.mimwrite imageio.get_writer cv2.imwrite cv2.VideoWriter os.mkdir os.rename os.replace"
)
_WRITES_SECOND = words_of(
    "torch.save json.dump pickle.dump yaml.dump yaml.safe_dump joblib.dump shutil.copy shutil.copyfile shutil.copy2 "
    "shutil.copytree shutil.move omegaconf.OmegaConf.save torchvision.utils.save_image safetensors.torch.save_file "
    "os.symlink"
)
_WRITER_KEYWORDS = {"dst", "fname", "path", "filename", "stream", "fp"}
_WRITING_METHODS = {"write_text", "write_bytes", "to_csv", "to_pickle", "to_parquet", "save_pretrained", "symlink_to"}
_WRITE_NAMES = {
    *(name.rpartition(".")[2] for name in _WRITES_FIRST | _WRITES_SECOND),
    *("open", "File", "makedirs", "mkdir", *_WRITING_METHODS),
}
_LOGGERS = words_of(
    "torch.utils.tensorboard.SummaryWriter torch.utils.tensorboard.writer.SummaryWriter tensorboardX.SummaryWriter "
    "tensorboard.SummaryWriter wandb.init mlflow.start_run comet_ml.Experiment comet_ml.start neptune.init_run "
    "neptune.init aim.Run swanlab.init clearml.Task.init"
)
_LOGGER_NAMES = {name.rpartition(".")[2] for name in _LOGGERS}
_DELETERS = {"shutil.rmtree", "os.remove", "os.unlink", "os.rmdir", "os.removedirs"}
_OPENERS = {"open", "BytesIO", "StringIO", "NamedTemporaryFile", "TemporaryFile", "mkstemp"}
_FILE_NAMES = {"f", "fp", "file", "buffer", "buf", "fout", "stream", "sys.stdout"}
_OWN_PATHS = words_of("getpid tempfile mkdtemp mkstemp uuid4 gettempdir TemporaryDirectory NamedTemporaryFile")
_LOCK = re.compile(r"(?i)^(file|soft|inter_?process|acquire_?\w*)_?lock$|^acquire\w*$|^flock$")
_OF_ALL = re.compile(r"(?i)(^|_)(cache|caches|cached|tmp|temp|download\w*)($|_|\.)|\.lock$")
_LOG_NAMES = re.compile(
    r"(?i)^(print|debug|info|warning|warn|error|critical|exception|log|write|writelines|rank0_print)$"
)
_PATH_CALLS = {"join", "Path", "makedirs", "mkdir", "open", "SummaryWriter", "joinpath"}
_PATH_NAMES = re.compile(r"(?i)(dir|path|folder|file|run|exp|stamp|time_?str|now_?str|name|suffix|prefix|version)")
_CLOCKS = {"now", "utcnow", "today"}


@call_rule("DDP401", *_WRITE_NAMES)
def every_rank_writes(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    target = _written(call, unit, case)
    if target is None or identifiers(target) & {"devnull", "/dev/null", "fileno", "stdout"}:
        return None
    if _is_shared_file(target, unit, case) or _is_own(target, unit, case) or _needs_argument(call, unit, case):
        return None
    if case.is_guarded(call, unit) or any(case.test(value, unit) for value in values_of(call)):
        return None  # save_pretrained(path, is_main_process=...) checks the rank itself
    return f"Every rank runs {text_of(call)}, on the same path at the same time."


def _written(call: ast.Call, unit: Unit, case: Case) -> Optional[ast.expr]:
    """Return the path (or file) that the call writes; None if it does not write."""
    name, tail = unit.source.qualified(call.func), last_name(call)
    if name in ("open", "io.open", "gzip.open", "h5py.File"):
        mode = constant(argument(call, "mode", 1))
        is_write = isinstance(mode, str) and any(letter in mode for letter in "wax")
        return argument(call, "file", 0) or argument(call, "name", 0) if is_write else None
    if name in _WRITES_FIRST | _WRITES_SECOND:
        named = (k.value for k in call.keywords if k.arg in _WRITER_KEYWORDS)
        return argument(call, "f", 1 if name in _WRITES_SECOND else 0) or next(named, None)
    may_exist = constant(argument(call, "exist_ok", 2)) is True
    if name == "os.makedirs":
        return argument(call, "name", 0) if not may_exist else None
    if not isinstance(call.func, ast.Attribute):
        return None
    if tail == "mkdir":
        return call.func.value if not may_exist else None
    if tail == "open" and not name.endswith("os.open"):
        # av.open(path, mode="w") is a function, path.open("w") a method
        is_module = isinstance(call.func.value, ast.Name) and call.func.value.id in unit.source.names
        target = argument(call, "file", 0) if is_module else call.func.value
        mode = constant(argument(call, "mode", 1 if is_module else 0))
        return target if mode in ("w", "wb", "a", "ab", "x", "xb", "wt", "at") else None
    if tail in ("write_text", "write_bytes", "symlink_to"):
        return call.func.value
    # A writing method of the program itself is checked at the calls inside it.
    is_own = any(tail in source.methods for source in case.program.files)
    return call.args[0] if tail in _WRITING_METHODS and call.args and not is_own else None


def _needs_argument(node: ast.AST, unit: Unit, case: Case) -> bool:
    """Whether a test around the node needs a parameter that is None or False by default and that no caller passes."""
    if isinstance(unit.node, ast.Module):
        return False
    arguments = unit.node.args
    pairs = [*zip(reversed([*arguments.posonlyargs, *arguments.args]), reversed(arguments.defaults))]
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults) if d is not None]
    optional = {a.arg for a, default in pairs if isinstance(default, ast.Constant) and default.value in (None, False)}
    tested = {name for test in unit.source.tests_around(node, ast.If) for name in identifiers(test)}
    sites = case.sites_of(unit) if optional & tested else []
    if not sites or any(spreads(call) for _, call in sites):
        return False
    return any(not any(case.passed(name, unit, None)) for name in optional & tested)


def _is_shared_file(target: ast.expr, unit: Unit, case: Case) -> bool:
    """Whether the target is an open file or buffer: then the call that opened it is reported, not this one."""
    if not isinstance(target, ast.Name):
        return isinstance(target, ast.Call) and last_name(target) == "open"
    for _, binding in case.reaching(target, unit):
        is_opened = isinstance(binding.value, ast.Call) and last_name(binding.value) in _OPENERS
        if is_opened or isinstance(binding.statement, (ast.With, ast.AsyncWith)):
            return True
    return target.id in _FILE_NAMES


def _is_own(target: ast.expr, unit: Unit, case: Case) -> bool:
    """Whether each rank has its own path, a lock lets one write at a time, or it is a cache or a temporary file."""
    made = {word for _, value in [(unit, target), *case.values(target, unit)] for word in identifiers(value)}
    if any(map(_LOCK.search, unit.words)) or any(map(_OF_ALL.search, (*made, unit.name))):
        return True
    items = {n.id for loop in unit.all(ast.For) for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    parts = (n for n in ast.walk(target) if isinstance(n, ast.Subscript))
    if any(isinstance(n, ast.Name) and n.id in items for part in parts for n in ast.walk(part)):
        return True  # one file per sample, and each rank has other samples
    return case.holds(target, unit, lambda node: speaks_of_rank(node) or bool(identifiers(node) & _OWN_PATHS))


@call_rule("DDP402", "input")
def every_rank_prompts(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    is_builtin = isinstance(call.func, ast.Name) and "input" not in unit.parameters
    if not is_builtin or case.is_guarded(call, unit):
        return None
    return f"Every rank waits for an answer to {text_of(call)}, and none of them has a terminal."


@call_rule("DDP403", *_LOGGER_NAMES)
def every_rank_logs(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    # `self.wandb = wandb`, then `self.wandb.init(...)`
    is_alias = last_name(call) == "init" and any(k.arg == "project" for k in call.keywords)
    if unit.source.qualified(call.func) not in _LOGGERS and not is_alias:
        return None
    is_told = any(map(speaks_of_rank, values_of(call))) or argument(call, "group") is not None
    if is_told or case.is_guarded(call, unit):
        return None
    return f"Every rank opens {text_of(call.func)} and logs the same run again."


@call_rule("DDP404", "rmtree", "remove", "unlink", "rmdir", "removedirs")
def every_rank_deletes(call: ast.Call, unit: Unit, case: Case) -> Optional[str]:
    target = None
    if unit.source.qualified(call.func) in _DELETERS:
        target = argument(call, "path", 0)
    elif last_name(call) in ("unlink", "rmdir") and isinstance(call.func, ast.Attribute) and not call.args:
        target = call.func.value
    if target is None or _is_own(target, unit, case) or case.is_guarded(call, unit):
        return None
    return f"Every rank runs {text_of(call)}: one deletes what another still uses, or finds it gone."


@rule("DDP405")
def path_differs_by_rank(case: Case) -> Iterator[Hit]:
    for unit, call in case.calls("strftime", "isoformat", "ctime", *_CLOCKS):
        is_read = _is_clock(call, unit) and unit.name not in ("__repr__", "__str__")
        use = _path_use(call, unit) if is_read else ""
        if use and not case.is_guarded(call, unit):
            yield Hit(unit, call, f"Each rank reads its own clock: {text_of(call)} in {use} may differ between ranks.")
    source = case.program.entry
    for unit in (source.module, source.main):  # scripts whose hydra config puts the time into the run folder
        for call in unit.all(ast.Call):
            wanted = case.configs() if source.qualified(call.func) == "hydra.main" else {}
            for path, line in list(clocks(wanted))[:1]:
                read = f"${{now:}} in {path.name} line {line} is read from its clock"
                yield Hit(unit, call, f"Each rank makes its own run folder: {read}.")


def _is_clock(call: ast.Call, unit: Unit) -> bool:
    name = unit.source.qualified(call.func)
    if name == "time.strftime":
        return len(call.args) < 2 or bool(identifiers(call.args[1]) & {"localtime", "gmtime", "time"})
    if last_name(call) in _CLOCKS:
        is_spelt_out = isinstance(unit.source.parents.get(call), ast.Attribute)  # reported at its strftime
        return name.startswith("datetime.") and not is_spelt_out
    read = identifiers(call.func.value) if isinstance(call.func, ast.Attribute) else set[str]()
    return bool((_CLOCKS | {"fromtimestamp"}) & read)


def _path_use(node: ast.AST, unit: Unit, depth: int = 0) -> str:
    """Return the expression or name in which a time becomes part of a path; "" if it is only printed or subtracted."""
    child, is_text = node, isinstance(node, ast.Call) and last_name(node) not in _CLOCKS
    for parent in unit.source.above(node):
        if isinstance(parent, ast.Call) and child is not parent.func:
            name = last_name(parent)
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
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return _bound_path(targets, parent.lineno, unit, is_text or depth > 0, depth)
        if isinstance(parent, ast.Return):
            return f"the value of {unit.name}()" if _PATH_NAMES.search(unit.name) else ""
        if isinstance(parent, ast.stmt):
            return ""
        child = parent
    return ""


def _bound_path(targets: Sequence[ast.expr], line: int, unit: Unit, is_text: bool, depth: int) -> str:
    """Do the same as `_path_use` for a time that is bound to these targets in `line`."""
    sends = [call for call in unit.all(ast.Call) if last_name(call).startswith("broadcast")]
    for target in targets:
        name = last_name(target)
        if any(name in identifiers(call) for call in sends):
            return ""  # all ranks get the main rank's value
        if is_text and re.search(r"(?i)(dir|path|folder|file)", name):
            return name
        if is_text and isinstance(target, ast.Attribute) and re.search(r"(?i)name$|suffix$|run_id$", name):
            return text_of(target, 40)
        for use in unit.uses(name) if isinstance(target, ast.Name) and depth <= 2 else ():
            found = _path_use(use, unit, depth + 1) if use.lineno >= line else ""
            if found:
                return f"{name}, in {found}" if depth == 0 and name not in found else found
    return ""
