"""Bandwidth of the memory-bound kernels alone, with other numbers of threads along a row, beside PyTorch's `relu_` and `sum`.

    PYTHONPATH=src python lab/memory_bound.py [BATCHxOUTxDTYPE …]
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from gemmnorm import plan
from gemmnorm.bench import candidates as timed
from gemmnorm.plan import gradient, library
from gemmnorm.plan.steps import Extent
from gemmnorm.runtime import binding, sources

SIZES = (
    "16600x5912xfloat32", "36176x1464xfloat32", "105528x432xfloat32", "78528x280xfloat32", "65536x1024xfloat32",
    "29248x1104xbfloat16", "111368x600xbfloat16", "120192x256xbfloat16", "65536x1024xbfloat16", "105528x432xbfloat16",
    "17664x896xbfloat16", "22656x768xbfloat16", "99384x272xbfloat16", "9600x2304xbfloat16", "2048x8192xbfloat16", "89000x64xbfloat16",
)  # fmt: skip
ALL = "--all" in sys.argv


plain_read = getattr(sources, "_read", None)
PRE = """      [&] {
        tile.share_features(feature, [&](int j) { return feature_gradient<FORM, false>(p, j); });
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (FORM == Form::kFolded) feature[i].centre -= value_or(p.offset, group_row + i, 0.0f);
      },
"""
BEFORE = "  float sum[N] = {}, dot[N] = {}, linear[N] = {};"
NO_PRE = ((PRE, "      [] {},\n"), (BEFORE, PRE.replace("      [&] {\n", "").replace("      },\n", "") + BEFORE))
VARIANTS = {  # of a function: name, blocks that fit on a multiprocessor, replaced texts
    "gradient_sums": (("no pre", 2, NO_PRE), ("2 in flight 3 blocks", 3, (("kVector, kInFlight = 4", "kVector, kInFlight = 2"),)), ("2 in flight no pre 3 blocks", 3, (("kVector, kInFlight = 4", "kVector, kInFlight = 2"), *NO_PRE))),
    "product_gradient": (("2", 2, (("8 : 4;", "8 : 2;"),)), ("2, 3 blocks", 3, (("8 : 4;", "2 : 2;"),))),
    "column_statistics": (),
    "normalize": (("4", 2, (("visit_rows<8>", "visit_rows<4>"),)), ("TX 16", 0, ())),
}


def variants(launch, problem):
    yield "", launch
    if not ALL:
        return
    for name, resident, changes in VARIANTS[launch.function]:
        def read(file, changes=changes):
            found = plain_read(file)
            for old, new in changes if file.endswith(("gradient.cuh", "normalize.cuh")) else ():
                found = found.replace(old, new)
            return found
        sources._read = read
        if resident:
            yield "~ " + name, replace(launch, resident=resident)
        else:
            yield "~ " + name, replace(launch, config=tuple({**dict(launch.config), "kThreadsX": 16}.items()), grid=Extent(-(-problem.out_features // (16 * launch.member("kVector"))), 64))
        sources._read = plain_read


def measure(text):
    *sizes, dtype = text.split("x")
    batch, features = map(int, sizes)
    arithmetic = "ieee" if dtype == "float32" else "native"
    y = torch.empty(batch, features, dtype=getattr(torch, dtype), device="cuda").normal_()
    calls = {"relu_": lambda: torch.relu_(y), "sum": lambda: torch.sum(y)}
    trips = {"relu_": 2, "sum": 1}
    for phase, training, activation in (
        ("forward", True, None), ("backward", True, None), ("forward", False, None), ("forward", True, "relu"), ("backward", True, "relu")
    ):
        problem = plan.Problem(
            batch, 8, features, *[dtype] * 4, arithmetic, activation, chip=plan.chip_for(90, 132), training=training, save=phase == "backward"
        )
        made = library.forward(problem, "cublas_folded_bn")
        launches = [s for s in made.steps[1:] if s.function != "merge_statistics"]
        if phase == "backward":
            made = plan.make_plan(problem, "cublas_folded_bn", "backward")
            launches = gradient._three_launches(problem, False)[::2]
            steps, buffers, _ = gradient.by_three(problem, False)
            made = replace(made, steps=steps, workspace=(*buffers, *(w for w in made.workspace if w.role not in {b.role for b in buffers})))
        given = timed.tensors(problem, phase, "cuda")
        scalars = binding.scalars(problem, given["scale"], 1.0, 0.1, 1e-5)
        inputs = tuple(given.get(role) for role in binding.INPUTS[phase])
        for launch in launches:
            for name, changed in variants(launch, problem):
                try:
                    run = binding.Bound(replace(made, steps=(changed,)))
                    call = lambda run=run, inputs=inputs, scalars=scalars: run(inputs, scalars)  # noqa: E731
                    call()
                except Exception as error:  # noqa: BLE001
                    print(name, launch.function, str(error)[:300])
                    continue
                what = f"{launch.function} {'' if training else 'evaluation '}{activation or ''}{name}"
                calls[what] = call
                trips[what] = {"column_statistics": 1, "normalize": 2, "gradient_sums": 2, "product_gradient": 3}[launch.function]
    torch.cuda.synchronize()
    size = y.nbytes / 1e6
    print(f"{text}: {size:.1f} MB", flush=True)
    for name, us in timed.medians(timed.sampled(calls, timed.QueueClock(), 7)).items():
        print(f"   {us:8.1f} µs {trips[name] * size / us:6.2f} TB/s  {name}")
    sys.stdout.flush()


for asked in [a for a in sys.argv[1:] if not a.startswith("--")] or SIZES:
    measure(asked)
