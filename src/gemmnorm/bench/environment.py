"""Facts about this machine: what a result file must name, and what `gemmnorm doctor` judges.

Nothing here needs a GPU, and nothing here raises: what cannot be found out is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

import torch

from ..errors import GemmNormValueError
from ..runtime import measured


def default_device(name: str | None = None) -> torch.device:
    """The device called `name`; without a name the GPU where there is one.

    Raises:
        GemmNormValueError: there is no such device here.
    """
    try:
        found = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name is None else name)
    except RuntimeError as error:
        raise GemmNormValueError(f"device: expected cpu, cuda or cuda:N; got {name!r}") from error
    if found.type not in ("cpu", "cuda"):  # without memory, or without float64
        raise GemmNormValueError(f"device: expected cpu, cuda or cuda:N; got {name!r}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise GemmNormValueError("device: PyTorch finds no CUDA GPU here; `gemmnorm doctor` says more")
    if found.type == "cuda" and (found.index or 0) >= (count := torch.cuda.device_count()):
        raise GemmNormValueError(f"device: expected one of {count} CUDA GPUs, from cuda:0 on; got {name!r}")
    return found


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within it a GPU is PyTorch's current one: events, graphs and spins are of that, whatever tensors lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def package_version(*names: str) -> str | None:
    """The installed version of the first of `names` that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def major(version: str | None) -> int | None:
    """The leading number of a version string."""
    head = (version or "").split(".", 1)[0]
    return int(head) if head.isdigit() else None


def nvrtc_version() -> str | None:
    """The version of NVRTC's wheel. CUDA 12 has its major in the wheel's name, CUDA 13 only in its version."""
    return package_version("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


def driver_cuda_version() -> str | None:
    """The newest CUDA that the installed driver supports, e.g. `"13.0"`; asks libcuda itself."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
        number = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}" if number.value else None


def _output(*command: str) -> str | None:
    """Standard output of a command, or None when it is not there, fails, or takes more than 20 s."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


_QUERIES = {
    "driver": "driver_version",
    "clock_sm_mhz": "clocks.sm",
    "clock_sm_max_mhz": "clocks.max.sm",
    "clock_memory_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


def _which(properties: Any) -> list[str]:
    """`nvidia-smi`'s selection of this very GPU, whose number CUDA_VISIBLE_DEVICES may have changed."""
    uuid = getattr(properties, "uuid", None)
    return [] if uuid is None else ["-i", f"GPU-{uuid}"]


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """The device's name, architecture and sizes, and what `nvidia-smi` says of driver and clocks.

    `measured_here`: problems whose candidate `gemmnorm tune` has chosen.
    """
    properties = torch.cuda.get_device_properties(device)
    query = f"--query-gpu={','.join(_QUERIES.values())}"
    text = _output("nvidia-smi", query, "--format=csv,noheader,nounits", *_which(properties))
    found = [part.strip() for part in text.splitlines()[0].split(",")] if text else []
    smi = dict(zip(_QUERIES, found, strict=True)) if len(found) == len(_QUERIES) else dict.fromkeys(_QUERIES)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "measured_here": len(measured.read(measured.described(device))),
        "driver": smi.pop("driver"),
        "clocks": smi,
    }


def nvcc_version() -> str | None:
    """nvcc's release, e.g. `"13.0"`, from CUDA_HOME or the path; None without one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidate = os.path.join(home, "bin", "nvcc") if home else None
    text = _output(candidate, "--version") if candidate else None
    text = text or _output("nvcc", "--version")
    for word in (text or "").replace(",", " ").split("release ")[1:]:
        return word.split()[0]
    return None


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure must be read with: hardware, driver, and the versions of everything that took part."""
    facts: dict[str, Any] = {
        "device": device.type,
        "gpu": None,
        "driver": None,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "driver_cuda": driver_cuda_version(),
        "nvrtc": nvrtc_version(),
        "cuda_core": package_version("cuda-core"),
        "cuda_bindings": package_version("cuda-bindings"),
        "torch": torch.__version__,
        "triton": package_version("triton", "pytorch-triton"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        facts.update(gpu_facts(device))
    return facts
