"""Registration of the operator with PyTorch: schemas, fakes, autograd, autocast. Nothing else registers anything.

`gemmnorm::linear_scale_batch_norm` is functional but for the running statistics and the counter, which it updates in
place. Besides y it returns what its backward needs (empty tensors when nobody asked for gradients). The backward is an
operator of its own, so that `torch.compile` sees two nodes and no Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import plan
from ..errors import GemmNormRuntimeError
from ..runtime import call as runtime
from ..runtime.arithmetic import arithmetic
from . import reference
from .arguments import CASTABLE, check_arguments

_library = torch.library.Library("gemmnorm", "DEF")
_library.define(
    "linear_scale_batch_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? scale, float scale_value,"
    " Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked,"
    " Tensor? bn_weight, Tensor? bn_bias, bool training, float momentum, float eps,"
    " str? activation, str? strategy, bool save)"
    " -> (Tensor y, Tensor product, Tensor statistics)"
)
_library.define(
    "linear_scale_batch_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor? scale,"
    " float scale_value, Tensor? bn_weight, Tensor? bn_bias, Tensor product, Tensor statistics,"
    " bool training, float eps, str? activation, str strategy, bool[6] needs)"
    " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_scale, Tensor grad_bn_weight,"
    " Tensor grad_bn_bias)"
)
_forward_op = torch.ops.gemmnorm.linear_scale_batch_norm.default
_backward_op = torch.ops.gemmnorm.linear_scale_batch_norm_backward.default


def linear_scale_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | float | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: str | None,
    strategy: str | None,
) -> Tensor:
    """Call the operator; y alone is the caller's business.

    Off the GPU, in eager mode and with no strategy asked for, the chain itself runs instead: there is nothing to fuse,
    and the operator's host time would show in small layers. Where kernels serve a call and nobody watches the single
    operators, they are called directly, without PyTorch's dispatcher, for the same reason.
    """
    compiling = torch.compiler.is_compiling()
    if not x.is_cuda and not compiling and runtime.unobserved() and plan.check_strategy(strategy) is None:
        check_arguments(
            x, weight, bias, scale, running_mean, running_var, bn_weight, bn_bias, num_batches_tracked,
            training, rows=2 if training else 0,
        )  # fmt: skip
        return reference.chain(
            x, weight, bias, scale, running_mean, running_var, num_batches_tracked, bn_weight, bn_bias,
            training, momentum, eps, activation,
        )  # fmt: skip
    tensor = scale if isinstance(scale, Tensor) else None
    number = 1.0 if tensor is not None or scale is None else float(scale)  # type: ignore[arg-type]
    if not compiling and not _watched():
        tensors = (x, weight, bias, tensor, running_mean, running_var, num_batches_tracked, bn_weight, bn_bias)
        found = _prepared(tensors, number, training, momentum, eps, activation, strategy)
        if found is not None:
            call, operands = found
            if call.save:
                return _apply_direct(call, operands, tensors[2:], x, weight, bias, tensor, bn_weight, bn_bias)
            return call.forward(*operands, *tensors[2:])[0]
    check_arguments(
        x, weight, bias, scale, running_mean, running_var, bn_weight, bn_bias, num_batches_tracked,
        training, rows=2 if training else 0,
    )  # fmt: skip
    y: Tensor = _forward_op(
        x, weight, bias, tensor, number, running_mean, running_var, num_batches_tracked,
        bn_weight, bn_bias, training, momentum, eps, activation, strategy, False,
    )[0]  # fmt: skip
    return y


_PLAIN = (Tensor, torch.nn.Parameter)
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_transforms = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)


def _watched() -> bool:
    """A mode, function transform or trace wants to see the operator itself."""
    return bool(
        _modes()
        or _transforms() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def _prepared(
    tensors: tuple[Tensor | None, ...],
    scale_value: float,
    training: bool,
    momentum: float,
    eps: float,
    activation: str | None,
    strategy: str | None,
) -> tuple[runtime.Call, tuple[Tensor, Tensor]] | None:
    """The call that kernels serve, and x and W as it takes them; None where it is the dispatcher's.

    A call like the last one with this weight is recognised without a look at each tensor.
    """
    x, weight = tensors[:2]
    assert x is not None and weight is not None
    device = "cuda" if x.is_cuda else x.device.type  # the second takes 0.3 µs
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    differentiable = torch.is_grad_enabled()
    strategy = plan.check_strategy(strategy)
    options = (training, momentum, eps, activation, strategy)
    key = (id(weight), scale_value, *options, differentiable, autocast, arithmetic(x.dtype))
    call = runtime.recall(key, tensors)
    if call is None and any(t is not None and type(t) not in _PLAIN for t in tensors):
        return None  # a subclass wants to see the operator
    if call is None:
        operands = (x, weight) if autocast is None else (_as_cast(x, autocast), _as_cast(weight, autocast))
        known = all(t.dtype == autocast or (t.dtype == torch.float32 and t.is_contiguous()) for t in (x, weight))
        named = (("x", x), ("weight", weight))
        cast = tuple(name for name, t in named if known and t.dtype != autocast) if autocast is not None else ()
        _, _, bias, scale, running_mean, running_var, counter, bn_weight, bn_bias = tensors
        learned = (x, weight, bias, scale, bn_weight, bn_bias)
        save = differentiable and any(t is not None and t.requires_grad for t in learned)
        call = runtime.call_for(
            *operands, bias, scale, scale_value, running_mean, running_var, counter, bn_weight, bn_bias, *options,
            save, True, cast,
        )  # fmt: skip
        if not call.kernels:
            return None
        runtime.remember(key, tensors, call)
    if autocast is not None and not call.cast:
        with torch.no_grad():  # the backward gives gradients of x and W themselves
            return call, _cast(x, weight)
    return call, (x, weight)


def _cast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x and W in autocast's dtype; statistics and BatchNorm's parameters stay as they are."""
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight = (t.to(dtype) if t.dtype in CASTABLE else t for t in (x, weight))
    return x, weight


def _as_cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """What tells of `t` in autocast's dtype, without the numbers."""
    return t.new_empty((), dtype=dtype).expand(t.shape) if t.dtype in CASTABLE and t.dtype != dtype else t


class _Direct(torch.autograd.Function):
    """A prepared call under autograd. Kept: x and W in the compute dtype, the product, the statistics, and the
    per-feature parameters."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: runtime.Call,
        operands: tuple[Tensor, Tensor],
        vectors: tuple[Tensor | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
    ) -> Tensor:
        y, *kept = call.forward(*operands, *vectors)
        operands, kept = call.multiplied(operands, kept)
        ctx.save_for_backward(*operands, bias, scale, bn_weight, bn_bias, *kept)
        ctx.call = call
        ctx.dtypes = (x.dtype, weight.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs = list(ctx.needs_input_grad[3:])
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            x, weight, bias, scale, bn_weight, bn_bias, *kept = ctx.saved_tensors
            # Autocast's copies are no part of the graph; the operator has to see that somebody may differentiate again.
            x, weight = (
                t.detach().requires_grad_() if needed and not t.requires_grad else t
                for t, needed in zip((x, weight), needs, strict=False)
            )
            scale_value, training, _, eps, activation, _ = ctx.call.options
            found = _backward_op(
                grad, x, weight, bias, scale, scale_value, bn_weight, bn_bias, *ctx.call.unpacked(kept),
                training, eps, activation, ctx.call.plan.strategy, needs,
            )  # fmt: skip
            found = (*(g.to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=False)), *found[2:])
        else:
            found = ctx.call.backward(ctx.dtypes, needs, grad, *ctx.saved_tensors)
        return None, None, None, *(g if needed else None for g, needed in zip(found, needs, strict=True))


# `Function.apply` without its look for function transforms, of which `_watched` has found none: 8 µs of a call.
_apply_direct: Any = super(torch.autograd.Function, _Direct).apply  # type: ignore[misc]


def _forward_impl(*args: Any) -> tuple[Tensor, ...]:
    x, weight, bias, scale, _, running_mean, running_var, counter, bn_weight, bn_bias = args[:10]
    call = runtime.call_for(*args)
    found = call.forward(x, weight, bias, scale, running_mean, running_var, counter, bn_weight, bn_bias)
    if call.save:
        return tuple(found)
    return found[0], x.new_empty(0), x.new_empty(0, dtype=reference.statistics_dtype(found[0].dtype))


def _backward_impl(*args: Any) -> tuple[Tensor, ...]:
    grad, x, weight, bias, scale, scale_value, bn_weight, bn_bias, product, statistics, *options, needs = args
    call = runtime.backward_call_for(x, weight, bias, scale, scale_value, bn_weight, bn_bias, *options)
    grads = call.run(needs, grad, x, weight, bias, scale, bn_weight, bn_bias, product, statistics)
    return tuple(x.new_empty(0) if g is None else g for g in grads)


_library.impl("linear_scale_batch_norm", _forward_impl, "CompositeExplicitAutograd")
_library.impl("linear_scale_batch_norm_backward", _backward_impl, "CompositeExplicitAutograd")


@torch.library.register_fake("gemmnorm::linear_scale_batch_norm", lib=_library)
def _forward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    scale_value: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: str | None,
    strategy: str | None,
    save: bool,
) -> tuple[Tensor, ...]:
    batch, features = x.shape[0], weight.shape[0]
    out = runtime.output_dtype(x, scale)
    y = x.new_empty((batch, features), dtype=out)
    kept = reference.statistics_dtype(out)
    rows = 2 + (-(-batch // plan.GROUP_ROWS) if strategy in plan.OWN_GEMM and training else 0)
    product = x.new_empty((batch, features) if save else (0,))
    return y, product, x.new_empty((rows, features) if save else (0,), dtype=kept)


@torch.library.register_fake("gemmnorm::linear_scale_batch_norm_backward", lib=_library)
def _backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    scale_value: float,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    product: Tensor,
    statistics: Tensor,
    training: bool,
    eps: float,
    activation: str | None,
    strategy: str,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    operands = (x, weight, bias, scale, bn_weight, bn_bias)
    return tuple(
        x.new_empty(0) if t is None or not needed else t.new_empty(t.shape)
        for t, needed in zip(operands, needs, strict=True)
    )


class _Function(torch.autograd.Function):
    """One forward op and one backward op. Kept: x, W, the product, mean and rstd, and the per-feature parameters."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        with torch._C._AutoDispatchBelowAutograd():
            y, product, statistics = _forward_op(*args)
        x, weight, bias, scale, scale_value, _, _, _, bn_weight, bn_bias, training, _, eps, activation, strategy, _ = (
            args
        )
        ctx.save_for_backward(x, weight, bias, scale, bn_weight, bn_bias, product, statistics)
        ctx.options = (scale_value, training, eps, activation, strategy)
        ctx.mark_non_differentiable(product, statistics)
        ctx.set_materialize_grads(False)
        return y, product, statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 16
        x, weight, bias, scale, bn_weight, bn_bias, product, statistics = ctx.saved_tensors
        scale_value, training, eps, activation, strategy = ctx.options
        inputs = ctx.needs_input_grad
        needs = [inputs[i] for i in (0, 1, 2, 3, 8, 9)]
        found = _backward_op(
            grad, x, weight, bias, scale, scale_value, bn_weight, bn_bias, product, statistics,
            training, eps, activation, strategy, needs,
        )  # fmt: skip
        gx, gw, gb, gs, gg, gt = (g if needed else None for g, needed in zip(found, needs, strict=True))
        return gx, gw, gb, gs, None, None, None, None, gg, gt, None, None, None, None, None, None


class _NoSecondDerivative(torch.autograd.Function):
    """The backward op under autograd: runs it, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        with torch._C._AutoDispatchBelowAutograd():
            found: tuple[Tensor, ...] = _backward_op(*args)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise GemmNormRuntimeError(
            "linear_scale_batch_norm has no second derivative; run the original ops where one is needed"
            " (gemmnorm.unfuse(model))"
        )


def _forward_autograd(*args: Any) -> tuple[Tensor, ...]:
    x, weight, bias, scale, scale_value, running_mean, _, _, bn_weight, bn_bias, training, _, _, activation = args[:14]
    differentiable = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias, scale, bn_weight, bn_bias)
    )
    save = differentiable or args[15]  # a traced graph asks for the saved tensors itself, with gradients off
    problem = runtime.describe(
        x, weight, bias, scale, scale_value, running_mean, bn_weight, bn_bias, training, activation, save
    )
    args = (*args[:14], runtime.resolve(problem, args[14]), save)
    if differentiable:
        return _Function.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(*args)


def _backward_autograd(*args: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args):
        return _NoSecondDerivative.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        found: tuple[Tensor, ...] = _backward_op(*args)
        return found


_library.impl("linear_scale_batch_norm", _forward_autograd, "Autograd")
_library.impl("linear_scale_batch_norm_backward", _backward_autograd, "Autograd")


def _autocast(device_type: str, key: str) -> None:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def impl(*args: Any) -> tuple[Tensor, ...]:
        x, weight = _cast(*args[:2])
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return _forward_op(x, weight, *args[2:])

    _library.impl("linear_scale_batch_norm", impl, key)


_autocast("cuda", "AutocastCUDA")
_autocast("cpu", "AutocastCPU")
