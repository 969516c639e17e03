"""Children and functions of the user's that change what a chain or a recording relies on: refused, with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemmnorm


@torch.fx.wrap
def overwrites(x: Tensor) -> Tensor:
    return x.mul_(0.5)


class MarksDirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


class Overwrites(nn.Module):
    def forward(self, x):
        return x.mul_(0.5)


class Between(nn.Module):
    """Something happens to x between the Linear and its BatchNorm."""

    def __init__(self, happens: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.happens = happens

    def forward(self, x):
        h = self.fc(x)
        k = self.happens(x)
        return self.bn(h) + k.sum()


class WrappedBetween(Between):
    def forward(self, x):
        h = self.fc(x)
        k = overwrites(x)
        return self.bn(h) + k.sum()


class FunctionBetween(Between):
    def forward(self, x):
        h = self.fc(x)
        k = MarksDirty.apply(x)
        return self.bn(h) + k.sum()


class OutBetween(Between):
    def forward(self, x):
        h = self.fc(x)
        k = torch.clamp(x, min=0, out=x)
        return self.bn(h) + k.sum()


class StatisticsBetween(Between):
    def forward(self, x):
        mean, var = torch.zeros(6), torch.ones(6)
        h = self.fc(x)
        k = F.batch_norm(x, mean, var, training=True)
        return self.bn(h) + k.sum() + mean.sum()


class RowsBetween(Between):
    def forward(self, x):
        h = self.fc(x)
        k = F.embedding(torch.arange(3), x, max_norm=0.1)
        return self.bn(h) + k.sum()


@pytest.mark.parametrize(
    "model",
    [
        StatisticsBetween(nn.Identity()),
        RowsBetween(nn.Identity()),
        Between(nn.Sequential(nn.ReLU(inplace=True))),
        Between(nn.Sequential(nn.Identity(), nn.Sequential(nn.SiLU(inplace=True)))),
        Between(Overwrites()),
        Between(nn.Sequential(nn.Identity(), Overwrites())),
        WrappedBetween(nn.Identity()),
        FunctionBetween(nn.Identity()),
        OutBetween(nn.Identity()),
    ],
)
def test_a_product_is_not_moved_past_what_may_change_its_operands(model: nn.Module) -> None:
    fused = gemmnorm.fuse(copy.deepcopy(model))
    assert "in place between" in str(gemmnorm.fuse_report(fused))
    x = torch.randn(16, 6)
    with torch.no_grad():
        wanted, got = model(x.clone()), fused(x.clone())
    assert torch.equal(wanted, got) and torch.equal(model.bn.running_mean, fused.bn.running_mean)


@pytest.mark.parametrize("harmless", [nn.Sequential(nn.ReLU(), nn.Linear(6, 4)), nn.Linear(6, 4), F.relu])
def test_what_changes_nothing_may_stand_between(harmless: Callable[[Tensor], Tensor]) -> None:
    fused = gemmnorm.fuse(Between(harmless))
    assert len(gemmnorm.fuse_report(fused).matches) == 1
    gemmnorm.fuse(fused)  # what is fused already is no stranger
    assert len(gemmnorm.fuse_report(fused).matches) == 1


class Gate(nn.Module):
    """Keeps an auxiliary loss, counts, and has settings."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.calls, self.seen, self.width, self.sizes = None, 0, [], 6, [6, 8]

    def forward(self, x):
        self.loss = x.square().mean() if self.training else None
        self.calls += 1
        self.seen.append(self.width)
        return x


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.fc, self.bn = nn.Sequential(Gate()), nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        y = self.bn(self.fc(self.gate(x)))
        if self.gate[0].loss is not None:
            y = y + self.gate[0].loss
        return y


class WithCount(WithLoss):
    def forward(self, x):
        return self.bn(self.fc(self.gate(x))) * self.gate[0].calls


class WithList(WithLoss):
    def forward(self, x):
        return self.bn(self.fc(self.gate(x))) * len(self.gate[0].seen)


class WithSettings(WithLoss):
    def forward(self, x):
        return self.bn(self.fc(self.gate(x))) * self.gate[0].width * self.gate[0].sizes[1]


@pytest.mark.parametrize("model", [WithLoss, WithCount, WithList])
def test_what_a_child_changes_is_not_read_as_it_was_before(model: type[nn.Module]) -> None:
    plain = model()
    fused = gemmnorm.fuse(copy.deepcopy(plain))
    assert "after calling gate" in str(gemmnorm.fuse_report(fused))
    x = torch.randn(16, 6)
    for training in (True, True, False, True):
        assert torch.equal(plain.train(training)(x), fused.train(training)(x))


def test_settings_of_a_child_may_be_read_after_its_call() -> None:
    fused = gemmnorm.fuse(WithSettings())
    assert len(gemmnorm.fuse_report(fused).matches) == 1
