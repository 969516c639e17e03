"""Where the time of a call goes, kernel by kernel, as the profiler sees it on a GPU.

    PYTHONPATH=src python lab/launches.py [--case kb33 131072x64x64 …] [--precision fp32 …] [--strategy one_kernel auto …] [--phase train …]

Times are medians over calls behind an emptied L2; the kernels of one call follow each other as in use.
"""

import argparse
import itertools
import statistics

import torch
from device_check import CASES, DTYPES
from torch.profiler import ProfilerActivity, profile

import gemmnorm


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--case", nargs="*", default=["kb33", "kb39", "projector"])
    options.add_argument("--precision", nargs="*", default=["fp32"])
    options.add_argument("--strategy", nargs="*", default=["one_kernel"])
    options.add_argument("--phase", nargs="*", default=["train", "eval", "step"])
    options = options.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for case, precision, strategy, phase in itertools.product(
        options.case, options.precision, options.strategy, options.phase
    ):
        sizes = map(int, case.split("x")) if case[0].isdigit() else ()
        batch, wide, out, bias, scale, activation = CASES[case] if case in CASES else (*sizes, False, None, "relu")
        torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "none"
        module = gemmnorm.LinearScaleBatchNorm1d(
            wide, out, bias, scale, activation=activation, device="cuda", dtype=DTYPES[precision]
        ).train(phase != "eval")
        x = torch.randn(batch, wide, device="cuda", dtype=DTYPES[precision], requires_grad=phase == "step")
        grad = torch.randn(batch, out, device="cuda", dtype=DTYPES[precision])

        def call():
            with gemmnorm.set_strategy(None if strategy == "auto" else strategy), torch.set_grad_enabled(phase == "step"):
                y = module(x)
                if phase == "step":
                    y.backward(grad)

        for _ in range(3):
            call()
        calls = 7
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(calls):
                flush.zero_()
                call()
        torch.cuda.synchronize()
        times = {}
        for event in seen.events():
            times.setdefault(event.name, []).append(event.device_time_total)
        print(f"{case} {precision} {strategy} {phase}")
        for name, values in times.items():
            if not name.startswith("void at::native::vectorized_elementwise_kernel<16, at::native::FillFunctor<unsigned"):
                print(f"  {statistics.median(values):9.1f} us  {len(values) / calls:4.1f} x  {name[:100]}")


if __name__ == "__main__":
    main()
