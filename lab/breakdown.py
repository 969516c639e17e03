"""Times fused_gemm with pieces left out, to see where its time goes: python lab/breakdown.py"""

import sys

import torch

from gemmnorm import binding, plan, runtime, sources
from gemmnorm.plan import Problem

sys.path.insert(0, "lab")
from dataclasses import replace

from device_check import CASES, Timer

orig = sources._read


def patched(subs):
    def read(name):
        t = orig(name)
        if name == "fused_gemm.cuh":
            for a, b in subs:
                assert a in t, a
                t = t.replace(a, b)
        return t

    return read


def build(problem, strategy, subs=(), **changes):
    sources._read = patched(subs)
    p = plan.make_plan(problem, strategy)
    l = p.launches[0]
    if changes.get("numbers"):
        l = replace(l, numbers=tuple(dict(l.numbers, **changes["numbers"]).items()))
    p = replace(p, steps=(l,))
    for k in ("cooperative",):
        if k in changes:
            l = replace(l, **{k: changes[k]})
    p = replace(p, steps=(l,))
    if changes.get("unique"):
        p = replace(p, reasons=(("x", changes["unique"]),))
    binding.bind(p)
    sources._read = orig
    return p


timer = Timer()
for case in sys.argv[1:] or ["kb33", "kb39", "projector"]:
    batch, wide, out, bias, scale, act = CASES[case]
    x = torch.randn(batch, wide, device="cuda").bfloat16()
    w = (torch.randn(out, wide, device="cuda") / wide**0.5).bfloat16()
    v = {
        k: torch.randn(out, device="cuda").bfloat16() for k in ("bias", "scale", "bn_weight", "bn_bias", "running_mean")
    }
    v["running_var"] = torch.rand(out, device="cuda").bfloat16() + 0.1
    n = torch.zeros((), dtype=torch.int64, device="cuda")
    pr = Problem(
        batch,
        wide,
        out,
        "bfloat16",
        "bfloat16",
        "bfloat16",
        "bfloat16",
        "native",
        None,
        True,
        False,
        True,
        runtime.chip(x.device),
    )
    nohelp = ("      take_units<T, Y, BN, Activation>(f, raster, product, y, counters, stored);", "")
    nohelp2 = (
        "    if (FINISH == Finish::kPersistent) take_units<T, Y, BN, Activation>(f, raster, product, y, counters, stored);",
        "",
    )
    noop = ("      normalize_unit<T, Y, BN, Activation>(f, product, y, row, tile.n * BN);", "")
    slow = (
        "if (lane == 0) wait_until(&complete[n], 2 * raster.tiles_m);",
        "if (lane == 0) while (load_acquire(&complete[n]) < 2 * raster.tiles_m) __nanosleep(1000);",
    )
    m2 = (
        """        const float2 m2 = column_sums<BN>(shared.sums[consumer], consumer, [&](int i) {
          const float a = acc[(i / 2) * 4 + i % 2], b = acc[(i / 2) * 4 + 2 + i % 2];
          return a * a + b * b;
        });""",
        "        const float2 m2 = mu;",
    )
    m1 = (
        """        float2 mu = column_sums<BN>(shared.sums[consumer], consumer, [&](int i) {
          return acc[(i / 2) * 4 + i % 2] + acc[(i / 2) * 4 + 2 + i % 2];
        });""",
        "        float2 mu = make_float2(acc[0], acc[1]);",
    )
    variants = {
        "evaluate": build(replace(pr, training=False), "one_kernel"),
        "statistics": build(pr, "gemm_stats_apply"),
        "statistics no m2": build(pr, "gemm_stats_apply", (m2,), unique="1"),
        "statistics none": build(pr, "gemm_stats_apply", (m2, m1), unique="2"),
        "persistent": build(pr, "one_kernel"),
        "persistent no normalize": build(pr, "one_kernel", (noop,), unique="3"),
        "statistics cooperative": build(pr, "gemm_stats_apply", (), cooperative=True),
        "persistent slow poll": build(pr, "one_kernel", (slow,), unique="4"),
    }
    if batch <= 2048:
        variants["persistent no helpers"] = build(pr, "one_kernel", (nohelp, nohelp2), unique="5")
    for d in (4, 8, 16):
        pre = ("constexpr int kPrefetch = 0;", f"constexpr int kPrefetch = {d};")
        variants[f"statistics prefetch {d}"] = build(pr, "gemm_stats_apply", (pre,), unique=f"p{d}")
        variants[f"persistent prefetch {d}"] = build(pr, "one_kernel", (pre,), unique=f"q{d}")
    for a in (2, 4, 6):
        at = (
            "kUnitRows / kLanes < 6 ? kUnitRows / kLanes : 6;",
            f"kUnitRows / kLanes < {a} ? kUnitRows / kLanes : {a};",
        )
        variants[f"persistent at once {a}"] = build(pr, "one_kernel", (at,), unique=f"a{a}")
    for g in (1, 2, 4, 8):
        variants[f"persistent panels {g}"] = build(pr, "one_kernel", (), numbers={"group_panels": g})

    def call(p):
        t = dict(v, x=x, weight=w, num_batches_tracked=n)
        inputs = tuple(t.get(role) for role in binding.INPUTS["forward"])
        scalars = runtime._scalars(p.problem, v["scale"], 1.0, 0.1, 1e-5)
        bound = binding.bind(p)
        return lambda: bound(inputs, scalars)

    calls = {k: call(p) for k, p in variants.items() if p is not None}
    calls["gemm"] = lambda: torch.mm(x, w.t())
    for k, ms in timer(calls, 11).items():
        print(f"{case:10s} {k:28s} {ms * 1e3:8.1f} us", flush=True)
