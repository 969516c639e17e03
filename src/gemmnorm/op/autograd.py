"""The operator under autograd: one `Function`, for prepared kernels and for the registered operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import GemmNormRuntimeError
from ..runtime import casts
from ..runtime.call import Call
from ..runtime.operands import Operands, Options, Saved

Gradients = Sequence[Tensor | None]


class Operator:
    """The registered operator in the place of a prepared call: what a trace or a mode gets to see.

    Attributes:
        shares_weight: another call of the graph multiplies by the same copy of the weight. Their gradients of it then
            come in the copy's dtype, as PyTorch's do, and the graph widens them: TorchInductor does that in the kernel
            that adds them up. Two calls move 12 bytes for each element of the weight, where float32 would take 20.
    """

    shares_weight = False

    def __init__(
        self, options: Options, dtypes: tuple[torch.dtype, torch.dtype], cast_weight: Tensor | None = None
    ) -> None:
        """`dtypes`: of x and weight as they are handed in, and of their gradients. `cast_weight`: to multiply by."""
        self.options, self.dtypes, self._cast_weight = options, dtypes, cast_weight

    def forward(self, operands: Operands) -> tuple[Tensor, list[Tensor | None], tuple[Tensor, Tensor]]:
        """y; product, statistics and the copies that were cast, or None; x and weight as they were multiplied."""
        if self._cast_weight is not None:
            operands = operands._replace(weight=self._cast_weight)
        with torch._C._AutoDispatchBelowAutograd():
            y, *kept = torch.ops.gemmnorm.linear_scale_batch_norm.default(*operands, *self.options)
        x, weight = (t if copy is None else copy for copy, t in zip(kept[2:], operands[:2], strict=True))
        return y, kept, (x, weight)

    def backward(self, needs: tuple[bool, ...], grad: Tensor, saved: Saved) -> Gradients:
        """Gradients of what is differentiable, None where `needs` is False."""
        # The operator's dtypes and cast are None where they are as x and weight are now.
        x, weight = saved[:2]
        assert x is not None and weight is not None
        dtypes = [None if t.dtype == dtype else dtype for t, dtype in zip((x, weight), self.dtypes, strict=True)]
        if self.shares_weight:
            dtypes[1] = None
        options = self.options._replace(cast=None)
        backward_op = torch.ops.gemmnorm.linear_scale_batch_norm_backward.default
        of_x, of_weight, *others = backward_op(grad, *saved, *options, *dtypes, needs)
        return of_x, None if of_weight is None else of_weight.to(self.dtypes[1]), *others


class LinearScaleBatchNorm(torch.autograd.Function):
    """y of a `call`, differentiable in the six tensors that follow `operands` (and are among them).

    Kept for the backward: x and weight as they were multiplied, the per-feature parameters, and of the forward the
    product and the statistics (float32 [2 or 2 + groups, O]), in one tensor or two; or the statistics alone (float32
    [2, O]), where the backward multiplies again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: Call | Operator,
        operands: Operands,
        _x: Tensor,
        _weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
    ) -> Any:
        if isinstance(call, Call):
            call, operands = call.sharing(operands)
        kept: list[Any]
        y, kept, (x, weight) = call.forward(operands)
        if isinstance(call, Call):
            if call.casts_weight:
                casts.keep(_weight, weight)
            hooked = _hooks is not None and _hooks(True) is not None  # others see it, and may give something else back
            kept = call.to_save(kept, hooked)
            ctx.weight, ctx.memory = id(weight), _memory_of(weight)
        ctx.save_for_backward(x, weight, bias, scale, bn_weight, bn_bias, *kept[:2])
        ctx.call = call
        ctx.set_materialize_grads(False)
        if isinstance(call, Call):
            return y
        ctx.mark_non_differentiable(*(t for t in kept if t is not None))
        return (y, *kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        call: Call | Operator = ctx.call
        needs = ctx.needs_input_grad[2:]
        saved: Saved = [*ctx.saved_tensors]
        # Compiled autograd has to see the operator; so has `vmap`, which then asks for one gradient after the other.
        if isinstance(call, Call) and (torch.compiler.is_compiling() or not _has_storage(grad)):
            saved[6:], call = call.unpacked(saved[6:]), Operator(call.options, call.dtypes)
        # The same tensor, which no hook has given back, in other memory.
        if isinstance(call, Call) and id(saved[1]) == ctx.weight and _memory_of(saved[1]) != ctx.memory:
            raise GemmNormRuntimeError(
                "weight: its `data` was exchanged since the forward; what it was multiplied by is not there any more"
            )
        if torch.is_grad_enabled():
            made_of = (grad, *saved[:6])
            with torch.no_grad():
                found = call.backward(needs, grad, saved)
            return None, None, *not_twice(found, made_of)
        if isinstance(call, Call):
            let_go(ctx)
        return None, None, *call.backward(needs, grad, saved)


def _memory_of(t: Tensor | None) -> int:
    """Which memory a tensor lies in; `t.data = …` changes it and no version."""
    return t.untyped_storage()._cdata  # type: ignore[union-attr, no-any-return]


_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # docs/private_api.md
_has_storage = getattr(torch._C, "_has_storage", lambda _: True)  # a tensor of `vmap`'s has none (docs/private_api.md)
# PyTorch's own, for the backward of a compiled graph (docs/private_api.md).
_clear = getattr(torch._C._FunctionBase, "maybe_clear_saved_tensors", None)


def let_go(ctx: Any) -> None:
    """Autograd's hold of what was saved, unless the graph is retained: else it ends when the backward has returned.

    Whoever has the tensors can then free each once it has been read, and what comes next may lie in its memory.
    """
    if _clear is not None:
        _clear(ctx)


def directly(function: Any) -> Any:
    """`function.apply` without its look for function transforms, of which `route` has found none: 3 to 5 µs."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


_apply_directly = directly(LinearScaleBatchNorm)


def apply(call: Call | Operator, operands: Operands) -> Any:
    """`call.forward(operands)`, differentiable: y, and of an `Operator` all five outputs."""
    x, weight, bias, scale, _, _, _, bn_weight, bn_bias = operands
    function = _apply_directly if isinstance(call, Call) else LinearScaleBatchNorm.apply
    return function(call, operands, x, weight, bias, scale, bn_weight, bn_bias)


class _NotTwice(torch.autograd.Function):
    """Gradients as they are, tied to what they were computed from: differentiating them raises."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *made_of: Tensor | None) -> Any:
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise GemmNormRuntimeError(
            "linear_scale_batch_norm has no second derivative; run the original ops where one is needed"
            " (with gemmnorm.set_fusion(False))"
        )


def not_twice(gradients: Gradients, made_of: Sequence[Any]) -> Gradients:
    """`gradients`, which refuse to be differentiated."""
    leaf = torch.zeros((), requires_grad=True)  # what was cast for autocast does not require a gradient itself
    found: Gradients = _NotTwice.apply(gradients, *made_of, leaf)
    return found
