"""`fuse`: what it matches, what it refuses and why, and what it writes."""

from __future__ import annotations

import copy
import random
import textwrap
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_support import FEATURES, Founding, MyLinear, MySync, Residual, Written, assert_equal_in_use, projector
from support import twin
from test_closures import Doubled
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gemmnorm
from gemmnorm.fuse.analysis import analyse

# --- matches


def by_function(f: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda self, x: f(self.bn(self.gemm(x)))


SCALES = {
    "parameter": (lambda self, x: self.bn(self.gemm(x) * self.scale), "scale"),
    "from the left": (lambda self, x: self.bn(self.scale * self.gemm(x)), "scale"),
    "buffer": (lambda self, x: self.bn(self.gemm(x) * self.fixed), "fixed"),
    "torch.mul": (lambda self, x: self.bn(torch.mul(self.gemm(x), self.scale)), "scale"),
    "method": (lambda self, x: self.bn(self.gemm(x).mul(self.scale)), "scale"),
    "number": (lambda self, x: self.bn(-1.5 * self.gemm(x)), "-1.5"),
    "number in place": (lambda self, x: self.bn(self.gemm(x).mul_(3)), "3.0"),
    "power of two": (lambda self, x: self.bn(self.gemm(x) / 4), "0.25"),
    "none": (lambda self, x: self.bn(self.gemm(x)), None),
}
ACTIVATIONS = {
    "relu": (torch.relu, F.relu, lambda y: y.relu(), lambda y: y.relu_(), nn.ReLU(), nn.ReLU(inplace=True)),
    "gelu": (F.gelu, nn.GELU()),
    "gelu_tanh": (lambda y: F.gelu(y, approximate="tanh"), nn.GELU("tanh")),
    "silu": (F.silu, nn.SiLU(), lambda y: F.silu(y, inplace=True)),
    "leaky_relu(0.2)": (lambda y: F.leaky_relu(y, 0.2), nn.LeakyReLU(0.2), lambda y: F.leaky_relu_(y, 0.2)),
    "tanh": (torch.tanh, lambda y: y.tanh(), lambda y: y.tanh_(), nn.Tanh()),
    "sigmoid": (torch.sigmoid, lambda y: y.sigmoid(), nn.Sigmoid()),
    "hardtanh(-0.5,2.0)": (lambda y: F.hardtanh(y, -0.5, 2.0), nn.Hardtanh(-0.5, 2.0)),
    "hardtanh(0.0,6.0)": (F.relu6, nn.ReLU6()),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales(name: str, calls: list[Any]) -> None:
    forward, scale = SCALES[name]
    model = Written(forward)
    original = twin(model)
    assert gemmnorm.fuse(model) is model
    (match,) = gemmnorm.fuse_report(model).matches
    assert (match.linear, match.scale, match.bn, match.activation) == ("gemm", scale, "bn", None)
    assert (match.owner, match.in_features, match.out_features, match.fused) == ("", FEATURES, FEATURES, True)
    assert_equal_in_use(model, original)
    assert len(calls) == 3


@pytest.mark.parametrize("shape", [(FEATURES,), (1, FEATURES), (1,), ()])
def test_scale_shapes(shape: tuple[int, ...], calls: list[Any]) -> None:
    model = Founding()
    model.scale = nn.Parameter(torch.randn(shape))
    original = twin(model)
    assert_equal_in_use(gemmnorm.fuse(model), original)
    assert len(calls) == 3


@pytest.mark.parametrize("strategy", [None, "reference"])  # by a strategy that is asked for, the call is kept
@pytest.mark.parametrize("name", ["parameter", "from the left", "buffer", "torch.mul", "method"])
def test_a_scale_that_becomes_none_raises_as_in_pytorch(name: str, strategy: str | None, calls: list[Any]) -> None:
    forward, scale = SCALES[name]
    original, x = Written(forward), torch.randn(8, FEATURES)
    fused = gemmnorm.fuse(twin(original))
    with gemmnorm.set_strategy(strategy):
        for module in (original, fused, copy.deepcopy(fused)):
            module(x), module(x)
            given = getattr(module, scale)
            setattr(module, scale, None)
            with pytest.raises(TypeError, match="NoneType"):
                module(x)
            setattr(module, scale, given)
    assert_equal_in_use(fused, original)


@pytest.mark.parametrize(("name", "form"), [(n, i) for n, forms in ACTIVATIONS.items() for i in range(len(forms))])
def test_activations(name: str, form: int, calls: list[Any]) -> None:
    f = ACTIVATIONS[name][form]
    if isinstance(f, nn.Module):
        model = Written(lambda self, x: self.act(self.bn(self.gemm(x))), act=f)
    else:
        model = Written(by_function(f))
    original = twin(model)
    gemmnorm.fuse(model)
    assert [m.activation for m in gemmnorm.fuse_report(model).matches] == [name]
    assert_equal_in_use(model, original)
    assert [c["activation"] for c in calls] == [name] * 3


def test_an_activation_that_is_not_ours_stays() -> None:
    model = Written(by_function(F.softplus))
    original = twin(model)
    assert [m.activation for m in gemmnorm.fuse_report(gemmnorm.fuse(model)).matches] == [None]
    assert_equal_in_use(model, original)


def test_a_value_used_twice_keeps_its_activation_apart() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.bn(self.gemm(x))
        return y + torch.relu(y)

    model = Written(forward)
    original = twin(model)
    assert [m.activation for m in gemmnorm.fuse_report(gemmnorm.fuse(model)).matches] == [None]
    assert_equal_in_use(model, original)


def test_projector_head(calls: list[Any]) -> None:
    model = projector()
    original = twin(model)
    gemmnorm.fuse(model)
    report = gemmnorm.fuse_report(model)
    assert [(m.linear, m.bn, m.activation) for m in report.matches] == [
        ("0", "1", "relu"), ("4", "5", "relu"), ("7", "8", None),
    ]  # fmt: skip
    assert not report.refusals and isinstance(model, nn.Sequential)
    assert_equal_in_use(model, original)
    assert len(calls) == 9


@pytest.mark.parametrize("kwargs", [{}, {"mask": torch.tensor([1.0, 0, 1, 0, 1, 1])}, {"twice": True}])
def test_nested_owners_control_flow_and_dropout(kwargs: dict[str, Any]) -> None:
    model = Residual()
    original = twin(model)
    gemmnorm.fuse(model)
    owners = [m.owner for m in gemmnorm.fuse_report(model).matches]
    assert owners == ["", "", "stem", "head", "head", "head"]
    assert_equal_in_use(model, original, **kwargs)


def test_one_linear_in_two_chains_and_one_batch_norm_for_both(calls: list[Any]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.bn(self.gemm(x)) + torch.relu(self.bn(self.gemm(x * 2) * self.scale))

    model = nn.Sequential(shared := Written(forward), shared, nn.Sequential(shared.gemm, nn.BatchNorm1d(6)))
    original = twin(model)
    gemmnorm.fuse(model)
    assert [(m.owner, m.linear) for m in gemmnorm.fuse_report(model).matches] == [
        ("0", "gemm"), ("0", "gemm"), ("2", "0"),
    ]  # fmt: skip
    assert_equal_in_use(model, original)
    assert len(calls) == 3 * 5


def test_the_modes_may_differ() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.training:
            x = x + 1
            return torch.relu(self.bn(self.gemm(x) * self.scale))
        return self.bn(self.gemm(x))

    model = Written(forward)
    original = twin(model)
    (plan,) = analyse(model)
    assert len(plan.chains) == 2 and "if self.training:" in plan.forward_source("f")
    assert_equal_in_use(gemmnorm.fuse(model), original)


def test_two_branches_keep_their_order() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        a, b = self.gemm(x), self.other(x)
        b = self.bn(b)
        a = self.bn(a)
        return a, b

    model = Written(forward, other=nn.Linear(6, 6))
    original = twin(model)
    assert len(gemmnorm.fuse_report(gemmnorm.fuse(model)).matches) == 2
    assert_equal_in_use(model, original)


# --- refusals


def with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def replaced(module: nn.Module) -> nn.Module:
    module.forward = module.forward  # type: ignore[method-assign]
    return module


def twice_used(self: Any, x: Tensor) -> Tensor:
    y = self.gemm(x)
    return self.bn(y) + y


def disturbed(self: Any, x: Tensor) -> Tensor:
    x = x + 0
    y = self.gemm(x)
    x.add_(1)
    return self.bn(y)


def with_scale(scale: Tensor) -> nn.Module:
    model = Founding()
    model.scale = nn.Parameter(scale)
    return model


def functional_norm(self: Any, x: Tensor) -> Tensor:
    return F.batch_norm(self.gemm(x), None, None, training=True)


chain = SCALES["none"][0]
REFUSALS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shape": (lambda: with_scale(torch.randn(4, 6)), "the scale scale has shape (4, 6)"),
    "column": (lambda: with_scale(torch.randn(6, 1)), "the scale scale has shape (6, 1)"),
    "3-D scale": (lambda: with_scale(torch.randn(1, 1, 6)), "the scale scale has shape (1, 1, 6)"),
    "division": (lambda: Written(lambda self, x: self.bn(self.gemm(x) / 3.0)), "divided by 3.0"),
    "tensor division": (lambda: Written(lambda self, x: self.bn(self.gemm(x) / self.scale)), "divided by a tensor"),
    "computed": (lambda: Written(lambda self, x: self.bn(self.gemm(x) * self.scale.exp())), "computed in forward"),
    "in place": (lambda: Written(lambda self, x: self.bn(self.gemm(x).mul_(self.scale))), "scale in place"),
    "two scales": (
        lambda: Written(lambda self, x: self.bn(self.gemm(x) * self.scale * 2)),
        "mul and mul stand between",
    ),
    "two users": (lambda: Written(twice_used), "the output of gemm (Linear) is used 2 times"),
    "disturbed": (lambda: Written(disturbed), ".add_() may change a tensor in place"),
    "subclass": (lambda: nn.Sequential(MyLinear(6, 6), nn.BatchNorm1d(6)), "0 is a MyLinear"),
    "subclass of SyncBatchNorm": (lambda: nn.Sequential(nn.Linear(6, 6), MySync(6)), "1 is a MySync"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(6), nn.BatchNorm1d(6)), "0 is a LazyLinear, which has no shape"),
    "lazy norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LazyBatchNorm1d()), "1 is a LazyBatchNorm1d"),
    "hook": (lambda: nn.Sequential(with_hook(nn.Linear(6, 6)), nn.BatchNorm1d(6)), "0 has hooks"),
    "instance forward": (
        lambda: nn.Sequential(nn.Linear(6, 6), replaced(nn.BatchNorm1d(6))),
        "forward of 1 is replaced",
    ),
    "parametrized": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6)),
        "0 is parametrized",
    ),
    "sizes": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(8)), "gives 6 features and 1 takes 8"),
    "dropout between": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.BatchNorm1d(6)),
        "1 (Dropout) stands between",
    ),
    "activation between": (
        lambda: Written(lambda self, x: self.bn(torch.relu(self.gemm(x)))),
        "relu stands between",
    ),
    "two owners": (
        lambda: nn.Sequential(with_hook(nn.Sequential(nn.Linear(6, 6))), nn.BatchNorm1d(6)),
        "different forwards",
    ),
    "two owners, scaled": (
        lambda: Written(
            lambda self, x: self.tail(self.gemm(x) * 2), tail=with_hook(nn.Sequential(OrderedDict(n=nn.BatchNorm1d(6))))
        ),
        "different forwards",
    ),
    "F.linear": (
        lambda: Written(lambda self, x: self.bn(F.linear(x, self.gemm.weight))),
        "only an nn.Linear is fused",
    ),
    "F.batch_norm": (lambda: Written(functional_norm), "only an nn.BatchNorm1d is fused"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    make, reason = REFUSALS[name]
    model = make()
    before = type(model)
    gemmnorm.fuse(model)
    report = gemmnorm.fuse_report(model)
    assert not report.matches and type(model) is before
    assert [reason in r.reason for r in report.refusals] == [True], report
    assert str(report).startswith("no Linear → BatchNorm1d chain: every candidate is refused") and reason in str(report)


def decides(self: Any, x: Tensor) -> Tensor:
    return chain(self, x) if x.sum() > 0 else x


def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = x * 2
    return chain(self, x)


doubled = Doubled.apply


def a_function_without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = doubled(x)
    return chain(self, x)


def autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return chain(self, x)


def draws(self: Any, x: Tensor) -> Tensor:
    return chain(self, x) if torch.rand(()) < 0.5 else x


def draws_in_python(self: Any, x: Tensor) -> Tensor:
    return chain(self, x) if random.random() < 2 else x


def counts(self: Any, x: Tensor) -> Tensor:
    self.count = 1
    return chain(self, x)


def remembers(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x)
    return chain(self, x)


def asks(self: Any, x: Tensor) -> Tensor:
    return chain(self, x) if isinstance(x * 2, Tensor) else chain(self, x[0])


def own_tensor(self: Any, x: Tensor) -> Tensor:
    return chain(self, x + Tensor([1.0] * 6))


UNTRACEABLE = {
    decides: "decides by the data",
    without_gradients: "switches gradients",
    a_function_without_gradients: "switches gradients",
    autocast: "enters an autocast region",
    draws: "decides by the data",
    draws_in_python: "draws random numbers",
    counts: "assigns self.count",
    remembers: "changes a list or dictionary",
    asks: "asks for the type",
    own_tensor: "makes a tensor of its own",
}


@pytest.mark.parametrize("forward", UNTRACEABLE, ids=lambda f: f.__name__)
def test_a_forward_that_cannot_be_recorded_is_left_alone(forward: Any) -> None:
    model = Written(forward, seen=[])
    before, state = type(model), torch.get_rng_state()
    gemmnorm.fuse(model)
    (refusal,) = gemmnorm.fuse_report(model).refusals
    assert refusal.reason.startswith("its forward ") and UNTRACEABLE[forward] in refusal.reason
    assert str(refusal).startswith("the model itself: ")
    assert type(model) is before and model.seen == [] and model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_an_owner_that_cannot_be_recorded_does_not_stop_its_children() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Founding()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if x.sum() > -1e9 else x

    report = gemmnorm.fuse_report(gemmnorm.fuse(Outer()))
    assert [m.owner for m in report.matches] == ["inner"] and not report.refusals


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Linear(2, 2)), "the model has no nn.BatchNorm1d"),
        (nn.Sequential(nn.BatchNorm1d(2)), "the model has no nn.Linear"),
        (nn.ReLU(), "the model has no nn.Linear and no nn.BatchNorm1d"),
        (nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)), "of 1 nn.Linear none feeds one of the 1 nn.BatchNorm1d"),
    ],
)
def test_a_model_without_a_chain(model: nn.Module, reason: str) -> None:
    assert str(gemmnorm.fuse_report(model)) == f"no Linear → BatchNorm1d chain: {reason}"


def test_what_is_no_module_is_refused() -> None:
    for function in (gemmnorm.fuse, gemmnorm.unfuse, gemmnorm.fuse_report):
        with pytest.raises(TypeError, match=r"expected an nn\.Module; got int") as caught:
            function(3)
        assert isinstance(caught.value, gemmnorm.GemmNormError)


# --- the text


def test_the_source_reads_as_a_person_would_write_it() -> None:
    (plan,) = analyse(Founding())
    assert plan.class_source("ModelNew", "fused_linear_scale_batch_norm") == (
        "class ModelNew(Founding):\n"
        '    """Founding with gemm → × scale → bn as one operation."""\n'
        "\n"
        "    def forward(self, x):\n"
        "        return fused_linear_scale_batch_norm(x, self.gemm, self.bn, scale=self.scale)\n"
    )
    (plan,) = analyse(projector())
    assert plan.forward_source(lambda chain: f"fused_{chain.in_features}_{chain.out_features}") == (
        "def forward(self, input):\n"
        "    input = fused_6_8(input, self[0], self[1], activation=self[2])\n"
        "    input = self[3](input)\n"
        "    input = fused_8_8(input, self[4], self[5], activation=self[6])\n"
        "    return fused_8_6(input, self[7], self[8])\n"
    )
    plan = analyse(Residual())[0]
    assert plan.path == "" and plan.imports == ("import torch.nn.functional as F", "import torch")
    layers = (
        "h = fused_chain(\n"
        '    x, self.layers[0]["fc"], self.layers[0]["norm"], scale=0.5, activation="tanh"\n'
        ")\n"
        "h = F.dropout(h, p=0.2, training=self.training)\n"
        "x = x + h\n"
        "h = fused_chain(\n"
        '    x, self.layers[1]["fc"], self.layers[1]["norm"], scale=0.5, activation="tanh"\n'
        ")\n"
        "h = F.dropout(h, p=0.2, training=self.training)\n"
        "x = x + h\n"
        "head = self.head(x)\n"
        'return {"y": head, "h": x.view(x.size(0), -1)}\n'
    )
    others = "twice is not False or type(self.strength) is not float or self.strength != 0.5"
    assert plan.forward_source("fused_linear_scale_batch_norm").replace("linear_scale_batch_norm", "chain") == (
        "def forward(self, x, mask=None, *, twice=False):\n"
        f"    if not (mask is not None or {others}):\n"
        "        x = self.stem(x)\n"
        "        x = F.gelu(x)\n"
        + textwrap.indent(layers, " " * 8)
        + f"    if {others} or not isinstance(mask, torch.Tensor):\n"
        "        return super().forward(x, mask, twice=twice)\n"
        "    x = self.stem(x)\n"
        "    x = F.gelu(x)\n"
        "    x = x * mask\n" + textwrap.indent(layers, " " * 4)
    )
    assert not any(word in plan.forward_source("fused") for word in ("try:", "except", "pass"))


def test_the_report_reads_well() -> None:
    model = nn.Sequential(Founding(), nn.Linear(6, 6), nn.Dropout(), nn.BatchNorm1d(6))
    assert str(gemmnorm.fuse_report(model)) == (
        "1 chain, not fused yet:\n  0.gemm → × scale → 0.bn  (6 → 6)\nleft alone:\n  1 → 3: 2 (Dropout) stands between"
    )
    assert str(gemmnorm.fuse_report(gemmnorm.fuse(model))).startswith("1 chain, fused:")
