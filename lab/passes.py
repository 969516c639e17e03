"""The memory-bound kernels one by one, beside a copy: bytes moved a second, with variants of their sources.

    PYTHONPATH=src python lab/passes.py [case] [precision …]        on a GPU
"""

import sys
from dataclasses import replace

import torch
from device_check import CASES, DTYPES, Timer

from gemmnorm import plan
from gemmnorm.plan import Problem
from gemmnorm.runtime import binding, sources
from gemmnorm.runtime import call as runtime

NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
# Function → elements of [B, O] that it reads and writes, in units of the product's element. Statistics of groups of 64
# rows, two float32 each, come on top.
TRAFFIC = {
    "column_statistics": 1, "normalize": 2, "gradient_sums": 2, "product_gradient": 3, "split_gradient": 3,
    "cluster_gradient": 3,
}  # fmt: skip
AT_ONCE = "P::kRows < 4 ? P::kRows : 4;"
VARIANTS = {
    "as shipped": {},
    "8 rows at once": {"replace": [(AT_ONCE, "P::kRows < 8 ? P::kRows : 8;")]},
    "2 rows at once": {"replace": [(AT_ONCE, "P::kRows < 2 ? P::kRows : 2;")]},
    "3 blocks": {"resident": 3},
    "4 blocks": {"resident": 4},
    "2 rows, 4 blocks": {"resident": 4, "replace": [(AT_ONCE, "P::kRows < 2 ? P::kRows : 2;")]},
    "2 rows, 3 blocks": {"resident": 3, "replace": [(AT_ONCE, "P::kRows < 2 ? P::kRows : 2;")]},
    "8 rows, 1 block": {"resident": 1, "replace": [(AT_ONCE, "P::kRows < 8 ? P::kRows : 8;")]},
}
read = sources._read


def main():
    case = sys.argv[1] if len(sys.argv) > 1 else "kb39"
    timer = Timer()
    for precision in sys.argv[2:] or ["bf16", "fp32"]:
        batch, wide, out, _, _, activation = CASES[case]
        dtype, name = DTYPES[precision], NAMES[precision]
        arithmetic = "float32" if name == "float32" else "native"
        problem = Problem(batch, wide, out, name, name, name, name, arithmetic, activation, True, True, True,
                          runtime.chip(torch.device("cuda", 0)))  # fmt: skip
        size = batch * out * dtype.itemsize
        a, b = (torch.empty(batch, out, device="cuda", dtype=dtype) for _ in range(2))
        copy = timer({"copy": lambda a=a, b=b: a.copy_(b)}, 15)["copy"]
        print(f"{case} {precision}: copy {copy * 1e3:.1f} us, {2 * size / copy / 1e9:.2f} TB/s")
        vector = lambda n, d=dtype: torch.ones(n, device="cuda", dtype=d)  # noqa: E731
        x = torch.randn(batch, wide, device="cuda", dtype=dtype)
        weight = torch.randn(out, wide, device="cuda", dtype=dtype)
        for phase, strategy in (("forward", "cublas_folded_bn"), ("backward", "one_kernel")):
            chosen = plan.make_plan(problem, strategy, phase)
            scalars = binding.scalars(problem, vector(out), 1.0, 0.1, 1e-5)
            if phase == "forward":
                counter = torch.tensor(5, device="cuda")
                inputs = (x, weight, *(vector(out) for _ in range(4)), counter, vector(out), vector(out))
            else:
                groups = 2 + (-(-batch // 64) if chosen.keeps_offsets else 0)
                inputs = (b.clone().normal_(), x, weight, *(vector(out) for _ in range(4)), a.normal_(),
                          torch.randn(groups, out, device="cuda"))  # fmt: skip
            for launch in chosen.launches:
                if launch.function not in TRAFFIC:
                    continue
                for title, variant in VARIANTS.items():

                    def patched(file, changes=variant.get("replace", [])):
                        text = read(file)
                        for old, new in changes:
                            text = text.replace(old, new)
                        return text

                    sources._read = patched
                    if "replace" in variant and AT_ONCE not in read(launch.source):
                        continue
                    changed = replace(launch, resident=variant.get("resident", launch.resident))
                    try:
                        bound = binding.Bound(replace(chosen, steps=(changed,)))
                        time = timer({"pass": lambda: bound(inputs, scalars)}, 9)["pass"]  # noqa: B023
                    finally:
                        sources._read = read
                    groups = 8 * out * -(-batch // 64) if launch.function in ("column_statistics", "gradient_sums") else 0
                    rate = (TRAFFIC[launch.function] * size + groups) / time / 1e9
                    share = rate / (2 * size / copy / 1e9)
                    print(f"  {launch.function:18} {title:18} {time * 1e3:8.1f} us {rate:6.2f} TB/s  {share:4.0%} of the copy")


if __name__ == "__main__":
    main()
