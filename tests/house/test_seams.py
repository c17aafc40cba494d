"""Every private name of torch and Python that ddpshim stands on, and a test of what each means.

On a new torch, look up here what to re-read for a test that fails. Where names for gradients are missing,
`wrap_parallel` refuses that torch.
"""

from __future__ import annotations

import ast
import atexit
import inspect
import io
import os
import re
import shutil
import sys
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.data import DataLoader

from ddpshim.process.replaced import replaced
from ddpshim.process.say import say
from ddpshim.rows import gradients
from tests.preloaded_commands import python

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ddpshim"


class Seam(NamedTuple):
    """Private names, the file that uses them, the test that fails where they mean something else, what to re-read."""

    names: str
    file: str
    test: str
    read: str


PARALLEL, ROWS = "same_gradients/test_parallel.py::test_", "same_gradients/test_rows.py::test_rules_equal_the_whole"
ONE_PROCESS = f"{PARALLEL}one_process_passes_everything_through"
STRICT = f"{PARALLEL}what_cannot_be_reduced_says_what_to_do"
TWICE = f"{PARALLEL}wrapping_twice_and_child_then_parent_reduces_once"
TORCHS_OWN = "same_gradients/test_torchs_own.py::test_wrap_parallel_in_ddps_place"
THREE_RANKS = "same_gradients/test_one_process.py::test_three_ranks_compute"
CAPTURED = "same_gradients/test_capture.py::test_what_is_not_certain"
ONCE = "same_samples/test_fetched_once.py::test_"
CHANGED = "same_gradients/test_one_process.py::test_captured_calls_see_what_changes"
SEEN = "test_a_backward_pass_forward_derivatives"
PRECISION = "tools/test_check.py::test_precision_of_a_backward_pass"
IN_BACKGROUND = "one_writer/test_background.py"
OF_TORCH = "tools/test_certificate.py::test_code_that_torch_writes"
SHARED = "same_gradients/test_unshared.py::test_after_setup_gradients_have"
COMMANDS = "one_writer/test_private_files.py::test_the_main_rank_runs_commands"
READS = "robomimic/test_robomimic.py::test_a_step_reads_all_norms_at_once"
AGENT = "torch/distributed/elastic/multiprocessing/api.py"
WRAPPER = "torch/nn/parallel/distributed.py, DistributedDataParallel.__init__ and _ddp_init_helper"
REDUCER = "torch/csrc/distributed/c10d/reducer.cpp"
DATA_UTILS = "torch/utils/data/_utils"
LOADER = "torch/utils/data/dataloader.py"
MODULE = "torch/nn/modules/module.py, Module.__init__"
C10D = "torch/distributed/distributed_c10d.py"
GRAPHS = "same_gradients/test_graphs.py::test_"
AT_ONCE = "same_gradients/test_at_once.py::"
SEAMS = [
    Seam(
        "_top_saved_tensors_default_hooks _saved_tensors_hooks_is_enabled _autograd",
        "rows/at_once.py",
        f"{AT_ONCE}test_no_product_has_more_rows",
        "torch/csrc/autograd/init.cpp",
    ),
    Seam("_post_accumulate_grad_hooks", "rows/graphs.py", f"{GRAPHS}bits_are_those", "torch/_tensor.py"),
    Seam("_schema", "rows/graphs.py", f"{GRAPHS}a_graph_replays", "torch/_ops.py, OpOverload"),
    Seam("_AutoDispatchBelowAutograd", "rows/graphs.py", f"{GRAPHS}bits_are_those", "torch/csrc/autograd/init.cpp"),
    Seam("_backward_hooks", "rows/at_once.py", f"{AT_ONCE}test_numbers_are_those", "torch/_tensor.py"),
    Seam("_lru_cache_wrapper", "rows/capture.py", f"{AT_ONCE}test_numbers_are_those", "functools.py"),
    Seam("_wrapped_call_impl", "failures/memory.py", f"{AT_ONCE}test_an_error_of_memory_names_the_call", MODULE),
    Seam("_NoopSaveInputs", "rows/gradients.py", "test_a_checkpoint_saves_its_arguments", "torch/utils/checkpoint.py"),
    Seam("_rebuild_buckets", "model/ddp.py", f"{PARALLEL}buckets_leave_in_the_order", REDUCER),
    Seam("_static_graph_delay_allreduce_enqueued", "model/ddp.py", STRICT, WRAPPER),
    Seam("_register_buffer_comm_hook", "model/ddp.py", TORCHS_OWN, WRAPPER),
    Seam("_set_params_and_buffers_to_ignore_for_model", "model/ddp.py", TWICE, WRAPPER),
    Seam("_ddp_params_and_buffers_to_ignore", "model/ddp.py", TWICE, WRAPPER),
    Seam("_foreach_norm", "robomimic/calls.py", READS, "torch/nn/utils/clip_grad.py"),
    Seam("_BatchNorm", "model/wrapping.py", f"{PARALLEL}batchnorm_", "torch/nn/modules/batchnorm.py"),
    Seam("_get_default_store", "job/process_group.py", "house/test_trust.py::test_what_somebody_wrote_to", C10D),
    Seam("_BaseDataLoaderIter", "process/observed.py", "test_every_loader_goes_through_one_next", LOADER),
    Seam("_DatasetKind", "rows/samples.py", f"{ONCE}batches_of_three", "torch/utils/data/dataloader.py"),
    Seam("_utils ExceptionWrapper", "rows/samples.py", f"{ONCE}batches_of_three", "torch/_utils.py"),
    Seam("_utils _worker_info WorkerInfo", "rows/probe.py", f"{ONCE}the_first_workers", f"{DATA_UTILS}/worker.py"),
    Seam(
        "_utils default_collate_fn_map", "rows/loader.py", f"{ONCE}entries_of_the_program", f"{DATA_UTILS}/collate.py"
    ),
    Seam("get_traced_code", "rows/capture.py", CAPTURED, "torch/_dynamo/utils.py"),
    Seam("_wrapper _ctypes", "rows/probe.py", f"{ONCE}the_probe", "multiprocessing/sharedctypes.py"),
    Seam("_iterator", "rows/loader.py", "test_workers_that_stay", LOADER),
    Seam("_remote_module_", "tools/certificate.py", OF_TORCH, "torch/distributed/nn/jit/instantiator.py"),
    Seam("_input_metadata", "tools/watching.py", PRECISION, "torch/csrc/autograd"),
    Seam("_orig_mod", "model/wrapper.py", "test_a_compiled_module_holds", "torch/_dynamo/eval_frame.py"),
    Seam("_parameters _buffers _modules _non_persistent_buffers_set", "model/wrapper.py", ONE_PROCESS, MODULE),
    Seam("_load_state_dict_post_hooks _apply", "model/wrapper.py", ONE_PROCESS, MODULE),
    Seam("_load_from_state_dict", "model/wrapper.py", f"{PARALLEL}keys_with_and_without_prefixes_load", MODULE),
    Seam("_start", "launch/runner.py", "test_the_agent_starts_ranks_by", AGENT),
    Seam("_get_sequence_number_for_group", "process/observed.py", SHARED, C10D),
    Seam("_make_wrapper_subclass _cdata", "rows/tensor.py", ROWS, "torch/_tensor.py"),
    Seam("_to_copy", "rows/tensor.py", ROWS, "torch/csrc/utils/tensor_new.cpp"),
    Seam("_VariableFunctions _nn", "rows/rules.py", ROWS, "torch/nn/functional.py, _VF.py"),
    Seam("_builtins _get_builtin_table", "rows/calls.py", ROWS, "torch/jit/_builtins.py"),
    Seam("_get_trace_graph", "rows/calls.py", THREE_RANKS, "torch/jit/_trace.py"),
    Seam("_is_view _base", "rows/tape.py", THREE_RANKS, "torch/_tensor.py, torch.Tensor._base"),
    Seam("_current_graph_task_id", "rows/tensor.py", SEEN, "torch/csrc/autograd"),
    Seam("_current_level", "rows/calls.py", SEEN, "torch/autograd/forward_ad.py"),
    Seam("_compiled_call_impl", "rows/calls.py", "test_a_module_compiled_in_place", MODULE),
    Seam("_C _is_torch_function_mode_enabled", "rows/calls.py", SEEN, "torch/overrides.py"),
    Seam("_debug_get_cache_entry_list _dynamo", "rows/capture.py", CHANGED, "torch/_dynamo/eval_frame.py"),
    Seam("_is_in_optimized_module", "rows/capture.py", CHANGED, "torch/_dynamo/variables/torch.py"),
    Seam("_global_ _subclasses", "rows/capture.py", CHANGED, "torch/nn/modules/module.py"),
    Seam("_log_api_usage_once", "rows/capture.py", CAPTURED, "torch/csrc/Module.cpp"),
    Seam("_assert_async", "rows/capture.py", CAPTURED, "torch/_dynamo/symbolic_convert.py"),
    Seam(
        "_sampler_iter _index_sampler", "rows/loader.py", "resume/test_resume.py::test_a_pass_over_row_tensors", LOADER
    ),
    Seam("_get_current_dispatch_mode _python_dispatch", "rows/capture.py", CHANGED, "torch/utils/_python_dispatch.py"),
    Seam("_set_grad_enabled", "rows/capture.py", CHANGED, "torch/autograd/grad_mode.py"),
    Seam("_functorch", "trainers/unedited/networks.py", SEEN, "torch/_functorch/pyfunctorch.py"),
    Seam("_run_exitfuncs", "failures/failure_notes.py", "test_exit_handlers_can_be_run", "Lib/atexit"),
    Seam("_inheriting", "auto.py", "launch/test_unedited.py::test_auto_starts_a_rank", "Lib/multiprocessing/spawn.py"),
    Seam("_pytree", "checkpoint/files.py", f"{IN_BACKGROUND}::test_an_error_in_the_back", "torch/utils/_pytree.py"),
    Seam("_use_fd_functions", "trainers/unedited/private_files.py", "test_rmtree_compares_inodes", "Lib/shutil.py"),
    Seam("_wrap_close", "trainers/unedited/clock.py", COMMANDS, "Lib/os.py, os.popen"),
    Seam("_config", "tools/new_files.py", "tools/test_check.py::test_images_augmented", "Lib/multiprocessing"),
    Seam("_instances", "process/say.py", "test_an_open_progress_bar", "tqdm/std.py, tqdm.__new__"),
    Seam("_option_string_actions", "__main__.py", "tools/test_command_line.py::test_torchruns_spellings", "argparse"),
]
# These are documented, or only in an annotation.
PUBLIC = {"_version", "_getframe", "_current_frames", "_exit", "_fields", "_asdict", "_SubParsersAction"}
# Of robomimic's datasets and algorithms, tf.data, W&B, and wrappers of environments.
OF_CODEBASES = {
    *("_check_epoch", "_num_batch_steps", "_demo_id_to_demo_length", "_demo_id_to_start_indices", "_ds_ind_bins"),
    *("_demo_id_to_demo_lang_emb", "_hdf5_file", "_index_to_demo_id", "_lang_emb", "_data", "_inputs"),
    *("_environment", "_torch_history", "_unwatch", "_watch"),
}
# Words in strings that are no names: of metrics and of files.
NO_NAMES = {"_io", "_epoch_", "_step_", "_get_ddp_logging_data"}


def _private_names() -> dict[str, str]:
    """The private names that the package uses and does not define, and where."""
    trees = {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
    defined, used = set(), {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                is_own = isinstance(node, ast.Name) or getattr(node.value, "id", "") in ("self", "cls")
                defined.update([node.id if isinstance(node, ast.Name) else node.attr] if is_own else [])
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("mine", "self.__dict__"):
                defined.add(getattr(node.slice, "value", ""))  # wrappers keep theirs in their own dictionary
            found = [node.attr] if isinstance(node, ast.Attribute) else []
            found += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            found += [str(node.value)] if isinstance(node, ast.Constant) and str(node.value).isidentifier() else []
            used.update({name: f"{file.name}:{node.lineno}" for name in found if re.match(r"_[^_]", name)})
    return {name: where for name, where in used.items() if name not in defined}


@pytest.mark.unit
def test_every_private_name_is_listed_with_a_test() -> None:
    listed = {name for seam in SEAMS for name in seam.names.split()} | PUBLIC
    ours = {"_ddpshim_reduced", "_ddpshim_files"}
    missing = {n: at for n, at in _private_names().items() if n not in listed | OF_CODEBASES | NO_NAMES | ours}
    assert not missing, "write down what each stands for in SEAMS, and what shows that it does"
    for seam in SEAMS:
        text = (PACKAGE / seam.file).read_text()
        assert all(name in text for name in seam.names.split()), f"{seam.file} uses {seam.names} no more"
        file, _, test = seam.test.rpartition("::")
        found = (ROOT / "tests" / file if file else Path(__file__)).read_text()
        assert f"\ndef {test}" in found, f"no test {seam.test}"


@pytest.mark.unit
def test_nothing_private_is_imported_at_the_top_of_a_file() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ddpshim"):
                private = [n for n in [*(node.module or "").split("."), *(a.name for a in node.names)] if n[0] == "_"]
                assert not [n for n in private if n != "__future__"], f"{file}:{node.lineno}"


@pytest.mark.unit
def test_what_is_replaced_is_on_one_list() -> None:
    rows = [
        line.split("|")[1:3] for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.count("|") == 5
    ]
    listed = {file: names for files, names in rows for file in re.findall(r"`(\w+/\S+)`", files)}
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in ("replaced", "in_place"):
                owner, *name = call.args[:2] if call.func.id == "replaced" else (None,)
                is_ours = isinstance(owner, ast.Call) or getattr(owner, "id", "") in (
                    "self",
                    "state",
                    "recorder",
                    "calls",
                )
                if not is_ours:
                    names = {node.value for node in name if isinstance(node, ast.Constant)}
                    found.setdefault(str(path.relative_to(PACKAGE)), set()).update(names)
    assert found.keys() == listed.keys()
    for file, names in found.items():
        assert not [name for name in names if not re.search(rf"\b{name}\b", listed[file])], file
    for files, names in rows:
        texts = " ".join((PACKAGE / file).read_text() for file in re.findall(r"`(\w+/\S+)`", files))
        lost = [name for name in re.findall(r"`([^`]+)`", names) if texts and name.rpartition(".")[2] not in texts]
        assert not lost, f"{files} has no {lost}"


# Tests of names whose meaning no other test shows.


@pytest.mark.unit
def test_rmtree_compares_inodes_only_with_open_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    open_folder = os.open
    for removes, by_descriptor in ((False, True), (True, False)):
        (tmp_path / "old" / "inner").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(shutil, "_use_fd_functions", by_descriptor)
        with monkeypatch.context() as patch:  # the folder that is opened is another one
            patch.setattr(os, "open", lambda path, *args, **words: open_folder(tmp_path / "other", os.O_RDONLY))
            shutil.rmtree(tmp_path / "old", ignore_errors=True)
        assert (tmp_path / "old").exists() != removes


@pytest.mark.launch  # of torch 2.1: it starts a process for its compiler
@pytest.mark.skipif(
    sys.version_info >= (3, 12) and Version(torch.__version__).release < (2, 4), reason="no torch.compile there"
)
def test_a_compiled_module_holds_its_own() -> None:
    net = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13's, of itself
        assert torch.compile(net)._orig_mod is net  # type: ignore[union-attr]


@pytest.mark.unit
def test_an_open_progress_bar_is_known_until_it_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    bar = tqdm(total=2, file=io.StringIO())
    say("with a bar")
    bar.close()
    say("without")
    assert capsys.readouterr().err == "\nddpshim: with a bar\nddpshim: without\n"


@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 1])
def test_every_loader_goes_through_one_next(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import dataloader

    base, calls = dataloader._BaseDataLoaderIter, []
    original = base.__next__
    monkeypatch.setattr(base, "__next__", lambda batches: (calls.append(1), original(batches))[1])
    batches: Any = iter(DataLoader([0, 1, 4, 9], num_workers=num_workers))
    assert [b.item() for b in batches] == [0, 1, 4, 9]
    assert len(calls) == 5


@pytest.mark.ranks
def test_workers_that_stay_are_those_of_the_first_pass() -> None:
    loader: Any = DataLoader([0, 1, 4, 9], num_workers=1, persistent_workers=True)
    assert loader._iterator is None
    assert iter(loader) is loader._iterator
    loader._iterator._shutdown_workers()


@pytest.mark.unit
def test_the_agent_starts_ranks_by_a_method_that_can_be_replaced() -> None:
    from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

    assert re.search(r"signal\.signal\((?s:.*)self\._start\(\)", inspect.getsource(PContext.start))
    assert SubprocessContext.start is PContext.start
    assert callable(vars(SubprocessContext)["_start"])


@pytest.mark.launch
def test_exit_handlers_can_be_run_by_hand() -> None:
    code = "import atexit, os; atexit.register(print, 'ran', flush=True); atexit._run_exitfuncs(); os._exit(3)"
    assert python("-c", code, code=3) == "ran\n"
    assert callable(atexit._run_exitfuncs)


@pytest.mark.unit
def test_a_backward_pass_forward_derivatives_a_mode_and_a_transform_are_seen() -> None:
    seen: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(torch._C._current_graph_task_id()))
    x.sum().backward()
    assert seen[0] >= 0 > torch._C._current_graph_task_id()
    assert torch.autograd.forward_ad._current_level < 0
    with torch.autograd.forward_ad.dual_level():
        assert torch.autograd.forward_ad._current_level >= 0
    assert not torch._C._is_torch_function_mode_enabled()
    with torch.overrides.TorchFunctionMode():
        assert torch._C._is_torch_function_mode_enabled()
    transforms: Any = torch._C._functorch  # type: ignore[attr-defined]
    torch.func.grad(lambda x: seen.append(transforms.peek_interpreter_stack()) or x * x)(torch.tensor(2.0))
    assert seen[1] is not None
    assert transforms.peek_interpreter_stack() is None


@pytest.mark.unit
def test_a_module_compiled_in_place_has_another_call() -> None:
    net = nn.Linear(2, 2)
    if not hasattr(net, "compile"):  # torch 2.1
        pytest.skip("this torch has no Module.compile")
    assert getattr(net, "_compiled_call_impl", None) is None
    with replaced(torch, "compile", lambda call, *args, **kwargs: call):
        net.compile()
    assert net._compiled_call_impl is not None


@pytest.mark.unit
def test_a_checkpoint_saves_its_arguments() -> None:
    x = torch.rand(3, requires_grad=True)
    name = "_NoopSaveInputs"  # up to torch 2.12
    place = getattr(torch_checkpoint, name, types.SimpleNamespace(apply=None))
    with replaced(place, "apply", staticmethod(gradients._saved)):
        torch_checkpoint.checkpoint(lambda a, times: a.sin() * times, x, 2, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.cos())
