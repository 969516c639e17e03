"""What the planner's rules rest on: PYTHONPATH=src python lab/sweep.py few|many FILE.json, on a GPU; then, without one,
python lab/sweep.py judge FILE.json …

The first times every way to compute many problems, without gradients (`small_panel`, `fused_gemm`, the library and, of more
than 128 rows in training, `gemm_stats_apply`), in microseconds. The second says where the planner of today is more than 6%
behind the best of them. `grid.py` asks the same on a smaller grid, by running the module.
"""

import concurrent.futures
import itertools
import json
import sys
from dataclasses import replace

from grid import KINDS, compile_unit

from gemmnorm import plan
from gemmnorm.plan import hopper, small
from gemmnorm.runtime import binding, sources

FEW = (
    ("fp32", "tf32", "bf16"),
    (1, 2, 4, 8, 16, 32, 64, 128),
    (256, 512, 1024, 2048, 3072, 4096, 8192),
    (128, 256, 512, 1024, 2048, 4096, 8192),
    (True, False),
)
MANY = (
    ("bf16", "tf32", "fp32"),
    (192, 256, 512, 1024, 2048, 4096, 8192, 16384),
    (256, 1024, 2048, 4096, 8192),
    (64, 128, 256, 512, 1024, 2048, 4096),
    (True, False),
)
MOST = 1024 * 8192 * 4096  # multiplications
SHAPES = small.SHAPES
STRATEGIES = {"small": "one_kernel", "gemm": "one_kernel", "library": "cublas_folded_bn", "three": "gemm_stats_apply"}
WAY_OF = {"cublas_folded_bn": "library", "cublas_bn": "library", "gemm_stats_apply": "three"}


def problem_of(kind, batch, wide, out, training):
    dtype, arithmetic = KINDS[kind]
    return plan.Problem(batch, wide, out, *[dtype] * 4, arithmetic, None, training, False, True, plan.chip_for(90, 132))


def plans(problem):
    """By the way's name; those that serve."""
    rules = hopper.better_served, small._library_is_faster
    hopper.better_served, small._library_is_faster = (lambda *_: None), (lambda *_: False)
    found = {}
    for way, strategy in STRATEGIES.items():
        small.SHAPES = SHAPES if way == "small" else ()
        if way == "small" and small.shape(problem) is None:
            continue
        if way == "three" and not (problem.training and problem.batch > 128):
            continue
        made = plan.make_plan(problem, strategy)
        if made.strategy == strategy:
            found[way] = replace(made, reasons=((way, ""),))
    small.SHAPES, (hopper.better_served, small._library_is_faster) = SHAPES, rules
    return found


def sweep(axes, file):
    import torch
    from device_check import Timer

    problems = [p for p in itertools.product(*axes) if p[1] * p[2] * p[3] <= MOST and (p[1] > 1 or not p[4])]
    ways = [plans(problem_of(*p)) for p in problems]
    texts = {sources.translation_unit(x, w.problem): None for found in ways for w in found.values() for x in w.launches}
    with concurrent.futures.ProcessPoolExecutor() as pool:
        list(pool.map(compile_unit, texts))
    timer, rows = Timer(), []
    for (kind, batch, wide, out, training), found in zip(problems, ways, strict=True):
        dtype = getattr(torch, KINDS[kind][0])
        torch.backends.cuda.matmul.fp32_precision = "tf32" if kind == "tf32" else "none"

        def vector(out=out, dtype=dtype):
            return torch.rand(out, device="cuda", dtype=dtype) + 0.5

        tensors = {role: vector() for role in ("bias", "bn_weight", "bn_bias", "running_mean", "running_var")}
        tensors["x"] = torch.randn(batch, wide, device="cuda", dtype=dtype)
        tensors["weight"] = torch.randn(out, wide, device="cuda", dtype=dtype)
        tensors["num_batches_tracked"] = torch.zeros((), dtype=torch.int64, device="cuda")
        inputs, scale, calls = tuple(tensors.get(role) for role in binding.INPUTS["forward"]), vector(), {}
        for way, made in found.items():
            scalars = binding.scalars(made.problem, scale, 1.0, 0.1, 1e-5)
            calls[way] = lambda bound=binding.bind(made), i=inputs, s=scalars: bound(i, s)
        times = timer(calls, 11)
        rows.append([kind, batch, wide, out, training, {way: round(1e3 * t, 2) for way, t in times.items()}])
    with open(file, "w") as to:
        json.dump(rows, to)
    print(len(rows), "problems")


def judge(files):
    count = behind = 0
    for file in files:
        for *sizes, times in json.load(open(file)):
            problem = problem_of(*sizes)
            made = plan.make_plan(problem)
            way = WAY_OF.get(made.strategy) or ("small" if small.shape(problem) else "gemm")
            best, count = min(times, key=times.get), count + 1
            if times[way] > 1.06 * times[best]:
                behind += 1
                print(*sizes[:4], "training" if sizes[4] else "evaluation", f"{way}, but {best} is faster:", times)
    print(f"{count} problems, {behind} where the planner is more than 6% behind")


if __name__ == "__main__":
    if sys.argv[1] == "judge":
        judge(sys.argv[2:])
    else:
        sweep({"few": FEW, "many": MANY}[sys.argv[1]], sys.argv[2])
