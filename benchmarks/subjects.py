"""The models that `benchmarks/models.py` times, with the batch, dtype and optimizer of those who train them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Subject:
    """A model and how it is trained.

    Attributes:
        model: on the CPU, in float32.
        inputs: of its `forward`.
        loss: of its output, a scalar.
        optimizer: of its parameters.
        dtype: of autocast; None trains in float32.
        batch: in words.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[[Any], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch: str
    dtype: torch.dtype | None = None


def block(inputs: int, features: int, *more: nn.Module, bias: bool = False, affine: bool = True) -> list[nn.Module]:
    return [nn.Linear(inputs, features, bias=bias), nn.BatchNorm1d(features, affine=affine), *more]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def of_class(classes: int, batch: int) -> Callable[[Tensor], Tensor]:
    """Cross-entropy with labels drawn once."""
    labels = torch.randint(classes, (batch,))
    return lambda logits: F.cross_entropy(logits, labels.to(logits.device))


def levit(tiny: bool) -> Subject:
    """LeViT's own recipe: 256 images of 224 × 224 a GPU, float16 autocast, AdamW."""
    import timm

    batch, name = (2, "levit_128s") if tiny else (256, "levit_384")
    images = torch.randn(batch, 3, 224, 224)
    return Subject(
        timm.create_model(name), (images,), of_class(1000, batch), adamw, f"{batch} images", torch.float16
    )  # fmt: skip


class Transform(nn.Module):
    """PointNet's T-Net: [N, C, L] → a matrix [N, C, C] close to one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.points = nn.Sequential(*pointwise(channels, 64), *pointwise(64, 128), *pointwise(128, 1024))
        self.head = nn.Sequential(
            *block(1024, 512, nn.ReLU(), bias=True), *block(512, 256, nn.ReLU(), bias=True),
            nn.Linear(256, channels * channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.points(x).amax(2)).view(-1, self.channels, self.channels)
        return found + torch.eye(self.channels, device=x.device, dtype=found.dtype)


def pointwise(inputs: int, features: int) -> list[nn.Module]:
    return [nn.Conv1d(inputs, features, 1), nn.BatchNorm1d(features), nn.ReLU()]


class PointNet(nn.Module):
    """Classification as in the paper (Qi et al. 2017): points [N, 3, L] → logits [N, 40] and the feature transform."""

    def __init__(self) -> None:
        super().__init__()
        self.input_transform, self.feature_transform = Transform(3), Transform(64)
        self.low = nn.Sequential(*pointwise(3, 64), *pointwise(64, 64))
        self.high = nn.Sequential(*pointwise(64, 64), *pointwise(64, 128), *pointwise(128, 1024))
        self.head = nn.Sequential(
            *block(1024, 512, nn.ReLU(), bias=True), *block(512, 256, nn.ReLU(), bias=True),
            nn.Dropout(0.3), nn.Linear(256, 40),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.bmm(x.transpose(1, 2), self.input_transform(x)).transpose(1, 2)
        x = self.low(x)
        matrix = self.feature_transform(x)
        x = torch.bmm(x.transpose(1, 2), matrix).transpose(1, 2)
        return self.head(self.high(x).amax(2)), matrix


def pointnet(tiny: bool) -> Subject:
    """The paper's: 32 clouds of 1024 points, float32, Adam, the feature transform held near a rotation."""
    batch, points = (4, 32) if tiny else (32, 1024)
    classes = of_class(40, batch)

    def loss(found: tuple[Tensor, Tensor]) -> Tensor:
        logits, matrix = found
        unlike = torch.bmm(matrix, matrix.transpose(1, 2)) - torch.eye(64, device=matrix.device, dtype=matrix.dtype)
        return classes(logits) + 1e-3 * unlike.norm(dim=(1, 2)).mean()

    return Subject(PointNet(), (torch.randn(batch, 3, points),), loss, adam, f"{batch} × {points} points")


class GraphClassifier(nn.Module):
    """PyG's GIN, summed over each graph, and a Linear."""

    def __init__(self, channels: int, graphs: int) -> None:
        super().__init__()
        from torch_geometric.nn import GIN

        self.gin = GIN(channels, channels, 5, dropout=0.5, norm="batch_norm")
        self.head = nn.Linear(channels, 1)
        self.graphs = graphs

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        nodes = self.gin(x, edges)
        y: Tensor = self.head(nodes.new_zeros(self.graphs, nodes.shape[1]).index_add(0, graph, nodes))
        return y


def gin(tiny: bool) -> Subject:
    """The Open Graph Benchmark's example for molecules: 32 graphs of about 26 atoms, 300 channels, float32, Adam."""
    graphs, atoms, channels = (4, 5, 16) if tiny else (32, 26, 300)
    ring = torch.arange(graphs * atoms).view(graphs, atoms)
    edges = torch.stack([ring, ring.roll(1, 1)]).flatten(1)
    edges = torch.cat([edges, edges.flip(0)], 1)
    target = torch.rand(graphs, 1).round()
    return Subject(
        GraphClassifier(channels, graphs),
        (torch.randn(graphs * atoms, channels), edges, torch.arange(graphs).repeat_interleave(atoms)),
        lambda y: F.binary_cross_entropy_with_logits(y, target.to(y)),
        adam,
        f"{graphs} graphs, {graphs * atoms} nodes",
    )


class SimSiam(nn.Module):
    """Projection and prediction of two views' features, as lightly has them."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.project = nn.Sequential(
            *block(features, features, nn.ReLU()), *block(features, features, nn.ReLU()),
            *block(features, features, affine=False),
        )  # fmt: skip
        self.predict = nn.Sequential(*block(features, hidden, nn.ReLU()), nn.Linear(hidden, features))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        za, zb = self.project(a), self.project(b)
        return self.predict(za), self.predict(zb), za.detach(), zb.detach()


def simsiam(tiny: bool) -> Subject:
    """The paper's heads on ResNet-50 features: 256 images a GPU, float32, SGD."""
    batch, features, hidden = (8, 32, 16) if tiny else (256, 2048, 512)

    def loss(found: tuple[Tensor, ...]) -> Tensor:
        pa, pb, za, zb = found
        return -0.5 * (F.cosine_similarity(pa, zb).mean() + F.cosine_similarity(pb, za).mean())

    views = (torch.randn(batch, features), torch.randn(batch, features))
    return Subject(SimSiam(features, hidden), views, loss, sgd, f"2 × {batch}")


class BarlowTwins(nn.Module):
    """The paper's projector; the BatchNorm of its loss follows the last Linear. → cross-correlation [D, D]."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.projector = nn.Sequential(
            *block(features, hidden, nn.ReLU()), *block(hidden, hidden, nn.ReLU()),
            nn.Linear(hidden, hidden, bias=False),
        )  # fmt: skip
        self.bn = nn.BatchNorm1d(hidden, affine=False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.bn(self.projector(a)).T @ self.bn(self.projector(b)) / len(a)


def barlow(tiny: bool) -> Subject:
    """The paper's code: float16 autocast, its batch of 2048 on eight GPUs; SGD in place of LARS."""
    batch, features, hidden = (8, 32, 48) if tiny else (256, 2048, 8192)

    def loss(found: Tensor) -> Tensor:
        on = (found.diagonal() - 1).square().sum()
        return on + 0.0051 * (found.square().sum() - found.diagonal().square().sum())

    views = (torch.randn(batch, features), torch.randn(batch, features))
    return Subject(BarlowTwins(features, hidden), views, loss, sgd, f"2 × {batch}", torch.float16)


def tabular(tiny: bool) -> Subject:
    """Three layers of 512 on a table of 54 columns and 7 classes (Covertype): 1024 rows, float32, AdamW."""
    batch, width = (16, 24) if tiny else (1024, 512)
    layers = [block(n, width, nn.ReLU(), nn.Dropout(0.1), bias=True) for n in (54, width, width)]
    model = nn.Sequential(*(module for layer in layers for module in layer), nn.Linear(width, 7))
    return Subject(model, (torch.randn(batch, 54),), of_class(7, batch), adamw, f"{batch} rows")


class CriticBlock(nn.Module):
    """FlashSAC's residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm1d(4 * width, momentum=0.01), nn.BatchNorm1d(width, momentum=0.01)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.widen(x)))
        return F.relu(self.norm2(self.narrow(y))) + x


def flashsac(tiny: bool) -> Subject:
    """FlashSAC's: 2048 transitions, float16 autocast, Adam."""
    batch, width = (16, 8) if tiny else (2048, 256)
    target = torch.randn(batch, width)
    x = torch.randn(batch, width)
    return Subject(
        CriticBlock(width), (x,), lambda y: F.mse_loss(y.float(), target.to(y.device)), adam, f"{batch} rows",
        torch.float16,
    )  # fmt: skip


def projector(tiny: bool) -> Subject:
    """Linear → BatchNorm → ReLU three times, in float32: 2048 → 8192 → 8192 → 8192, 2048 rows, SGD."""
    batch, features, hidden = (8, 32, 48) if tiny else (2048, 2048, 8192)
    model = nn.Sequential(*(m for n in (features, hidden, hidden) for m in block(n, hidden, nn.ReLU())))
    x = torch.randn(batch, features)
    target = torch.rand(batch, hidden)
    return Subject(model, (x,), lambda y: F.mse_loss(y, target.to(y)), sgd, f"{batch} rows")


MODELS: dict[str, Callable[[bool], Subject]] = {
    found.__name__: found for found in (levit, pointnet, gin, simsiam, barlow, tabular, flashsac, projector)
}
