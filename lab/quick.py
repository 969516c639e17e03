import itertools

import torch

import gemmnorm
from gemmnorm import plan
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime.operands import Operands, Options

torch.manual_seed(0)


def err(a, b):
    return ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item()


bad = 0
for (B, I, O), dt, strategy, training, save in itertools.product(
    [
        (1024, 8192, 8192),
        (300, 200, 1032),
        (5000, 256, 520),
        (128, 1024, 512),
        (64, 64, 64),
        (130, 72, 136),
        (2, 64, 32),
        (1000, 520, 776),
        (300, 200, 1032),
        (2048, 512, 4096),
        (5000, 256, 520),
        (9000, 64, 2048),
    ],
    [torch.bfloat16, torch.float16, torch.float32],
    ["gemm_stats_apply", "one_kernel", "cublas_folded_bn", "cublas_bn"],
    [True, False],
    [False, True],
):
    torch.backends.cuda.matmul.allow_tf32 = True
    m = gemmnorm.LinearScaleBatchNorm1d(I, O, activation="gelu", device="cuda", dtype=dt).train(training)
    with torch.no_grad():
        m.bn.weight.normal_()
        m.bn.bias.normal_()
        m.bn.running_mean.normal_(0, 0.1)
        m.bn.running_var.uniform_(0.2, 0.6)
    x = torch.randn(B, I, device="cuda", dtype=dt, requires_grad=save)
    d = gemmnorm.LinearScaleBatchNorm1d(I, O, activation="gelu", device="cuda", dtype=torch.float64).train(training)
    d.load_state_dict(m.state_dict())
    xd = x.detach().double().requires_grad_(save)
    yd = d(xd)
    operands = Operands(x, m.gemm.weight, m.gemm.bias, m.scale, *m.bn.buffers(), m.bn.weight, m.bn.bias)
    pr = runtime.describe(operands, Options(training=training, activation="gelu", save=save))
    if plan.applicable(pr)[strategy]:
        continue
    tag = (B, I, O, str(dt)[6:], strategy, training, save)
    print(tag, end=" ", flush=True)
    junk = [torch.full((64 << 20,), float("nan"), device="cuda") for _ in range(2)]
    del junk
    with gemmnorm.set_strategy(strategy), torch.set_grad_enabled(save):
        y = m(x)
    torch.cuda.synchronize()
    e = [err(y, yd)]
    if training:
        e += [err(m.bn.running_mean, d.bn.running_mean), err(m.bn.running_var, d.bn.running_var)]
        assert int(m.bn.num_batches_tracked) == int(d.bn.num_batches_tracked), tag
    if save:
        g = torch.randn_like(y)
        y.backward(g)
        yd.backward(g.double())
        e += [
            err(x.grad, xd.grad),
            err(m.gemm.weight.grad, d.gemm.weight.grad),
            err(m.bn.weight.grad, d.bn.weight.grad),
            err(m.bn.bias.grad, d.bn.bias.grad),
        ]
        if B > 2:
            e += [err(m.scale.grad, d.scale.grad)]
    tol = 2e-2 if dt != torch.float32 else 4e-3
    flag = "" if all(v < tol for v in e) else " <<<<<<<< BAD"
    bad += bool(flag)
    print(" ".join(f"{v:.1e}" for v in e), flag, flush=True)
print("BAD", bad)
