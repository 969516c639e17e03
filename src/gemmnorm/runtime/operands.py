"""What a call is made of, `Operands` and `Options`; tensors as the kernels read them; and when two calls are alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import GemmNormRuntimeError

CASTABLE = {torch.float32, torch.float16, torch.bfloat16}  # what autocast casts
_VECTOR_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


class Differentiable(NamedTuple):
    """The operands that have a gradient, in their order among `Operands`; also their gradients."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    bn_weight: Tensor | None
    bn_bias: Tensor | None


# What autograd kept for a backward: `Differentiable`, then what the forward gave. Who gets such a list empties it.
Saved = list[Tensor | None]


class Operands(NamedTuple):
    """The tensors of a call, in the one order that the operator, the binding and the kernels share.

    x [B, I], weight [O, I], scale [O], [1, O], [1] or [], num_batches_tracked [] (int64); the others [O].
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    num_batches_tracked: Tensor | None = None
    bn_weight: Tensor | None = None
    bn_bias: Tensor | None = None

    @property
    def differentiable(self) -> Differentiable:
        return Differentiable(self.x, self.weight, self.bias, self.scale, self.bn_weight, self.bn_bias)

    @property
    def require_gradients(self) -> bool:
        """Any of them does."""
        return any(t is not None and t.requires_grad for t in self)


class Options(NamedTuple):
    """What a call is told besides its tensors, in the operators' order.

    Attributes:
        scale_value: the scale where it is a number; 1.0 where it is a tensor or absent.
        training: normalise with the statistics of this batch.
        momentum: weight of the new running statistics; negative for the cumulative average.
        eps: added to the variance.
        activation: a name of `gemmnorm.activations`, or None.
        strategy: the one asked for; None leaves the choice to the planner.
        save: keep what a backward needs. (On the way to a prepared call: where an operand requires a gradient.)
        keep_product: the product is part of that; False: the backward multiplies again; None leaves it to the planner.
            Of a prepared call never None, and True where it cannot be multiplied again.
        cast: autocast's dtype, to which the call casts x and weight; None multiplies them as they are.
    """

    scale_value: float = 1.0
    training: bool = True
    momentum: float = 0.1
    eps: float = 1e-5
    activation: str | None = None
    strategy: str | None = None
    save: bool = False
    keep_product: bool | None = None
    cast: torch.dtype | None = None


def multiplied_dtype(t: Tensor, cast: torch.dtype | None) -> torch.dtype:
    """The dtype in which x or the weight is multiplied, by `Options.cast`. Autocast leaves float64 alone."""
    return t.dtype if cast is None or t.dtype not in CASTABLE else cast


def cast_operands(operands: Operands, cast: torch.dtype | None) -> Operands:
    """x and weight as they are multiplied; statistics and BatchNorm's parameters stay as they are."""
    if cast is None:
        return operands
    x, weight = (t.to(multiplied_dtype(t, cast)) for t in operands[:2])
    return operands._replace(x=x, weight=weight)


def dense(t: Tensor) -> Tensor:
    """Contiguous and aligned to 16 bytes, as the kernels read it."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


def vector_dtype(*vectors: Tensor | None) -> torch.dtype:
    """The one dtype of vectors, if the kernels know it; else float32."""
    dtypes = {v.dtype for v in vectors if v is not None}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= _VECTOR_DTYPES else torch.float32


def unified(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Contiguous vectors of their `vector_dtype`."""
    dtype = vector_dtype(*vectors)
    return tuple(None if v is None else v.to(dtype).contiguous() for v in vectors)


def vectors(bias: Tensor | None, scale: Tensor | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Bias and scale as the kernels take them: on the device, `unified`."""
    if scale is not None and scale.device != device:
        scale = scale.to(device)
    bias, scale = unified(bias, scale)
    return bias, scale


def running_state(
    mean: Tensor | None, var: Tensor | None
) -> tuple[tuple[Tensor | None, Tensor | None], Callable[[], None] | None]:
    """The running statistics as the kernels take them, and what copies them back if those are copies."""
    if mean is None or var is None or (mean.is_contiguous() and var.is_contiguous() and mean.dtype == var.dtype):
        return (mean, var), None
    copies = (mean.contiguous(), var.to(mean.dtype).contiguous())

    def write_back() -> None:
        mean.copy_(copies[0])
        var.copy_(copies[1])

    return copies, write_back


def as_served(operands: Operands) -> tuple[Operands, Callable[[], None] | None]:
    """`operands` with their vectors as the kernels take them, and what copies running statistics back, if need be."""
    x, weight, bias, scale, running_mean, running_var, counter, bn_weight, bn_bias = operands
    bias, scale = vectors(bias, scale, x.device)
    if running_mean is not None:
        bn_weight, bn_bias = (
            None if v is None else v.to(running_mean.dtype).contiguous() for v in (bn_weight, bn_bias)
        )
    else:
        bn_weight, bn_bias = unified(bn_weight, bn_bias)
    (running_mean, running_var), write_back = running_state(running_mean, running_var)
    served = Operands(x, weight, bias, scale, running_mean, running_var, counter, bn_weight, bn_bias)
    return served, write_back


def all_served_as_they_are(operands: Operands) -> bool:
    """`as_served` has nothing to do."""
    x, _, bias, scale, running_mean, running_var, _, bn_weight, bn_bias = operands
    return (
        (scale is None or scale.device == x.device)
        and served_as_they_are(bias, scale)
        and served_as_they_are(running_mean, running_var, bn_weight, bn_bias)
    )


class Shapes:
    """Brings the gradients of operands into their shapes and dtypes, which are known beforehand."""

    def __init__(self, operands: Sequence[Tensor | None], kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        """`kinds`: of the gradients as the kernels write them, shape and dtype."""
        given = [(i, t, kind) for i, (t, kind) in enumerate(zip(operands, kinds, strict=True)) if t is not None]
        self._others = [(i, t.shape, t.dtype) for i, t, kind in given if (tuple(t.shape), t.dtype) != kind]

    def __call__(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        for i, shape, dtype in self._others:
            gradient = gradients[i]
            if gradient is not None:
                if gradient.shape != shape:  # one scale for all features: their gradients' sum
                    gradient = (gradient if gradient.numel() == shape.numel() else gradient.sum()).reshape(shape)
                gradients[i] = gradient.to(dtype)
        return gradients


def kind(t: Tensor | None) -> tuple[Any, ...] | None:
    """What two tensors must share to be served alike, but for their contents."""
    return None if t is None else (t.shape, t.dtype, t.device, t.is_contiguous())


class Likeness:
    """Whether tensors are like those that it was made of: the same ones absent, and of each the class, dtype, device,
    shape, strides, `requires_grad`, and who PyTorch's dispatcher would show it to.

    By the guards of `torch.compile`, one call of C++ for all of them, where `kind` takes 0.3 µs for each. They are no
    public interface: where PyTorch has none of this form, nothing is alike. Keeps no tensor alive.
    """

    def __init__(self, tensors: tuple[Tensor | None, ...]) -> None:
        self._absent = tuple(i for i, t in enumerate(tensors) if t is None)
        self._present = itemgetter(*(i for i, t in enumerate(tensors) if t is not None))
        self._check: Callable[..., bool] = lambda *_: False
        with contextlib.suppress(AttributeError, TypeError):
            guards = torch._C._dynamo.guards.TensorGuards  # type: ignore[attr-defined]
            present = self._present(tensors)
            self._check = guards(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    def __call__(self, tensors: Sequence[Tensor | None]) -> bool:
        for i in self._absent:
            if tensors[i] is not None:
                return False
        return self._check(*self._present(tensors))


class AsSaved:
    """What autograd has kept, as it was: hooks of saved tensors may give back others, in other places of memory.

    Args:
        kinds: of each tensor its shape, None for any, and its dtype; None where it is absent.
    """

    def __init__(self, kinds: Sequence[tuple[tuple[int, ...] | None, torch.dtype] | None]) -> None:
        self._kinds = kinds
        self._alike: Likeness | None = None

    def __call__(self, saved: Saved) -> Saved:
        """`saved`, all but x and the weight contiguous.

        Raises:
            GemmNormRuntimeError: of another shape or dtype.
        """
        if self._alike is not None and self._alike(saved):
            return saved
        for t, known in zip(saved, self._kinds, strict=True):
            if known is None or t is None:
                continue
            shape, dtype = known
            if t.dtype != dtype or (shape is not None and t.shape != shape):
                raise GemmNormRuntimeError(
                    f"a hook of saved tensors gave back {tuple(t.shape)} of {t.dtype}"
                    f" for {'' if shape is None else f'{shape} of '}{dtype}"
                )
        dense_ = [*saved[:2], *(None if t is None else t.contiguous() for t in saved[2:])]
        if self._alike is None and all(a is b for a, b in zip(saved, dense_, strict=True)):
            self._alike = Likeness(tuple(saved))
        saved.clear()
        return dense_


def served_as_they_are(*vectors: Tensor | None) -> bool:
    """Contiguous vectors of one dtype that the kernels know: `unified` has nothing to do."""
    present = [v for v in vectors if v is not None]
    dtypes = {v.dtype for v in present}
    return len(dtypes) <= 1 and dtypes <= _VECTOR_DTYPES and all(v.is_contiguous() for v in present)
