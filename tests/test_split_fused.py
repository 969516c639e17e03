"""float32 with the weight as the register operand (split_fused_gemm.cuh), run by the emulator: sampled exponents, the
order of K and of features in which fragments are loaded, sizes that fill no tile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from emulator import COMPILER, emulated
from gpu_support import poisoned_memory, precision
from test_emulated import SMALL_HOPPER
from test_split import column_error
from torch import Tensor

from gemmnorm import linear_scale_batch_norm, plan, runtime

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")


@pytest.fixture(autouse=True)
def _default_precision() -> Iterator[None]:
    with precision("fp32"):
        yield


def own_feature(thread: int) -> int:
    """As split_fused_gemm.cuh has it."""
    lane = thread % 32
    return thread // 32 * 16 + lane // 8 + lane // 4 % 2 * 4


def place_of(k: int) -> int:
    """Where `store_split<true>` puts element k of 16."""
    q, e = k // 4, k % 4
    return 2 * q + e if e < 2 else 2 * q + 8 + e - 2


def test_fragments_are_loaded_without_bank_conflicts():
    """A load of 16 bytes a lane is served for eight lanes at a time: their bytes must lie in all 32 banks."""
    for thread in range(0, 256, 8):
        for step in range(4):
            for second_row in (0, 8):
                banks = set()
                for lane in range(8):
                    own, q = own_feature(thread + lane), lane % 4
                    address = (own * 128 + (q * 16 ^ own % 8 * 16) ^ step % 2 * 64) + second_row * 128
                    assert address // 16 % 8 == (step % 2 * 4 + q) ^ (own + second_row) % 8  # the copy engine's swizzle
                    banks |= {address // 4 % 32 + i for i in range(4)}
                assert banks == set(range(32))


def test_every_feature_and_every_k_has_its_place():
    owned = [own_feature(thread) + 8 * r for thread in range(0, 256, 4) for r in range(2)]
    assert sorted(owned) == list(range(128))
    assert sorted(map(place_of, range(16))) == list(range(16))
    for q in range(4):  # a lane's float4 in memory is its fragment's 2q, 2q + 1, 2q + 8 and 2q + 9
        assert [place_of(4 * q + e) for e in range(4)] == [2 * q, 2 * q + 1, 2 * q + 8, 2 * q + 9]


def compare(x: Tensor, weight: Tensor, training: bool, finish: str = "", chip: plan.Chip = SMALL_HOPPER) -> None:
    """The worst column is no worse than eager's, and what is not finite is where eager has it."""
    exact = x.double() @ weight.double().t()
    running = exact.mean(0).float(), exact.var(0).float()
    want, eager = (
        linear_scale_batch_norm(
            x.to(t), weight.to(t), None, None, *(r.to(t, copy=True) for r in running), training=training,
            strategy="reference",
        )
        for t in (torch.float64, torch.float32)
    )  # fmt: skip
    kept = [r.clone() for r in running]
    with emulated(chip), poisoned_memory(), runtime.recording() as plans:
        got = linear_scale_batch_norm(x, weight, None, None, *kept, training=training, strategy="one_kernel")
    assert plans[0].launches[1].function == "split_fused_gemm"
    assert not finish or f"gemmnorm::Finish::{finish}" in plans[0].launches[1].constants
    assert column_error(got, want) <= 1.05 * column_error(eager, want) + 2.0**-21
    for ours, theirs in zip(kept, running, strict=True):  # the running statistics move towards the same
        assert torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("finish", "batch", "in_features", "out_features"),
    [
        ("kOneBlock", 2, 8, 8),
        ("kOneBlock", 65, 200, 136),
        ("kOneBlock", 128, 72, 264),
        ("kOneWave", 130, 8, 72),
        ("kOneWave", 200, 64, 128),
        ("kPersistent", 193, 72, 264),
        ("kPersistent", 700, 200, 136),
        ("kPersistent", 449, 8, 264),
    ],
)
def test_sizes_that_fill_no_tile(training: bool, finish: str, batch: int, in_features: int, out_features: int) -> None:
    torch.manual_seed(batch)
    compare(
        torch.randn(batch, in_features),
        torch.randn(out_features, in_features) / 4,
        training,
        finish if training else "kEvaluate",
    )


def test_more_groups_than_a_block_merges_for_itself() -> None:
    torch.manual_seed(1)
    compare(torch.randn(128 * 65, 8) + 3, torch.randn(8, 8), True, "kPersistent")


INNER = 1096


def weights() -> Iterator[tuple[str, Tensor]]:
    """Rows whose sample, 32 runs of 16 at every 34 · n rounded down to 16, tells too little."""
    torch.manual_seed(4)
    seen = torch.zeros(INNER, dtype=torch.bool)
    for run in range(32):
        start = run * (INNER // 32) // 16 * 16
        seen[start : start + 16] = True
    assert int(seen.sum()) == 512
    plain = torch.randn(136, INNER) / 32
    changed = plain.clone()
    changed[3:9, 20] = 1e4  # not in the sample
    assert not seen[20]
    yield "large where it is not sampled", changed
    changed = plain.clone()
    changed[3:9, :512] = 0.0
    yield "begins with zeros", changed
    changed = plain.clone()
    changed[3:9, seen] = 0.0
    changed[60:66, seen] = 0.0
    changed[60:66] *= 1e-4
    changed[100:104, seen] = 0.0
    changed[100:104] *= 1e5  # beyond what is assumed of a row whose sample is zero
    changed[110:112] = 0.0
    yield "sample of zeros", changed
    changed = plain.clone()
    changed[3:9, seen] *= 1e3
    changed[60:66, seen] *= 1e-3
    yield "sample larger or smaller than the rest", changed
    yield "rows of all sizes", plain * 10.0 ** torch.linspace(-30, 30, 136).unsqueeze(1)
    yield "denormal rows", plain * torch.where(torch.arange(136) % 5 == 0, 1e-39, 1.0).unsqueeze(1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", [name for name, _ in weights()])
def test_exponents_guessed_from_a_sample(name: str, training: bool) -> None:
    weight = dict(weights())[name]
    x = torch.randn(300, INNER)
    if name in ("rows of all sizes", "denormal rows"):  # eps would decide, so that the product is compared
        return product_is_exact(x, weight)
    compare(x, weight, training)


def product_is_exact(x: Tensor, weight: Tensor) -> None:
    exact = x.double() @ weight.double().t()
    running = torch.zeros(136), torch.ones(136)
    with emulated(SMALL_HOPPER), poisoned_memory():
        got = linear_scale_batch_norm(x, weight, None, None, *running, eps=0.0, strategy="one_kernel")
    size = x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
    assert float(((got.double() - exact).abs() / size.clamp_min(1e-36)).max()) < 2.0**-21


@pytest.mark.parametrize("training", [True, False])
def test_a_weight_that_does_not_fit_is_noticed_by_rows_of_zeros(training: bool) -> None:
    """The first tile's rows are all zero: infinity times zero is as good a sign."""
    x = torch.randn(300, INNER)
    x[:128] = 0.0
    compare(x, dict(weights())["large where it is not sampled"], training)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("column", [0, 20])
def test_a_weight_that_is_not_finite_propagates_as_in_eager(value: float, training: bool, column: int) -> None:
    x, weight = torch.randn(300, INNER), torch.randn(136, INNER) / 32
    weight[5, column] = value
    running = torch.zeros(136), torch.ones(136)
    eager = linear_scale_batch_norm(x, weight, None, None, *(t.clone() for t in running), training=training)
    with emulated(SMALL_HOPPER), poisoned_memory():
        got = linear_scale_batch_norm(x, weight, None, None, *running, training=training, strategy="one_kernel")
    assert torch.equal(got.isnan(), eager.isnan()) and torch.equal(got.isinf(), eager.isinf())
    finite = eager.isfinite()
    assert int(finite.sum()) == 300 * 135
    torch.testing.assert_close(got[finite], eager[finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_equal_bits_whatever_the_order_of_events(training: bool) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(449, 136), torch.randn(264, 136)
    found = []
    with emulated(SMALL_HOPPER), poisoned_memory():
        for _ in range(3):
            running = torch.zeros(264), torch.ones(264)
            y = linear_scale_batch_norm(x, weight, None, None, *running, training=training, strategy="one_kernel")
            found.append((y, *running))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
