"""How much of the split is done before the product, and how much inside it: PYTHONPATH=src python lab/ahead.py, on a GPU.

A share of 0 is what the first wave of tiles needs, 1 is everything.
"""

import torch
from device_check import CASES, Timer

import gemmnorm
from gemmnorm import plan, runtime
from gemmnorm.plan import hopper

first_wave = hopper._rows_ahead
timer = Timer()
for case in ("kb33", "kb39", "projector"):
    batch, wide, out, bias, scale, activation = CASES[case]
    module = gemmnorm.LinearScaleBatchNorm1d(wide, out, bias, scale, activation=activation, device="cuda")
    x = torch.randn(batch, wide, device="cuda")
    for training in (True, False):
        module.train(training)
        times = []
        for share in (0.0, 0.15, 0.3, 0.5, 0.75, 1.0):

            def rows(problem, tile, panels, share=share):
                x_rows, weight_rows = first_wave(problem, tile, panels)
                x_rows = min(x_rows, problem.batch)
                x_rows += int(share * (problem.batch - x_rows)) // 128 * 128
                weight_rows += int(share * (problem.out_features - weight_rows)) // 128 * 128
                return x_rows, weight_rows

            hopper._rows_ahead = rows
            plan.cached_plan.cache_clear()
            runtime.forget()
            with torch.no_grad():
                times.append(timer({"call": lambda: module(x)}, 7)["call"] * 1e3)
        print(f"{case} {'train' if training else 'eval '}", " ".join(f"{t:8.1f}" for t in times), flush=True)
