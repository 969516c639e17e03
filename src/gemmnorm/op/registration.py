"""Registration of the operator with PyTorch: schemas, fakes, autograd, autocast. Nothing else registers anything.

`gemmnorm::linear_scale_batch_norm` is functional but for the running statistics and the counter, which it updates in
place. Besides y it returns what its backward needs, under autocast with the copies of x and weight that it has cast.
The backward is an operator of its own, so that `torch.compile` sees two nodes and no Python. Arguments are the fields
of `Operands` (the backward's: of `Differentiable`) and of `Options`, in their order. What nobody wants is returned as
None, like the gradients of PyTorch's own `convolution_backward`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._device
from torch import Tensor
from torch.fx.experimental import proxy_tensor
from torch.utils.flop_counter import register_flop_formula
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from .. import plan
from ..runtime import call as runtime
from ..runtime import ranks
from ..runtime.operands import Differentiable, Operands, Options, cast_operands, multiplied_dtype
from . import autograd, reference, sync

_OPTIONS = (
    "float scale_value, bool training, float momentum, float eps, str? activation, str? strategy, bool save,"
    " bool? keep_product, ScalarType? cast"
)  # fmt: skip
_library = torch.library.Library("gemmnorm", "DEF")
_OPERANDS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? scale, Tensor{}? running_mean, Tensor{}? running_var,"
    " Tensor{}? num_batches_tracked, Tensor? bn_weight, Tensor? bn_bias"
)
_DIFFERENTIABLE = "Tensor x, Tensor weight, Tensor? bias, Tensor? scale, Tensor? bn_weight, Tensor? bn_bias"
_library.define(
    f"linear_scale_batch_norm({_OPERANDS.format('(a!)', '(b!)', '(c!)')}, {_OPTIONS})"
    " -> (Tensor y, Tensor product, Tensor statistics, Tensor cast_x, Tensor cast_weight)"
)
_library.define(
    f"linear_scale_batch_norm_backward(Tensor grad, {_DIFFERENTIABLE},"
    f" Tensor? product, Tensor statistics, {_OPTIONS}, ScalarType? x_dtype, ScalarType? weight_dtype, bool[6] needs)"
    " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_scale, Tensor grad_bn_weight,"
    " Tensor grad_bn_bias)"
)
# With statistics over the ranks of a process group (`sync`): the whole, and the parts that a trace gets to see.
_KEPT, _NEEDS = "Tensor product, Tensor offset, Tensor statistics", "int ranks, bool[6] needs"
_library.define(
    f"linear_scale_sync_batch_norm({_OPERANDS.format('(a!)', '(b!)', '(c!)')}, {_OPTIONS}, str group, int ranks)"
    " -> Tensor"
)
_library.define(
    f"sync_statistics({_OPERANDS.format('', '', '(c!)')}, {_OPTIONS}, int ranks)"
    " -> (Tensor product, Tensor offset, Tensor row)"
)
_library.define(
    f"sync_normalize({_OPERANDS.format('(a!)', '(b!)', '')}, Tensor product, Tensor offset, Tensor gathered,"
    f" {_OPTIONS}, int ranks) -> (Tensor y, Tensor statistics)"
)
_library.define(
    f"sync_sums(Tensor grad, {_DIFFERENTIABLE}, {_KEPT}, {_OPTIONS}, {_NEEDS})"
    " -> (Tensor grad_bias, Tensor grad_scale, Tensor grad_bn_weight, Tensor grad_bn_bias, Tensor sums)"
)
_library.define(
    f"sync_gradient(Tensor grad, {_DIFFERENTIABLE}, {_KEPT}, Tensor sums, {_OPTIONS}, {_NEEDS})"
    " -> (Tensor grad_x, Tensor grad_weight)"
)
forward_op = torch.ops.gemmnorm.linear_scale_batch_norm.default
backward_op = torch.ops.gemmnorm.linear_scale_batch_norm_backward.default


def _forward_arguments(args: tuple[Any, ...]) -> tuple[Operands, Options]:
    """The forward operator's arguments by name."""
    return Operands(*args[:9]), Options(*args[9:])


def _options_at(first: int, args: tuple[Any, ...]) -> tuple[Options, tuple[Any, ...]]:
    """The options from argument number `first` on, and the arguments behind them."""
    end = first + len(Options._fields)
    return Options(*args[first:end]), args[end:]


def _backward_arguments(
    grad: Tensor, *args: Any
) -> tuple[Tensor, Differentiable, tuple[Tensor | None, Tensor], Options, tuple[torch.dtype, torch.dtype], list[bool]]:
    """grad, the differentiable operands, (product, statistics), options, dtypes of two gradients, needs.

    A dtype of None is the operand's own: PyTorch takes 2 µs to hand over another.
    """
    options, (x_dtype, weight_dtype, needs) = _options_at(8, args)
    dtypes = x_dtype or args[0].dtype, weight_dtype or args[1].dtype
    return grad, Differentiable(*args[:6]), args[6:8], options, dtypes, needs


# --- what runs --------------------------------------------------------------------------------------------------------


def _forward_impl(*args: Any) -> tuple[Tensor | None, ...]:
    operands, options = _forward_arguments(args)
    call = runtime.find(operands, options)
    assert call is not None
    kept: Sequence[Tensor | None]
    if call.kernels:
        y, kept, multiplied = call.forward(operands)
        kept = call.unpacked(kept) if options.save else ()
    else:
        runtime.record(call.plan)
        multiplied = cast_operands(operands, options.cast)[:2]
        y, *kept = reference.forward(operands._replace(x=multiplied[0], weight=multiplied[1]), options)
    if not options.save:
        return y, None, None, None, None
    product, statistics = kept
    assert statistics is not None
    if options.keep_product is False:
        product = None
    elif product is not None and options.training:
        product, statistics = _as_traced(product, statistics, options.strategy)
    x, weight = (None if made is t else made for made, t in zip(multiplied, operands[:2], strict=True))
    return y, product, statistics, x, weight


def _offset_rows(batch: Any, strategy: str | None) -> Any:
    """Means that a strategy's product lacks: for each group of rows one, or none."""
    return -(-batch // plan.GROUP_ROWS) if strategy in plan.OWN_GEMM else 0


def _with_offset(product: Tensor, offset: Tensor, strategy: str | None) -> tuple[Tensor, Tensor]:
    """A product [B, O] and the means that it lacks [groups, O], as `strategy` has them.

    A traced graph holds a strategy. Another one runs where that cannot serve any more: under another float32
    arithmetic, or in a process that has the graph from a cache.
    """
    rows = _offset_rows(product.shape[0], strategy)
    if offset.shape[0] == rows:
        return product, offset
    if rows > 0:
        return product, offset.new_zeros((rows, product.shape[1]))
    whole = product + offset.repeat_interleave(plan.GROUP_ROWS, 0)[: product.shape[0]]
    return whole.to(product.dtype), offset[:0]


def _as_traced(product: Tensor, statistics: Tensor, strategy: str | None) -> tuple[Tensor, Tensor]:
    """Likewise where the means follow the statistics [2 + groups, O]."""
    if statistics.shape[0] == 2 + _offset_rows(product.shape[0], strategy):
        return product, statistics
    product, offset = _with_offset(product, statistics[2:], strategy)
    return product, torch.cat((statistics[:2], offset))


def _backward_impl(*args: Any) -> tuple[Tensor | None, ...]:
    grad, operands, kept, options, dtypes, needs = _backward_arguments(*args)
    found: autograd.Gradients
    if options.strategy == "reference" or grad.shape[0] == 0:
        found = reference.backward(grad, operands, kept, options, needs)
        found = *(None if g is None else g.to(dtype) for g, dtype in zip(found, dtypes, strict=False)), *found[2:]
    else:
        keep = kept[0] is not None
        options = options if options.keep_product is keep else options._replace(keep_product=keep)
        wanted = tuple(need and t is not None for need, t in zip(needs, operands, strict=True))
        found = runtime.find_backward(operands, options, dtypes).run(
            wanted, grad, [*operands, *(None if t is None else t.contiguous() for t in kept)]
        )
    return tuple(found)


_library.impl("linear_scale_batch_norm", _forward_impl, "CompositeExplicitAutograd")
_library.impl("linear_scale_batch_norm_backward", _backward_impl, "CompositeExplicitAutograd")


# --- what is traced ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("gemmnorm::linear_scale_batch_norm", lib=_library)
def _forward_fake(*args: Any) -> tuple[Tensor | None, ...]:
    (x, weight, _, scale, *_), options = _forward_arguments(args)
    batch, features = x.shape[0], weight.shape[0]
    out = runtime.output_dtype(x, scale, options.cast)
    y = x.new_empty((batch, features), dtype=out)
    if not options.save:
        return y, None, None, None, None
    dtypes = [multiplied_dtype(t, options.cast) for t in (x, weight)]
    keeps = options.keep_product is not False
    rows = 2 + (_offset_rows(batch, options.strategy) if options.training and keeps else 0)
    return (
        y,
        x.new_empty((batch, features), dtype=dtypes[0]) if keeps else None,
        x.new_empty((rows, features), dtype=reference.statistics_dtype(out)),
        *(
            None if dtype == t.dtype else x.new_empty(t.shape, dtype=dtype)
            for t, dtype in zip((x, weight), dtypes, strict=True)
        ),
    )


@torch.library.register_fake("gemmnorm::linear_scale_batch_norm_backward", lib=_library)
def _backward_fake(*args: Any) -> tuple[Tensor | None, ...]:
    _, operands, _, _, dtypes, needs = _backward_arguments(*args)
    all_dtypes = (*dtypes, *(None if t is None else t.dtype for t in operands[2:]))
    return tuple(
        None if t is None or not needed else t.new_empty(t.shape, dtype=dtype)
        for t, needed, dtype in zip(operands, needs, all_dtypes, strict=True)
    )


# --- what is counted --------------------------------------------------------------------------------------------------


@register_flop_formula([torch.ops.gemmnorm.linear_scale_batch_norm, torch.ops.gemmnorm.sync_statistics])
def _forward_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """FLOPs of the product, as FlopCounterMode counts: x [B, I], weight [O, I]."""
    return 2 * x[0] * x[1] * weight[0]


@register_flop_formula([torch.ops.gemmnorm.linear_scale_batch_norm_backward, torch.ops.gemmnorm.sync_gradient])
def _backward_flops(grad: Any, x: Any, weight: Any, *rest: Any, **__: Any) -> int:
    """FLOPs of those products of the backward that are wanted, dx = da·W and dW = daᵀ·x; and of the forward's where it
    was not kept and is multiplied again, as of a checkpointed Linear."""
    product, needs = rest[4], rest[-1]
    return _forward_flops(x, weight) * ((product is None) + sum(map(bool, needs[:2])))


# --- under autograd and autocast --------------------------------------------------------------------------------------


def _can_redispatch() -> bool:
    """PyTorch lets an autograd kernel call the operator below autograd. Else plain ops run: docs/private_api.md."""
    return hasattr(torch._C, "_AutoDispatchBelowAutograd")


def has_modes() -> bool:
    """A mode has to see the operators that run, or the functions. True where PyTorch does not say."""
    try:
        return bool(torch._C._len_torch_dispatch_stack()) or has_function_modes()
    except AttributeError:  # private names: docs/private_api.md
        return True


_DEFAULT_DEVICE = getattr(torch.utils._device, "DeviceContext", None)


def has_function_modes() -> bool:
    """A `TorchFunctionMode` has to see the functions that are called; a default device's does not."""
    if not torch._C._len_torch_function_stack():
        return False
    return any(type(mode) is not _DEFAULT_DEVICE for mode in torch.overrides._get_current_function_mode_stack())


def _can_run_here(tensor: Tensor) -> bool:
    """Nothing below autograd has to see the operator: 15 µs less than to dispatch it again, as in a compiled graph."""
    return type(tensor) in runtime.PLAIN and not has_modes()


class _Copy(NamedTuple):
    """What an operator has cast of a weight: version of that and the trace then; the copy, as long as the trace keeps
    it for the backward; and who has cast it."""

    version: int
    trace: weakref.ref[Any]
    copy: TensorWeakRef
    operator: autograd.Operator


# By each weight of a trace. A later call in the same graph multiplies by the copy, as autocast's cache has it in eager
# mode. It is an edge of the graph: who frees the copy sees both uses.
_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _trace() -> Any:
    """What is tracing; None where nothing is, or PyTorch does not say."""
    return getattr(proxy_tensor, "get_innermost_proxy_mode", lambda: None)()  # docs/private_api.md


def _remember_copy(weight: Tensor, copy: Tensor | None, operator: autograd.Operator) -> None:
    trace = _trace()
    if trace is not None and copy is not None:
        _copies[weight] = _Copy(weight._version, weakref.ref(trace), TensorWeakRef(copy), operator)


def _cast_before(weight: Tensor, cast: torch.dtype | None) -> tuple[Tensor, autograd.Operator] | None:
    """The copy of a traced weight in this dtype, if this trace has made one already, and who did."""
    if cast is None or type(weight) in runtime.PLAIN or weight not in _copies:
        return None
    (version, trace, found, operator), current = _copies[weight], _trace()
    if current is None or trace() is not current or version != weight._version:  # a branch has a trace of its own
        return None
    copy: Tensor | None = found()
    return (copy, operator) if copy is not None and copy.dtype == cast else None


def _forward_autograd(*args: Any) -> tuple[Tensor | None, ...]:
    operands = Operands(*args[:9])
    if not _can_redispatch():
        options = Options(*args[9:])
        return reference.chain(cast_operands(operands, options.cast), options), None, None, None, None
    differentiable = torch.is_grad_enabled() and operands.require_gradients
    if not differentiable and _can_run_here(operands.x):
        return _forward_impl(*args)
    chosen = Options(*args[9:])
    dtypes = (operands.x.dtype, operands.weight.dtype)
    made = _cast_before(operands.weight, chosen.cast)
    copy = None if made is None else made[0]
    if not chosen.save:  # else the call is one of a traced graph, which holds all that is decided here
        # The backward has to know which strategy has run, and what it has kept.
        chosen = runtime.resolved(
            operands if copy is None else operands._replace(weight=copy), chosen._replace(save=differentiable)
        )
    operator = autograd.Operator(chosen, dtypes, copy)
    if differentiable:
        if made is not None:
            operator.shares_weight = made[1].shares_weight = True
        found: tuple[Tensor | None, ...] = autograd.apply(operator, operands)
        _remember_copy(operands.weight, found[4], operator)
        return found
    y, kept, _ = operator.forward(operands)
    return (y, *kept)


def _backward_autograd(*args: Any) -> tuple[Tensor | None, ...]:
    if not _can_redispatch() or (_can_run_here(args[0]) and not torch.is_grad_enabled()):
        return _backward_impl(*args)
    with torch._C._AutoDispatchBelowAutograd():
        found = backward_op(*args)
    tensors = [t for t in args if isinstance(t, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return tuple(autograd.not_twice(found, tensors))
    return tuple(found)


_library.impl("linear_scale_batch_norm", _forward_autograd, "Autograd")
_library.impl("linear_scale_batch_norm_backward", _backward_autograd, "Autograd")


def _register_autocast(device: str, key: str) -> None:
    def whole(*args: Any) -> Any:
        operands, options = _forward_arguments(args)
        dtype = torch.get_autocast_dtype(device)
        cast = dtype if any(multiplied_dtype(t, dtype) != t.dtype for t in operands[:2]) else None
        with torch.autocast(device, enabled=False):
            return forward_op(*operands, *options._replace(cast=cast))

    def synchronised(*args: Any) -> Any:
        operands = cast_operands(Operands(*args[:9]), torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return torch.ops.gemmnorm.linear_scale_sync_batch_norm.default(*operands, *args[9:])

    _library.impl("linear_scale_batch_norm", whole, key)
    _library.impl("linear_scale_sync_batch_norm", synchronised, key)


for _device, _key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")):
    _register_autocast(_device, _key)


# --- with statistics over the ranks of a process group ----------------------------------------------------------------

# Always with the product kept, so that what a part returns does not depend on who wants gradients.


def _sync_whole(*args: Any) -> Tensor:
    operands, (options, rest) = Operands(*args[:9]), _options_at(9, args)
    group = sync.Group(*rest)
    options = options._replace(save=True)
    options = options._replace(strategy=ranks.strategy_of(operands, options))
    return sync.apply(sync.OperatorParts(options, group), group, operands, operands.differentiable)


def _sync_parts(operands: Operands, options: Options, count: int) -> sync.Parts:
    dtypes = (operands.x.dtype, operands.weight.dtype)
    return ranks.find(operands, options, count, dtypes) or sync.PlainParts(options)


def _strategy_of(parts: sync.Parts) -> str | None:
    """The one that runs, which may be another than the graph's."""
    return parts.options.strategy if isinstance(parts, ranks.Call) else "reference"


def _sync_statistics(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    operands, (options, (count,)) = Operands(*args[:9]), _options_at(9, args)
    product, offset, row = _sync_parts(operands, options, count).statistics(operands)
    assert product is not None
    offset = row.new_empty((0, product.shape[1])) if offset is None else offset
    return *_with_offset(product, offset, options.strategy), row


def _sync_normalize(*args: Any) -> tuple[Tensor, Tensor]:
    operands, (options, (count,)) = Operands(*args[:9]), _options_at(12, args)
    parts = _sync_parts(operands, options, count)
    return parts.normalize(operands, *_with_offset(args[9], args[10], _strategy_of(parts)), args[11])


def _sync_backward_parts(*args: Any) -> tuple[sync.Parts, Differentiable, list[bool]]:
    """Parts, operands and needs of the backward's operators, whose last arguments are options, ranks and needs."""
    operands = Differentiable(*args[1:7])
    x, weight, bias, scale, bn_weight, bn_bias = operands
    assert x is not None and weight is not None
    whole = Operands(x, weight, bias, scale, bn_weight=bn_weight, bn_bias=bn_bias)
    options, (count, needs) = _options_at(len(args) - 2 - len(Options._fields), args)
    return _sync_parts(whole, options, count), operands, needs


def _sync_sums(*args: Any) -> tuple[Tensor | None, ...]:
    parts, operands, needs = _sync_backward_parts(*args)
    found, sums = parts.sums(needs, args[0], operands, (*_with_offset(args[7], args[8], _strategy_of(parts)), args[9]))
    return (*found, sums)


def _sync_gradient(*args: Any) -> tuple[Tensor | None, ...]:
    parts, operands, needs = _sync_backward_parts(*args)
    kept = *_with_offset(args[7], args[8], _strategy_of(parts)), args[9]
    return tuple(parts.gradient(needs, args[0], [*operands, *kept], args[10]))


@torch.library.register_fake("gemmnorm::linear_scale_sync_batch_norm", lib=_library)
def _sync_whole_fake(*args: Any) -> Tensor:
    x, weight, _, scale = args[:4]
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=runtime.output_dtype(x, scale))  # type: ignore[no-any-return]


@torch.library.register_fake("gemmnorm::sync_statistics", lib=_library)
def _sync_statistics_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    (x, weight), strategy = args[:2], _options_at(9, args)[0].strategy
    features, dtype = weight.shape[0], reference.statistics_dtype(x.dtype)
    groups = _offset_rows(x.shape[0], strategy)
    return (
        x.new_empty((x.shape[0], features)),
        x.new_empty((groups, features), dtype=dtype),
        x.new_empty(2 * features + 1, dtype=dtype),
    )


@torch.library.register_fake("gemmnorm::sync_normalize", lib=_library)
def _sync_normalize_fake(*args: Any) -> tuple[Tensor, Tensor]:
    statistics = args[0].new_empty((3, args[1].shape[0]), dtype=reference.statistics_dtype(args[0].dtype))
    return _sync_whole_fake(*args), statistics


@torch.library.register_fake("gemmnorm::sync_sums", lib=_library)
def _sync_sums_fake(*args: Any) -> tuple[Tensor | None, ...]:
    statistics = args[9]
    wanted = zip(args[3:7], args[-1][2:], strict=True)
    found = (None if t is None or not need else t.new_empty(t.shape) for t, need in wanted)
    return (*found, statistics.new_empty((2, statistics.shape[1])))


@torch.library.register_fake("gemmnorm::sync_gradient", lib=_library)
def _sync_gradient_fake(*args: Any) -> tuple[Tensor | None, ...]:
    return tuple(t.new_empty(t.shape) if need else None for t, need in zip(args[1:3], args[-1][:2], strict=True))


_library.impl("linear_scale_sync_batch_norm", _sync_whole, "Autograd")
_library.impl("linear_scale_sync_batch_norm", _sync_whole, "CompositeExplicitAutograd")
_library.impl("sync_statistics", _sync_statistics, "CompositeExplicitAutograd")
_library.impl("sync_normalize", _sync_normalize, "CompositeExplicitAutograd")
_library.impl("sync_sums", _sync_sums, "CompositeExplicitAutograd")
_library.impl("sync_gradient", _sync_gradient, "CompositeExplicitAutograd")
