"""Of how many rows a tile may merge the statistics for itself: PYTHONPATH=src python lab/direct_rows.py, on a GPU. In µs."""

import torch
from device_check import DTYPES, Timer

import gemmnorm
from gemmnorm import plan
from gemmnorm.runtime import binding, sources
from gemmnorm.runtime import call as runtime

SHAPES = ((4096, 512, 512), (4096, 512, 2048), (4096, 2048, 8192), (8192, 2048, 4096), (16384, 4096, 4096))
LIMITS = (2048, 4096, 8192, 16384)
read = sources._read


def main():
    timer = Timer()
    print("shape, rows merged directly:", *LIMITS)
    for precision in ("bf16", "tf32", "fp32"):
        torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "none"
        for batch, wide, out in SHAPES:
            x = torch.randn(batch, wide, device="cuda", dtype=DTYPES[precision])
            module = gemmnorm.LinearScaleBatchNorm1d(wide, out, device="cuda", dtype=DTYPES[precision])
            times = []
            for limit in LIMITS:

                def patched(name, limit=limit):
                    text = read(name)
                    if name == "gemm/panel_units.cuh":
                        assert "kDirectRows = " in text
                        start = text.index("kDirectRows = ")
                        text = text[:start] + f"kDirectRows = {limit};" + text[text.index(";", start) + 1 :]
                    return text

                sources._read = patched
                plan.cached_plan.cache_clear()
                binding.bind.cache_clear()
                runtime.forget()
                with torch.no_grad(), gemmnorm.set_strategy("one_kernel"):
                    times.append(timer({"call": lambda: module(x)}, 9)["call"] * 1e3)  # noqa: B023
            print(precision, batch, wide, out, *(f"{t:8.1f}" for t in times), flush=True)


if __name__ == "__main__":
    main()
