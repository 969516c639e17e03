"""Chains over more than a matrix: views between Linear and BatchNorm, convolutions over single positions, wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulator import COMPILER, emulated
from fuse_support import MyLinear, Written, compare
from support import twin
from torch import Tensor, nn

import gemmnorm
from gemmnorm import plan
from gemmnorm.export.model_new import read_model


def by_views(self: Any, x: Tensor) -> Tensor:
    y = self.gemm(x)
    batch, length, features = y.shape
    return self.bn(y.view(batch * length, features)).view(batch, length, features)


def levit(self: Any, x: Tensor) -> Tensor:
    x = self.gemm(x)
    return self.bn(x.flatten(0, 1)).reshape_as(x)


def sizes_of_the_input(self: Any, x: Tensor) -> Tensor:
    b, n, c = x.shape
    return torch.relu(self.bn(self.gemm(x).reshape(b * n, c)).reshape(b, n, c))


VIEWS: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "flatten and back": (levit, (3,)),
    "view and back": (by_views, (3,)),
    "sizes of the input": (sizes_of_the_input, (3,)),
    "known width": (lambda self, x: self.bn((self.gemm(x) * self.scale).reshape(-1, 6)), (2, 3, 4, 5)),
    "scaled rows": (lambda self, x: torch.relu(self.bn(self.gemm(x).view(-1, 6) * self.scale)), (2, 3, 4, 5)),
    "transpose": (lambda self, x: torch.relu(self.bn(self.gemm(x).transpose(1, 2))).transpose(1, 2), (3,)),
    "permute": (lambda self, x: self.bn(self.gemm(x).permute(0, 2, 1).contiguous()), (3,)),
    "mT": (lambda self, x: self.bn(self.gemm(x).mT), (3,)),
    "movedim": (lambda self, x: self.bn(torch.movedim(self.gemm(x), -1, 1)), (2, 3)),
    "scaled, then laid out": (lambda self, x: self.bn((self.gemm(x) * self.scale).transpose(-1, 1)), (2, 3)),
    "a number after it": (lambda self, x: self.bn(self.gemm(x).transpose(1, 2) * 0.5), (3,)),
    "unsqueeze": (lambda self, x: self.bn(self.gemm(x).unsqueeze(2)), (2,)),
    "clone": (lambda self, x: self.bn(self.gemm(x).clone()), (2,)),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views_between(name: str, calls: list[Any]) -> None:
    forward, ranks = VIEWS[name]
    shapes = {2: (5, 6), 3: (3, 4, 6), 4: (2, 3, 2, 6), 5: (2, 1, 3, 2, 6)}
    for rank in ranks:
        calls.clear()
        fused = compare(Written(forward), torch.randn(shapes[rank]))
        assert len(calls) == 3
    (match,) = gemmnorm.fuse_report(fused).matches
    assert match.fused


def test_other_dimensions_run_the_modules(calls: list[Any]) -> None:
    """Where features and positions would be taken for each other, the original answers, or raises."""
    compare(Written(lambda self, x: self.bn(self.gemm(x).transpose(-1, -2))), torch.randn(6, 6))
    compare(Written(lambda self, x: self.bn(self.gemm(x).flatten(0, 1))), torch.randn(2, 3, 6, 6))
    assert not calls


def test_a_view_may_hold_modules(calls: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Identity(), nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.ReLU())
    fused = compare(model, torch.randn(3, 4, 6))
    assert len(calls) == 3
    assert str(gemmnorm.fuse_report(fused).matches[0]).startswith("0 → 1 (Identity) → 2 (Flatten) → 3 → relu")
    for change in (
        lambda m: m.__setitem__(1, nn.Softplus()),
        lambda m: m[1].register_forward_hook(lambda module, args, y: y * 2),
        lambda m: setattr(m[2], "start_dim", 1),
    ):
        calls.clear()
        changed, plain = copy.deepcopy(fused), gemmnorm.unfuse(copy.deepcopy(fused))
        change(changed), change(plain)
        x = torch.randn(3, 8, 6, dtype=torch.float64)
        torch.testing.assert_close(changed(x), plain(x))
        assert not calls


BETWEEN: dict[str, tuple[Any, str]] = {
    "features merged": (lambda self, x: self.bn(self.gemm(x).flatten(1)), ""),
    "unknown width": (lambda self, x: self.bn(self.gemm(x).view(x.size(0) * x.size(1), -1)), "view"),
    "another width": (lambda self, x: self.bn(self.gemm(x).view(-1, 3, 2)), "view"),
    "positions": (lambda self, x: self.bn(self.gemm(x).view(-1, 3, 6)), "not certain to be where bn"),
    "the value is wanted": (lambda self, x: self.bn(self.gemm(x).t()), "not certain"),
    "two scales": (lambda self, x: self.bn(self.gemm(x).mul(2).flatten(0, 1) * 2), "stand between"),
    "scale over positions": (lambda self, x: self.bn(self.gemm(x).mT * self.scale), "not certain"),
    "matmul": (lambda self, x: self.bn(x @ self.gemm.weight), "only an nn.Linear is fused"),
    "F.conv1d": (lambda self, x: self.bn(F.conv1d(x, self.gemm.weight[..., None])), "only an nn.Conv1d is fused"),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_refused_views(name: str) -> None:
    forward, reason = BETWEEN[name]
    report = gemmnorm.fuse_report(Written(forward))
    if not reason:  # for a matrix that view does nothing
        assert not report.refusals and "(2,)" not in str(report)
        return
    assert not report.matches and [reason in r.reason for r in report.refusals] == [True], report


CONVERTED: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "flatten and back": (lambda: Written(levit), torch.randn(3, 4, 6), 3),
    "movedim": (lambda: Written(VIEWS["movedim"][0]), torch.randn(3, 4, 6), 3),
    "four dimensions": (
        lambda: Written(lambda self, x: self.n(self.gemm(x).permute(0, 3, 1, 2)), n=nn.BatchNorm2d(6)),
        torch.randn(2, 3, 4, 6), 3,
    ),
    "a convolution": (
        lambda: nn.Sequential(nn.Conv1d(6, 4, 1), nn.BatchNorm1d(4)), torch.randn(3, 5, 6).movedim(-1, 1), 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERTED)
def test_a_norm_converted_before_or_after(name: str, calls: list[Any]) -> None:
    """To SyncBatchNorm, over one rank: the same chain, but after a convolution."""
    make, x, count = CONVERTED[name]
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    before = compare(convert(make()), x)
    assert len(calls) == count and len(gemmnorm.fuse_report(before).matches) == bool(count)
    after = convert(gemmnorm.fuse(make().double()))
    after.load_state_dict(before.state_dict())
    torch.testing.assert_close(after(x.double()), before(x.double()))
    assert [m.fused for m in gemmnorm.fuse_report(after).matches] == [True] * bool(count)


# --- convolutions over single positions


def channels_last(*shape: int) -> Tensor:
    """A tensor [N, C, ...] that lies in memory as [N, ..., C]."""
    return torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


POINTWISE: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(6, 4, 1), nn.BatchNorm1d(4), nn.ReLU()), channels_last(3, 6, 5)),
    "Conv2d": (
        lambda: nn.Sequential(nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        channels_last(3, 6, 2, 5),
    ),
    "padding by name": (
        lambda: nn.Sequential(nn.Conv2d(6, 8, 1, padding="same"), nn.BatchNorm2d(8)), channels_last(3, 6, 2, 5)
    ),
    "a number": (lambda: Written(lambda self, x: self.n(self.c(x) * 3), c=nn.Conv2d(6, 4, 1), n=nn.BatchNorm2d(4)),
                 channels_last(3, 6, 2, 2)),
    "Linear": (
        lambda: Written(lambda self, x: self.n(self.gemm(x).permute(0, 3, 1, 2)), n=nn.BatchNorm2d(6)),
        torch.randn(2, 3, 4, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POINTWISE)
def test_convolutions_over_single_positions(name: str, calls: list[Any]) -> None:
    make, x = POINTWISE[name]
    compare(make(), x)
    assert len(calls) == 3
    calls.clear()
    if name != "Linear":
        compare(make(), x.contiguous())
        assert not calls


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv1d(3, 6, 1), nn.Conv1d(6, 8, 1), nn.Conv1d(8, 4, 1)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(6), nn.BatchNorm1d(8), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return torch.max(x, 2, keepdim=True)[0].view(-1, 4)


def test_from_one_convolution_to_the_next_nothing_is_copied(calls: list[Any]) -> None:
    compare(PointNet(), torch.randn(4, 3, 7))
    assert len(calls) == 9


REORDERED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "transpose": lambda self, x: self.bn(self.gemm(x).transpose(1, 2)).transpose(1, 2),
    "permute": lambda self, x: self.bn(self.gemm(x).transpose(1, 2)).permute(2, 0, 1),
    "mT": lambda self, x: self.bn(self.gemm(x).transpose(1, 2)).mT,
}


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("name", REORDERED)
def test_a_result_that_is_only_reordered_lies_as_it_would(name: str) -> None:
    """The caller may `view` what it makes of it."""
    original, x = Written(REORDERED[name]), torch.randn(5, 7, 6)
    fused = gemmnorm.fuse(twin(original))
    with emulated(plan.chip_for(90, 3)), gemmnorm.set_strategy("cublas_folded_bn"):
        y, like = fused(x), original(x)
    assert gemmnorm.fuse_report(fused, calls=True).matches[0].calls.fused == 1  # type: ignore[union-attr]
    assert y.stride() == like.stride()
    torch.testing.assert_close(y, like, rtol=1e-4, atol=1e-5)


def test_a_result_that_leaves_lies_as_it_would(calls: list[Any]) -> None:
    """Nobody knows who will ask for a view of it, so a contiguous input is not worth a copy."""
    compare(nn.Sequential(nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6)), torch.randn(4, 3, 7))
    assert not calls


@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        (nn.Conv1d(6, 6, 1, stride=2), "0 has a stride"),
        (nn.Conv1d(6, 6, 1, groups=2), "0 has 2 groups"),
        (nn.Conv1d(6, 6, 1, padding=1), "0 has padding"),
    ],
)
def test_other_convolutions_are_named(conv: nn.Module, reason: str) -> None:
    report = gemmnorm.fuse_report(nn.Sequential(conv, nn.BatchNorm1d(6)))
    assert [reason in r.reason for r in report.refusals] == [True] and not report.matches


def test_wide_kernels_are_no_near_miss() -> None:
    report = gemmnorm.fuse_report(nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)))
    assert not report.refusals and not report.matches


# --- subclasses


class Renamed(nn.Linear):
    def __init__(self, features: int) -> None:
        super().__init__(features, features, bias=False)


class OtherCheck(nn.BatchNorm1d):
    def _check_input_dim(self, input: Tensor) -> None:
        raise ValueError("no")


def test_a_subclass_without_a_forward_of_its_own_is_the_same(calls: list[Any]) -> None:
    compare(nn.Sequential(Renamed(6), nn.BatchNorm1d(6)), torch.randn(5, 6))
    assert len(calls) == 3
    for model in (nn.Sequential(MyLinear(6, 6), nn.BatchNorm1d(6)), nn.Sequential(nn.Linear(6, 6), OtherCheck(6))):
        (refusal,) = gemmnorm.fuse_report(model).refusals
        assert "may compute something else" in refusal.reason


@pytest.mark.parametrize("fullgraph", [True])
def test_torch_compile_takes_views_and_convolutions(fullgraph: bool) -> None:
    torch._dynamo.reset()
    for model, x in ((Written(levit), torch.randn(3, 4, 6)), (PointNet(), torch.randn(4, 3, 7))):
        fused = gemmnorm.fuse(twin(model))
        compiled = torch.compile(fused, backend="aot_eager", fullgraph=fullgraph)
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(fused.state_dict(), model.state_dict())


def test_an_exported_file_leaves_other_chains_to_the_modules(tmp_path: Any) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))\n"
        "        flat = torch.nn.Flatten(0, -2)\n"
        "        self.b = torch.nn.Sequential(torch.nn.Linear(8, 8), flat, torch.nn.BatchNorm1d(8))\n"
        "\n    def forward(self, x):\n        return self.b(self.a(x))\n\n\n"
        "def get_inputs():\n    return [torch.randn(4, 8)]\n\n\ndef get_init_inputs():\n    return []\n"
    )
    found = read_model(path)
    assert [str(m) for m in found.report.matches] == ["a.0 → a.1  (8 → 8)"]
    assert ["an exported file holds only" in r.reason for r in found.report.refusals] == [True]


# --- what a `forward` asks of its inputs


def guarded(self: Any, x: Tensor) -> Tensor:
    x = self.gemm(x)
    if x.shape[0] > 1:
        x = self.bn(x)
    return torch.relu(x)


def guarded_in_training(self: Any, x: Tensor) -> Tensor:
    if self.training and len(x) == 1:
        return self.gemm(x)
    return self.bn(self.gemm(x))


def any_rank(self: Any, x: Tensor) -> Tensor:
    if x.dim() == 3:
        return self.bn(self.gemm(x).flatten(0, 1)).view(x.size(0), x.size(1), -1)
    return self.bn(self.gemm(x))


def checked(self: Any, x: Tensor) -> Tensor:
    assert x.shape[1] == 6 and x.ndim <= 2
    if x.size(0) * 2 < 4:
        raise ValueError("too few")
    return self.bn(self.gemm(x))


def of_a_tuple(self: Any, x: Any) -> Tensor:
    if isinstance(x, (tuple, list)):
        x = x[0]
    return self.bn(self.gemm(x))


def of_optional(self: Any, x: Tensor, flag: Any = None) -> Any:
    y = self.bn(self.gemm(x))
    return (y, y) if isinstance(flag, bool) else y


ASKING = {f.__name__: f for f in (guarded, guarded_in_training, any_rank, checked, of_a_tuple, of_optional)}


@pytest.mark.parametrize("name", ASKING)
def test_questions_about_an_input(name: str, calls: list[Any]) -> None:
    """What is recorded holds for the usual input; for others the original runs."""
    fused = compare(Written(ASKING[name]), torch.randn(5, 6))
    assert len(calls) == 3
    plain = gemmnorm.unfuse(twin(fused))
    for x in (torch.randn(1, 6), torch.randn(2, 3, 6), torch.randn(6), (torch.randn(5, 6), 1), torch.randn(5, 7)):
        x = (x[0].double(), 1) if isinstance(x, tuple) else x
        outcomes = []
        for module in (fused, plain):
            try:
                outcomes.append(module(x))
            except Exception as error:
                outcomes.append(type(error))
        if isinstance(outcomes[1], Tensor):
            torch.testing.assert_close(*outcomes)
        else:
            assert issubclass(outcomes[0], Exception)
    torch.testing.assert_close([*fused.parameters(), fused.bn.running_var], [*plain.parameters(), plain.bn.running_var])


def test_a_question_about_another_value_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.gemm(torch.nonzero(x).to(x.dtype))
        return self.bn(x) if x.shape[0] > 1 else x

    (refusal,) = gemmnorm.fuse_report(Written(forward)).refusals
    assert "decides by the shape of a value that it computes" in refusal.reason


def test_the_namespace_of_the_user_is_left_as_it_was() -> None:
    gemmnorm.fuse(Written(of_a_tuple))
    assert "isinstance" not in globals() and "len" not in globals()


def test_keyword_arguments_that_are_only_handed_on(calls: list[Any]) -> None:
    class Given(Written):
        def __init__(self) -> None:
            super().__init__(lambda self, x, *more, key=None, **other: self.bn(self.gemm(x)) * other.get("by", 1))

    fused = compare(Given(), torch.randn(5, 6))
    assert len(calls) == 3
    plain = gemmnorm.unfuse(twin(fused))
    x = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(fused(x, 1, by=3), plain(x, 1, by=3))
    assert len(calls) == 3
