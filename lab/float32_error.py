"""Errors of float32-accurate products on Hopper's tensor cores, simulated on a CPU: lab/README.md has the tables.

    python lab/float32_error.py                 # every table: a minute and a half on one core
    python lab/float32_error.py --inner 512     # one length of K: seconds
    python lab/float32_error.py --speed         # only the speed bounds, which are arithmetic

The tensor core is that of tests/emulator/ptx/wgmma.cuh: the products of one instruction and its accumulator are aligned
to the largest exponent among them, cut off 25 bits below its leading one, added exactly, cut off to float32. Everything
is computed in float64, in which each of these steps is exact. Nothing here runs on a GPU.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

torch.set_num_threads(1)
KEPT_BITS = 25
Pairs = list[tuple[Tensor, Tensor]]  # operands [rows, K] in float64, multiplied in this order

# ---------------------------------------------------------------------------------------------------- the arithmetic


def float32(v: Tensor) -> Tensor:
    return v.float().double()


def toward_zero(v: Tensor) -> Tensor:
    """float64 cut off to float32."""
    normal = (v.view(torch.int64) & ~((1 << 29) - 1)).view(torch.float64)
    return torch.where(v.abs() < 2.0**-126, (v * 2.0**149).trunc() * 2.0**-149, normal)


def instruction(accumulator: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """accumulator [M, N] += aᵀ·b, for a [k, M] and b [k, N]: one instruction's worth of K."""
    terms = a.unsqueeze(2) * b.unsqueeze(1)
    largest = torch.maximum(terms.amax(0), -terms.amin(0)).maximum(accumulator.abs())
    exponent = (largest.view(torch.int64) >> 52).clamp_min(100)  # biased by 1023
    up = ((2046 + KEPT_BITS - exponent) << 52).view(torch.float64)
    down = ((exponent - KEPT_BITS) << 52).view(torch.float64)
    total = terms.mul_(up).trunc_().sum(0) + (accumulator * up).trunc_()
    return toward_zero(total * down)


def tensor_core(pairs: Pairs, width: int = 16) -> Tensor:
    """One accumulator for all pairs, which take turns at every `width` of K."""
    turned = [(a.t().contiguous(), b.t().contiguous()) for a, b in pairs]
    accumulator = torch.zeros(turned[0][0].shape[1], turned[0][1].shape[1], dtype=torch.float64)
    for k in range(0, turned[0][0].shape[0], width):
        for a, b in turned:
            accumulator = instruction(accumulator, a[k : k + width], b[k : k + width])
    return accumulator


def apart(first: tuple[Tensor, Tensor], rest: Pairs, every: int | None, width: int = 16) -> Tensor:
    """The largest product promoted; the others, which are smaller, in an accumulator of their own over all of K."""
    return float32(promoted([first], every, width) + tensor_core(rest, width))


def promoted(pairs: Pairs, every: int | None, width: int = 16) -> Tensor:
    """The same, the accumulator added to one in float32 arithmetic after every so many of K, and begun anew."""
    inner = pairs[0][0].shape[1]
    every = every or inner
    total = torch.zeros(pairs[0][0].shape[0], pairs[0][1].shape[0], dtype=torch.float64)
    for k in range(0, inner, every):
        total = float32(total + tensor_core([(a[:, k : k + every], b[:, k : k + every]) for a, b in pairs], width))
    return total


def fma_chains(x: Tensor, w: Tensor) -> Tensor:
    """[M, chains, K] and [N, chains, K] to [M, N, chains]: float32 FMAs, each chain in the order of K."""
    x, w = x.permute(2, 0, 1).double().contiguous(), w.permute(2, 0, 1).double().contiguous()
    total = torch.zeros(x.shape[1], w.shape[1], x.shape[2], dtype=torch.float64)
    for k in range(x.shape[0]):
        total = float32(total + x[k].unsqueeze(1) * w[k].unsqueeze(0))
    return total


# --------------------------------------------------------------------------------------------------------- the parts


def exponents(v: Tensor) -> Tensor:
    """Of each row: the largest magnitude is in [2^(e-1), 2^e). Zero for a row of zeros."""
    return torch.frexp(v.double().abs().amax(-1, keepdim=True))[1]


def scaled(v: Tensor, exponent: Tensor) -> Tensor:
    return torch.ldexp(v.double(), exponent)


def fp16_parts(v: Tensor, low_unit: float) -> tuple[Tensor, Tensor, Tensor]:
    """v = (high + low·low_unit)·2^e, one e a row, the largest in [2^14, 2^15)."""
    e = exponents(v) - 15
    u = scaled(v, -e)
    high = u.half().double()
    return high, float32((u - high) / low_unit).half().double(), e


def bf16_parts(v: Tensor) -> list[Tensor]:
    parts, rest = [], v.float()
    for _ in range(3):
        parts.append(rest.bfloat16().double())
        rest = rest - rest.bfloat16().float()
    return parts


def tf32(v: Tensor) -> Tensor:
    """To nearest, halves away from zero, as `cvt.rna.tf32.f32`."""
    return ((v.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def tf32_parts(v: Tensor) -> tuple[Tensor, Tensor]:
    high = tf32(v)
    return high.double(), tf32(v.float() - high).double()


def int8_parts(v: Tensor, count: int, bits: int) -> tuple[list[Tensor], Tensor]:
    """Fixed point below the row's largest: a digit of 7 bits and a sign, then `count - 1` signed ones of `bits`."""
    e = exponents(v)
    e = e + (scaled(v, -e).abs().amax(-1, keepdim=True) > 127.25 / 128).int()
    whole, digits = torch.round(scaled(v, 7 + bits * (count - 1) - e)), []
    half = 2.0 ** (bits - 1)
    for _ in range(count - 1):
        digit = torch.remainder(whole + half, 2 * half) - half
        digits.insert(0, digit)
        whole = (whole - digit) / (2 * half)
    digits.insert(0, whole)
    assert all(d.abs().max() <= 128 for d in digits)
    return digits, e


# ------------------------------------------------------------------------------------------------------- the schemes


def sequential(x: Tensor, w: Tensor) -> Tensor:
    return fma_chains(x.unsqueeze(1), w.unsqueeze(1)).squeeze(2)


def blocked(x: Tensor, w: Tensor) -> Tensor:
    """Partial sums of 128 of K."""
    parts = fma_chains(x.unflatten(1, (-1, 128)), w.unflatten(1, (-1, 128)))
    total = torch.zeros_like(parts[..., 0])
    for part in parts.unbind(2):
        total = float32(total + part)
    return total


def recomputed(x: Tensor, w: Tensor) -> Tensor:
    """As fallback.cuh: a warp's lanes take four neighbours each of every 128 of K, then add up in a tree."""
    lanes = [v.unflatten(1, (-1, 32, 4)).transpose(1, 2).flatten(2) for v in (x, w)]
    total = fma_chains(*lanes)
    while total.shape[2] > 1:
        total = float32(total[..., ::2] + total[..., 1::2])
    return total.squeeze(2)


def fp16_unscaled(every: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    def product(x: Tensor, w: Tensor) -> Tensor:
        (xh, xl, xe), (wh, wl, we) = fp16_parts(x, 1.0), fp16_parts(w, 1.0)
        return float32(scaled(promoted([(xh, wh), (xl, wh), (xh, wl)], every), xe + we.t()))

    return product


def cut(low: Tensor, bits: int) -> Tensor:
    """float16 values of which so many of the 11 bits are kept."""
    return (low.half().view(torch.int16) & -(1 << (11 - bits))).view(torch.half).double()


def built(x: Tensor, w: Tensor, every: int = 64, low_bits: int = 11) -> Tensor:
    """split.cuh: low in units of 2^-11, both products with it in an accumulator of their own over all of K."""
    (xh, xl, xe), (wh, wl, we) = fp16_parts(x, 2.0**-11), fp16_parts(w, 2.0**-11)
    xl, wl = cut(xl, low_bits), cut(wl, low_bits)
    cross = tensor_core([(xl, wh), (xh, wl)])
    return float32(scaled(float32(promoted([(xh, wh)], every) + cross * 2.0**-11), xe + we.t()))


def built_by_block(x: Tensor, w: Tensor, block: int = 128) -> Tensor:
    """The same with an exponent per row and block of K: what a block adds up to is scaled as it is promoted."""
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float64)
    for k in range(0, x.shape[1], block):
        (xh, xl, xe), (wh, wl, we) = (fp16_parts(v[:, k : k + block], 2.0**-11) for v in (x, w))
        for half in (slice(0, block // 2), slice(block // 2, block)):
            total = float32(total + scaled(tensor_core([(xh[:, half], wh[:, half])]), xe + we.t()))
        total = float32(total + scaled(tensor_core([(xl, wh), (xh, wl)]) * 2.0**-11, xe + we.t()))
    return total


def built_balanced(x: Tensor, w: Tensor) -> Tensor:
    """The same after x·D and W·D⁻¹, D diagonal, of powers of two that make the columns of x and W alike in size."""
    d = (exponents(w.t()) - exponents(x.t())).div(2, rounding_mode="floor").t()
    return built(scaled(x, d).float(), scaled(w, -d).float())


def lost(x: Tensor, w: Tensor, deviation: Tensor) -> Tensor:
    """The guard, per feature (split_loses)."""
    x, w = x.double().abs(), w.double().abs()
    bound = 2.0**-51 * (x.amax() * w.sum(1) + x.sum(1).amax() * w.amax(1))
    return ~(bound <= 2.0**-22 * deviation)


def built_guarded(x: Tensor, w: Tensor) -> Tensor:
    a = built(x, w)
    return torch.where(lost(x, w, a.std(0, correction=0)), recomputed(x, w), a)


def bf16(products: int, every: int | None, low_apart: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    order = [(i, j) for s in range(4, -1, -1) for i in range(3) for j in range(3) if i + j == s]  # the smallest first

    def product(x: Tensor, w: Tensor) -> Tensor:
        a, b = bf16_parts(x), bf16_parts(w)
        pairs = [(a[i], b[j]) for i, j in order[-products:]]
        return apart(pairs[-1], pairs[:-1], every) if low_apart else promoted(pairs, every)

    return product


def tf32_three(every: int | None, low_apart: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    def product(x: Tensor, w: Tensor) -> Tensor:
        (xh, xl), (wh, wl) = tf32_parts(x), tf32_parts(w)
        low = [(xl, wh), (xh, wl)]
        return apart((xh, wh), low, every, width=8) if low_apart else promoted([*low, (xh, wh)], every, width=8)

    return product


def int8(count: int, bits: int) -> Callable[[Tensor, Tensor], Tensor]:
    def product(x: Tensor, w: Tensor) -> Tensor:
        (a, xe), (b, we) = int8_parts(x, count, bits), int8_parts(w, count, bits)
        total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float64)
        for s in range(count - 1, -1, -1):  # one int32 accumulator for all products of one weight
            whole = sum(a[i] @ b[s - i].t() for i in range(s + 1))
            assert whole.abs().max() < 2**31
            total = float32(total + float32(whole) * 2.0 ** (-14 - bits * s))
        return float32(scaled(total, xe + we.t()))

    return product


SCHEMES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "float32, in the order of K": sequential,
    "float32, partial sums of 128": blocked,
    "fp16×3, low unscaled, never promoted": fp16_unscaled(None),
    "… promoted every 1024": fp16_unscaled(1024),
    "… every 256": fp16_unscaled(256),
    "… every 128": fp16_unscaled(128),
    "… every 64": fp16_unscaled(64),
    "**fp16×3 built: low·2¹¹, no guard**": built,
    "**fp16×3 built, with its guard**": built_guarded,
    "… no guard, promoted every 128": lambda x, w: built(x, w, 128),
    "… no guard, 9 bits of low": lambda x, w: built(x, w, low_bits=9),
    "… no guard, 8 bits of low": lambda x, w: built(x, w, low_bits=8),
    "… no guard, exponents per 128 of K": built_by_block,
    "… no guard, columns of K balanced": built_balanced,
    "bf16×6, every 64": bf16(6, 64),
    "… every 64, small products apart": bf16(6, 64, low_apart=True),
    "bf16×6, never promoted": bf16(6, None),
    "bf16×9, every 64": bf16(9, 64),
    "TF32×3, every 64": tf32_three(64),
    "… every 64, low products apart": tf32_three(64, low_apart=True),
    "TF32×3, never promoted": tf32_three(None),
    "int8, 3 slices of 7 bits": int8(3, 7),
    "int8, 3 slices of 8 bits": int8(3, 8),
    "int8, 4 slices of 7 bits": int8(4, 7),
}

# -------------------------------------------------------------------------------------------------------- the inputs


def families(inner: int, size: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    torch.manual_seed(0)
    x, w = torch.randn(size, inner), torch.randn(size, inner)
    yield "Gaussian", x, w
    yield "uniform", torch.rand(size, inner), torch.rand(size, inner)
    yield "ReLU", x.relu(), w
    spiked, light = x.clone(), w.clone()
    spiked[:, 5] *= 1e6
    light[:, 5] *= 1e-6
    yield "outlier", spiked, light
    grade = 10.0 ** torch.linspace(-6, 6, inner)
    yield "graded", x * grade, w / grade
    grade = grade[torch.randperm(inner)]
    yield "shuffled", x * grade, w / grade
    yield "denormal", x * 1e-41, w * 1e20


MEASURES = (
    "Worst column's error over its deviation",
    "Frobenius error over the norm",
    "Worst column's error less its mean, over its deviation",
)
Errors = dict[str, dict[str, tuple[float, ...]]]  # by scheme and family, in the order of MEASURES


def errors(a: Tensor, exact: Tensor) -> tuple[float, ...]:
    """Errors of a column as root mean squares. BatchNorm in training removes their mean, in evaluation it does not."""
    difference, deviation = a.double() - exact, exact.std(0, correction=0)
    whole = difference.square().mean(0).sqrt() / deviation
    centred = difference.std(0, correction=0) / deviation
    return float(whole.max()), float(difference.norm() / exact.norm()), float(centred.max())


# -------------------------------------------------------------------------------------------------------- the tables


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def short(v: float) -> str:
    if not math.isfinite(v) or v >= 0.095:
        return f"{v:.2g}"
    mantissa, exponent = f"{v:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def measure(inner: int, size: int) -> Errors:
    found: Errors = {name: {} for name in SCHEMES}
    flagged = {}
    for family, x, w in families(inner, size):
        exact = x.double() @ w.double().t()
        flagged[family] = int(lost(x, w, exact.std(0, correction=0)).sum())
        for name, product in SCHEMES.items():
            found[name][family] = errors(product(x, w), exact)
    names = list(flagged)
    for i, what in enumerate(MEASURES):
        print(f"\n{what}, K = {inner}:\n")
        print(row(["scheme", *names]))
        print("|---" * (len(names) + 1) + "|")
        for name, by_family in found.items():
            print(row([name, *(short(by_family[f][i]) for f in names)]))
        if i == 0:
            print(row([f"features the guard flags, of {size}", *(str(flagged[f]) for f in names)]), flush=True)
    return found


def growth(found: dict[int, Errors], family: str) -> None:
    lengths = sorted(found)
    print(f"\n{MEASURES[0]} (left) and less its mean (right), {family}, by K:\n")
    print(row(["scheme", *(f"K = {k}" for k in lengths), *map(str, lengths)]))
    print("|---" * (2 * len(lengths) + 1) + "|")
    for name in SCHEMES:
        print(row([name, *(short(found[k][name][family][i]) for i in (0, 2) for k in lengths)]))


# Products; TFLOP/s or TOP/s of one (measured on an H200, int8 from the data sheet); bytes of an element's parts.
SPEED = {
    "float32 (cuBLAS)": (1, 51, 4),
    "fp16×3": (3, 790, 4),
    "bf16×6": (6, 790, 6),
    "bf16×9": (9, 790, 6),
    "TF32×3": (3, 415, 8),
    "int8, 3 slices": (6, 1979, 3),
    "int8, 4 slices": (10, 1979, 4),
}
COPY = 4.27e12  # bytes read and written a second, measured on an H200


def speed(batch: int = 1024, inner: int = 8192, features: int = 8192) -> None:
    print(f"\nSpeed bounds; times for {batch} × {inner} → {features}:\n")
    print(row(["scheme", "products", "bytes", "bound, TFLOP/s", "product, µs", "split pass, µs", "both, TFLOP/s"]))
    print("|---" * 7 + "|")
    work, elements = 2.0 * batch * inner * features, (batch + features) * inner
    for name, (products, rate, size) in SPEED.items():
        product = work * products / (rate * 1e12)
        split = elements * (4 + size) / COPY if products > 1 else 0.0
        cells = [products, size, f"{rate / products:.0f}", f"{product * 1e6:.0f}", f"{split * 1e6:.0f}"]
        print(row([name, *map(str, cells), f"{work / (product + split) / 1e12:.0f}"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", type=int, nargs="+", default=[128, 512, 2048, 8192], help="K, multiples of 128")
    parser.add_argument("--size", type=int, default=48, help="rows of x and of W")
    parser.add_argument("--speed", action="store_true", help="only the speed bounds")
    options = parser.parse_args()
    if options.speed:
        return speed()
    began = time.perf_counter()
    print(f"torch {torch.__version__}, simulated on a CPU, {options.size} × {options.size} outputs")
    found = {inner: measure(inner, options.size) for inner in options.inner}
    for family in ("Gaussian", "uniform"):
        growth(found, family)
    speed()
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
