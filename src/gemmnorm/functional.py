"""The functional form of the fused operator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import activations, plan
from .errors import GemmNormProductTypeError, GemmNormRuntimeError, GemmNormTypeError, GemmNormValueError
from .op import reference, route, sync
from .runtime.arguments import check_arguments
from .runtime.operands import Operands, Options

_fusion = True


def set_fusion(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Switch the fused operation off or on, in all later calls.

    While it is off, the modules of fused models and of `LinearScaleBatchNorm1d` run one by one, and
    `linear_scale_batch_norm` is the chain of PyTorch's operations, which has second derivatives. Takes effect at once;
    used as a context manager it is undone at the end.

    Examples:
        >>> with gemmnorm.set_fusion(False):
        ...     y = model(torch.randn(32, 128))
    """
    global _fusion
    previous, _fusion = _fusion, bool(enabled)
    return _restoring(previous)


@contextlib.contextmanager
def _restoring(previous: bool) -> Iterator[None]:
    global _fusion
    try:
        yield
    finally:
        _fusion = previous


def fusion_is_on() -> bool:
    """What `set_fusion` said last."""
    return _fusion


def linear_scale_batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | float | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    *,
    num_batches_tracked: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: str | None = None,
    process_group: Any | None = None,
    strategy: str | None = None,
    keep_product: bool | str = "auto",
) -> Tensor:
    """φ(BatchNorm((x Wᵀ + b)·s)) in fused kernels; the same function as the chain of PyTorch ops.

        F.batch_norm(F.linear(input, weight, bias) * scale, running_mean, running_var, bn_weight, bn_bias,
                     training, momentum, eps)                     followed by the activation

    Args:
        input: x [B, I]. With three dimensions the original ops run (BatchNorm1d normalises dimension 1).
        weight: [O, I], as `nn.Linear` stores it.
        bias: [O] or None.
        scale: a tensor [O], [1, O], [1] or [], a number, or None.
        running_mean: [O] or None; updated in place when `training`.
        running_var: [O] or None; updated in place with the unbiased variance when `training`.
        bn_weight: γ [O] or None.
        bn_bias: β [O] or None.
        num_batches_tracked: the int64 counter of `nn.BatchNorm1d`, or None; incremented when `training`.
        training: normalise with the statistics of this batch (else with the running ones).
        momentum: weight of the new statistics in the running ones; None averages over all batches so far.
        eps: added to the variance.
        activation: None, or a name such as `"relu"`, `"gelu_tanh"`, `"leaky_relu(0.2)"` (`gemmnorm.activations`).
        process_group: synchronise the statistics over this `torch.distributed` group in training, as `SyncBatchNorm`
            does: one exchange forward and one backward, which every rank has to take part in, an empty one too.
            Gradients of vectors are this rank's share; the sum over the ranks is the whole batch's (docs/ranks.md).
        strategy: one of `gemmnorm.plan.STRATEGIES`; None lets the planner choose.
        keep_product: False keeps nothing of y's size for the backward in training, which multiplies x Wᵀ again; where
            that cannot be (not Hopper, float32 without TF32, rows that are no multiple of 16 bytes) the product is
            kept. "auto" leaves it to `set_keep_product`, and that to the predicted time. `FlopCounterMode` counts what
            is multiplied again, as it does under a checkpoint.

    Returns:
        y [B, O], of the dtype that the chain of PyTorch ops would return, under autocast too.

    Raises:
        GemmNormValueError: a wrong shape (also a `RuntimeError`, as in F.linear and F.batch_norm), one row in training
            mode (a `ValueError`, as in BatchNorm1d), a momentum below 0, or ranks that differ in out_features.
        GemmNormTypeError: what is no tensor or no process group, or dtypes or devices that do not go together (of x and
            weight also a `RuntimeError`).

    Examples:
        >>> x, weight = torch.randn(32, 128), torch.randn(256, 128)
        >>> y = gemmnorm.linear_scale_batch_norm(x, weight, scale=torch.randn(256), training=True, activation="relu")
    """
    for name, given in (("input", input), ("weight", weight)):
        if not isinstance(given, Tensor):
            raise GemmNormProductTypeError(f"{name}: expected a tensor; got {type(given).__name__}")
    check_process_group(process_group)
    scale = read_scale(input, scale)
    operands = Operands(
        input, weight, bias, as_vector(scale), running_mean, running_var, num_batches_tracked, bn_weight, bn_bias
    )  # fmt: skip
    options = Options(
        as_number(scale), training, as_factor(momentum, num_batches_tracked), eps, activation, strategy,
        torch.is_grad_enabled(), plan.parse_keep_product(keep_product),
    )  # fmt: skip
    return call(operands, options, process_group)


def call(operands: Operands, options: Options, process_group: Any | None) -> Tensor:
    """`linear_scale_batch_norm` of operands and options that are put together."""
    if operands.x.dim() != 2:
        _check_dimensions(operands.x, options.training and process_group is not None and synchronises(process_group))
    if not _fusion:
        return _plain(operands, options, process_group)
    if not torch.compiler.is_compiling():  # an unknown name is refused before anything is updated
        if options.activation is not None:
            activations.parse(options.activation)
        if options.strategy is not None:  # [] is no name either
            plan.check_strategy(options.strategy if isinstance(options.strategy, str) else repr(options.strategy))
        if route.profiled():
            with torch.profiler.record_function("gemmnorm.linear_scale_batch_norm"):
                return route.linear_scale_batch_norm(operands, options, process_group)
    return route.linear_scale_batch_norm(operands, options, process_group)


def _plain(operands: Operands, options: Options, process_group: Any | None) -> Tensor:
    """The chain of PyTorch's operations."""
    if options.training and process_group is not None and synchronises(process_group):
        raise GemmNormRuntimeError("process_group: switched off, and so the statistics are not synchronised")
    if operands.x.dim() == 2:
        check_arguments(operands, options.training)
    return reference.chain(operands, options)


def read_scale(x: Tensor, scale: Tensor | float | None) -> Tensor | float | None:
    """`scale`; as a number where it is a tensor without dimensions on the CPU, and x on a GPU: PyTorch reads it too."""
    if not isinstance(scale, Tensor) or scale.dim() > 0 or scale.device.type != "cpu" or not x.is_cuda:
        return scale
    return scale if scale.requires_grad or torch.compiler.is_compiling() else float(scale)


def as_vector(scale: Tensor | float | None) -> Tensor | None:
    """The scale where it is a tensor."""
    return scale if isinstance(scale, Tensor) else None


def as_number(scale: Tensor | float | None) -> float:
    """The scale where it is a number, else 1."""
    if scale is None or isinstance(scale, Tensor):
        return 1.0
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise GemmNormTypeError(f"scale: expected a tensor, a number or None; got {scale!r}") from None


def as_factor(momentum: float | None, num_batches_tracked: Tensor | None) -> float:
    """`Options.momentum` of BatchNorm's `momentum`."""
    if momentum is not None:
        if isinstance(momentum, str) or momentum < 0:
            raise GemmNormValueError(f"momentum: expected None or a number from 0 on; got {momentum!r}")
        return momentum
    return 0.0 if num_batches_tracked is None else -1.0


def check_process_group(process_group: Any | None) -> None:
    """Raise where it is none. On ranks outside of a new group `torch.distributed.new_group` gives another object."""
    if process_group is None or torch.compiler.is_compiling():
        return
    if not dist.is_available() or not (
        isinstance(process_group, dist.ProcessGroup) or process_group is dist.GroupMember.NON_GROUP_MEMBER
    ):
        raise GemmNormTypeError(f"process_group: expected one of torch.distributed's or None; got {process_group!r}")


def synchronises(process_group: Any) -> bool:
    """The group has ranks to take statistics over."""
    return sync.world_size(process_group) > 1


def _check_dimensions(x: Tensor, synchronised: bool) -> None:
    """As `nn.BatchNorm1d` does; and statistics that are taken over several ranks are those of rows."""
    if x.dim() != 3:
        raise GemmNormValueError(f"expected 2D or 3D input (got {x.dim()}D input)")
    if synchronised:
        raise GemmNormValueError("input: expected 2 dimensions with a process_group; got 3 (nn.SyncBatchNorm takes 3)")
