"""`prepare`: weights split ahead of evaluation in float32, never stale (run by the emulator)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from emulator import COMPILER, emulated
from gpu_support import poisoned_memory, precision
from test_emulated import SMALL_HOPPER
from torch import Tensor, nn

import gemmnorm
from gemmnorm import errors, plan
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import driver, prepared

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")


@pytest.fixture(autouse=True)
def _default_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(driver, "synchronize", lambda device: None)
    with precision("fp32"), gemmnorm.set_strategy("one_kernel"):
        yield


class Head(nn.Module):
    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.fc = nn.Linear(in_features, 264, bias=False)
        self.bn = nn.BatchNorm1d(264)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.fc(x)))


def made(in_features: int = 96) -> tuple[Head, Tensor]:
    torch.manual_seed(3)
    model, x = Head(in_features).eval(), torch.randn(300, in_features)
    model.bn.running_var.uniform_(0.5, 2.0)
    return gemmnorm.fuse(model), x


def evaluated(model: nn.Module, x: Tensor) -> tuple[Tensor, bool]:
    """y, and whether the call found its weight prepared."""
    with poisoned_memory(), runtime.recording() as plans, torch.no_grad():
        y = model(x)
    assert plans[0].strategy == "one_kernel"
    return y, plans[0].problem.prepared


@pytest.mark.parametrize("in_features", [96, 97])
def test_the_same_bits_without_splitting_the_weight(in_features: int) -> None:
    model, x = made(in_features)
    with emulated(SMALL_HOPPER):
        plain, before = evaluated(model, x)
        assert gemmnorm.prepare(model) is model
        ahead, after = evaluated(model, x)
        again, _ = evaluated(model, x)
        assert (before, after) == (False, True)
        assert torch.equal(plain, ahead) and torch.equal(plain, again)
        gemmnorm.unprepare(model)
        assert not evaluated(model, x)[1]


def test_the_module_of_its_own() -> None:
    module = gemmnorm.LinearScaleBatchNorm1d(40, 72, activation="relu").eval()
    with emulated(SMALL_HOPPER):
        gemmnorm.prepare(module)
        assert evaluated(module, torch.randn(200, 40))[1]
        assert not evaluated(module, torch.randn(5, 40))[1]  # so few rows are split on the way


@pytest.mark.parametrize("change", ["nothing", "optimizer", "load_state_dict", "behind PyTorch's back"])
def test_a_convolution_over_single_positions(change: str) -> None:
    torch.manual_seed(3)
    conv = nn.Conv2d(96, 264, 1, bias=False)
    model = gemmnorm.fuse(nn.Sequential(conv, nn.BatchNorm2d(264)).eval())
    x = torch.randn(3, 96, 10, 10).contiguous(memory_format=torch.channels_last)
    with emulated(SMALL_HOPPER):
        plain, before = evaluated(model, x)
        gemmnorm.prepare(model)
        ahead, after = evaluated(model, x)
        gemmnorm.prepare(nn.Linear(40, 72))  # looks at what is known
        assert (before, after) == (False, True) and evaluated(model, x)[1] and torch.equal(plain, ahead)
        conv.weight.grad = torch.ones_like(conv.weight)
        {
            "nothing": lambda: gemmnorm.unprepare(model),
            "optimizer": lambda: torch.optim.SGD([conv.weight], lr=1.0).step(),
            "load_state_dict": lambda: conv.load_state_dict({"weight": torch.randn(264, 96, 1, 1)}),
            "behind PyTorch's back": lambda: conv.weight.data.mul_(1.5),
        }[change]()
        new, found = evaluated(model, x)
    assert found == ("back" in change)
    torch.testing.assert_close(new, gemmnorm.unfuse(model)(x), rtol=1e-5, atol=1e-5)


def test_a_weight_that_the_planner_would_not_split_is_not_kept() -> None:
    few, many = nn.Linear(96, 256).weight, nn.Linear(512, 512).weight
    with emulated(plan.chip_for(90)), gemmnorm.set_strategy(None):
        assert not runtime.prepare_weight(few)  # no batch makes it worth while
        assert runtime.prepare_weight(many)
        with gemmnorm.set_strategy("one_kernel"):
            assert runtime.prepare_weight(few)


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "optimizer": lambda fc: torch.optim.SGD([fc.weight], lr=1.0).step(),
    "in place": lambda fc: fc.weight.detach().mul_(1.5),
    "load_state_dict": lambda fc: fc.load_state_dict({"weight": torch.randn(264, 96)}),
    "another memory": lambda fc: setattr(fc.weight, "data", fc.weight.data * 1.5),
    "another parameter": lambda fc: setattr(fc, "weight", nn.Parameter(torch.randn(264, 96))),
    "behind PyTorch's back": lambda fc: fc.weight.data.mul_(1.5),
    "one element, behind PyTorch's back": lambda fc: fc.weight.data[200, 95].add_(1e3),
    "halved, behind PyTorch's back": lambda fc: fc.weight.data.mul_(0.5),
    "negated, behind PyTorch's back": lambda fc: fc.weight.data.neg_(),
    "two signs, behind PyTorch's back": lambda fc: fc.weight.data[3, :2].neg_(),
    "two elements exchanged": lambda fc: fc.weight.data[7].copy_(fc.weight.data[7].flip(0)),
    "to NaN": lambda fc: fc.weight.data[9, 3].fill_(float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_never_stale(change: str) -> None:
    model, x = made()
    with emulated(SMALL_HOPPER):
        gemmnorm.prepare(model)
        old, _ = evaluated(model, x)
        model.fc.weight.grad = torch.ones_like(model.fc.weight)
        CHANGES[change](model.fc)
        new, ahead = evaluated(model, x)
    behind = "back" in change or "exchanged" in change or "NaN" in change
    assert ahead == behind  # then the kernel finds out
    want = copy.deepcopy(gemmnorm.unfuse(model)).double()(x.double())
    assert not torch.equal(old, new)
    assert torch.equal(new.isnan(), want.isnan())
    torch.testing.assert_close(new.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_not_in_training_not_under_autocast_not_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    with emulated(SMALL_HOPPER):
        gemmnorm.prepare(model)
        with torch.autocast("cpu", torch.bfloat16):
            assert not evaluated(model, x)[1]
        monkeypatch.setattr(driver, "capturing", lambda: True)
        assert prepared.find(model.fc.weight) is None
        monkeypatch.setattr(driver, "capturing", lambda: False)
        assert prepared.find(model.fc.weight) is not None
        assert not evaluated(model.train(), x)[1]


def test_what_is_left_alone() -> None:
    with emulated(SMALL_HOPPER):
        for weight in (torch.randn(8, 8).bfloat16(), torch.randn(8, 8).t()[:, :7]):
            assert not runtime.prepare_weight(weight)
        with torch.inference_mode():
            assert not runtime.prepare_weight(torch.randn(8, 8))
        with precision("tf32"):
            assert not runtime.prepare_weight(torch.randn(8, 8))
    assert not runtime.prepare_weight(torch.randn(8, 8))  # no kernels here
    with pytest.raises(errors.GemmNormTypeError, match=r"expected an nn\.Module"):
        gemmnorm.prepare(torch.randn(8, 8))  # type: ignore[type-var]


def test_it_dies_with_its_weight() -> None:
    with emulated(SMALL_HOPPER):
        module = gemmnorm.LinearScaleBatchNorm1d(40, 72).eval()
        gemmnorm.prepare(module)
        held = len(prepared._known)
        del module
    assert len(prepared._known) == held - 1


def test_another_shape_of_the_same_memory_is_another_weight() -> None:
    with emulated(SMALL_HOPPER):
        module = gemmnorm.LinearScaleBatchNorm1d(40, 72).eval()
        gemmnorm.prepare(module)
        assert prepared.find(module.gemm.weight) is not None
        module.gemm.weight.data = module.gemm.weight.data.view(144, 20)
        assert prepared.find(module.gemm.weight) is None


def test_kernels_that_do_not_load_leave_the_weight_to_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    with emulated(SMALL_HOPPER):
        plain, _ = evaluated(model, x)
        gemmnorm.prepare(model)

        def broken(chosen: object, packed: bool = False) -> None:
            raise RuntimeError("no such kernel")

        with monkeypatch.context() as patched:
            patched.setattr(runtime.binding, "bind", broken)
            with pytest.warns(errors.GemmNormWarning, match="prepared weights are not used: no such kernel"):
                y, ahead = evaluated(model, x)
    assert not ahead and torch.equal(y, plain)
