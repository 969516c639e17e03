"""Bytes alive along a training step of a stack of Linear → BatchNorm → ReLU in float32, without a GPU: eager and fused.

    PYTHONPATH=src python lab/memory.py [--widths 2048,8192,8192,8192] [--batch 2048] [--timeline]

PyTorch's profiler counts what its CPU allocator gives and takes back. Eager runs with all sizes an eighth, and its bytes
are multiplied by 64; the fused model has its own sizes, an H100's plans, and launches that do nothing. A GPU's allocator rounds a
tensor up, by 2 MiB at most where it is large.
"""

import argparse
from contextlib import ExitStack

import torch
from host import pretend_hopper
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gemmnorm

SMALLER = 8


def model(widths):
    layers = ((nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU()) for a, b in zip(widths, widths[1:]))
    return nn.Sequential(*(module for layer in layers for module in layer))


def changes(call, model, x, target):
    """(what was running, bytes) of each allocation and release of a step, in order; the last step of two."""

    def step():
        for p in model.parameters():
            p.grad = None
        nn.functional.mse_loss(call(x), target.clone()).backward()

    step()
    for p in model.parameters():
        p.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    found, running = [], ""
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            found.append((running, event.nbytes()))
        elif not event.name().startswith("aten::empty"):
            running = event.name()
    return found


def peak(found, times=1, timeline=False):
    """The highest of the running sum, MB."""
    alive = highest = 0
    for running, size in found:
        alive += size * times
        highest = max(highest, alive)
        if timeline and abs(size * times) >= 1e6:
            print(f"  {alive / 1e6:8.1f} MB  {size * times / 1e6:+8.1f}  {running}")
    return highest / 1e6


def measured(widths, batch, fuse, timeline=False):
    """The peak of a step, MB."""
    x, target, plain = torch.empty(batch, widths[0]), torch.empty(batch, widths[-1]), model(widths)
    if not fuse:
        return peak(changes(plain, plain, x, target), SMALLER**2, timeline)
    with ExitStack() as stack:
        pretend_hopper(stack)
        with gemmnorm.set_strategy("one_kernel"):
            fused = gemmnorm.fuse(plain)
            return peak(changes(fused, fused, x, target), 1, timeline)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--widths", default="2048,8192,8192,8192")
    options.add_argument("--batch", type=int, default=2048)
    options.add_argument("--timeline", action="store_true")
    options = options.parse_args()
    widths = [int(width) for width in options.widths.split(",")]
    torch.manual_seed(0)
    print("eager")
    eager = measured([width // SMALLER for width in widths], options.batch // SMALLER, False, options.timeline)
    print("fused")
    fused = measured(widths, options.batch, True, options.timeline)
    print(f"eager {eager:.1f} MB, fused {fused:.1f} MB: {fused / eager:.3f}")


if __name__ == "__main__":
    main()
