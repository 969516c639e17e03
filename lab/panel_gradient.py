"""The backward up to the product's gradient, three launches against one, with other panels and clusters, beside a copy of as
many bytes: PYTHONPATH=src python lab/panel_gradient.py [--all], on a GPU. Microseconds, and the worst gradient against the three's.
"""

import itertools
import sys
from dataclasses import replace

import torch
from device_check import CASES, Timer

from gemmnorm import plan
from gemmnorm.plan import DTYPE_BYTES, NOTHING, Extent, Problem, gradient
from gemmnorm.runtime import binding
from gemmnorm.runtime import call as runtime

CASES |= {"4096": (4096, 512, 8192, True, True, None), "8192": (8192, 512, 4096, True, True, None),
          "kb39 ReLU": (16384, 4096, 4096, True, True, "relu"), "32768": (32768, 512, 2048, True, True, None),
          "32768 ReLU": (32768, 512, 2048, True, True, "relu")}  # fmt: skip
RUNS = (("kb33", "bf16"), ("kb33", "amp"), ("kb33", "fp32"), ("projector", "bf16"), ("projector", "fp32"), ("4096", "bf16"),
        ("4096", "fp32"), ("8192", "bf16"), ("8192", "fp32"), ("v0", "bf16"), ("kb39", "bf16"), ("kb39", "amp"), ("kb39", "fp32"),
        ("kb39 ReLU", "bf16"), ("kb39 ReLU", "amp"), ("kb39 ReLU", "fp32"), ("32768", "bf16"), ("32768 ReLU", "bf16"))  # fmt: skip
KINDS = {
    "bf16": ("bfloat16",) * 4,
    "amp": ("bfloat16", "float32", "float32", "float32"),
    "fp32": ("float32",) * 4,
}
NOT_SPLIT = (NOTHING, NOTHING)


def variant(problem, lanes, rows, cluster, resident, again):
    """The launch with another shape, or None where it does not fit or most warps have no rows. `again`: a cluster goes on to
    another panel, so that all clusters are there at once."""
    base = gradient.panel_launch(replace(problem, batch=64), NOT_SPLIT)
    shape = gradient.Shape(lanes, rows, cluster, DTYPE_BYTES[problem.dtype], DTYPE_BYTES[problem.out_dtype])
    if resident * (shape.shared + 1024) > gradient.SHARED + 1024 or shape.batch < problem.batch:
        return None
    blocks = resident * problem.chip.multiprocessors
    panels, at_once = -(-problem.out_features // shape.columns), (blocks * 10 // 11 if cluster > 2 else blocks) // cluster
    if again and panels <= at_once:
        return None
    constants = (*base.constants[:4], *map(str, (lanes, rows, cluster, shape.shared)), base.constants[8])
    grid = Extent((at_once if again else panels) * cluster)
    return replace(base, constants=constants, grid=grid, shared=shape.shared, cluster=cluster, resident=resident)


def turns(problem, rows, lag):
    """Blocks that take turns, `rows` rows to a warp."""
    base = gradient.unit_launch(problem, NOT_SPLIT)
    constants = (*base.constants[:4], str(rows), *base.constants[5:])
    return replace(base, constants=constants, grid=replace(base.grid, rows=8 * rows), numbers=(("lag", lag),))


def variants(problem, every):
    """Name and launch."""
    shipped = gradient.panel_launch(problem, NOT_SPLIT)
    if shipped is not None:
        yield "a cluster for each panel, shipped", shipped
    units = gradient.unit_launch(problem, NOT_SPLIT)
    if units is not None:
        yield "turns" + ("" if shipped else ", shipped"), units
    for choice in itertools.product((4, 8), (16, 32, 64), (1, 2, 4, 8), (1, 2, 3), (False, True)) if every else ():
        launch = variant(problem, *choice)
        if launch is not None:
            lanes, rows, cluster, resident, again = choice
            yield f"{lanes} lanes, {rows} rows, clusters of {cluster}, {resident} blocks{', again' if again else ''}", launch
    for rows, lag in itertools.product((16, 32), (2, 3, 4, 6, 8)) if every and units is not None else ():
        yield f"turns of {8 * rows} rows, {lag} panels between", turns(problem, rows, lag)


def main():
    timer = Timer()
    for case, kind in RUNS:
        batch, wide, out, _, _, activation = CASES[case]
        names = KINDS[kind]
        t, y, linear = (getattr(torch, name) for name in names[:3])
        arithmetic = "tf32" if kind == "fp32" else "native"
        problem = Problem(
            batch, wide, out, *names, arithmetic, activation, save=True, chip=runtime.chip(torch.device("cuda", 0))
        )
        base = plan.make_plan(problem, "one_kernel", "backward")
        products = tuple(step for step in base.steps if isinstance(step, plan.Product))
        product = next(b for b in base.workspace if b.role == "grad_product")
        between = (*gradient._between(problem), *gradient._vectors(problem, "merged_slope", "merged_shift"))
        three = replace(
            base,
            steps=(*gradient._three_launches(problem, NOT_SPLIT), *products),
            workspace=(*between, product),
            counters=0,
        )
        random = lambda *shape, dtype=t: torch.randn(*shape, device="cuda", dtype=dtype)  # noqa: E731
        statistics = torch.cat([random(1, out, dtype=torch.float32), random(1, out, dtype=torch.float32).abs() + 0.5,
                                random(-(-batch // 64), out, dtype=torch.float32)])  # fmt: skip
        vectors = [random(out, dtype=linear) for _ in range(4)]
        inputs = (
            random(batch, out, dtype=y),
            random(batch, wide),
            random(out, wide),
            *vectors,
            random(batch, out),
            statistics,
        )
        scalars = binding.scalars(problem, vectors[1], 1.0, 0.1, 1e-5)
        want = binding.Bound(three)(inputs, scalars)
        calls = {"three launches": binding.Bound(replace(three, steps=three.launches))}
        moved = torch.empty(batch * out * (2 * t.itemsize + y.itemsize) // 2, dtype=torch.uint8, device="cuda")
        calls["a copy"] = lambda *_, to=torch.empty_like(moved), moved=moved: to.copy_(moved)
        for name, launch in variants(problem, "--all" in sys.argv):
            panel = replace(base, steps=(launch, *products), workspace=(*between, product), counters=4096)
            got = binding.Bound(panel)(inputs, scalars)
            worst = max(
                float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-20))
                for a, b in zip(got, want, strict=True)
            )
            calls[f"{name} ({worst:.1e})"] = binding.Bound(replace(panel, steps=(launch,)))
        print(case, kind)
        times = timer({name: lambda call=call: call(inputs, scalars) for name, call in calls.items()}, 9)  # noqa: B023
        for name, ms in times.items():
            print(f"  {ms * 1e3:8.1f} us  {name}", flush=True)


if __name__ == "__main__":
    main()
