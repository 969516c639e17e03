"""Host time of a call without a GPU: the kernels' launches are replaced by nothing, all Python around them runs.

    PYTHONPATH=src python lab/host.py [--profile]

What the driver itself costs (a launch, an allocation on the GPU) is not in these figures.
"""

import argparse
import cProfile
import pstats
import time
from contextlib import ExitStack
from unittest import mock

import torch

import gemmnorm
from gemmnorm import driver, plan, runtime


class NoLaunch:
    def __init__(self, launch, problem):
        pass

    def __call__(self, stream, values):
        pass


def pretend_hopper(stack):
    for target, name, value in (
        (runtime, "chip", lambda device: plan.chip_for(90)),
        (driver, "Launcher", NoLaunch),
        (driver, "enter", lambda index: None),
        (driver, "current_stream", lambda index: 0),
        (driver, "stream_handle", lambda index: 0),
        (driver, "tensor_map", lambda t, rows, columns: 1),
        (driver, "current_device", lambda: None),
        (torch.cuda, "current_stream", lambda device=None: mock.Mock()),
        (driver, "capturing", lambda: False),
    ):
        stack.enter_context(mock.patch.object(target, name, value))


def median(f, n=300):
    for _ in range(50):
        f()
    times = []
    for _ in range(n):
        begun = time.perf_counter()
        f()
        times.append(time.perf_counter() - begun)
    return sorted(times)[n // 2] * 1e6


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--profile", action="store_true")
    options = options.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    m = gemmnorm.LinearScaleBatchNorm1d(64, 64, dtype=torch.bfloat16)
    chain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).bfloat16()
    with ExitStack() as stack:
        pretend_hopper(stack)

        def forward():
            m(x)

        def step():
            m(x).backward(y)

        y = torch.randn(8, 64, dtype=torch.bfloat16)
        with plan.set_strategy("one_kernel"):
            for name, grad, f in (("forward, no_grad", False, forward), ("forward, gradients on", True, forward), ("forward and backward", True, step)):
                with torch.set_grad_enabled(grad):
                    print(f"{name:24} {median(f):6.1f} us   (Linear + BatchNorm1d on the CPU {median(lambda: chain(x)):.1f})")
                    if options.profile:
                        profile = cProfile.Profile()
                        profile.enable()
                        for _ in range(500):
                            f()
                        profile.disable()
                        pstats.Stats(profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
