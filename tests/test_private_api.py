"""Each private name of PyTorch that docs/private_api.md lists, taken away: the call still gives the same."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from emulator import COMPILER, emulated
from support import Chain, arguments, assert_same, step, stir, twin
from torch import nn
from torch.autograd import forward_ad

import gemmnorm
from gemmnorm import chain, linear_scale_batch_norm, plan
from gemmnorm.chain import tensors_of
from gemmnorm.errors import GemmNormWarning
from gemmnorm.op import autograd
from gemmnorm.runtime import prepared, settings
from gemmnorm.runtime.call import recording

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "private_api.md").read_text(encoding="utf-8")
NAMES = {
    "TensorGuards": torch._C._dynamo.guards,
    "_len_torch_dispatch_stack": torch._C,
    "_len_torch_function_stack": torch._C,
    "peek_interpreter_stack": torch._C._functorch,
    "_current_level": forward_ad,
    "_is_profiler_enabled": torch.autograd.profiler,
    "_AutoDispatchBelowAutograd": torch._C,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_kernels_give_the_same_without(name, monkeypatch):
    module = stir(Chain(32, 24, scale_shape=(24,), activation="relu")).bfloat16()
    x, grad = torch.randn(70, 32, dtype=torch.bfloat16), torch.randn(70, 24, dtype=torch.bfloat16)

    def call(m, x):
        positional, keywords = arguments(m, strategy="cublas_folded_bn")
        return linear_scale_batch_norm(x, *positional, **keywords)

    with emulated(plan.chip_for(90, 3)):
        want = step(one := twin(module), lambda x: call(one, x), x, grad)
        monkeypatch.delattr(NAMES[name], name)
        for _ in range(2):
            got = step(other := twin(module), lambda x, m=other: call(m, x), x, grad)
            assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("name", NAMES)
def test_a_fused_model_gives_the_same_without(name, monkeypatch):
    original = nn.Sequential(stir(nn.Linear(6, 8)), nn.BatchNorm1d(8))
    fused = gemmnorm.fuse(twin(original))
    x, grad = torch.randn(10, 6), torch.randn(10, 8)
    monkeypatch.delattr(NAMES[name], name)
    chain._warn.cache_clear()
    needed = name in ("peek_interpreter_stack", "_current_level", "_len_torch_function_stack")
    with pytest.warns(GemmNormWarning, match="module by module: .* private names") if needed else nullcontext():
        got = step(fused, fused, x, grad)
    assert_same(got, step(original, original, x, grad), 1e-5, 1e-6)
    fused(x)  # says it once
    calls = gemmnorm.fuse_report(fused, calls=True).matches[0].calls
    assert calls.fused == 2 * (not needed) and sum(calls.unfused.values()) == 2 * needed


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize(("name", "instead"), [("_has_storage", lambda _: True), ("_hooks", None)])
def test_gradients_are_the_same_where_nobody_says_what_has_no_storage_or_who_looks(name, instead, monkeypatch):
    module = gemmnorm.LinearScaleBatchNorm1d(16, 8)
    x, grad = torch.randn(12, 16), torch.randn(12, 8)
    with emulated(plan.chip_for(90, 3)), gemmnorm.set_strategy("one_kernel"):
        want = step(module, module, x, grad)
        monkeypatch.setattr(autograd, name, instead)
        got = step(module, module, x, grad)
    gradients = [key for key in want if "grad" in key]
    assert gradients and all(torch.equal(got[key], want[key]) for key in gradients)


def test_the_operator_runs_plain_ops_where_it_cannot_go_below_autograd(monkeypatch):
    module = stir(Chain(6, 8, scale_shape=(8,)))
    x, grad = torch.randn(10, 6), torch.randn(10, 8)

    def call(m, x):
        positional, keywords = arguments(m)
        with recording():  # somebody observes: the operator
            return linear_scale_batch_norm(x, *positional, **keywords)

    want = step(one := twin(module), lambda x: call(one, x), x, grad)
    monkeypatch.delattr(torch._C, "_AutoDispatchBelowAutograd")
    assert_same(step(two := twin(module), lambda x: call(two, x), x, grad), want, 1e-5, 1e-5)
    with torch.no_grad():
        assert call(two, x).shape == grad.shape


@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_the_public_apply_gives_the_same(monkeypatch):
    assert autograd._apply_directly is not autograd.LinearScaleBatchNorm.apply
    module = stir(Chain(32, 24)).bfloat16()
    x, grad = torch.randn(70, 32, dtype=torch.bfloat16), torch.randn(70, 24, dtype=torch.bfloat16)
    results = []
    for function in (autograd._apply_directly, autograd.LinearScaleBatchNorm.apply):
        monkeypatch.setattr(autograd, "_apply_directly", function)
        positional, keywords = arguments(copy := twin(module), strategy="cublas_folded_bn")
        with emulated(plan.chip_for(90, 3)):
            results.append(step(copy, lambda x: linear_scale_batch_norm(x, *positional, **keywords), x, grad))  # noqa: B023
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0] if results[0][key] is not None)


def test_an_environment_of_another_kind(monkeypatch):
    assert settings._environment is not None
    for environment in (settings._environment, None):
        monkeypatch.setattr(settings, "_environment", environment)
        monkeypatch.setenv("GEMMNORM_STRATEGY", "one_kernel")
        assert settings.variable("GEMMNORM_STRATEGY") == "one_kernel" in settings.settings()
        monkeypatch.delenv("GEMMNORM_STRATEGY")
        assert settings.variable("GEMMNORM_STRATEGY") is None


def test_modules_that_keep_their_children_elsewhere():
    module = gemmnorm.LinearScaleBatchNorm1d(6, 8)
    parts = module._parts()
    assert parts == (module.gemm, module.bn, module.scale)
    del module._parameters["scale"]
    module.scale = torch.ones(8)  # as on a replica of DataParallel's
    assert module._parts() == (*parts[:2], module.scale)


def test_modules_that_keep_their_tensors_elsewhere():
    linear = SimpleNamespace(weight=1, bias=2)
    bn = SimpleNamespace(running_mean=3, running_var=4, num_batches_tracked=5, weight=6, bias=7)
    assert tensors_of(linear, bn) == (1, 2, 3, 4, 5, 6, 7)


def test_a_tensor_without_a_version():
    t = torch.randn(3)
    methods = {name: getattr(t, name) for name in ("data_ptr", "shape", "stride", "dtype", "device")}
    assert prepared._seen(SimpleNamespace(**methods))[1:] == prepared._seen(t)[1:]


def test_the_page_lists_every_private_name():
    """Of those that are written as `torch._…` or that `torch.autograd.forward_ad` keeps."""
    found = set()
    for path in (ROOT / "src" / "gemmnorm").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"(?:torch\._[a-zA-Z]\w*|forward_ad)(?:\.\w+)*\.(\w+)", text)) - {"guards"}
    assert found and not {name for name in found if name not in PAGE}
