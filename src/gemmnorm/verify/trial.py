"""One run of one model, in the way that a caller uses it, and everything that is seen of it.

The original (eagerly, in float64, with rounding errors) and the candidate run through the same `run_trial`: what
a case asks for besides, its `use`, happens to all of them, and the limits follow. A use is a tuple of the words
below; plain values, because the candidate's process holds these files under other names.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..userfiles import is_seen, would_drop
from .outputs import as_real, take_apart
from .process import changed_settings, put_back, settings

__all__ = [
    "Trial",
    "arranged",
    "distance",
    "entries",
    "load_in_place",
    "memory_of",
    "moves",
    "run_trial",
    "same_inputs",
    "set_back",
    "shared_outputs",
]

# Ways to use a model.
NO_INPUT_GRADIENT = "inputs without gradients"
FROZEN = "every second parameter frozen"
ALL_FROZEN = "all parameters frozen"
KIND_FROZEN = "matrices frozen in training, the others in evaluation"  # as where norms alone are trained
STATISTICS = "normalisations alone in evaluation"  # `model.bn.eval()` after `model.train()`
TRANSPOSED = "inputs transposed in memory"
SLICED = "inputs in a wider tensor"
EXPANDED = "one cotangent for all elements"
TURNED = "cotangents transposed in memory"
SMALL = "small cotangents"
ADDED = "gradients added to others, twice"
DOUBLED = "gradients added to others, for twice the cotangents"  # the same by one backward
WRITTEN = "output written to before the backward"
BETWEEN = "another call before the backward"
AFTER = "after training"
AUTOCAST = "autocast around the model"  # in bfloat16, as in training with mixed precision
AUTOCAST_FP16 = "autocast in float16 around the model"
AUTOCASTS = {AUTOCAST: torch.bfloat16, AUTOCAST_FP16: torch.float16}

_SMALL = 2.0**-20
VOLATILE = "a buffer outside the state_dict"


@dataclass
class Trial:
    """One run of one model. `values` by quantity: "output", "bn.running_var", "grad:gemm.weight", "grad:input0".

    state    names of the values that are parameters' or buffers'; changed: those that the call changed
    spoiled  the backward wrote into the gradients that it was given
    left     settings of the process that the call left changed
    drops    [kind, probability, elements] of the dropouts, which keep every element; None where they cannot be seen
    """

    values: dict[str, Tensor]
    others: list[Any]  # outputs that are neither tensors nor floating-point numbers
    inputs: list[Any]  # as they are after the run
    outputs: list[Tensor]  # the tensors themselves, not copies
    structure: str  # of the output: "(Tensor, {'aux': Tensor})"
    require: list[bool]  # whether each output requires a gradient
    state: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    spoiled: bool = False
    left: list[str] = field(default_factory=list)
    drops: list[list[Any]] | None = None

    @property
    def kinds(self) -> list[str]:
        """The classes of the outputs, where they are not plain tensors; "" where they are."""
        return [_kind(y) for y in self.outputs]


def run_trial(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    training: bool,
    cotangent: Callable[[int, Tensor], Tensor] | None,
    mode: AbstractContextManager[Any] | None = None,
    use: Sequence[str] = (),
    before: Mapping[str, Tensor] | None = None,
    wanted: Collection[str] = (),
) -> Trial:
    """Run `model` forward, and backward against `cotangent(i, output_i)` unless that is None; collect everything.

    The inputs are used as they are (floating-point ones become leaves that require gradients, unless `use` says
    otherwise). `before` is the state before the run, for `changed`; of parameters, those are values, and `wanted`.
    """
    backward = cotangent is not None
    _recompile_always()
    leaves = [_leaf(value, backward and NO_INPUT_GRADIENT not in use) for value in inputs]
    model.zero_grad(set_to_none=True)
    found, spoiled = settings(), False
    with frozen(_chosen(model, training, use)):
        with put_back():
            if AFTER not in use:
                set_mode(model, training)
            if STATISTICS in use:
                _freeze_statistics(model)
            with mode or contextlib.nullcontext(), torch.set_grad_enabled(backward):
                before_it: dict[str, Tensor] = {}
                if AFTER in use:
                    before_it = _train_before(model, leaves)
                    set_mode(model, training)
                if backward and {ADDED, DOUBLED} & {*use}:
                    _give_gradients(model)
                with would_drop() as counter, _autocast(model, leaves, use):
                    output = take_apart(model(*map(_given, leaves)))
                left = ["grad mode"] if torch.is_grad_enabled() != backward else []
                torch.set_grad_enabled(backward)
                outputs = output.tensors
                values = before_it | {_output_name(i, len(outputs)): _as_plain(y) for i, y in enumerate(outputs)}
                require = [y.requires_grad for y in outputs]
                others = _call_others(model, leaves, training) if BETWEEN in use else []
                if cotangent is not None and all(cotangent(i, y).shape == y.shape for i, y in enumerate(outputs)):
                    spoiled = _run_backward(outputs, cotangent, use)
                    spoiled |= _run_backward(others, lambda i, y: 0.5 * cotangent(i, y), use)
            left += changed_settings(found)
        values.update({f"output number[{i}]": number for i, number in enumerate(output.numbers)})
        state, changed = _collect(model, before, wanted, values)
        values.update(_gradients(model, leaves) if backward else {})
    model.zero_grad(set_to_none=True)
    drops = [[*drop, elements] for drop, elements in sorted(counter.items())] if is_seen() else None
    return Trial(
        values, output.others, leaves, outputs, output.structure, require, state, changed, spoiled, left, drops
    )


def _gradients(model: nn.Module, leaves: Sequence[Any]) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *((f"input{i}", value) for i, value in enumerate(leaves))]
    gradients = {f"grad:{name}": value.grad for name, value in named if isinstance(value, Tensor)}
    return {name: as_real(value.detach()) for name, value in gradients.items() if value is not None}


def _recompile_always() -> None:
    """Past its limits Dynamo runs eagerly, or raises with `fullgraph`: what a program compiles is to be judged."""
    config = sys.modules.get("torch._dynamo.config")
    for name in ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, 1 << 20)


def _leaf(value: Any, require: bool) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        value.grad = None
        value.requires_grad_(require)
    return value


def _given(value: Any) -> Any:
    """What the model gets of a leaf: the same memory, and no leaf, so that it may write into it."""
    return _Given.apply(value) if isinstance(value, Tensor) and value.requires_grad else value


class _Given(torch.autograd.Function):  # type: ignore[misc]
    """A leaf as an input that is none: the same memory, and gradients go to the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def set_mode(model: nn.Module, training: bool) -> None:
    """As a program does: where the mode changes, not before every call, and not after a state has been loaded."""
    if any(module.training != training for module in model.modules()):
        model.train(training)


@contextlib.contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """These without gradient."""
    chosen = [p for p in parameters if p.requires_grad]
    for parameter in chosen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in chosen:
            parameter.requires_grad_(True)


def _chosen(model: nn.Module, training: bool, use: Sequence[str]) -> list[nn.Parameter]:
    """The parameters that a use freezes; by `FROZEN` those of odd places in training, the others in evaluation."""
    named = sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)
    found = [p for _, p in named]
    if FROZEN in use:
        return found[1 if training else 0 :: 2]
    if KIND_FROZEN in use:
        return [p for p in found if (p.dim() > 1) == training]
    return found if ALL_FROZEN in use else []


def _freeze_statistics(model: nn.Module) -> None:
    """Put the owners of running statistics into evaluation, by name: a candidate's may be of any class."""
    for name in model.state_dict():
        owner, _, last = name.rpartition(".")
        if owner and last == "running_mean":
            model.get_submodule(owner).eval()


def _call_others(model: nn.Module, leaves: Sequence[Any], training: bool) -> list[Tensor]:
    """Outputs of another call; a call in evaluation follows one in training, and the mode stays changed."""
    others = [_leaf(_half(value), isinstance(value, Tensor) and value.requires_grad) for value in leaves]
    outputs = take_apart(model(*map(_given, others))).tensors
    set_mode(model, not training)
    if training:
        with torch.no_grad():
            model(*map(_half, leaves))
    return outputs


def _give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


def _autocast(model: nn.Module, leaves: Sequence[Any], use: Sequence[str]) -> AbstractContextManager[Any]:
    """What a program has around the forward alone; float64 passes through it as it is."""
    dtype = autocast_dtype(use)
    if dtype is None:
        return contextlib.nullcontext()
    tensors = (v for v in (*leaves, *model.parameters()) if isinstance(v, Tensor))
    return torch.autocast(next((t.device.type for t in tensors), "cpu"), dtype)


def autocast_dtype(use: Sequence[str]) -> torch.dtype | None:
    """What products are rounded to by the autocast around the model; None where there is none."""
    return next((dtype for word, dtype in AUTOCASTS.items() if word in use), None)


def _half(value: Any) -> Any:
    """Other contents of the same kind, for calls whose results nobody looks at."""
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    return copied.mul_(0.5) if copied.is_floating_point() else copied


def _train_before(model: nn.Module, leaves: Sequence[Any]) -> dict[str, Tensor]:
    """Evaluation in inference mode, whose outputs these are, a training step with its backward, and a training call
    without one."""
    found: dict[str, Tensor] = {}
    for training, backward in ((False, False), (True, True), (True, False)):
        set_mode(model, training)
        with torch.set_grad_enabled(backward), torch.inference_mode(not training):
            outputs = take_apart(model(*map(_half, leaves))).tensors
            if roots := [y for y in outputs if y.requires_grad and backward]:
                torch.autograd.backward(roots, [torch.ones_like(y) for y in roots])
        if not training:
            names = (f"{_output_name(i, len(outputs))} in inference mode" for i in range(len(outputs)))
            found = {name: _as_plain(y) for name, y in zip(names, outputs, strict=True)}
        model.zero_grad(set_to_none=True)
    return found


def _run_backward(outputs: Sequence[Tensor], cotangent: Callable[[int, Tensor], Tensor], use: Sequence[str]) -> bool:
    """Backward from every output that requires a gradient; whether it wrote into what it was given."""
    roots = [(i, y) for i, y in enumerate(outputs) if y.requires_grad]
    roots = roots[:1] if SMALL in use else roots  # as a loss of one output
    if not roots:
        return False
    times = 2 if DOUBLED in use else 1
    given = [_laid_out(times * cotangent(i, y).to(y), use) for i, y in roots]
    kept = [g.clone() for g in given]
    if WRITTEN in use:
        for _, y in roots:
            y.add_(1.0)
    for last in (False, True) if ADDED in use else (True,):
        torch.autograd.backward([y for _, y in roots], list(given), retain_graph=not last)
    return not same_inputs(given, kept)


def _laid_out(cotangent: Tensor, use: Sequence[str]) -> Tensor:
    """A copy of a cotangent, as callers may give it."""
    if EXPANDED in use and cotangent.numel():
        return cotangent.flatten()[:1].clone().reshape([1] * cotangent.ndim).expand(cotangent.shape)
    if SMALL in use:
        return cotangent * _SMALL
    return _turned(cotangent) if TURNED in use else cotangent.clone()


def _turned(value: Tensor) -> Tensor:
    """A copy with the last dimension outermost in memory."""
    if value.ndim < 2:
        return value.clone()
    return value.movedim(-1, 0).clone(memory_format=torch.contiguous_format).movedim(0, -1)


def arranged(value: Any, use: Sequence[str]) -> Any:
    """A copy of an input as the use lays it out in memory; what is no tensor stays."""
    if not isinstance(value, Tensor):
        return value
    if TRANSPOSED in use:
        return _turned(value.detach())
    if SLICED in use and value.ndim:
        width = value.shape[-1]
        wide = value.detach().new_zeros((*value.shape[:-1], width + 3))
        wide[..., 1 : 1 + width] = value.detach()
        return wide[..., 1 : 1 + width]
    return value.detach().clone()


def _collect(
    model: nn.Module, before: Mapping[str, Tensor] | None, wanted: Collection[str], values: dict[str, Tensor]
) -> tuple[set[str], set[str]]:
    """Add buffers, and parameters that changed, to `values`; names of the state among them, and of what changed.

    Buffers are read before `state_dict()` is asked for: a model may use that call to write what is pending.
    """
    parameters, before = dict(model.named_parameters(remove_duplicate=False)), before or {}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    for name, value in model.state_dict().items():
        if name not in parameters and name not in buffers:
            buffers[name] = value.detach().clone()
    changed = {name for name, b in buffers.items() if name in before and not _same_bits(b, before[name])}
    for name, parameter in parameters.items():
        if name in before and not _same_bits(parameter.detach(), before[name]):
            changed.add(name)
        if name in changed or name in wanted:
            values[name] = as_real(parameter.detach().clone())
    values.update({name: as_real(buffer) for name, buffer in buffers.items()})
    return {*buffers, *parameters}, changed


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and (torch.equal(a, b) or same_inputs([a], [b]))


def _output_name(index: int, count: int) -> str:
    return "output" if count == 1 else f"output[{index}]"


def _as_plain(y: Tensor) -> Tensor:
    """A copy, of no subclass."""
    copied = y.detach().clone()
    return copied if type(copied) is Tensor else copied.as_subclass(Tensor)


def _kind(value: Tensor) -> str:
    """What is special about a tensor: its class, or attributes of its own that stand before PyTorch's."""
    if type(value) not in (Tensor, nn.Parameter):
        return type(value).__qualname__ or "subclass of Tensor"
    if value.is_inference():
        return "tensor of inference mode"
    own = sorted(name for name in vars(value) if hasattr(Tensor, name)) if hasattr(value, "__dict__") else []
    return f"Tensor with its own {', '.join(own)}" if own else ""


def load_in_place(model: nn.Module, state: Mapping[str, Tensor], *, buffers_only: bool = False) -> None:
    """Write a state into a model as an optimizer would: element by element, in place, behind no hook's back.

    With `buffers_only` parameters are written to where a call has changed them.
    """
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if not (buffers_only and name in parameters and _same_bits(value, state[name])):
                value.copy_(state[name])


def set_back(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write values into buffers, those that no state_dict holds."""
    if values:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in values:
                    buffer.copy_(values[name])


def entries(model: nn.Module) -> dict[str, str]:
    """What each parameter and buffer is: a parameter, a frozen one, a buffer or one outside the state_dict."""
    parameters = model.named_parameters(remove_duplicate=False)
    found = {name: "a parameter" if p.requires_grad else "a frozen parameter" for name, p in parameters}
    kept = model.state_dict().keys()
    buffers = ((name, "a buffer" if name in kept else "") for name, _ in model.named_buffers())
    return {**found, **{name: kind or VOLATILE for name, kind in buffers}}


def same_inputs(after: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether tensors kept every bit (NaN equals NaN)."""
    pairs = [(a, b) for a, b in zip(after, before, strict=True) if isinstance(b, Tensor)]
    return all(a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs)


def moves(
    model: nn.Module, state: Mapping[str, Tensor], inputs: list[Any], names: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """How far a change by half of each of these parameters, buffers and inputs moves the outputs in evaluation."""

    def outputs() -> list[Tensor]:
        copies = [v.detach().clone() if isinstance(v, Tensor) else v for v in inputs]
        return [
            y.double().nan_to_num(0.0).clone() for y in run_trial(model, copies, training=False, cotangent=None).outputs
        ]

    load_in_place(model, state)
    before = outputs()
    own = model.state_dict(keep_vars=True)
    for name in names:
        target = inputs[int(name[5:])] if name.startswith("input") and name not in own else own[name]
        kept = target.detach().clone()
        with torch.no_grad():
            target.mul_(1.5).add_(0.25 * kept.abs().mean().nan_to_num(0.0) + 0.01)
        yield name, max((distance(a, b) for a, b in zip(outputs(), before, strict=True)), default=0.0)
        with torch.no_grad():
            target.copy_(kept)
    load_in_place(model, state)


def distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖; infinite for another shape."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.detach().double().nan_to_num(0.0), b.detach().double().nan_to_num(0.0)
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def shared_outputs(model: nn.Module, inputs: Sequence[Any], training: bool) -> list[int]:
    """Which outputs of two calls lie in the same memory."""
    copies = [[v.detach().clone() if isinstance(v, Tensor) else v for v in inputs] for _ in range(2)]
    first, second = (run_trial(model, given, training=training, cotangent=None).outputs for given in copies)
    return [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if memory_of(a) == memory_of(b) != 0]


def memory_of(tensor: Tensor) -> int:
    """The address of the memory that it is a view of."""
    return tensor.untyped_storage().data_ptr()
