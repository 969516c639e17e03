"""Runs the CUDA kernels on the CPU, from the sources that ship, with nothing but g++.

`emulated(chip)` is a context in which tensors on the CPU go the way of tensors on that GPU: planner, runtime and bound
arguments as they are, kernels compiled by g++ against `cuda.hpp` and the `ptx/` beside it, which stand in for CUDA and
for the kernels' own `ptx/`. Each launch takes the next seed, so that a test that repeats a call sees another
interleaving.

It knows no time, no memory model and no caches: what it finds are wrong results, deadlocks, and misaligned addresses
in TMA's boxes and in loads from the L2.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import itertools
import mmap
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gemmnorm.plan import Chip, Launch, Map, Problem, params
from gemmnorm.runtime import binding, driver, sources
from gemmnorm.runtime import call as runtime

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
# Kernels of one entry name have static arrays of one mangled name: not unique, or libraries would share the first's.
OPTIONS = ("-std=c++17", "-O1", "-w", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-gnu-unique")
FOLDER = "GEMMNORM_EMULATOR_FOLDER"
seeds = itertools.count(1)


class EmulationError(RuntimeError):
    """A deadlock, a misaligned address, or an instruction used as it may not be."""


@functools.cache
def folder() -> Path:
    """Where compiled kernels lie while the tests run, for all processes that were started after the first call."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="gemmnorm-emulator-")
        atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
    return Path(os.environ[FOLDER])


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """The files here in place of those of the same names under kernels/ptx."""
    read = getattr(sources._read, "__wrapped__", sources._read)

    def emulated_read(name: str) -> str:
        return (HERE / name).read_text(encoding="utf-8") if name.startswith("ptx/") else read(name)

    with mock.patch.object(sources, "_read", emulated_read):
        yield


def _text(launch: Launch, problem: Problem) -> str:
    with _stand_ins():
        text = sources.translation_unit(launch, problem)
    text = re.sub(
        r"extern __shared__ __align__\(\d+\) unsigned char (\w+)\[\];",
        r"unsigned char* const \1 = emulator::here.shared;",
        text,
    )
    _, params = sources.type_names(launch.entry)
    return (
        f"#include <cuda.hpp>\n{text}\n"
        'extern "C" const char* emulate(unsigned grid, unsigned cluster, unsigned threads, unsigned shared,'
        " unsigned resident, unsigned seed, const void* p) {\n"
        "  return emulator::run(grid, cluster, threads, shared, resident, seed,"
        f" [](const void* p) {{ {launch.entry}(*static_cast<const {params}*>(p)); }}, p);\n"
        "}\n"
    )


def compiled_function(name: str) -> Callable[[float], float]:
    """A function of kernels/common/functions.cuh: float → float."""
    with _stand_ins():
        text = "#include <cuda.hpp>\n" + sources.device_source(["common/functions.cuh"])
    function = _library(f'{text}extern "C" float call(float z) {{ return gemmnorm::{name}(z); }}\n').call
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
    return function


@functools.cache
def _library(text: str) -> Any:
    library = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    header = folder() / "cuda.hpp.gch"  # g++ takes it in place of the cuda.hpp of a later folder
    if not header.exists():
        _compile("-x", "c++-header", str(HERE / "cuda.hpp"), into=header)
    includes = (f"-I{folder()}", f"-I{HERE}")
    runtime = folder() / "runtime.so"
    if not runtime.exists():
        parts = [str(HERE / name) for name in ("runtime.cpp", "hopper.cpp")]
        _compile("-O3", "-march=native", "-shared", *includes, *parts, into=runtime)  # once, for all kernels
    if not library.exists():
        source = _own(library.with_suffix(".cpp"))
        source.write_text(text, encoding="utf-8")
        _compile("-shared", *includes, str(source), str(runtime), into=library)
    return ctypes.CDLL(str(library))


def _own(path: Path) -> Path:
    return path.with_name(f"{os.getpid()}-{path.name}")


def _compile(*what: str, into: Path) -> None:
    """Appears under its name when it is whole: another process may be compiling the same."""
    assert COMPILER is not None
    done = subprocess.run([COMPILER, *OPTIONS, *what, "-o", str(_own(into))], capture_output=True, text=True)
    if done.returncode:
        raise EmulationError(done.stderr[-4000:])
    _own(into).rename(into)


class Launcher:
    """Takes the place of `driver.Launcher`."""

    def __init__(self, launch: Launch, problem: Problem) -> None:
        self._launch = launch
        self._grid = launch.grid.value(problem.batch)
        self._format = params.layout(launch, problem).format
        self._emulate = _library(_text(launch, problem)).emulate
        self._emulate.restype = ctypes.c_char_p

    @staticmethod
    def pack(*values: Any) -> tuple[Any, ...]:
        """They are packed at each launch."""
        return values

    def __call__(self, stream: Any, values: Any) -> None:
        launch = self._launch
        # Static shared memory is one array in the emulator: such kernels run a block at a time.
        resident = self._grid if launch.cooperative else 3 if launch.shared else 1
        packed = struct.pack(self._format, *values)
        memory = ctypes.create_string_buffer(packed, len(packed) + 64)
        start = -ctypes.addressof(memory) % 64  # as the struct is aligned
        ctypes.memmove(ctypes.addressof(memory) + start, packed, len(packed))
        address = ctypes.c_void_p(ctypes.addressof(memory) + start)
        fault = self._emulate(self._grid, launch.cluster, launch.block, launch.shared, resident, next(seeds), address)
        if fault:
            raise EmulationError(f"{launch.entry}: {fault.decode()}")


def tensor_map(t: torch.Tensor, found: Map) -> bytes:
    """Takes the place of `driver.tensor_map`: the fields that ptx/hopper.cuh here reads."""
    if found.parity is not None:
        t = t[min(found.parity, len(t) - 1) :: 2]
    if t.data_ptr() % 16 or driver.row_pitch(t) % 16 or t.stride(1) != 1:
        raise EmulationError(f"TMA reads no matrix {tuple(t.shape)} of strides {t.stride()}")
    fields = [t.data_ptr(), t.shape[0], t.shape[1], driver.row_pitch(t)]
    small = [*found.box(t.shape[0]), t.element_size(), int(t.dtype == torch.float32 and not found.exact)]
    data = b"".join(v.to_bytes(8, "little") for v in fields) + b"".join(v.to_bytes(4, "little") for v in small)
    return data.ljust(128, b"\0")


def empty(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Takes the place of `driver.empty`."""
    return torch.empty_strided(size, strides, dtype=dtype)


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Takes the place of `binding._multiply`: of float32 operands, with one rounding at the end, as cuBLAS has it.

    PyTorch's product of bfloat16 on a CPU is ten times as slow, and (2.13, AVX-512) reads on into padded rows.
    """
    out.copy_(torch.mm(left.float().contiguous(), right.float().contiguous()))


def shared_memory(index: Any, size: int) -> tuple[int, bytes]:
    """Takes the place of `driver.shared_memory`: a file's, by its name."""
    name = os.urandom(driver.HANDLE // 2).hex().encode()
    (folder() / name.decode()).write_bytes(bytes(size))
    return open_shared_memory(index, name), name


def open_shared_memory(index: Any, handle: bytes) -> int:
    with (folder() / handle.decode()).open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    _mapped.append(mapped)
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


_mapped: list[Any] = []  # as long as the process


def write_word(index: Any, address: int, value: int) -> None:
    ctypes.c_uint32.from_address(address).value = value


def read_word(index: Any, address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


@contextlib.contextmanager
def emulated(chip: Chip) -> Iterator[None]:
    """Inside, tensors on the CPU are treated as tensors on `chip`."""
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (runtime, "chip", lambda device: chip),
            (driver, "Launcher", Launcher),
            (driver, "tensor_map", tensor_map),
            (driver, "enter", lambda index: None),
            (driver, "empty", empty),
            (binding, "_multiply", multiply),
            (driver, "stream_handle", lambda index: 0),
            (driver, "current_device", lambda: None),
            (torch.cuda, "current_stream", lambda device=None: mock.Mock()),
            (driver, "capturing", lambda: False),
            (driver, "place", lambda index: ("this", str(os.getpid()))),
            *((driver, made.__name__, made) for made in (shared_memory, open_shared_memory, write_word, read_word)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        runtime.forget()
        binding._counters.clear()
        try:
            yield
            # Every kernel leaves the counters as it found them: zero.
            assert not any(block.any() for block in binding.counters(None)._blocks), "counters were left behind"
        finally:
            runtime.forget()
