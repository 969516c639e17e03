"""The roofline of a cell: its FLOPs and bytes, over what a large GEMM and a copy reach on this device in this run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import cases, timing
from .cases import Cell
from .timing import CudaClock, Variant, WallClock


def work(cell: Cell) -> tuple[float, float]:
    """FLOPs of the GEMMs, and the bytes that must move at least: each operand and result once per GEMM.

    Forward: x and W in, y out. A backward adds: the product a written and read, g in, x and W once more, their
    gradients out.
    """
    case = cell.case
    size = cases.DTYPES[cell.precision].itemsize
    outer = cell.param_dtype.itemsize  # under autocast x, W and their gradients are float32 in memory
    x, w, y = case.batch * case.in_features, case.in_features * case.out_features, case.batch * case.out_features
    flops = 2.0 * x * case.out_features
    moved = outer * (x + w) + (outer if case.scale else size) * y
    if cell.phase == "train_fwd_bwd":
        flops *= 3
        moved += 2 * outer * (x + w) + size * 2 * y + (outer if case.scale else size) * y
    return flops, float(moved)


def ceilings(device: torch.device, clock: WallClock | CudaClock, precisions: Sequence[str]) -> dict[str, Any]:
    """What this device reaches now: copy rate in GB/s counting both ways, and TFLOP/s of a large GEMM per precision."""
    on_gpu = device.type == "cuda"
    n = 8192 if on_gpu else 768
    count = (2**30 if on_gpu else 2**26) // 4
    source, target = torch.randn(count, device=device), torch.empty(count, device=device)
    variants = [Variant("copy", lambda: target.copy_(source))]
    for precision in precisions:
        a, b = (torch.randn(n, n, device=device).to(cases.DTYPES[precision]) for _ in range(2))
        variants.append(
            Variant(precision, lambda a=a, b=b: torch.mm(a, b.t()), lambda p=precision: cases.tf32(p == "tf32"))  # type: ignore[misc]
        )
    done = timing.interleave(variants, clock, budget_s=1.0 if on_gpu else 0.3, min_samples=3)
    copy_ms = done.ms("copy")
    return {
        "copy_gb_per_s": None if copy_ms is None else 8 * count / copy_ms / 1e6,
        "tflops": {p: None if done.ms(p) is None else 2.0 * n**3 / done.ran[p].ms / 1e9 for p in precisions},
        "gemm_size": n,
    }


def bound_ms(cell: Cell, found: dict[str, Any]) -> float | None:
    """The roofline under the measured ceilings, ms."""
    flops, moved = work(cell)
    rate, peak = found.get("copy_gb_per_s"), found.get("tflops", {}).get(cell.precision)
    if not rate or not peak:
        return None
    return float(max(flops / peak / 1e9, moved / rate / 1e6))
