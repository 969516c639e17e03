"""Is the planner's choice the fastest? Every strategy over a grid of shapes: PYTHONPATH=src python lab/grid.py, on a GPU.

Training forward without gradients. Prints each problem whose planned strategy is more than 3% behind the best.
"""

import itertools
import sys

import torch
from device_check import DTYPES, Timer

import gemmnorm
from gemmnorm import plan, runtime

BATCHES, WIDTHS = (128, 256, 512, 1024, 2048, 4096), ((512, 512), (1024, 512), (512, 2048), (2048, 2048), (2048, 8192), (4096, 1024), (8192, 4096))
LIBRARY_FIRST = ("cublas_folded_bn", "cublas_bn", "gemm_stats_apply", "one_kernel")


def main():
    timer, behind, count = Timer(), 0, 0
    for precision in sys.argv[1:] or ("bf16", "tf32", "fp32"):
        dtype = DTYPES[precision]
        torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "none"
        for batch, (wide, out) in itertools.product(BATCHES, WIDTHS):
            module = gemmnorm.LinearScaleBatchNorm1d(wide, out, device="cuda", dtype=dtype)
            x = torch.randn(batch, wide, device="cuda", dtype=dtype)
            calls, chosen = {}, None
            with torch.no_grad():
                with runtime.recording() as plans:
                    module(x)
                chosen = plans[0].strategy
                for strategy in LIBRARY_FIRST:
                    if plan.applicable(plans[0].problem)[strategy] is None:

                        def call(strategy=strategy):
                            with gemmnorm.set_strategy(strategy):
                                module(x)  # noqa: B023

                        calls[strategy] = call
                times = timer(calls, 7)
            best = min(times, key=times.get)
            count += 1
            late = times[chosen] > 1.03 * times[best]
            behind += late
            row = " ".join(f"{name} {1e3 * t:.1f}" for name, t in times.items())
            print(f"{'BEHIND' if late else '      '} {precision} {batch} x {wide} -> {out}: {chosen}; {row}", flush=True)
    print(f"{count} problems, {behind} where the planner is more than 3% behind")


if __name__ == "__main__":
    main()
