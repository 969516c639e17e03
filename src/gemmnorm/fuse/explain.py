"""What will run, in words, and compiling it ahead of time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import plan
from ..plan import Plan, Problem, choice
from ..runtime.arithmetic import float32_reason
from ..runtime.call import recording
from . import held
from .analysis import analyse, check_is_module
from .classes import fused_for_now
from .report import report_of

HERE = "measured here: by `gemmnorm tune` on this machine, not by the prediction"


def described(found: Plan) -> str:
    """A plan and what it was chosen from, in words."""
    here = [HERE] if choice.measured_here(found) else []
    return "\n".join([str(found), *(f"  {line}" for line in (*here, *plan.kept(found), *plan.comparison(found)))])


@dataclass(frozen=True)
class Explanation:
    """The plans of a model's chains in the order they run, and what was matched or refused.

    `str()` is the text: after each plan every candidate, with the terms of its predicted time, or why it cannot serve.
    `float32` says how float32 products are computed and which switch decided it, where a plan has any.
    """

    plans: tuple[Plan, ...]
    report: str = ""
    float32: str = ""

    def __str__(self) -> str:
        return "\n".join([*filter(None, (self.report, self.float32)), *map(described, self.plans)])


def explain(
    model_or_problem: nn.Module | Problem, *inputs: Any, strategy: str | None = None, **keywords: Any
) -> Explanation:
    """The plan, in words: which strategy, kernels and grids, the predicted time against the bare GEMM, and why.

    Args:
        model_or_problem: a `gemmnorm.plan.Problem`, or a model, fused or not. Buffers, gradients and random numbers
            stay as they are.
        *inputs: the model's inputs; its forward is run once to see the sizes, under the autocast in force, and with
            synchronised statistics on every rank. Without inputs only the report of matches and refusals is returned.
        strategy: explain this one instead of the planner's choice.
        **keywords: inputs by name.

    Raises:
        GemmNormTypeError: it is neither.
        GemmNormValueError: there is no such strategy.

    Examples:
        >>> text = str(gemmnorm.explain(model, torch.randn(32, 128)))
    """
    if isinstance(model_or_problem, Problem):
        return Explanation((plan.make_plan(model_or_problem, plan.check_strategy(strategy)),))
    check_is_module(model_or_problem)
    plan.check_strategy(strategy)
    model = model_or_problem
    owners = analyse(model)
    with fused_for_now(model, owners):
        report = str(report_of(model, owners, modules=True))
        if not inputs and not keywords:
            return Explanation((), report)
        with _undisturbed(model):
            plans = plans_of(model, inputs, strategy, keywords)
    wide = any(found.problem.dtype == "float32" and found.problem.chip is not None for found in plans)
    return Explanation(tuple(plans), report, float32_reason() if wide else "")


def plans_of(
    model: nn.Module, inputs: Sequence[Any], strategy: str | None = None, keywords: Mapping[str, Any] | None = None
) -> list[Plan]:
    """The plans of the calls in one forward of a fused model, which runs; its running statistics move."""
    with plan.set_strategy(strategy or plan.check_strategy(None)), recording() as plans, torch.no_grad():
        model(*inputs, **(keywords or {}))
    return plans


def warmup(model: nn.Module, *inputs: Any, **keywords: Any) -> None:
    """Compile every kernel that a forward and, in training mode, a backward of `model` on these inputs will need.

    Runs both once; kernels are kept in memory and in the disk cache. Buffers, gradients (the inputs' too) and random
    numbers stay as they are; what else `forward` changes, such as a counter of its own, moves. Autocast and precision
    settings in force at the call are honoured.

    Args:
        model: fused or not; whatever of it runs fused is compiled for.
        *inputs: the model's inputs, of the sizes and dtypes that will come.
        **keywords: inputs by name.

    Raises:
        GemmNormTypeError: `model` is no `nn.Module`.

    Examples:
        >>> gemmnorm.warmup(model, torch.randn(32, 128))
    """
    check_is_module(model)
    with _undisturbed(model), torch.set_grad_enabled(model.training and torch.is_grad_enabled()):
        out = model(*inputs, **keywords)
        roots = [t for t in _tensors(out) if t.grad_fn is not None]
        if model.training and roots:
            ones = [torch.ones_like(t) for t in roots]
            torch.autograd.grad(roots, _leaves(roots), ones, allow_unused=True)


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, a forward updates copies of the buffers, and gradients are not averaged over ranks; random states are put
    back at the end."""
    before = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    copies = {id(b): b.detach().clone() for _, buffers in before for b in buffers.values() if b is not None}
    devices = {t.device.index for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=sorted(devices)))
        stack.enter_context(held.random_state())
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        try:
            for current, kept in before:
                current.update({name: copies[id(b)] for name, b in kept.items() if b is not None})
            yield
        finally:
            for current, kept in before:
                current.clear()
                current.update(kept)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in what a forward returned."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(list(vars(value).values()))


def _leaves(roots: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that a backward from `roots` would give a gradient to."""
    leaves, waiting, seen = [], [t.grad_fn for t in roots], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves
