"""How much of the split is done before the product, and how much inside it: PYTHONPATH=src python lab/ahead.py, on a GPU.

Microseconds for shares of the rows that are split before: 0 is what the first wave of tiles needs, 1 is everything. With the
argument `variants` also of kernels that are changed here and there.
"""

import sys

import torch
from device_check import CASES, Timer
from variants import changed

import gemmnorm
from gemmnorm import plan
from gemmnorm.plan import hopper
from gemmnorm.runtime import call as runtime

SHARES = (0.0, 0.15, 0.3, 0.5, 0.75, 1.0)
STORE = "if (WHOLE || "
VARIANTS = {
    "as it is": [],
    "1 at once": [("gemm/split_ahead.cuh", "kAtOnce = 4", "kAtOnce = 1")],
    "no store": [("gemm/split_ahead.cuh", STORE, "if (v[i].at[0] == 1e30f) if (WHOLE || ")],  # wrong results
}


def rows_for(share):
    def rows(problem, tile, group_panels):
        blocks, (m_tiles, n_tiles) = problem.chip.multiprocessors, tile.counts(problem)
        m_first = min(m_tiles, -(-blocks // group_panels))
        n_first = max(1, blocks // (m_first * group_panels)) * group_panels
        return (
            (m_first + int(share * (m_tiles - m_first))) * tile.rows,
            min(problem.out_features, (n_first + int(share * (n_tiles - n_first))) * tile.columns),
        )

    return rows


def main():
    timer = Timer()
    print("share split before", *(f"{share:8}" for share in SHARES))
    for name in VARIANTS if "variants" in sys.argv else ("as it is",):
        print(name)
        with changed(VARIANTS[name]):
            shares(timer)


def shares(timer):
    for case in ("kb33", "kb39", "projector"):
        batch, wide, out, bias, scale, activation = CASES[case]
        module = gemmnorm.LinearScaleBatchNorm1d(wide, out, bias, scale, activation=activation, device="cuda")
        x = torch.randn(batch, wide, device="cuda")
        for training in (True, False):
            module.train(training)
            times = []
            for share in SHARES:
                hopper._rows_ahead = rows_for(share)
                plan.cached_plan.cache_clear()
                runtime.forget()
                with torch.no_grad():
                    times.append(timer({"call": lambda: module(x)}, 7)["call"] * 1e3)  # noqa: B023
            print(f"{case:9} {'train' if training else 'eval '}   ", *(f"{t:8.1f}" for t in times), flush=True)


if __name__ == "__main__":
    main()
