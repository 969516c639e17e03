"""What rows cost that are no whole lines of memory: evaluation by `fused_gemm`, x, W and y each with such rows or without.

    PYTHONPATH=src:benchmarks python lab/pitch.py
"""

from __future__ import annotations

import candidates as measured
import torch

import gemmnorm
from gemmnorm import plan

SIZES = (  # batch; in_features and out_features with odd rows and with whole lines; tile
    (56832, (312, 320), (6392, 6400), (256, 128)),
    (8192, (4040, 4096), (2048,), (256, 128)),
    (8192, (1000, 1024), (2048,), (256, 128)),
    (5824, (40, 64), (824, 832), (128, 128)),
    (384, (72, 64), (9432, 9472), (128, 128)),
    (43064, (792, 768), (88, 128), (256, 128)),
)


def main() -> None:
    timer = measured.Timer()
    for batch, inners, features, tile in SIZES:
        for inner in inners:
            for count in features:
                x = torch.randn(batch, inner, device="cuda", dtype=torch.bfloat16)
                padded = torch.zeros(batch, -(-inner // 64) * 64, device="cuda", dtype=torch.bfloat16)
                module = gemmnorm.LinearScaleBatchNorm1d(inner, count, device="cuda", dtype=torch.bfloat16).eval()
                weight = module.gemm.weight.detach()

                def ours(module=module, x=x, tile=tile) -> None:
                    wanted = lambda c: getattr(getattr(c.way, "tile", None), "rows", 0) == tile[0] and c.way.tile.columns == tile[1]  # noqa: E731
                    with plan.forcing(wanted), torch.no_grad(), gemmnorm.set_strategy("one_kernel"):
                        module(x)

                calls = {
                    "GEMM": lambda x=x, weight=weight: x @ weight.t(),
                    "ours": ours,
                    "copy of x": lambda x=x, padded=padded, inner=inner: padded[:, :inner].copy_(x),
                }
                times = timer(calls)
                print(f"{batch} × {inner} → {count}: " + ", ".join(f"{name} {us:.1f}" for name, us in times.items()))


if __name__ == "__main__":
    main()
