"""`fuse`: what it matches, what it refuses and why, and that the model stays the same model."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import stir, twin
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import gemmnorm
from gemmnorm.tools import fuse as fusing
from gemmnorm.tools.analysis import analyse

FEATURES = 6


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of every call of the operator that a fused model makes."""
    made: list[dict[str, Any]] = []

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        made.append(kwargs)
        return gemmnorm.linear_scale_batch_norm(*args, **kwargs)

    monkeypatch.setattr(fusing, "linear_scale_batch_norm", spy)
    return made


class Written(nn.Module):
    """A module with the usual children, whose `forward` is the function that it is given."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **children: Any) -> None:
        super().__init__()
        self.gemm = nn.Linear(FEATURES, FEATURES)
        self.bn = nn.BatchNorm1d(FEATURES)
        self.scale = nn.Parameter(torch.randn(FEATURES))
        self.register_buffer("fixed", torch.randn(1, FEATURES))
        for name, child in children.items():
            setattr(self, name, child)
        stir(self)
        self.__class__ = type("Written", (Written,), {"forward": forward, "__reduce_ex__": object.__reduce_ex__})


class Founding(nn.Module):
    """The founding model, at the top level of a module, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.gemm = nn.Linear(FEATURES, FEATURES)
        self.scale = nn.Parameter(torch.randn(FEATURES))
        self.bn = nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.gemm(x) * self.scale)


class Residual(nn.Module):
    """Nested owners, a loop, dropout, an optional argument, a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Founding()
        self.layers = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(6, 6), "norm": nn.BatchNorm1d(6)}) for _ in range(2))
        self.head = nn.Sequential(nn.Dropout(0.3), *projector())
        self.strength = 0.5

    def forward(self, x: Tensor, mask: Tensor | None = None, *, twice: bool = False) -> dict[str, Tensor]:
        h = F.gelu(self.stem(x))
        if mask is not None:
            h = h * mask
        for layer in self.layers:
            h = h + F.dropout(torch.tanh(layer["norm"](layer["fc"](h) * self.strength)), 0.2, self.training)
        y = self.head(h)
        return {"y": y * 2 if twice else y, "h": h.view(h.size(0), -1)}


def projector() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.4),
        nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6, affine=False),
    )  # fmt: skip


def assert_equal_in_use(model: Any, original: Any, *args: Any, **kwargs: Any) -> None:
    """Outputs, gradients and buffers over a few steps in both modes."""
    x = torch.randn(5, FEATURES)
    for mode in (True, False, True):
        results = []
        for module in (model, original):
            module.train(mode).zero_grad()
            given = x.clone().requires_grad_()
            torch.manual_seed(1)
            y = module(given, *args, **kwargs)
            values = list(y.values()) if isinstance(y, dict) else [y] if isinstance(y, Tensor) else list(y)
            sum((v * torch.arange(v.numel()).view_as(v)).sum() for v in values).backward()
            gradients = {name: p.grad for name, p in module.named_parameters()}
            results.append([*values, given.grad, *gradients.values(), *module.state_dict().values()])
        torch.testing.assert_close(*results)
    assert list(model.state_dict()) == list(original.state_dict())


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


class MyLinear(nn.Linear): ...


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
    "disturbed": (lambda: Written(disturbed), ".add_() changes a tensor in place"),
    "subclass": (lambda: nn.Sequential(MyLinear(6, 6), nn.BatchNorm1d(6)), "0 is a MyLinear"),
    "SyncBatchNorm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6)), "1 is a SyncBatchNorm"),
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
    "two owners": (lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.BatchNorm1d(6)), "different forwards"),
    "two owners, scaled": (
        lambda: Written(
            lambda self, x: self.tail(self.gemm(x) * 2), tail=nn.Sequential(OrderedDict(n=nn.BatchNorm1d(6)))
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


def many(self: Any, *xs: Tensor) -> Tensor:
    return chain(self, xs[0])


def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = x * 2
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
    return chain(self, x) if isinstance(x, Tensor) else chain(self, x[0])


def own_tensor(self: Any, x: Tensor) -> Tensor:
    return chain(self, x + torch.ones(6))


UNTRACEABLE = {
    decides: "decides by the data",
    many: "takes *xs",
    without_gradients: "switches gradients",
    autocast: "enters an autocast region",
    draws: "draws random numbers",
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


# --- the model stays the same model


def test_unfuse_restores_the_classes_and_nothing_is_left_behind() -> None:
    model = Residual()
    before = {path: (type(m), set(m.__dict__)) for path, m in model.named_modules()}
    keys = list(model.state_dict())
    gemmnorm.fuse(gemmnorm.fuse(model))
    assert type(model).__name__ == "FusedResidual" and isinstance(model, Residual)
    assert type(model).__module__ == Residual.__module__ and list(model.state_dict()) == keys
    gemmnorm.unfuse(model)
    assert {path: (type(m), set(m.__dict__)) for path, m in model.named_modules()} == before


def test_equal_blocks_share_a_class() -> None:
    model = gemmnorm.fuse(nn.Sequential(*(Founding() for _ in range(3))))
    assert len({type(m) for m in model}) == 1


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "save"])
def test_copies_are_fused_and_independent(how: str, calls: list[Any]) -> None:
    model = gemmnorm.fuse(nn.Sequential(Founding(), *projector()))
    if how == "deepcopy":
        new = copy.deepcopy(model)
        assert type(new[0]) is type(model[0])
    elif how == "copy":
        new = copy.copy(model)
    elif how == "pickle":
        new = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, stream := io.BytesIO())
        stream.seek(0)
        new = torch.load(stream, weights_only=False)
    assert str(gemmnorm.fuse_report(new)) == str(gemmnorm.fuse_report(model))
    assert all(m.fused for m in gemmnorm.fuse_report(new).matches)
    original = gemmnorm.unfuse(copy.deepcopy(model))
    assert type(original) is nn.Sequential and type(original[0]) is Founding
    assert_equal_in_use(new, original)
    assert len(calls) == 3 * 4
    if how != "copy":
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(new.parameters(), model.parameters(), strict=True))


def test_hooks_on_the_owner_and_around_it_still_run() -> None:
    model, seen = nn.Sequential(Founding()), []
    for module in (model, model[0]):
        module.register_forward_hook(lambda m, args, y: seen.append(type(m).__name__))
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    gemmnorm.fuse(model)(torch.randn(4, 6, requires_grad=True)).sum().backward()
    assert seen == ["FusedFounding", "Sequential", "backward"]


def changes() -> Iterator[tuple[str, Callable[[Any], Any], bool]]:
    """(what happens to a fused Founding model, the change, does the operator still run)."""

    def call(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda m: (f(m), m)[1]

    new = nn.Linear(6, 6)
    yield "double", lambda m: m.double(), True
    yield "load_state_dict", call(lambda m: m.load_state_dict(stir(Founding(), 3).state_dict())), True
    yield "frozen statistics", call(lambda m: m.bn.eval()), True
    yield "no momentum", call(lambda m: setattr(m.bn, "momentum", None)), True
    yield "untracked", call(lambda m: setattr(m.bn, "track_running_stats", False)), True
    yield "new linear", call(lambda m: setattr(m, "gemm", copy.deepcopy(new))), True
    yield "new scale", call(lambda m: setattr(m, "scale", nn.Parameter(torch.ones(1)))), True
    yield "pruned", call(lambda m: prune.l1_unstructured(m.gemm, "weight", 0.5)), False
    yield "parametrized", call(lambda m: parametrizations.weight_norm(m.gemm)), False
    yield "linear hook", call(lambda m: m.gemm.register_forward_hook(lambda mod, args, y: y + 1)), False
    yield "norm pre-hook", call(lambda m: m.bn.register_forward_pre_hook(lambda mod, args: (args[0] * 2,))), False
    yield "backward hook", call(lambda m: m.bn.register_full_backward_hook(lambda mod, g, _: (g[0] * 2,))), False
    yield "new class", call(lambda m: setattr(m, "gemm", MyLinear(6, 6).requires_grad_(False))), False
    yield "odd scale", call(lambda m: setattr(m, "scale", nn.Parameter(torch.ones(5, 6)))), False
    yield "half-precision linear", call(lambda m: m.gemm.bfloat16()), True


CHANGES = {name: (change, runs) for name, change, runs in changes()}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_fusing_are_honoured(name: str, calls: list[Any]) -> None:
    change, runs = CHANGES[name]
    model = stir(Founding())
    original = twin(model)
    gemmnorm.fuse(model)
    for mode in (True, False):
        results = []
        for module in (model, original):
            torch.manual_seed(2)
            if mode:
                module = change(module)
            module.train(mode)
            if name == "frozen statistics":
                module.bn.eval()
            x = torch.linspace(-1, 2, 30, dtype=module.gemm.weight.dtype).view(5, 6).requires_grad_()
            y = module(x)
            y.square().sum().backward()
            results.append([y, x.grad, *module.state_dict().values()])
        torch.testing.assert_close(*results)
    assert len(calls) == (2 if runs else 0)


def test_conversion_to_sync_batch_norm_before_and_after() -> None:
    before = gemmnorm.fuse(nn.SyncBatchNorm.convert_sync_batchnorm(Founding()))
    assert not gemmnorm.fuse_report(before).matches
    model = stir(Founding())
    original = twin(model)
    after = nn.SyncBatchNorm.convert_sync_batchnorm(gemmnorm.fuse(model))
    assert type(after.bn) is nn.SyncBatchNorm and isinstance(after, Founding)
    assert list(after.state_dict()) == list(original.state_dict())
    x = torch.randn(5, 6)
    torch.testing.assert_close(after.eval()(x), original.eval()(x))


def test_a_structure_that_changed_runs_the_original_forward(calls: list[Any]) -> None:
    model = gemmnorm.fuse(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    original = gemmnorm.unfuse(twin(model))
    for module in (model, original):
        module.append(nn.Softplus())
    assert_equal_in_use(model, original)
    assert not calls
    gemmnorm.fuse(model)
    assert_equal_in_use(model, gemmnorm.unfuse(twin(model)))
    assert len(calls) == 3


def test_a_plain_attribute_that_changed_runs_the_original_forward() -> None:
    model = gemmnorm.fuse(Residual())
    original = gemmnorm.unfuse(twin(model))
    for module in (model, original):
        module.strength = -2.0
    assert_equal_in_use(model, original)


@pytest.mark.parametrize("shape", [(5, 6, 6), (2, 3), (1, 6), (6,), (0, 6)])
def test_other_inputs_get_the_original_answer(shape: tuple[int, ...]) -> None:
    model = gemmnorm.fuse(Founding())
    outcomes = []
    for module in (model, gemmnorm.unfuse(twin(model))):
        try:
            outcomes.append(module(torch.ones(shape)))
        except Exception as error:
            outcomes.append(type(error).__mro__[-4:])
    if isinstance(outcomes[0], Tensor):
        torch.testing.assert_close(*outcomes)
    else:
        assert ValueError in outcomes[0] if ValueError in outcomes[1] else outcomes[0]


def test_three_dimensions_run_the_original_ops(calls: list[Any]) -> None:
    model = gemmnorm.fuse(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()))
    original = gemmnorm.unfuse(twin(model))
    x = torch.randn(4, 6, 6)
    torch.testing.assert_close(model(x), original(x))
    assert not calls


def test_autocast_gives_the_dtype_and_values_of_the_original() -> None:
    model = gemmnorm.fuse(nn.Sequential(Founding(), *projector()).eval())
    original = gemmnorm.unfuse(twin(model))
    x = torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), original(x), rtol=0.05, atol=0.05)


def test_function_transforms_see_the_single_ops(calls: list[Any]) -> None:
    model = gemmnorm.fuse(Founding().eval())
    original = gemmnorm.unfuse(twin(model))
    x, state = torch.randn(3, 4, 6), dict(model.state_dict())
    for f in (torch.func.vmap, torch.func.jacrev):
        given = x[0] if f is torch.func.jacrev else x
        torch.testing.assert_close(f(model)(given), f(original)(given))
    assert not calls
    torch.testing.assert_close(torch.func.functional_call(model, state, x[0]), original(x[0]))
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_torchscript_trace_holds_plain_ops() -> None:
    model = gemmnorm.fuse(Founding().eval())
    x = torch.randn(4, 6)
    traced = torch.jit.trace(model, x)
    torch.testing.assert_close(traced(x), model(x))
    assert "gemmnorm::" not in str(traced.inlined_graph)


# --- torch.compile


def test_torch_compile_takes_the_whole_graph() -> None:
    model = gemmnorm.fuse(stir(Residual()))
    original = gemmnorm.unfuse(twin(model))
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(n.target) for n in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(5, 6)
    for mode in (True, False):
        model.train(mode), original.train(mode)
        torch.manual_seed(4)
        got = compiled(x)
        torch.manual_seed(4)
        torch.testing.assert_close(got, original(x))
    assert sum("gemmnorm.linear_scale_batch_norm" in t for t in targets) == 2 * 6
    torch.testing.assert_close(model.state_dict(), original.state_dict())


def test_an_exported_program_holds_plain_ops() -> None:
    model = gemmnorm.fuse(nn.Sequential(Founding(), nn.ReLU()).eval())
    x = torch.randn(4, 6)
    program = torch.export.export(model, (x,), strict=False)
    assert "gemmnorm" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), model(x))


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
    assert plan.path == "" and plan.imports == ("import torch.nn.functional as F",)
    assert plan.forward_source("fused_linear_scale_batch_norm").replace("linear_scale_batch_norm", "chain") == (
        "def forward(self, x, mask=None, *, twice=False):\n"
        "    if mask is not None or twice is not False or self.strength != 0.5:\n"
        "        return super().forward(x, mask, twice=twice)\n"
        "    x = self.stem(x)\n"
        "    x = F.gelu(x)\n"
        "    h = fused_chain(\n"
        '        x, self.layers[0]["fc"], self.layers[0]["norm"], scale=0.5, activation="tanh"\n'
        "    )\n"
        "    h = F.dropout(h, p=0.2, training=self.training)\n"
        "    x = x + h\n"
        "    h = fused_chain(\n"
        '        x, self.layers[1]["fc"], self.layers[1]["norm"], scale=0.5, activation="tanh"\n'
        "    )\n"
        "    h = F.dropout(h, p=0.2, training=self.training)\n"
        "    x = x + h\n"
        "    head = self.head(x)\n"
        '    return {"y": head, "h": x.view(x.size(0), -1)}\n'
    )
    assert not any(word in plan.forward_source("fused") for word in ("try:", "except", "pass"))


def test_the_report_reads_well() -> None:
    model = nn.Sequential(Founding(), nn.Linear(6, 6), nn.Dropout(), nn.BatchNorm1d(6))
    assert str(gemmnorm.fuse_report(model)) == (
        "1 chain, not fused yet:\n  0.gemm → × scale → 0.bn  (6 → 6)\nleft alone:\n  1 → 3: 2 (Dropout) stands between"
    )
    assert str(gemmnorm.fuse_report(gemmnorm.fuse(model))).startswith("1 chain, fused:")
