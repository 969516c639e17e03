"""Host time of one call, µs: with a GPU as it is (the device kept busy, so that nothing waits for it); without one the
kernels' launches are replaced by nothing, and what the driver costs (a launch, an allocation) is not in the figures.

    PYTHONPATH=src python lab/host.py [--profile] [--rounds N] [--only NAME]

Each figure is the least of the rounds' means: other programs only ever add. Without a GPU "synchronised" has two ranks,
which exchange by a launch, and "by collectives" two whose collectives do nothing.
"""

import argparse
import cProfile
import pstats
import struct
import time
from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import gemmnorm
from gemmnorm import plan
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import driver, peers

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
BATCH, INNER, FEATURES = (128, 1024, 512) if GPU else (8, 64, 64)
CALLS = 40 if GPU else 50  # the driver takes about a thousand launches in flight


class NoLaunch:
    def __init__(self, launch, problem):
        packing = struct.Struct(plan.params.layout(launch, problem).format)
        self.pack, self.memory = packing.pack, driver._Memory(packing.size)

    def __call__(self, stream, packed):
        self.memory.params.raw = packed


def pretend_hopper(stack):
    for target, name, value in (
        (runtime, "chip", lambda device: plan.chip_for(90)),
        (driver, "Launcher", NoLaunch),
        (driver, "enter", lambda index: None),
        (driver, "empty", torch._C._dynamo.guards._empty_strided_cpu),
        (driver, "stream_handle", lambda index: 0),
        (driver, "tensor_map", lambda *_: bytes(128)),
        (driver, "current_device", lambda: None),
        (torch.cuda, "current_stream", lambda device=None: mock.Mock()),
        (driver, "capturing", lambda: False),
        (driver, "outside_pools", lambda device, make: make()),
    ):
        stack.enter_context(mock.patch.object(target, name, value))


def two_ranks():
    """A process group whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return dist.group.WORLD


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm = nn.Linear(INNER, FEATURES)
        self.scale = nn.Parameter(torch.randn(FEATURES))
        self.bn = nn.BatchNorm1d(FEATURES)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)


def least(f, rounds):
    means = []
    for _ in range(rounds + 1):
        if GPU:
            torch.cuda.synchronize()
            torch.cuda._sleep(100_000_000)
        begun = time.perf_counter()
        for _ in range(CALLS):
            f()
        means.append((time.perf_counter() - begun) / CALLS)
    return min(means[1:]) * 1e6


def cases(dtype):
    """name → (gradients on, call)."""
    x, grad = (
        torch.randn(BATCH, INNER, dtype=dtype, device=DEVICE),
        torch.randn(BATCH, FEATURES, dtype=dtype, device=DEVICE),
    )
    chain, fused = (make().to(DEVICE, dtype) for make in (Chain, lambda: gemmnorm.fuse(Chain())))
    m = gemmnorm.LinearScaleBatchNorm1d(INNER, FEATURES, dtype=dtype, device=DEVICE)
    frozen = gemmnorm.LinearScaleBatchNorm1d(INNER, FEATURES, dtype=dtype, device=DEVICE).eval()
    pair = nn.Sequential(nn.Linear(INNER, FEATURES), nn.BatchNorm1d(FEATURES)).to(DEVICE, dtype)
    bn = m.bn
    operands = (x, m.gemm.weight, m.gemm.bias, m.scale, bn.running_mean, bn.running_var, bn.weight, bn.bias)

    def function():
        gemmnorm.linear_scale_batch_norm(*operands, num_batches_tracked=counter, training=True)

    counter = bn.num_batches_tracked
    for name, call in (("function", function), ("module", lambda: m(x)), ("fused", lambda: fused(x))):
        yield f"{name}, no_grad", False, call
        yield f"{name}, gradients on", True, call
    if not GPU:
        group = two_ranks()
        together, by_collectives = (
            gemmnorm.LinearScaleBatchNorm1d(INNER, FEATURES, dtype=dtype, process_group=group) for _ in range(2)
        )
        by_collectives(x)
        yield "by collectives, forward and backward", True, lambda: by_collectives(x).backward(grad)
        mapped = peers.Peers(DEVICE, plan.chip_for(90), [0, 0], 0, 1 << 15, 1000)
        with mock.patch.object(peers, "of_count", lambda *_: mapped):
            yield "module synchronised, no_grad", False, lambda: together(x)
            yield "module synchronised, gradients on", True, lambda: together(x)
            yield "module synchronised, forward and backward", True, lambda: together(x).backward(grad)
    yield "module in evaluation, no_grad", False, lambda: frozen(x)
    yield "module, forward and backward", True, lambda: m(x).backward(grad)
    wide, its = (make().to(DEVICE) for make in (lambda: gemmnorm.LinearScaleBatchNorm1d(INNER, FEATURES), Chain))
    for name, module in (("module", wide), ("eager chain", its)):

        def under_autocast(module=module, x=x.float()):
            with torch.autocast(DEVICE.type, dtype):
                module(x)

        yield f"{name} under autocast, gradients on", True, under_autocast
    for name, eager in (("eager Linear + BatchNorm1d", pair), ("eager chain", chain)):
        yield f"{name}, no_grad", False, lambda eager=eager: eager(x)
        yield f"{name}, gradients on", True, lambda eager=eager: eager(x)
    yield "eager chain, forward and backward", True, lambda: chain(x).backward(grad)


class Points(nn.Sequential):
    """[N, I, L] → [N, O, L]."""

    def __init__(self):
        super().__init__(nn.Conv1d(INNER, FEATURES, 1), nn.BatchNorm1d(FEATURES), nn.ReLU())


def convolutions(dtype):
    """A convolution over single positions: channels last, where it is fused, and first, where it is not."""
    for name, x in (
        ("channels last", torch.randn(2, BATCH // 2, INNER, dtype=dtype, device=DEVICE).transpose(1, 2)),
        ("channels first", torch.randn(2, INNER, BATCH // 2, dtype=dtype, device=DEVICE)),
    ):
        eager, fused = (make().to(DEVICE, dtype) for make in (Points, lambda: gemmnorm.fuse(Points())))
        yield f"fused convolution, {name}", True, lambda fused=fused, x=x: fused(x)
        yield f"eager convolution, {name}", True, lambda eager=eager, x=x: eager(x)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--profile", action="store_true")
    options.add_argument("--rounds", type=int, default=15 if GPU else 300)
    options.add_argument("--only", default="")
    options = options.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if not GPU:
            pretend_hopper(stack)
        with plan.set_strategy("one_kernel"):
            for name, grad, f in (*cases(torch.bfloat16), *convolutions(torch.bfloat16)):
                if options.only not in name:
                    continue
                with torch.set_grad_enabled(grad):
                    print(f"{name:41} {least(f, options.rounds):6.1f}", flush=True)
                    if options.profile:
                        profile = cProfile.Profile()
                        profile.enable()
                        for _ in range(500):
                            f()
                        profile.disable()
                        pstats.Stats(profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
