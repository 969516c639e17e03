"""`gemmnorm doctor`: what this machine has, what will run on it, what is missing, and the command that mends it.

Four things carry a CUDA major version and have to get along: torch, `cuda-bindings`, NVRTC and the driver. The bindings
load the NVRTC of their own major; a driver runs code of its own major and of older ones; torch and the bindings in one
process should be of one major, because both bring libraries of the same names.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .. import plan
from ..bench import Document, environment, major, new_document, nvcc_version, package_version
from ..runtime import driver, measured
from ..runtime.arithmetic import float32_reason
from ..runtime.call import chip as chip_of
from ..runtime.measured import Table
from .variables import Variable, variables

_NVRTC_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


@dataclass(frozen=True)
class Facts:
    """What the checks look at; a test makes its own.

    Versions are strings or None where a thing is not there; `nvrtc` holds every installed one. `unavailable` is what
    `gemmnorm.runtime.driver.unavailable()` says; `cache_problem` why compiled kernels cannot be kept; `measured` what
    `gemmnorm tune` has left; `variables` those of gemmnorm's that are set.
    """

    python: tuple[int, int] = (3, 10)
    platform: str = "linux"
    torch: str = "2.4.0"
    torch_cuda: str | None = None
    driver_cuda: str | None = None
    gpu: str | None = None
    capability: tuple[int, int] | None = None
    cuda_core: str | None = None
    bindings: str | None = None
    nvrtc: tuple[str, ...] = ()
    nvcc: str | None = None
    unavailable: str | None = None
    cache: str = ""
    cache_problem: str | None = None
    measured: tuple[Table, ...] = ()
    variables: tuple[Variable, ...] = ()


@dataclass(frozen=True)
class Check:
    """One line of the answer.

    Attributes:
        name: what was looked at; found: what is there.
        state: "ok", "missing" (the kernels cannot run because of it), "warning" (they can), or "note".
        advice: what it means, where that is not plain; command: what mends it, to be typed as it stands.
    """

    name: str
    found: str
    state: str = "ok"
    advice: str = ""
    command: str = ""


def gather() -> Facts:
    """Look at this machine."""
    usable = torch.cuda.is_available()
    return Facts(
        python=sys.version_info[:2],
        platform=sys.platform,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        driver_cuda=environment(torch.device("cpu"))["driver_cuda"],
        gpu=torch.cuda.get_device_name(0) if usable else None,
        capability=torch.cuda.get_device_capability(0) if usable else None,
        cuda_core=package_version("cuda-core"),
        bindings=package_version("cuda-bindings"),
        nvrtc=tuple(v for name in _NVRTC_WHEELS if (v := package_version(name))),
        nvcc=nvcc_version(),
        unavailable=driver.unavailable(),
        cache=str(driver.cache_directory()),
        cache_problem=_cache_problem(driver.cache_directory()),
        measured=tuple(measured.stored()),
        variables=variables(),
    )


def _cache_problem(directory: Path) -> str | None:
    """Why no file can be made in `directory` (or in the nearest of its parents that exists), or None."""
    place = directory
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            return f"{place} is not a directory"
        if place == directory:
            with tempfile.NamedTemporaryFile(dir=place):
                return None
        return None if os.access(place, os.W_OK | os.X_OK) else f"no permission to write in {place}"
    except OSError as error:
        return str(error)


def extra_of(facts: Facts) -> str:
    """`cu12` or `cu13`: torch's CUDA major, else the driver's, and never above the driver's."""
    ours = major(facts.torch_cuda) or major(facts.driver_cuda) or 13
    limit = major(facts.driver_cuda)
    return f"cu{max(12, min(ours, limit or ours, 13))}"


def examine(facts: Facts) -> list[Check]:
    """Judge the facts, one check after the other, in the order in which one would mend them."""
    return [*_software(facts), *_hardware(facts), *_compiler(facts), *_settings(facts), *_comforts(facts)]


def _software(facts: Facts) -> Iterable[Check]:
    version = ".".join(map(str, facts.python))
    if facts.python < (3, 10):
        yield Check("Python", version, "missing", "gemmnorm needs 3.10 or newer")
    else:
        yield Check("Python", version)
    parts = facts.torch.split("+")[0].split(".")
    old = tuple(int(p) if p.isdigit() else 0 for p in parts[:2]) < (2, 4)
    build = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "no CUDA"
    found = f"{facts.torch} ({build})"
    index = f"pip install torch --index-url https://download.pytorch.org/whl/{_torch_index(facts)}"
    if old:
        yield Check("PyTorch", found, "missing", "gemmnorm needs 2.4 or newer", "pip install --upgrade torch")
    elif facts.torch_cuda is None and facts.driver_cuda is not None:
        yield Check("PyTorch", found, "missing", "a build without CUDA, on a machine with an NVIDIA driver", index)
    elif facts.torch_cuda and facts.driver_cuda and _above(facts.torch_cuda, facts.driver_cuda):
        advice = f"its CUDA is newer than what the driver supports ({facts.driver_cuda})"
        yield Check("PyTorch", found, "missing", advice, index)
    else:
        yield Check("PyTorch", found, "note" if facts.torch_cuda is None else "ok")


def _torch_index(facts: Facts) -> str:
    return "cu126" if major(facts.driver_cuda) == 12 else "cu130"


def _above(version: str, limit: str) -> bool:
    """Is the CUDA major of `version` above `limit`'s? Within a major, older drivers run newer minors."""
    return (major(version) or 0) > (major(limit) or 0)


def _hardware(facts: Facts) -> Iterable[Check]:
    if facts.driver_cuda is None:
        yield Check("NVIDIA driver", "none", "missing", "without one plain PyTorch ops run, on the CPU or elsewhere")
    else:
        yield Check("NVIDIA driver", f"supports CUDA {facts.driver_cuda}")
    if facts.gpu is None:
        why = "torch sees none" if facts.driver_cuda else ""
        yield Check("GPU", "none", "missing", why)
    elif facts.capability is not None and facts.capability < (8, 0):
        shown = ".".join(map(str, facts.capability))
        yield Check("GPU", f"{facts.gpu}, compute capability {shown}", "missing", "the kernels need 8.0 or higher")
    else:
        shown = ".".join(map(str, facts.capability or ()))
        yield Check("GPU", f"{facts.gpu}, compute capability {shown}")


def _compiler(facts: Facts) -> Iterable[Check]:
    extra = extra_of(facts)
    install = f"pip install 'gemmnorm[{extra}]'"
    want = int(extra[2:])
    if facts.platform not in ("linux", "win32"):
        yield Check("cuda-core", facts.cuda_core or "none", "note", "CUDA is for Linux and Windows; plain ops run here")
        return
    if facts.cuda_core is None:
        yield Check("cuda-core", "none", "missing", "compiles and launches the kernels", install)
    elif facts.cuda_core.split(".")[:2] != ["1", "2"]:
        yield Check("cuda-core", facts.cuda_core, "warning", "gemmnorm is tested with 1.2", install)
    else:
        yield Check("cuda-core", facts.cuda_core)
    bound = major(facts.bindings)
    if bound is None:
        yield Check("cuda-bindings", "none", "missing", "", install)
    elif bound != want and facts.driver_cuda and _above(facts.bindings or "", facts.driver_cuda):
        advice = f"CUDA {bound} is newer than the driver's {facts.driver_cuda}"
        yield Check("cuda-bindings", str(facts.bindings), "missing", advice, install)
    elif bound != want and (facts.torch_cuda or facts.driver_cuda):
        advice = f"CUDA {bound} beside torch's {facts.torch_cuda}" if facts.torch_cuda else f"CUDA {bound}, not {want}"
        yield Check("cuda-bindings", str(facts.bindings), "warning", advice, install)
    else:
        yield Check("cuda-bindings", str(facts.bindings))
    shown = ", ".join(facts.nvrtc) or "no wheel"
    right = [v for v in facts.nvrtc if major(v) == bound]
    if facts.unavailable is not None and bound is not None and facts.cuda_core is not None:
        yield Check("NVRTC", shown, "missing", facts.unavailable.split(";")[0], install)
    elif not right and facts.unavailable is None:
        yield Check("NVRTC", shown, "note", "found outside the wheels, of a toolkit on this machine")
    elif not right:
        advice = f"cuda-bindings {facts.bindings} loads CUDA {bound}'s" if bound else ""
        yield Check("NVRTC", shown, "missing", advice, install)
    else:
        yield Check("NVRTC", shown)


def _settings(facts: Facts) -> Iterable[Check]:
    for name, value, expected, read in facts.variables:
        if expected is not None:
            yield Check(
                name, value, "missing", f"expected one of {expected}: calls that read it raise", f"unset {name}"
            )
        elif not read:
            yield Check(name, value, "warning", "gemmnorm reads no such variable", f"unset {name}")
        else:
            yield Check(name, value, "note")


def _comforts(facts: Facts) -> Iterable[Check]:
    if facts.cache_problem is None:
        yield Check("kernel cache", facts.cache)
    else:
        advice = f"{facts.cache_problem}: every process compiles the kernels"
        mend = "export GEMMNORM_CACHE_DIR=/a/directory/you/can/write"
        yield Check("kernel cache", facts.cache, "warning", advice, mend)
    for table in facts.measured:
        found = f"{table.lines} measured on {table.gpu}"
        if table.current:
            yield Check("choices", found)
        else:
            yield Check(
                "choices", found, "note", "by another version, not used: measure again", "gemmnorm tune MODEL.py"
            )
    if facts.nvcc is None:
        advice = "only exported files need it (load_inline, CUDA_HOME); gemmnorm itself does not"
        yield Check("nvcc", "none", "note", advice)
    else:
        yield Check("nvcc", facts.nvcc)


def what_runs() -> list[str]:
    """Which strategy the planner picks here for a large GEMM, by precision."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    chip = chip_of(device)
    wrong = [name for name, _, expected, _ in variables() if expected is not None]
    if wrong:
        return [f"calls that read {' or '.join(wrong)} raise"]
    if chip is None:
        return [f"reference: plain PyTorch ops on the {'GPU' if device.type == 'cuda' else 'CPU'}, in every precision"]
    lines = []
    for label, dtype, arithmetic in (
        ("fp32", "float32", "float32"),
        ("tf32", "float32", "tf32"),
        ("bf16", "bfloat16", "native"),
        ("fp16", "float16", "native"),
    ):
        problem = plan.Problem(1024, 8192, 8192, dtype, dtype, dtype, dtype, arithmetic, chip=chip)
        lines.append(f"{label}: {plan.make_plan(problem, plan.check_strategy(None)).strategy}")
    return [*lines, float32_reason()]


def diagnose() -> Document:
    """The document of kind "doctor" for this machine."""
    checks = examine(gather())
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return new_document(
        "doctor",
        environment=environment(device),
        checks=[asdict(check) for check in checks],
        commands=list(dict.fromkeys(check.command for check in checks if check.command)),
        runs=what_runs(),
    )
