"""Adds to a CPU build of torch the names that a CUDA build has in `torch._C`; torch's own Python does the rest.

site/sitecustomize.py loads it; it imports nothing else of the repository.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import sys
import time
import types
from typing import Any, Callable

_GIGABYTES = 8


def prepare(library: str) -> None:
    """Add simulated GPUs to the torch that is imported later. Cheap: nothing is loaded before that."""
    begun = _Begin(library)
    sys.meta_path.insert(
        0,
        _Finder(
            {
                "torch": (begun.load_device, None),
                "torch.cuda": (begun.fill_c, begun.fill_cuda),
                "torch.storage": (nothing, begun.fill_storage),
                "torch.backends.cudnn": (nothing, begun.fill_cudnn),
                "torch.distributed.distributed_c10d": (begun.fill_c10d, None),
            }
        ),
    )


def nothing(*_: Any) -> None:
    """Do nothing."""


class _Finder(importlib.abc.MetaPathFinder):
    """Calls functions before and after modules are executed."""

    def __init__(self, calls: dict[str, tuple[Callable[[], None], Any]]) -> None:
        self._calls = calls

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._calls:
            return None
        before, after = self._calls.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            before()
            run(module)
            if after is not None:
                after()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Begin:
    def __init__(self, library: str) -> None:
        self._library = library
        self._extension: Any = None

    def load_device(self) -> None:
        """Register the GPUs, before torch first checks whether there are any."""
        ctypes.CDLL(os.path.join(self._library, "simulated_gpus_c.so"), ctypes.RTLD_GLOBAL)

    def fill_c(self) -> None:
        """Add the names to torch._C, before torch.cuda checks whether it was built for CUDA."""
        spec = importlib.util.spec_from_file_location(
            "simulated_gpus_c", os.path.join(self._library, "simulated_gpus_c.so")
        )
        assert spec is not None
        assert spec.loader is not None
        extension = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(extension)
        sys.modules["simulated_gpus_c"] = self._extension = extension
        names = _names(extension)
        c = sys.modules["torch._C"]
        for name, value in names.items():
            setattr(c, name, value)
        sys.modules["torch._C._cudart"] = names["_cudart"]
        if os.environ.get("SIMULATED_GPUS_GENERATOR") == "cpu":
            extension.use_host_generator(True)

    def fill_cuda(self) -> None:
        """Replace torch.cuda's calls of NVIDIA's own libraries."""
        cuda = sys.modules["torch.cuda"]
        cuda._device_count_nvml = lambda: -1  # type: ignore[attr-defined]
        cuda.utilization = lambda device=None: 50  # type: ignore[attr-defined]

    def fill_storage(self) -> None:
        """Allocate GPU memory for `torch.UntypedStorage(size, device="cuda")`, which copies of tensors use."""
        storage = sys.modules["torch.storage"].UntypedStorage
        make = storage.__new__

        def new(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
            import torch

            if device is None or torch.device(device).type != "cuda" or args[1:]:
                return make(cls, *args, **options, **({} if device is None else {"device": device}))
            size = args[0] if args else 0
            return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

        storage.__new__ = new

    def fill_cudnn(self) -> None:
        sys.modules["torch.backends.cudnn"].is_acceptable = lambda tensor: False  # type: ignore[attr-defined]

    def fill_c10d(self) -> None:
        """Add nccl between the GPUs, and gloo for their tensors, which a CPU build lacks."""
        c10d = sys.modules["torch._C._distributed_c10d"]
        c10d.ProcessGroupNCCL = self._extension.process_group_nccl()  # type: ignore[attr-defined]
        groups = c10d.ProcessGroup
        register, gloo, other = groups._register_backend, groups.BackendType.GLOO, groups.BackendType.CUSTOM

        def register_backend(group: Any, device: Any, kind: Any, backend: Any = None) -> None:
            if device.type == "cuda" and kind == gloo and backend is not None:
                kind, backend = other, self._extension.gloo_on_gpus(backend)
            register(group, device, kind, backend)

        groups._register_backend = register_backend


class _Properties:
    def __init__(self, index: int, physical: int) -> None:
        self.name, self.uuid = "Simulated GPU", f"simulated-{physical}"
        self.index, self.major, self.minor, self.multi_processor_count = index, 9, 0, 8
        self.total_memory, self.is_integrated, self.is_multi_gpu_board = _GIGABYTES << 30, 0, 0
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = physical, 0, 0
        self.gcnArchName, self.warp_size, self.L2_cache_size = "", 32, 1 << 20
        self.max_threads_per_multi_processor, self.regs_per_multiprocessor = 2048, 65536
        self.shared_memory_per_block = 49152

    def __repr__(self) -> str:
        return f"{self.name} {self.uuid}"


def _properties(index: int) -> _Properties:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return _Properties(index, int(visible.split(",")[index]) if visible else index)


def _names(extension: Any) -> dict[str, Any]:
    """Return the members of torch._C that torch's Python uses, by name."""
    import torch._C as c

    class _CudaStreamBase(c.Stream):  # type: ignore[misc, name-defined]
        def __new__(
            cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, **_: Any
        ) -> Any:
            if device_type:
                return c.Stream.__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
            return c.Stream.__new__(cls, device=f"cuda:{extension.current_device()}", priority=priority)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    class _CudaEventBase(c.Event):  # type: ignore[misc, name-defined]
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Any:
            return c.Event.__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

        def record(self, stream: Any = None) -> None:
            self._recorded_s = time.perf_counter()
            super().record(stream)

        def elapsed_time(self, end: Any) -> float:
            return float(1e3 * (end._recorded_s - self._recorded_s))

        @property
        def cuda_event(self) -> int:
            return int(self.event_id or 0)

    class _CUDAGraph:
        def __new__(cls, *_: Any, **__: Any) -> Any:
            raise RuntimeError("simulated GPUs capture no graphs")

    def init() -> None:
        extension.initialize()
        if not extension.num_devices():
            raise RuntimeError("No CUDA GPUs are available")
        cuda = sys.modules["torch.cuda"]
        cuda.default_generators = tuple(map(extension.default_generator, range(extension.num_devices())))  # type: ignore[attr-defined]
        cuda._get_device_properties = _properties  # type: ignore[attr-defined]

    def memory_stats(device: int) -> dict[str, Any]:
        now, peak, num = extension.memory(device)
        one = {"current": now, "peak": peak, "allocated": now, "freed": 0}
        both = {"all": one, "small_pool": one, "large_pool": one}
        names = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes")
        return {**dict.fromkeys(names, both), "num_alloc_retries": 0, "num_ooms": 0, "allocation": both, "num": num}

    def memory_info(device: int) -> tuple[int, int]:
        total = _GIGABYTES << 30
        return total - extension.memory(device)[0], total

    def scatter(tensor: Any, devices: Any, sizes: Any = None, dim: int = 0, streams: Any = None) -> Any:
        import torch

        made = []
        parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
        for i, (part, at) in enumerate(zip(parts, devices)):
            with torch.cuda.stream(streams[i] if streams else None):
                made.append(part.to(f"cuda:{at}", non_blocking=True))
        return tuple(made)

    def gather(tensors: Any, dim: int, destination: int) -> Any:
        import torch

        where = torch.device("cpu") if destination == -1 else torch.device("cuda", destination)
        return torch.cat([tensor.to(where, non_blocking=True) for tensor in tensors], dim)

    cudart = types.ModuleType("torch._C._cudart")
    cudart.cudaMemGetInfo = memory_info  # type: ignore[attr-defined]
    cudart.cudaError = types.SimpleNamespace(success=0)  # type: ignore[attr-defined]
    for name in ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister"):
        setattr(cudart, name, lambda *_: 0)

    return {
        "_has_cuda": True,
        "_CudaDeviceProperties": _Properties,
        "_CudaStreamBase": _CudaStreamBase,
        "_CudaEventBase": _CudaEventBase,
        "_CUDAGraph": _CUDAGraph,
        "_cuda_CUDAAllocator_AllocatorState": object,  # imported by name in checks for CUDA graphs
        "_cudart": cudart,
        "_cuda_init": init,
        "_cuda_getDeviceCount": extension.num_devices,
        "_cuda_getDevice": extension.current_device,
        "_cuda_setDevice": extension.set_device,
        "_cuda_exchangeDevice": lambda device: extension.exchange_device(device),  # dynamo distinguishes the two
        "_cuda_maybeExchangeDevice": lambda device: extension.exchange_device(device),
        "_cuda_isInBadFork": extension.is_in_bad_fork,
        "_cuda_getArchFlags": lambda: "",
        "_cuda_canDeviceAccessPeer": lambda a, b: True,
        "_cuda_getCurrentStream": extension.current_stream,
        "_cuda_getDefaultStream": extension.default_stream,
        "_cuda_setStream": extension.set_stream,
        "_cuda_getCurrentRawStream": lambda device: extension.current_stream(device)[0],
        "_cuda_synchronize": extension.synchronize,
        "_cuda_sleep": nothing,
        "_cuda_ipc_collect": nothing,
        "_cuda_set_sync_debug_mode": extension.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": extension.sync_debug_mode,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_graph_pool_handle": lambda: (0, 0),
        "_cuda_memoryStats": memory_stats,
        "_cuda_emptyCache": nothing,
        "_cuda_resetPeakMemoryStats": extension.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": nothing,
        "_cuda_setMemoryFraction": lambda part, device: extension.limit_memory(device, int(part * (_GIGABYTES << 30))),
        "_cuda_getMemoryFraction": lambda device: 1.0,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_memorySnapshot": lambda *_: {"segments": [], "device_traces": []},
        "_cuda_hostMemoryStats": dict,
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_getCompiledVersion": lambda: 0,
        "_nccl_version": lambda: (2 << 32) | (27 << 16) | 3,
        "_nccl_version_suffix": lambda: b"simulated",
        "_scatter": scatter,
        "_gather": gather,
        "_broadcast": lambda tensor, devices: [tensor.to(f"cuda:{at}", non_blocking=True) for at in devices],
        "_broadcast_coalesced": lambda tensors, devices, size: [
            [tensor.to(f"cuda:{at}", non_blocking=True) for tensor in tensors] for at in devices
        ],
    }
