"""The eager call that goes past PyTorch's dispatcher: how it is recognised, and what it is under autograd. Emulated."""

from __future__ import annotations

import contextlib

import pytest
import torch
from emulator import COMPILER, emulated
from gpu_support import precision
from support import Chain, arguments, step, stir, twin

from gemmnorm import linear_scale_batch_norm, plan
from gemmnorm.errors import GemmNormRuntimeError, GemmNormTypeError
from gemmnorm.op import autograd
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime.operands import Likeness, Operands, Options

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

CHIP = plan.chip_for(90, 3)
BATCH, INNER, FEATURES = 70, 32, 24
STRATEGIES = ("one_kernel", "cublas_folded_bn")  # what the backward needs as one tensor, and as two


def chain(dtype=torch.bfloat16, **options):
    return stir(Chain(INNER, FEATURES, scale_shape=(FEATURES,), activation="relu", **options)).to(dtype)


def call(module, x, strategy="one_kernel"):
    positional, keywords = arguments(module, strategy=strategy)
    return linear_scale_batch_norm(x, *positional, **keywords)


def samples(*widths, dtype=torch.bfloat16):
    return (torch.randn(BATCH, n, dtype=dtype) for n in widths)


# --- recognised -------------------------------------------------------------------------------------------------------


def test_likeness():
    x, w = torch.randn(4, 6), torch.nn.Parameter(torch.randn(6))
    like = Likeness((x, None, w))
    assert like((torch.randn(4, 6), None, torch.nn.Parameter(torch.zeros(6))))

    class Subclass(torch.Tensor):
        pass

    others = {
        "there": (x, w, w),
        "shape": (torch.randn(5, 6), None, w),
        "strides": (torch.randn(6, 4).t(), None, w),
        "dtype": (x.double(), None, w),
        "device": (x.to("meta"), None, w),
        "gradient": (x.clone().requires_grad_(), None, w),
        "parameter": (x, None, w.detach().requires_grad_()),
        "subclass": (x.as_subclass(Subclass), None, w),
    }
    assert [name for name, tensors in others.items() if like(tensors)] == []
    with torch.autocast("cpu", torch.bfloat16):
        assert not like((x, None, w))
    with torch.inference_mode():
        assert not like((torch.randn(4, 6), None, w))


def test_a_call_is_recognised(monkeypatch):
    module, (x, other) = chain(), samples(INNER, INNER)
    looked = []
    monkeypatch.setattr(
        runtime, "prepared_like", lambda *c, original=runtime.prepared_like: looked.append(1) or original(*c)
    )
    with emulated(CHIP):
        for t in (x, other, x):
            call(module, t)
        with torch.no_grad():
            call(module, x), call(module, other)
    assert len(looked) == 2


def test_so_is_an_operator_whose_weight_is_another_tensor_each_time(monkeypatch):
    """In a compiled graph a parametrized weight is made anew at each call."""
    looked = []
    monkeypatch.setattr(
        runtime, "prepared_like", lambda *c, original=runtime.prepared_like: looked.append(1) or original(*c)
    )
    options = Options(save=True, strategy="cublas_folded_bn", keep_product=True)
    with emulated(CHIP), torch.no_grad():
        for out_features, bias in (
            (FEATURES, False),
            (FEATURES, False),
            (FEATURES, True),
            (8, False),
            (FEATURES, False),
        ):
            x, weight = torch.randn(BATCH, INNER), torch.randn(out_features, INNER)
            operands = Operands(x, weight, torch.randn(out_features) if bias else None)
            runtime.find(operands, options)
            runtime.find_backward(operands.differentiable, options, (x.dtype, weight.dtype))
    assert len(looked) == 2 * 3


def test_where_pytorch_has_no_such_guards(monkeypatch):
    module, (x,) = chain(), samples(INNER)
    with emulated(CHIP), torch.no_grad():
        want = call(module, x)
        for missing in (None, lambda *tensors: None):
            monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", missing)
            runtime.forget()
            assert torch.equal(call(module, x), want) and torch.equal(call(module, x), want)


def test_whatever_changes_between_two_calls():
    """Each change is followed by the same result as in a process that has seen no call before."""

    def set_bias(m):
        m.gemm.bias = None

    def set_weight(m):
        m.gemm.weight.data = m.gemm.weight.data.t().contiguous().t()

    changes = {
        "no bias": set_bias,
        "strides": set_weight,
        "dtypes": lambda m: m.bn.float(),
        "frozen": lambda m: m.requires_grad_(False),
        "frozen in part": lambda m: m.gemm.requires_grad_(False),
        "evaluation": lambda m: m.eval(),
        "eps": lambda m: setattr(m.bn, "eps", 0.5),
        "momentum": lambda m: setattr(m.bn, "momentum", None),
    }
    around = {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "TF32": lambda: precision("tf32"),
    }
    grad = torch.randn(BATCH, FEATURES)
    for dtype, names in ((torch.bfloat16, changes), (torch.float32, around)):  # a kernel takes seconds to compile
        for name in names:
            (x,) = samples(INNER, dtype=dtype)
            seen = []
            for fresh in (False, True):
                module = chain(dtype)
                with emulated(CHIP):
                    for _ in range(2):
                        call(module, x.requires_grad_(name != "frozen")).sum().backward()
                    module.zero_grad(), setattr(x, "grad", None)
                    changes.get(name, lambda m: None)(module)
                    if fresh:
                        runtime.forget()
                    with around.get(name, contextlib.nullcontext)():
                        y = call(module, x)
                    if y.requires_grad:
                        y.backward(grad.to(y.dtype))
                    seen.append({"y": y.detach(), "x": x.grad, **dict(module.named_buffers())})
                    seen[-1] |= {f"grad {n}": p.grad for n, p in module.named_parameters()}
                    x.grad = None
            first, second = seen
            assert first.keys() == second.keys()
            for key, value in first.items():
                same = value is second[key] is None or (
                    value.dtype == second[key].dtype and torch.equal(value, second[key])
                )
                assert same, f"{dtype}, {name}: {key}"


def test_arguments_that_stop_fitting_are_refused():
    module, (x,) = chain(), samples(INNER)
    with emulated(CHIP):
        call(module, x)
        module.gemm.weight.data = module.gemm.weight.data.float()
        with pytest.raises(GemmNormTypeError, match="weight: expected the dtype of input"):
            call(module, x)


def test_a_subclass_sees_the_operator(monkeypatch):
    class Subclass(torch.nn.Parameter):
        pass

    module, (x,) = chain(), samples(INNER)
    monkeypatch.setattr(autograd, "_apply_directly", lambda *_: pytest.fail("past the dispatcher"))
    with emulated(CHIP):
        module.bn.weight = torch.nn.Parameter(module.bn.weight.data)
        module.bn.weight.__class__ = Subclass
        call(module, x)
        module.gemm.weight.data = module.gemm.weight.data.float()
        with pytest.raises(GemmNormTypeError, match="weight: expected the dtype of input"):
            call(module, x)


# --- under autograd ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_second_derivative_is_refused_and_the_first_is_the_same(strategy):
    module, (x, grad) = chain(), samples(INNER, FEATURES)
    with emulated(CHIP):
        want = step(twin(module), lambda x: call(module, x, strategy), x, grad)["grad x"]
        x.requires_grad_()
        (got,) = torch.autograd.grad(call(module, x, strategy), x, grad, create_graph=True)
        assert torch.equal(got, want)
        with pytest.raises(GemmNormRuntimeError, match="no second derivative"):
            got.sum().backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_graph_that_is_kept_gives_the_same_gradients_again(strategy):
    module, (x, grad) = chain(), samples(INNER, FEATURES)
    with emulated(CHIP):
        y = call(module, x.requires_grad_(), strategy)
        first = torch.autograd.grad(y, [x, *module.parameters()], grad, retain_graph=True)
        again = torch.autograd.grad(y, [x, *module.parameters()], grad)
        with pytest.raises(RuntimeError, match="second time"):
            y.backward(grad)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_kept_goes_through_the_hooks_of_saved_tensors(strategy):
    """Whatever they give back, for instance after a stay elsewhere; and it is no more than product and statistics."""
    module, (x, grad) = chain(), samples(INNER, FEATURES)
    x.requires_grad_()
    given = {t.data_ptr() for t in (x, *module.parameters())}
    made = []

    def pack(t):
        made.extend([t.nbytes] if t.data_ptr() not in given else [])
        return t.clone()

    with emulated(CHIP):
        want = torch.autograd.grad(call(module, x, strategy), [x, *module.parameters()], grad)
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
            y = call(module, x, strategy)
        got = torch.autograd.grad(y, [x, *module.parameters()], grad)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    groups = 2 if strategy == "one_kernel" else 0
    assert sum(made) <= BATCH * FEATURES * 2 + (2 + groups) * FEATURES * 4 + 256


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["x", "gemm.weight", "scale", "bn.weight"])
def test_a_change_in_place_before_the_backward_is_noticed(strategy, name):
    module, (x, grad) = chain(), samples(INNER, FEATURES)
    with emulated(CHIP):
        y = call(module, x, strategy)
        with torch.no_grad():
            (x if name == "x" else module.get_parameter(name)).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(grad)
