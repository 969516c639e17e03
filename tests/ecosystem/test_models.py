"""Fused against unfused, in float64, of the models that users train: outputs, gradients, buffers, keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import gemmnorm


def compare(
    make: Callable[[], nn.Module], inputs: tuple[Any, ...], chains: int, calls: list[Any], runs: int | None = None
) -> None:
    """Two steps of training and an evaluation. `chains`: in the report; `runs`: fused calls of one forward."""
    fused, model = (_made(make) for _ in range(2))
    assert gemmnorm.fuse(fused) is fused
    report = gemmnorm.fuse_report(fused)
    assert len(report.matches) == chains and all(match.fused for match in report.matches), report
    for training in (True, True, False):
        found: list[list[Tensor]] = []
        for module in (fused, model):
            calls.clear() if module is fused else None
            module.train(training).zero_grad()
            given = [_leaf(value) for value in inputs]
            torch.manual_seed(5)
            outputs = [t for t in tree_leaves(module(*given)) if isinstance(t, Tensor)]
            sum((y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum() for y in outputs).backward()
            gradients = [g.grad for g in (*given, *module.parameters()) if getattr(g, "grad", None) is not None]
            found.append([*outputs, *gradients, *module.state_dict().values()])
        torch.testing.assert_close(*found)
        assert len(calls) == (chains if runs is None else runs)
    assert list(fused.state_dict()) == list(model.state_dict())
    model.load_state_dict(fused.state_dict())


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make().double()


def _leaf(value: Any) -> Any:
    """Floating point in float64, to be differentiated; with the strides that it has."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_()
    return value


def images(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)


def channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


# --- lightly

HEADS: dict[str, tuple[tuple[Any, ...], int]] = {
    "BYOLPredictionHead": ((8, 16, 8), 1),
    "BYOLProjectionHead": ((8, 16, 8), 1),
    "BarlowTwinsProjectionHead": ((8, 16, 8), 2),
    "DINOProjectionHead": ((8, 16, 8, 12, True), 2),
    "MMCRProjectionHead": ((8, 16, 8), 2),
    "MoCoProjectionHead": ((8, 16, 8, 2, True), 2),
    "NNCLRPredictionHead": ((8, 16, 8), 1),
    "NNCLRProjectionHead": ((8, 16, 8), 3),
    "SMoGPredictionHead": ((8, 16, 8), 1),
    "SMoGProjectionHead": ((8, 16, 8), 2),
    "SimCLRProjectionHead": ((8, 16, 8, 2, True), 2),
    "SimSiamPredictionHead": ((8, 16, 8), 1),
    "SimSiamProjectionHead": ((8, 16, 8), 3),
    "SwaVProjectionHead": ((8, 16, 8), 1),
    "TiCoProjectionHead": ((8, 16, 8), 1),
    "VICRegProjectionHead": ((8, 16, 8), 2),
}


@pytest.mark.parametrize("name", HEADS)
def test_lightly(name: str, calls: list[Any]) -> None:
    heads = pytest.importorskip("lightly.models.modules.heads")
    arguments, chains = HEADS[name]
    compare(lambda: getattr(heads, name)(*arguments), (torch.randn(6, 8),), chains, calls)


class BarlowTwins(nn.Module):
    """As the paper's code has it: the BatchNorm of the loss follows the projector's last Linear."""

    def __init__(self, projector: nn.Module) -> None:
        super().__init__()
        self.projector = projector
        self.bn = nn.BatchNorm1d(8, affine=False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.bn(self.projector(a)).T @ self.bn(self.projector(b))


def test_lightly_barlow_twins_with_its_last_batch_norm(calls: list[Any]) -> None:
    heads = pytest.importorskip("lightly.models.modules.heads")
    compare(
        lambda: BarlowTwins(heads.BarlowTwinsProjectionHead(8, 16, 8)),
        (torch.randn(6, 8), torch.randn(6, 8)),
        3,
        calls,
        runs=6,
    )


# --- timm, torchvision


def test_timm_levit(calls: list[Any]) -> None:
    timm = pytest.importorskip("timm")
    compare(lambda: timm.create_model("levit_128s", num_classes=10), (torch.randn(2, 3, 224, 224),), 46, calls)


def test_timm_bottlenecks(calls: list[Any]) -> None:
    timm = pytest.importorskip("timm")
    compare(lambda: channels_last(timm.create_model("resnet26", num_classes=4)), (images(2, 64),), 17, calls)


def test_torchvision_mobilenet(calls: list[Any]) -> None:
    models = pytest.importorskip("torchvision.models")
    compare(lambda: channels_last(models.mobilenet_v2(width_mult=0.25, num_classes=4)), (images(2, 64),), 34, calls)


# --- PyTorch Geometric

EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])


GRAPHS: dict[str, tuple[Callable[[Any], nn.Module], int]] = {
    # Nothing says that what `propagate` gives is not None; what GINConv compares is a part of its input.
    "GIN": (lambda g: g.GIN(8, 16, 3, norm="batch_norm", dropout=0.2), 5),
    "GINConv": (lambda g: g.GINConv(g.MLP([8, 16, 16], act="leaky_relu")), 1),
    "GINConv of a Sequential": (
        lambda g: g.GINConv(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))), 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_geometric(name: str, calls: list[Any]) -> None:
    geometric = pytest.importorskip("torch_geometric.nn")
    make, chains = GRAPHS[name]
    compare(lambda: make(geometric), (torch.randn(6, 8), EDGES), chains, calls)


@pytest.mark.parametrize("arguments", [{}, {"plain_last": False}, {"act_first": True}, {"norm": "layer_norm"}])
def test_geometric_mlp(arguments: dict[str, Any], calls: list[Any]) -> None:
    geometric = pytest.importorskip("torch_geometric.nn")
    chains = 2 + ("plain_last" in arguments) - 2 * ("act_first" in arguments or "norm" in arguments)
    compare(lambda: geometric.MLP([8, 16, 16, 4], dropout=0.3, **arguments), (torch.randn(6, 8),), chains, calls)
