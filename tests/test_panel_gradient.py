"""The backward of a panel of columns by one cluster (cluster_gradient.cuh), or by blocks that take turns
(persistent_gradient.cuh), run by the emulator, and on a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulator import COMPILER, emulated
from gpu_support import poisoned_memory
from test_emulated import SMALL_HOPPER
from torch import Tensor

from gemmnorm import GemmNormError, linear_scale_batch_norm, plan
from gemmnorm.plan import Problem, gradient
from gemmnorm.runtime import binding
from gemmnorm.runtime import call as runtime

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")
NOT_SPLIT = ("nothing", "nothing")
NAMES = ("x", "weight", "bias", "scale", "gamma", "beta")


def gradients(
    x: Tensor, weight: Tensor, *vectors: Tensor, grad: Tensor, activation: str | None, strategy: str
) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, *vectors)]
    bias, scale, gamma, beta = leaves[2:]
    running = x.new_zeros(weight.shape[0]), x.new_ones(weight.shape[0])
    y = linear_scale_batch_norm(
        *leaves[:2], bias, scale, *running, gamma, beta, training=True, activation=activation, strategy=strategy
    )
    y.backward(grad.to(y.dtype))
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def function(strategy: str, batch: int, features: int, dtype: str) -> str:
    problem = Problem(batch, 24, features, dtype, dtype, dtype, dtype, "tf32", chip=SMALL_HOPPER, save=True)
    return plan.make_plan(problem, strategy, "backward").launches[0].function


def compare_with_float64(strategy: str, batch: int, features: int, dtype: str, activation: str | None) -> None:
    torch.manual_seed(batch)
    kind = getattr(torch, dtype)
    x, weight = torch.randn(batch, 24).to(kind), torch.randn(features, 24).to(kind)
    vectors = [torch.randn(features).to(kind) for _ in range(4)]
    grad = torch.randn(batch, features).to(kind)
    wide = [t.double() for t in (x, weight, *vectors)]
    want = gradients(*wide, grad=grad.double(), activation=activation, strategy="reference")
    eager = gradients(x, weight, *vectors, grad=grad, activation=activation, strategy="reference")
    with emulated(SMALL_HOPPER), poisoned_memory():
        got = gradients(x, weight, *vectors, grad=grad, activation=activation, strategy=strategy)
    unit = torch.finfo(kind).eps
    for name, ours, theirs, exact in zip(NAMES, got, eager, want, strict=True):
        size = exact.norm().clamp_min(1e-3)
        error, allowed = (got_.double().sub(exact).norm() / size for got_ in (ours, theirs))
        assert error <= 1.1 * allowed + 4 * unit, name


@needs_compiler
@pytest.mark.parametrize("strategy", ["cublas_folded_bn", "one_kernel"])
@pytest.mark.parametrize(
    ("batch", "features", "dtype", "activation"),
    [
        (2, 8, "bfloat16", None),
        (63, 40, "bfloat16", "relu"),
        (64, 8, "float32", "silu"),
        (65, 72, "float32", None),
        (512, 32, "bfloat16", "gelu_tanh"),  # two blocks
        (513, 8, "float16", None),  # a cluster of four, its last part of one row
        (1100, 24, "bfloat16", "relu"),  # of eight
        (3000, 8, "float32", "tanh"),  # of eight, 64 rows to a warp
        (70, 800, "float32", "relu"),  # panel after panel for a block, the last not whole
        (1100, 200, "bfloat16", "relu"),  # for a cluster
    ],
)
def test_gradients(strategy: str, batch: int, features: int, dtype: str, activation: str | None) -> None:
    with plan.forcing(lambda c: c.phase == "forward" or c.variant.kernel == "cluster_gradient"):
        assert function(strategy, batch, features, dtype) == "cluster_gradient"
        compare_with_float64(strategy, batch, features, dtype, activation)


@needs_compiler
@pytest.mark.parametrize("strategy", ["cublas_folded_bn", "one_kernel"])
@pytest.mark.parametrize(
    ("batch", "features", "dtype", "activation"),
    [
        (2, 8, "bfloat16", None),  # one turn, one block that merges
        (257, 72, "float32", "relu"),  # the second turn has one row
        (300, 840, "bfloat16", None),  # panel after panel, the last not whole
        (513, 136, "float16", "gelu_tanh"),
        (4700, 72, "bfloat16", "silu"),
    ],
)
def test_turns(strategy: str, batch: int, features: int, dtype: str, activation: str | None, turns: None) -> None:
    assert function(strategy, batch, features, dtype) == "persistent_gradient"
    compare_with_float64(strategy, batch, features, dtype, activation)


@needs_compiler
@pytest.mark.parametrize("by", ["cluster", "turns"])
def test_equal_bits_whatever_the_order_of_events(by: str, request: pytest.FixtureRequest) -> None:
    if by == "turns":
        request.getfixturevalue("turns")
    torch.manual_seed(1)
    x, weight, grad = torch.randn(1100, 24), torch.randn(72, 24), torch.randn(1100, 72)
    vectors = [torch.randn(72) for _ in range(4)]
    with emulated(SMALL_HOPPER), poisoned_memory():
        found = [gradients(x, weight, *vectors, grad=grad, activation="relu", strategy="one_kernel") for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_where_it_serves() -> None:
    problem = Problem(1024, 64, 64, "bfloat16", "bfloat16", save=True)
    batches = (256, 1024, 2048, 4096, 4097)
    blocks = {b: {panel.cluster for panel in gradient.cluster_panels(replace(problem, batch=b))} for b in batches}
    assert list(blocks.values()) == [{1, 2, 4, 8}, {2, 4, 8}, {4, 8}, {8}, set()]
    for batch in (4097, 49152):  # more rows than a cluster's shared memory holds, a panel that the L2 does
        turns = gradient.persistent_launch(replace(problem, batch=batch), NOT_SPLIT)
        assert turns is not None and turns.function == "persistent_gradient" and turns.cooperative
    for other in (
        replace(problem, batch=49153),
        replace(problem, out_features=60),  # no whole words of 16 bytes
        replace(problem, training=False),
        replace(problem, chip=plan.chip_for(80)),  # no clusters
        replace(problem, chip=plan.chip_for(120)),  # too little shared memory
    ):
        assert gradient.persistent_launch(other, NOT_SPLIT) is None and not tuple(gradient.cluster_panels(other))


def test_panels_between_sums_and_gradients() -> None:
    """As many as are read in the time that sums take to be merged, two at least, and no more than there are."""
    problem = Problem(16384, 64, 4096, "bfloat16", "bfloat16", save=True)
    lags = {}
    for batch, features in ((16384, 4096), (8192, 4096), (49152, 4096), (8192, 128), (8192, 8)):
        launch = gradient.persistent_launch(replace(problem, batch=batch, out_features=features), NOT_SPLIT)
        assert launch is not None
        lags[batch, features] = dict(launch.numbers)["lag"]
    assert list(lags.values()) == [4, 8, 2, 2, 1]


@needs_compiler
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.usefixtures("turns")
def test_turns_where_the_gradient_of_y_is_wider_than_the_product(activation: str | None) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(300, 24).bfloat16(), torch.randn(136, 24).bfloat16()
    vectors, grad = [torch.randn(136) for _ in range(4)], torch.randn(300, 136)
    problem = Problem(300, 24, 136, "bfloat16", *("float32",) * 3, chip=SMALL_HOPPER, activation=activation, save=True)
    launch = plan.make_plan(problem, "one_kernel", "backward").launches[0]
    assert launch.function == "persistent_gradient"
    assert launch.config[:2] == (("T", "gemmnorm::bfloat16"), ("Y", "float"))
    wide = [t.double() for t in (x, weight, *vectors)]
    want = gradients(*wide, grad=grad.double(), activation=activation, strategy="reference")
    with emulated(SMALL_HOPPER), poisoned_memory():
        got = gradients(x, weight, *vectors, grad=grad, activation=activation, strategy="one_kernel")
    for name, ours, exact in zip(NAMES, got, want, strict=True):
        assert ours.double().sub(exact).norm() <= 0.02 * exact.norm(), name


@needs_compiler
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_gradients_of_what_autocast_has_cast_are_not_rounded(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """They come out of the product in the dtype of x and W themselves, as autograd demands."""
    torch.manual_seed(2)
    x, weight = torch.randn(65, 24).to(dtypes[0]).requires_grad_(), torch.randn(40, 24, requires_grad=True)
    bn_weight = torch.randn(40, requires_grad=True)
    grad = torch.randn(65, 40)
    running = torch.zeros(40), torch.ones(40)
    with emulated(SMALL_HOPPER), poisoned_memory(), torch.autocast("cpu", torch.bfloat16), runtime.recording() as plans:
        y = linear_scale_batch_norm(
            x, weight, None, None, *running, bn_weight, training=True, activation="relu", strategy="one_kernel"
        )
    assert plans[0].problem.dtype == "bfloat16" and y.dtype == torch.bfloat16
    with emulated(SMALL_HOPPER), poisoned_memory():
        y.backward(grad.to(y.dtype))
    assert x.grad is not None and weight.grad is not None
    assert (x.grad.dtype, weight.grad.dtype) == dtypes
    z = (x.detach().bfloat16().double(), weight.detach().bfloat16().double().requires_grad_())
    gamma = bn_weight.detach().double()
    linear_scale_batch_norm(
        *z, None, None, *(t.double() for t in running), gamma, training=True, activation="relu", strategy="reference"
    ).backward(grad.to(y.dtype).double())
    assert z[1].grad is not None
    assert float((weight.grad - z[1].grad).norm() / z[1].grad.norm()) < 0.01


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_derivative_under_autocast(dtype: torch.dtype) -> None:
    """The casts are nobody's graph; still a gradient penalty must not be left out in silence."""
    x, weight = torch.randn(65, 24).to(dtype).requires_grad_(), torch.randn(40, 24, requires_grad=True)
    running = torch.zeros(40), torch.ones(40)
    with emulated(SMALL_HOPPER), poisoned_memory():
        with torch.autocast("cpu", torch.bfloat16):
            y = linear_scale_batch_norm(x, weight, None, None, *running, training=True, strategy="one_kernel")
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert first.dtype == dtype
        with pytest.raises(GemmNormError, match="second derivative"):
            first.float().square().sum().backward()


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_a_product_of_another_dtype(kind: torch.dtype) -> None:
    left, right = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    out = torch.empty(5, 3, dtype=kind)
    binding._multiply(left, right, out)
    torch.testing.assert_close(out.float(), (left.float() @ right.float()), rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kinds", [(torch.float16, torch.bfloat16), (torch.float32, torch.float16)])
def test_a_product_of_another_dtype_on_a_gpu(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    left, right = torch.randn(5, 8).to(kinds[1]).cuda(), torch.randn(8, 16).to(kinds[1]).cuda()
    out = torch.empty(5, 16, dtype=kinds[0], device="cuda")
    binding._multiply(left, right, out)
    torch.testing.assert_close(out.float(), (left.float() @ right.float()), rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("batch", "features", "activation"),
    [
        (3, 8, None),
        (65, 72, "tanh"),
        (513, 264, "gelu"),
        (2100, 136, "silu"),
        (4200, 64, None),
        (9000, 40, "relu"),
        (16400, 1032, None),
        (2100, 8200, "relu"),
    ],
)
def test_gradients_on_a_gpu(dtype: str, batch: int, features: int, activation: str | None) -> None:
    torch.manual_seed(batch)
    kind = getattr(torch, dtype)
    x, weight = torch.randn(batch, 24).to(kind).cuda(), torch.randn(features, 24).to(kind).cuda()
    vectors = [torch.randn(features).to(kind).cuda() for _ in range(4)]
    # The gradient of the scale is large where that is small: one sample of such a feature on the other side of ReLU's
    # kink, and it would be all that is left of the error.
    vectors[1] += vectors[1].sign()
    grad = torch.randn(batch, features).to(kind).cuda()
    wide = [t.double() for t in (x, weight, *vectors)]
    want = gradients(*wide, grad=grad.double(), activation=activation, strategy="reference")
    eager = gradients(x, weight, *vectors, grad=grad, activation=activation, strategy="reference")
    for strategy in ("cublas_folded_bn", "one_kernel"):
        with poisoned_memory():
            got = gradients(x, weight, *vectors, grad=grad, activation=activation, strategy=strategy)
        for name, ours, theirs, exact in zip(NAMES, got, eager, want, strict=True):
            size = exact.norm().clamp_min(1e-3)
            error, allowed = (g.double().sub(exact).norm() / size for g in (ours, theirs))
            assert error <= 2 * allowed + 4 * torch.finfo(kind).eps, (strategy, name)
