"""Panels that the fused GEMM works on together: PYTHONPATH=src python lab/panels.py, on a GPU. Microseconds by their number."""

import torch
from device_check import CASES, DTYPES, Timer

import gemmnorm
from gemmnorm import plan
from gemmnorm.plan import hopper
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime.operands import Operands

COUNTS = {
    ("kb39", "bf16"): (2, 3, 4, 5, 6, 7, 8),
    ("kb39", "tf32"): (1, 2, 3, 4, 5, 6, 7),
    ("kb39", "fp32"): (3, 4, 5, 6, 7, 8, 10),
    ("projector", "bf16"): (3, 4, 5, 6, 7, 8, 9, 10, 11, 16),
    ("projector", "tf32"): (4, 5, 6, 7, 8, 9, 10, 16),
    ("kb33", "bf16"): (4, 6, 8, 10, 11, 16),
    ("kb33", "tf32"): (4, 6, 8, 10, 11, 16),
}


def call_with(module, x, count):
    """A forward that is planned with `count` panels; the planner's own number for 0."""
    own = hopper._group_panels
    if count:
        hopper._group_panels = lambda problem, tile: count
    try:
        plan.cached_plan.cache_clear()
        runtime.forget()
        with gemmnorm.set_strategy("one_kernel"):
            module(x)
    finally:
        hopper._group_panels = own
    (call,) = runtime._calls.values()
    bn, vectors = module.bn, (module.gemm.bias, module.scale)
    state = (bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.weight, bn.bias)
    return lambda: call.forward(Operands(x, module.gemm.weight, *vectors, *state))


def main():
    timer = Timer()
    for (case, precision), counts in COUNTS.items():
        batch, wide, out, bias, scale, activation = CASES[case]
        torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "none"
        dtype = DTYPES[precision]
        module = gemmnorm.LinearScaleBatchNorm1d(
            wide, out, bias, scale, activation=activation, device="cuda", dtype=dtype
        )
        x = torch.randn(batch, wide, device="cuda", dtype=dtype)
        with torch.no_grad():
            for training in (True, False):
                module.train(training)
                calls = {"GEMM": lambda: torch.mm(x, module.gemm.weight.t())} if precision != "fp32" else {}  # noqa: B023
                calls |= {str(count or "own"): call_with(module, x, count) for count in (0, *counts)}
                times = "  ".join(f"{name}: {ms * 1e3:.1f}" for name, ms in timer(calls, 9).items())
                print(case, precision, "train" if training else "eval ", times, flush=True)


if __name__ == "__main__":
    main()
