"""Weights made ready for evaluation ahead of the calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from ..children import matrix
from ..module import LinearScaleBatchNorm1d
from ..runtime import prepared
from ..runtime.call import prepare_weight
from .analysis import check_is_module
from .report import fuse_report

M = TypeVar("M", bound=nn.Module)


def prepare(model: M) -> M:
    """Split the weights of `model`'s fused chains now, so that evaluation in float32 need not do it at each call.

    Serves float32 weights [O, I], and [O, I, 1, …] of convolutions, on a Hopper GPU, where evaluation runs an emulated
    float32 GEMM (`explain` says "three float16 products"); other weights are left alone. A prepared weight takes its
    own memory a second time. The accuracy is the same with and without. Changing a weight in any way undoes it
    (`gemmnorm.runtime.prepared`): call `prepare` again after training or loading. Training and CUDA graphs split the
    weight at each call; autocast has nothing to split.

    Args:
        model: fused, or with `LinearScaleBatchNorm1d` in it; changed in place and returned.

    Raises:
        GemmNormTypeError: `model` is no `nn.Module`.

    Examples:
        >>> model = gemmnorm.prepare(model.eval())
    """
    for weight in _weights(model):
        prepare_weight(weight)
    return model


def unprepare(model: M) -> M:
    """Drop what `prepare` has made, and return `model`.

    Raises:
        GemmNormTypeError: `model` is no `nn.Module`.

    Examples:
        >>> model = gemmnorm.unprepare(model)
    """
    for weight in _weights(model):
        prepared.forget(weight)
    return model


def _weights(model: nn.Module) -> Iterator[Tensor]:
    check_is_module(model)
    for match in fuse_report(model).matches:
        if match.fused:
            weight: Any = model.get_submodule(match.owner).get_submodule(match.linear).weight
            yield matrix(weight)
    for module in model.modules():
        if isinstance(module, LinearScaleBatchNorm1d) and isinstance(module.gemm, nn.Linear):
            yield module.gemm.weight
