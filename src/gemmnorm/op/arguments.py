"""Checks of what a caller hands in."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import GemmNormTypeError, GemmNormValueError

CASTABLE = {torch.float32, torch.float16, torch.bfloat16}  # what autocast casts


def check_arguments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | float | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    rows: int,
) -> None:
    """Raise for arguments that do not fit together, naming the argument, what was expected and what came.

    `rows` is the fewest that x may have unless it is empty: 2 where its own rows are all that the statistics see.
    """
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise GemmNormValueError(
            f"weight: expected [out_features, {x.shape[1]}] to go with x {tuple(x.shape)}; got {tuple(weight.shape)}"
        )
    features = weight.shape[0]
    if 0 < x.shape[0] < rows:
        raise GemmNormValueError(
            f"Expected more than 1 value per channel when training, got input size {torch.Size([1, features])}"
        )
    if (running_mean is None) != (running_var is None):
        raise GemmNormValueError("running_mean and running_var: expected both or neither; got one of them")
    if not training and running_mean is None:
        raise GemmNormValueError("running_mean: expected a tensor when training is False; got None")
    device = x.device
    if not x.is_floating_point():
        raise GemmNormTypeError(f"x: expected a floating-point tensor; got {x.dtype}")
    cast = torch.is_autocast_enabled(device.type) and {x.dtype, weight.dtype} <= CASTABLE
    if weight.dtype != x.dtype and not cast:
        raise GemmNormTypeError(f"weight: expected the dtype of x, {x.dtype}; got {weight.dtype}")
    if weight.device != device:
        raise GemmNormTypeError(f"weight: expected a tensor on {device}, as x is; got {weight.device}")
    for name, vector in (
        ("bias", bias),
        ("running_mean", running_mean),
        ("running_var", running_var),
        ("bn_weight", bn_weight),
        ("bn_bias", bn_bias),
    ):
        if vector is None:
            continue
        if vector.shape != (features,):
            raise GemmNormValueError(f"{name}: expected shape ({features},); got {tuple(vector.shape)}")
        if vector.device != device:
            raise GemmNormTypeError(f"{name}: expected a tensor on {device}, as x is; got {vector.device}")
    if isinstance(scale, Tensor):
        if tuple(scale.shape) not in ((features,), (1, features), (1,), ()):
            raise GemmNormValueError(
                f"scale: expected shape ({features},), (1, {features}), (1,) or (); got {tuple(scale.shape)}"
            )
        if scale.device != device and scale.dim() > 0:
            raise GemmNormTypeError(f"scale: expected a tensor on {device}, as x is; got {scale.device}")
    if num_batches_tracked is not None and num_batches_tracked.dtype != torch.int64:
        raise GemmNormTypeError(f"num_batches_tracked: expected torch.int64; got {num_batches_tracked.dtype}")
