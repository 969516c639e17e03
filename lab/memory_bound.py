"""Bandwidth of each memory-bound kernel alone, beside PyTorch's `relu_` and `sum` of a tensor of that size.

    PYTHONPATH=src python lab/memory_bound.py [BATCHxOUTxDTYPE …]
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from gemmnorm import plan
from gemmnorm.bench import candidates as timed
from gemmnorm.plan import cublas, gradient
from gemmnorm.runtime import binding

SIZES = (
    "36176x1464xfloat32", "105528x432xfloat32", "78528x280xfloat32", "65536x1024xfloat32", "29248x1104xbfloat16", "111368x600xbfloat16",
    "120192x256xbfloat16", "65536x1024xbfloat16", "105528x432xbfloat16", "17664x896xbfloat16", "99384x272xbfloat16", "2048x8192xbfloat16",
    "89000x64xbfloat16", "5000x300xbfloat16",
)  # fmt: skip
TRIPS = {"column_statistics": 1, "normalize": 2, "gradient_sums": 2, "product_gradient": 3}  # through memory


def backward(problem):
    """A plan of the backward by three launches, whatever the planner would take."""
    return gradient.Backward("three launches").plan(problem, "cublas_folded_bn")


def measure(text):
    *sizes, dtype = text.split("x")
    batch, features = map(int, sizes)
    arithmetic = "ieee" if dtype == "float32" else "native"
    y = torch.empty(batch, features, dtype=getattr(torch, dtype), device="cuda").normal_()
    calls, trips = {"relu_": lambda: torch.relu_(y), "sum": lambda: torch.sum(y)}, {"relu_": 2, "sum": 1}
    for phase, training, activation in (
        ("forward", True, None), ("forward", True, "relu"), ("forward", False, None), ("backward", True, None), ("backward", True, "relu")
    ):  # fmt: skip
        problem = plan.Problem(
            batch, 8, features, *[dtype] * 4, arithmetic, activation, chip=plan.chip_for(90, 132), training=training, save=phase == "backward"
        )
        made = backward(problem) if phase == "backward" else cublas.forward(problem, "cublas_folded_bn")
        given = timed.tensors(problem, phase, "cuda")
        scalars = binding.scalars(problem, given["scale"], 1.0, 0.1, 1e-5)
        inputs = tuple(given.get(role) for role in binding.INPUTS[phase])
        for launch in made.launches:
            if launch.function not in TRIPS:
                continue
            run = binding.Bound(replace(made, steps=(launch,)))
            name = f"{launch.function}{'' if training else ' in evaluation'} {activation or ''}".strip()
            calls[name] = lambda run=run, inputs=inputs, scalars=scalars: run([*inputs], scalars)
            trips[name] = TRIPS[launch.function]
            calls[name]()
    torch.cuda.synchronize()
    print(f"{text}: {y.nbytes / 1e6:.1f} MB")
    for name, us in timed.medians(timed.sampled(calls, timed.QueueClock(), 7)).items():
        print(f"   {us:8.1f} µs {trips[name] * y.nbytes / 1e6 / us:6.2f} TB/s  {name}")
    sys.stdout.flush()


for asked in sys.argv[1:] or SIZES:
    measure(asked)
