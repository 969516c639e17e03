"""Who wants to see single operations gets PyTorch's own: function transforms, forward mode, traces, exports, counts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulator import COMPILER, emulated
from support import stir, twin
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import gemmnorm
from gemmnorm import plan
from gemmnorm.runtime import call as runtime


@pytest.fixture(autouse=True)
def _operator() -> Iterator[None]:
    """The registered operator, as on a GPU; without a strategy the CPU runs plain ops anyway."""
    gemmnorm.set_strategy("reference")
    yield


def plain(module: gemmnorm.LinearScaleBatchNorm1d, x: Tensor) -> Tensor:
    return module.bn(module.gemm(x) * module.scale)


def tangent(f: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda f, x: torch.vmap(f)(x.expand(3, *x.shape)),
    "grad": lambda f, x: torch.func.grad(lambda v: f(v).square().sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda v: f(v).square().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "forward mode": tangent,
}


@pytest.mark.parametrize("gradients", [True, False])
def test_a_batch_of_scales(gradients: bool) -> None:
    """The scale alone is batched: nothing of the product's size may be written to in place."""
    x, weight, scales = torch.randn(8, 6), torch.randn(4, 6), torch.rand(3, 4)
    with torch.set_grad_enabled(gradients):
        f = lambda scale: gemmnorm.linear_scale_batch_norm(x, weight, None, scale, training=True)  # noqa: E731
        torch.testing.assert_close(torch.vmap(f)(scales), torch.stack([f(scale) for scale in scales]))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(name: str) -> None:
    module = stir(gemmnorm.LinearScaleBatchNorm1d(6, 4)).double().eval()
    x = torch.randn(5, 6, dtype=torch.float64)
    transform = TRANSFORMS[name]
    torch.testing.assert_close(transform(module, x), transform(lambda v: plain(module, v), x))


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("strategy", ["one_kernel", "cublas_folded_bn", "reference"])
def test_a_batch_of_gradients(strategy: str) -> None:
    module, x, grads = stir(gemmnorm.LinearScaleBatchNorm1d(16, 8)), torch.randn(12, 16), torch.randn(3, 12, 8)
    inputs = [x.requires_grad_(), *module.parameters()]
    want = torch.autograd.grad(plain(module, x), inputs, grads, is_grads_batched=True)
    with emulated(plan.chip_for(90, 3)), gemmnorm.set_strategy(strategy), runtime.recording() as plans:
        y = module(x)
        got = torch.autograd.grad(y, inputs, grads, is_grads_batched=True)
    assert [found.strategy for found in plans][:1] == [strategy]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.__version__ < "2.5", reason="a branch has no gradients there")
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_through_a_branch(compiled: bool) -> None:
    """PyTorch takes gradients of a branch only where each operation's inputs all have one: no operator with a None."""
    module = stir(gemmnorm.LinearScaleBatchNorm1d(6, 4, bias=False)).eval()
    x = torch.randn(5, 6)

    def branches(f: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda v: f(v).square(), lambda v: f(-v), (x,))

    call = torch.compile(branches, backend="aot_eager") if compiled else branches
    for signed in (x * x.sum().sign(), -x * x.sum().sign()):
        a, b = signed.clone().requires_grad_(), signed.clone().requires_grad_()
        got, want = call(module, a), (plain(module, b).square() if signed.sum() > 0 else plain(module, -b))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), a), torch.autograd.grad(want.sum(), b))


counts_ours = pytest.mark.skipif(
    torch.ops.gemmnorm.linear_scale_batch_norm not in flop_registry, reason="PyTorch 2.4 looks under another name"
)


class Quantised(TorchFunctionMode):
    """Whoever calls `F.linear` gets the product by a rounded weight."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            args = (args[0], args[1].round(), *args[2:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_a_function_mode_sees_the_functions_and_a_default_device_does_not_stand_in_the_way(cached: bool) -> None:
    module = stir(gemmnorm.LinearScaleBatchNorm1d(24, 32)).bfloat16().eval().requires_grad_(False)
    x = torch.randn(70, 24, dtype=torch.bfloat16)
    gemmnorm.set_strategy(None)
    with emulated(plan.chip_for(90, 3)), runtime.recording() as plans:
        if cached:
            module(x)
        with Quantised():
            got = module(x)
        assert len(plans) == cached
        with torch.device("cpu"):
            module(x)
        assert len(plans) == cached + 1
    expected = twin(module)
    expected.gemm.weight.data.round_()
    torch.testing.assert_close(got, plain(expected, x))


@counts_ours
def test_flops_of_a_synchronised_product() -> None:
    operands, options = (
        (torch.randn(5, 6), torch.randn(4, 6), *[None] * 7),
        (1.0, True, 0.1, 1e-5, None, None, True, None, None),
    )
    with FlopCounterMode(display=False) as counter:
        torch.ops.gemmnorm.sync_statistics(*operands, *options, 2)
    assert counter.get_total_flops() == 2 * 5 * 6 * 4


@counts_ours
@pytest.mark.parametrize("wanted", [True, False])
def test_flops_are_those_of_the_products(wanted: bool) -> None:
    counts = []
    module = gemmnorm.LinearScaleBatchNorm1d(6, 4)
    for f in (module, lambda x: plain(module, x)):
        x = torch.randn(5, 6, requires_grad=wanted)
        with FlopCounterMode(display=False) as counter:
            f(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == (3 if wanted else 2) * 2 * 5 * 6 * 4


def test_torch_fx_sees_the_modules_of_a_fused_model() -> None:
    model = stir(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())).eval()
    traced = torch.fx.symbolic_trace(gemmnorm.fuse(twin(model)))
    assert [n.op for n in traced.graph.nodes] == ["placeholder", *["call_module"] * 3, "output"]
    x = torch.randn(5, 6)
    torch.testing.assert_close(traced(x), model(x))


def test_a_trace_warns_of_no_cached_function() -> None:
    model = gemmnorm.fuse(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.3)).eval())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache")
        torch.export.export(model, (torch.randn(5, 6),), strict=True)
