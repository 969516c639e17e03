"""A chain's call that is like an earlier one takes what was cached for that: when it does, and when it must not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulator import COMPILER, emulated
from support import assert_same, step, stir, twin
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import gemmnorm
from gemmnorm import chain, plan
from gemmnorm.op import route, sync
from gemmnorm.runtime import binding
from gemmnorm.runtime import call as runtime

BATCH, INNER, FEATURES = 6, 4, 8


class Turned(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return -super().forward(input)


class Primed:
    """A module that has been called: `is_cached(run)` says whether all calls in `run` took what was prepared then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, training: bool = True, **options: Any) -> None:
        gemmnorm.set_strategy("reference")  # for this test (conftest): where none is asked for, the CPU keeps the chain
        self.taken, self.made = 0, 0
        monkeypatch.setattr(chain, "cached_call", self._cached_call)
        self.module = gemmnorm.LinearScaleBatchNorm1d(INNER, FEATURES, **options).train(training)
        self.x = torch.randn(BATCH, INNER)

    def _cached_call(self, operands: Any, options: Any, group: Any) -> route.CachedCall:
        def run(operands: Any) -> Tensor:
            self.taken += 1
            return operands.x.new_zeros(len(operands.x), FEATURES)

        self.made += 1
        plain = route.CachedCall(runtime.Likeness(operands), route._autocast_dtype(operands.x), "native", run)
        return plain._replace(arithmetic=route.arithmetic(operands.x.dtype))

    def __call__(self) -> Tensor:
        y: Tensor = self.module(self.x)
        return y

    def is_cached(self, run: Callable[[], Any]) -> bool:
        taken, made = self.taken, self.made
        run()
        return self.taken > taken and self.made == made


def test_a_call_like_an_earlier_one_is_cached(monkeypatch):
    primed = Primed(monkeypatch)
    assert not primed.is_cached(primed)
    assert primed.is_cached(primed)
    primed.x = torch.randn(BATCH, INNER)  # other numbers
    assert primed.is_cached(primed)
    primed.module.gemm.weight = nn.Parameter(torch.randn(FEATURES, INNER))  # another parameter of the same kind
    assert primed.is_cached(primed)
    for other in (lambda: primed.module.eval(), lambda: primed.module.train()):
        other()
        primed()
        assert primed.is_cached(primed)
    with torch.no_grad():
        assert not primed.is_cached(primed)
        assert primed.is_cached(primed)
    assert primed.is_cached(primed)  # as before it
    assert primed.module._call.fused == primed.taken  # every call counts


def test_a_class_that_computes_what_a_linear_does_is_cached(monkeypatch):
    class Derived(nn.Linear):
        """Adds nothing that runs."""

    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(FEATURES, INNER)), nn.Parameter(torch.randn(FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    for linear in (Derived(INNER, FEATURES), Alike()):
        primed = Primed(monkeypatch)
        model = gemmnorm.fuse(nn.Sequential(linear, nn.BatchNorm1d(FEATURES)))
        assert not primed.is_cached(lambda model=model, x=primed.x: model(x))
        assert primed.is_cached(lambda model=model, x=primed.x: model(x))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "rows": lambda p: setattr(p, "x", torch.randn(BATCH + 1, INNER)),
    "strides": lambda p: setattr(p, "x", torch.randn(INNER, BATCH).t()),
    "x requires a gradient": lambda p: p.x.requires_grad_(),
    "no bias": lambda p: setattr(p.module.gemm, "bias", None),
    "frozen": lambda p: p.module.requires_grad_(False),
    "frozen in part": lambda p: p.module.bn.weight.requires_grad_(False),
    "evaluation": lambda p: p.module.eval(),
    "the BatchNorm alone": lambda p: p.module.bn.eval(),
    "eps": lambda p: setattr(p.module.bn, "eps", 0.5),
    "momentum": lambda p: setattr(p.module.bn, "momentum", None),
    "running statistics": lambda p: setattr(p.module.bn, "track_running_stats", False),
    "none of them": lambda p: (setattr(p.module.bn, "running_mean", None), setattr(p.module.bn, "running_var", None)),
    "activation": lambda p: setattr(p.module, "activation", "relu"),
    "the product kept": lambda p: setattr(p.module, "keep_product", False),
    "a hook of the Linear": lambda p: p.module.gemm.register_forward_hook(lambda *_: None),
    "a hook before the BatchNorm": lambda p: p.module.bn.register_forward_pre_hook(lambda *_: None),
    "a forward of its own": lambda p: setattr(p.module.gemm, "forward", p.module.gemm.forward),
    "a class derived later": lambda p: setattr(p.module.gemm, "__class__", Turned),
    "a strategy": lambda p: gemmnorm.set_strategy("cublas_bn"),
    "whether products are kept": lambda p: gemmnorm.set_keep_product(True),
    "everything forgotten": lambda p: runtime.forget(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_looked_at_anew(name, monkeypatch):
    primed = Primed(monkeypatch)
    primed()
    assert primed.is_cached(primed)
    CHANGES[name](primed)
    with contextlib.suppress(ValueError, RuntimeError, AttributeError):  # what cannot run says so
        assert not primed.is_cached(primed)
    assert primed.made + primed.taken


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _traced(primed: Primed) -> None:
    torch.jit.trace(primed.module, (primed.x,), check_trace=False)


def _with(*contexts: Callable[[], Any]) -> Callable[[Primed], None]:
    def run(primed: Primed) -> None:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            primed()

    return run


def _fake(primed: Primed) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        primed.module(mode.from_tensor(primed.x))


AROUND: dict[str, Callable[[Primed], Any]] = {
    "vmap": lambda p: torch.vmap(p.module)(p.x.expand(3, *p.x.shape)),
    "vmap over something else": lambda p: torch.vmap(lambda t: p.module(p.x) * t)(torch.randn(3)),
    "gradient": lambda p: torch.func.grad(lambda x: p.module(x).sum())(p.x),
    "jvp": lambda p: torch.func.jvp(p.module, (p.x,), (p.x,)),
    "functionalize": lambda p: torch.func.functionalize(p.module)(p.x),
    "forward mode": _with(forward_ad.dual_level),
    "torch.jit.trace": _traced,
    "make_fx": lambda p: make_fx(p.module)(p.x),
    "fake tensors": _fake,
    "a mode": _with(_Mode),
    "a profiler": _with(lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])),
    "autocast": _with(lambda: torch.autocast("cpu", torch.bfloat16)),
    "no_grad": _with(torch.no_grad),
    "inference": _with(torch.inference_mode),
    "switched off": _with(lambda: gemmnorm.set_fusion(False)),
    "float32 arithmetic": _with(lambda: gemmnorm.set_float32_arithmetic("ieee")),
    "plans recorded": _with(runtime.recording),
}


@pytest.mark.parametrize("name", AROUND)
def test_who_looks_on_or_asks_for_something_else_is_heard(name, monkeypatch):
    primed = Primed(monkeypatch, training=False)
    primed()
    assert primed.is_cached(primed)
    assert not primed.is_cached(lambda: AROUND[name](primed))
    primed()
    assert primed.is_cached(primed)  # again as before


def test_autocast_to_another_dtype(monkeypatch):
    primed = Primed(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        primed()
        assert primed.is_cached(primed)
    assert not primed.is_cached(primed)
    with torch.autocast("cpu", torch.float16):
        assert not primed.is_cached(primed)


@pytest.mark.parametrize("variable", ["GEMMNORM_STRATEGY", "GEMMNORM_KEEP_PRODUCT", "GEMMNORM_FLOAT32"])
def test_environment_variables(variable, monkeypatch):
    primed = Primed(monkeypatch)
    primed()
    monkeypatch.setenv(variable, {"GEMMNORM_KEEP_PRODUCT": "1", "GEMMNORM_FLOAT32": "ieee"}.get(variable, "one_kernel"))
    assert not primed.is_cached(primed)
    assert primed.is_cached(primed)
    monkeypatch.delenv(variable)
    assert not primed.is_cached(primed) or variable != "GEMMNORM_FLOAT32"  # two of the three are part of the state


def test_a_global_hook(monkeypatch):
    primed = Primed(monkeypatch)
    primed()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        known = primed.is_cached(primed)
    finally:
        handle.remove()
    assert not known or not hasattr(nn.modules.module, "_has_any_global_hook")  # PyTorch 2.4


def test_an_activation_child_is_asked_each_time(monkeypatch):
    primed = Primed(monkeypatch)
    model = nn.Sequential(nn.Linear(INNER, FEATURES), nn.BatchNorm1d(FEATURES), nn.LeakyReLU(0.2))
    primed.module = gemmnorm.fuse(model)
    primed()
    assert primed.is_cached(primed)
    model[2].negative_slope = 0.3
    assert not primed.is_cached(primed)
    model[2].register_forward_hook(lambda *_: None)
    assert not primed.is_cached(primed)


@pytest.mark.parametrize("given", [None, [1.0], 3])
def test_what_is_no_tensor_gets_the_error_of_the_modules(given, monkeypatch):
    primed = Primed(monkeypatch)
    primed()
    with pytest.raises(TypeError, match="linear"):
        primed.module(given)


def test_not_many_are_kept(monkeypatch):
    primed = Primed(monkeypatch)
    for rows in range(2, 60):
        primed.x = torch.randn(rows, INNER)
        primed()
        assert len(primed.module._call._known) <= chain._KEPT
    assert primed.is_cached(primed)


def test_ranks_are_asked_whether_they_agree_at_each_call(monkeypatch):
    """A rank whose call is cached and one whose call is not, as with another batch, must ask together."""
    asked = []
    monkeypatch.setattr(sync, "world_size", lambda group: 2)
    monkeypatch.setattr(sync, "check_agreement", lambda weight, group: asked.append(weight))
    monkeypatch.setattr(sync.Group, "gather", lambda self, row: row.expand(self.ranks, -1).contiguous())
    gemmnorm.set_strategy("reference")
    module = gemmnorm.LinearScaleBatchNorm1d(INNER, FEATURES, process_group=dist.GroupMember.NON_GROUP_MEMBER)
    for i in range(3):
        if i == 2:
            module.gemm.weight = nn.Parameter(torch.randn(FEATURES, INNER))
        module(torch.randn(BATCH, INNER))
        assert len(module._call._known) == 1 and len(asked) == i + 1 and asked[-1] is module.gemm.weight


def test_the_chain_of_pytorchs_operations_is_kept_on_the_cpu(monkeypatch):
    module = stir(gemmnorm.LinearScaleBatchNorm1d(INNER, FEATURES, activation="relu"))
    original = twin(module).to_modules()
    asked = []
    monkeypatch.setattr(chain, "call", lambda *_: asked.append(1))
    for training in (True, True, False, False):
        x, grad = torch.randn(BATCH, INNER), torch.randn(BATCH, FEATURES)
        for each in (module, original):
            each.train(training)
        assert_same(step(module, module, x, grad), step(original, original, x, grad), 0.0, 0.0)
    assert len(module._call._known) == 2 and not asked
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module.train()(torch.randn(1, INNER))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.randn(BATCH, INNER + 1))


def convolution(inner: int, features: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inner, features, 1, bias=False), nn.BatchNorm2d(features), nn.ReLU())


def points(inner: int, features: int) -> nn.Module:
    return nn.Sequential(nn.Conv1d(inner, features, 1), nn.BatchNorm1d(features))


class Rows(nn.Module):
    """A Linear over [N, L, I] whose BatchNorm takes [N · L, O]."""

    def __init__(self, inner: int, features: int) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(inner, features), nn.BatchNorm1d(features)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn(self.linear(x).flatten(0, 1))
        return y


class Turns(Rows):
    """Likewise, with its rows in the order of [L, N], as a matrix of the same shape."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn(self.linear(x).transpose(0, 1).flatten(0, 1))
        return y


class Back(Rows):
    """Likewise, and laid out as the product was."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.bn(y.view(-1, 8)).view_as(y)  # type: ignore[no-any-return]


LAID_OUT: dict[str, tuple[Any, Callable[[], Tensor]]] = {
    "channels last": (convolution, lambda: torch.randn(2, 16, 3, 4).to(memory_format=torch.channels_last)),
    "points": (points, lambda: torch.randn(3, 5, 16).transpose(1, 2)),
    "rows": (Rows, lambda: torch.randn(3, 5, 16)),
    "rows in another order": (Turns, lambda: torch.randn(3, 5, 16)),
    "rows and back": (Back, lambda: torch.randn(3, 5, 16)),
}


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("name", LAID_OUT)
def test_what_is_laid_out_as_rows_is_cached_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, draw = LAID_OUT[name]
    original = stir(make(16, 8))
    fused, asked = gemmnorm.fuse(twin(original)), []
    find = chain.cached_call
    monkeypatch.setattr(chain, "cached_call", lambda *given: asked.append(1) or find(*given))
    with emulated(plan.chip_for(90, 3)), gemmnorm.set_strategy("cublas_folded_bn"):
        for _ in range(3):
            x = draw()
            grad = torch.randn_like(twin(original)(x))
            assert_same(step(fused, fused, x, grad), step(original, original, x, grad), 1e-4, 1e-5)
        for _ in range(2):
            y, like = fused.eval()(x), original.eval()(x)
            torch.testing.assert_close(y, like, rtol=1e-4, atol=1e-5)
            assert y.stride() == like.stride()
    calls = gemmnorm.fuse_report(fused, calls=True).matches[0].calls
    assert calls is not None and calls.fused == 5 and not calls.unfused
    assert len(asked) == 2, "once in training, once in evaluation"


@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_a_convolution_that_is_not_fused_is_looked_at_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    original = stir(convolution(16, 8))
    fused, looked = gemmnorm.fuse(twin(original)), []
    look = chain._unfit
    monkeypatch.setattr(chain, "_unfit", lambda *given: looked.append(1) or look(*given))
    with emulated(plan.chip_for(90, 3)), gemmnorm.set_strategy("cublas_folded_bn"), torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 16, 3, 4)
            torch.testing.assert_close(fused(x), original(x))
        call = gemmnorm.fuse_report(fused, calls=True).matches[0].calls
        assert call is not None and (call.fused, call.unfused) == (0, {"x does not lie channels last": 3})
        assert not looked
        x = x.to(memory_format=torch.channels_last)
        torch.testing.assert_close(fused(x), original(x), rtol=1e-4, atol=1e-5)
    call = gemmnorm.fuse_report(fused, calls=True).matches[0].calls
    assert call is not None and call.fused == 1 and len(looked) == 1


def test_packed_arguments_are_kept_once_their_addresses_have_come_twice() -> None:
    packed = binding._Packed()
    packed.keep((1, 2), b"a")
    assert packed.get((1, 2)) is None
    packed.keep((1, 2), b"a")
    assert packed[1, 2] == b"a"
    for address in range(2 * binding._KEPT_ARGUMENTS):
        for _ in range(2):
            packed.keep((address, "new"), b"b")
        assert len(packed) <= binding._KEPT_ARGUMENTS
