"""Random problems in the emulator, forward and backward, against float64: PYTHONPATH=src python lab/fuzz.py [seconds] [seed]

Prints what differs, with the seed that repeats it.
"""

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torch
from emulator import emulated
from gpu_support import assert_accurate, poisoned_memory
from support import Chain, arguments, step, stir, twin

from gemmnorm import linear_scale_batch_norm, plan
from gemmnorm.runtime import call as runtime

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}


def problem(seed):
    r = random.Random(seed)
    name = r.choice(list(DTYPES))
    strategy = r.choice(["one_kernel"] * 3 + ["gemm_stats_apply", "cublas_bn", "cublas_folded_bn"])
    multiple = 8 if strategy in plan.OWN_GEMM else r.choice([1, 2, 4, 8])
    batch = r.choice([*([2, 3] if name != "tf32" else []), 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 320, 384, 513, 2049, r.randint(2, 700)])
    inner, features = (multiple * r.randint(1, 400 // multiple) for _ in range(2))
    options = {
        "bias": r.random() < 0.5,
        "scale_shape": r.choice([None, (features,), (1, features), (1,), ()]),
        "activation": r.choice([None, None, "silu", "gelu"]),
        "affine": r.random() < 0.7,
        "momentum": r.choice([0.1, None, 1.0]),
    }
    return name, strategy, batch, inner, features, r.random() < 0.75, r.choice([2, 3, 5, 9]), options


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    begun, ran, faults = time.time(), 0, 0
    matmul = torch.backends.cuda.matmul
    while time.time() - begun < seconds:
        name, strategy, batch, inner, features, training, chips, options = what = problem(seed)
        torch.manual_seed(seed)
        matmul.fp32_precision = "tf32" if name == "tf32" else "none"
        dtype = DTYPES[name]
        module = stir(Chain(inner, features, **options)).to(dtype).train(training)
        x, grad = (torch.randn(batch, n, dtype=dtype) for n in (inner, features))
        if seed % 3 == 0:
            with torch.no_grad():
                module.gemm.weight[:, 0], x[:, 0] = 30.0, 1.0  # means away from zero
        exact, eager, ours = twin(module).double(), twin(module), twin(module)
        want, theirs = step(exact, exact, x.double(), grad.double()), step(eager, eager, x, grad)
        ran_as = []

        def call(x):
            positional, keywords = arguments(ours, strategy=strategy)
            with runtime.recording() as plans:
                y = linear_scale_batch_norm(x, *positional, **keywords)
            ran_as.extend(p.strategy for p in plans)
            return y

        try:
            with emulated(plan.chip_for(90, chips)), poisoned_memory():
                got = step(ours, call, x, grad)
            assert_accurate(got, theirs, want, module, x, grad, 2.0**-11 if name == "tf32" else 0.0, factor=2.0)
        except Exception as fault:
            faults += 1
            print(f"seed {seed}: {what}, ran as {ran_as}: {str(fault)[:300]}", flush=True)
        ran, seed = ran + 1, seed + 1
    print(f"{ran} problems, {faults} with a fault, {time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()
