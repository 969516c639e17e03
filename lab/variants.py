"""Times the fused GEMM with pieces exchanged, beside the bare GEMM: PYTHONPATH=src python lab/variants.py, on a GPU.

Arguments: case=kb33,… precision=bf16,tf32 variant="as it is,…"

A variant is a list of (file, old text, new text) in the kernels' sources; every old text must occur. Microseconds.
"""

import contextlib
import itertools
import sys
from dataclasses import replace

import torch
from device_check import CASES, Timer

from gemmnorm import plan
from gemmnorm.plan import Problem, hopper
from gemmnorm.runtime import binding, sources
from gemmnorm.runtime import call as runtime

GEMM, UNITS = "gemm/fused_gemm.cuh", "gemm/panel_units.cuh"
NO_UNITS = [  # wrong results; every tile merges for itself, or it would wait for ever
    (UNITS, "  for (;;) {\n    int unit = 0;", "  for (;;) {\n    return;\n    int unit = 0;"),
    (UNITS, "kDirectRows = 8192", "kDirectRows = 1 << 30"),
]
VARIANTS = {
    "as it is": [],
    "x stays in the L2": [(GEMM, "stream_x ? kEvictFirst : kEvictNormal", "kEvictNormal")],
    "x leaves it": [(GEMM, "stream_x ? kEvictFirst : kEvictNormal", "kEvictFirst")],
    "2 rows in flight": [(UNITS, "2 * AHEAD>(f, product", "AHEAD / 2>(f, product")],
    "no units": NO_UNITS,
}
OF_SPLIT = {
    "as it is": [],
    "no units": NO_UNITS,
    "all split before": [],
}
ONLY_TRAINING = ("2 rows in flight", "no units")


@contextlib.contextmanager
def changed(changes):
    """The kernels' sources with pieces exchanged."""
    original = sources._read

    def read(file):
        text = original(file)
        for where, old, new in changes:
            if where == file:
                assert old in text, old
                text = text.replace(old, new)
        return text

    sources._read = read
    try:
        yield
    finally:
        sources._read = original


def build(problem, strategy, name):
    rows_ahead = hopper._rows_ahead
    try:
        if name == "all split before":
            hopper._rows_ahead = lambda *_: (hopper.ALL_ROWS, problem.out_features)
        p = plan.make_plan(problem, strategy)
        p = replace(p, reasons=((name, ""),))  # another key for the cache of bound plans
        with changed((OF_SPLIT if problem.split else VARIANTS)[name]):
            binding.bind(p)
    finally:
        hopper._rows_ahead = rows_ahead
    return p


def main():
    timer = Timer()
    arguments = dict(a.split("=") for a in sys.argv[1:])
    for case, precision in itertools.product(
        arguments.get("case", "kb33,kb39,projector").split(","), arguments.get("precision", "bf16,tf32").split(",")
    ):
        batch, wide, out, bias, scale, activation = CASES[case]
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "none"
        x = torch.randn(batch, wide, device="cuda", dtype=dtype)
        w = torch.randn(out, wide, device="cuda", dtype=dtype) / wide**0.5
        tensors = {
            name: torch.randn(out, device="cuda", dtype=dtype) for name in ("bn_weight", "bn_bias", "running_mean")
        }
        tensors |= {"bias": torch.randn(out, device="cuda", dtype=dtype) if bias else None}
        tensors |= {"x": x, "weight": w, "running_var": torch.rand(out, device="cuda", dtype=dtype) + 0.1}
        tensors["num_batches_tracked"] = torch.zeros((), dtype=torch.int64, device="cuda")
        scales = torch.randn(out, device="cuda", dtype=dtype) if scale else None
        name, arithmetic = str(dtype)[6:], "float32" if precision == "fp32" else precision
        calls = {"GEMM": lambda: torch.mm(x, w.t())}  # noqa: B023
        for phase, variant in itertools.product(
            ("eval", "stats", "train"), OF_SPLIT if precision == "fp32" else VARIANTS
        ):
            if variant not in arguments.get("variant", variant).split(","):
                continue
            if precision == "fp32":
                if phase == "stats" or (phase == "eval" and variant == "no units"):
                    continue
            elif phase != "train" and variant in ONLY_TRAINING:
                continue
            problem = Problem(
                batch,
                wide,
                out,
                *[name] * 4,
                arithmetic,
                activation,
                phase != "eval",
                False,
                scale,
                runtime.chip(x.device),
            )
            p = build(problem, "gemm_stats_apply" if phase == "stats" else "one_kernel", variant)
            inputs = tuple(tensors.get(role) for role in binding.INPUTS["forward"])
            scalars = binding.scalars(p.problem, scales, 1.0, 0.1, 1e-5)
            bound = binding.bind(p)
            calls[f"{phase}, {variant}"] = lambda bound=bound, inputs=inputs, scalars=scalars: bound(inputs, scalars)
        times = timer(calls, 15)
        for label, ms in times.items():
            print(f"{case:10} {precision} {label:32} {ms * 1e3:8.1f}  R {ms / times['GEMM']:.3f}", flush=True)


if __name__ == "__main__":
    main()
