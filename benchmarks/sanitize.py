"""Runs every kernel once at small sizes, for compute-sanitizer.

    PYTHONPATH=src compute-sanitizer --tool memcheck python benchmarks/sanitize.py [--plain] [--forward] ["one tile" …]

Tools: memcheck, racecheck, synccheck, initcheck. Results are compared with plain PyTorch, so that a kernel which a tool
disturbs is noticed.

initcheck does not see the copy engine's stores. First PyTorch alone reads a product of the library's: that of bfloat16,
which the copy engine has stored, is reported (before the line "control"), that of float32 is not. So of whatever reads
such a product it says nothing that means anything. `--plain` leaves those strategies and dtypes out: then every report
after the first line "control" counts. What the copy engine stores is for the GPU suite, which poisons all memory.

`--forward` runs what has an own product, without gradients, and compares nothing: racecheck reports the library's.
`--without-small` leaves `small_panel` out: synccheck ends the process where it meets its named barrier.
`--turns` runs `persistent_gradient` and the backward that multiplies again alone, for the same reason.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import torch

import gemmnorm
from gemmnorm import plan
from gemmnorm.plan import OWN_GEMM, STRATEGIES, Problem, gradient, small
from gemmnorm.plan.gemm import Gemm
from gemmnorm.runtime import binding
from gemmnorm.runtime import call as runtime

# Batch, features, and multiprocessors: on few of them small problems take several waves.
SIZES = {
    "one tile": (70, 72, 40, 132),
    "one block": (200, 72, 1096, 6),
    "one wave": (300, 136, 264, 16),
    "clusters": (200, 136, 264, 132),
    "waves": (900, 64, 600, 6),
    "whole panels": (760, 3200, 600, 6),
    "parts of K": (1030, 4096, 456, 10),  # under autocast the product casts, in training one chunk of two
    "low tiles": (60, 136, 1096, 6),
    "many groups": (9000, 64, 264, 36),
    "tall": (17000, 64, 520, 132),
    "twice": (1100, 72, 264, 6),  # multiplied
    "gram": (1100, 72, 264, 6),
    "few inputs": (1100, 40, 264, 6),  # Gram matrix, whose warpgroups share out rows
    "192 rows": (1100, 72, 264, 6),  # in a tile
    "inexact": (1100, 72, 264, 6),  # Gram matrix: every second feature is constant
    "neighbours": (1100, 72, 520, 6),  # that load x together
    "half sectors": (1100, 72, 520, 6),  # that rows of y begin with
    "narrow": (1300, 72, 40, 3),  # tiles whose consumers share out the rows
    "few tiles": (520, 200, 72, 132),  # in a cluster
    "odd rows": (300, 137, 265, 16),  # split operands and copies; and y a feature at a time
}
WANTED = {
    "parts of K": lambda c: isinstance(c.variant, Gemm) and c.variant.converts(c.problem),
    "twice": lambda c: getattr(c.variant, "schedule", "") == "two-pass",
    "gram": lambda c: getattr(c.variant, "schedule", "") == "gram",
    "few inputs": lambda c: getattr(c.variant, "schedule", "") == "gram",
    "192 rows": lambda c: c.phase == "backward" or (isinstance(c.variant, Gemm) and c.variant.tile.rows == 192),
    "inexact": lambda c: getattr(c.variant, "schedule", "") == "gram",
    "neighbours": lambda c: c.phase == "backward" or (isinstance(c.variant, Gemm) and c.variant.sharing > 1),
    "half sectors": lambda c: c.phase == "backward" or (isinstance(c.variant, Gemm) and c.variant.tile.overlap > 0),
    "narrow": lambda c: c.phase == "backward" or (isinstance(c.variant, Gemm) and c.variant.tile.halves_rows),
    "few tiles": lambda c: c.phase == "backward" or isinstance(c.variant, small.SmallPanel),
}


def turns() -> None:
    """The own kernels of the backward at small sizes, without the products behind them."""
    gradient.IN_FLIGHT = 0
    half, single = torch.bfloat16, torch.float32
    for (t, y, batch, features, activation), again in itertools.product(
        ((half, half, 1300, 840, "relu"), (half, single, 700, 264, None), (single, single, 1000, 264, "silu")),
        (False, True),
    ):
        names, chip = [str(d).removeprefix("torch.") for d in (t, y, y, y)], runtime.chip(torch.device("cuda", 0))
        chip, arithmetic = replace(chip, multiprocessors=6), "tf32" if t == single else "native"
        problem = Problem(
            batch, 24, features, *names, arithmetic, activation, save=True, chip=chip, keep_product=not again
        )
        with plan.forcing(lambda c: again or getattr(c.variant, "kernel", "") == "persistent_gradient"):  # noqa: B023
            chosen = plan.make_plan(problem, "one_kernel", "backward")
        run = binding.Bound(replace(chosen, steps=chosen.launches))
        product, grad_y, vectors = (
            torch.randn(n, features, device="cuda", dtype=d) for n, d in ((batch, t), (batch, y), (4, y))
        )
        statistics = torch.rand(2 + -(-batch // 64), features, device="cuda") + 0.5  # mean, rstd, the groups' offsets
        x, weight = (torch.randn(n, 24, device="cuda", dtype=t) for n in (batch, features))
        scalars = binding.scalars(problem, vectors[1], 1.0, 0.1, 1e-5)
        for _ in range(2):
            run([grad_y, x, weight, *vectors, None if again else product, statistics], scalars)
        torch.cuda.synchronize()
        print(", ".join(names[:2]), *(launch.function for launch in chosen.launches), flush=True)


def main() -> None:
    if "--turns" in sys.argv:
        return turns()
    plain, forward = "--plain" in sys.argv, "--forward" in sys.argv
    if "--without-small" in sys.argv:
        small.PANELS = ()
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or list(SIZES)
    gpu = runtime.chip(torch.device("cuda", 0))
    for dtype in () if forward else (torch.bfloat16, torch.float32):
        a, b = torch.randn(300, 136, device="cuda", dtype=dtype), torch.randn(264, 136, device="cuda", dtype=dtype)
        print(f"control, {dtype}: {float((a @ b.t()).relu().sum()):.3g}", flush=True)
    for name, strategy, (dtype, arithmetic), training in itertools.product(
        names,
        OWN_GEMM if forward or "--own" in sys.argv else STRATEGIES[:-1],
        ((torch.bfloat16, "none"), (torch.float32, "tf32"), (torch.float32, "none"), (torch.float32, "autocast")),
        (True, False),
    ):
        if plain and not (strategy.startswith("cublas") and (dtype, arithmetic) == (torch.float32, "none")):
            continue
        cast = torch.autocast("cuda", torch.bfloat16, enabled=arithmetic == "autocast")
        torch.backends.cuda.matmul.fp32_precision = arithmetic if arithmetic == "tf32" else "none"
        batch, inner, features, blocks = SIZES[name]
        part = replace(gpu, multiprocessors=min(blocks, gpu.multiprocessors))
        runtime.chip = lambda _, part=part: part
        module = gemmnorm.LinearScaleBatchNorm1d(inner, features, activation="relu", device="cuda", dtype=dtype)
        module.train(training)
        x = torch.randn(batch, inner, device="cuda", dtype=dtype)
        if name == "inexact":
            x[:, :4] = 0.7
            with torch.no_grad():
                module.gemm.weight[::2, 4:] = 0
        wanted = plan.forcing(WANTED.get(name, lambda _: True))
        with gemmnorm.set_strategy(strategy), wanted, runtime.recording() as plans:
            if not forward:
                with cast:
                    y = module(x)
                y.backward(torch.randn_like(y))
            with torch.no_grad(), cast:
                y = module(x)
                if not training:
                    y = gemmnorm.prepare(module)(x)
        ways = {
            f"{launch.function} {dict(launch.config).get('Epilogue<>', '')}"
            for found in plans
            for launch in found.launches
            if launch.function in ("fused_gemm", "small_panel", "gram_statistics")
        }
        what = f"{name}, {', '.join(sorted(ways)) or strategy}, {dtype}, {arithmetic}"
        if forward:
            print(what, flush=True)
            continue
        with gemmnorm.set_strategy("reference"), torch.no_grad():
            expected = module(x)
        worst = float((y - expected).abs().max())
        print(
            f"{what}, {'training' if training else 'evaluation'}: {worst:.3g}",
            flush=True,
        )
        assert worst < 0.1, "wrong under the tool"


if __name__ == "__main__":
    main()
