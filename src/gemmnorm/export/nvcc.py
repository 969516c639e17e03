"""Compiling the CUDA text of an exported file with nvcc, without a GPU."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import torch


def compile_check(path: str | Path, target: str = "sm_80") -> str | None:
    """Compile the CUDA text of an exported file with nvcc: None when it compiles, else the reason or the log.

    Needs no GPU and no CUDA build of PyTorch: its CPU headers suffice, with an empty `cuda_cmake_macros.h`. Code is
    generated for the GPU alone; nvcc checks the host's functions on the way, and making object code of them as well
    takes three times as long.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "there is no nvcc here"
    source = Path(path).read_text(encoding="utf-8")
    texts = ("_DECLARATIONS", "_KERNELS", "_HOST")
    parts = [re.search(rf'^{name} = r"""\n(.*?)"""', source, re.M | re.S) for name in texts]
    if not all(parts):
        return "the file holds no CUDA text of gemmnorm's"
    arch = re.sub(r"\D", "", target)
    arch += "a" if arch == "90" else ""
    from torch.utils.cpp_extension import include_paths

    with tempfile.TemporaryDirectory() as folder:
        macros = Path(folder) / "c10" / "cuda" / "impl"
        macros.mkdir(parents=True)
        (macros / "cuda_cmake_macros.h").write_text("#pragma once\n", encoding="utf-8")
        unit = Path(folder) / "unit.cu"
        unit.write_text("".join(p.group(1) for p in parts if p), encoding="utf-8")
        includes = [f"-I{folder}", *(f"-I{p}" for p in include_paths())]
        code, said = _run(
            [nvcc, "-std=c++20" if _needs_20() else "-std=c++17", f"-gencode=arch=compute_{arch},code=sm_{arch}",
             "-cubin", str(unit), "-o", str(Path(folder) / "unit.cubin"), "--expt-relaxed-constexpr", *includes]
        )  # fmt: skip
    return None if code == 0 else said[-4000:]


def _run(command: list[str]) -> tuple[int, str]:
    """The exit code, and what was said; whatever ends this process also ends the compilers that nvcc has started."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=os.name == "posix"
    ) as running:
        try:
            said, _ = running.communicate(timeout=600)
        except BaseException:
            if os.name == "posix":
                os.killpg(running.pid, signal.SIGKILL)
            running.kill()
            raise
    return running.returncode, said


def _needs_20() -> bool:
    """Newer releases of PyTorch have headers in C++20."""
    return tuple(int(v) for v in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 12)
