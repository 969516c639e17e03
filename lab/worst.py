"""Which columns have the largest error, and what is special about them: python lab/worst.py"""

import torch

import gemmnorm

torch.manual_seed(0)
m = gemmnorm.LinearScaleBatchNorm1d(8192, 8192, device="cuda", dtype=torch.bfloat16)
x = torch.randn(1024, 8192, device="cuda").bfloat16()
d = gemmnorm.LinearScaleBatchNorm1d(8192, 8192, device="cuda", dtype=torch.float64)
d.load_state_dict(m.state_dict())
with torch.no_grad():
    g = d(x.double())
    a = x.double() @ d.gemm.weight.t()
    for s in ("cublas_folded_bn", "gemm_stats_apply", "one_kernel"):
        with gemmnorm.set_strategy(s):
            y = m(x).double()
        e = (y - g).norm(dim=0) / g.norm(dim=0)
        w = e.topk(6).indices
        r = (y - g).norm(dim=1) / g.norm(dim=1)
        print(s, "rows", r.max().item(), "columns", e.max().item(), "median", e.median().item())
        for j in w.tolist():
            print(
                "   col",
                j,
                e[j].item(),
                "scale",
                m.scale[j].item(),
                "std a",
                a[:, j].std().item(),
                "mean a",
                a[:, j].mean().item(),
                "ratio",
                ((y[:, j] * g[:, j]).sum() / g[:, j].square().sum()).item(),
                "mean err",
                (y[:, j] - g[:, j]).mean().item(),
                "norm",
                g[:, j].norm().item(),
            )
