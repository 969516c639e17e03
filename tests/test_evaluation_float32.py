"""Evaluation in float32, run by the emulator: slope and shift do not cost what the product has gained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import ways
from emulator import COMPILER, emulated
from gpu_support import error, poisoned_memory, precision
from support import Chain, stir, twin
from test_emulated import SMALL_HOPPER, run
from torch import Tensor

from gemmnorm.plan.candidates import Candidate

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")
BATCH, INNER, FEATURES = 100, 256, 72
WAYS = {"fused_gemm": ways.fused_gemm, "small_panel": ways.small_panel}


def far_bias(module: Chain) -> None:
    module.gemm.bias.mul_(300)


def small_scale(module: Chain) -> None:
    module.scale.mul_(1e-5)


def shift_that_cancels(module: Chain) -> None:
    """β is what the running mean takes away."""
    module.scale.mul_(1e-3)
    module.bn.running_mean.add_(10)
    module.bn.bias.copy_(module.bn.weight * module.bn.running_mean / (module.bn.running_var + module.bn.eps).sqrt())


FAMILIES: dict[str, Callable[[Chain], None]] = {f.__name__: f for f in (far_bias, small_scale, shift_that_cancels)}


def outputs(module: Chain, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of gemmnorm, of PyTorch, and of PyTorch in float64."""
    with torch.no_grad(), precision("fp32"):
        exact, eager = twin(module).double()(x.double()), twin(module)(x)
        with emulated(SMALL_HOPPER), poisoned_memory():
            return run(twin(module), x, "one_kernel"), eager, exact


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, forced: Callable[[Callable[[Candidate], bool]], None]) -> str:
    forced(WAYS[request.param])
    return str(request.param)


def chain(seed: int = 1) -> Chain:
    return stir(Chain(INNER, FEATURES, scale_shape=(FEATURES,)), seed).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_more_error_than_pytorchs(way: str, family: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        module = chain(seed)
        with torch.no_grad():
            FAMILIES[family](module)
            x = torch.randn(BATCH, INNER)
            if family == "far_bias":  # what a batch of such rows has, or y is all mean
                h = module.scale * module.gemm(x)
                module.bn.running_mean.copy_(h.mean(0))
                module.bn.running_var.copy_(h.var(0))
        ours, eager, exact = outputs(module, x)
        assert error(ours, exact) <= 1.02 * error(eager, exact), seed


def test_what_is_not_finite_is_so_where_pytorchs_is(way: str) -> None:
    module, x = chain(), torch.randn(BATCH, INNER)
    with torch.no_grad():
        module.scale[0] = 0
        for tensor in (module.bn.running_var, module.bn.running_mean, module.bn.bias, module.gemm.bias, module.scale):
            tensor[5] = tensor[13] = tensor[20] = 1  # ordinary, where these are set below
        module.bn.running_var[5] = float("inf")
        module.bn.running_var[13] = -1
        module.bn.running_mean[20] = float("inf")
        module.gemm.bias[30] = -float("inf")
        module.bn.bias[40] = float("nan")
        x[7] = float("inf")
        x[8, 3] = float("nan")
    ours, eager, _ = outputs(module, x)
    finite = eager.isfinite()
    torch.testing.assert_close(ours[finite], eager[finite], rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.isnan(), eager.isnan())
    assert torch.equal(ours[~finite].nan_to_num(), eager[~finite].nan_to_num())
