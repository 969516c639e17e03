"""Memory of a training step: bytes alive in eager and in a fused model, without a GPU; what a backward lets go of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from emulator import COMPILER, emulated
from gpu_support import poisoned_memory, precision
from support import Chain, arguments, stir
from test_emulated import SMALL_HOPPER
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import gemmnorm
from gemmnorm import linear_scale_batch_norm, plan
from gemmnorm.op import autograd
from gemmnorm.runtime import binding, driver

BATCH = 2048


class Alive(TorchDispatchMode):
    """Bytes of the tensors that are `made`, or that operators give inside: the most that were there at once."""

    def __init__(self, *before: Tensor) -> None:
        """`before`: what was there, and is not counted."""
        super().__init__()
        self.most, self._made = 0, {}
        self._before = {t.untyped_storage()._cdata for t in before}

    def made(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in self._before:
            self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: (ref, size) for key, (ref, size) in self._made.items() if not ref.expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return t

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for t in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(t, Tensor):
                self.made(t)
        return found


class NoLaunch:
    """Takes the place of `driver.Launcher`."""

    def __init__(self, *_: Any) -> None:
        pass

    @staticmethod
    def pack(*values: Any) -> Any:
        return values

    def __call__(self, stream: int, values: Any) -> None:
        pass


def projector(widths: Sequence[int], device: str, dtype: torch.dtype) -> nn.Sequential:
    """Linear → BatchNorm → ReLU, its memory not touched."""
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    layers: list[nn.Module] = []
    for inner, features in pairwise(widths):
        linear = nn.utils.skip_init(nn.Linear, inner, features, bias=False, **options)
        layers += [linear, nn.BatchNorm1d(features, **options), nn.ReLU()]
    return nn.Sequential(*layers)


def eagers_peak(widths: Sequence[int], dtype: torch.dtype) -> int:
    """Of a step, bytes. Tensors that have no memory are counted as if they had."""
    x, grad = (torch.empty(BATCH, n, device="meta", dtype=dtype) for n in (widths[0], widths[-1]))
    model = projector(widths, "meta", dtype)
    with Alive(x, grad, *model.state_dict().values()) as alive:
        model(x).backward(grad)
    return alive.most


def fused_peak(monkeypatch: pytest.MonkeyPatch, widths: Sequence[int], dtype: torch.dtype) -> int:
    """Likewise of the fused model, by an H200's plans."""
    x, grad = (torch.empty(BATCH, n, dtype=dtype) for n in (widths[0], widths[-1]))
    alive, model = Alive(), gemmnorm.fuse(projector(widths, "cpu", dtype))
    with emulated(plan.chip_for(90)), gemmnorm.set_strategy("one_kernel"), precision("fp32"):
        monkeypatch.setattr(driver, "Launcher", NoLaunch)
        monkeypatch.setattr(binding, "_multiply", lambda *_: None)
        empty = driver.empty
        monkeypatch.setattr(driver, "empty", lambda *kind: alive.made(empty(*kind)))
        model(x).backward(grad)
    assert all(p.grad is not None for p in model.parameters())
    return alive.most


@pytest.mark.skipif(autograd._clear is None, reason="this PyTorch cannot let go")
@pytest.mark.parametrize(
    ("widths", "dtype", "times"),
    [
        ((2048, 8192, 8192, 8192), torch.float32, 1.16),
        ((2048, 8192, 8192, 8192), torch.bfloat16, 1.09),
        ((2048, 8192), torch.float32, 0.83),
    ],
    ids=["float32", "bfloat16", "without dx"],
)
def test_a_step_peaks_little_above_eagers(
    widths: tuple[int, ...], dtype: torch.dtype, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 with the split weight, where eager has a weight's gradient, and three matrices of the size of y.

    The gradient of the model's x is not wanted, and what would be made for it alone is not there.
    """
    assert fused_peak(monkeypatch, widths, dtype) <= times * eagers_peak(widths, dtype)


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_graph_that_is_retained_gives_the_same_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with precision(name) as dtype, emulated(SMALL_HOPPER), poisoned_memory():
        module = stir(Chain(136, 72, activation="relu")).to(dtype)
        x, grad = torch.randn(200, 136, dtype=dtype, requires_grad=True), torch.randn(200, 72, dtype=dtype)
        positional, keywords = arguments(module, strategy="one_kernel")
        y = linear_scale_batch_norm(x, *positional, **keywords)
        wanted = [x, *module.parameters()]
        first = torch.autograd.grad(y, wanted, grad, retain_graph=True)
        monkeypatch.setattr(autograd, "_clear", None)  # as on a PyTorch that has no such method
        again = torch.autograd.grad(y, wanted, grad, retain_graph=True)
        monkeypatch.undo()
        last = torch.autograd.grad(y, wanted, grad)
        for found in (again, last):
            assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y, wanted, grad)
