"""A chain of modules called as one operation, or module by module where one operation would not do what they do.

`LinearScaleBatchNorm1d` and fused models hold a `ChainCall` for each chain. It looks at the modules at every call,
because anything may have been done to them since the last one.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import activations, plan
from .children import (
    NORMS,
    POINTWISE,
    channels_last,
    dimensions,
    from_rows,
    is_plain_tensor,
    is_untouched,
    matrix,
    norm_class,
    product_class,
    rows_of,
)
from .errors import GemmNormRuntimeError, GemmNormWarning
from .functional import as_factor, as_number, call, fusion_is_on, read_scale, synchronises
from .op import column_parallel
from .op.route import (
    IN_A_BODY,
    UNKNOWN,
    CachedCall,
    cached_call,
    in_a_graph,
    kept_call,
    runs_plain_ops,
    surroundings,
    where_in_a_graph,
    why_plain_ops,
)
from .runtime.arithmetic import convolutions_differ
from .runtime.operands import CASTABLE, Operands, Options

# Activation classes that are one function whatever their attributes: found without asking each row of the table.
_NAME_OF = {row.module: row.name for row in activations.TABLE if not row.parameters and not row.matches}
View = Callable[[Tensor], Tensor]
_KEPT = 16  # calls that a chain remembers: batch sizes, training and evaluation, with gradients and without
_global_hooks = getattr(nn.modules.module, "_has_any_global_hook", lambda: False)  # PyTorch 2.4 has none


# --- the call --------------------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """What was found out for a call, for later ones of its `_state` whose operands the `call` serves.

    product: the class whose x has to be laid out as rows for it; None: x is a matrix.
    as_rows: y is those rows, whatever views are between the product and the BatchNorm.
    """

    call: CachedCall
    product: type[nn.Module] | None
    as_rows: bool

    def by_rows(self, operands: Operands, view: View | None, any_strides: bool) -> Tensor:
        """y of an x that is laid out as rows, before and, where it has to be, after."""
        x, weight = operands[:2]
        product: Any = self.product
        y = self.call.run(operands._replace(x=rows_of(x, product), weight=matrix(weight)))
        return y if self.as_rows else _laid_out(from_rows(y, x, product), view, any_strides)


class ChainCall:
    """activation(bn(view(linear(x) · scale))), and a count of the ways that it went.

    Attributes:
        chosen: False where `fuse` was told to leave this chain alone.
        scaled: the modules' code multiplies by `scale`, whatever that is: None raises what PyTorch raises.
        fused: how many calls ran as one operation.
        unfused: how many ran module by module, by reason.
        compiled: "" until a compiler has traced a call; then "fused", or the reason why its graph holds single ops. Not
            of a call inside another operator's body, as of a checkpoint: nothing may be written from there.
    """

    def __init__(self, chosen: bool = True, scaled: bool = False) -> None:
        self.chosen, self.scaled = chosen, scaled
        self.fused = 0
        self.unfused: Counter[str] = Counter()
        self.compiled = ""
        self._known: dict[tuple[Any, ...] | None, _Known] = {}  # by `_state`

    def __call__(
        self,
        x: Tensor,
        linear: nn.Linear,
        bn: nn.BatchNorm1d | nn.SyncBatchNorm,
        *,
        scale: Tensor | float | None = None,
        activation: nn.Module | str | None = None,
        view: View | None = None,
        ranks: tuple[int, ...] = (2,),
        any_strides: bool = False,
        process_group: Any | None = None,
        keep_product: bool | str = "auto",
    ) -> Tensor:
        """x [B, I] → [B, O], with the modules' own parameters and buffers.

        A SyncBatchNorm's statistics are those of its process group, on the CPU too.

        Args:
            linear: also a convolution over single positions, which takes x [N, I, ...].
            view: lays the product out so that its features are dimension 1, and keeps every element.
            ranks: how many dimensions x [..., I] may have.
            any_strides: nobody can tell the strides of the result, so they need not be those of the original's.
            process_group, keep_product: as in `linear_scale_batch_norm`.

        Raises:
            GemmNormRuntimeError: `process_group` is to synchronise the statistics and the modules must run one by one.
        """
        if torch.compiler.is_compiling() and process_group is None:
            y = self._in_a_graph(x, linear, bn, scale, activation, view, ranks, any_strides, keep_product)
            if y is not None:
                return y
        state, scale = None, read_scale(x, scale)
        if is_plain_tensor(x) and not torch.compiler.is_compiling():
            product: Any = type(linear)
            if product in POINTWISE and process_group is None and self.chosen and fusion_is_on():
                # Asked first: what is not fused is to lose no time.
                features: Any = linear.out_channels
                fits = x.dim() == dimensions(product)
                apart = _positions_apart(x, product, features, bn, any_strides) if fits else None
                if apart is not None:
                    self.unfused[apart] += 1
                    return self._one_by_one(x, linear, bn, scale, view, activation)
            how = (view is None, ranks, any_strides, keep_product, process_group)
            state = self._state(x, linear, bn, scale, activation, how)
            known = self._known.get(state)
            if known is not None and known.call.serves(operands := _operands(x, _kept_tensors(linear, bn), bn, scale)):
                self.fused += 1
                return known.call.run(operands) if known.product is None else known.by_rows(operands, view, any_strides)
        product = product_class(linear)  # None has its reason
        reason = "the scale is None" if scale is None and self.scaled else self._in_the_way(linear, product, bn)
        if reason is not None:
            state = None
        else:
            tensors = tensors_of(linear, bn)
            reason = _unfit(x, product, tensors, bn, scale, ranks)
        is_matrix = reason is None and view is None and product is nn.Linear and x.dim() == 2
        if reason is None and not is_matrix:
            reason = _no_matrix(x, product, tensors[0], bn, any_strides)
        self.note(reason)
        if reason is not None:
            if process_group is not None and bn.training and synchronises(process_group):
                raise GemmNormRuntimeError(f"process_group: {reason}, and so the statistics are not synchronised")
            return self._one_by_one(x, linear, bn, scale, view, activation)
        group = (process_group or _group_of(bn)) if bn.training else None  # as nn.SyncBatchNorm
        rows, given = x, tensors
        if not is_matrix:
            if group is None and not torch.compiler.is_compiling() and runs_plain_ops(x, None):
                # The plain ops of rows would add up in another order than those of x as it is.
                return self._one_by_one(x, linear, bn, scale, view, activation)
            rows, tensors = rows_of(x, product), (matrix(tensors[0]), *tensors[1:])
        child, name = (activation, _name_of(activation)) if isinstance(activation, nn.Module) else (None, activation)
        operands = _operands(rows, tensors, bn, scale)
        options = _options(operands, bn, scale, name, keep_product)
        found = cached_call(operands, options, group) if state is not None else None
        y = of_rows = call(operands, options, group) if found is None else found.run(operands)
        if not is_matrix:
            y = _laid_out(from_rows(of_rows, x, product), view, any_strides)
        if found is not None:
            kept = found if is_matrix else kept_call(_operands(x, given, bn, scale), found.run)
            # A view that depends on the product alone lays out the next one likewise.
            fixed = view is None or getattr(view, "__closure__", view) is None
            as_rows = fixed and y.is_contiguous() and y.shape == of_rows.shape and y.data_ptr() == of_rows.data_ptr()
            self._remember(state, _Known(kept, None if is_matrix else product, as_rows))
        return y if child is None or name is not None else child(y)  # type: ignore[no-any-return]

    def _in_a_graph(
        self,
        x: Tensor,
        linear: nn.Linear,
        bn: nn.Module,
        scale: Tensor | float | None,
        activation: nn.Module | str | None,
        view: View | None,
        ranks: tuple[int, ...],
        any_strides: bool,
        keep_product: bool | str,
    ) -> Tensor | None:
        """The operator, of modules that nothing was done to; None where more has to be looked at.

        At every call of a graph Dynamo asks whether the functions and globals that its trace has met are still the
        same. This meets few of them.
        """
        found = where_in_a_graph()
        if not (
            found in ("", IN_A_BODY)
            and self.chosen
            and fusion_is_on()
            and type(linear) is nn.Linear
            and type(bn) is nn.BatchNorm1d
            and is_untouched(linear)
            and is_untouched(bn)
            and not (scale is None and self.scaled)
        ):
            return None
        tensors = _by_attribute(linear, bn)
        if not is_plain_tensor(tensors[0]) or _unfit(x, nn.Linear, tensors, bn, scale, ranks) is not None:
            return None
        if found != IN_A_BODY:
            self.compiled = "fused"
        child, name = (activation, _name_of(activation)) if isinstance(activation, nn.Module) else (None, activation)
        operands = _operands(x if x.dim() == 2 else rows_of(x, nn.Linear), tensors, bn, scale)
        y = in_a_graph(operands, _options(operands, bn, scale, name, keep_product))
        if view is not None or x.dim() > 2:
            y = _laid_out(from_rows(y, x, nn.Linear), view, any_strides)
        return y if child is None or name is not None else child(y)  # type: ignore[no-any-return]

    def _state(
        self,
        x: Tensor,
        linear: nn.Linear,
        bn: nn.BatchNorm1d | nn.SyncBatchNorm,
        scale: Tensor | float | None,
        activation: nn.Module | str | None,
        how: tuple[Any, ...],
    ) -> tuple[Any, ...] | None:
        """All but its tensors that decides how a call goes; None where each call has to be looked at.

        Two calls of one state whose operands are alike go the same way. `how`: what else the call was told; the process
        group comes last.
        """
        around = surroundings(x)
        if around is None or not (self.chosen and fusion_is_on()) or _global_hooks():
            return None
        convolution: tuple[Any, ...] = ()
        if type(linear) is not nn.Linear:
            product = product_class(linear)
            if product is None:
                return None
            if product is not nn.Linear:
                convolution = product, x.dtype == torch.float32 and convolutions_differ()
        if type(bn) not in NORMS:
            return None
        norm = bn.__dict__  # read once: an attribute of a module costs more
        if not (_is_bare(linear.__dict__) and _is_bare(norm)):
            return None
        if isinstance(activation, nn.Module):
            activation = _name_of(activation)
            if activation is None:
                return None
        group = _group_of(bn) if how[-1] is None and type(bn) is nn.SyncBatchNorm else None
        return (
            around, x.numel(), norm["training"], norm["track_running_stats"], norm["momentum"], norm["eps"],
            norm["num_features"], activation, None if isinstance(scale, Tensor) else scale, *how, group, *convolution,
        )  # fmt: skip

    def _remember(self, state: tuple[Any, ...] | None, known: _Known) -> None:
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[state] = known

    def _in_the_way(self, linear: nn.Module, product: type[nn.Module] | None, bn: nn.Module) -> str | None:
        """Why the modules must run one by one whatever the tensors are."""
        if not (self.chosen and fusion_is_on()):
            return "switched off"
        return _changed(linear, product, "Linear") or _changed(bn, norm_class(bn), "BatchNorm1d") or _watched()

    def note(self, reason: str | None) -> None:
        """Count a call: one operation, or the reason why it was none."""
        if torch.compiler.is_compiling():
            if where_in_a_graph() == "":
                self.compiled = reason or "fused"  # only ever written there: what a trace reads it depends on
        elif reason is None:
            self.fused += 1
        else:
            self.unfused[reason] += 1
            if reason in _NOT_THE_USERS:
                _warn(reason)

    def _one_by_one(
        self,
        x: Tensor,
        linear: nn.Module,
        bn: nn.Module,
        scale: Any,
        view: View | None,
        activation: nn.Module | str | None,
    ) -> Tensor:
        y = linear(x)
        y = y * scale if self.scaled or scale is not None else y
        y = bn(y if view is None else view(y))
        return activation(y) if isinstance(activation, nn.Module) else activations.forward(y, activation)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChainCall, (self.chosen, self.scaled)  # copies count for themselves


def _operands(x: Tensor, tensors: tuple[Any, ...], bn: Any, scale: Tensor | float | None) -> Operands:
    """x and the modules' `tensors` as a call has them."""
    weight, bias, running_mean, running_var, counter, bn_weight, bn_bias = tensors
    training = bn.training
    if not (training and bn.track_running_stats):
        counter = None
        if training:  # as in nn.BatchNorm1d: the running statistics are left out of it
            running_mean = running_var = None
    factor = scale if isinstance(scale, Tensor) else None
    return Operands(x, weight, bias, factor, running_mean, running_var, counter, bn_weight, bn_bias)


def _options(
    operands: Operands, bn: Any, scale: Tensor | float | None, activation: str | None, keep_product: bool | str
) -> Options:
    """What a call of `operands` is told besides."""
    momentum = as_factor(bn.momentum, operands.num_batches_tracked)
    training = bn.training or operands.running_mean is None
    keep = plan.parse_keep_product(keep_product)
    return Options(as_number(scale), training, momentum, bn.eps, activation, None, torch.is_grad_enabled(), keep)


def tensors_of(linear: nn.Linear, bn: nn.BatchNorm1d | nn.SyncBatchNorm) -> tuple[Any, ...]:
    """Weight and bias of `linear`; running statistics, count of batches, weight and bias of `bn`.

    From where modules keep them, because each attribute takes almost a microsecond. By attribute where one is not kept
    there (a module replicated), and for `torch.compile`.
    """
    return _by_attribute(linear, bn) if torch.compiler.is_compiling() else _kept_tensors(linear, bn)


def _kept_tensors(linear: Any, bn: Any) -> tuple[Any, ...]:
    try:
        parameters, norm, state = linear._parameters, bn._parameters, bn._buffers
        return (
            parameters["weight"], parameters["bias"], state["running_mean"], state["running_var"],
            state["num_batches_tracked"], norm["weight"], norm["bias"],
        )  # fmt: skip
    except (AttributeError, KeyError):  # docs/private_api.md
        return _by_attribute(linear, bn)


def _by_attribute(linear: Any, bn: Any) -> tuple[Any, ...]:
    return linear.weight, linear.bias, bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.weight, bn.bias


def _is_bare(held: dict[str, Any]) -> bool:
    """`is_untouched`, of what a module of PyTorch's own classes holds."""
    return not (
        held["_forward_hooks"]
        or held["_forward_pre_hooks"]
        or held["_backward_hooks"]
        or held["_backward_pre_hooks"]
        or "forward" in held
    )


def _group_of(bn: nn.BatchNorm1d | nn.SyncBatchNorm) -> Any:
    """The process group of a SyncBatchNorm, which without one of its own means all ranks."""
    if not (isinstance(bn, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized()):
        return None
    return bn.process_group or dist.group.WORLD


def _laid_out(y: Tensor, view: View | None, any_strides: bool) -> Tensor:
    y = y if view is None else view(y)
    return y if any_strides or y.dim() != 3 else y.contiguous()  # as BatchNorm1d gives it


def _name_of(activation: nn.Module) -> str | None:
    if not is_untouched(activation):
        return None
    return _NAME_OF.get(type(activation)) or activations.from_module(activation)


# --- what stands in the way ------------------------------------------------------------------------------------------


def _changed(module: nn.Module, base: type[nn.Module] | None, name: str) -> str | None:
    """`module` is parametrized, wrapped by an adapter, quantised, sharded or hooked; `base`: what it counts as."""
    if base is None:
        return f"the {name} is a {type(module).__name__}"
    return None if is_untouched(module) else f"the {name} has hooks or a forward of its own"


def _unfit(
    x: Tensor,
    product: type[nn.Module],
    tensors: tuple[Any, ...],
    bn: nn.BatchNorm1d | nn.SyncBatchNorm,
    scale: Tensor | float | None,
    ranks: tuple[int, ...],
) -> str | None:
    """x, the modules' `tensors` or the scale are not those of one operation."""
    weight, bias, running_mean, running_var, counter, *_ = tensors
    features = bn.num_features
    if not is_plain_tensor(x):
        return f"x is a {type(x).__name__}"
    plain = is_plain_tensor(weight)
    if not (plain or column_parallel.serves(weight)):
        return f"the weight is a {type(weight).__name__}"
    if x.dim() not in (ranks if product is nn.Linear else (dimensions(product),)):
        return f"x has {x.dim()} dimensions"
    if weight.shape[:2] != (features, x.shape[-1 if product is nn.Linear else 1]):
        return "the sizes do not fit"
    if bias is not None and bias.shape != (features,):
        return "the bias is of another shape"
    if bn.momentum is not None and bn.momentum < 0:
        return "the BatchNorm1d has a negative momentum"
    if weight.dtype != x.dtype and not (
        torch.is_autocast_enabled(x.device.type) and weight.dtype in CASTABLE and x.dtype in CASTABLE
    ):
        return "x and the weight differ in dtype"
    if (running_mean is None) != (running_var is None):
        return "the BatchNorm1d has one of two running statistics"
    if counter is not None and counter.dtype != torch.int64:
        return "the BatchNorm1d counts its batches in another dtype than int64"
    if counter is not None and counter.device != x.device:
        return "the BatchNorm1d counts its batches on another device"
    if isinstance(scale, Tensor) and not (
        is_plain_tensor(scale) is plain and tuple(scale.shape) in ((features,), (1, features), (1,), ())
    ):
        return "the scale is of another shape or class"
    return None


def _no_matrix(x: Tensor, product: type[nn.Module], weight: Tensor, bn: nn.Module, any_strides: bool) -> str | None:
    """x is not to be multiplied as rows. For a convolution that is where copying it costs more than is saved."""
    if not is_plain_tensor(weight):
        return f"the weight is a {type(weight).__name__}"
    return None if product is nn.Linear else _positions_apart(x, product, weight.shape[0], bn, any_strides)


def _positions_apart(
    x: Tensor, convolution: type[nn.Module], features: int, bn: nn.Module, any_strides: bool
) -> str | None:
    """A convolution's x is not to be multiplied as rows, one for each position."""
    if isinstance(bn, nn.SyncBatchNorm):
        return "the ranks would have to agree how a convolution's x lies in memory"
    if x.is_cuda and x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda") and convolutions_differ():
        return "PyTorch's switches allow TF32 to products or to convolutions, not to both"
    if channels_last(x) or (convolution is nn.Conv1d and any_strides and x.shape[1] <= features):
        return None
    return "x does not lie channels last"


_NOT_THE_USERS = frozenset({UNKNOWN})


@functools.lru_cache
def _warn(reason: str) -> None:
    """Once for each reason."""
    warnings.warn(f"a fused chain runs module by module: {reason}", GemmNormWarning, stacklevel=4)


def _watched() -> str | None:
    """Somebody wants to see the single operations, so they must run one by one."""
    wanted = why_plain_ops()
    if wanted is None and not torch.compiler.is_compiling() and _global_hooks():
        return "a global module hook is there"
    return wanted
