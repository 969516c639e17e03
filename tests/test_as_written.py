"""Questions to the inputs, as models ask them: recorded where they fall as usual, the original where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_support import Written
from test_recording import X, assert_same, fused_and_plain, normed
from torch import Tensor, nn

import gemmnorm

CUBE = torch.randn(3, 6, 6, dtype=torch.float64)


def heads(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    return y.reshape(*y.shape[:-1], 2, -1)


def heads_of_a_list(self: Any, x: Tensor) -> Tensor:
    return normed(self, x).reshape([*x.shape[:-1], 3, 2]).reshape(tuple(x.shape))


def to_float32(self: Any, x: Tensor) -> Tensor:
    if x.dtype in (torch.float16, torch.float32):
        x = x.double() + 1
    return normed(self, x)


def to_the_weights(self: Any, x: Tensor) -> Tensor:
    if x.device != self.gemm.weight.device or x.dtype != self.gemm.weight.dtype:
        x = x.to(self.gemm.weight) + 1
    y = normed(self, x)
    return y * 2 if x.device.type == "cuda" or x.is_cuda else y


def on_a_device(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    return y * 2 if x.device == torch.device("cpu") else y


def with_a_mask(self: Any, batch: dict[str, Tensor]) -> Tensor:
    y = normed(self, batch["x"])
    if "mask" in batch:
        y = y * batch["mask"]
    return y if "scale" not in batch else y * batch["scale"]


def of_a_part(self: Any, batch: dict[str, Tensor]) -> Tensor:
    y = normed(self, batch["x"].double())
    return y * 2 if batch["x"].dtype == torch.float64 and batch["x"].shape[0] > 4 else y


def all_arguments(self: Any, *args: Tensor) -> Tensor:
    return normed(self, args[0]) * len(args)


def contrasts(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    labels = torch.arange(y.shape[0], device=y.device)
    own = torch.eye(len(x), dtype=torch.bool, device=x.device)
    logits = (y @ y.T).masked_fill(own, -1e9) / torch.tensor(0.5)
    return F.cross_entropy(logits, labels.roll(1)).reshape(1)


def drops_paths(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    if self.training:
        y = y * (torch.rand(x.shape[0], 1, device=x.device, dtype=x.dtype) < 0.5)
    return x + y


ASKED: dict[Callable[..., Any], tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]] = {
    heads: ([(X,), (X[:3],)], [(CUBE,)]),
    heads_of_a_list: ([(X,)], [(CUBE,)]),
    to_float32: ([(X,)], [(X.float(),), (X.half(),)]),
    to_the_weights: ([(X,)], [(X.float(),)]),
    on_a_device: ([(X,)], []),
    with_a_mask: ([({"x": X, "mask": X, "scale": X},)], [({"x": X},), ({"x": X, "mask": X},)]),
    of_a_part: ([({"x": X},)], [({"x": X[:3]},), ({"x": X.float()},)]),
    contrasts: ([(X,), (X[:3],)], []),
    drops_paths: ([(X,), (X[:3],)], []),
    all_arguments: ([(X,)], [(X, X)]),
}


@pytest.mark.parametrize("forward", ASKED, ids=lambda f: f.__name__)
def test_the_usual_answer_is_fused_and_any_other_is_right(forward: Callable[..., Any], calls: list[Any]) -> None:
    usual, others = ASKED[forward]
    fused, plain = fused_and_plain(Written(forward))
    for given in usual:
        assert_same(fused, plain, *given)
    assert len(calls) == 3 * len(usual)
    for given in others:
        assert_same(fused, plain, *given)
    assert len(calls) == 3 * len(usual)


class ByAVariable(nn.Module):
    def forward(self, y: Tensor) -> Tensor | None:
        found = None
        if not self.training:
            found = y * 2
        result = found
        return result


class ByItsDefault(nn.Module):
    def forward(self, y: Tensor, mask: Tensor | None = None) -> Tensor | None:
        return mask


class ByAnExpression(nn.Module):
    def forward(self, y: Tensor) -> Tensor | None:
        found = None if self.training else y * 2
        return found


def asks_for_none(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    more = self.aux(y)
    return y if more is None else y + more


@pytest.mark.parametrize("child", [ByAVariable, ByItsDefault, ByAnExpression])
def test_a_child_that_may_give_none_by_way_of_a_variable(child: Callable[[], nn.Module]) -> None:
    report = gemmnorm.fuse_report(Written(asks_for_none, aux=child()))
    assert not report.matches and "what aux gives may be None" in report.refusals[0].reason


def by_identity(self: Any, x: Tensor) -> Tensor:
    return normed(self, x.double() if x.dtype is torch.float32 else x)


def test_a_dtype_compared_by_identity_is_refused() -> None:
    report = gemmnorm.fuse_report(Written(by_identity))
    assert not report.matches and "by identity" in report.refusals[0].reason


def described(x: Any) -> str:
    try:
        return f"{type(x)} {float(x.sum())}"
    except ValueError:
        return "?"


def checked(x: Any) -> None:
    assert x.dim() == 2, described(x)


def with_checks(self: Any, x: Tensor) -> Tensor:
    if x.dim() > 2:
        raise ValueError(f"{type(x)}: {described(x)}")
    checked(x)
    return normed(self, x)


def with_a_check_that_is_read(self: Any, x: Tensor) -> Tensor:
    text = described(x)
    if x.dim() != 2:
        raise ValueError(described(x))
    return normed(self, x) * len(text)


def test_what_writes_the_message_of_a_check_may_catch_exceptions(calls: list[Any]) -> None:
    fused, plain = fused_and_plain(Written(with_checks))
    assert_same(fused, plain, X)
    assert len(calls) == 3
    for x, error in ((CUBE, ValueError), (X[0], AssertionError)):
        messages = []
        for model in (fused, plain):
            with pytest.raises(error) as raised:
                model(x)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]
    (refused,) = gemmnorm.fuse_report(Written(with_a_check_that_is_read)).refusals
    assert "catches exceptions" in refused.reason
