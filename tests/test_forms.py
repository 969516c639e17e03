"""What a `forward` is given beside x, and what it returns: arguments that are None by default, classes of results."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from fuse_support import Written
from support import twin
from torch import Tensor, nn

import gemmnorm
from gemmnorm.export import export
from gemmnorm.userfiles import load_source

X, LABELS = torch.randn(5, 6), torch.arange(5)
SHARED = nn.CrossEntropyLoss()


@dataclasses.dataclass
class Answer(OrderedDict):  # type: ignore[type-arg]
    """A dictionary of its fields that are not None, as a ModelOutput of transformers is."""

    y: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        self.update((name, value) for name, value in vars(self).items() if value is not None)


class Classifier(nn.Module):
    """What a Trainer asks for: all parameters by name, and the loss where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.gemm, self.bn, self.smoothing = nn.Linear(6, 6), nn.BatchNorm1d(6), 0.1

    def forward(self, x: Tensor | None = None, labels: Tensor | None = None, as_tuple: bool | None = None) -> Any:
        if x is None:
            raise ValueError("x: expected a tensor")
        y = torch.relu(self.bn(self.gemm(x)))
        loss = None
        if labels is not None:
            criterion = nn.CrossEntropyLoss(label_smoothing=self.smoothing)
            loss = criterion(y, labels.view(-1))
        return (y, loss) if as_tuple else Answer(y=y, loss=loss)


def step(model: nn.Module, *args: Any, **kwargs: Any) -> list[Any]:
    """The class of the result, its values, all gradients and buffers."""
    model.zero_grad()
    answer = model(*args, **kwargs)
    values = [v for v in (answer.values() if isinstance(answer, dict) else answer) if v is not None]
    sum(v.square().sum() for v in values).backward()
    return [type(answer), *values, *(p.grad for p in model.parameters()), *model.buffers()]


def assert_same(fused: nn.Module, plain: nn.Module, *args: Any, **kwargs: Any) -> None:
    (made, *got), (wanted, *want) = (step(model, *args, **kwargs) for model in (fused, plain))
    assert made is wanted
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("training", [True, False])
def test_labels_that_may_be_given(training: bool, calls: list[Any]) -> None:
    plain = Classifier().train(training)
    fused = gemmnorm.fuse(twin(plain))
    assert_same(fused, plain, X)
    assert_same(fused, plain, x=X, labels=LABELS)
    assert_same(fused, plain, X, LABELS)
    assert len(calls) == 3
    for kwargs in ({"labels": LABELS, "as_tuple": True}, {"as_tuple": False}):  # the original
        assert_same(fused, plain, X, **kwargs)
    fused.smoothing = plain.smoothing = 0.3
    assert_same(fused, plain, X, LABELS)
    with pytest.raises(ValueError, match="expected a tensor"):
        fused()
    assert len(calls) == 3
    (chain,) = gemmnorm.fuse_report(fused).matches
    assert chain.linear == "gemm"


def test_labels_under_a_compiler() -> None:
    gemmnorm.set_strategy("reference")

    def forward(self: Any, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.bn(self.gemm(x))
        return {"y": y} if labels is None else {"y": y, "loss": nn.CrossEntropyLoss()(y, labels)}

    fused = gemmnorm.fuse(Written(forward))
    plain = gemmnorm.unfuse(twin(fused))
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    for labels in (None, LABELS):
        torch.testing.assert_close(compiled(X, labels), plain(X, labels))
        assert "compiled: fused" in str(gemmnorm.fuse_report(fused, calls=True))
    torch._dynamo.reset()


def test_what_a_form_cannot_be_recorded_for_is_left_to_the_original(calls: list[Any]) -> None:
    def forward(self: Any, x: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        y = self.bn(self.gemm(x))
        y = y if mask is None else y * mask
        return (y, None if labels is None else SHARED(y, labels))

    fused = gemmnorm.fuse(Written(forward))
    plain = gemmnorm.unfuse(twin(fused))
    mask = torch.rand(5, 6)
    for kwargs, count in (({}, 1), ({"mask": mask}, 2), ({"labels": LABELS}, 2), ({"labels": LABELS, "mask": mask}, 2)):
        assert_same(fused, plain, X, **kwargs)
        assert len(calls) == count


class Other:
    """Holds a class with the name of another."""

    @dataclasses.dataclass
    class Answer:
        y: Any


def test_forms_with_classes_of_one_name(calls: list[Any]) -> None:
    def forward(self: Any, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.bn(self.gemm(x))
        return Answer(y=y) if labels is None else Other.Answer(y)

    fused = gemmnorm.fuse(Written(forward))
    assert type(fused(X)) is Answer and type(fused(X, LABELS)) is Other.Answer
    assert len(calls) == 2


class product_of(NamedTuple):
    """Named as a child may be, and hence a variable of a written `forward`."""

    y: Any
    rows: int


@pytest.mark.parametrize("by_labels", [True, False])
def test_variables_of_one_form_and_functions_of_another(by_labels: bool, calls: list[Any]) -> None:
    """All forms, and both modes, are one function: a name that one of them assigns is a variable in all."""

    def forward(self: Any, x: Tensor, labels: Tensor | None = None) -> Any:
        if labels is None if by_labels else self.training:
            h, m, o = self.product_of(x), self.math(x), self.operator(x)
            return F.relu(self.bn(self.gemm(x))), x + h * h, m * m, o * o
        y = F.relu(self.bn(self.gemm(x)))
        y[:1] += 1
        return product_of(y * math.sqrt(x.shape[0]), 1)

    fused = gemmnorm.fuse(Written(forward, product_of=nn.Tanh(), math=nn.Tanh(), operator=nn.Tanh()))
    plain = gemmnorm.unfuse(twin(fused))
    for training in (True, False):
        fused.train(training), plain.train(training)
        for given in ((X,), (X, LABELS)):
            got, want = fused(*given), plain(*given)
            assert type(got) is type(want)
            torch.testing.assert_close(tuple(got), tuple(want))
    assert len(calls) == (4 if by_labels else 2)


def test_a_form_without_a_chain_is_left_to_the_original() -> None:
    def forward(self: Any, x: Tensor, both: Tensor | None = None) -> Any:
        h = self.gemm(x)
        return (self.bn(h),) if both is None else (self.bn(h), h * both)

    fused = gemmnorm.fuse(Written(forward))
    fused(X), fused(X, both=torch.ones(6))
    assert "calls: 1 fused, 1 unfused" in str(gemmnorm.fuse_report(fused, calls=True))


Pair = namedtuple("Pair", "y z")


@dataclasses.dataclass
class Plain:
    y: Any


class Listed(list):  # type: ignore[type-arg]
    pass


@dataclasses.dataclass
class Counted(Answer):
    n: int = dataclasses.field(init=False, default=3)


@pytest.mark.parametrize(
    "made",
    [
        lambda y: Counted(y=y), lambda y: Answer(y=y),
        lambda y: {"a": (Answer(loss=y), y)}, lambda y: OrderedDict(z=[y], y=y),
        lambda y: Plain(y), lambda y: Pair(y, 1), lambda y: (y, y.shape), lambda y: [y, {"z": y}],
    ],
)  # fmt: skip
def test_results_keep_their_classes(made: Callable[[Tensor], Any], calls: list[Any]) -> None:
    fused = gemmnorm.fuse(Written(lambda self, x: made(self.bn(self.gemm(x)))))
    plain = gemmnorm.unfuse(twin(fused))
    got, want = fused(X), plain(X)
    assert len(calls) == 1 and str(got) == str(want)


@dataclasses.dataclass
class Twice:
    y: Any
    rows: int = dataclasses.field(init=False, default=2)

    def __post_init__(self) -> None:
        self.y = self.y * self.rows


def later(y: Tensor) -> Answer:
    """Its items are in the order of assignment, not in that of the fields."""
    answer = Answer(loss=y)
    answer["y"] = answer.y = y
    return answer


def more(y: Tensor) -> Answer:
    answer = Answer(y=y)
    answer.more = 1  # type: ignore[attr-defined]
    return answer


@pytest.mark.parametrize(
    "made", [lambda y: defaultdict(list, y=y), lambda y: Listed([y]), lambda y: Twice(y), later, more]
)
def test_a_container_that_nobody_knows_how_to_make_is_refused(made: Callable[[Tensor], Any]) -> None:
    (refusal,) = gemmnorm.fuse_report(Written(lambda self, x: made(F.relu(self.bn(self.gemm(x)))))).refusals
    assert "would take for a plain container" in refusal.reason


def test_a_list_that_a_child_fills_is_not_recorded_as_empty() -> None:
    class Fills(nn.Module):
        def forward(self, y: Tensor, found: list[Tensor]) -> Tensor:
            found.append(y.mean())
            return y

    def forward(self: Any, x: Tensor) -> Any:
        found: list[Tensor] = []
        return self.child(F.relu(self.bn(self.gemm(x))), found), found

    model = Written(forward)
    model.child = Fills()
    (refusal,) = gemmnorm.fuse_report(model).refusals
    assert "empty container" in refusal.reason


RESULTS = """
class Results:
    @dataclasses.dataclass
    class Answer:
        y: torch.Tensor

@dataclasses.dataclass
class Answer(OrderedDict):
    y: torch.Tensor

    def __post_init__(self):
        self["y"] = self.y
"""


def test_classes_of_the_model_file_are_not_imported_from_it(tmp_path: Path) -> None:
    path = tmp_path / "answers.py"
    body = "y = self.bn(self.gemm(x)); return Answer(y) if labels is None else Results.Answer(y * labels)"
    path.write_text("import dataclasses\nfrom collections import OrderedDict\nimport torch\n" + RESULTS + f"""
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm, self.bn = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)
    def forward(self, x, labels=None):
        {body}
def get_inputs(): return [torch.randn(4, 8)]
def get_init_inputs(): return []
""")  # fmt: skip
    source = export(path, None).source
    assert "from user_" not in source
    module = load_source(source, "answers_new")
    new, x = module.ModelNew(), torch.randn(4, 8)
    assert type(new(x)) is module.Answer and type(new(x, x)) is module.Results.Answer
