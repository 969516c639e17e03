"""Which values a `forward` compares with None: those alone must not be None where the recording is to hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fuse_support import FEATURES, Written
from support import twin
from test_conditions_of_inputs import Auxiliary, Bare, assert_same, calls_of, h, reason_of
from torch import Tensor, nn

import gemmnorm
from gemmnorm.fuse import tracing

X = torch.randn(5, FEATURES)


class Asking(Written):
    """Its method `kept` cannot be recorded; neither that nor its child `aux` is known to give no None."""

    def __init__(self, forward: Any) -> None:
        super().__init__(forward, aux=Auxiliary())
        self.flag = True
        self.__class__ = type("Asking", (Asking,), {"forward": forward, "__reduce_ex__": object.__reduce_ex__})

    def kept(self, x: Tensor) -> Tensor | None:
        try:
            return self.aux(x)  # type: ignore[no-any-return]
        except KeyError:
            return None


def absent(value: Any) -> bool:
    return value is None


def present(values: Any) -> Iterator[Any]:
    for value in values:
        found = value
        if found is None:
            continue
        yield found


# --- what is not compared may be None


def a_part(self: Any, x: Tensor) -> Tensor:
    pair = (x, x)
    y = self.kept(x)
    second = pair[1]
    if second is not None:
        y = y + second
    return h(self, y)


def a_closure(self: Any, x: Tensor) -> Tensor:
    def more() -> Any:
        return 1 if x is None else x

    return h(self, self.kept(x) + more())


def a_comprehension(self: Any, x: Tensor) -> Tensor:
    y = self.kept(x)
    return h(self, y + sum([part for part in (x, x * 2) if part is not None]))


def a_generator(self: Any, x: Tensor) -> Tensor:
    y = self.kept(x)

    def doubled() -> Iterator[Tensor]:
        yield from (part * 2 for part in present((x, None, x)) if part is not None)

    return h(self, y + sum(doubled()))


def a_helper(self: Any, x: Tensor) -> Tensor:
    y = self.kept(x)
    return h(self, y) * (2 if absent(x) or absent(None) else 3)


def in_a_loop(self: Any, x: Tensor) -> Tensor:
    value = self.kept(x)
    y = value + 1
    value = None
    for factor in (1, 2):
        if value is not None:
            y = y + value
        value = x * factor
    return h(self, y)


UNCOMPARED = [a_part, a_closure, a_comprehension, a_generator, a_helper, in_a_loop]


@pytest.mark.parametrize("forward", UNCOMPARED)
@pytest.mark.parametrize("training", [True, False])
def test_what_is_not_compared_may_be_none(forward: Any, training: bool) -> None:
    model: Any = Asking(forward).train(training)
    fused: Any = gemmnorm.fuse(twin(model))
    assert_same(fused, model, X)
    assert calls_of(fused) == 1
    model.aux.on = fused.aux.on = False
    assert_same(fused, model, X)


def test_a_helper_that_is_given_one_value_and_another() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.kept(x)
        return h(self, x) * (2 if absent(x) else 3) * (2 if absent(y) else 3)

    model: Any = Asking(forward)
    assert "what kept gives may be None" in reason_of(model)


# --- what is compared


def the_result(self: Any, x: Tensor) -> Tensor:
    y = self.kept(x)
    return h(self, x) if y is None else h(self, x) * 2


def the_result_in_a_closure(self: Any, x: Tensor) -> Tensor:
    y = self.kept(x)

    def factor() -> int:
        return 2 if y is None else 3

    return h(self, x) * factor()


def a_variable_that_a_closure_assigns(self: Any, x: Tensor) -> Tensor:
    y = None

    def compute() -> None:
        nonlocal y
        y = self.kept(x)

    compute()
    return h(self, x) if y is None else h(self, x) * 2


def the_result_in_a_comprehension(self: Any, x: Tensor) -> Tensor:
    return h(self, x) * len([part for part in (x, self.kept(x)) if part is not None])  # type: ignore[no-any-return]


def one_name_in_two_comprehensions(self: Any, x: Tensor) -> Tensor:
    count = len([part for part in (x, self.kept(x)) if part is not None])
    return h(self, x) * count * len([lambda: part for part in (x, x)])  # type: ignore[no-any-return]  # noqa: B023


def the_result_in_a_generator(self: Any, x: Tensor) -> Tensor:
    def parts() -> Iterator[Tensor]:
        yield from present((x, self.kept(x)))

    return h(self, x) * len([*parts()])  # type: ignore[no-any-return]


def the_result_in_a_lambda(self: Any, x: Tensor) -> Tensor:
    return h(self, x) * len([*filter(lambda part: part is not None, (x, self.kept(x)))])  # type: ignore[no-any-return]


def the_result_in_a_helper(self: Any, x: Tensor) -> Tensor:
    return h(self, x) * (2 if absent(self.kept(x)) else 3)


def the_result_in_a_loop(self: Any, x: Tensor) -> Tensor:
    value, y = x, x
    for _ in range(2):
        y = y * 3 if value is None else y
        value = self.kept(y)
    return h(self, y)


def the_result_of_an_expression(self: Any, x: Tensor) -> Tensor:
    return h(self, x) if self.kept(x) is None else h(self, x) * 2


def the_one_or_the_other(self: Any, x: Tensor) -> Tensor:
    y = self.kept(x)
    return h(self, x) if (y if self.flag else x) is None else h(self, x) * 2


def the_first_that_counts(self: Any, x: Tensor) -> Tensor:
    y, first = self.kept(x), None
    return h(self, x) if (first or y) is None else h(self, x) * 2


def the_result_as_it_is_assigned(self: Any, x: Tensor) -> Tensor:
    return h(self, x) * 2 if (y := self.kept(x)) is None else h(self, x) + y


def over_a_long_way(self: Any, x: Tensor) -> Tensor:
    """The jump is so long that another instruction stands before it."""
    y = self.kept(x)
    if y is None:
        x = x + 1 + x * 2 - x / 3 + x * 4 - x / 5 + x * 6 - x / 7 + x * 8 - x / 9 + x * 10 - x / 11 + x * 12 - x / 13
        x = x + 1 + x * 2 - x / 3 + x * 4 - x / 5 + x * 6 - x / 7 + x * 8 - x / 9 + x * 10 - x / 11 + x * 12 - x / 13
        x = x + 1 + x * 2 - x / 3 + x * 4 - x / 5 + x * 6 - x / 7 + x * 8 - x / 9 + x * 10 - x / 11 + x * 12 - x / 13
        x = x + 1 + x * 2 - x / 3 + x * 4 - x / 5 + x * 6 - x / 7 + x * 8 - x / 9 + x * 10 - x / 11 + x * 12 - x / 13
        x = x + 1 + x * 2 - x / 3 + x * 4 - x / 5 + x * 6 - x / 7 + x * 8 - x / 9 + x * 10 - x / 11 + x * 12 - x / 13
        x = x + 1 + x * 2 - x / 3 + x * 4 - x / 5 + x * 6 - x / 7 + x * 8 - x / 9 + x * 10 - x / 11 + x * 12 - x / 13
    return h(self, x)


def by_calling_itself(self: Any, x: Tensor, mask: Any = None, again: bool = True) -> Tensor:
    """The parameter that is compared is another value the second time."""
    if again:
        return self.forward(x, self.kept(x), False)  # type: ignore[no-any-return]
    return h(self, x) if mask is None else h(self, x) * 2


def after_something_else(self: Any, x: Tensor) -> Tensor:
    y = self.kept(x)
    found = x
    count = 0 if found is None else 1
    found = y
    return h(self, x) * (count if found is None else 2)


COMPARED = [
    the_result,
    the_result_in_a_closure,
    a_variable_that_a_closure_assigns,
    the_result_in_a_comprehension,
    one_name_in_two_comprehensions,
    the_result_in_a_generator,
    the_result_in_a_lambda,
    the_result_in_a_helper,
    the_result_in_a_loop,
    the_result_of_an_expression,
    the_one_or_the_other,
    the_first_that_counts,
    the_result_as_it_is_assigned,
    over_a_long_way,
    by_calling_itself,
    after_something_else,
]


@pytest.mark.parametrize("forward", COMPARED)
def test_what_is_compared_must_not_be_none(forward: Any) -> None:
    model: Any = Asking(forward)
    fused: Any = gemmnorm.fuse(twin(model))
    for on in (True, False):
        model.aux.on = fused.aux.on = on
        assert_same(fused, model, X)
    reason_of(model)


# --- what an input or an attribute is by another name


def an_alias(self: Any, x: Tensor, mask: Any) -> Tensor:
    given = mask
    return h(self, x) if given is None else h(self, x) * 2


def assigned_twice(self: Any, x: Tensor, mask: Any) -> Tensor:
    mask, x = mask, x * 2
    return h(self, x) if mask is None else h(self, x) * 2


def either(self: Any, x: Tensor, mask: Any) -> Tensor:
    return h(self, x) if (mask if self.flag else x) is None else h(self, x) * 2


def either_or_no_tensor(self: Any, x: Tensor, mask: Any) -> Tensor:
    return h(self, x) if (mask if self.flag else torch) is None else h(self, x) * 2


def either_or_an_attribute(self: Any, x: Tensor, mask: Any) -> Tensor:
    return h(self, x) if (mask if self.flag else self.scale) is None else h(self, x) * 2


@pytest.mark.parametrize("forward", [an_alias, assigned_twice, either, either_or_no_tensor, either_or_an_attribute])
def test_an_input_by_another_name(forward: Any) -> None:
    model = Asking(forward)
    fused = gemmnorm.fuse(twin(model))
    assert_same(fused, model, X, X)
    assert calls_of(fused) == 1
    assert_same(fused, model, X, None)


def test_a_part_of_an_input_by_another_name() -> None:
    def forward(self: Any, b: Any) -> Tensor:
        mask, weight = b.mask, b.rest["weight"]
        return h(self, b.x) * (2 if mask is None else 3) * (5 if weight is None else 7)

    model = Asking(forward)
    fused = gemmnorm.fuse(twin(model))
    assert_same(fused, model, Bare(x=X, mask=X, rest={"weight": X}))
    assert calls_of(fused) == 1
    for mask, weight in ((None, X), (X, None), (None, None)):
        assert_same(fused, model, Bare(x=X, mask=mask, rest={"weight": weight}))


def test_a_parameter_by_another_name() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        scale, unused = self.scale, self.fixed
        y = h(self, x) if scale is None else h(self, x) * scale
        return y if unused is None else y * 2

    for name in ("scale", "fixed"):
        model: Any = Asking(forward)
        fused: Any = gemmnorm.fuse(twin(model))
        assert_same(fused, model, X)
        assert calls_of(fused) == 1
        setattr(model, name, None)
        setattr(fused, name, None)
        assert_same(fused, model, X)


# --- a child's recording in its owner's


class Projector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gemm = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Any) -> Tensor:
        given = x
        return self.gemm(X) if given is None else self.gemm(given)  # type: ignore[no-any-return]


def normed(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.projector(x))  # type: ignore[no-any-return]


def normed_and_asked(self: Any, x: Tensor) -> Tensor:
    y = self.projector(x)
    return X if y is None else self.bn(y)


def normed_result(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.projector(self.aux(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [normed, normed_and_asked, normed_result])
def test_a_child_that_compares_what_it_is_given(forward: Any) -> None:
    model: Any = Asking(forward)
    model.projector = Projector()
    fused: Any = gemmnorm.fuse(twin(model))
    assert_same(fused, model, X)
    if forward is normed_result:
        assert "what aux gives may be None" in reason_of(model)
    else:
        assert calls_of(fused) == 1
        assert_same(fused, model, None)
    model.aux.on = fused.aux.on = False
    assert_same(fused, model, X)


def test_what_is_asked_of_a_linear_is_a_condition() -> None:
    """A class whose `forward` compares its input is no Linear, whatever it computes else."""

    class Like(nn.Linear):
        def forward(self, x: Any) -> Any:
            given = x
            return X if given is None else nn.functional.linear(x, self.weight, self.bias)

    model = nn.Sequential(Like(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))
    fused = gemmnorm.fuse(twin(model))
    assert_same(fused, model, X)
    assert_same(fused, model, None)
    assert tracing.trace(model[0], True).asks_more_than("bias")
