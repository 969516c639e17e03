"""The module as a drop-in: names, drawing order, state_dict, defaults and behaviour."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.parametrize
import torch.nn.utils.prune
from support import Chain, assert_same, step, stir, worst
from torch import nn

import gemmnorm
from gemmnorm import GemmNormError, LinearScaleBatchNorm1d
from gemmnorm.errors import GemmNormTypeError


class Founding(nn.Module):
    """The original of the task, word for word."""

    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)


@pytest.mark.parametrize("scale_shape", [(7,), (1, 7), (1,), ()])
def test_one_seed_draws_the_same_module(scale_shape):
    torch.manual_seed(3)
    original = Founding(5, 7, scale_shape)
    torch.manual_seed(3)
    ours = LinearScaleBatchNorm1d(5, 7, scale=scale_shape)
    assert list(ours.state_dict()) == list(original.state_dict())
    for name, value in original.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
        assert ours.state_dict()[name].dtype == value.dtype


def test_scale_true_is_a_vector_drawn_from_a_normal_distribution():
    torch.manual_seed(3)
    original = Founding(5, 7, (7,))
    torch.manual_seed(3)
    assert torch.equal(LinearScaleBatchNorm1d(5, 7).scale, original.scale)


def test_signature_and_defaults():
    parameters = inspect.signature(LinearScaleBatchNorm1d).parameters
    assert list(parameters) == [
        "in_features", "out_features", "bias", "scale", "eps", "momentum", "affine", "track_running_stats",
        "activation", "process_group", "device", "dtype", "bn_bias", "keep_product",
    ]  # fmt: skip
    norm = inspect.signature(nn.BatchNorm1d).parameters
    for name in ("eps", "momentum", "affine", "track_running_stats", "device", "dtype"):
        assert parameters[name].default == norm[name].default, name


@pytest.mark.parametrize("training", [True, False])
def test_state_dict_goes_both_ways_and_the_function_is_the_same(training):
    original, ours = Founding(6, 9, (9,)), LinearScaleBatchNorm1d(6, 9)
    ours.load_state_dict(original.state_dict())
    back = Founding(6, 9, (9,))
    back.load_state_dict(ours.state_dict())
    x, grad = torch.randn(11, 6), torch.randn(11, 9)
    original.train(training), ours.train(training), back.train(training)
    expected = step(original, original, x, grad)
    assert_same(step(ours, ours, x, grad), expected, 1e-5, 1e-5)
    assert_same(step(back, back, x, grad), expected, 0.0, 0.0)


@pytest.mark.parametrize("options", [
    {"bias": False, "scale": False, "activation": "relu"},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"eps": 0.5, "momentum": 0.9},
])  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_options(options, training):
    ours = LinearScaleBatchNorm1d(6, 9, **options).train(training)
    norm = {k: v for k, v in options.items() if k in ("affine", "track_running_stats", "momentum", "eps")}
    shape = None if options.get("scale") is False else (9,)
    original = Chain(6, 9, options.get("bias", True), shape, options.get("activation"), **norm).train(training)
    assert list(original.state_dict()) == list(ours.state_dict())
    original.load_state_dict(ours.state_dict())
    x, grad = torch.randn(11, 6), torch.randn(11, 9)
    for _ in range(2):
        assert_same(step(ours, ours, x, grad), step(original, original, x, grad), 1e-4, 1e-5)


def test_three_dimensional_input_runs_the_original_ops():
    ours = LinearScaleBatchNorm1d(6, 4)
    original = Founding(6, 4, (4,))
    original.load_state_dict(ours.state_dict())
    x = torch.randn(3, 4, 6)  # BatchNorm1d normalises dimension 1: here 4 channels of length 4
    assert worst(ours(x), original(x), 1e-6, 1e-6) is None


def test_deepcopy_pickle_and_dtype():
    ours = LinearScaleBatchNorm1d(6, 4, activation="leaky_relu(0.2)").double()
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    x = torch.randn(5, 6).double()
    for other in (copy.deepcopy(ours), torch.load(buffer, weights_only=False)):
        assert worst(other(x), copy.deepcopy(ours)(x), 0.0, 0.0) is None
    assert {p.dtype for p in LinearScaleBatchNorm1d(3, 2, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}
    assert LinearScaleBatchNorm1d(3, 2, device="meta").scale.is_meta


def test_repr_names_the_activation():
    assert "activation=relu" in repr(LinearScaleBatchNorm1d(3, 2, activation="relu"))
    assert "activation" not in repr(LinearScaleBatchNorm1d(3, 2))


def test_frozen_batch_norm_inside_a_training_module():
    """`bn.eval()` alone freezes the statistics, as in transfer learning; the operator looks at bn's own mode."""
    ours, original = LinearScaleBatchNorm1d(6, 4), Founding(6, 4, (4,))
    original.load_state_dict(ours.state_dict())
    ours.bn.eval(), original.bn.eval()
    x = torch.randn(8, 6)
    assert worst(ours(x), original(x), 1e-6, 1e-6) is None
    assert ours.bn.num_batches_tracked.item() == 0


def _halved(module):
    class Half(nn.Module):
        def forward(self, weight):
            return weight / 2

    torch.nn.utils.parametrize.register_parametrization(module, "weight", Half())


def _pruned(module):
    torch.nn.utils.prune.ln_structured(module, "weight", amount=0.5, n=2, dim=0)


def _unbound(module):
    weight = module.weight.detach().clone()
    del module.weight
    module.weight = weight


@pytest.mark.parametrize("change", [_halved, _pruned, _unbound])
def test_a_child_whose_weight_is_kept_elsewhere(change):
    ours, original = LinearScaleBatchNorm1d(6, 4), Founding(6, 4, (4,))
    original.load_state_dict(ours.state_dict())
    change(ours.gemm), change(original.gemm)
    x = torch.randn(8, 6)
    assert worst(ours(x), original(x), 1e-6, 1e-6) is None


def test_tensors_that_are_swapped_for_one_call():
    ours, x = LinearScaleBatchNorm1d(6, 4), torch.randn(8, 6)
    state = {name: value.detach() * 2 for name, value in ours.state_dict().items() if value.is_floating_point()}
    expected = copy.deepcopy(ours)
    expected.load_state_dict(state, strict=False)
    assert worst(torch.func.functional_call(ours, state, x), expected(x), 1e-6, 1e-6) is None


def test_conventions_of_nn():
    ours = LinearScaleBatchNorm1d(6, 4, activation="relu", scale=(1, 4))
    assert (ours.in_features, ours.out_features) == (6, 4)
    assert "scale=(1, 4), activation=relu" in repr(ours) and "process_group" not in repr(ours)
    group = dist.GroupMember.NON_GROUP_MEMBER
    assert f"process_group={group}" in repr(LinearScaleBatchNorm1d(6, 4, process_group=group))
    x = torch.randn(5, 6)
    assert torch.equal(ours.eval()(input=x), ours(x))
    assert LinearScaleBatchNorm1d.__doc__.count(">>>") >= 2


def test_reset_parameters_draws_as_the_constructor():
    torch.manual_seed(5)
    fresh = LinearScaleBatchNorm1d(6, 4)
    ours = LinearScaleBatchNorm1d(6, 4)
    ours(torch.randn(9, 6)).sum().backward()
    torch.manual_seed(5)
    ours.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), ours.state_dict().values(), strict=True))


def test_a_norm_without_bias():
    ours = LinearScaleBatchNorm1d(6, 4, bn_bias=False)
    assert "bn.bias" not in ours.state_dict() and "bn.weight" in ours.state_dict()
    original = Founding(6, 4, (4,))
    original.load_state_dict(ours.state_dict(), strict=False)
    x = torch.randn(9, 6)
    assert worst(ours(x), original(x), 1e-6, 1e-6) is None
    ours.reset_parameters()


@pytest.mark.parametrize("kind", [nn.ReLU, nn.ReLU6, nn.GELU, lambda: nn.LeakyReLU(0.3), lambda: nn.Hardtanh(-2, 3)])
def test_an_activation_is_a_name_or_a_module_and_becomes_one_again(kind):
    ours = LinearScaleBatchNorm1d(6, 4, scale=None, activation=kind())
    chain, x = nn.Sequential(ours.gemm, ours.bn, kind()), torch.randn(9, 6)
    want = copy.deepcopy(chain)(x)
    plain = ours.to_modules()
    assert list(dict(plain.named_children())) == ["gemm", "bn", "activation"] and plain.gemm is ours.gemm
    for module in (copy.deepcopy(ours), plain):
        assert worst(module(x), want, 1e-6, 1e-6) is None
        assert plain.bn.running_mean is ours.bn.running_mean
        ours.bn.reset_running_stats()


@pytest.mark.parametrize("strategy", [None, "reference"])
def test_a_scale_that_becomes_none_is_left_out(strategy):
    ours, x = LinearScaleBatchNorm1d(6, 4), torch.randn(9, 6)
    with gemmnorm.set_strategy(strategy):
        ours(x), ours(x)
        ours.scale = None
        ours.bn.reset_running_stats()
        chain = copy.deepcopy(nn.Sequential(ours.gemm, ours.bn))
        assert worst(ours(x), chain(x), 1e-6, 1e-6) is None
    assert torch.equal(ours.bn.running_mean, chain[1].running_mean) and list(ours.state_dict()) == [
        *(f"gemm.{name}" for name in ours.gemm.state_dict()), *(f"bn.{name}" for name in ours.bn.state_dict())
    ]  # fmt: skip


def test_from_existing_modules_and_back():
    head = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh()).eval()
    ours = LinearScaleBatchNorm1d.from_modules(head[0], head[1], activation=head[2])
    assert ours.gemm is head[0] and ours.bn is head[1] and ours.activation == "tanh" and not ours.training
    assert (ours.in_features, ours.out_features) == (6, 4)
    x = torch.randn(9, 6)
    assert worst(ours(x), head(x), 1e-6, 1e-6) is None
    scale = nn.Parameter(torch.randn(4))
    scaled = LinearScaleBatchNorm1d.from_modules(head[0], head[1], scale)
    assert scaled.scale is scale and next(iter(scaled.state_dict())) == "scale"
    for arguments, message in (
        ((nn.Identity(), head[1]), "linear: expected an nn.Linear; got Identity"),
        ((head[0], nn.LayerNorm(4)), "bn: expected an nn.BatchNorm1d or nn.SyncBatchNorm; got LayerNorm"),
        ((head[0], nn.BatchNorm1d(5)), "bn: expected 4 features, as linear gives; got 5"),
        ((head[0], head[1], nn.Parameter(torch.ones(2))), "scale: expected"),
        ((head[0], head[1], None, nn.ELU()), "activation: expected one of nn.ReLU"),
    ):
        with pytest.raises(GemmNormError, match=message):
            LinearScaleBatchNorm1d.from_modules(*arguments)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1,), ()])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_a_scale_goes_to_plain_modules_and_back(shape, activation, calls):
    ours = stir(LinearScaleBatchNorm1d(6, 4, scale=shape, activation=activation))
    plain, x = ours.to_modules(), torch.randn(9, 6)
    assert plain.scale is ours.scale and plain.gemm is ours.gemm and plain.bn is ours.bn
    assert list(plain.state_dict()) == list(ours.state_dict())
    names = ["gemm", "bn"] + ["activation"] * (activation is not None)
    assert list(dict(plain.named_children())) == names and type(plain.gemm) is nn.Linear
    assert worst(copy.deepcopy(plain)(x), copy.deepcopy(ours)(x), 1e-6, 1e-6) is None
    loaded = pickle.loads(pickle.dumps(plain.eval()))
    assert worst(loaded(x), ours.eval()(x), 1e-6, 1e-6) is None
    back = LinearScaleBatchNorm1d.from_modules(plain.gemm, plain.bn, plain.scale, plain.activation)
    assert back.scale is ours.scale and back.activation == ours.activation and not back.training
    calls.clear()
    gemmnorm.fuse(plain)(x)
    assert len(calls) == 1


def test_a_synchronised_norm_keeps_its_group_both_ways():
    norm = nn.SyncBatchNorm(4, process_group="a group", momentum=None).eval()
    ours = LinearScaleBatchNorm1d.from_modules(nn.Linear(6, 4), norm)
    assert type(ours.bn) is nn.BatchNorm1d and ours.process_group == "a group" and ours.bn.momentum is None
    assert ours.bn.weight is norm.weight and ours.bn.running_var is norm.running_var and not ours.bn.training
    back = ours.to_modules().bn
    assert type(back) is nn.SyncBatchNorm and back.process_group == "a group" and back.weight is norm.weight


def test_a_conversion_leaves_the_modes_of_the_children_alone():
    ours, x = LinearScaleBatchNorm1d(6, 4).train(), torch.randn(9, 6)
    ours.bn.eval()
    y = ours(x)
    plain = ours.to_modules()
    assert plain.training and not ours.bn.training and torch.equal(ours(x), y)
    linear = nn.Linear(6, 4).train()
    back = LinearScaleBatchNorm1d.from_modules(linear, nn.BatchNorm1d(4).eval())
    assert linear.training and not back.training


def test_hooks_of_a_synchronised_norm_stay():
    norm, seen = nn.SyncBatchNorm(4, process_group=object()), []
    norm.register_forward_hook(lambda *_: seen.append("norm"), always_call=True)
    ours = LinearScaleBatchNorm1d.from_modules(nn.Linear(6, 4), norm)
    ours.bn(torch.randn(5, 4))
    assert seen == ["norm"]


@pytest.mark.parametrize("scale", [2.0, True, torch.ones(4)])
def test_a_scale_that_is_no_parameter_is_refused(scale):
    with pytest.raises(GemmNormTypeError, match=r"scale: expected an nn\.Parameter"):
        LinearScaleBatchNorm1d.from_modules(nn.Linear(6, 4), nn.BatchNorm1d(4), scale)


def test_a_child_that_is_a_wrapper_of_another():
    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    ours = LinearScaleBatchNorm1d(6, 4)
    ours.gemm = Adapter(ours.gemm)
    gemmnorm.unprepare(gemmnorm.prepare(ours))
    assert "gemm" in str(gemmnorm.fuse_report(ours, calls=True))
