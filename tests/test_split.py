"""float32 by split operands, run by the emulator: as accurate as float32 on any data, and better on ordinary data.

The emulator forms sums as Hopper's tensor cores do, cut off 25 bits below the leading one.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import ways
from emulator import COMPILER, emulated
from gpu_support import poisoned_memory, precision
from test_emulated import SMALL_HOPPER, check
from torch import Tensor

from gemmnorm import linear_scale_batch_norm, plan
from gemmnorm.plan import candidates
from gemmnorm.runtime import binding, driver

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no g++"), pytest.mark.usefixtures("no_small_panel")]
BATCH, INNER, FEATURES = 150, 256, 72


@pytest.fixture(autouse=True)
def _default_precision() -> Iterator[None]:
    with precision("fp32"):
        yield


@pytest.fixture
def flagged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many features each call computes again in float32 arithmetic."""
    counts: list[int] = []
    original = binding.Bound.__call__

    def spy(self: Any, *args: Any) -> Any:
        seen = []
        steps = self._steps
        last = steps[-1]

        def launch(stream: Any, values: Any) -> None:
            most = values[3]  # x, weight, flagged, most
            seen.append(ctypes.c_int.from_address(most + 4 * 3).value)
            last.run(stream, values)

        launch.pack = last.run.pack
        self._steps = (*steps[:-1], replace(last, run=launch))
        try:
            return original(self, *args)
        finally:
            self._steps = steps
            counts.extend(seen)

    monkeypatch.setattr(binding.Bound, "__call__", spy)
    return counts


def ordinary() -> Iterator[tuple[str, Tensor, Tensor]]:
    gaussian = torch.randn(BATCH, INNER), torch.randn(FEATURES, INNER) / 16
    yield "gaussian", *gaussian
    yield "uniform", torch.rand(BATCH, INNER), torch.rand(FEATURES, INNER) - 0.5
    yield "relu", gaussian[0].relu(), gaussian[1]
    yield "image", torch.randint(0, 256, (BATCH, INNER)) / 255, gaussian[1]
    yield "one hot", torch.eye(INNER)[torch.randint(0, INNER, (BATCH,))], gaussian[1]
    yield "large", gaussian[0] * 1e10, gaussian[1] * 1e5
    yield "small", gaussian[0] * 1e-8, gaussian[1] * 1e-6
    yield "rows of zeros", gaussian[0] * (torch.arange(BATCH) % 3 > 0).unsqueeze(1), gaussian[1]
    yield (
        "denormal rows",
        torch.where(torch.arange(BATCH).unsqueeze(1) % 5 > 0, gaussian[0], gaussian[0] * 1e-41),
        gaussian[1],
    )


def adversarial() -> Iterator[tuple[str, Tensor, Tensor]]:
    x, weight = torch.randn(BATCH, INNER), torch.randn(FEATURES, INNER) / 16
    spiked = x.clone()
    spiked[7, 3] = 1e6
    yield "outlier", spiked, weight
    spiked = x.clone()
    spiked[:, 5] *= 1e6
    light = weight.clone()
    light[:, 5] *= 1e-6
    yield "outlier column, light weights", spiked, light
    grade = 10.0 ** torch.linspace(-6, 6, INNER)
    yield "graded", x * grade, weight / grade
    shuffled = grade[torch.randperm(INNER)]
    yield "graded, shuffled", x * shuffled, weight / shuffled
    yield "far mean", x + 1e4, weight
    yield "some weights graded", x * grade, torch.cat([weight[:60] / grade, weight[60:]])


def chain(x: Tensor, weight: Tensor, **more: Any) -> Tensor:
    return linear_scale_batch_norm(x, weight, training=True, eps=1e-35 if x.abs().max() < 1e-6 else 1e-5, **more)


def column_error(got: Tensor, exact: Tensor) -> float:
    """The worst column's; one whose values are all alike has none."""
    difference = (got.double() - exact).norm(dim=0) / exact.norm(dim=0).clamp_min(1e-30)
    return float("inf") if bool(difference.isnan().any()) else float(difference.max())


def _cases() -> dict[str, tuple[Tensor, Tensor, bool]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # whichever modules were imported before
        both = ((False, list(ordinary())), (True, list(adversarial())))
    return {name: (x, weight, again) for again, cases in both for name, x, weight in cases}


CASES = _cases()


@pytest.mark.parametrize("name", CASES)
def test_never_worse_than_float32(name: str, flagged: list[int]) -> None:
    x, weight, may_flag = CASES[name]
    exact, eager = chain(x.double(), weight.double()), chain(x, weight)
    with emulated(SMALL_HOPPER), poisoned_memory():
        got = chain(x, weight, strategy="one_kernel")
    ours, theirs = column_error(got, exact), column_error(eager, exact)
    assert ours <= 1.02 * theirs + 2.0**-22
    may_flag = may_flag and name != "outlier column, light weights"  # float16's exponent holds that too
    assert may_flag or not flagged[0], f"{flagged[0]} features of ordinary data computed again"
    if name.startswith("graded"):
        assert flagged[0] == FEATURES
    if name == "some weights graded":
        assert 60 <= flagged[0] < FEATURES


@pytest.mark.parametrize("batch", [65, 129, 193, 257])
def test_a_last_row_that_stands_out(batch: int) -> None:
    """The only row of its statistics group, far from the mean: statistics are not to be taken relative to it."""
    torch.manual_seed(0)
    x, weight = torch.randn(batch, INNER), torch.randn(FEATURES, INNER) / 16
    x[-1] *= 8
    exact, eager = chain(x.double(), weight.double()), chain(x, weight)
    with emulated(SMALL_HOPPER), poisoned_memory():
        got = chain(x, weight, strategy="one_kernel")
    errors = [float((y[-1].double() - exact[-1]).abs().max()) for y in (got, eager)]
    assert errors[0] <= 1.5 * errors[1], errors


def summed_in_order(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ in float32, added up along K one after the other: cuBLAS' float32 product on an H200 has the same error."""
    total = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(x.shape[1]):
        total += x[:, k : k + 1] * weight[:, k]
    return total


@pytest.mark.parametrize("name", ["gaussian", "uniform", "one sign"])
def test_evaluation_where_no_mean_is_taken_out(name: str) -> None:
    """Sums of one sign are the hardest for a tensor core that cuts off; here nothing takes the bias out again.

    Such sums' worst column has 0.92 to 1.11 times the error of sums in order, by the draw; all columns together 0.86
    to 0.91.
    """
    x, weight, _ = CASES["uniform" if name == "one sign" else name]
    weight = weight.abs() if name == "one sign" else weight
    exact = x.double() @ weight.double().t()
    running = exact.mean(0).float(), exact.var(0).float()
    want = linear_scale_batch_norm(x.double(), weight.double(), None, None, *(t.double() for t in running))
    in_order = (summed_in_order(x, weight) - running[0]) * (running[1] + 1e-5).rsqrt()
    with emulated(SMALL_HOPPER), poisoned_memory():
        got = linear_scale_batch_norm(x, weight, None, None, *running, strategy="one_kernel")
    assert column_error(got, want) <= (1.2 if name == "one sign" else 1.02) * column_error(in_order, want) + 2.0**-22
    assert (got - want).norm() <= (in_order - want).norm()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("training", [True, False])
def test_what_is_not_finite_propagates_as_in_eager(value: float, training: bool) -> None:
    x, weight = torch.randn(BATCH, INNER), torch.randn(FEATURES, INNER)
    x[3, 7] = value
    running = torch.zeros(FEATURES), torch.ones(FEATURES)
    eager = linear_scale_batch_norm(x, weight, None, None, *(t.clone() for t in running), training=training)
    with emulated(SMALL_HOPPER), poisoned_memory():
        got = linear_scale_batch_norm(x, weight, None, None, *running, training=training, strategy="one_kernel")
    assert torch.equal(got.isnan(), eager.isnan()) and torch.equal(got.isinf(), eager.isinf())
    finite = eager.isfinite()
    torch.testing.assert_close(got[finite], eager[finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("epilogue", "batch", "in_features", "out_features"),
    [
        ("SingleTile", 100, 72, 1000),
        ("CoResident", 180, 136, 40),
        ("Deferred", 300, 200, 264),
        ("SingleTile", 100, 37, 1001),  # rows that do not all begin at a whole word
        ("CoResident", 180, 37, 39),
        ("Deferred", 300, 203, 263),
    ],
)
def test_forward_and_backward(epilogue: str, batch: int, in_features: int, out_features: int) -> None:
    check(
        SMALL_HOPPER,
        "one_kernel",
        "fp32",
        batch,
        in_features,
        out_features,
        epilogue=epilogue,
        scale_shape=(out_features,),
    )


@pytest.mark.parametrize(
    ("batch", "inner", "features"),
    [(200, 136, 40), (300, 136, 200), (300, 137, 199)],  # a tile of flagged features, several, and rows of any length
)
def test_features_computed_again_have_their_running_statistics_and_gradients(
    batch: int, inner: int, features: int
) -> None:
    """As `test_forward_and_backward`, with every feature flagged, in training, and the output in evaluation."""
    grade = 10.0 ** torch.linspace(-6, 6, inner)
    x, weight = torch.randn(batch, inner) * grade, (torch.randn(features, inner) / grade)
    results = []
    for dtype, strategy in ((torch.float64, None), (torch.float32, "one_kernel")):
        w = weight.to(dtype).requires_grad_()
        scale, gamma = torch.linspace(-1, 2, features).to(dtype), torch.linspace(1, 2, features).to(dtype)
        running = torch.zeros(features, dtype=dtype), torch.ones(features, dtype=dtype)
        counter = torch.tensor(3)
        by_cublas = plan.forcing(
            lambda c: c.phase == "forward" or not c.variant.split_products
        )  # dW of graded x needs float32
        with by_cublas, emulated(SMALL_HOPPER), poisoned_memory():
            y = linear_scale_batch_norm(
                x.to(dtype), w, None, scale, *running, gamma, num_batches_tracked=counter, training=True,
                momentum=None, strategy=strategy or "reference",
            )  # fmt: skip
            (y * torch.linspace(-1, 1, batch).to(dtype).unsqueeze(1)).sum().backward()
            with torch.no_grad():
                z = linear_scale_batch_norm(
                    x.to(dtype), w, None, scale, *running, gamma, strategy=strategy or "reference"
                )
        assert counter.item() == 4
        results.append([y.detach(), w.grad / grade.to(dtype), *running, z])
    errors = [float((got.double() - exact).norm() / exact.norm()) for exact, got in zip(*results, strict=True)]
    assert max(errors) < 2e-6, errors


def test_the_planner_chooses_it_for_float32_unless_ieee_is_asked_for() -> None:
    problem = plan.Problem(1024, 8192, 8192, chip=plan.chip_for(90))
    chosen = plan.make_plan(problem)
    assert chosen.strategy == "one_kernel" and chosen.launches[1].member("Operand") == "gemmnorm::fp16x2"
    assert "three float16 products" in str(chosen)
    backward = plan.make_plan(replace(problem, save=True), phase="backward")
    assert [launch.only_for for launch in backward.launches][-3:] == ["grad_x", *2 * ["grad_weight"]]
    assert plan.make_plan(replace(problem, arithmetic="ieee")).strategy == "cublas_folded_bn"


@pytest.fixture
def small_gradients() -> Iterator[None]:
    """Gradients by split products at sizes that the planner would leave to the library."""
    with plan.forcing(ways.split_products):
        yield


@pytest.mark.parametrize(
    ("batch", "in_features", "out_features", "options"),
    [
        (100, 72, 72, {}),
        (200, 136, 40, {"scale_shape": (40,)}),
        (300, 200, 264, {"activation": "silu"}),
        (2, 8, 8, {}),
        (200, 137, 39, {"scale_shape": (39,)}),
        (300, 35, 262, {}),
        (2, 1, 3, {}),
    ],
)
@pytest.mark.usefixtures("small_gradients")
def test_gradients_by_split_products(batch: int, in_features: int, out_features: int, options: dict[str, Any]) -> None:
    check(SMALL_HOPPER, "one_kernel", "fp32", batch, in_features, out_features, **options)


@pytest.mark.usefixtures("small_gradients", "turns")
def test_gradients_by_split_products_of_what_blocks_take_turns_at() -> None:
    check(SMALL_HOPPER, "one_kernel", "fp32", 300, 72, 136, activation="relu")


@pytest.mark.parametrize("wanted", ["x", "weight"])
@pytest.mark.usefixtures("small_gradients")
def test_only_one_gradient_is_wanted(wanted: str) -> None:
    tensors = {"x": torch.randn(200, 136), "weight": torch.randn(40, 136)}
    grads = []
    for dtype in (torch.float64, torch.float32):
        leaves = {name: t.to(dtype, copy=True).requires_grad_(name == wanted) for name, t in tensors.items()}
        with emulated(SMALL_HOPPER), poisoned_memory():
            y = chain(**leaves, strategy="reference" if dtype == torch.float64 else "one_kernel")
            (y * torch.linspace(-1, 1, 200, dtype=dtype).unsqueeze(1).sin()).sum().backward()
        grads.append(leaves[wanted].grad.double())
        assert all(leaves[name].grad is None for name in leaves if name != wanted)
    assert float((grads[1] - grads[0]).norm() / grads[0].norm()) < 1e-6


@pytest.mark.usefixtures("small_gradients")
def test_what_one_product_reads_does_not_lie_beside_what_the_other_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """dx is done, and what it reads is let go of, before x is split and the weight's gradient allocated."""
    alive: list[weakref.ref[Tensor]] = []
    beside: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def empty(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty_strided(size, strides, dtype=dtype)
        beside[size] = [tuple(t.shape) for ref in alive if (t := ref()) is not None]
        alive.append(weakref.ref(made))
        return made

    batch, wide, features = 200, 320, 72
    x, weight = torch.randn(batch, wide, requires_grad=True), torch.randn(features, wide, requires_grad=True)
    with emulated(SMALL_HOPPER):
        y = chain(x, weight, strategy="one_kernel")
        monkeypatch.setattr(driver, "empty", empty)
        y.sin().sum().backward()
    split_weight, split_x, split_gradient = (features, 2 * wide), (batch, 2 * wide), (batch, 256)
    assert {split_weight, split_gradient} <= set(beside[batch, wide])
    for late in (split_x, (features, wide)):
        assert (batch, wide) in beside[late] and split_weight not in beside[late]
        assert beside[late].count(split_gradient) == 1  # by columns


@pytest.mark.usefixtures("small_gradients")
def test_gradients_of_matrices_that_are_views() -> None:
    """Half of a wider x, and a weight that is stored transposed: the kernels read rows one behind the other."""
    wide, across, grad = torch.randn(200, 272), torch.randn(136, 40), torch.randn(200, 40)
    grads = []
    for dtype in (torch.float64, torch.float32):
        x, weight = (t.to(dtype, copy=True).requires_grad_() for t in (wide, across))
        with emulated(SMALL_HOPPER), poisoned_memory():
            strategy = "reference" if dtype == torch.float64 else "one_kernel"
            chain(x.chunk(2, 1)[1], weight.t(), strategy=strategy).backward(grad.to(dtype))
        grads.append([x.grad.double(), weight.grad.double()])
    for exact, got in zip(*grads, strict=True):
        assert float((got - exact).norm() / exact.norm()) < 1e-6


def gradient_families() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    x, weight, grad = torch.randn(BATCH, INNER), torch.randn(FEATURES, INNER) / 16, torch.randn(BATCH, FEATURES)
    rows, features = (10.0 ** torch.linspace(-6, 6, n)[torch.randperm(n)].unsqueeze(1) for n in (BATCH, FEATURES))
    yield "gaussian", x, weight, grad
    yield "rows of the weight graded", x, weight * features, grad  # so are the columns of the gradient, inversely
    yield "small gradients of some samples", x, weight, grad * rows.clamp_max(1)
    yield "gradients graded by feature", x, weight, grad * features.t()
    yield "samples graded", x * rows.clamp(1e-3, 1e3), weight, grad
    yield "one large sample", torch.where(torch.arange(BATCH).unsqueeze(1) == 5, x * 1e4, x), weight, grad
    yield "a feature without gradient", x, weight, grad * (torch.arange(FEATURES) != 3)
    yield "samples without gradient", x, weight, grad * (torch.arange(BATCH) % 3 > 0).unsqueeze(1)
    yield "large", x * 1e10, weight * 1e5, grad * 1e5
    yield "small", x * 1e-8, weight * 1e-6, grad * 1e-8


@pytest.mark.parametrize("family", [name for name, *_ in gradient_families()])
@pytest.mark.usefixtures("small_gradients")
def test_gradients_never_worse_than_float32(family: str) -> None:
    """Every row of dx and of dW, against what was added up for it: ‖da_b‖‖W‖ and ‖da_j‖‖x‖ are not to be seen."""
    x, weight, grad = next(tensors for name, *tensors in gradient_families() if name == family)
    results = []
    for dtype, strategy in ((torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, "one_kernel")):
        a, w = x.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        with emulated(SMALL_HOPPER), poisoned_memory():
            chain(a, w, strategy=strategy).backward(grad.to(dtype))
        results.append((a.grad.double(), w.grad.double()))
    exact, eager, got = results
    for want, theirs, ours in zip(exact, eager, got, strict=True):
        size = want.norm(dim=1).clamp_min(1e-12 * float(want.norm()))
        worst = [float(((g - want).norm(dim=1) / size).max()) for g in (ours, theirs)]
        assert worst[0] <= 1.1 * worst[1] + 2.0**-21, worst


@pytest.mark.parametrize(("training", "inner", "features"), [(True, 1101, 263), (False, 1100, 264), (False, 1101, 263)])
def test_rows_whose_exponent_is_guessed_wrong(
    training: bool, inner: int, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows split inside the kernel take their exponent from the first 1024 columns; a wrong one is noticed."""
    batch, first = 700, 1024
    x, weight, scale = torch.randn(batch, inner), torch.randn(features, inner) / 32, torch.ones(features)
    x[500:520, :first] = 0.0
    x[520:540, :first] *= 1e-5
    x[540:560, first:] *= 1e-5
    x[560:580, first + 30] = 1e3
    weight[200:220, :first] *= 1e-4
    weight[220:240, :first] = 0.0
    if not training:  # where no squares are taken of what is as small
        weight[240:250] *= 1e-38  # denormal numbers: 2^-exponent is no float
        weight[250:260, :first] *= 1e-38
        scale[240:250] = 1e38
    exact = (x.double() @ weight.double().t()) * scale.double()
    running = exact.mean(0).float(), exact.var(0).float()
    options = {"training": training, "strategy": "reference"}
    want, eager = (
        linear_scale_batch_norm(x.to(t), weight.to(t), None, scale.to(t), *(r.to(t) for r in running), **options)
        for t in (torch.float64, torch.float32)
    )
    monkeypatch.setattr(candidates, "_conversions", ways.least_converted)
    plan.cached_plan.cache_clear()
    with emulated(SMALL_HOPPER), poisoned_memory():
        got = linear_scale_batch_norm(x, weight, None, scale, *running, training=training, strategy="one_kernel")
    plan.cached_plan.cache_clear()
    assert column_error(got, want) <= 1.02 * column_error(eager, want) + 2.0**-22


@pytest.mark.parametrize("one_tile", [(128, 64), (128, 32)], indirect=True)
def test_tiles_of_few_features_store_an_odd_number_of_them(one_tile: tuple[int, int]) -> None:
    """Of the accumulators a thread has pairs of features, which are stored together where their number is even."""
    check(SMALL_HOPPER, "one_kernel", "fp32", 150, 37, 67, scale_shape=(67,))
    check(SMALL_HOPPER, "one_kernel", "fp32", 300, 36, 101, activation="silu")


@pytest.mark.parametrize(("inner", "features"), [(37, 64), (64, 37), (35, 35)])
@pytest.mark.parametrize("training", [True, False])
def test_one_tile_of_rows_by_clusters(training: bool, inner: int, features: int) -> None:
    with plan.forcing(lambda c: c.phase == "backward" or ways.small_panel(c)):
        if training:
            check(SMALL_HOPPER, "one_kernel", "fp32", 70, inner, features, scale_shape=(features,))
            return
        x, weight, running = torch.randn(70, inner), torch.randn(features, inner), torch.ones(2, features)
        want = linear_scale_batch_norm(x.double(), weight.double(), None, None, *running.double())
        with emulated(SMALL_HOPPER), poisoned_memory():
            got = linear_scale_batch_norm(x, weight, None, None, *running, strategy="one_kernel")
    assert column_error(got, want) < 2e-6


@pytest.mark.parametrize(("batch", "features"), [(700, 264), (1500, 136)])
def test_evaluation_lists_the_features_whose_rows_are_split_inside(
    batch: int, features: int, monkeypatch: pytest.MonkeyPatch, flagged: list[int]
) -> None:
    grade = 10.0 ** torch.linspace(-6, 6, 136)
    x, weight = torch.randn(batch, 136) * grade, torch.randn(features, 136) / grade
    running = torch.zeros(features), torch.ones(features)
    monkeypatch.setattr(candidates, "_conversions", ways.least_converted)
    plan.cached_plan.cache_clear()
    with emulated(SMALL_HOPPER), poisoned_memory():
        linear_scale_batch_norm(x, weight, None, None, *running, strategy="one_kernel")
    plan.cached_plan.cache_clear()
    assert flagged[0] == features


def test_a_row_that_begins_with_zeros_and_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of its exponent when its first piece is split."""
    batch, inner, features, first = 300, 1100, 264, 1024
    x, weight = torch.randn(batch, inner), torch.randn(features, inner)
    weight[220:240, :first] = 0.0
    weight[220:240, first:] *= 1e-6
    exact = x.double() @ weight.double().t()
    running = exact.mean(0).float(), exact.var(0).float()
    want, eager = (
        linear_scale_batch_norm(
            x.to(t), weight.to(t), None, None, *(r.to(t) for r in running), eps=1e-20, strategy="reference"
        )
        for t in (torch.float64, torch.float32)
    )
    monkeypatch.setattr(candidates, "_conversions", ways.least_converted)
    plan.cached_plan.cache_clear()
    with emulated(SMALL_HOPPER), poisoned_memory():
        got = linear_scale_batch_norm(x, weight, None, None, *running, eps=1e-20, strategy="one_kernel")
    plan.cached_plan.cache_clear()
    assert column_error(got, want) <= 1.02 * column_error(eager, want) + 2.0**-22


@pytest.mark.parametrize("training", [True, False])
def test_rows_that_are_counted_together_are_split_in_time(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 64 tiles of rows: two share a counter, so that a tile waits for rows of the next one too."""
    batch, features = 128 * 66 + 5, 136
    x, weight = torch.randn(batch, 64), torch.randn(features, 64)
    running = torch.zeros(features), torch.full((features,), 64.0)
    monkeypatch.setattr(candidates, "_conversions", ways.least_converted)
    plan.cached_plan.cache_clear()
    with emulated(SMALL_HOPPER), poisoned_memory():
        got = linear_scale_batch_norm(x, weight, None, None, *running, training=training, strategy="one_kernel")
    plan.cached_plan.cache_clear()
    want = linear_scale_batch_norm(
        x.double(), weight.double(), None, None, *(r.double() for r in running), training=training, strategy="reference"
    )
    assert column_error(got, want) < 2e-6
