"""What a stage of `split_fused_gemm` spends its clocks on: PYTHONPATH=src python lab/stages.py, on a GPU.

Clocks at five places of eight consecutive stages in the middle of every block's second tile; the mean over blocks, by
consumer. "Between" is from the end of one stage to the data of the next.
"""

import sys
from dataclasses import replace

import numpy as np
import torch
from cuda.bindings import driver as cu
from device_check import CASES, Timer
from variants import OF_SPLIT

from gemmnorm import binding, driver, plan, runtime, sources
from gemmnorm.plan import Problem

FIRST, STAGES = 24, 8
HEADER = f'extern "C" __device__ unsigned long long timeline[132 * 2 * {STAGES} * 8];\n'
MARK = (
    f"if (threadIdx.x % 128 == 0 && t / gridDim.x == 1 && k >= {FIRST} && k < {FIRST + STAGES}) "
    f"timeline[((blockIdx.x * 2 + consumer) * {STAGES} + k - {FIRST}) * 8 + {{0}}] = {{1}};\n"
)
GLOBAL = "[] { unsigned long long v; asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(v)); return v; }()"
PLACES = (
    (0, "        u32 high[4][4], low[4][4];\n", "before"),
    (1, "        wgmma_fence();\n        const u64 x_high", "before"),
    (2, "        for (int i = 0; i < 32; ++i) acc[i] += computed_anew(part[i]);\n", "after"),
    (3, "        for (int i = 0; i < 32; ++i) acc[32 + i] += computed_anew(part[i]);\n", "after"),
    (4, "        wgmma_wait<0>();\n        __syncwarp();\n", "after"),
)


def instrumented(text):
    text = text.replace("template <int STAGES, bool AHEAD>\nstruct SplitFused", HEADER + "template <int STAGES, bool AHEAD>\nstruct SplitFused")
    assert HEADER in text
    for index, anchor, where in PLACES:
        assert text.count(anchor) == 1, anchor
        mark = MARK.format(index, "clock64()")
        if index == 0:
            mark += MARK.format(5, GLOBAL)
        text = text.replace(anchor, mark + anchor if where == "before" else anchor + mark)
    return text


def build(problem, name):
    original = sources._read

    def read(file):
        text = original(file)
        for where, old, new in OF_SPLIT[name]:
            if where == file:
                assert old in text, old
                text = text.replace(old, new)
        return instrumented(text) if file == "split_fused_gemm.cuh" else text

    sources._read = read
    p = replace(plan.make_plan(problem, "one_kernel"), reasons=((name, ""),))  # another key for the cache of bound plans
    bound = binding.bind(p)
    launch = p.launches[1]
    text = sources.translation_unit(launch, problem)
    sources._read = original
    _, library = cu.cuKernelGetLibrary(driver._kernel(text, launch.entry, 90).handle)
    error, address, size = cu.cuLibraryGetGlobal(library, b"timeline")
    assert int(error) == 0, error
    return bound, int(address), int(size)


def main():
    timer = Timer()
    names = sys.argv[2:] or ["as it is", "consumers in step"]
    batch, wide, out, *_ = CASES[(sys.argv[1:] or ["kb33"])[0]]
    x, w = torch.randn(batch, wide, device="cuda"), torch.randn(out, wide, device="cuda") / wide**0.5
    v = {name: torch.rand(out, device="cuda") + 0.5 for name in ("bias", "bn_weight", "bn_bias", "running_mean", "running_var")}
    tensors = v | {"x": x, "weight": w}
    for name in names:
        problem = Problem(batch, wide, out, training=False, chip=runtime.chip(x.device))
        runtime.forget()
        plan.cached_plan.cache_clear()
        bound, address, size = build(problem, name)
        inputs = tuple(tensors.get(role) for role in binding.INPUTS["forward"])
        scalars = runtime._scalars(problem, v["bias"], 1.0, 0.1, 1e-5)
        for _ in range(3):
            timer.flush.zero_()
            torch.cuda._sleep(400_000)
            bound(inputs, scalars)
            torch.cuda.synchronize()
        host = np.zeros(size // 8, dtype=np.uint64)
        cu.cuMemcpyDtoH(host.ctypes.data, address, size)
        t = host.reshape(132, 2, STAGES, 8).astype(np.float64)
        rate = (t[:, :, -1, 0] - t[:, :, 0, 0]) / (t[:, :, -1, 5] - t[:, :, 0, 5])
        print(f"{name}: {np.median(rate):.3f} GHz")
        for consumer in (0, 1):
            c = t[:, consumer]
            spans = [c[:, :, i + 1] - c[:, :, i] for i in range(4)] + [c[:, 1:, 0] - c[:, :-1, 4]]
            labels = ("convert (and turn)", "first half", "second half", "rest", "between")
            stage = (c[:, -1, 0] - c[:, 0, 0]).mean() / (STAGES - 1)
            print(f"  consumer {consumer}: {stage:.0f} a stage:", *(f"{n} {s.mean():.0f} ({s.max():.0f})," for n, s in zip(labels, spans)))
        print("  offset of the consumers:", np.mean(t[:, 1, :, 1] - t[:, 0, :, 1]).round())


if __name__ == "__main__":
    main()
