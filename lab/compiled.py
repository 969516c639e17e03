"""Wall clock of a training step of a projector with few rows, where the host decides: eager, fused, compiled, and both,
with and without CUDA graphs (`mode="reduce-overhead"`).

    PYTHONPATH=src python lab/compiled.py [--rows 256] [--width 8192] [--dtype autocast float32 bfloat16]

Three layers 2048 → width → width → width with BatchNorm and ReLU and a fused AdamW; milliseconds, the median of five
times sixty steps. After each way: its loss after ten steps, which must agree; calls that ran fused; CUDA graphs skipped.
"""

import argparse
import contextlib
import statistics
import time

import torch
from torch import nn

import gemmnorm

MODES = {"eager": None, "compiled": "default", "compiled, graphs": "reduce-overhead"}


def model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (2048, width, width, width)
    layers = [(nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU()) for a, b in zip(sizes, sizes[1:])]
    return nn.Sequential(*(layer for group in layers for layer in group)).cuda()


def measure(rows: int, width: int, dtype: str, fused: bool, mode: str | None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = model(width).to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    if fused:
        gemmnorm.fuse(net)
    run = net if mode is None else torch.compile(net, mode=mode)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    x = torch.randn(rows, 2048, device="cuda", dtype=net[0].weight.dtype)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        amp = torch.autocast("cuda", torch.bfloat16) if dtype == "autocast" else contextlib.nullcontext()
        torch.compiler.cudagraph_mark_step_begin()
        with amp:
            loss = run(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(9):
        step()
    loss = step().item()
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(60):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begun) / 60 * 1e3)
    calls = [m.calls for m in gemmnorm.fuse_report(net, calls=True).matches] if fused else []
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    print(
        f"{rows} rows, {dtype:9} {'fused' if fused else 'plain'} {mode or 'eager':16} {statistics.median(found):7.3f} ms "
        f"(least {min(found):.3f})  loss {loss:.6f}  skipped {skipped}  {calls[:1]}",
        flush=True,
    )


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rows", type=int, default=256)
    options.add_argument("--width", type=int, default=8192)
    options.add_argument("--dtype", nargs="*", default=["autocast", "float32", "bfloat16"])
    options = options.parse_args()
    for dtype in options.dtype:
        for mode in MODES.values():
            for fused in (False, True):
                try:
                    measure(options.rows, options.width, dtype, fused, mode)
                except Exception as error:
                    print(f"{dtype} {'fused' if fused else 'plain'} {mode}: {type(error).__name__}: {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    main()
