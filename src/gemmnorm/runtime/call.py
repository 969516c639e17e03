"""A call from its operands to its kernels: the problem that it poses, the strategy that serves it, and the prepared
`Call`, which `find` keeps for the next one like it.

    find → Call(describe → resolve → plan → binding.bind) → Call.forward → Bound → launches
"""

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
from ..plan import Chip, Plan, Problem
from . import binding, casts, driver, measured, memory, prepared
from .arguments import check_arguments
from .arithmetic import arithmetic
from .operands import (
    AsSaved,
    Differentiable,
    Likeness,
    Operands,
    Options,
    Saved,
    Shapes,
    all_served_as_they_are,
    as_served,
    cast_operands,
    dense,
    kind,
    multiplied_dtype,
    unified,
    vector_dtype,
    vectors,
)  # fmt: skip

PLAIN = (Tensor, torch.nn.Parameter)
_NAMES = {dtype: name for name, dtype in memory.DTYPES.items()}


@functools.lru_cache(maxsize=64)
def chip(device: torch.device) -> Chip | None:
    """What the planner needs to know of `device`; None where the kernels cannot run on it.

    Warns where that is an NVIDIA GPU and only the compiler is missing.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    missing = driver.unavailable()
    if missing is not None:
        warnings.warn(f"plain PyTorch ops run on {device}: {missing}", GemmNormWarning, stacklevel=2)
        return None
    return measured.described(device).chip


def output_dtype(x: Tensor, scale: Tensor | None, cast: torch.dtype | None = None) -> torch.dtype:
    """The dtype that the chain of PyTorch ops returns: a scale with dimensions takes part in type promotion."""
    dtype = multiplied_dtype(x, cast)
    return dtype if scale is None or scale.dim() == 0 else torch.promote_types(dtype, scale.dtype)


def _size(size: int | torch.SymInt) -> int:
    """A number for the planner: under a symbolic trace the size that the trace was started with.

    No guard is installed. The strategy that is baked into a traced graph serves every batch size, because what a
    strategy can serve depends on the batch only where that is empty.
    """
    if isinstance(size, torch.SymInt):
        return int(getattr(size.node, "hint", None) or 1024)
    return size


def describe(operands: Operands, options: Options) -> Problem:
    """The problem that a call poses, with the dtypes that the kernels will see."""
    x, weight, bias, scale = operands[:4]
    mean = operands.running_mean
    norm = vector_dtype(operands.bn_weight, operands.bn_bias) if mean is None else mean.dtype
    return Problem(
        batch=_size(x.shape[0]),
        in_features=_size(x.shape[1]),
        out_features=_size(weight.shape[0]),
        dtype=_name(multiplied_dtype(x, options.cast)),
        out_dtype=_name(output_dtype(x, scale, options.cast)),
        linear_dtype=_name(vector_dtype(bias, scale)),
        norm_dtype=_name(norm),
        arithmetic=arithmetic(multiplied_dtype(x, options.cast)),
        activation=options.activation,
        training=options.training,
        save=options.save,
        scaled=scale is not None or options.scale_value != 1.0,
        chip=chip(x.device),
        cast=() if options.cast is None else _cast_by_kernels(operands, options.cast),
    )


def _cast_by_kernels(operands: Operands, dtype: torch.dtype) -> tuple[str, ...]:
    """Which of x and weight are float32 for the kernels to cast; none where PyTorch has to cast either."""
    both = (("x", operands.x), ("weight", operands.weight))
    if not all(t.dtype == dtype or (t.dtype == torch.float32 and _is_contiguous(t)) for _, t in both):
        return ()
    return tuple(name for name, t in both if t.dtype != dtype)


def _is_contiguous(t: Tensor) -> bool:
    """Taken for granted in a trace, where to ask could install a guard."""
    return type(t) not in PLAIN or t.is_contiguous()


def _name(dtype: torch.dtype) -> str:
    """The planner's name of `dtype`."""
    return _NAMES.get(dtype, str(dtype))


def _decided(problem: Problem, options: Options) -> Problem:
    """`problem` with the product kept or not: as asked for where that can be, else as the planner decides."""
    wanted, strategy = plan.check_keep_product(options.keep_product), plan.check_strategy(options.strategy)
    return replace(problem, keep_product=plan.decide_keep_product(problem, strategy, wanted))


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


def record(chosen: Plan | None) -> None:
    """Tell those who do."""
    for recorder in _recorders:
        assert chosen is not None
        recorder.append(chosen)


def resolve(problem: Problem, strategy: str | None) -> str:
    """The strategy that will run: the one asked for where it can serve, else the planner's choice.

    Compiles what it needs, so that a kernel that does not compile or load on this machine is found out here: then
    the next strategy takes over, with one warning. Not where only memory is lacking: raises what `binding.bind` raises.
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
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            warn_once(name, error)
            continue
        return name
    return "reference"


def warn_once(name: str, error: Exception) -> None:
    """A strategy's kernels do not compile or load on this machine."""
    if name not in _warned:
        _warned.add(name)
        warnings.warn(f"{name} cannot run here, the next strategy takes over: {error}", GemmNormWarning, stacklevel=3)


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
    problem = describe(Operands(weight, weight), Options(training=False))
    problem = replace(problem, batch=4096)  # as many rows as make it worth while
    if _prepared_plan(plan.cached_plan(problem, plan.check_strategy(None), "forward")) is None:
        return False
    prepared.make(weight, problem, binding.scalars(problem, None, 1.0, 0.0, 0.0))
    return True


class Call:
    """One kind of forward call, prepared: the plan, its loaded kernels, and whether anything must be converted.

    Attributes:
        plan: what runs. kernels: whether that is kernels, rather than the plain PyTorch ops of the reference.
        options: those of the call, with the strategy that runs and whether anything is saved.
        dtypes: of x and weight as they are handed in, and of their gradients.
        casts_weight: the kernels cast the weight, and the copy is kept for the backward.
    """

    def __init__(self, operands: Operands, options: Options, direct: bool = False) -> None:
        """`direct`: what is kept need not be two tensors."""
        check_arguments(operands, options.training, cast=options.cast is not None)
        problem = _decided(describe(operands, options), options)
        self._asked = options, direct
        name = resolve(problem, options.strategy)
        self.plan = plan.cached_plan(problem, name, "forward")
        self.options = options._replace(strategy=name, keep_product=problem.keep_product or name == "reference")
        self.dtypes = (operands.x.dtype, operands.weight.dtype)
        self.kernels = name != "reference"
        if not self.kernels:
            return
        self._cast_before = None if problem.cast else options.cast
        self._cast_and_kept = problem.cast if options.save else ()
        self.casts_weight = "weight" in self._cast_and_kept
        self._of_copy: Call | None = None
        self._packed = direct and options.save and self.plan.keeps_offsets
        self._bound = binding.bind(self.plan, self._packed)
        self._scalars = binding.scalars(problem, operands.scale, options.scale_value, options.momentum, options.eps)
        self._training = options.training
        self._mapped = bool(problem.cast) or any(launch.maps for launch in self.plan.launches)
        self._contiguous = operands.x.is_contiguous() and operands.weight.is_contiguous()  # calls like it have them so
        self._with_prepared = _prepared_plan(self.plan)
        self._bound_prepared: binding.Bound | None = None
        self._as_they_are = all_served_as_they_are(operands)
        # By the arithmetic that holds when one runs, and how many tensors were saved.
        self._backwards: dict[tuple[str, int], BackwardCall] = {}
        self._saved: dict[int, AsSaved] = {}  # by how many the forward kept
        vectors_ = operands.bias, operands.scale, operands.bn_weight, operands.bn_bias
        self._vectors = [None if v is None else (None, v.dtype) for v in vectors_]

    def forward(self, operands: Operands) -> tuple[Tensor, list[Tensor], tuple[Tensor, Tensor]]:
        """y; if it was asked for, what the backward needs besides; x and weight as they were multiplied.

        That is the product and the statistics, or one tensor for both, or the statistics alone (`unpacked`). The
        statistics are float32 [2 or 2 + groups, O]: the product's mean; 1/sqrt(var + eps); where the product is stored
        minus means of groups of rows, those.
        """
        if self._cast_before is not None:
            operands = cast_operands(operands, self._cast_before)
        multiplied = x, weight = operands[:2]
        ahead = self._find_prepared(weight) if self._with_prepared is not None else None
        if _recorders:
            record(self.plan if ahead is None else self._with_prepared)
        if self._mapped and not (self._contiguous and (x.data_ptr() | weight.data_ptr()) % 16 == 0):
            operands = operands._replace(x=dense(x), weight=dense(weight))
        write_back = None
        if not self._as_they_are:
            operands, write_back = as_served(operands)
        if not self._training and operands.num_batches_tracked is not None:
            operands = operands._replace(num_batches_tracked=None)
        if ahead is None:
            outputs = self._bound([*operands], self._scalars)
        else:
            assert self._bound_prepared is not None
            outputs = self._bound_prepared([*operands, *ahead.tensors], self._scalars)
        if write_back is not None and self._training:
            write_back()
        kept = outputs[1:]
        if self._cast_and_kept:
            count = len(self._cast_and_kept)
            made: dict[str, Any] = dict(zip(self._cast_and_kept, kept[-count:], strict=True))
            multiplied = (made.get("x", multiplied[0]), made.get("weight", multiplied[1]))
            kept = kept[:-count]
        return outputs[0], kept, multiplied  # type: ignore[return-value]

    def sharing(self, operands: Operands) -> tuple[Call, Operands]:
        """Where an earlier call of this step has cast the weight, the call by its copy, and operands with that."""
        copy = casts.find(operands.weight, self.options.cast) if self.casts_weight else None  # type: ignore[arg-type]
        if copy is None:
            return self, operands
        by_copy = operands._replace(weight=copy)
        if self._of_copy is None:
            self._of_copy = Call(by_copy, *self._asked)
            self._of_copy.dtypes = self.dtypes
        return (self._of_copy, by_copy) if self._of_copy.kernels else (self, operands)

    def result(self, operands: Operands) -> Tensor:
        """y alone."""
        return self.forward(operands)[0]

    def backward(self, needs: tuple[bool, ...], grad: Tensor, saved: Saved) -> Sequence[Tensor | None]:
        """Gradients of what is differentiable, None where `needs` is False; of x and weight in their own dtypes."""
        saved = self._saved[len(saved) - 6](saved)
        key = arithmetic(saved[0].dtype), len(saved)  # type: ignore[union-attr]
        found = self._backwards.get(key)
        if found is None:
            packed = self._packed and len(saved) == 7
            found = self._backwards[key] = BackwardCall(Differentiable(*saved[:6]), self.options, self.dtypes, packed)
        return found.run(needs, grad, saved)

    def to_save(self, kept: list[Any], hooked: bool) -> list[Tensor]:
        """What `forward` kept, for `backward`. `hooked`: others see it, and may store it in less: each by its dtype."""
        kept = [*self.unpacked(kept)] if hooked and self._packed else kept
        if len(kept) not in self._saved:
            p = self.plan.problem
            dtype = memory.DTYPES[p.dtype]
            kinds = [((p.batch, p.in_features), dtype), ((p.out_features, p.in_features), dtype)]
            self._saved[len(kept)] = AsSaved([*kinds, *self._vectors, *((tuple(t.shape), t.dtype) for t in kept)])
        return kept

    def unpacked(self, kept: Sequence[Any]) -> Sequence[Tensor | None]:
        """Product, None where it was not kept, and statistics of what `forward` kept."""
        if self.options.keep_product is False:
            return None, kept[0]
        return memory.unpacked(kept[0], self.plan.problem) if self._packed and len(kept) == 1 else kept

    def _find_prepared(self, weight: Tensor) -> prepared.PreparedWeight | None:
        """The prepared weight, once its kernels are there too; there may be memory for them at a later call."""
        found = prepared.find(weight)
        if found is not None and self._bound_prepared is None:
            assert self._with_prepared is not None
            try:
                self._bound_prepared = binding.bind(self._with_prepared, False)
            except torch.cuda.OutOfMemoryError:
                return None
            except Exception as error:
                self._with_prepared = None
                warnings.warn(f"prepared weights are not used: {error}", GemmNormWarning, stacklevel=2)
                return None
        return found


class BackwardCall:
    """One kind of backward call, prepared."""

    def __init__(
        self,
        operands: Differentiable,
        options: Options,
        dtypes: tuple[torch.dtype, torch.dtype],
        packed: bool = False,
    ) -> None:
        """`dtypes`: of the gradients of x and weight. `packed`: the forward kept one tensor."""
        x, weight, bias, scale, bn_weight, bn_bias = operands
        assert x is not None and weight is not None
        forward = Operands(x, weight, bias, scale, bn_weight=bn_weight, bn_bias=bn_bias)
        self._multiplies_again = options.keep_product is False
        problem = replace(
            describe(forward, options),
            save=True,
            keep_product=not self._multiplies_again,
            grad_dtypes=tuple(map(_name, dtypes)),
        )
        if self._multiplies_again and problem.dtype == "float32":
            problem = replace(problem, arithmetic="tf32")  # as the forward did, whatever is allowed by now
        chosen = plan.cached_plan(problem, options.strategy, "backward")
        self._bound = binding.bind(chosen, packed)
        self._scalars = binding.scalars(problem, scale, options.scale_value, 0.0, options.eps)
        self._mapped = any("x" in launch.params or launch.maps for launch in chosen.launches)
        self._as_they_are = all_served_as_they_are(forward)
        self._in_shapes = Shapes((None, None, *operands[2:]), self._bound.kinds)

    def run(self, needs: tuple[bool, ...], grad: Tensor, saved: Saved) -> Sequence[Tensor | None]:
        """Gradients of what is differentiable, None where `needs` is False, as it is of what is absent.

        `saved` ends with the statistics.
        """
        if not self._as_they_are:
            saved[2:4] = vectors(saved[2], saved[3], grad.device)
            saved[4:6] = unified(saved[4], saved[5])
        if self._mapped:
            saved[:2] = map(dense, saved[:2])  # type: ignore[arg-type]
        if self._multiplies_again:
            saved[6:] = (None, saved[-1])
        saved.insert(0, dense(grad))
        return self._in_shapes(self._bound(saved, self._scalars, needs))


# --- the cache of prepared calls --------------------------------------------------------------------------------------

# Every prepared call, by all that tells it from others.
_calls: dict[tuple[Any, ...], Any] = {}
# In front of it: the last one with a weight, or of some sizes, and a batch size. To compare the tensors with those that
# it was made with takes one call of C++, where the whole key takes ten microseconds.
_latest: dict[tuple[Any, ...], tuple[Likeness, Any]] = {}


def find(operands: Operands, options: Options, place: str = "operator") -> Call | None:
    """The prepared call for these tensors and options, made if need be.

    `place`: who asks. "eager" goes past the dispatcher: its call saves only where an operand requires a gradient, may
    keep one tensor for two, and is None where an operand is of a subclass of Tensor, which has to see the operator.
    "autograd" and "operator" are the dispatcher's, above and below autograd: a tensor has other dispatch keys there.

    Raises what `check_arguments` raises, the first time that such a call is made.
    """
    x = operands.x
    strategy = plan.check_strategy(options.strategy)
    keep = plan.check_keep_product(options.keep_product) if options.save else None
    which = id(operands.weight) if place == "eager" else sizes(operands)
    key = (which, x.numel(), options, strategy, keep, place, arithmetic(x.dtype))
    latest: Call | None = remembered(key, operands)
    if latest is not None:
        return latest
    if place == "eager":
        if any(t is not None and type(t) not in PLAIN for t in operands):
            return None
        options = options._replace(save=options.save and operands.require_gradients)
    options = options._replace(strategy=strategy, keep_product=keep)
    call: Call = prepared_like(Call, operands, options, place == "eager")
    remember(key, operands, call)
    return call


def sizes(operands: Operands | Differentiable) -> tuple[Any, ...]:
    """What tells the operators of a graph apart, whose weights may be other tensors at each call, as cast ones are."""
    weight = operands.weight
    assert weight is not None
    return (weight.shape, *[t is None for t in operands])


def remembered(key: tuple[Any, ...], operands: Operands | Differentiable) -> Any:
    """What was remembered last under `key`, if it was for tensors like these; else None."""
    latest = _latest.get(key)
    return latest[1] if latest is not None and latest[0](operands) else None


def remember(key: tuple[Any, ...], operands: Operands | Differentiable, call: Any) -> None:
    """Keep `call` for the next one with this key and such tensors."""
    if len(_latest) >= 4096:
        _latest.clear()
    _latest[key] = (Likeness(operands), call)


def resolved(operands: Operands, options: Options) -> Options:
    """`options` with the strategy that will run, and whether the product is kept.

    A trace has no tensors to prepare a call for, and asks the planner alone.
    """
    if type(operands.x) in PLAIN:
        call = find(operands, options, place="autograd")
        assert call is not None
        return call.options
    problem = _decided(describe(operands, options), options)
    name = resolve(problem, options.strategy)
    return options._replace(strategy=name, keep_product=problem.keep_product or name == "reference")


def find_backward(operands: Differentiable, options: Options, dtypes: tuple[torch.dtype, torch.dtype]) -> BackwardCall:
    """The prepared backward of the operator's forward, by kernels. `dtypes`: of the gradients of x and weight."""
    x = operands.x
    assert x is not None
    key = ("backward", sizes(operands), x.numel(), options, dtypes, arithmetic(x.dtype))
    found: BackwardCall | None = remembered(key, operands)
    if found is None:
        found = prepared_like(BackwardCall, operands, options, dtypes)
        remember(key, operands, found)
    return found


def prepared_like(make: Any, operands: Operands | Differentiable, *rest: Any) -> Any:
    """`make(operands, *rest)`, or what it gave for operands of the same kinds. The one place that makes the key."""
    assert operands.x is not None
    key = (make, *map(kind, operands), *rest, arithmetic(operands.x.dtype))
    found = _calls.get(key)
    if found is None:
        found = make(operands, *rest)
        if len(_calls) >= 4096:
            _calls.clear()
        _calls[key] = found
    return found


# How often everything was forgotten: who keeps a prepared call compares it with the one that it was made in.
generation = 0


def forget() -> None:
    """Forget every prepared call, as where the machine has changed (tests do that)."""
    global generation
    generation += 1
    _calls.clear()
    _latest.clear()
    _resolved.cache_clear()
    binding.bind.cache_clear()
