"""Checks and times strategies against float64 and the bare GEMM on one GPU; a short table last.

    PYTHONPATH=src python lab/device_check.py --case kb33 --precision bf16 --strategy cublas_folded_bn

Meant for work on the kernels: many variants in one call. The figures that are published come from `gemmnorm bench`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch
from torch import Tensor, nn

import gemmnorm
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime.operands import Operands, Options
from gemmnorm.plan import STRATEGIES

CASES = {
    "kb33": (1024, 8192, 8192, True, True, None),
    "kb39": (16384, 4096, 4096, True, True, None),
    "projector": (2048, 2048, 8192, False, False, "relu"),
    "projector256": (256, 2048, 8192, False, False, "relu"),
    "mid": (512, 2048, 2048, True, True, None),
    "small": (256, 512, 512, True, True, None),
    "v0": (128, 1024, 512, True, True, None),
    "odd": (1000, 520, 776, True, True, "gelu"),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}


class Chain(nn.Module):
    """The chain written out."""

    def __init__(self, fused: gemmnorm.LinearScaleBatchNorm1d) -> None:
        super().__init__()
        self.gemm, self.scale, self.bn, self.activation = fused.gemm, fused.scale, fused.bn, fused.activation

    def forward(self, x: Tensor) -> Tensor:
        z = self.gemm(x)
        return gemmnorm.activations.forward(self.bn(z if self.scale is None else z * self.scale), self.activation)


def error(y: Tensor, golden: Tensor) -> float:
    """Worst of global, per-row and per-column relative error."""
    d, g = (y.double() - golden), golden
    columns = (d.norm(dim=0) / g.norm(dim=0).clamp_min(1e-30)).max()
    rows = (d.norm(dim=1) / g.norm(dim=1).clamp_min(1e-30)).max()
    return max((d.norm() / g.norm()).item(), columns.item(), rows.item())


class Timer:
    """Interleaved samples, each behind a flush of the L2 that also keeps the host ahead."""

    def __init__(self) -> None:
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def __call__(self, calls: dict[str, object], samples: int) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in calls}
        for name, call in calls.items():
            for _ in range(3):
                call()  # type: ignore[operator]
        events = []
        for sample in range(samples):
            shift = sample % len(calls)  # what comes first, after the wait, takes 1 to 2 µs longer
            for name, call in (list(calls.items()) * 2)[shift : shift + len(calls)]:
                self.flush.zero_()
                self.flush.sum(dtype=torch.int64)
                torch.cuda._sleep(400_000)
                begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
                begin.record()
                call()  # type: ignore[operator]
                end.record()
                events.append((name, begin, end))
            torch.cuda.synchronize()
        for name, begin, end in events:
            times[name].append(begin.elapsed_time(end))
        return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", default=list(CASES))
    parser.add_argument("--precision", nargs="*", default=["bf16", "tf32", "fp32"])
    parser.add_argument("--strategy", nargs="*", default=[s for s in STRATEGIES if s != "reference"])
    parser.add_argument("--phase", nargs="*", default=["train", "eval", "step"])
    parser.add_argument("--samples", type=int, default=15)
    arguments = parser.parse_args()
    timer = Timer()
    for case, precision in itertools.product(arguments.case, arguments.precision):
        batch, wide, out, bias, scale, activation = CASES[case]
        dtype = DTYPES[precision]
        torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "none"
        torch.manual_seed(0)
        fused = gemmnorm.LinearScaleBatchNorm1d(
            wide, out, bias, scale, activation=activation, device="cuda", dtype=dtype
        )
        with torch.no_grad():
            fused.bn.weight.normal_()
            fused.bn.bias.normal_()
            fused.bn.running_mean.normal_(0, 0.1)
            fused.bn.running_var.uniform_(0.2, 0.6)
        chain = Chain(fused)
        x = torch.randn(batch, wide, device="cuda", dtype=dtype)
        grad = torch.randn(batch, out, device="cuda", dtype=dtype)
        weight = fused.gemm.weight
        for phase in arguments.phase:
            chain.train(phase != "eval")
            fused.train(phase != "eval")
            wide_x = x.clone().requires_grad_(phase == "step")
            calls: dict[str, object] = {}
            errors: dict[str, str] = {}

            def run(module: nn.Module, phase: str = phase, x: Tensor = wide_x) -> object:
                if phase != "step":
                    with torch.no_grad():
                        return module(x)
                for p in (*module.parameters(), x):
                    p.grad = None
                y = module(x)
                y.backward(grad)
                return y

            state = {k: v.clone() for k, v in fused.state_dict().items()}
            golden = [t.double() for t in ()]
            if batch * wide * out < 3e11:
                double = gemmnorm.LinearScaleBatchNorm1d(
                    wide, out, bias, scale, activation=activation, device="cuda", dtype=torch.float64
                )
                double.load_state_dict(state)
                double.train(phase != "eval")
                xd = x.double().requires_grad_(phase == "step")
                yd = Chain(double)(xd)
                golden = [yd.detach()]
                if phase == "step":
                    yd.backward(grad.double())
                    golden += [xd.grad, double.gemm.weight.grad, double.bn.weight.grad, double.bn.bias.grad]
                    golden += [double.scale.grad] if scale else []

            def measure(name: str, module: nn.Module, phase: str = phase, golden: list[Tensor] = golden) -> str:
                fused.load_state_dict(state)
                y = run(module)
                found = [y.detach()]  # type: ignore[attr-defined]
                if phase == "step":
                    found += [wide_x.grad, fused.gemm.weight.grad, fused.bn.weight.grad, fused.bn.bias.grad]
                    found += [fused.scale.grad] if scale else []
                shaped = [(f.reshape(len(f), -1), g.reshape(len(g), -1)) for f, g in zip(found, golden, strict=False)]
                return " ".join(
                    f"{error(f, g):.1e}" if g.shape[1] > 1 else f"{((f - g).norm() / g.norm()).item():.1e}"
                    for f, g in shaped
                )

            errors["eager"] = measure("eager", chain)
            calls["eager"] = lambda: run(chain)
            for strategy in arguments.strategy:
                with gemmnorm.set_strategy(strategy):
                    chosen = gemmnorm.explain(fused, x).plans[0].strategy if False else strategy
                    if gemmnorm.plan.applicable(runtime.describe(
                        Operands(x, weight, fused.gemm.bias, fused.scale, *fused.bn.buffers(), fused.bn.weight, fused.bn.bias),
                        Options(training=phase != "eval", activation=activation, save=phase == "step"),
                    ))[strategy] is not None:  # fmt: skip
                        continue
                    errors[chosen] = measure(chosen, fused)

                def call(strategy: str = strategy) -> object:
                    with gemmnorm.set_strategy(strategy):
                        return run(fused)

                calls[strategy] = call
            if phase == "step":
                w = weight.detach()
                calls["gemm"] = lambda: (torch.mm(x, w.t()), torch.mm(grad, w), torch.mm(grad.t(), x))
            else:
                w, b = weight.detach(), None if fused.gemm.bias is None else fused.gemm.bias.detach()
                calls["gemm"] = lambda: torch.mm(x, w.t())
                calls["gemm+bias"] = lambda: nn.functional.linear(x, w, b)
            times = timer(calls, arguments.samples)
            floor = min(v for k, v in times.items() if k.startswith("gemm") and not k.startswith("gemm_"))
            for name, ms in times.items():
                print(
                    f"{case:12s} {precision:5s} {phase:5s} {name:18s} {ms * 1e3:9.1f} us  R {ms / floor:5.3f}"
                    f"  S {times['eager'] / ms:5.2f}  {errors.get(name, '')}",
                    flush=True,
                )
            del golden
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
