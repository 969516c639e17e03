"""What flagged features and prepared weights cost in float32: PYTHONPATH=src python lab/flagged.py, on a GPU. Microseconds."""

import torch
from device_check import CASES, Timer

import gemmnorm


def main():
    timer = Timer()
    for case in ("kb33", "kb39", "projector"):
        batch, wide, out, bias, scale, activation = CASES[case]
        module = gemmnorm.LinearScaleBatchNorm1d(wide, out, bias, scale, activation=activation, device="cuda")
        weight, x = module.gemm.weight.data, torch.randn(batch, wide, device="cuda")
        took = lambda samples=7: timer({"call": lambda: module(x)}, samples)["call"] * 1e3  # noqa: B023, E731
        figures = {}
        with torch.no_grad():
            figures["training"] = took()
            row, column, element = weight[5].clone(), x[:, 1].clone(), x[0, 0].clone()
            weight[5] = 0.0
            weight[5, 0], weight[5, 1] = 1e6, -1e6
            x[:, 1] = x[:, 0]  # what is left of the product is nothing beside its terms
            figures["one feature flagged"] = took(3)
            weight[5], x[:, 1] = row, column
            x[0, 0] = float("inf")
            figures["all flagged"] = took(3)
            x[0, 0] = element
            module.bn.reset_running_stats()
            module.eval()
            figures["evaluation"] = took()
            gemmnorm.prepare(module)
            figures["prepared"] = took()
            weight[5, 7] += 3.0
            figures["a row changed since"] = took(3)
            gemmnorm.unprepare(module)
        print(case, "  ".join(f"{name} {us:.1f}" for name, us in figures.items()), flush=True)


if __name__ == "__main__":
    main()
