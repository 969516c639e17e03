"""The cluster kernel for small problems: in the emulator (no GPU), or checked and timed on a Hopper GPU.

    PYTHONPATH=src python lab/cluster_gemm/check.py [--device]
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))
import torch

from gemmnorm import binding, plan, runtime, sources
from gemmnorm.plan import Extent, Launch, Problem

DEVICE = "--device" in sys.argv
read = sources._read


def lab_read(name):
    return (HERE / name).read_text() if (HERE / name).exists() else read(name)


def cluster_plan(problem, columns, splits):
    """The plan of `one_kernel` with its launch replaced."""
    original = plan.make_plan(problem, "one_kernel")
    launch = original.launches[0]
    rows = 1
    while rows * 128 < problem.batch:
        rows *= 2
    assert rows * splits <= 8, "a portable cluster has eight blocks at most"
    size = plan.DTYPE_BYTES[problem.dtype]
    room = (227 * 1024 - 128 * (columns + 4) * 4 - 2048) // ((128 + columns) * 128)
    stages = min(room, 8, max(2, -(-(-(-problem.in_features * size // 128)) // splits)))
    shared = stages * (128 + columns) * 128 + 128 * (columns + 4) * 4 + 8 * columns // splits * 2
    shared += 2 * columns // splits * 8 + 3 * columns // splits * 4 + stages * 16 + 16
    kinds = launch.constants[:5]
    new = Launch(
        "cluster_gemm_scale_bn",
        "cluster_gemm.cuh",
        "cluster_gemm",
        (*kinds, str(columns), str(stages), str(-(-shared // 1024) * 1024), str(rows), str(splits), "Activation"),
        ("map_x", "map_weight", "stored_product", "y", "bias", "scale", "scale_stride", "scale_value", "running_mean",
         "running_var", "num_batches_tracked", "bn_weight", "bn_bias", "momentum", "eps", "group_mean", "mean", "rstd",
         "counters", "keep_product", "batch", "in_features", "features"),
        Extent(-(-problem.out_features // columns) * rows * splits),
        block=288,
        resident=1,
        shared=-(-shared // 1024) * 1024,
        cluster=rows * splits,
        maps=(replace(launch.maps[0], columns=128 // size), replace(launch.maps[1], rows=columns, columns=128 // size)),
        numbers=(("keep_product", int(problem.save)),),
    )  # fmt: skip
    return replace(original, steps=(new,), counters=max(original.counters, 4))


def bound(p):
    with mock.patch.object(sources, "_read", lab_read):
        return binding.Bound(p)


def tensors(problem, device, dtype):
    g = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=g).to(device, dtype)
    b, i, o = problem.batch, problem.in_features, problem.out_features
    return (make(b, i), make(o, i) / i**0.5, make(o), make(o), make(o), make(o).abs() + 0.5,
            torch.tensor(5, device=device), make(o), make(o))  # fmt: skip


def golden(t, dtype):
    x, w, bias, scale, mean, var, _, gamma, beta = (v.double() for v in t)
    mean, var = mean.clone(), var.clone()
    y = torch.nn.functional.batch_norm(torch.nn.functional.linear(x, w, bias) * scale, mean, var, gamma, beta, True, 0.1)
    return y, mean, var


def run(problem, columns, splits, device):
    dtype = binding.DTYPES[problem.dtype]
    p = cluster_plan(problem, columns, splits)
    b = bound(p)
    t = tensors(problem, device, dtype)
    exact = golden(t, dtype)
    scalars = runtime._scalars(problem, t[3], 1.0, 0.1, 1e-5)
    y, *rest = b(t, scalars)
    errors = [float((got.double() - want).norm() / want.norm()) for got, want in zip((y, t[4], t[5]), exact)]
    again = tensors(problem, device, dtype)
    same = torch.equal(b(again, scalars)[0], y) and int(again[6]) == 6
    print(f"{problem.batch} x {problem.in_features} -> {problem.out_features} {problem.dtype} columns {columns} cluster "
          f"{p.launches[0].cluster} blocks {p.launches[0].grid.value(0)}: errors {', '.join(f'{e:.1e}' for e in errors)} same bits {same}")
    return b, t, scalars


CASES = [(128, 1024, 512, 32, 8), (128, 1024, 512, 32, 4), (256, 512, 512, 32, 4), (512, 2048, 2048, 128, 2)]


def timed(f):
    graph = torch.cuda.CUDAGraph()
    for _ in range(5):
        f()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(50):
            f()
    best = 1e9
    for _ in range(20):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        best = min(best, a.elapsed_time(b) / 50 * 1e3)
    return best


if DEVICE:
    for batch, inner, features, columns, splits in CASES:
        for dtype, arithmetic in (("bfloat16", "native"), ("float32", "tf32")):
            chip = runtime.chip(torch.device("cuda", 0))
            problem = Problem(batch, inner, features, dtype, dtype, dtype, dtype, arithmetic, None, True, False, True, chip)
            b, t, s = run(problem, columns, splits, "cuda")
            shipped = binding.Bound(plan.make_plan(problem, "one_kernel"))
            print(f"    cluster {timed(lambda: b(t, s)):.2f} us, shipped {timed(lambda: shipped(t, s)):.2f} us")
else:
    from emulator import emulated

    chip = plan.chip_for(90)
    with emulated(chip):
        for batch, inner, features, columns, splits in [
            (128, 256, 64, 32, 4), (100, 200, 72, 32, 8), (256, 192, 64, 32, 4), (300, 136, 136, 64, 2), (520, 64, 48, 32, 1), (65, 64, 40, 32, 8),
        ]:
            for dtype, arithmetic in (("bfloat16", "native"), ("float32", "tf32")):
                for save in (False, True):
                    problem = Problem(batch, inner, features, dtype, dtype, dtype, dtype, arithmetic, None, True, save, True, chip)
                    run(problem, columns, splits, "cpu")
    from gemmnorm import driver

    DEVICE = True  # the real instructions, compiled
    with mock.patch.object(sources, "_read", lab_read):
        for batch, inner, features, columns, splits in CASES:
            for dtype, arithmetic in (("bfloat16", "native"), ("float32", "tf32")):
                problem = Problem(batch, inner, features, dtype, dtype, dtype, dtype, arithmetic, None, True, False, True, chip)
                launch = cluster_plan(problem, columns, splits).launches[0]
                print(launch.constants[5:-1], driver.compile_report(launch, problem, 90))
