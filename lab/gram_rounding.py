"""What rounding costs M2 by the Gram matrix of x: x - p in bfloat16, G as two bfloat16, all else in float64. Needs no GPU.

    python lab/gram_rounding.py

Per kind of input and number of rows the worst relative error of M2 over all features and twenty seeds: of a product that is
rounded to bfloat16, as eager has it; of features within the kernel's bound, and how many those are; within the bound before.
"""

from __future__ import annotations

import torch

WIDE, FEATURES, PIVOT_ROWS, SEEDS = {300: 48, 3000: 300}, 2640, 8, 20
BEFORE, SAFE_MEAN = 256, 1e-4


def rounded(t):
    return t.bfloat16().double()


def pivot(x):
    """As kernels/gram/pivot.cuh takes it: of five binary digits."""
    v = x[torch.arange(PIVOT_ROWS) * len(x) // PIVOT_ROWS]
    mean, spread = v.mean(0), (v - v.mean(0)).abs().mean(0)
    bits = mean.float().view(torch.int32).long() + 0x40000 & 0xFFF80000
    few = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32).double()
    return rounded(torch.where(spread == 0, mean, torch.where(mean.abs() > spread, few, 0.0)))


def inputs(rows, wide):
    far = torch.randn(rows, wide)
    far[torch.arange(PIVOT_ROWS) * rows // PIVOT_ROWS] += 300
    yield "normal", torch.randn(rows, wide)
    yield "pivot rows far out", far
    yield "alike", torch.randn(rows, 1) + 0.05 * torch.randn(rows, wide)
    yield "alike, far from zero", 5 + torch.randn(rows, 1) + 0.05 * torch.randn(rows, wide)
    yield "rows of many sizes", torch.randn(rows, wide) * torch.exp(2 * torch.randn(rows, 1))


def errors(x, weight):
    """Relative errors of M2: the product's, the Gram matrix's; and what cancels in that, beside M2, infinite where the mean is
    too small beside its terms."""
    rows, p, a = len(x), pivot(x), x @ weight.T
    m2 = ((a - a.mean(0)) ** 2).sum(0)
    eager = ((rounded(a) - rounded(a).mean(0)) ** 2).sum(0)
    less = rounded(x - p)
    total = less.sum(0)
    gram = torch.triu(less.T @ x - total[:, None] * p)
    high = rounded(gram)
    gram = high + rounded(gram - high)
    both = torch.triu(gram, 1) * 2 + torch.diag(torch.diag(gram))
    sums, means = weight @ total, weight @ p
    offset = sums**2 / rows
    found = (weight @ both.T * weight).sum(1) - offset
    cancels = torch.maximum(weight**2 @ torch.diag(gram) + (sums * means).abs(), offset) / found
    small = found < rows * (SAFE_MEAN * (weight.abs() @ p.abs())) ** 2
    return (eager / m2 - 1).abs(), (found / m2 - 1).abs(), torch.where(small, torch.inf, cancels)


def main():
    print(f"{'input':22} {'rows':>5} {'product':>9} {'in bound':>9} {'of all':>7} {'before':>9}")
    for rows, wide in WIDE.items():
        worst = {}
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            weight = rounded(torch.randn(FEATURES, wide))
            for name, x in inputs(rows, wide):
                product, gram, cancels = errors(rounded(x), weight)
                within = [(cancels > 0) & (cancels <= limit) for limit in (rows**0.5 / 3, BEFORE)]
                figures = [product.max(), *((gram * these).max() for these in within), within[0].double().mean()]
                worst.setdefault(name, []).append(figures)
        for name, seeds in worst.items():
            product, now, before, share = torch.tensor(seeds).T
            print(
                f"{name:22} {rows:5} {product.max():9.5f} {now.max():9.5f} {share.mean():7.0%} {before.max():9.5f}"
            )


if __name__ == "__main__":
    main()
