"""Every private name of torch and Python that ddpshim stands on, and a canary for what each means.

A canary that fails on a new torch says what to re-read there. Where names for gradients are missing, `wrap_parallel`
refuses that torch.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import collections
import contextlib
import io
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.data import DataLoader, Dataset, get_worker_info

import ddpshim
from ddpshim.errors import SyncError
from ddpshim.model import torch_private
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say
from ddpshim.rows import gradients
from tests.preloaded_commands import patience
from tests.ranks import run_ranks

PACKAGE = Path(ddpshim.__path__[0])


class Seam(NamedTuple):
    """Private names, the file that uses them, the canary, and what to re-read where the canary fails."""

    names: str
    file: str
    canary: str
    read: str


WRAPPER = "torch/nn/parallel/distributed.py, DistributedDataParallel.__init__ and _ddp_init_helper"
REDUCER = "torch/csrc/distributed/c10d/reducer.cpp"
LOADER = "torch/utils/data/dataloader.py"
MODULE = "torch/nn/modules/module.py, Module.__init__"
SEAMS = [
    Seam("_NoopSaveInputs", "rows/gradients.py", "test_a_checkpoint_saves_its_arguments", "torch/utils/checkpoint.py"),
    Seam("_autograd_hook _check_reducer_finalized", "model/reducer.py", "test_torchs_reducer_armed_by_hand", REDUCER),
    Seam("_rebuild_buckets", "model/reducer.py", "test_torchs_reducer_armed_by_hand", REDUCER),
    Seam("_remove_autograd_hooks", "model/reducer.py", "test_torchs_reducer_armed_by_hand", REDUCER),
    Seam(
        "_C _distributed_c10d",
        "model/torch_private.py",
        "test_torchs_reducer_armed_by_hand",
        "torch/distributed/__init__.py",
    ),
    Seam("_set_params_and_buffers_to_ignore_for_model", "model/torch_private.py", "test_ignored_parameters", WRAPPER),
    Seam("_sync_module_states", "model/torch_private.py", "test_the_wrapper_sends_nothing", WRAPPER),
    Seam("_ddp_params_and_buffers_to_ignore", "model/torch_private.py", "test_ignored_parameters", WRAPPER),
    Seam("_build_params_for_reducer", "model/reducer.py", "test_torchs_reducer_armed_by_hand", WRAPPER),
    Seam("_build_debug_param_to_name_mapping", "model/reducer.py", "test_torchs_reducer_armed_by_hand", WRAPPER),
    Seam("_inside_ddp_forward", "model/reducer.py", "test_graphs_are_split_inside_of_ddps_forward", WRAPPER),
    Seam("_execution_engine", "model/torch_private.py", "test_a_callback_runs_at_the_end", "torch/autograd/graph.py"),
    Seam("_foreach_copy_", "model/torch_private.py", "test_copies_in_one_call", "torch/optim/_multi_tensor"),
    Seam("_foreach_norm", "robomimic/reads.py", "test_norms_in_one_call", "torch/nn/utils/clip_grad.py"),
    Seam("_BatchNorm", "model/wrapping.py", "test_batch_norms", "torch/nn/modules/batchnorm.py"),
    Seam(
        "_get_default_store",
        "job/process_group.py",
        "test_the_store_of_the_default_group",
        "torch/distributed/distributed_c10d",
    ),
    Seam("_BaseDataLoaderIter", "process/observed.py", "test_every_loader_goes_through_one_next", LOADER),
    Seam(
        "_workers _worker_pids_set _remove_worker_pids",
        "data/workers.py",
        "test_workers_are_found_and_let_go",
        LOADER,
    ),
    Seam("_iterator _index_sampler", "rows/loader.py", "test_workers_that_stay", LOADER),
    Seam("torch.utils.data._utils", "data/workers.py", "test_workers_are_found_and_let_go", LOADER),
    Seam("_worker_info _utils", "data/iterable.py", "test_hidden_worker_info", "torch/utils/data/_utils/worker.py"),
    Seam("_save _open_zipfile_writer", "checkpoint/snapshot.py", "test_save_writes_records", "torch/serialization.py"),
    Seam("_input_metadata", "tools/check/precision.py", "test_a_node_tells_the_dtype", "torch/csrc/autograd"),
    Seam("_orig_mod", "model/keys.py", "test_a_compiled_module_holds_its_own", "torch/_dynamo/eval_frame.py"),
    Seam("_parameters _buffers _modules", "model/wrapper.py", "test_a_modules_dictionaries", MODULE),
    Seam("_non_persistent_buffers_set", "model/wrapper.py", "test_a_modules_dictionaries", MODULE),
    Seam("_load_state_dict_post_hooks", "model/wrapper.py", "test_a_modules_dictionaries", MODULE),
    Seam("_apply _load_from_state_dict", "model/wrapper.py", "test_a_modules_dictionaries", MODULE),
    Seam(
        "_start",
        "launch/signals.py",
        "test_the_agent_starts_ranks_by",
        "torch/distributed/elastic/multiprocessing/api.py",
    ),
    Seam(
        "_get_sequence_number_for_group",
        "failures/unsynced_check.py",
        "test_a_group_counts_its_collectives",
        "torch/distributed/distributed_c10d",
    ),
    Seam("_make_wrapper_subclass _cdata", "rows/tensor.py", "test_a_tensor_of_another_shape", "torch/_tensor.py"),
    Seam("_to_copy", "rows/tensor.py", "test_a_tensor_of_another_shape", "torch/csrc/utils/tensor_new.cpp"),
    Seam("_VariableFunctions _nn", "rows/rules.py", "test_python_functions_call", "torch/nn/functional.py, _VF.py"),
    Seam("_builtins _get_builtin_table", "rows/calls.py", "test_script_finds_builtins", "torch/jit/_builtins.py"),
    Seam("_current_graph_task_id", "rows/tensor.py", "test_a_backward_pass_has_a_number", "torch/csrc/autograd"),
    Seam("_current_level", "rows/calls.py", "test_a_level_of_forward_derivatives", "torch/autograd/forward_ad.py"),
    Seam("_compiled_call_impl", "rows/calls.py", "test_a_module_compiled_in_place", MODULE),
    Seam("_is_torch_function_mode_enabled", "rows/calls.py", "test_a_mode_over_functions", "torch/overrides.py"),
    Seam("_functorch", "trainers/unedited/networks.py", "test_a_transform_is_seen", "torch/_functorch/pyfunctorch.py"),
    Seam("_version", "model/running_sum.py", "test_a_tensor_counts_its_changes", "torch/_tensor: documented"),
    Seam("_run_exitfuncs", "failures/failure.py", "test_exit_handlers_can_be_run", "Lib/atexit"),
    Seam("_inheriting", "auto.py", "test_a_spawned_child_knows", "Lib/multiprocessing/spawn.py"),
    Seam("_getframe", "trainers/unedited/hand_back.py", "test_frames", "Lib/sys"),
    Seam("_current_frames", "process/progress.py", "test_frames", "Lib/sys: documented"),
    Seam("_exit", "failures/failure.py", "test_frames", "Lib/os: documented"),
    Seam("_fields", "model/accumulation.py", "test_named_tuples", "Lib/collections: documented"),
    Seam("_asdict", "trainers/patching/patchset.py", "test_named_tuples", "Lib/collections: documented"),
    Seam("_SubParsersAction", "arguments.py", "test_frames", "only an annotation: argparse has no public name for it"),
    Seam(
        "_use_fd_functions",
        "trainers/unedited/private_files.py",
        "test_rmtree_compares_inodes",
        "Lib/shutil.py, rmtree",
    ),
    Seam("_config", "tools/check/new_files.py", "test_processes_share_a_folder", "Lib/multiprocessing/util.py"),
    Seam("_instances", "process/say.py", "test_an_open_progress_bar", "tqdm/std.py, tqdm.__new__"),
    Seam("_option_string_actions", "arguments.py", "test_options_of_a_parser", "argparse.py, _ActionsContainer"),
]
# Of robomimic's datasets and algorithms, tf.data, W&B, and wrappers of environments; evidence/new_release.py looks at
# robomimic's.
OF_CODEBASES = {
    *("_check_epoch", "_num_batch_steps", "_demo_id_to_demo_length", "_demo_id_to_start_indices", "_ds_ind_bins"),
    *("_demo_id_to_demo_lang_emb", "_hdf5_file", "_index_to_demo_id", "_lang_emb", "_data", "_data_loader", "_inputs"),
    *("_environment", "_torch_history", "_unwatch"),
}
# Words in strings that are no names: of metrics and of files.
NO_NAMES = {
    *("_pytest", "_io", "_frozen_importlib", "_frozen_importlib_external"),  # modules that are no program's own
    "_Ms",
    "_pre_hook",
    "_Ms_Max",
    "_epoch_",
    "_s",
    "_step_",
    "_test",
    "_get_ddp_logging_data",
    "_set_static_graph",
}


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
            elif isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "mine":
                defined.add(getattr(node.slice, "value", ""))  # wrappers keep theirs in their own dictionary
            found = {
                ast.Attribute: lambda n: [n.attr],
                ast.Constant: lambda n: [n.value] if isinstance(n.value, str) and n.value.isidentifier() else [],
                ast.ImportFrom: lambda n: [alias.name for alias in n.names],
            }.get(type(node), lambda n: [])(node)
            used.update({name: f"{file.name}:{node.lineno}" for name in found if re.match(r"_[^_]", name)})
    return {name: where for name, where in used.items() if name not in defined}


@pytest.mark.unit
def test_every_private_name_is_listed_with_a_canary() -> None:
    listed = {name for seam in SEAMS for name in seam.names.split()}
    ours = {"_ddpshim_reduced", "_ddpshim_files"}
    missing = {n: at for n, at in _private_names().items() if n not in listed | OF_CODEBASES | NO_NAMES | ours}
    assert not missing, "write down what each stands for in SEAMS, and what shows that it does"
    for seam in SEAMS:
        text = (PACKAGE / seam.file).read_text()
        assert all(name in text for name in seam.names.split()), f"{seam.file} uses {seam.names} no more"
        assert any(name.startswith(seam.canary) for name in globals()), f"no canary {seam.canary}"


@pytest.mark.unit
def test_nothing_private_is_imported_at_the_top_of_a_file() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ddpshim"):
                private = [n for n in [*(node.module or "").split("."), *(a.name for a in node.names)] if n[0] == "_"]
                assert not [n for n in private if n != "__future__"], f"{file}:{node.lineno}"


# Canaries.


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


@pytest.mark.unit
def test_an_open_progress_bar_is_known_until_it_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    bar = tqdm(total=2, file=io.StringIO())
    say("with a bar")
    bar.close()
    say("without")
    assert capsys.readouterr().err == "\nddpshim: with a bar\nddpshim: without\n"


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _arm_by_hand() -> list[Any]:
    torch_private.refuse_unknown_torch()
    net = _net()
    wrapped = DistributedDataParallel(net)
    parameters, are_sparse = wrapped._build_params_for_reducer()
    names = wrapped._build_debug_param_to_name_mapping(parameters)
    reducer: Any = wrapped.reducer
    reducer.prepare_for_backward([])
    x = torch.full((2, 4), float(dist.get_rank() + 1))
    net[:2](x).sum().backward()  # not through the wrapper, and not the last layer
    with contextlib.suppress(RuntimeError):
        reducer._check_reducer_finalized()
        raise AssertionError("it was not complete")
    reducer.prepare_for_backward([])
    net.zero_grad()

    def complete() -> None:
        for index, parameter in enumerate(parameters):
            if parameter.grad is None:
                reducer._autograd_hook(index)
        torch_private.at_end_of_pass(reducer._check_reducer_finalized)

    hidden = net[:2](x)
    hidden.register_hook(lambda gradient: torch_private.at_end_of_pass(complete))
    hidden.sum().backward()
    reducer._remove_autograd_hooks()
    return [
        net[0].weight.grad,
        [*names.values()],
        are_sparse,
        [id(p) for p in net.parameters()] == [*map(id, parameters)],
    ]


def test_torchs_reducer_armed_by_hand_waits_for_every_parameter() -> None:
    (first, names, are_sparse, is_in_order), (second, *_) = run_ranks(_arm_by_hand, 2)
    own = []
    for rank in (0, 1):
        net = _net()
        net[:2](torch.full((2, 4), float(rank + 1))).sum().backward()
        own.append(net[0].weight.grad)
    assert torch.equal(first, second)
    assert torch.equal(first, (own[0] + own[1]) / 2)
    assert (names, are_sparse, is_in_order) == (["0.weight", "0.bias", "2.weight", "2.bias"], [False] * 4, True)


def _ignore() -> list[str]:
    net = _net()
    take_back = torch_private.ignore_in_wrapper(net, ["0.weight"])
    wrapped = DistributedDataParallel(net)
    take_back()
    names = wrapped._build_debug_param_to_name_mapping(wrapped._build_params_for_reducer()[0])
    return [*names.values(), str(hasattr(net, "_ddp_params_and_buffers_to_ignore"))]


def test_ignored_parameters_are_left_out_while_the_wrapper_is_made() -> None:
    assert run_ranks(_ignore, 2)[0] == ["0.bias", "2.weight", "2.bias", "False"]


def _send_nothing() -> float:
    network = nn.Linear(1, 1)
    nn.init.constant_(network.weight, dist.get_rank())
    with torch_private.nothing_sent_at_first():
        DistributedDataParallel(network)
    return network.weight.item()


def test_the_wrapper_sends_nothing_when_it_is_told() -> None:
    assert run_ranks(_send_nothing, 2) == [0.0, 1.0]


class _Compiled(nn.Linear):
    """As torch.compile returns a network, which asks when it is called where graphs are to be split."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._orig_mod = None
        self.asked: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.asked.append(DistributedDataParallel._get_active_ddp_module())
        return super().forward(x)


def _call_compiled_networks() -> list[bool]:
    net, small, raw = _Compiled(), _Compiled(), _Compiled()
    wrapped, raw_ddp = ddpshim.wrap_parallel(net), DistributedDataParallel(raw)
    for call in (wrapped, ddpshim.wrap_parallel(small, bucket_cap_mb=0.1), raw_ddp):
        call(torch.ones(1, 2)).sum().backward()
    return [net.asked == [wrapped], wrapped.bucket_bytes_cap >= 2**20, small.asked == [None], raw.asked == [raw_ddp]]


def test_graphs_are_split_inside_of_ddps_forward() -> None:
    assert run_ranks(_call_compiled_networks, 2)[0] == [True] * 4


@pytest.mark.unit
def test_a_callback_runs_at_the_end_of_the_backward_pass() -> None:
    order: list[str] = []
    leaf = torch.ones(2, requires_grad=True)

    def begin(gradient: torch.Tensor) -> None:
        torch_private.at_end_of_pass(lambda: order.append(f"end, grad {leaf.grad.tolist()}"))  # type: ignore[union-attr]
        order.append("begin")

    (hidden := (leaf * 3)).register_hook(begin)
    hidden.sum().backward()
    order.append("returned")
    assert order == ["begin", "end, grad [3.0, 3.0]", "returned"]


@pytest.mark.unit
def test_copies_in_one_call_are_those_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        targets = [torch.zeros(2), torch.zeros(1, 3, dtype=torch.float64)]
        torch_private.copy_all(targets, [torch.ones(2), torch.full((1, 3), 2.0)])
        assert [t.tolist() for t in targets] == [[1, 1], [[2, 2, 2]]]
        monkeypatch.delattr(torch, "_foreach_copy_", raising=False)


@pytest.mark.unit
def test_norms_in_one_call_are_those_of_many() -> None:
    tensors = [torch.linspace(-1, 3, 7), torch.linspace(0, 1, 6).reshape(2, 3), torch.tensor(2.0)]
    assert [norm.item() for norm in torch._foreach_norm(tensors, 2)] == [t.norm(2).item() for t in tensors]


@pytest.mark.unit
def test_batch_norms_have_one_base() -> None:
    base = nn.modules.batchnorm._BatchNorm
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(issubclass(kind, base) for kind in kinds)
    assert not issubclass(nn.InstanceNorm1d, base)


def _same_store() -> str:
    store = dist.PrefixStore("canary", dist.distributed_c10d._get_default_store())
    if dist.get_rank() == 0:
        store.set("said", "by rank 0")
    return str(store.get("said").decode())


def test_the_store_of_the_default_group_is_shared() -> None:
    assert run_ranks(_same_store, 2) == ["by rank 0"] * 2


def _count() -> list[int]:
    counts = [dist.group.WORLD._get_sequence_number_for_group()]  # type: ignore[union-attr]
    for op in (lambda: dist.all_reduce(torch.ones(2)), lambda: DistributedDataParallel(nn.Linear(2, 2))):
        op()
        counts.append(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    dist.all_reduce(torch.ones(2), group=dist.new_group())
    return [*counts, dist.group.WORLD._get_sequence_number_for_group()]  # type: ignore[union-attr]


def test_a_group_counts_its_collectives() -> None:
    before, reduced, wrapped, in_another = run_ranks(_count, 2)[0]
    assert reduced == before + 1
    assert wrapped > reduced
    assert in_another == wrapped


@pytest.mark.unit
def test_a_tensor_counts_its_changes() -> None:
    x = torch.ones(3)
    before = x._version
    torch._foreach_mul_([x], 2.0)  # as clip_grad_norm_ does
    x.data.mul_(2)  # which is not counted
    assert x._version == before + 1


class _Squares(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index * index


@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 1])
def test_every_loader_goes_through_one_next(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import dataloader

    base, calls = dataloader._BaseDataLoaderIter, []
    original = base.__next__
    monkeypatch.setattr(base, "__next__", lambda batches: (calls.append(1), original(batches))[1])
    batches: Any = iter(DataLoader(_Squares(), num_workers=num_workers))
    assert [b.item() for b in batches] == [0, 1, 4, 9]
    assert len(calls) == 5


@pytest.mark.ranks
def test_workers_are_found_and_let_go() -> None:
    from torch.utils.data._utils import signal_handling

    batches: Any = iter(DataLoader(_Squares(), num_workers=1))
    assert batches._worker_pids_set
    signal_handling._remove_worker_pids(id(batches))
    batches._worker_pids_set = False
    (worker,) = batches._workers
    worker.kill()
    worker.join(patience(30))
    assert not worker.is_alive()  # torch would raise here at the signal of its end


@pytest.mark.ranks
def test_workers_that_stay_are_those_of_the_first_pass() -> None:
    loader: Any = DataLoader(_Squares(), num_workers=1, persistent_workers=True)
    assert loader._iterator is None
    assert iter(loader) is loader._iterator
    loader._iterator._shutdown_workers()


class _Informed(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[bool, bool, bool]:
        from ddpshim.data.iterable import _worker_info_hidden

        before = get_worker_info() is not None
        with _worker_info_hidden():
            inside = get_worker_info() is not None
        return before, inside, get_worker_info() is not None


@pytest.mark.ranks
def test_hidden_worker_info_is_what_torch_hands_out() -> None:
    assert [list(map(bool, b)) for b in DataLoader(_Informed(), num_workers=1)] == [[True, False, True]]


@pytest.mark.unit
def test_save_writes_records_by_name_and_address() -> None:
    class Records:
        def __init__(self) -> None:
            self.names: list[str] = []

        def write_record(self, name: str, content: Any, num_bytes: int) -> None:
            self.names.append(name)

    records = Records()
    torch.serialization._save({"w": torch.ones(3)}, records, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    assert {"data.pkl", "data/0"} <= set(records.names)
    with torch.serialization._open_zipfile_writer(file := io.BytesIO()) as writer:
        writer.write_record("data.pkl", b"x", 1)
    assert b"data.pkl" in file.getvalue()


@pytest.mark.unit
def test_a_node_tells_the_dtype_of_its_results() -> None:
    made = torch.ones(2, requires_grad=True).bfloat16().float()
    node: Any = made.grad_fn
    if not hasattr(node, "_input_metadata") and Version(torch.__version__).release < (2, 6):
        pytest.skip("this torch does not show the dtypes: every graph counts as float32 (docs/check.md)")
    assert [about.dtype for about in node._input_metadata] == [torch.float32]
    assert [about.dtype for about in node.next_functions[0][0]._input_metadata] == [torch.bfloat16]


@pytest.mark.launch  # of torch 2.1: it starts a process for its compiler
@pytest.mark.skipif(
    sys.version_info >= (3, 12) and Version(torch.__version__).release < (2, 4), reason="no torch.compile there"
)
def test_a_compiled_module_holds_its_own() -> None:
    net = _net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13's, of itself
        assert torch.compile(net)._orig_mod is net  # type: ignore[union-attr]


@pytest.mark.unit
def test_a_modules_dictionaries_are_what_it_is_made_of() -> None:
    class Probe(nn.BatchNorm1d):
        called: list[str]

        def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            self.called.append("_apply")
            return super()._apply(fn, *args, **kwargs)

        def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
            self.called.append("_load_from_state_dict")
            super()._load_from_state_dict(*args, **kwargs)

    net = Probe(2)
    net.called = []
    net.register_buffer("hidden", torch.ones(1), persistent=False)
    net.child = nn.Linear(1, 1)
    hooked = []
    net.register_load_state_dict_post_hook(lambda module, keys: hooked.append(module))
    assert [*net._parameters] == ["weight", "bias"]
    assert [*net._buffers] == ["running_mean", "running_var", "num_batches_tracked", "hidden"]
    assert ([*net._modules], net._non_persistent_buffers_set) == (["child"], {"hidden"})
    assert len(net._load_state_dict_post_hooks) == 1
    net.load_state_dict(net.double().state_dict())
    assert (net.called, hooked) == (["_apply", "_load_from_state_dict"], [net])


@pytest.mark.unit
def test_the_agent_starts_ranks_by_a_method_that_can_be_replaced() -> None:
    from torch.distributed.elastic.multiprocessing.api import PContext

    assert "self._start()" in Path(sys.modules[PContext.__module__].__file__ or "").read_text()
    assert callable(PContext._start)


@pytest.mark.launch
def test_exit_handlers_can_be_run_by_hand() -> None:
    code = "import atexit, os; atexit.register(print, 'ran', flush=True); atexit._run_exitfuncs(); os._exit(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(60))
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert callable(atexit._run_exitfuncs)


@pytest.mark.launch
def test_a_spawned_child_knows_that_it_is_one_before_its_main_module(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing\n"
        "print(__name__, getattr(multiprocessing.current_process(), '_inheriting', False), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=print, args=('child',))\n"
        "    child.start()\n    child.join()\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=patience(60))
    assert done.stdout.split("\n")[:3] == ["__main__ False", "__mp_main__ True", "child"]
    assert not multiprocessing.current_process().__dict__.get("_inheriting", False)


@pytest.mark.unit
def test_options_of_a_parser_are_found_by_their_names() -> None:
    parser = argparse.ArgumentParser()
    option = parser.add_argument("--a-b")
    parser._option_string_actions["--a_b"] = parser._option_string_actions["--a-b"]
    assert parser._option_string_actions["--a-b"] is option
    assert parser.parse_args(["--a_b", "1"]).a_b == "1"


@pytest.mark.unit
def test_frames_of_callers_have_their_names() -> None:
    assert sys._getframe(0).f_code.co_name == "test_frames_of_callers_have_their_names"
    assert sys._current_frames()[threading.get_ident()] is sys._getframe(0)
    assert callable(os._exit)


@pytest.mark.unit
def test_named_tuples_tell_their_fields() -> None:
    pair = collections.namedtuple("pair", "a b")(1, 2)
    assert (pair._fields, pair._asdict()) == (("a", "b"), {"a": 1, "b": 2})


@pytest.mark.unit
def test_a_torch_without_a_private_name_of_its_reducer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_private.refuse_unknown_torch()
    monkeypatch.setattr(torch_private, "REDUCER", (*torch_private.REDUCER, "_gone"))
    with pytest.raises(SyncError, match=r"has no Reducer\._gone, by which a backward pass activates DDP's reducer"):
        torch_private.refuse_unknown_torch()


class _Outer(torch.Tensor):
    seen: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Outer.seen.append(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return func(torch.ones(2, 3), *args[1:], **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Outer.seen.append(func.overloadpacket.__name__)
        return torch.ones(2, 3)


def _outer() -> Any:
    _Outer.seen = []
    return torch.Tensor._make_wrapper_subclass(_Outer, (5, 3), dtype=torch.float32, device="cpu")


@pytest.mark.unit
def test_a_tensor_of_another_shape_than_its_memory_is_asked_about_every_function() -> None:
    outer = _outer()
    with torch._C.DisableTorchFunctionSubclass():
        assert (tuple(outer.shape), outer.requires_grad) == ((5, 3), False)
    assert tuple(torch.relu(outer).shape) == (2, 3)
    assert _Outer.seen == ["relu"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.tensor of a tensor
        torch.tensor(_outer())
    assert set(_Outer.seen) <= {"detach", "_to_copy", "lift_fresh", "alias", "clone"}
    x = torch.ones(4)
    assert x[1:].untyped_storage()._cdata == x.untyped_storage()._cdata != x.clone().untyped_storage()._cdata


@pytest.mark.unit
def test_python_functions_call_these_builtins() -> None:
    outer = _outer()
    with replaced(nn.functional, "has_torch_function_variadic", lambda *given: False):
        nn.functional.pad(outer, (0, 1))
        nn.functional.cross_entropy(outer, torch.tensor([0, 1]))
    assert _Outer.seen[0] == "pad"
    assert "cross_entropy_loss" in _Outer.seen
    assert torch._VF.einsum is torch._C._VariableFunctions.einsum  # type: ignore[attr-defined]
    assert {torch._C._nn.mse_loss, torch._C._nn.nll_loss_nd}


@pytest.mark.unit
def test_processes_share_a_folder_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(tmp_path))  # type: ignore[attr-defined]
    assert multiprocessing.util.get_temp_dir() == str(tmp_path)
    assert multiprocessing.Process()._config["tempdir"] == str(tmp_path)  # type: ignore[attr-defined]


@pytest.mark.unit
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_finds_builtins_by_identity_and_calls_by_the_class() -> None:
    assert torch.jit._builtins._find_builtin(nn.functional.has_torch_function) == "aten::has_torch_function"
    assert id(nn.functional.has_torch_function) in torch.jit._builtins._get_builtin_table()
    seen: list[Any] = []
    for kind, script in ((torch.jit.ScriptFunction, nn.functional.relu), (torch._C.ScriptMethod, nn.ReLU())):
        with replaced(kind, "__call__", lambda *given: seen.append(given[1])):
            torch.jit.script(script)(1)
    assert seen == [1, 1]


@pytest.mark.unit
def test_a_backward_pass_has_a_number() -> None:
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(torch._C._current_graph_task_id()))
    x.sum().backward()
    assert seen[0] >= 0 > torch._C._current_graph_task_id()


@pytest.mark.unit
def test_a_level_of_forward_derivatives_is_open() -> None:
    assert torch.autograd.forward_ad._current_level < 0
    with torch.autograd.forward_ad.dual_level():
        assert torch.autograd.forward_ad._current_level >= 0


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
def test_a_mode_over_functions_is_seen() -> None:
    assert not torch._C._is_torch_function_mode_enabled()
    with torch.overrides.TorchFunctionMode():
        assert torch._C._is_torch_function_mode_enabled()


@pytest.mark.unit
def test_a_transform_is_seen() -> None:
    seen: list[bool] = []

    def square(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch._C._functorch.peek_interpreter_stack() is None)  # type: ignore[attr-defined]
        return x * x

    torch.func.grad(square)(torch.tensor(2.0))
    assert seen == [False]
    assert torch._C._functorch.peek_interpreter_stack() is None  # type: ignore[attr-defined]


@pytest.mark.unit
def test_a_checkpoint_saves_its_arguments() -> None:
    x = torch.rand(3, requires_grad=True)
    name = "_NoopSaveInputs"  # up to torch 2.12
    place = getattr(torch_checkpoint, name, types.SimpleNamespace(apply=None))
    with replaced(place, "apply", staticmethod(gradients._saved)):
        torch_checkpoint.checkpoint(lambda a, times: a.sin() * times, x, 2, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.cos())
