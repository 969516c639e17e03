"""Where a block of `fused_gemm` spends its time: PYTHONPATH=src python lab/timeline.py [--all] [CASE …], on a GPU.

Writes the clock at marks in the consumers and prints, tile by tile, microseconds between marks: the mean over all blocks and
both consumers, and beside it the largest. One launch each, behind an emptied L2; the marks themselves cost about a percent.
`precision=bf16,tf32,amp` (amp: bfloat16 operands and float32 y).
"""

import itertools
import sys
from dataclasses import replace

import numpy as np
import torch
from cuda.bindings import driver as cu
from device_check import CASES, Timer

from gemmnorm import plan
from gemmnorm.plan import Problem
from gemmnorm.runtime import binding, driver, sources
from gemmnorm.runtime import call as runtime

MARKS = ("wait for data", "main loop", "means", "squares, staging", "panel complete", "merged", "finished")
MOST = 40  # tiles of a block

HEADER = f"""
extern "C" __device__ unsigned long long timeline[1024 * {MOST * 8}];
__device__ __forceinline__ unsigned long long now() {{
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t) :: "memory");
  return t;
}}
"""
MARK = (
    "if (threadIdx.x % 128 == 0 && t / gridDim.x < "
    + str(MOST)
    + ") {{ const int at = ((blockIdx.x * 2 + consumer) * "
    + str(MOST)
    + " + t / gridDim.x) * 8 + {0}; timeline[at] = now(); timeline[at + 512 * "
    + str(MOST * 8)
    + "] = clock64(); }}\n"
)
# Pieces left out of the main loop, so that what is left shows what bounds it (results are then wrong).
VARIANTS = {
    "": (),
    "copies only": (
        (
            "            Wgmma<Element, kWidth>::run(acc, a + i * kKMajorStep, b + i * kKMajorStep, (k | i) ? 1 : 0);",
            "            ;",
        ),
    ),
    "multiplications only": (
        (
            "          mbarrier_expect_tx(&shared.full[stage], kPlanes * (rows + TN) * kRowBytes);",
            "          const bool first = t == blockIdx.x && k < STAGES;\n"
            "          if (first) mbarrier_expect_tx(&shared.full[stage], kPlanes * (rows + TN) * kRowBytes);\n"
            "          else mbarrier_arrive(&shared.full[stage]);",
        ),
        (
            "          for (int p = 0; p < kPlanes; ++p) {",
            "          for (int p = 0; p < (first ? kPlanes : 0); ++p) {",
        ),
    ),
}
# Text after which a mark goes, or before it.
PLACES = (
    (0, "before", "      for (int k = 0; k < steps; ++k) {\n        mbarrier_wait(&shared.full[stage], parity);"),
    (1, "after", "        mbarrier_wait(&shared.full[stage], parity);\n        wgmma_fence();\n"),
    (2, "before", "const Tile tile = raster.at(kSplit"),
    (3, "before", "        finish_here = kOneBlock ||"),
    (4, "after", "        mbarrier_arrive(&shared.staged[consumer]);\n"),
    (5, "before", "          float centre = 0.0f, r = 0.0f;\n          if (direct) {\n"),
    (6, "before", "      if (finish_here) {\n        constexpr bool kEvaluate"),
)


def instrumented(text):
    head = "template <class OP, class T, class Y"
    assert text.count(head) == 1
    text = text.replace(head, HEADER + head)
    for index, where, anchor in PLACES:
        assert text.count(anchor) == 1, anchor
        mark = MARK.format(index)
        if index == 1:
            mark = "if (k == 0) " + mark
        text = text.replace(anchor, anchor + mark if where == "after" else mark + anchor)
    end = "    if (FINISH == Finish::kPersistent) take_units"
    assert text.count("      }\n    }\n" + end) == 1
    text = text.replace("      }\n    }\n" + end, "      }\n" + MARK.format(7) + "    }\n" + end)
    last = "    if (resets) leave(shared.left);\n    if (kStagedY"
    assert text.count(last) == 1
    at_end = f"    if (thread == 0 && consumer == 0) timeline[(blockIdx.x * 2 + 1) * {MOST * 8} - 1] = now();\n"
    return text.replace(last, at_end + last)


def build(problem, strategy, variant):
    original = sources._read

    def read(name):
        text = original(name)
        if name != "gemm/fused_gemm.cuh":
            return text
        for old, new in VARIANTS[variant]:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return instrumented(text)

    sources._read = read
    p = plan.make_plan(problem, strategy)
    p = replace(p, steps=p.launches[:1], reasons=(("variant", variant),))
    bound = binding.bind(p)
    launch = p.launches[0]
    text = sources.translation_unit(launch, problem)
    sources._read = original
    (error, library) = cu.cuKernelGetLibrary(driver._kernel(text, launch.entry, 90).handle)
    (error, address, size) = cu.cuLibraryGetGlobal(library, b"timeline")
    assert int(error) == 0, error
    return p, bound, int(address), int(size)


RUNS = (
    (False, "one_kernel", ""),
    (False, "one_kernel", "copies only"),
    (False, "one_kernel", "multiplications only"),
    (True, "gemm_stats_apply", ""),
    (True, "one_kernel", ""),
)


def main():
    timer = Timer()
    everything = "--all" in sys.argv
    kinds = dict(a.split("=") for a in sys.argv[1:] if "=" in a).get("precision", "bf16").split(",")
    cases = [a for a in sys.argv[1:] if a in CASES] or ["kb33", "projector", "kb39"]
    for case, kind in itertools.product(cases, kinds):
        batch, wide, out, _, _, _ = CASES[case]
        operand, result = (torch.float32 if kind in of else torch.bfloat16 for of in (("tf32",), ("tf32", "amp")))
        x = torch.randn(batch, wide, device="cuda").to(operand)
        w = (torch.randn(out, wide, device="cuda") / wide**0.5).to(operand)
        names = ("bias", "scale", "bn_weight", "bn_bias", "running_mean")
        tensors = {name: torch.randn(out, device="cuda").to(result) for name in names}
        tensors |= {"x": x, "weight": w, "running_var": torch.rand(out, device="cuda").to(result) + 0.1}
        tensors["num_batches_tracked"] = torch.zeros((), dtype=torch.int64, device="cuda")
        for training, strategy, variant in RUNS:
            if variant and not everything:
                continue
            dtypes = [str(operand)[6:], *[str(result)[6:]] * 3]
            arithmetic = "tf32" if kind == "tf32" else "native"
            problem = Problem(
                batch, wide, out, *dtypes, arithmetic, None, training, False, True, runtime.chip(x.device)
            )
            p, bound, address, size = build(problem, strategy, variant)
            inputs = tuple(tensors.get(role) for role in binding.INPUTS["forward"])
            scalars = binding.scalars(p.problem, tensors["scale"], 1.0, 0.1, 1e-5)
            counts = []
            for _ in range(5):
                timer.flush.zero_()
                timer.flush.sum(dtype=torch.int64)
                torch.cuda._sleep(400_000)
                bound(inputs, scalars)
                torch.cuda.synchronize()
                host = np.zeros(size // 8, dtype=np.uint64)
                cu.cuMemcpyDtoH(host.ctypes.data, address, size)
                host = host.reshape(2, -1, MOST, 8)[:, :264].astype(np.float64)
                counts.append(host[0])
                clocks = host[1]
                cu.cuMemsetD8(address, 0, size)
            stamps = (
                np.median(
                    np.where(
                        np.stack(counts) == 0,
                        np.nan,
                        np.stack(counts) - np.array([c[c > 0].min() for c in counts])[:, None, None, None],
                    ),
                    axis=0,
                )
                / 1e3
            )
            rate = np.nanmedian((clocks[..., 2] - clocks[..., 1]) / (counts[-1][..., 2] - counts[-1][..., 1]))
            end, stamps[:, -1, 7] = np.nanmax(stamps[:, -1, 7]), np.nan
            tiles = int((~np.isnan(stamps[:, :, 0])).any(axis=0).sum())
            print(
                f"{case} {kind} {'train' if training else 'eval'} {strategy} {variant}: {np.nanmax(stamps):.1f} us from first mark to last, {end:.1f} to the end, {rate:.3f} GHz, {tiles} tiles"
            )
            print("   tile  begins", *(f"{mark:>18}" for mark in MARKS))
            for t in range(tiles):
                if 3 <= t < tiles - 2:
                    continue
                line, last = [], stamps[:, t, 0]
                for mark in range(1, 8):
                    here = stamps[:, t, mark]
                    if np.isnan(here).all():
                        line.append(" " * 18)
                        continue
                    d = here - last
                    line.append(f"{np.nanmean(d):10.2f} {np.nanmax(d):7.2f}")
                    last = here
                print(
                    f"   {t:4d} {np.nanmean(stamps[:, t, 0]):7.1f}",
                    *line,
                    f"  ends {np.nanmean(last):.1f} {np.nanmax(last):.1f}",
                )


if __name__ == "__main__":
    main()
