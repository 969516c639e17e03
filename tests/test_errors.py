"""The table of bad input: what each gets, and that the message names the argument, the expected and the given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemmnorm
from gemmnorm import GemmNormError, LinearScaleBatchNorm1d, errors, linear_scale_batch_norm
from gemmnorm.op import sync

B, I, O = 4, 3, 2  # noqa: E741
GROUP = dist.GroupMember.NON_GROUP_MEMBER  # whose size the tests say


def call(**changes):
    given = {
        "input": torch.randn(B, I),
        "weight": torch.randn(O, I),
        "bias": torch.randn(O),
        "scale": torch.randn(O),
        "running_mean": torch.zeros(O),
        "running_var": torch.ones(O),
        "bn_weight": torch.ones(O),
        "bn_bias": torch.zeros(O),
        "num_batches_tracked": torch.tensor(0),
        "training": True,
    }
    return linear_scale_batch_norm(**{**given, **changes})


def test_the_base_call_is_good():
    assert call().shape == (B, O)


@pytest.mark.parametrize(("changes", "kind", "words"), [
    ({"weight": torch.randn(O, I + 1)}, ValueError, ["weight", "3", "(2, 4)"]),
    ({"weight": torch.randn(O)}, ValueError, ["weight", "(2,)"]),
    ({"bias": torch.randn(O + 1)}, ValueError, ["bias", "(2,)", "(3,)"]),
    ({"scale": torch.randn(O + 1)}, ValueError, ["scale", "(1, 2)", "(3,)"]),
    ({"scale": torch.randn(B, O)}, ValueError, ["scale", "(4, 2)"]),
    ({"running_mean": torch.zeros(O + 1)}, ValueError, ["running_mean", "(3,)"]),
    ({"running_var": torch.zeros(1)}, ValueError, ["running_var", "(1,)"]),
    ({"bn_weight": torch.zeros(O, 1)}, ValueError, ["bn_weight", "(2, 1)"]),
    ({"bn_bias": torch.zeros(())}, ValueError, ["bn_bias", "()"]),
    ({"running_mean": None}, ValueError, ["running_mean", "running_var", "both"]),
    ({"running_mean": None, "running_var": None, "training": False}, ValueError, ["running_mean", "training"]),
    ({"input": None}, TypeError, ["input", "tensor", "NoneType"]),
    ({"weight": [1.0]}, TypeError, ["weight", "tensor", "list"]),
    ({"bn_bias": 3}, TypeError, ["bn_bias", "tensor", "int"]),
    ({"num_batches_tracked": torch.tensor([1, 2])}, ValueError, ["num_batches_tracked", "(2,)"]),
    ({"bias": torch.randn(O + 1)}, RuntimeError, ["bias"]),
    ({"scale": torch.randn(O + 1)}, RuntimeError, ["scale"]),
    ({"activation": ["relu"]}, ValueError, ["activation", "list"]),
    ({"momentum": "a"}, ValueError, ["momentum", "'a'"]),
    ({"momentum": -0.5}, ValueError, ["momentum", "from 0", "-0.5"]),
    ({"scale": "twice"}, TypeError, ["scale", "number", "'twice'"]),
    ({"activation": "swish"}, ValueError, ["activation", "relu", "'swish'"]),
    ({"strategy": "magic"}, ValueError, ["strategy", "cublas_bn", "'magic'"]),
    ({"input": torch.ones(B, I, dtype=torch.int64)}, TypeError, ["input", "floating", "int64"]),
    ({"input": torch.randn(B, I, dtype=torch.float64)}, TypeError, ["weight", "float64", "float32"]),
    ({"weight": torch.randn(O, I).half()}, TypeError, ["weight", "float32", "float16"]),
    ({"weight": torch.randn(O, I, device="meta")}, TypeError, ["weight", "cpu", "meta"]),
    ({"bias": torch.randn(O, device="meta")}, TypeError, ["bias", "cpu", "meta"]),
    ({"scale": torch.randn(O, device="meta")}, TypeError, ["scale", "cpu", "meta"]),
    ({"num_batches_tracked": torch.tensor(0.0)}, TypeError, ["num_batches_tracked", "int64", "float32"]),
])  # fmt: skip
def test_what_does_not_fit_is_named(changes, kind, words):
    with pytest.raises(GemmNormError) as caught:
        call(**changes)
    assert isinstance(caught.value, kind)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("strategy", [None, "reference"])
def test_one_row_in_training_is_batch_norms_own_error(strategy):
    x = torch.randn(1, I)
    module, ours = nn.BatchNorm1d(O), LinearScaleBatchNorm1d(I, O)
    with pytest.raises(ValueError) as original:
        module(torch.randn(1, O))
    with pytest.raises(ValueError) as caught:
        call(input=x, strategy=strategy)
    assert str(caught.value) == str(original.value)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ours(x)
    assert ours.bn.num_batches_tracked.item() == 0
    assert ours.eval()(x).shape == (1, O)


def test_a_refused_call_changes_nothing():
    mean, var, count = torch.zeros(O), torch.ones(O), torch.tensor(7)
    with pytest.raises(GemmNormError):
        call(running_mean=mean, running_var=var, num_batches_tracked=count, activation="swish")
    assert torch.equal(mean, torch.zeros(O)) and torch.equal(var, torch.ones(O)) and count.item() == 7


def test_every_error_has_pythons_own_type_too():
    assert issubclass(errors.GemmNormValueError, (GemmNormError, ValueError))
    assert issubclass(errors.GemmNormTypeError, TypeError) and issubclass(errors.GemmNormTypeError, GemmNormError)
    assert issubclass(errors.GemmNormRuntimeError, RuntimeError)
    assert not issubclass(errors.GemmNormWarning, GemmNormError)


def test_the_modules_arguments():
    with pytest.raises(GemmNormError, match="activation"):
        LinearScaleBatchNorm1d(I, O, activation="nope")
    with pytest.raises(GemmNormError, match=r"activation: expected one of nn.ReLU, .*; got ELU"):
        LinearScaleBatchNorm1d(I, O, activation=nn.ELU())
    for scale in ((3, 3), (I,), 2.0, 1, "yes", (2.0,), np.ones(O)):
        with pytest.raises(GemmNormError, match=r"scale: expected True, False, None or a shape of \(2,\), \(1, 2\)"):
            LinearScaleBatchNorm1d(I, O, scale=scale)


@pytest.mark.parametrize("shape", [(B, I), (B, O, I)])
def test_a_function_that_is_switched_off_is_the_chain_of_operations(shape):
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(O, I, dtype=torch.float64, requires_grad=True)
    with gemmnorm.set_strategy("reference"), gemmnorm.set_fusion(False):
        y = gemmnorm.linear_scale_batch_norm(x, weight, training=True)
        (first,) = torch.autograd.grad(y.pow(3).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), weight)
        with pytest.raises(GemmNormError, match="weight: expected"):
            gemmnorm.linear_scale_batch_norm(x[..., 1:] if len(shape) == 2 else x[0, :, 1:], weight, training=True)
    assert second.abs().max() > 0


def fused():
    return gemmnorm.fuse(nn.Sequential(nn.Linear(I, O), nn.BatchNorm1d(O)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [lambda: LinearScaleBatchNorm1d(I, O), fused], ids=["module", "fused"])
@pytest.mark.parametrize("x", [
    torch.randn(B, I + 1), torch.randn(I), torch.randn(2, O, 2, I), torch.randn(B, I, dtype=torch.float64),
    torch.ones(B, I, dtype=torch.int64), torch.randn(1, I), torch.randn(B, I + 1, I), "nothing",
])  # fmt: skip
@pytest.mark.parametrize("autocast", [True, False])
def test_modules_raise_what_pytorch_raises(make, x, training, autocast):
    """The same type and words, or a type that is also that one."""
    outcomes = []
    for module in (nn.Sequential(nn.Linear(I, O), nn.BatchNorm1d(O)), make()):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            try:
                outcomes.append(module.train(training)(x).shape)
            except Exception as error:
                outcomes.append(error)
    want, got = outcomes
    assert isinstance(got, type(want)) if isinstance(want, Exception) else got == want, outcomes


@pytest.mark.parametrize(("changes", "words"), [
    ({"weight": torch.randn(O, I + 1)}, "weight: expected .*, 3"),
    ({"input": torch.randn(B, I, dtype=torch.float64)}, "weight: expected the dtype of input"),
])  # fmt: skip
def test_what_cannot_be_multiplied_is_a_runtime_error_too(changes, words):
    with pytest.raises(RuntimeError, match=words):
        call(**changes)


@pytest.mark.parametrize("shape", [(I,), (2, O, O, I)])
def test_other_dimensions_are_batch_norms_own_error(shape):
    with pytest.raises(ValueError, match=r"expected 2D or 3D input \(got"):
        call(input=torch.randn(shape))


@pytest.mark.parametrize("shape", [(B, I), (B, O, I)])
@pytest.mark.parametrize("group", [None, GROUP])
def test_an_unknown_strategy_is_refused_whatever_way_the_call_goes(shape, group, monkeypatch):
    monkeypatch.setattr(sync, "world_size", lambda group: 1 if group is None else 2)
    with pytest.raises(
        ValueError, match="strategy: .*'nonsense'" if group is None or len(shape) == 2 else "dimensions"
    ):
        call(input=torch.randn(shape), strategy="nonsense", process_group=group)


@pytest.mark.parametrize("group", ["abc", 3, object()])
def test_what_is_no_process_group_is_refused(group):
    for make in (lambda: call(process_group=group), lambda: LinearScaleBatchNorm1d(I, O, process_group=group)):
        with pytest.raises(TypeError, match=r"process_group: expected one of torch\.distributed's or None; got"):
            make()


@pytest.mark.parametrize("strategy", [[], (), 3])
def test_a_strategy_is_a_name(strategy):
    with pytest.raises(ValueError, match="strategy: expected None or one of"):
        call(strategy=strategy)


def test_three_dimensions_are_never_left_unsynchronised(monkeypatch):
    monkeypatch.setattr(sync, "world_size", lambda group: 1 if group is None else 2)
    ours = LinearScaleBatchNorm1d(I, O, process_group=GROUP)
    with pytest.raises(GemmNormError, match="x has 3 dimensions, and so the statistics are not synchronised"):
        ours(torch.randn(B, O, I))
    ours.gemm.register_forward_hook(lambda *_: None)
    with pytest.raises(GemmNormError, match="hooks"):
        ours(torch.randn(B, I))
    with pytest.raises(GemmNormError, match="process_group"):
        call(input=torch.randn(B, O, I), process_group=GROUP)
    assert ours.eval()(torch.randn(B, O, I)).shape == (B, O, O)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.bfloat16)])
def test_autocast_does_not_cast_float64(dtypes):
    """As eager, whose product then has operands of two dtypes."""
    x, weight = (torch.randn(4, 8).to(dtype) for dtype in dtypes)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError):
            torch.nn.functional.linear(x, weight)
        with pytest.raises(errors.GemmNormTypeError, match="weight: expected the dtype of input"):
            linear_scale_batch_norm(x, weight, training=True)
