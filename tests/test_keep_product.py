"""Training steps that keep nothing of y's size: the backward multiplies again (epilogue_gradient.cuh).

The kernels run in the emulator, and on a GPU where one is there; the choice is the planner's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulator import COMPILER, emulated
from gpu_support import assert_accurate, fused, golden, model, poisoned_memory, precision
from support import Chain, arguments, step, stir, twin
from test_emulated import SMALL_HOPPER
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import gemmnorm
from gemmnorm import linear_scale_batch_norm, plan
from gemmnorm.errors import GemmNormValueError
from gemmnorm.plan import Problem
from gemmnorm.runtime import call as runtime

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")
HALF = ("bfloat16",) * 4


@pytest.fixture
def again_by(request):
    """The only tile (rows, columns) of a backward that multiplies again."""

    def wanted(c):
        gemm = getattr(c.variant, "gemm", None)
        return gemm is None or (gemm.tile.rows, gemm.tile.columns) == request.param

    runtime.forget()
    with plan.forcing(wanted):
        yield request.param
    runtime.forget()


def saving(shapes: list[tuple[int, ...]]):
    """Notes the shapes of what autograd saves."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t)


def kept_nothing(shapes: list[tuple[int, ...]], batch: int, features: int) -> bool:
    return (2, features) in shapes and (batch, features) not in shapes


def call(module: Chain, x: Tensor, shapes: list[tuple[int, ...]], strategy: str = "one_kernel") -> Tensor:
    positional, keywords = arguments(module, keep_product=False, strategy=strategy)
    with saving(shapes):
        return linear_scale_batch_norm(x, *positional, **keywords)


@needs_compiler
@pytest.mark.parametrize(
    ("again_by", "name", "strategy", "sizes", "options"),
    [
        ((256, 128), "bf16", "one_kernel", (600, 72, 264), {"activation": "silu"}),
        ((256, 128), "tf32", "one_kernel", (301, 36, 136), {"activation": "silu", "scale_shape": ()}),
        ((128, 128), "fp16", "cublas_bn", (299, 72, 136), {"activation": "relu"}),
        ((128, 128), "tf32", "gemm_stats_apply", (130, 36, 136), {"bias": False, "scale_shape": (136,)}),
        ((128, 64), "bf16", "gemm_stats_apply", (333, 136, 200), {"activation": "silu", "scale_shape": (200,)}),
        ((256, 64), "bf16", "one_kernel", (399, 72, 200), {"activation": "silu", "scale_shape": (200,)}),
        ((256, 64), "tf32", "gemm_stats_apply", (600, 36, 40), {"activation": "silu"}),
        ((128, 64), "fp16", "cublas_folded_bn", (3, 8, 16), {"affine": False}),
        ((64, 128), "bf16", "one_kernel", (250, 72, 200), {"activation": "relu", "bias": False, "affine": False}),
    ],
    indirect=["again_by"],
)
def test_gradients_without_a_kept_product(again_by, name, strategy, sizes, options):
    """Rows and features that fill no tile, more tiles than blocks, after forwards of every kind."""
    batch, in_features, out_features = sizes
    shapes: list[tuple[int, ...]] = []
    with precision(name) as dtype:
        module = stir(Chain(in_features, out_features, **options)).to(dtype)
        x, grad = (torch.randn(batch, n, dtype=dtype) for n in (in_features, out_features))
        exact, eager, ours = twin(module).double(), twin(module), twin(module)
        want, theirs = step(exact, exact, x.double(), grad.double()), step(eager, eager, x, grad)
        with emulated(SMALL_HOPPER), poisoned_memory():
            got = step(ours, lambda x: call(ours, x, shapes, strategy), x, grad)
        assert kept_nothing(shapes, batch, out_features)
        assert_accurate(got, theirs, want, module, x, grad, 2.0**-11 if name == "tf32" else 0.0, factor=1.5)


@needs_compiler
@pytest.mark.parametrize("again_by", [(256, 128), (192, 128), (256, 64), (64, 128)], indirect=True)
def test_under_autocast_where_y_is_float32(again_by):
    """da is half as large as y's gradient, whose place it takes in shared memory."""
    module = stir(Chain(72, 264, scale_shape=(264,), activation="silu"))
    x, grad = torch.randn(600, 72), torch.randn(600, 264)
    exact, eager, ours = twin(module).double(), twin(module), twin(module)
    want, shapes = step(exact, exact, x.double(), grad.double()), []
    with torch.autocast("cpu", torch.bfloat16):
        theirs = step(eager, eager, x, grad)
        with emulated(SMALL_HOPPER), poisoned_memory():
            got = step(ours, lambda x: call(ours, x, shapes), x, grad)
    assert got["y"].dtype == torch.float32 and kept_nothing(shapes, 600, 264)
    assert_accurate(got, theirs, want, module, x, grad, 2.0**-8, factor=1.5)


@needs_compiler
@pytest.mark.skipif(torch.ops.gemmnorm.linear_scale_batch_norm not in flop_registry, reason="PyTorch 2.5")
@pytest.mark.parametrize("wanted", [True, False])
def test_flops_are_those_of_a_checkpointed_chain(wanted):
    module = stir(Chain(72, 136)).bfloat16()

    def counted(f):
        x = torch.randn(130, 72, dtype=torch.bfloat16, requires_grad=wanted)
        with FlopCounterMode(display=False) as counter:
            f(x).sum().backward()
        return counter.get_total_flops()

    with emulated(SMALL_HOPPER):
        ours = counted(lambda x: call(module, x, []))
    again = counted(lambda x: checkpoint(module, x, use_reentrant=False))
    assert ours == again == (4 if wanted else 3) * 2 * 130 * 72 * 136


@needs_compiler
def test_a_scale_by_value_and_equal_bits_in_every_run():
    """Each launch has another interleaving."""
    half = [torch.randn(size, dtype=torch.bfloat16).requires_grad_() for size in ((600, 64), (264, 64))]
    grad, found = torch.randn(600, 264, dtype=torch.bfloat16), []
    exact = [t.detach().double().requires_grad_() for t in half]
    linear_scale_batch_norm(*exact, None, -0.5, training=True).backward(grad.double())
    with emulated(SMALL_HOPPER), poisoned_memory():
        for _ in range(4):
            y = linear_scale_batch_norm(*half, None, -0.5, training=True, strategy="one_kernel", keep_product=False)
            found.append(torch.autograd.grad(y, half, grad))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    for got, want in zip(found[0], exact, strict=True):
        assert (got.double() - want.grad).norm() <= 6e-3 * want.grad.norm()


@needs_compiler
@pytest.mark.parametrize("batch", [300, 700])
def test_a_constant_column_far_from_zero(batch):
    """Its rows beyond the batch, which are zero rather than the constant, do not reach the sums."""
    weight = torch.full((136, 64), 156.25, dtype=torch.bfloat16).requires_grad_()
    beta = torch.full((136,), 0.25).requires_grad_()
    x, grad = torch.ones(batch, 64, dtype=torch.bfloat16), torch.randn(batch, 136, dtype=torch.bfloat16)
    with emulated(SMALL_HOPPER), poisoned_memory():
        y = linear_scale_batch_norm(
            x, weight, bn_bias=beta, training=True, eps=1e-12, activation="gelu_tanh", strategy="one_kernel",
            keep_product=False,
        )  # fmt: skip
        y.backward(grad)
    leaf = torch.full((136,), 0.25).requires_grad_()
    torch.nn.functional.gelu(leaf.expand(batch, 136), approximate="tanh").backward(grad.float())
    assert torch.allclose(beta.grad, leaf.grad, rtol=1e-3, atol=1e-3)
    assert bool(weight.grad.isfinite().all())


@needs_compiler
def test_the_registered_operator_and_its_fake_agree():
    module = stir(Chain(32, 24, scale_shape=(24,))).bfloat16().requires_grad_(False)
    bn = module.bn
    x, grad = torch.randn(70, 32, dtype=torch.bfloat16), torch.randn(70, 24, dtype=torch.bfloat16)
    linear = (x, module.gemm.weight, module.gemm.bias, module.scale)
    running = (bn.running_mean, bn.running_var, bn.num_batches_tracked)
    forward = torch.ops.gemmnorm.linear_scale_batch_norm.default
    backward = torch.ops.gemmnorm.linear_scale_batch_norm_backward.default
    options = (1.0, True, 0.1, 1e-5, "relu", "one_kernel", True, False, None)
    checks = ("test_schema", "test_faketensor")
    with emulated(SMALL_HOPPER):
        of_forward = (*linear, *running, bn.weight, bn.bias, *options)
        torch.library.opcheck(forward, of_forward, test_utils=checks)
        _, product, statistics, *_ = forward(*of_forward)
        assert product is None and statistics.shape == (2, 24)
        of_backward = (grad, *linear, bn.weight, bn.bias, product, statistics, *options, x.dtype, x.dtype, [True] * 6)
        torch.library.opcheck(backward, of_backward, test_utils=checks)


@needs_compiler
def test_a_compiled_graph_keeps_as_little():
    torch._dynamo.reset()
    module = stir(Chain(64, 72, scale_shape=(72,), activation="silu")).bfloat16()
    x, grad = torch.randn(200, 64, dtype=torch.bfloat16), torch.randn(200, 72, dtype=torch.bfloat16)

    def plain(m: Chain, x: Tensor) -> Tensor:
        positional, keywords = arguments(m, keep_product=False, strategy="one_kernel")
        return linear_scale_batch_norm(x, *positional, **keywords)

    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    direct, traced, shapes = twin(module), twin(module), []
    with emulated(SMALL_HOPPER), poisoned_memory():
        want = step(direct, lambda x: plain(direct, x), x, grad)
        with saving(shapes):
            got = step(traced, lambda x: compiled(traced, x), x, grad)
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert kept_nothing(shapes, 200, 72)


def test_who_decides(monkeypatch):
    """The argument, the switch, the variable, the predicted time: in this order."""
    thin = Problem(65536, 128, 1024, *HALF, "native", save=True)
    square = Problem(16384, 4096, 4096, *HALF, "native", save=True)
    assert not plan.decide_keep_product(thin, None) and plan.decide_keep_product(square, None)
    assert plan.check_keep_product(None) is None
    monkeypatch.setenv("GEMMNORM_KEEP_PRODUCT", "0")
    assert plan.check_keep_product(None) is False and plan.check_keep_product(True) is True
    with gemmnorm.set_keep_product(True):
        assert plan.check_keep_product(None) is True and plan.check_keep_product(False) is False
        with gemmnorm.set_keep_product("auto"):
            assert plan.check_keep_product(None) is False
    monkeypatch.setenv("GEMMNORM_KEEP_PRODUCT", "yes")
    with pytest.raises(GemmNormValueError, match="GEMMNORM_KEEP_PRODUCT"):
        plan.check_keep_product(None)
    for refused in ("never", 0.5, None):
        with pytest.raises(GemmNormValueError, match="keep_product"):
            gemmnorm.LinearScaleBatchNorm1d(4, 4, keep_product=refused)


@pytest.mark.parametrize(
    "changes",
    [
        {"save": False},
        {"training": False},
        {"chip": plan.chip_for(80)},
        {"chip": None},
        {"in_features": 129},
        {"batch": 0},
        {"dtype": "float32", "out_dtype": "float32", "arithmetic": "float32"},
        {"dtype": "float32", "out_dtype": "float32", "arithmetic": "ieee"},
    ],
)
def test_where_the_product_is_kept_whatever_is_asked(changes):
    problem = replace(Problem(65536, 128, 1024, *HALF, "native", save=True), **changes)
    assert plan.decide_keep_product(problem, None, False)


def test_a_call_that_no_kernel_serves_keeps_it():
    module = gemmnorm.LinearScaleBatchNorm1d(8, 16, keep_product=False)
    with plan.set_strategy("reference"):
        module(torch.randn(9, 8)).sum().backward()
    assert module.gemm.weight.grad is not None


def test_forward_and_backward_agree_and_the_bytes_are_said():
    problem = Problem(59904, 112, 9856, *HALF, "native", save=True, keep_product=False)
    for strategy in ("one_kernel", "gemm_stats_apply", "cublas_folded_bn", "cublas_bn"):
        forward = plan.make_plan(problem, strategy)
        assert [b.role for b in forward.outputs] == ["y", "mean", "rstd"]
        assert forward.steps == plan.make_plan(replace(problem, save=False), strategy).steps
        backward = plan.make_plan(problem, strategy, "backward")
        assert "product" not in {field for launch in backward.launches for field in launch.params}
        assert plan.kept_bytes(forward) == plan.kept_bytes(backward) == 2 * 9856 * 4
    assert plan.kept_bytes(plan.make_plan(replace(problem, keep_product=True), "cublas_bn")) == 9856 * (2 * 59904 + 8)
    explained = str(gemmnorm.explain(problem, strategy="one_kernel"))
    assert "78,848 bytes (1,217," in explained and "with keep_product=True)" in explained


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("again_by", [(256, 128), (192, 128), (128, 128), (64, 128), (128, 64)], indirect=True)
@pytest.mark.parametrize("options", [{"activation": "silu", "scale_shape": (1160,)}, {"bias": False}])
def test_on_a_gpu(again_by, name, options):
    batch, features = 4099, 1160
    if name == "tf32" and again_by == (128, 64):
        pytest.skip("TF32 does not pass through this tile's shared memory")
    with precision(name) as dtype:
        module = model(dtype, 96, features, **options)
        x, grad = (torch.randn(batch, n, device="cuda", dtype=dtype) for n in (96, features))
        eager = twin(module)
        want, theirs = golden(module, x, grad), step(eager, eager, x, grad)
        found = []
        with poisoned_memory():
            for _ in range(10):
                ours = twin(module)
                found.append(step(ours, fused(ours, None, keep_product=False), x, grad))
    for other in found[1:]:
        assert all(torch.equal(found[0][key], other[key]) for key in other)
    assert_accurate(found[0], theirs, want, module, x, grad, 2.0**-11 if name == "tf32" else 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_memory_between_forward_and_backward_on_a_gpu(autocast):
    """Nothing of y's size but y; under autocast x and the weight once more, in half precision."""
    module = gemmnorm.LinearScaleBatchNorm1d(64, 4096, activation="silu").cuda()
    x = torch.randn(16384, 64, device="cuda")
    if not autocast:
        module, x = module.bfloat16(), x.bfloat16()

    def kept(keep_product: bool) -> int:
        before = torch.cuda.memory_allocated()
        with gemmnorm.set_keep_product(keep_product), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = module(x)
        found = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        y.sum().backward()
        return found

    torch.cuda.synchronize()
    kept(True), kept(False)  # compiled, and with the allocator's blocks and gradients there
    product = 16384 * 4096 * 2
    assert kept(True) >= product
    assert kept(False) < product // 16
    assert torch.isfinite(module.gemm.weight.grad).all()
