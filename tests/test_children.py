"""Whatever is done to the children of a fused model or of the module counts: they are then called one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fuse_support import FEATURES, Founding, MyLinear
from support import stir, twin
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import gemmnorm
from gemmnorm import LinearScaleBatchNorm1d


class Adapter(nn.Module):
    """A low-rank adapter as PEFT wraps a Linear, with its attributes."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Parameter(torch.ones(2, base_layer.in_features))
        self.up = nn.Parameter(torch.ones(base_layer.out_features, 2))

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.down.T @ self.up.T


class Doubled(Tensor):
    """A tensor subclass that computes something else, as quantised weights do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(Tensor) * 2 if func is torch.nn.functional.linear else result


def changes() -> Iterator[tuple[str, Callable[[Any], Any], bool]]:
    """(what happens to the children, the change, does the operator still run)."""

    def call(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda m: (f(m), m)[1]

    new = nn.Linear(FEATURES, FEATURES)
    yield "double", lambda m: m.double(), True
    yield "load_state_dict", call(lambda m: m.load_state_dict(stir(Founding(), 3).state_dict())), True
    yield "frozen statistics", call(lambda m: m.bn.eval()), True
    yield "no momentum", call(lambda m: setattr(m.bn, "momentum", None)), True
    yield "a momentum below 0", call(lambda m: setattr(m.bn, "momentum", -0.1)), False
    yield "one bias for all", call(lambda m: setattr(m.gemm, "bias", nn.Parameter(torch.ones(1)))), False
    yield "untracked", call(lambda m: setattr(m.bn, "track_running_stats", False)), True
    yield "new linear", call(lambda m: setattr(m, "gemm", copy.deepcopy(new))), True
    yield "new scale", call(lambda m: setattr(m, "scale", nn.Parameter(torch.ones(1)))), True
    yield "no scale of the norm's", call(lambda m: m.bn.register_parameter("weight", None)), True
    yield "pruned", call(lambda m: prune.l1_unstructured(m.gemm, "weight", 0.5)), False
    yield "parametrized", call(lambda m: parametrizations.weight_norm(m.gemm)), False
    yield "spectral norm", call(lambda m: nn.utils.spectral_norm(m.gemm)), False
    yield "linear hook", call(lambda m: m.gemm.register_forward_hook(lambda mod, args, y: y + 1)), False
    yield "norm pre-hook", call(lambda m: m.bn.register_forward_pre_hook(lambda mod, args: (args[0] * 2,))), False
    yield "backward hook", call(lambda m: m.bn.register_full_backward_hook(lambda mod, g, _: (g[0] * 2,))), False
    yield "subclass", call(lambda m: setattr(m, "gemm", MyLinear(6, 6).requires_grad_(False))), False
    yield "adapter", call(lambda m: setattr(m, "gemm", Adapter(m.gemm))), False
    yield "forward of its own", call(lambda m: setattr(m.gemm, "forward", lambda x: x * 3)), False
    yield "tensor subclass", call(lambda m: setattr(m.gemm, "weight", nn.Parameter(m.gemm.weight.as_subclass(Doubled)))), False  # fmt: skip # noqa: E501
    yield "odd scale", call(lambda m: setattr(m, "scale", nn.Parameter(torch.ones(5, 6)))), False
    yield "half-precision linear", call(lambda m: m.gemm.bfloat16()), True


CHANGES = {name: (change, runs) for name, change, runs in changes()}


def module() -> LinearScaleBatchNorm1d:
    return LinearScaleBatchNorm1d(FEATURES, FEATURES)


@pytest.mark.parametrize("make", [lambda: gemmnorm.fuse(Founding()), module], ids=["fused model", "module"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_honoured(name: str, make: Callable[[], Any], calls: list[Any]) -> None:
    """Two steps of training (a pruned weight belongs to the graph of one) and one of evaluation."""
    change, runs = CHANGES[name]
    original = stir(Founding())
    ours = make()
    ours.load_state_dict(original.state_dict())
    results: list[list[Any]] = [[], []]
    for found, m in zip(results, (ours, original), strict=True):
        torch.manual_seed(2)
        m = change(m)
        for training in (True, True, False):
            m.train(training).zero_grad()
            if name == "frozen statistics":
                m.bn.eval()
            x = torch.linspace(-1, 2, 30, dtype=next(m.gemm.parameters()).dtype).view(5, 6).requires_grad_()
            y = m(x)
            y.square().sum().backward()
            found += [y, x.grad, *(p.grad for p in m.parameters()), *m.state_dict().values()]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert len(calls) == (3 if runs else 0)


def test_a_converted_norm_synchronises_with_its_own_group() -> None:
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(module())
    x, seen = torch.randn(5, FEATURES), []
    converted.bn.register_forward_hook(lambda *_: seen.append(1))
    converted(x)
    assert type(converted.bn) is nn.SyncBatchNorm and seen == [1]


@pytest.mark.skipif(not hasattr(torch.ao, "quantization"), reason="moved to torchao")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantisation() -> None:
    ours, original = module().eval(), Founding().eval()
    original.load_state_dict(ours.state_dict())
    x = torch.randn(5, FEATURES)
    quantise = torch.ao.quantization.quantize_dynamic
    torch.testing.assert_close(quantise(ours, {nn.Linear})(x), quantise(original, {nn.Linear})(x))


def test_the_count_says_how_calls_went_and_why_not() -> None:
    model = gemmnorm.fuse(nn.Sequential(Founding(), module()))
    x = torch.randn(5, FEATURES)
    for _ in range(2):
        model(x)
    hook = model[0].gemm.register_forward_hook(lambda *_: None)
    model(x)
    hook.remove()
    with gemmnorm.set_fusion(False):
        model(x)
    first, second = (m.calls for m in gemmnorm.fuse_report(model, calls=True).matches)
    assert first.fused == 2 and second.fused == 3
    assert first.unfused == {"the Linear has hooks or a forward of its own": 1, "switched off": 1}
    assert second.unfused == {"switched off": 1} and first.compiled == second.compiled == ""
    assert "calls: 2 fused, 1 unfused (the Linear has hooks" in str(gemmnorm.fuse_report(model, calls=True))
    assert "calls" not in str(gemmnorm.fuse_report(model))
    copied = gemmnorm.fuse_report(twin(model), calls=True).matches
    assert [m.calls.fused for m in copied] == [0, 0]  # a copy counts for itself


def test_fusion_is_switched_off_for_all_or_inside_a_block(calls: list[Any]) -> None:
    model, x = gemmnorm.fuse(Founding()), torch.randn(5, FEATURES)
    with gemmnorm.set_fusion(False):
        model(x)
        module()(x)
        with gemmnorm.set_fusion(True):
            model(x)
        assert len(calls) == 1
    model(x)
    gemmnorm.set_fusion(False)
    model(x)
    gemmnorm.set_fusion(True)
    assert len(calls) == 2
