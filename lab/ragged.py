"""Rows and features that fill no tile: the planner's first choices, beside the bare product, in µs.

    PYTHONPATH=src python lab/ragged.py [BATCHxINxOUT …]
"""

from __future__ import annotations

import sys

import torch
from gram_check import inputs

from gemmnorm import plan
from gemmnorm.bench import candidates as timed
from gemmnorm.plan import candidates
from gemmnorm.runtime import binding

SIZES = (
    (192, 4096, 4096), (5816, 2152, 96), (43064, 792, 88), (24936, 1872, 168), (1440, 8288, 696), (5544, 8112, 16),
    (1032, 4096, 4096), (1168, 1232, 4584), (65544, 512, 520), (1024, 8192, 8192), (16384, 4096, 4096),
)  # fmt: skip
CHOICES = 4


def main() -> None:
    sizes = [tuple(map(int, a.split("x"))) for a in sys.argv[1:]] or SIZES
    jobs = []
    for size in sizes:
        for training in (False, True):
            problem = plan.Problem(*size, *["bfloat16"] * 4, "native", training=training, chip=plan.chip_for(90, 132))
            every = [c for c in candidates.candidates(problem) if c.refusal is None and c.strategy != "cublas_bn"]
            jobs.append((problem, sorted(every, key=lambda c: c.cost())[:CHOICES]))
    timed.compile_units([text for _, chosen in jobs for c in chosen for text in timed.units(c)], 90)
    with torch.no_grad():
        for problem, chosen in jobs:
            args, given = inputs(problem)
            scalars = binding.scalars(problem, given["scale"], 1.0, 0.1, 1e-5)
            x, weight = given["x"], given["weight"]
            out = torch.empty(problem.batch, problem.out_features, device="cuda", dtype=x.dtype)
            calls = {"GEMM": lambda: torch.mm(x, weight.t(), out=out)}
            for c in chosen:
                run = binding.Bound(c.plan())
                calls[f"{c.name} [{c.cost():.1f}]"] = lambda run=run: run([*args], scalars)
            for call in calls.values():
                call()
            torch.cuda.synchronize()
            times = timed.medians(timed.sampled(calls, timed.QueueClock()))
            what = f"{problem.batch}x{problem.in_features}->{problem.out_features} {'train' if problem.training else 'eval'}"
            print(f"{what:26} " + " | ".join(f"{us:.1f} {name}" for name, us in times.items()), flush=True)


if __name__ == "__main__":
    main()
