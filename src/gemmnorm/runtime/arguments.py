"""Checks of what a caller hands in."""

from __future__ import annotations

import torch

from ..errors import GemmNormProductTypeError, GemmNormProductValueError, GemmNormTypeError, GemmNormValueError
from .operands import CASTABLE, Operands

_VECTORS = ("bias", "running_mean", "running_var", "bn_weight", "bn_bias")


def check_arguments(operands: Operands, training: bool, synchronised: bool = False, cast: bool = False) -> None:
    """Raise for arguments that do not fit together, naming the argument, what was expected and what came.

    One row in training mode is refused, as in BatchNorm1d, unless the statistics are `synchronised` over other ranks.
    x and weight may differ in dtype where autocast, or the call itself, will `cast` them.
    """
    x, weight, scale, counter = operands.x, operands.weight, operands.scale, operands.num_batches_tracked
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise GemmNormProductValueError(
            f"weight: expected [out_features, {x.shape[1]}] for input {tuple(x.shape)}; got {tuple(weight.shape)}"
        )
    features = weight.shape[0]
    if training and not synchronised and x.shape[0] == 1:
        raise GemmNormValueError(
            f"Expected more than 1 value per channel when training, got input size {torch.Size([1, features])}"
        )
    if (operands.running_mean is None) != (operands.running_var is None):
        raise GemmNormProductValueError("running_mean and running_var: expected both or neither; got one of them")
    if not training and operands.running_mean is None:
        raise GemmNormProductValueError("running_mean: expected a tensor when training is False; got None")
    device = x.device
    if not x.is_floating_point():
        raise GemmNormProductTypeError(f"input: expected a floating-point tensor; got {x.dtype}")
    if weight.dtype != x.dtype and not (
        {x.dtype, weight.dtype} <= CASTABLE and (cast or torch.is_autocast_enabled(device.type))
    ):
        raise GemmNormProductTypeError(f"weight: expected the dtype of input, {x.dtype}; got {weight.dtype}")
    if weight.device != device:
        raise GemmNormProductTypeError(f"weight: expected a tensor on {device}, as input is; got {weight.device}")
    for name in _VECTORS:
        vector = getattr(operands, name)
        if vector is None:
            continue
        if not isinstance(vector, torch.Tensor):
            raise GemmNormTypeError(f"{name}: expected a tensor or None; got {type(vector).__name__}")
        if vector.shape != (features,):
            raise GemmNormProductValueError(f"{name}: expected shape ({features},); got {tuple(vector.shape)}")
        if vector.device != device:
            raise GemmNormTypeError(f"{name}: expected a tensor on {device}, as input is; got {vector.device}")
    if scale is not None:
        if tuple(scale.shape) not in ((features,), (1, features), (1,), ()):
            raise GemmNormProductValueError(
                f"scale: expected shape ({features},), (1, {features}), (1,) or (); got {tuple(scale.shape)}"
            )
        if scale.device != device and scale.dim() > 0:
            raise GemmNormTypeError(f"scale: expected a tensor on {device}, as input is; got {scale.device}")
    if counter is not None and not isinstance(counter, torch.Tensor):
        raise GemmNormTypeError(f"num_batches_tracked: expected a tensor or None; got {type(counter).__name__}")
    if counter is not None and counter.numel() != 1:
        raise GemmNormValueError(f"num_batches_tracked: expected one number; got shape {tuple(counter.shape)}")
    if counter is not None and counter.dtype != torch.int64:
        raise GemmNormTypeError(f"num_batches_tracked: expected torch.int64; got {counter.dtype}")
    if counter is not None and counter.device != device:
        raise GemmNormTypeError(f"num_batches_tracked: expected a tensor on {device}; got {counter.device}")
