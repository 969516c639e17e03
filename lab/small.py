"""Few rows: PYTHONPATH=src python lab/small.py [training|evaluation] [fp32|tf32|bf16], on a GPU.

Replay of a CUDA graph of twenty calls, µs, and errors of y.
"""

import copy
import statistics
import sys

import torch
from device_check import DTYPES, Chain, error

import gemmnorm
from gemmnorm import plan
from gemmnorm.plan import hopper, small
from gemmnorm.runtime import call as runtime

SIZES = ((128, 256, 1024), (128, 512, 512), (128, 512, 4096), (64, 1024, 256), (128, 1024, 512), (128, 1024, 2048),
         (128, 3072, 512), (128, 4096, 512), (128, 4096, 1024), (128, 8192, 512), (128, 6144, 896),
         (64, 4096, 512), (64, 4096, 1024), (64, 8192, 512), (64, 6144, 896))  # fmt: skip
WAYS = {"small_panel": (small.SHAPES, "one_kernel"), "fused_gemm": ((), "one_kernel"), "cublas_folded_bn": ((), "cublas_folded_bn")}


def replay(call):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 50)
    return statistics.median(times)


@torch.no_grad()
def main():
    hopper.better_served = lambda problem: None
    small._library_is_faster = lambda *_: False
    training = "evaluation" not in sys.argv
    precision = next((name for name in DTYPES if name in sys.argv), "fp32")
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "none"
    for batch, wide, out in SIZES:
        m = gemmnorm.LinearScaleBatchNorm1d(wide, out, device="cuda", dtype=DTYPES[precision]).train(training)
        x, weight = torch.randn(batch, wide, device="cuda", dtype=DTYPES[precision]), m.gemm.weight
        eager, exact = Chain(m).train(training), Chain(copy.deepcopy(m).double()).train(training)
        golden = exact(x.double())
        figures = [f"mm {replay(lambda: torch.mm(x, weight.t())):.1f}"]  # noqa: B023
        figures.append(f"eager {replay(lambda: eager(x)):.1f} ({error(eager(x), golden):.1e})")  # noqa: B023
        for name, (shapes, strategy) in WAYS.items():
            small.SHAPES = shapes
            plan.cached_plan.cache_clear()
            runtime.forget()
            with gemmnorm.set_strategy(strategy):
                figures.append(f"{name} {replay(lambda: m(x)):.1f} ({error(m(x), golden):.1e})")  # noqa: B023
        print((batch, wide, out), "  ".join(figures), flush=True)


if __name__ == "__main__":
    main()
