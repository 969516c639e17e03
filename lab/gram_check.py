"""Statistics by the Gram matrix of x: errors against float64 and times, beside the best other candidates.

    PYTHONPATH=src python lab/gram_check.py [BATCHxINxOUT …]
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from gemmnorm import plan
from gemmnorm.bench import candidates as timed
from gemmnorm.plan import candidates
from gemmnorm.runtime import binding

SIZES = (
    (65536, 128, 1024), (59904, 112, 9856), (65536, 256, 2048), (65536, 256, 256), (8192, 256, 8192), (131072, 64, 64),
    (16384, 512, 4096), (65536, 1024, 1024), (107008, 256, 1632), (8192, 64, 1024), (4096, 256, 8192), (30080, 256, 768),
)  # fmt: skip


def described(sizes, dtype="bfloat16", save=False):
    return plan.Problem(*sizes, *[dtype] * 4, "native", save=save, chip=plan.chip_for(90, 132))


def inputs(problem, kind="normal"):
    b, k, n = problem.batch, problem.in_features, problem.out_features
    dtype = getattr(torch, problem.dtype)
    x, w = torch.randn(b, k, device="cuda"), torch.randn(n, k, device="cuda") / k**0.5
    if kind == "positive":
        x = x.abs()
    elif kind == "offset":
        x = x + 20
    elif kind == "alike":  # features nearly the same, so that sums of a few weights cancel
        x = x[:, :1] + 0.05 * x
    elif kind == "opposite":
        x[:, 1::2] = x[:, ::2]
        w[:, 1::2] = -w[:, ::2] * (1 + 2**-7)
    elif kind == "constant":
        x[:, 0] = 3
        w[: n // 2, 1:] = 0
    given = {"x": x.to(dtype), "weight": w.to(dtype)}
    given["bias"], given["scale"] = (torch.rand(n, device="cuda", dtype=dtype) + 0.5 for _ in range(2))
    for role in ("running_mean", "running_var", "bn_weight", "bn_bias"):
        given[role] = torch.rand(n, device="cuda", dtype=dtype) + 0.5
    given["num_batches_tracked"] = torch.zeros((), dtype=torch.int64, device="cuda")
    return tuple(given.get(role) for role in binding.INPUTS["forward"]), given


def exact(given, dtype):
    x, w, s, b, gamma, beta = (given[k].double() for k in ("x", "weight", "scale", "bias", "bn_weight", "bn_bias"))
    a = x @ w.t()
    z = (a + b) * s
    want = torch.nn.functional.batch_norm(z, None, None, gamma, beta, True)
    t = lambda v: v.to(dtype)  # noqa: E731
    zt = torch.nn.functional.linear(given["x"], given["weight"], given["bias"]) * given["scale"]
    eager = torch.nn.functional.batch_norm(zt, None, None, given["bn_weight"], given["bn_bias"], True)
    return want, eager, a.mean(0), a.var(0, unbiased=False) * s * s


def check(sizes, kind, dtype="bfloat16", tile=(256, 128)):
    problem = described(sizes, dtype, save=True)
    every = [c for c in candidates.candidates(problem) if c.refusal is None]
    gram = next(c for c in every if getattr(c.variant, "schedule", "") == "gram" and (c.variant.tile.rows, c.variant.tile.columns) == tile)
    args, given = inputs(problem, kind)
    scalars = binding.scalars(problem, given["scale"], 1.0, 0.1, 1e-5)
    torch.full((1 << 28,), float("nan"), device="cuda")
    want, eager, mean, var = exact(given, torch.bfloat16)
    run = binding.Bound(gram.plan())
    outs = dict(zip(run.outputs, run([*args], scalars)))
    again = dict(zip(run.outputs, run([*args], scalars)))
    y, kept, product = outs["y"], outs["statistics"], outs["product"]
    same = torch.equal(y, again["y"]) and torch.equal(product, again["product"])
    error = lambda t: float((t.double() - want).norm(dim=0).div(want.norm(dim=0) + 1e-9).max())  # noqa: E731
    rstd = (kept[1].double() * (var + 1e-5).sqrt() - 1).abs().max().item()
    centre = ((kept[0].double() - mean).abs() / (var.sqrt() + 1e-9) * given["scale"].double().abs()).max().item()
    a = args[0].double() @ args[1].double().t()
    offset = kept[2:].repeat_interleave(64, 0)[: problem.batch]
    stored = float(((product.double() + offset.double()) - a).norm() / (a - mean).norm())
    print(f"{sizes} {dtype} {kind:9s} {tile} error {error(y):.2e} eager {error(eager):.2e} rstd {rstd:.1e} mean {centre:.1e} "
          f"product {stored:.1e} same bits {same} counted {int(given['num_batches_tracked'])}", flush=True)


def times(sizes, save):
    problem = described(sizes, save=save)
    every = sorted((c for c in candidates.candidates(problem) if c.refusal is None and c.strategy != "cublas_bn"), key=lambda c: c.cost())
    gram = [c for c in every if getattr(c.variant, "schedule", "") == "gram"][:3]
    others = [c for c in every if c not in gram][:5]
    args, given = inputs(problem)
    scalars = binding.scalars(problem, given["scale"], 1.0, 0.1, 1e-5)
    x, w = given["x"], given["weight"]
    out = torch.empty(sizes[0], sizes[2], device="cuda", dtype=x.dtype)
    calls = {"GEMM": lambda: torch.mm(x, w.t(), out=out)}
    for c in [*gram, *others]:
        run = binding.Bound(c.plan())
        calls[f"{c.name} [{c.cost():.1f}]"] = lambda run=run: run([*args], scalars)
    best = gram[0].plan()
    for i, name in enumerate(("gram alone", "first pass alone", "merge alone", "normalize alone")):
        run = binding.Bound(replace(best, steps=(best.steps[i],)))
        calls[name] = lambda run=run: run([*args], scalars)
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    print(sizes, "kept" if save else "")
    for name, us in timed.medians(timed.sampled(calls, timed.QueueClock())).items():
        print(f"   {us:8.1f}  {name}")
    sys.stdout.flush()


def main():
    with torch.no_grad():
        for kind in ("normal", "positive", "offset", "alike", "opposite", "constant"):
            for sizes in ((65536, 128, 1024), (5000, 264, 520), (1000, 72, 136)):
                check(sizes, kind)
        check((9000, 1000, 264), "normal")
        check((9000, 1024, 2000), "positive", "float16", (128, 128))
        check((300, 16, 136), "normal", "float16", (128, 64))
        asked = [tuple(map(int, a.split("x"))) for a in sys.argv[1:]] or SIZES
        for sizes in asked:
            times(sizes, False)
        times(asked[0], True)
        times(asked[1], True)


if __name__ == "__main__":
    main()
