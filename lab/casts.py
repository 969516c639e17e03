"""Under autocast: who casts x and W, and how much of it is left to the product: PYTHONPATH=src python lab/casts.py, on a GPU.

Microseconds of a training forward that keeps the product, for tenths of the rows beyond the first wave's and chunks of K
that are cast before.
"""

import itertools

import torch
from device_check import CASES, Timer

import gemmnorm
from gemmnorm import plan
from gemmnorm.plan import cast, hopper
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime.operands import Operands

HALF = torch.bfloat16


def rows_for(tenths):
    def rows_ahead(problem, tile, group_panels):
        rows, panels = tile.counts(problem)
        blocks = problem.chip.multiprocessors
        if not problem.cast or rows * panels <= blocks:
            return hopper.ALL_ROWS, problem.out_features
        m, n = -(-blocks // group_panels), group_panels
        if rows * group_panels < blocks:
            m, n = rows, blocks // (rows * group_panels) * group_panels
        m, n = m + (rows - m) * tenths // 10, n + (panels - n) * tenths // 10
        return hopper.ALL_ROWS if m == rows else m * tile.rows, min(problem.out_features, n * tile.columns)

    return rows_ahead


def prepared(module, x, weight):
    """The call that `module` makes of tensors like x and weight, kept."""
    plan.cached_plan.cache_clear()
    runtime.forget()
    bn, vectors = module.bn, (module.gemm.bias, module.scale)
    state = (bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.weight, bn.bias)
    with torch.enable_grad(), torch.autocast("cuda", HALF), gemmnorm.set_strategy("one_kernel"):
        gemmnorm.linear_scale_batch_norm(x, weight, *vectors, *state[:2], *state[3:], num_batches_tracked=state[2],
                                         training=True, activation=module.activation)  # fmt: skip
    (call,) = runtime._calls.values()
    return lambda x, weight: call.forward(Operands(x, weight, *vectors, *state))


@torch.no_grad()
def main():
    timer, shipped = Timer(), (hopper._rows_ahead, hopper._chunks_ahead)
    for case in ("kb33", "kb39", "projector"):
        batch, wide, out, bias, scale, activation = CASES[case]
        m = gemmnorm.LinearScaleBatchNorm1d(wide, out, bias, scale, activation=activation, device="cuda")
        x, weight = torch.randn(batch, wide, device="cuda"), m.gemm.weight
        half = prepared(m, x.to(HALF), weight.detach().to(HALF).requires_grad_())
        calls = {
            "cast x": lambda: x.to(HALF),  # noqa: B023
            "cast W": lambda: weight.to(HALF),  # noqa: B023
            "by PyTorch": lambda: half(x.to(HALF), weight.to(HALF)),  # noqa: B023
        }
        for tenths, chunks in itertools.product((0, 3, 10), range(1, -(-wide // cast.COLUMNS) + 1)):
            hopper._rows_ahead, hopper._chunks_ahead = rows_for(tenths), lambda *_, chunks=chunks: chunks
            call = prepared(m, x, weight)
            calls[f"{tenths}/10, {chunks} before"] = lambda call=call: call(x, weight)  # noqa: B023
        hopper._rows_ahead, hopper._chunks_ahead = shipped
        call = prepared(m, x, weight)
        calls["as planned"] = lambda call=call: call(x, weight)  # noqa: B023
        print(case, "  ".join(f"{name} {ms * 1e3:.1f}" for name, ms in timer(calls, 11).items()), flush=True)


if __name__ == "__main__":
    main()
