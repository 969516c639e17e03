"""Is the planner's choice the fastest? Every strategy over a grid of shapes: PYTHONPATH=src python lab/grid.py, on a GPU.

Forward without gradients, training and evaluation; arguments: precisions, and `few` for sizes with few features. Prints each
problem, and whether its planned strategy is more than 3% behind the best. Kernels are compiled by several processes first.
"""

import concurrent.futures
import itertools
import sys

import torch
from device_check import DTYPES, Timer

import gemmnorm
from gemmnorm import plan
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import driver, sources

BATCHES, FEW = (128, 256, 512, 1024, 2048, 4096), (1, 2, 16, 64)
WIDTHS = ((512, 512), (1024, 512), (512, 2048), (2048, 2048), (2048, 8192), (4096, 1024), (8192, 4096))
OF_FEW = ((64, 512), (256, 1024), (1024, 512), (1024, 2048), (3072, 512), (4096, 512), (4096, 1024), (8192, 512), (8192, 4096))
SIZES = tuple(dict.fromkeys((*itertools.product(BATCHES, WIDTHS), *itertools.product((*FEW, 128), OF_FEW))))
FEW_FEATURES = tuple(itertools.product((1024, 2048, 4096, 8192), itertools.product((256, 1024, 2048), (64, 128, 256))))
KINDS = {"bf16": ("bfloat16", "native"), "tf32": ("float32", "tf32"), "fp32": ("float32", "float32")}
LIBRARY_FIRST = ("cublas_folded_bn", "cublas_bn", "gemm_stats_apply", "one_kernel")


def compile_unit(text):
    cache = driver._disk_cache()
    if driver.recall(cache, text, 90) is None:
        driver.remember(cache, text, 90, bytes(driver._program(text, 90).compile("cubin").code))


def compile_all(precisions, sizes, chip):
    texts = {}
    for precision, (batch, (wide, out)), training in itertools.product(precisions, sizes, (True, False)):
        dtype, arithmetic = KINDS[precision]
        problem = plan.Problem(batch, wide, out, *[dtype] * 4, arithmetic, None, training, False, True, chip)
        for strategy in LIBRARY_FIRST:
            for launch in plan.make_plan(problem, strategy).launches:
                texts[sources.translation_unit(launch, problem)] = None
    with concurrent.futures.ProcessPoolExecutor() as pool:
        list(pool.map(compile_unit, texts))


@torch.no_grad()
def main():
    precisions = [name for name in sys.argv[1:] if name in KINDS] or tuple(KINDS)
    sizes = FEW_FEATURES if "few" in sys.argv[1:] else SIZES
    compile_all(precisions, sizes, runtime.chip(torch.device("cuda", 0)))
    timer, behind, count = Timer(), 0, 0
    for precision, (batch, (wide, out)), training in itertools.product(precisions, sizes, (True, False)):
        if training and batch == 1:
            continue
        dtype = DTYPES[precision]
        torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "none"
        module = gemmnorm.LinearScaleBatchNorm1d(wide, out, device="cuda", dtype=dtype).train(training)
        x = torch.randn(batch, wide, device="cuda", dtype=dtype)
        with runtime.recording() as plans:
            module(x)
        calls, chosen = {}, plans[0].strategy
        for strategy in LIBRARY_FIRST if training else LIBRARY_FIRST[:1] + LIBRARY_FIRST[-1:]:
            if plan.applicable(plans[0].problem)[strategy] is None:

                def call(strategy=strategy):
                    with gemmnorm.set_strategy(strategy):
                        module(x)  # noqa: B023

                calls[strategy] = call
        times = timer(calls, 17)
        best = min(times, key=times.get)
        count += 1
        late = times[chosen] > 1.03 * times[best]
        behind += late
        row = " ".join(f"{name} {1e3 * t:.1f}" for name, t in times.items())
        phase = "training" if training else "evaluation"
        print(f"{'BEHIND' if late else '      '} {precision} {batch} x {wide} -> {out} {phase}: {chosen}; {row}", flush=True)
    print(f"{count} problems, {behind} where the planner is more than 3% behind")


if __name__ == "__main__":
    main()
