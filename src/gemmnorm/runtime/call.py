"""Which plan a call takes, what has to be converted for it, and its run, forward and backward."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import plan
from ..errors import GemmNormWarning
from ..op import reference
from ..op.arguments import check_arguments
from ..plan import Chip, Plan, Problem
from . import binding, driver, prepared
from .arithmetic import arithmetic
from .operands import Likeness, dense, first, kind, running_state, served_as_they_are, unified, vectors

_NAMES = {dtype: name for name, dtype in binding.DTYPES.items()}


@functools.lru_cache(maxsize=64)
def chip(device: torch.device) -> Chip | None:
    """What the planner needs to know of `device`; None where the kernels cannot run on it."""
    if device.type != "cuda" or torch.version.cuda is None or driver.unavailable() is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    return plan.chip_for(properties.major * 10 + properties.minor, properties.multi_processor_count)


def output_dtype(x: Tensor, scale: Tensor | None) -> torch.dtype:
    """The dtype that the chain of PyTorch ops returns: a scale with dimensions takes part in type promotion."""
    return x.dtype if scale is None or scale.dim() == 0 else torch.promote_types(x.dtype, scale.dtype)


def _size(size: int | torch.SymInt) -> int:
    """A number for the planner: under a symbolic trace the size that the trace was started with.

    No guard is installed. The strategy that is baked into a traced graph serves every batch size, because what a
    strategy can serve depends on the batch only where that is empty.
    """
    if isinstance(size, torch.SymInt):
        return int(getattr(size.node, "hint", None) or 1024)
    return size


def problem_of(
    x: Tensor,
    weight: Tensor,
    linear: Tensor | None,
    norm: Tensor | None,
    out_dtype: torch.dtype,
    activation: str | None,
    training: bool,
    save: bool,
    scaled: bool,
) -> Problem:
    """The planner's view of a call. `linear` and `norm` are any of the tensors whose dtype the group has, or None."""
    return Problem(
        _size(x.shape[0]),
        _size(x.shape[1]),
        _size(weight.shape[0]),
        _NAMES.get(x.dtype, str(x.dtype)),
        _NAMES.get(out_dtype, str(out_dtype)),
        "float32" if linear is None else _NAMES.get(linear.dtype, str(linear.dtype)),
        "float32" if norm is None else _NAMES.get(norm.dtype, str(norm.dtype)),
        arithmetic(x.dtype),
        activation,
        training,
        save,
        scaled,
        chip(x.device),
    )


_warned: set[str] = set()
_recorders: list[list[Plan]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[Plan]]:
    """Collects the forward plans of the calls made inside."""
    plans: list[Plan] = []
    _recorders.append(plans)
    try:
        yield plans
    finally:
        _recorders[:] = [other for other in _recorders if other is not plans]  # equal ones may be open


def unobserved() -> bool:
    """Nobody is recording plans."""
    return not _recorders


def resolve(problem: Problem, strategy: str | None) -> str:
    """The strategy that will run: the one asked for where it can serve, else the planner's choice.

    Compiles what it needs, so that a kernel that does not compile or load on this machine is found out here: then
    the next strategy takes over, with one warning.
    """
    return _resolved(problem, plan.check_strategy(strategy))


@functools.lru_cache(maxsize=4096)
def _resolved(problem: Problem, requested: str | None) -> str:
    verdicts = plan.applicable(problem)
    for name in plan.preference(problem, requested):
        if verdicts[name] is not None:
            continue
        try:
            binding.bind(plan.cached_plan(problem, name, "forward"), False)
            if problem.save:
                binding.bind(plan.cached_plan(problem, name, "backward"), False)
        except Exception as error:
            if name not in _warned:
                _warned.add(name)
                warnings.warn(
                    f"{name} cannot run here, the next strategy takes over: {error}", GemmNormWarning, stacklevel=2
                )
            continue
        return name
    return "reference"


def describe(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    scale_value: float,
    running_mean: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    training: bool,
    activation: str | None,
    save: bool,
) -> Problem:
    """The problem that a call poses, with the dtypes that the kernels will see."""
    linear = first(bias, scale)
    norm = first(running_mean, bn_weight, bn_bias)
    problem = problem_of(
        x,
        weight,
        linear,
        norm,
        output_dtype(x, scale),
        activation,
        training,
        save,
        scale is not None or scale_value != 1.0,
    )
    if bias is not None and scale is not None and bias.dtype != scale.dtype:
        problem = replace(problem, linear_dtype="float32")
    return problem


def _prepared_plan(chosen: Plan) -> Plan | None:
    """The plan for a weight that is split already, where `chosen` would split it and evaluates."""
    problem = chosen.problem
    if problem.training or all(buffer.role != "split_weight" for buffer in chosen.workspace):
        return None
    return plan.cached_plan(replace(problem, prepared=True), "one_kernel", "forward")


def prepare_weight(weight: Tensor) -> bool:
    """Split `weight` for the evaluations to come (`prepared`); whether any would split it."""
    if type(weight) not in (Tensor, torch.nn.Parameter) or weight.dim() != 2 or weight.is_inference():
        return False
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return False
    problem = problem_of(weight, weight, None, None, weight.dtype, None, False, False, False)
    problem = replace(problem, batch=4096)  # as many rows as make it worth while
    if _prepared_plan(plan.cached_plan(problem, plan.check_strategy(None), "forward")) is None:
        return False
    prepared.make(weight, problem, binding.scalars(problem, None, 1.0, 0.0, 0.0))
    return True


class Call:
    """One kind of forward call, prepared: the plan, its loaded kernels, and whether anything must be converted.

    `direct`: what is kept need not be the operator's separate outputs. `cast`: which of "x" and "weight" it shall take
    in float32 and cast itself; `self.cast` says which it does, and those are kept as they were multiplied.
    """

    def __init__(
        self,
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
        direct: bool = False,
        cast: tuple[str, ...] = (),
    ) -> None:
        check_arguments(
            x, weight, bias, scale, running_mean, running_var, bn_weight, bn_bias, num_batches_tracked,
            training, rows=2 if training else 0,
        )  # fmt: skip
        problem = describe(
            x, weight, bias, scale, scale_value, running_mean, bn_weight, bn_bias, training, activation, save
        )
        if problem.in_features % 4 == 0:  # rows of whole words
            problem = replace(problem, cast=cast)
        name = resolve(problem, strategy)
        self.plan = plan.cached_plan(problem, name, "forward")
        self.cast = () if name == "reference" else problem.cast
        self.options = (scale_value, training, momentum, eps, activation, save)
        self.save = save
        self._packed = direct and save and self.plan.keeps_offsets
        self._bound = None if name == "reference" else binding.bind(self.plan, self._packed)
        self._scalars = binding.scalars(problem, scale, scale_value, momentum, eps)
        self._mapped = bool(self.cast) or any(launch.maps for launch in self.plan.launches)
        self._with_prepared = _prepared_plan(self.plan)
        self._bound_prepared: binding.Bound | None = None
        self._as_they_are = (
            (scale is None or scale.device == x.device)
            and served_as_they_are(bias, scale)
            and served_as_they_are(running_mean, running_var, bn_weight, bn_bias)
        )
        self._backward: dict[tuple[torch.dtype, torch.dtype], BackwardCall] = {}

    @property
    def kernels(self) -> bool:
        """Kernels will run, rather than plain PyTorch ops."""
        return self._bound is not None

    def _find_prepared(self, weight: Tensor) -> prepared.PreparedWeight | None:
        """The prepared weight, once its kernels are there too."""
        found = prepared.find(weight)
        if found is not None and self._bound_prepared is None:
            assert self._with_prepared is not None
            try:
                self._bound_prepared = binding.bind(self._with_prepared, False)
            except Exception as error:
                self._with_prepared = None
                warnings.warn(f"prepared weights are not used: {error}", GemmNormWarning, stacklevel=2)
                return None
        return found

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
    ) -> Sequence[Tensor]:
        """y, and if it was asked for what the backward needs: product and statistics, or the two `unpacked` from one,
        and what was cast (`multiplied`).

        The statistics are one float32 tensor [2 or 2 + groups, O]: the product's mean; 1/sqrt(var + eps); where the
        product is stored minus means of groups of rows, those. (The reference's are its own affair.)
        """
        ahead = self._find_prepared(weight) if self._with_prepared is not None else None
        for recorder in _recorders:
            recorder.append(self.plan if ahead is None else self._with_prepared)  # type: ignore[arg-type]
        scale_value, training, momentum, eps, activation, save = self.options
        if self._bound is None:
            y, product, statistics = reference.forward(
                x, weight, bias, scale_value if scale is None else scale, running_mean, running_var,
                num_batches_tracked, bn_weight, bn_bias, training, momentum, eps, activation, save,
            )  # fmt: skip
            return (y, product, statistics) if save else (y,)
        if self._mapped:
            x, weight = dense(x), dense(weight)
        write_back = None
        if not self._as_they_are:
            bias, scale = vectors(bias, scale, x.device)
            if running_mean is not None:
                bn_weight, bn_bias = (
                    None if v is None else v.to(running_mean.dtype).contiguous() for v in (bn_weight, bn_bias)
                )
            else:
                bn_weight, bn_bias = unified(bn_weight, bn_bias)
            (running_mean, running_var), write_back = running_state(running_mean, running_var)
        counter = num_batches_tracked if training else None
        inputs = (x, weight, bias, scale, running_mean, running_var, counter, bn_weight, bn_bias)
        if ahead is None:
            outputs = self._bound(inputs, self._scalars)
        else:
            assert self._bound_prepared is not None
            outputs = self._bound_prepared((*inputs, *ahead.tensors), self._scalars)
        if training and write_back is not None:
            write_back()
        return outputs  # type: ignore[return-value]

    def multiplied(
        self, operands: tuple[Tensor, Tensor], kept: list[Tensor]
    ) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        """x and W as they were multiplied, and what else is kept: of what `forward` took, and gave after y."""
        if not self.cast:
            return operands, kept
        made = dict(zip(self.cast, kept[-len(self.cast) :], strict=True))
        x, weight = operands
        return (made.get("x", x), made.get("weight", weight)), kept[: -len(self.cast)]

    def unpacked(self, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Product and statistics of what `forward` gave after y."""
        product, statistics = binding.unpacked(kept[0], self.plan.problem) if self._packed else kept
        return product, statistics

    def backward(self, dtypes: tuple[torch.dtype, torch.dtype], *saved: Any) -> tuple[Tensor | None, ...]:
        """Gradients of x and weight in `dtypes`, and of the others, as `BackwardCall.run` gives them."""
        found = self._backward.get(dtypes)
        if found is None:
            x, weight, bias, scale, bn_weight, bn_bias = saved[2:8]
            scale_value, training, _, eps, activation, _ = self.options
            found = self._backward[dtypes] = BackwardCall(
                x, weight, bias, scale, scale_value, bn_weight, bn_bias, training, eps, activation,
                self.plan.strategy, dtypes, self._packed,
            )  # fmt: skip
        return found.run(*saved)


class BackwardCall:
    """One kind of backward call, prepared."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        scale_value: float,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
        training: bool,
        eps: float,
        activation: str | None,
        strategy: str,
        dtypes: tuple[torch.dtype, torch.dtype] | None = None,
        packed: bool = False,
    ) -> None:
        problem = describe(
            x, weight, bias, scale, scale_value, first(bn_weight, bn_bias), bn_weight, bn_bias,
            training, activation, True,
        )  # fmt: skip
        self._dtypes = dtypes or (x.dtype, weight.dtype)
        problem = replace(problem, grad_dtypes=tuple(_NAMES.get(d, str(d)) for d in self._dtypes))
        self._options = (scale_value, training, eps, activation)
        plain = strategy == "reference" or x.shape[0] == 0
        self._bound = None if plain else binding.bind(plan.cached_plan(problem, strategy, "backward"), packed)
        self._scalars = binding.scalars(problem, scale, scale_value, 0.0, eps)
        found = None if self._bound is None else plan.cached_plan(problem, strategy, "backward")
        self._dense_operands = found is not None and any("x" in launch.params for launch in found.launches)
        parameters = (bias, scale, bn_weight, bn_bias)
        self._shapes = tuple(None if t is None else (t.shape, t.dtype) for t in parameters)

    def run(
        self,
        needs: list[bool],
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
        *kept: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight, bias, scale, bn_weight, bn_bias; None where `needs` is False."""
        if self._bound is None:
            scale_value, training, eps, activation = self._options
            product, statistics = kept
            found = reference.backward(
                grad, x, weight, bias, scale_value if scale is None else scale, bn_weight, bn_bias, product,
                statistics, training, eps, activation, needs,
            )  # fmt: skip
            cast = (None if g is None else g.to(dtype) for g, dtype in zip(found, self._dtypes, strict=False))
            return (*cast, *found[2:])
        operands = (x, weight, bias, scale, bn_weight, bn_bias)
        wanted = tuple(need and t is not None for need, t in zip(needs, operands, strict=True))
        bias, scale = vectors(bias, scale, x.device)
        bn_weight, bn_bias = unified(bn_weight, bn_bias)
        if self._dense_operands:
            x, weight = dense(x), dense(weight)
        grads = self._bound((dense(grad), x, weight, bias, scale, bn_weight, bn_bias, *kept), self._scalars, wanted)
        for i, like in enumerate(self._shapes, start=2):
            gradient = grads[i]
            if gradient is None or like is None or (gradient.shape, gradient.dtype) == like:
                continue
            shape, dtype = like
            if gradient.numel() != shape.numel():  # one scale for all features: their gradients' sum
                gradient = gradient.sum()
            grads[i] = gradient.reshape(shape).to(dtype)
        return tuple(grads)


_calls: dict[tuple[Any, ...], Call] = {}
_backward_calls: dict[tuple[Any, ...], BackwardCall] = {}
_familiar: dict[tuple[Any, ...], tuple[Likeness, Call]] = {}


def recall(key: tuple[Any, ...], tensors: tuple[Tensor | None, ...]) -> Call | None:
    """The call that was remembered under `key`, if the tensors are like those that it was made with."""
    found = _familiar.get(key)
    return found[1] if found is not None and found[0](tensors) else None


def remember(key: tuple[Any, ...], tensors: tuple[Tensor | None, ...], call: Call) -> None:
    """Let `recall` find `call`: the last one under this key. The key has all that the tensors do not tell."""
    if len(_familiar) >= 4096:
        _familiar.clear()
    _familiar[key] = (Likeness(tensors), call)


def call_for(*call: Any) -> Call:
    """The prepared call for the arguments of `Call`: the tensors' kinds and the options decide.

    Raises what `check_arguments` raises, the first time that such a call is made.
    """
    x, weight, bias, scale, scale_value, running_mean, running_var, counter, bn_weight, bn_bias, *options = call
    options[4] = plan.check_strategy(options[4])
    key = (
        x.shape, x.dtype, x.device, kind(weight), kind(bias), kind(scale), scale_value, kind(running_mean),
        kind(running_var), kind(counter), kind(bn_weight), kind(bn_bias), *options, arithmetic(x.dtype),
    )  # fmt: skip
    found = _calls.get(key)
    if found is None:
        found = Call(
            x, weight, bias, scale, scale_value, running_mean, running_var, counter, bn_weight, bn_bias, *options
        )
        if len(_calls) >= 4096:
            _calls.clear()
        _calls[key] = found
    return found


def backward_call_for(*call: Any) -> BackwardCall:
    """The prepared backward call for the arguments of `BackwardCall`."""
    x, weight, bias, scale, scale_value, bn_weight, bn_bias, *options = call
    key = (
        x.shape, x.dtype, x.device, kind(weight), kind(bias), kind(scale), scale_value, kind(bn_weight),
        kind(bn_bias), *options, arithmetic(x.dtype),
    )  # fmt: skip
    found = _backward_calls.get(key)
    if found is None:
        found = BackwardCall(*call)
        if len(_backward_calls) >= 4096:
            _backward_calls.clear()
        _backward_calls[key] = found
    return found


def forget() -> None:
    """Forget every prepared call, as where the machine has changed (tests do that)."""
    _calls.clear()
    _backward_calls.clear()
    _familiar.clear()
    _resolved.cache_clear()
    binding.bind.cache_clear()
    binding.scratch.cache_clear()
