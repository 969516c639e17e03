"""The only place that touches CUDA's own interfaces: compiling with NVRTC, the program cache, and launching.

Built on `cuda.core`, NVIDIA's Python package, which is optional: where it, a driver or a compiler is missing,
`unavailable()` says why and every caller takes the plain PyTorch path.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import io
import os
import platform
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import GemmNormRuntimeError, GemmNormWarning
from ..plan import Launch, Map, Problem, params, target
from . import sources

_lock = threading.Lock()


@functools.lru_cache(maxsize=1)
def unavailable() -> str | None:
    """None where kernels can be compiled and launched; else what is missing and the command that mends it."""
    extra = f"cu{(torch.version.cuda or '13').split('.')[0]}"
    try:
        import cuda.core  # noqa: F401
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError as error:
        return f"cuda.core is missing ({error}); pip install 'gemmnorm[{extra}]'"
    except Exception as error:  # a broken or half-removed installation
        return f"cuda.core does not load ({type(error).__name__}: {error}); pip install 'gemmnorm[{extra}]'"
    try:
        result = nvrtc.nvrtcVersion()
        if int(result[0]) != 0:
            return f"NVRTC answers with error {result[0]}"
    except Exception as error:
        return f"NVRTC does not load ({error}); pip install 'gemmnorm[{extra}]'"
    return None


def memory_of(device: int) -> tuple[float, int]:
    """A GPU's bandwidth by the clock and width of its memory, TB/s, and the bytes of its L2; 0 where not known."""
    try:
        from cuda.core import Device

        properties = Device(device).properties
        # Both edges of a clock in kHz; bits.
        bandwidth = 2e3 * properties.memory_clock_rate * properties.global_memory_bus_width / 8 / 1e12
        return round(bandwidth, 2), properties.l2_cache_size
    except Exception:  # without cuda.core, or where a driver does not tell: the planner then assumes what it knows
        return 0.0, 0


def cache_directory() -> Path:
    """Where compiled kernels are kept: `GEMMNORM_CACHE_DIR`, else `gemmnorm` in the user's cache directory."""
    explicit = os.environ.get("GEMMNORM_CACHE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or str(Path.home() / ".cache")
    return Path(base) / "gemmnorm"


@functools.lru_cache(maxsize=1)
def _disk_cache() -> Any | None:
    """cuda.core's file cache, or None (with one warning) where its directory cannot be written."""
    from cuda.core.utils import FileStreamProgramCache

    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(f"no permission to write {directory}")
        return FileStreamProgramCache(directory)
    except (OSError, RuntimeError) as error:  # the latter: there is no home directory
        warnings.warn(
            f"kernels are compiled anew in every process: {error} (GEMMNORM_CACHE_DIR names another directory)",
            GemmNormWarning,
            stacklevel=2,
        )
        return None


def _program(text: str, arch: int, **options: Any) -> Any:
    from cuda.core import Program

    return Program(text, "c++", _options(arch, **options))


def compile_report(launch: Launch, problem: Problem, arch: int) -> dict[str, int]:
    """Compile for `arch` without loading: registers, bytes of stack, spill stores and spill loads, and whether the
    compiler put the tensor cores' asynchronous multiplications in series (ptxas' C7510 and following).

    Needs neither GPU nor driver. Raises what NVRTC raises for a source that does not compile.
    """
    return compile_reports([(launch, problem)], arch)[0]


def compile_reports(kernels: Sequence[tuple[Launch, Problem]], arch: int) -> list[dict[str, int]]:
    """`compile_report` of several launches of one source file and activation, whose text is then read only once."""
    named = [(replace(launch, entry=f"{launch.entry}_{i}"), problem) for i, (launch, problem) in enumerate(kernels)]
    (first, of_first), *more = named
    log = io.StringIO()
    _program(sources.translation_unit(first, of_first, *more), arch, ptxas_options="-v").compile("cubin", logs=log)
    _, *parts = re.split(r"Compiling entry function '(\w+)'", log.getvalue())
    said = dict(zip(parts[::2], parts[1::2], strict=True))
    # Said before the functions' own reports, each with the name of its function.
    in_series = re.findall(r"wgmma.mma_async instructions are serialized .*'(\w+)'", log.getvalue())
    return [_report(launch.entry, said.get(launch.entry, ""), in_series.count(launch.entry)) for launch, _ in named]


def _report(entry: str, text: str, in_series: int) -> dict[str, int]:
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = re.findall(r"Used (\d+) registers", text)
    if not spills or not registers:
        raise GemmNormRuntimeError(f"the compiler's report of {entry} was not understood:\n{text}")
    stack, stores, loads = (max(int(v) for v in values) for values in zip(*spills, strict=True))
    return {
        "registers": max(map(int, registers)),
        "stack": stack,
        "spill_stores": stores,
        "spill_loads": loads,
        "serialized_wgmma": in_series,
    }


@functools.cache
def _kernel(text: str, entry: str, arch: int) -> Any:
    """The loaded kernel `entry` of a translation unit; from the disk cache where it has been compiled before."""
    from cuda.core import ObjectCode

    cache = _disk_cache()
    stored = recall(cache, text, arch)
    if stored is not None:
        with contextlib.suppress(Exception):  # made by a compiler that this driver does not understand
            return ObjectCode.from_cubin(stored).get_kernel(entry)
    code = bytes(_program(text, arch).compile("cubin").code)
    remember(cache, text, arch, code)
    return ObjectCode.from_cubin(code).get_kernel(entry)


def compile_ahead(text: str, arch: int) -> None:
    """Compile a translation unit into the disk cache, unless it is there. Raises what the compiler raises."""
    cache = _disk_cache()
    if cache is not None and not is_compiled(text, arch):
        remember(cache, text, arch, bytes(_program(text, arch).compile("cubin").code))


def is_compiled(text: str, arch: int) -> bool:
    """Whether the disk cache has a translation unit."""
    return recall(_disk_cache(), text, arch) is not None


def recall(cache: Any | None, text: str, arch: int) -> bytes | None:
    """The compiled code of a translation unit from the disk cache, or None.

    An entry carries its SHA-256, because the driver crashes on a truncated kernel rather than refuse it.
    """
    if cache is None:
        return None
    try:
        entry = cache.get(_cache_key(text, arch)) or b""
    except OSError:
        return None
    code, digest = entry[:-32], entry[-32:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def remember(cache: Any | None, text: str, arch: int, code: bytes) -> None:
    """Put compiled code into the disk cache; a failure is one warning."""
    if cache is None:
        return
    try:
        cache[_cache_key(text, arch)] = code + hashlib.sha256(code).digest()
    except OSError as error:
        warnings.warn(f"a compiled kernel could not be stored: {error}", GemmNormWarning, stacklevel=2)


def _cache_key(text: str, arch: int) -> bytes:
    from cuda.core.utils import make_program_cache_key

    key: bytes = make_program_cache_key(code=text, code_type="c++", options=_options(arch), target_type="cubin")
    return key


def _options(arch: int, **options: Any) -> Any:
    from cuda.core import ProgramOptions

    return ProgramOptions(arch=target(arch), std="c++17", name="gemmnorm.cu", **options)


def tensor_map(t: torch.Tensor, found: Map) -> bytes:
    """The TMA descriptor of a matrix, dense or with padded rows, cut into the boxes of `found`: 128 bytes.

    128-byte swizzle, promotion in the L2 to 256 bytes where rows are multiples of that, zeros out of bounds. It holds
    an address and sizes, nothing of the contents, and keeps no memory alive.

    Raises:
        GemmNormRuntimeError: the driver refuses the matrix.
    """
    from cuda.bindings import driver as cu

    types = cu.CUtensorMapDataType
    kind = {
        torch.float16: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.bfloat16: types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float32: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32 if found.exact else types.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
    }[t.dtype]
    if found.parity is not None:
        t = t[min(found.parity, len(t) - 1) :: 2]  # of a single row there are no odd ones, and nothing is stored
    rows, columns = t.shape
    box_rows, box_columns = found.box(rows)
    promotions, row_bytes = cu.CUtensorMapL2promotion, row_pitch(t)
    whole = row_bytes % 256 == 0  # else a promoted request would fetch what nobody asks for
    result, encoded = cu.cuTensorMapEncodeTiled(
        kind,
        2,
        t.data_ptr(),
        [cu.cuuint64_t(columns), cu.cuuint64_t(rows)],
        [cu.cuuint64_t(row_bytes)],
        [cu.cuuint32_t(box_columns), cu.cuuint32_t(box_rows)],
        [cu.cuuint32_t(1), cu.cuuint32_t(1)],
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B if whole else promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(result) != 0:
        raise GemmNormRuntimeError(f"cuTensorMapEncodeTiled refuses a {tuple(t.shape)} matrix of {t.dtype}: {result}")
    return ctypes.string_at(encoded.getPtr(), 128)


def row_pitch(t: torch.Tensor) -> int:
    """Bytes from one row of a matrix to the next, as TMA takes them: of a single row any multiple of 16 serves."""
    pitch = t.stride(0) if len(t) > 1 else -(-t.shape[1] // 16) * 16
    return pitch * t.element_size()


class _Memory(threading.local):
    """Memory for a kernel's `Params`, one for each thread; `address` is that of the array of arguments."""

    def __init__(self, size: int) -> None:
        self.params = ctypes.create_string_buffer(size)
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        self.address = ctypes.addressof(self._arguments)


class Launcher:
    """A launch bound to its compiled kernel; called with a stream and what `pack` makes of the values of `Params`, in
    the layout's order.

    cuda.core compiles and loads the kernel. It launches kernels with scalars only, so a struct goes through
    cuda.bindings' `cuLaunchKernelEx`.
    """

    def __init__(self, launch: Launch, problem: Problem) -> None:
        from cuda.bindings import driver as cu

        assert problem.chip is not None
        text = sources.translation_unit(launch, problem)
        with _lock:
            self._kernel = _kernel(text, launch.entry, problem.chip.arch)
        self._function = cu.CUfunction(int(self._kernel.handle))
        packing = struct.Struct(params.layout(launch, problem).format)
        self.pack, self._memory = packing.pack, _Memory(packing.size)
        self._launch = cu.cuLaunchKernelEx
        self._describe = functools.partial(_configuration, launch, problem)
        self._configurations: dict[int, Any] = {}
        _lift_limits(self._kernel, launch, problem.chip.arch)

    def __call__(self, stream: int, packed: bytes) -> None:
        memory = self._memory
        memory.params.raw = packed
        found = self._configurations.get(stream)
        if found is None:
            found = self._configurations[stream] = self._describe(stream)
        (result,) = self._launch(found, self._function, memory.address, 0)
        if result:
            raise GemmNormRuntimeError(f"a launch failed: {result}")


def _configuration(launch: Launch, problem: Problem, stream: int) -> Any:
    """Grid, block, shared memory, cluster and ordering of a launch on a stream, as the driver takes them."""
    from cuda.bindings import driver as cu

    identifier = cu.CUlaunchAttributeID
    attributes = []
    if launch.cluster > 1:
        cluster = cu.CUlaunchAttribute()
        cluster.id = identifier.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = launch.cluster, 1, 1
        attributes.append(cluster)
    if launch.cooperative:
        cooperative = cu.CUlaunchAttribute()
        cooperative.id = identifier.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        attributes.append(cooperative)
    elif problem.chip is not None and problem.chip.arch >= 90:  # it may start while the kernel before it still runs
        overlap = cu.CUlaunchAttribute()
        overlap.id = identifier.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        attributes.append(overlap)
    found = cu.CUlaunchConfig()
    found.gridDimX, found.gridDimY, found.gridDimZ = launch.grid.value(problem.batch), 1, 1
    found.blockDimX, found.blockDimY, found.blockDimZ = launch.block, 1, 1
    found.sharedMemBytes = launch.shared
    found.hStream = cu.CUstream(stream)
    found.attrs = attributes
    found.numAttrs = len(attributes)
    return found


def _lift_limits(kernel: Any, launch: Launch, arch: int) -> None:
    """Lift the limits of 48 KB of dynamic shared memory and of 8 blocks a cluster, on all devices of `arch`."""
    from cuda.bindings import driver as cu

    name, asked = cu.CUfunction_attribute, []
    if launch.shared > 48 * 1024:
        asked.append((name.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared, "bytes of shared memory"))
    if launch.cluster > 8:
        asked.append((name.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, "cluster of more than 8 blocks"))
    for index in range(torch.cuda.device_count() if asked else 0):
        major, minor = torch.cuda.get_device_capability(index)
        if major * 10 + minor != arch:
            continue
        for attribute, value, what in asked:
            (result,) = cu.cuKernelSetAttribute(attribute, value, kernel.handle, cu.CUdevice(index))
            if int(result) != 0:
                raise GemmNormRuntimeError(f"{value} {what} not to be had: {result}")


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: set[int] = set()


_thread = _Thread()


def enter(device_index: int) -> None:
    """Make the device's context current in this thread, which PyTorch's backward threads leave to the first caller."""
    if device_index not in _thread.entered:
        from cuda.core import Device

        Device(device_index).set_current()
        _thread.entered.add(device_index)


def _empty(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device="cuda")


# (size, strides, dtype) → memory on the current device. What TorchInductor's code allocates with: half the host time of
# `torch.empty_strided`, which takes a third less than `torch.empty`.
empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _empty
)


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Inside, what the driver says where a GPU has no memory left is raised as PyTorch's `OutOfMemoryError`."""
    try:
        yield
    except Exception as error:
        if "CUDA_ERROR_OUT_OF_MEMORY" not in str(error):
            raise
        raise torch.cuda.OutOfMemoryError(f"CUDA out of memory, of which a kernel takes some: {error}") from error


def outside_pools(device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `make` allocates on a device, to be kept; any stream may use it at once.

    By another thread: while `torch.compile(mode="reduce-overhead")` warms up, all that its thread allocates lies in the
    graph's own pool, where nothing may stay but the graph's results.
    """

    def run() -> torch.Tensor:
        if device.type != "cuda":
            return make()
        with torch.cuda.device(device):
            made = make()
            torch.cuda.current_stream().synchronize()  # of this thread: what was done before in that memory is over
        return made

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        return other.submit(run).result()


def current_device() -> int:
    """The index of PyTorch's current device, CUDA being initialised: `torch.cuda.current_device` without its checks."""
    index: int = torch._C._cuda_getDevice()
    return index


def capturing() -> bool:
    """Whether PyTorch's current stream is being captured into a graph, likewise."""
    answer: bool = torch._C._cuda_isCurrentStreamCapturing()
    return answer


def synchronize(device: torch.device) -> None:
    """Wait for everything that was asked of a device."""
    torch.cuda.synchronize(device)


def stream_handle(device_index: int) -> int:
    """PyTorch's current stream on a device, as a number."""
    handle: int = torch._C._cuda_getCurrentRawStream(device_index)
    return handle


# --- memory that other processes map ----------------------------------------------------------------------------------

HANDLE = 64  # bytes of a `CUipcMemHandle`


def _checked(result: Any, *values: Any) -> Any:
    if int(result) != 0:
        raise GemmNormRuntimeError(f"the driver answers {result}")
    return values[0] if values else None


def place(device_index: int) -> tuple[str, str]:
    """Names of this host, since it was started, and of a GPU: the same for all processes that see them."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text(encoding="ascii") if boot.exists() else ""
    return platform.node() + started, str(torch.cuda.get_device_properties(device_index).uuid)


def shared_memory(device_index: int, size: int) -> tuple[int, bytes]:
    """Zeros on a GPU for other processes of the host to map: address and handle. It is never given back."""
    from cuda.bindings import driver as cu

    with torch.cuda.device(device_index):
        address = _checked(*cu.cuMemAlloc(size))
        _checked(*cu.cuMemsetD8(address, 0, size))
        _checked(*cu.cuCtxSynchronize())
        return int(address), bytes(_checked(*cu.cuIpcGetMemHandle(address)).reserved)


def open_shared_memory(device_index: int, handle: bytes) -> int:
    """The address at which kernels on a GPU reach another process' shared memory."""
    from cuda.bindings import driver as cu

    found = cu.CUipcMemHandle()
    found.reserved = handle
    with torch.cuda.device(device_index):
        flag = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(_checked(*cu.cuIpcOpenMemHandle(found, flag)))


def write_word(device_index: int, address: int, value: int) -> None:
    """Four bytes, there when this returns."""
    from cuda.bindings import driver as cu

    with torch.cuda.device(device_index):
        _checked(*cu.cuMemsetD32(address, value, 1))
        _checked(*cu.cuCtxSynchronize())


def read_word(device_index: int, address: int) -> int:
    from cuda.bindings import driver as cu

    word = ctypes.c_uint32()
    with torch.cuda.device(device_index):
        _checked(*cu.cuMemcpyDtoH(ctypes.addressof(word), address, 4))
    return word.value
