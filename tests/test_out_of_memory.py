"""No memory on the GPU for a kernel that is to be loaded: nothing about it is remembered (run by the emulator)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulator import COMPILER, Launcher, emulated
from gpu_support import precision
from test_emulated import SMALL_HOPPER

import gemmnorm
from gemmnorm.errors import GemmNormWarning
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import driver, ranks
from gemmnorm.runtime.operands import Operands, Options

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")
Lacking = Callable[[int], None]


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lacking]:
    """`lacking(n)`: the next n kernels are not loaded. No call may warn, but of what it raises."""
    left = 0

    def load(*arguments: Any) -> Launcher:
        nonlocal left
        if left:
            left -= 1
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: not enough memory")
        return Launcher(*arguments)

    def lack(count: int) -> None:
        nonlocal left
        left = count

    with emulated(SMALL_HOPPER), warnings.catch_warnings():
        warnings.simplefilter("error", GemmNormWarning)
        monkeypatch.setattr(driver, "Launcher", load)
        yield lack


@pytest.mark.parametrize("strategy", ["one_kernel", "cublas_folded_bn"])
@pytest.mark.parametrize("grads", [True, False])
def test_the_next_call_tries_again(strategy: str, grads: bool, lacking: Lacking) -> None:
    module, x = gemmnorm.LinearScaleBatchNorm1d(32, 40), torch.randn(70, 32)
    with gemmnorm.set_strategy(strategy), torch.set_grad_enabled(grads):
        for _ in range(2):
            lacking(1000)
            with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
                module(x)
        lacking(0)
        with runtime.recording() as plans:
            y = module(x)
    assert plans[0].strategy == strategy and module.bn.num_batches_tracked == 1
    assert y.requires_grad == grads


def test_what_pytorch_keeps_and_does_not_use_is_given_back(lacking: Lacking, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(None))
    module, x = gemmnorm.LinearScaleBatchNorm1d(32, 40), torch.randn(70, 32)
    with gemmnorm.set_strategy("one_kernel"), runtime.recording() as plans:
        lacking(1)
        module(x)
        assert len(given) == 1
        monkeypatch.setattr(driver, "capturing", lambda: True)  # a graph: nothing may be freed
        lacking(1)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            module(x[:60])
    assert [made.strategy for made in plans] == ["one_kernel"] and len(given) == 1


def test_a_prepared_weight_is_used_once_there_is_memory(lacking: Lacking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "synchronize", lambda device: None)
    module, x = gemmnorm.LinearScaleBatchNorm1d(96, 264).eval(), torch.randn(300, 96)
    with precision("fp32"), gemmnorm.set_strategy("one_kernel"), torch.no_grad(), runtime.recording() as plans:
        module(x)
        gemmnorm.prepare(module)
        for count in (1000, 0):
            lacking(count)
            module(x)
    assert [made.problem.prepared for made in plans] == [False, False, True]


def test_statistics_over_ranks(lacking: Lacking) -> None:
    operands = Operands(torch.randn(70, 32), torch.randn(40, 32), num_batches_tracked=torch.tensor(0))
    options = Options(strategy="cublas_folded_bn")
    lacking(1000)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        ranks.strategy_of(operands, options)
    lacking(0)
    assert ranks.strategy_of(operands, options) == "cublas_folded_bn"
