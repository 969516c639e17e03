"""Which way a call goes: plain PyTorch ops, prepared kernels, or the registered operator."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import plan
from ..runtime import call as runtime
from ..runtime.arguments import check_arguments
from ..runtime.arithmetic import arithmetic
from ..runtime.operands import Likeness, Operands, Options
from ..runtime.settings import settings, traced
from ..runtime.traced import traced_as_constant
from . import autograd, column_parallel, reference, sync
from .registration import forward_op, has_function_modes, has_modes


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
    observed = torch.compiler.is_compiling() or _is_observed(wanted)
    if _synchronises(options, process_group):
        if observed or not _are_plain(operands):
            return sync.by_operators(operands, options, process_group)
        return sync.prepared(operands, options, process_group)(operands)
    if wanted not in (None, UNKNOWN):
        return reference.chain(operands, options)
    if not torch.compiler.is_compiling():
        if runs_plain_ops(x, options.strategy):
            check_arguments(operands, options.training)
            return reference.chain(operands, options)
        run = None if observed else prepared(operands, options, process_group)
        if run is not None:
            return run(operands)
    check_arguments(operands, options.training)
    if torch.compiler.is_compiling():
        return in_a_graph(operands, options)
    y: Tensor = forward_op(*operands, *options._replace(save=False, cast=None))[0]
    return y


def in_a_graph(operands: Operands, options: Options) -> Tensor:
    """y by the operator, while a graph is traced."""
    # Dynamo of 2.8 cannot slice a named tuple.
    scale_value, training, momentum, eps, activation, strategy, _, keep, _ = options
    strategy, keep = traced(strategy, keep)
    y: Tensor = forward_op(*operands, scale_value, training, momentum, eps, activation, strategy, False, keep, None)[0]
    return y


def prepared(operands: Operands, options: Options, process_group: Any | None) -> Callable[[Operands], Tensor] | None:
    """What computes y of a matrix x in eager mode, where nothing observes the call. None where the operator has to.

    That is way 2 or 4 of `linear_scale_batch_norm`'s; off the GPU, 3.
    """
    x = operands.x
    if _synchronises(options, process_group):
        return sync.prepared(operands, options, process_group) if _are_plain(operands) else None
    if x.is_meta:
        return None
    if runs_plain_ops(x, options.strategy):
        if not _are_plain(operands):
            return None
        check_arguments(operands, options.training)
        return functools.partial(reference.chain, options=options)
    call = runtime.find(operands, options._replace(cast=_autocast_dtype(x)), "eager")
    if call is None or not call.kernels:
        return None
    return functools.partial(autograd.apply, call) if call.options.save else call.result


class CachedCall(NamedTuple):
    """What was prepared for a call, kept for later ones of the same `surroundings`, options and process group.

    Attributes:
        alike: whether operands are like that call's. It asks which dispatch keys PyTorch would look at, and so finds a
            function transform, a trace, inference mode, and autocast switched on or off as well.
        autocast, arithmetic: what else that call's operands were multiplied by.
        run: y of operands that it `serves`.
    """

    alike: Likeness
    autocast: torch.dtype | None
    arithmetic: str
    run: Callable[[Operands], Tensor]

    def serves(self, operands: Operands) -> bool:
        """A call of these operands is one like that."""
        return (
            self.alike(operands)
            and (self.autocast is None or self.autocast == _autocast_dtype(operands.x))
            and (self.arithmetic == "native" or self.arithmetic == arithmetic(operands.x.dtype))
        )


def cached_call(operands: Operands, options: Options, process_group: Any | None) -> CachedCall | None:
    """`prepared`, to be kept."""
    run = prepared(operands, options, process_group)
    return None if run is None else kept_call(operands, run)


def kept_call(operands: Operands, run: Callable[[Operands], Tensor]) -> CachedCall:
    """`run`, for operands like these in surroundings like now."""
    x = operands.x
    product = "native" if runs_plain_ops(x, None) else arithmetic(x.dtype)
    return CachedCall(Likeness(operands), _autocast_dtype(x), product, run)


def surroundings(x: Tensor) -> tuple[Any, ...] | None:
    """What decides, besides its arguments, how a call goes. None where it is not kept, or something observes it."""
    if not x.is_cuda and x.dim() != 2 and runs_plain_ops(x, None):  # module by module
        return None
    try:  # `profiled` and `has_modes`, without calls of functions
        if (
            torch.autograd.profiler._is_profiler_enabled
            or torch._C._len_torch_dispatch_stack()
            or (torch._C._len_torch_function_stack() and has_function_modes())
            or forward_ad._current_level >= 0
        ):
            return None
    except AttributeError:  # private names: docs/private_api.md
        return None
    return runtime.generation, torch.is_grad_enabled(), runtime.unobserved(), settings()


def profiled() -> bool:
    """A profiler of PyTorch's is running."""
    return getattr(torch.autograd.profiler, "_is_profiler_enabled", True)  # docs/private_api.md


def _synchronises(options: Options, process_group: Any | None) -> bool:
    return process_group is not None and options.training and sync.world_size(process_group) > 1


def _are_plain(operands: Operands) -> bool:
    """No operand is of a subclass of Tensor, which would have to see the operator."""
    return all(t is None or type(t) in runtime.PLAIN for t in operands)


def runs_plain_ops(x: Tensor, strategy: str | None) -> bool:
    """No kernels can serve x where it is, nobody has asked for a strategy, and nobody is recording plans."""
    return not x.is_cuda and runtime.unobserved() and plan.check_strategy(strategy) is None


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    device = "cuda" if x.is_cuda else x.device.type  # the second takes 0.3 µs
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


_asked = getattr(torch.compiler, "is_exporting", None)  # from PyTorch 2.7 on


_CONTROL_FLOW = ("cond", "while_loop", "map", "map_impl", "scan", "associative_scan")
EXPORTED, IN_A_BRANCH, IN_A_BODY = "exported", "inside a branch or loop", "inside an operator's body"


@traced_as_constant
def where_in_a_graph() -> str:
    """Called at trace time. Dynamo exports, or traces the body of a higher-order operator: of PyTorch's control flow,
    with gradients, or of another, as a checkpoint. "" where it does none of that.
    """
    if _is_exporting():
        return EXPORTED
    try:
        translator: Any = sys.modules["torch._dynamo.symbolic_convert"]
        output = translator.InstructionTranslator.current_tx().output
        bodies = [name for name, _ in output.current_tracer.source_fn_stack]
        if torch.is_grad_enabled() and any(name in _CONTROL_FLOW for name in bodies):
            return IN_A_BRANCH
        return "" if output.is_root_tracer() else IN_A_BODY
    except (KeyError, AttributeError):  # private names: docs/private_api.md
        return IN_A_BODY


def _is_exporting() -> bool:
    """Dynamo of 2.8 to 2.11 traces `torch.compiler.is_exporting` as True everywhere, so it is not to be traced.

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
    """Who needs the single operations: a function transform or mode, forward-mode differentiation, a trace, an export.

    None where nobody does, `UNKNOWN` where PyTorch does not say. What is exported holds PyTorch's own operations and
    runs without this package. In a branch or loop PyTorch takes gradients only of operations all of whose inputs have
    one, which a bias of None has not.
    """
    if torch.compiler.is_compiling():
        where = where_in_a_graph()
        return where if where in (EXPORTED, IN_A_BRANCH) else None
    try:
        if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            return "inside a function transform"
        if has_function_modes():
            return "inside a TorchFunctionMode"
    except AttributeError:  # private names: docs/private_api.md
        return UNKNOWN
    return "traced by torch.jit" if torch.jit.is_tracing() else None  # type: ignore[attr-defined]


def _is_observed(wanted: str | None) -> bool:
    """Somebody wants the single operations, or a mode has to see the operator."""
    return wanted is not None or has_modes()
