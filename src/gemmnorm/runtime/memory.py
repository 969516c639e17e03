"""What a plan allocates besides a call's operands, and which roles are parts of one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import CAST, DTYPE_BYTES, Buffer, Plan, Problem, Product

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
}
# What a forward keeps per feature, as rows of one float32 tensor `statistics` [2 or 2 + groups, O]: the mean of the
# product, 1/sqrt(var + eps), and where the product is stored minus means of groups of rows, those. With statistics over
# several ranks the number of all rows comes third; where the plan is cut (`plan.ranks`) the groups' means are a tensor
# of their own.
_KEPT = ("mean", "rstd", "row_count", "group_mean")
# Likewise what ranks add up in a backward: `sums` [2, O].
_SUMMED = ("mean_grad", "slope_grad")
# Bytes of scratch that a stream keeps for the plans that need no more: an allocation less for each of their calls.
BORROWED = 1 << 20


def _dense(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a contiguous tensor."""
    return shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _statistics_offset(problem: Problem) -> int:
    """Where the statistics begin in a `packed` forward's `kept`, behind the product: in bytes."""
    return -(-problem.batch * problem.out_features * DTYPE_BYTES[problem.dtype] // 256) * 256


def unpacked(kept: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Product [B, O] and statistics [2 or 2 + groups, O], as views of what a `packed` forward keeps."""
    shape, dtype = (problem.batch, problem.out_features), DTYPES[problem.dtype]
    product = kept[: math.prod(shape) * DTYPE_BYTES[problem.dtype]].view(dtype).view(shape)
    return product, kept[_statistics_offset(problem) :].view(torch.float32).view(-1, shape[1])


@dataclass(frozen=True)
class Made:
    """A tensor that a call allocates."""

    role: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    only_for: str = ""


class Memory:
    """What a plan allocates: its outputs, then what dies with the call; and the roles that are parts of other tensors.

    Attributes:
        tensors: outputs first, `outputs` of them.
        parts: role, the tensor that it is part of, byte offset.
        borrowed: bytes of scratch that the stream keeps for it, or 0.
    """

    def __init__(self, chosen: Plan, inputs: Sequence[str], packed: bool) -> None:
        batch, features = chosen.problem.batch, chosen.problem.out_features
        self.tensors: list[Made] = []
        self.parts: list[tuple[str, str, int]] = []

        def shape(buffer: Buffer) -> tuple[int, ...]:
            return tuple(extent.value(batch) for extent in buffer.shape)

        def allocate(buffer: Buffer) -> None:
            sizes, strides = _dense(shape(buffer))
            strides = (buffer.pitch, 1) if buffer.pitch else strides
            self.tensors.append(Made(buffer.role, sizes, strides, DTYPES[buffer.dtype], buffer.only_for))

        host, begin = ("kept", _statistics_offset(chosen.problem)) if packed else ("statistics", 0)
        sums = any(buffer.role in _SUMMED for buffer in chosen.outputs)
        into, of_features = ("sums", _SUMMED) if sums else (host, _KEPT)
        if packed:
            self.parts.append(("product", host, 0))
        kept = [b for role in of_features for b in chosen.outputs if b.role == role]
        made = [b for b in chosen.outputs if b.role in CAST]
        for buffer in chosen.outputs:
            if buffer not in (*kept, *made) and not (packed and buffer.role == "product"):
                allocate(buffer)
        if kept:
            rows = 0
            for buffer in kept:
                self.parts.append((buffer.role, into, begin + 4 * features * rows))
                rows += math.prod(shape(buffer)) // features
            whole, dtype = (
                ((begin + 4 * features * rows,), torch.uint8) if packed else ((rows, features), torch.float32)
            )
            self.tensors.append(Made(host if packed else into, *_dense(whole), dtype))
        for buffer in made:
            allocate(buffer)
        self.outputs = len(self.tensors)
        operands = {
            role for step in chosen.steps if isinstance(step, Product) for role in (step.out, step.left, step.right)
        }
        operands |= {m.tensor for launch in chosen.launches for m in launch.maps}
        size = 0
        for buffer in chosen.workspace:
            elements = math.prod(extent.value(batch) for extent in buffer.stored)
            bytes_ = -(-elements * DTYPE_BYTES[buffer.dtype] // 256) * 256
            if buffer.role in operands or bytes_ > BORROWED:
                allocate(buffer)
            else:
                self.parts.append((buffer.role, "scratch", size))
                size += bytes_
        # One kernel after the other may use what the stream keeps; several of a plan might have others in between.
        self.borrowed = size if size <= BORROWED and len(chosen.steps) == 1 else 0
        if size and not self.borrowed:
            self.tensors.append(Made("scratch", *_dense((size,)), torch.uint8))
        of_ranks = ("row_count",) if "offset" in inputs or "peers" in inputs else ()
        offset = ("offset",) if chosen.keeps_offsets and "offset" not in inputs else ()
        for tensor, roles in ((host, (*_KEPT[:2], *of_ranks, *offset)), ("sums", _SUMMED)):
            if tensor in inputs:
                self.parts += [(role, tensor, begin + 4 * features * row) for row, role in enumerate(roles)]
