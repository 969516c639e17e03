"""The only place that touches CUDA's own interfaces: compiling with NVRTC, the program cache, and launching.

Built on `cuda.core`, NVIDIA's Python package, which is optional: where it, a driver or a compiler is missing,
`unavailable()` says why and every caller takes the plain PyTorch path.
"""

from __future__ import annotations

import functools
import io
import os
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import sources
from .errors import GemmNormRuntimeError, GemmNormWarning
from .plan import Launch, Problem, target

_lock = threading.Lock()
_failures: dict[str, str] = {}


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
    except OSError as error:
        warnings.warn(
            f"kernels are compiled anew in every process: {error} (GEMMNORM_CACHE_DIR names another directory)",
            GemmNormWarning,
            stacklevel=2,
        )
        return None


def _program(text: str, arch: int, **options: Any) -> Any:
    from cuda.core import Program, ProgramOptions

    return Program(text, "c++", ProgramOptions(arch=target(arch), std="c++17", name="gemmnorm.cu", **options))


def compile_report(launch: Launch, problem: Problem, arch: int) -> dict[str, int]:
    """Compile for `arch` without loading: registers, and bytes of stack, spill stores and spill loads.

    Needs neither GPU nor driver. Raises what NVRTC raises for a source that does not compile.
    """
    log = io.StringIO()
    _program(sources.translation_unit(launch, problem), arch, ptxas_options="-v").compile("cubin", logs=log)
    text = log.getvalue()
    spill = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = re.search(r"Used (\d+) registers", text)
    if spill is None or registers is None:
        raise GemmNormRuntimeError(f"the compiler's report of {launch.entry} was not understood:\n{text}")
    stack, stores, loads = (int(v) for v in spill.groups())
    return {"registers": int(registers.group(1)), "stack": stack, "spill_stores": stores, "spill_loads": loads}


@functools.lru_cache(maxsize=None)
def _kernel(text: str, entry: str, arch: int) -> Any:
    """The loaded kernel `entry` of a translation unit; from the disk cache where it has been compiled before."""
    cache = _disk_cache()
    try:
        return _program(text, arch).compile("cubin", cache=cache).get_kernel(entry)
    except Exception:
        if cache is None:
            raise
    # A truncated or foreign entry fails to load, an unwritable directory to store: compile afresh, without the cache.
    code = _program(text, arch).compile("cubin")
    kernel = code.get_kernel(entry)
    try:
        from cuda.core.utils import make_program_cache_key

        key = make_program_cache_key(
            code=text, code_type="c++", options=_options(arch), target_type="cubin"
        )
        cache[key] = code
    except Exception as error:
        warnings.warn(f"the kernel cache could not be mended: {error}", GemmNormWarning, stacklevel=2)
    return kernel


def _options(arch: int) -> Any:
    from cuda.core import ProgramOptions

    return ProgramOptions(arch=target(arch), std="c++17", name="gemmnorm.cu")


class Launcher:
    """A launch bound to its compiled kernel; called with a stream and the arguments in order."""

    def __init__(self, launch: Launch, problem: Problem) -> None:
        from cuda.core import LaunchConfig, launch as core_launch

        assert problem.chip is not None
        text = sources.translation_unit(launch, problem)
        with _lock:
            self._kernel = _kernel(text, launch.entry, problem.chip.arch)
        self._config = LaunchConfig(
            grid=launch.grid.value(problem.batch),
            block=launch.block,
            programmatic_stream_serialization=problem.chip.arch >= 90,
        )
        self._launch = core_launch
        self.arguments = launch.arguments

    def __call__(self, stream: Any, values: list[Any]) -> None:
        self._launch(stream, self._config, self._kernel, *values)


@functools.lru_cache(maxsize=256)
def _stream_object(handle: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle)


def current_stream(device_index: int) -> Any:
    """PyTorch's current stream on a device, as cuda.core takes it."""
    return _stream_object(torch._C._cuda_getCurrentRawStream(device_index))


int32 = np.int32
float32 = np.float32
