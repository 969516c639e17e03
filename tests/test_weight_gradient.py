"""The weight's gradient by an own product (weight_gradient.cuh), run by the emulator, and on a GPU, against float64."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from emulator import COMPILER, emulated
from gpu_support import poisoned_memory
from test_emulated import SMALL_HOPPER

from gemmnorm import linear_scale_batch_norm, plan
from gemmnorm.plan import Problem, gradient

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def check(batch: int, in_features: int, features: int, dtype: torch.dtype, autocast: bool, device: str) -> None:
    """dW against float64 on the same rounded operands: not worse than a rounding of its own dtype, and of ∂L/∂a."""
    torch.manual_seed(batch)
    x, weight = (torch.randn(n, in_features, device=device) for n in (batch, features))
    grad = torch.randn(batch, features, device=device).to(dtype)
    if not autocast:
        x, weight = x.to(dtype), weight.to(dtype)
    wide = weight.to(dtype).double().requires_grad_()
    linear_scale_batch_norm(x.to(dtype).double(), wide, None, None, None, None, training=True, strategy="reference").backward(
        grad.double()
    )
    weight.requires_grad_()
    with torch.autocast(device, dtype) if autocast else contextlib.nullcontext():
        y = linear_scale_batch_norm(x, weight, None, None, None, None, training=True, strategy="one_kernel")
    y.backward(grad.to(y.dtype))
    assert weight.grad is not None and wide.grad is not None
    assert weight.grad.dtype == (torch.float32 if autocast else dtype)
    error = (weight.grad.double() - wide.grad).norm(dim=1) / wide.grad.norm(dim=1)
    assert float(error.max()) < 2 * torch.finfo(dtype).eps


def launch(batch: int, in_features: int, features: int, dtype: str, of_weight: str) -> plan.Launch | None:
    problem = Problem(batch, in_features, features, dtype, dtype, save=True, grad_dtypes=(of_weight, of_weight))
    return gradient.weight_gradient(replace(problem, chip=SMALL_HOPPER))


@needs_compiler
@pytest.mark.parametrize(
    ("batch", "in_features", "features", "dtype", "autocast"),
    [
        (70, 520, 264, torch.bfloat16, False),
        (130, 264, 392, torch.bfloat16, True),  # tiles that are not filled, in both directions and along K
        (256, 1032, 256, torch.float16, True),
    ],
)
def test_by_the_emulator(batch: int, in_features: int, features: int, dtype: torch.dtype, autocast: bool) -> None:
    name = str(dtype).removeprefix("torch.")
    assert launch(batch, in_features, features, name, "float32" if autocast else name) is not None
    with emulated(SMALL_HOPPER), poisoned_memory():
        check(batch, in_features, features, dtype, autocast, "cpu")


def test_where_it_serves() -> None:
    assert launch(1024, 512, 512, "bfloat16", "float32") is not None
    assert launch(1024, 512, 512, "bfloat16", "float64") is None  # no type of a kernel's output
    assert launch(1024, 512, 512, "float32", "float32") is None
    assert launch(1024, 508, 512, "bfloat16", "bfloat16") is None  # rows of x that the copy engine does not take
    assert launch(8192, 512, 512, "bfloat16", "bfloat16") is None  # the library's is as good
    assert launch(1024, 256, 256, "bfloat16", "bfloat16") is None  # few tiles: the library splits the sums


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("batch", "in_features", "features"),
    [(33, 8200, 8200), (1000, 4104, 8200), (2048, 2048, 8192), (1024, 8192, 8192)],
)
def test_on_a_gpu(batch: int, in_features: int, features: int, dtype: torch.dtype, autocast: bool) -> None:
    with poisoned_memory():
        check(batch, in_features, features, dtype, autocast, "cuda")
