"""The operator against the chain of modules on the CPU: what a fused model costs where there is no GPU.

    python benchmarks/cpu.py [--threads N] [--samples N]

Prints a table of median times and their ratio. Every sample of one side is followed by one of the other, so that both
see the same disturbances; the ratio is the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gemmnorm

SIZES = ((64, 256, 256), (256, 512, 512), (1024, 1024, 1024))
PHASES = ("train_fwd", "eval_fwd", "train_fwd_grad", "train_fwd_bwd")


class Chain(nn.Module):
    """bn(gemm(x) * scale), module by module."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(out_features))
        self.bn = nn.BatchNorm1d(out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.gemm(x) * self.scale)


def runner(module: nn.Module, x: Tensor, grad: Tensor, phase: str) -> Callable[[], None]:
    """A function that runs one sample of `phase`."""
    module.train(phase != "eval_fwd")
    parameters = list(module.parameters())

    def forward() -> None:
        with torch.no_grad():
            module(x)

    def step() -> None:
        x.grad = None
        for p in parameters:
            p.grad = None
        module(x).backward(grad)

    def forward_with_graph() -> None:
        module(x)

    x.requires_grad_(phase == "train_fwd_bwd")
    return {"train_fwd_bwd": step, "train_fwd_grad": forward_with_graph}.get(phase, forward)


def compare(size: tuple[int, int, int], phase: str, samples: int) -> tuple[float, float, float]:
    """(eager seconds, our seconds, ratio) for one size [batch, in, out] and phase."""
    batch, in_features, out_features = size
    chain = Chain(in_features, out_features)
    ours = gemmnorm.LinearScaleBatchNorm1d(in_features, out_features)
    ours.load_state_dict(chain.state_dict())
    x, grad = torch.randn(batch, in_features), torch.randn(batch, out_features)
    sides = [runner(module, x, grad, phase) for module in (chain, ours)]
    times: tuple[list[float], list[float]] = ([], [])
    for sample in range(samples + 5):
        order = (0, 1) if sample % 2 else (1, 0)
        for side in order:
            begun = time.perf_counter()
            sides[side]()
            if sample >= 5:
                times[side].append(time.perf_counter() - begun)
    ratio = statistics.median(ours / eager for eager, ours in zip(*times, strict=True))
    return statistics.median(times[0]), statistics.median(times[1]), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--samples", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, float32, median of {options.samples}\n")
    print("| batch × in → out | phase | eager, µs | gemmnorm, µs | ratio |\n|---|---|---|---|---|")
    for size in SIZES:
        for phase in PHASES:
            eager, ours, ratio = compare(
                size, phase, options.samples if size[0] < 1024 else max(options.samples // 4, 5)
            )
            name = f"{size[0]} × {size[1]} → {size[2]}"
            print(f"| {name} | {phase} | {eager * 1e6:.0f} | {ours * 1e6:.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
