"""Settings of the process that a call has no business with."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["changed_settings", "put_back", "settings"]


def settings() -> dict[str, Any]:
    """By name."""
    cudnn = torch.backends.cudnn
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "grad mode": torch.is_grad_enabled(),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "precision of float32 products": _precisions(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": (torch.are_deterministic_algorithms_enabled(), cudnn.deterministic),
        "cuDNN's benchmark": cudnn.benchmark,
        "anomaly detection": torch.is_anomaly_enabled(),
        "garbage collection": gc.isenabled(),
        "flushing of denormal numbers": math.ldexp(1.0, -1070) * 1.0
        == 0.0,  # by the processor, for Python's numbers too
        "Python's random state": random.getstate(),
        "NumPy's random state": _plain(numpy.get_state(legacy=True)) if hasattr(numpy, "get_state") else None,
        "warning filters": (len(sys.modules), list(warnings.filters)),
    }


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """The default dtype and device, at the end: who forgot to has failed, and is not to take others along."""
    dtype, device = torch.get_default_dtype(), str(torch.get_default_device())
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if str(torch.get_default_device()) != device:
            torch.set_default_device(None if device == "cpu" else device)


def _precisions() -> tuple[Any, ...]:
    found: list[Any] = [torch.get_float32_matmul_precision()]
    for owner in (torch.backends.cuda.matmul, torch.backends.cudnn):
        try:
            found.append(owner.allow_tf32)
        except RuntimeError:  # where PyTorch's newer interface has been used
            found.append(None)
    return tuple(found)


def _plain(state: Any) -> tuple[Any, ...]:
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)


def changed_settings(before: Mapping[str, Any]) -> list[str]:
    """Which settings are others than `before`; a module that is imported for the first time may add filters."""
    now = settings()
    imported = now["warning filters"][0] != before["warning filters"][0]
    drawn = before["NumPy's random state"] is None
    return [
        name
        for name, value in before.items()
        if now[name] != value and not (imported and name == "warning filters") and not (drawn and "NumPy" in name)
    ]
