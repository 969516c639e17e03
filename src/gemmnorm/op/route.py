"""Which way a call goes: plain PyTorch ops, prepared kernels, or the registered operator."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import plan
from ..runtime import call as runtime
from ..runtime.arguments import check_arguments
from ..runtime.operands import Operands, Options
from ..runtime.traced import traced_as_constant
from . import autograd, column_parallel, reference, sync
from .registration import forward_op, has_modes


def linear_scale_batch_norm(operands: Operands, options: Options, process_group: Any | None) -> Tensor:
    """y, by the first of these ways that serves the call (of a weight sharded over ranks, for the local part):

    1. x does not have two dimensions: the chain of PyTorch ops.
    2. Training with a process group of several ranks: `sync`, by these same ways.
    3. Somebody needs the single operations (`why_plain_ops`), or the call is off the GPU, in eager mode, with no
       strategy asked for, where the operator's host time would slow it: the chain.
    4. Eager mode, and nothing observes the single operators: the prepared call (`runtime.call`) runs its kernels
       directly, under `autograd.LinearScaleBatchNorm` where a gradient is wanted. PyTorch's dispatcher is not asked.
    5. Otherwise (traced, observed, a tensor subclass, a call that no kernel serves): the operator (`registration`).
    """
    x = operands.x
    if type(operands.weight) not in runtime.PLAIN and column_parallel.serves(operands.weight):
        return column_parallel.linear_scale_batch_norm(
            operands, lambda parts: linear_scale_batch_norm(parts, options, process_group)
        )
    if x.dim() != 2:
        return reference.chain(operands, options)
    wanted = why_plain_ops()
    if process_group is not None and options.training and sync.world_size(process_group) > 1:
        observed = (
            torch.compiler.is_compiling()
            or _is_observed(wanted)
            or any(type(t) not in runtime.PLAIN for t in operands if t is not None)
        )
        return sync.linear_scale_sync_batch_norm(operands, options, process_group, observed)
    if wanted not in (None, UNKNOWN):
        return reference.chain(operands, options)
    if not torch.compiler.is_compiling():
        if not x.is_cuda and runtime.unobserved() and plan.check_strategy(options.strategy) is None:
            check_arguments(operands, options.training)
            return reference.chain(operands, options)
        if not (x.is_meta or _is_observed(wanted)):  # there is no autocast for meta tensors to ask about
            device = "cuda" if x.is_cuda else x.device.type  # the second takes 0.3 µs
            autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            call = runtime.find(operands, options, autocast, "eager")
            if call is not None and call.kernels:
                if call.options.save:
                    return autograd.apply(call, operands)
                return call.forward(operands)[0]
    check_arguments(operands, options.training)
    # Dynamo of 2.8 cannot slice a named tuple.
    scale_value, training, momentum, eps, activation, strategy, _, keep = options
    y: Tensor = forward_op(*operands, scale_value, training, momentum, eps, activation, strategy, False, keep)[0]
    return y


_asked = getattr(torch.compiler, "is_exporting", None)  # from PyTorch 2.7 on


@traced_as_constant
def is_exporting() -> bool:
    """Called at trace time: Dynamo of 2.8 to 2.11 traces `torch.compiler.is_exporting` as True everywhere.

    Before 2.7, Dynamo's own trace says so, and a trace that is not Dynamo's is `torch.export(strict=False)`'s.
    """
    if _asked is not None:
        return _asked()  # type: ignore[no-any-return]
    try:
        return sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx().export  # type: ignore
    except (KeyError, AttributeError):
        return True


UNKNOWN = "this PyTorch lacks private names that gemmnorm needs (docs/private_api.md)"


def why_plain_ops() -> str | None:
    """Who needs the single operations: a function transform, forward-mode differentiation, a trace, an export.

    None where nobody does, `UNKNOWN` where PyTorch does not say. What is exported holds PyTorch's own operations and
    runs without this package.
    """
    if torch.compiler.is_compiling():
        return "exported" if is_exporting() else None
    try:
        if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            return "inside a function transform"
    except AttributeError:  # private names: docs/private_api.md
        return UNKNOWN
    return "traced by torch.jit" if torch.jit.is_tracing() else None  # type: ignore[attr-defined]


def _is_observed(wanted: str | None) -> bool:
    """Somebody wants the single operations, or a mode has to see the operator."""
    return wanted is not None or has_modes()
