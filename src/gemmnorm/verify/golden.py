"""What a candidate is compared with: the original run eagerly, in float64, and with rounding errors made on purpose.

`Original` holds the original under one seed and turns cases (`gemmnorm.verify.families`) into
`Reference` objects, one per case and phase. A reference holds everything that judging needs, so that many
candidates can be judged by the same references.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase

from ..runtime.arithmetic import tf32_allowed, tf32_allowed_to_convolutions
from ..userfiles import ModelFile, ModelFileError
from .conventions import conventions
from .equality import NO_DIGITS, PERIOD, Limits, pool
from .families import ORDINARY, Case, draw_inputs, draw_state, exchanged, leading_rows, roles
from .rounding import Arithmetic, DtypeRecorder, Kinks, Units, unit_roundoff
from .trial import (
    VOLATILE,
    Trial,
    arranged,
    autocast_dtype,
    entries,
    load_in_place,
    moves,
    run_trial,
    same_inputs,
    set_back,
    set_mode,
    shared_outputs,
)

__all__ = ["Original", "Reference", "Sample"]

_SAMPLE = 1 << 21  # elements of one tensor that are compared in most cases
_SUBSETS = 6  # runs beyond the kinks: all elements near one, and random halves of them
_FIRST_DRAWS = 2  # noisy runs before a candidate is looked at; one of either kind for 16-bit storage
_MOVES = 1e-2  # of an output's norm: what moves the original's by so much must move a candidate's
_CAUTION = 0.5  # of the spread that so few show: what is within it needs no more runs
_FINER, _LINEAR = 16.0, 4.0  # errors of a sixteenth, and by how much less they must change a quantity that has digits
_FULL_SAMPLE = 1 << 24  # and in the full-size case


@dataclass(frozen=True)
class Sample:
    """Which rows of a very large tensor are compared, and the tensor's shape."""

    rows: Tensor
    shape: torch.Size

    @staticmethod
    def of(value: Tensor, budget: int) -> Sample:
        """About `budget` elements' worth of rows: whole periods of roles, spread evenly, first and last included."""
        periods = (value.shape[0] + PERIOD - 1) // PERIOD
        wanted = max(2, min(periods, budget * value.shape[0] // (value.numel() * PERIOD)))
        starts = torch.linspace(0, periods - 1, wanted, dtype=torch.float64).round().long() * PERIOD
        rows = (starts[:, None] + torch.arange(PERIOD)).flatten()
        return Sample(rows[rows < value.shape[0]].to(value.device), value.shape)


@dataclass
class Reference:
    """One case in one phase, ready to judge a candidate.

    state       what every model is loaded with; `case.load` says how
    eager       the original's quantities in its own precision; `error` instead if it raises on purpose (one row)
    golden      the same in float64, with `limits` per quantity
    samples     the rows of very large tensors that are compared; eager, golden and limits hold only those
    mutates     the original itself changes its inputs; spoils: its backward, the gradients that it is given
    drawn       the original draws random numbers
    left        settings of the process that the original leaves changed
    kinds       classes of the original's outputs that are no plain tensors (`trial.Trial`)
    require     whether each output requires a gradient
    structure   the containers that hold them
    drops       what the original's dropouts would have dropped (`trial.Trial`)
    spreads_of  what rounding in other units would do to each quantity
    insensitive which of the named parameters, buffers and inputs the original's output does not depend on
    shared      which outputs two calls of the original have in the same memory: a parameter, a buffer
    conventions what a program finds of the original besides (conventions.py)
    undetermined  which quantities have no digits: rounding errors of a sixteenth change them as much
    refine      makes provisional limits, which are tighter as a rule, the final ones: all noisy runs, and those beyond
                the kinks; None where they are final
    """

    case: Case
    phase: str
    seed: int
    state: dict[str, Tensor]
    inputs: list[Any]
    eager: dict[str, Tensor] = field(default_factory=dict)
    golden: dict[str, Tensor] = field(default_factory=dict)
    limits: dict[str, Limits] = field(default_factory=dict)
    samples: dict[str, Sample] = field(default_factory=dict)
    others: list[Any] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    structure: str = "Tensor"
    require: list[bool] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    drops: list[list[Any]] | None = None
    cotangents: list[Tensor] = field(default_factory=list)
    mutates: bool = False
    drawn: bool = False
    spoils: bool = False
    error: str | None = None
    spreads_of: Callable[[Units], dict[str, Tensor]] = lambda units: {}
    undetermined: Callable[[], set[str]] = set
    insensitive: Callable[[Sequence[str]], set[str]] = lambda names: set()
    shared: Callable[[], list[int]] = lambda: []
    conventions: Callable[[], dict[str, Any]] = dict
    refine: Callable[[], None] | None = None

    @property
    def training(self) -> bool:
        return self.phase == "train"

    @property
    def gradients(self) -> bool:
        return self.phase in self.case.gradients

    def sampled(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows that are compared, of each quantity."""
        return {n: v[self.samples[n].rows] if n in self.samples else v for n, v in values.items()}


@dataclass
class _Noise:
    """The squared change of every element, summed over the runs with rounding errors (`kinks.draws` of them)."""

    units: Units
    kinks: Kinks
    squares: dict[str, Tensor] = field(default_factory=dict)
    ties: dict[str, Tensor] = field(default_factory=dict)  # which integers and booleans are not always the same

    def units_of(self, run: int) -> Units:
        """Storage in 16 bits has two kinds of runs, which alternate."""
        return replace(self.units, grid=None, hashed=True) if self.units.grid and run % 2 else self.units

    def add(self, noisy: dict[str, Tensor], golden: dict[str, Tensor]) -> None:
        for name, value in noisy.items():
            if name in golden and not value.is_floating_point():
                apart = value != golden[name]
                self.ties[name] = self.ties[name] | apart if name in self.ties else apart
            elif name in golden:
                squared = (value - golden[name]).square_()
                self.squares[name] = self.squares[name].add_(squared) if name in self.squares else squared

    def limits(self, caution: float = 1.0, flips: Mapping[str, Tensor] = MappingProxyType({})) -> dict[str, Limits]:
        """What rounding may do to each quantity."""
        found = {name: Limits(caution * spread, flips.get(name)) for name, spread in self.spreads().items()}
        # A column of which a quarter changes has none that is sure.
        columns = {n: t | (t.double().mean(0) > 0.25) if t.ndim > 1 else t for n, t in self.ties.items()}
        return found | {name: Limits(flips=apart) for name, apart in columns.items()}

    def spreads(self) -> dict[str, Tensor]:
        """The standard deviation of every element, by quantity."""
        count = max(1, self.kinks.draws)
        return {name: pool(total.nan_to_num(0.0).div_(count)).sqrt_() for name, total in self.squares.items()}


class Original:
    """The original model under one seed.

    repeats   how many noisy runs estimate the spread; fewer for large models, whose many features average it instead
    thorough  make all of them at once, rather than where the first few do not settle the matter
    """

    def __init__(self, file: ModelFile, seed: int, device: torch.device, *, thorough: bool = False) -> None:
        self.thorough = thorough
        self.file = file
        self.seed = seed
        self.device = device
        self.model = file.build_whole(seed).to(device)
        self.initial = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        kinds, buffers = entries(self.model), dict(self.model.named_buffers())
        self.volatile = {n: buffers[n].detach().clone() for n, kind in kinds.items() if kind == VOLATILE}
        self.role_of = roles(self.model)
        first: dict[int, str] = {}
        kept = self.model.state_dict(keep_vars=True)
        self.tied = {name: one for name, value in kept.items() if (one := first.setdefault(id(value), name)) != name}
        self.golden = file.build(seed).to(device).double()._apply(_doubled)
        self.inputs = [v.to(device) if isinstance(v, Tensor) else v for v in file.inputs(seed)]
        self.size = sum(v.numel() for v in self.initial.values())
        self.skipped: list[str] = []
        self.repeats = 8 if self.size < 200_000 else 3 if self.size < 4_000_000 else 2
        self.units: Units | None = None

    @property
    def rows(self) -> int | None:
        return leading_rows(self.inputs)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of the floating-point parameters, buffers and inputs."""
        tensors = (v for v in (*self.initial.values(), *self.inputs) if isinstance(v, Tensor))
        return {t.dtype for t in tensors if t.is_floating_point()}

    def references(self, cases: Sequence[Case]) -> Iterator[Reference]:
        """The references of each case in turn, training before evaluation."""
        state: dict[str, Tensor] = {}
        inputs: list[Any] = []
        index = -1
        for case in cases:
            index += case.inputs != "exchanged"  # which draws nothing
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + index)
            if case.load != "keep" or not state:
                state = draw_state(self.initial, self.role_of, case.weights, generator)
                state.update({name: state[one] for name, one in self.tied.items()})
            offset = 131 * index
            if case.inputs == "exchanged" and inputs:
                inputs = exchanged(inputs)
            elif not (case.same_inputs and inputs):
                inputs = draw_inputs(self.inputs, case, generator, offset=offset)
            try:
                settled = self._settle(state, inputs) if case.settled else state
                for phase in case.phases:
                    phase_state = settled if phase == "eval" else state
                    yield self._reference(Reference(case, phase, self.seed, phase_state, inputs), generator)
            except ModelFileError as error:
                if case.name in ORDINARY:
                    raise
                self.skipped.append(f"case “{case.title}”, in which the original fails: {error}")

    def accepts_rows(self, *numbers: int) -> bool:
        """Whether the model runs with other leading dimensions than get_inputs() makes, in both phases."""
        for rows, training in itertools.product(numbers, (False, True)):
            inputs = draw_inputs(self.inputs, Case("probe", rows), torch.Generator().manual_seed(0))
            self._load(self.model, self.initial)
            try:
                run_trial(self.model, inputs, training=training, cotangent=None)
            except Exception:
                return False
        return True

    def draws_random_numbers(self, rows: int | None, training: bool) -> bool:
        """Whether a pass depends on the random generator (dropout): then nothing can be compared."""
        results = []
        for seed in (1, 2):
            inputs = draw_inputs(self.inputs, Case("probe", rows), torch.Generator().manual_seed(0))
            self._load(self.model, self.initial)
            torch.manual_seed(seed)
            try:
                results.append(self._run(self.model, inputs, training, None, None).values)
            except Exception as error:
                raise self._cannot_run("on what get_inputs() returns", error) from error
        return any(
            value.is_floating_point() and not torch.allclose(value, results[1][name], 0.05, 0.05, equal_nan=True)
            for name, value in results[0].items()
        )

    def _settle(self, state: dict[str, Tensor], inputs: Sequence[Any]) -> dict[str, Tensor]:
        """The state with running statistics replaced by those of these inputs (momentum 1, in float64)."""
        norms = [m for m in self.golden.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        if not norms or (self.rows is not None and leading_rows(inputs) == 1):
            return state
        momenta = [m.momentum for m in norms]
        self._load(self.golden, state)
        for module in norms:
            module.momentum = 1.0
        try:
            values = self._run(self.golden, _copies(inputs, double=True), True, None, Arithmetic()).values
        except Exception as error:
            raise self._cannot_run("in float64, which is what candidates are measured against", error) from error
        finally:
            for module, momentum in zip(norms, momenta, strict=True):
                module.momentum = momentum
        wanted = {name for name, role in self.role_of.items() if role in ("mean", "var")}
        return {n: values[n].to(v.dtype) if n in wanted and n in values else v for n, v in state.items()}

    def _load(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        load_in_place(model, state)
        set_back(model, self.volatile)

    def _reference(self, reference: Reference, generator: torch.Generator) -> Reference:
        """Fill in a reference; what the original does not allow of the case's use is left out."""
        drawn, use = generator.get_state(), reference.case.use
        fewer = [tuple(word for word in use if word != left_out) for left_out in use]
        for words in (use, *fewer, ()):
            try:
                return self._filled(replace(reference, case=replace(reference.case, use=words)), generator)
            except ModelFileError:
                if not words:
                    raise
            generator.set_state(drawn)
            reference = Reference(reference.case, reference.phase, reference.seed, reference.state, reference.inputs)
        raise AssertionError("a case without a use raises")

    def _filled(self, reference: Reference, generator: torch.Generator) -> Reference:
        """Eager, golden, the spread of the noisy runs, and what the kinks allow besides."""
        dtypes = self._run_eagerly(reference, generator)
        if reference.error is not None:
            return reference
        kinks = Kinks("record")
        reference.golden = self._golden_run(reference, kinks)
        noise = _Noise(_units(dtypes, self.dtypes, self.device, reference.case.use), kinks)
        self._draw(reference, noise, _FIRST_DRAWS)
        reference.limits = noise.limits(_CAUTION)

        def refine() -> None:
            flips: dict[str, Tensor] = {}
            with contextlib.suppress(ModelFileError):  # by a rounding error that it does not stand: those before count
                self._draw(reference, noise, self.repeats)
                flips = self._flips(reference, kinks) if reference.gradients and kinks.mark(pool) else {}
            reference.limits = noise.limits(flips=flips)
            reference.refine = None

        def spreads_of(units: Units) -> dict[str, Tensor]:
            other = _Noise(units, Kinks("record"))
            self._golden_run(reference, other.kinks)
            self._draw(reference, other, _FIRST_DRAWS)
            return other.spreads()

        @functools.cache
        def undetermined() -> set[str]:
            u, usual = noise.units, noise.spreads()
            if u.grid is None:
                less = spreads_of(
                    Units(u.storage / _FINER, u.accumulate / _FINER, u.operand / _FINER, u.convolved / _FINER)
                )
                found = {n for n in less if float(usual[n].norm()) < _LINEAR * float(less[n].norm())}
            else:  # what is stored in 16 bits is rounded for real, and by no less
                golden = reference.golden
                found = {n for n in usual if float(usual[n].norm()) > NO_DIGITS * float(golden[n].norm())}
                found = {n for n in found if n.startswith("output")}
            # Gradients are taken where the forward has been: without its digits they have none.
            lost = any(name.startswith("output") for name in found)
            return found | {name for name in usual if lost and name.startswith("grad:")}

        def insensitive(names: Sequence[str]) -> set[str]:
            inputs = _copies(reference.inputs)
            return {name for name, by in moves(self.model, reference.state, inputs, names) if by < _MOVES}

        def shared() -> list[int]:
            load_in_place(self.model, reference.state)
            return shared_outputs(self.model, reference.inputs, reference.training)

        def own_conventions() -> dict[str, Any]:
            self._load(self.model, reference.state)
            set_mode(self.model, reference.training)
            return conventions(self.model, _copies(reference.inputs))

        reference.refine, reference.spreads_of, reference.insensitive = refine, spreads_of, insensitive
        reference.shared, reference.conventions, reference.undetermined = shared, own_conventions, undetermined
        if self.thorough:
            refine()
        return reference

    def _run_eagerly(self, reference: Reference, generator: torch.Generator) -> set[torch.dtype]:
        """Run the original in its own precision, and draw the cotangents; returns the dtypes that the run stores."""
        training, cotangents = reference.training, reference.cotangents

        def draw(index: int, output: Tensor) -> Tensor:
            while len(cotangents) <= index:
                drawn = torch.randn(output.shape, generator=generator).add_(0.5)
                cotangents.append(drawn.to(output.device, output.dtype))
            return cotangents[index]

        self._load(self.model, reference.state)
        recorder, use = DtypeRecorder(), reference.case.use
        inputs = [arranged(value, use) for value in reference.inputs]
        before = {**reference.state, **self.volatile}
        options: dict[str, Any] = {"use": use, "before": before}
        generator_before = torch.get_rng_state()
        try:
            eager = self._run(self.model, inputs, training, draw if reference.gradients else None, recorder, **options)
        except Exception as error:
            if reference.case.rows == 1:  # in evaluation too, where there are no running statistics
                reference.error = type(error).__name__
                return set()
            raise self._cannot_run(f"on its inputs ({reference.case.name}, {reference.phase})", error) from error
        reference.mutates = not same_inputs(eager.inputs, reference.inputs)
        reference.drawn = not torch.equal(torch.get_rng_state(), generator_before)
        reference.spoils, reference.left, reference.drops = eager.spoiled, eager.left, eager.drops
        for name in eager.state - eager.changed:  # buffers that stay are compared by whether the candidate's do
            if not (training and name in self.initial):
                eager.values.pop(name, None)
        budget = _FULL_SAMPLE if reference.case.name == "full size" else _SAMPLE
        for name, value in eager.values.items():
            if value.ndim > 1 and value.numel() > budget:
                reference.samples[name] = Sample.of(value, budget)
        reference.eager, reference.others = reference.sampled(eager.values), eager.others
        reference.kinds, reference.structure, reference.require = eager.kinds, eager.structure, eager.require
        return recorder.dtypes

    def _golden_run(
        self, reference: Reference, kinks: Kinks, units: Units | None = None, seed: int = 0
    ) -> dict[str, Tensor]:
        """The original in float64; with `units`, with a rounding error of that size in every operation."""

        def given(index: int, output: Tensor) -> Tensor:
            return reference.cotangents[index]

        self._load(self.golden, reference.state)
        inputs = _copies(reference.inputs, double=True)
        backward = given if reference.gradients else None
        mode = Arithmetic(units, seed=seed, kinks=kinks)
        options: dict[str, Any] = {"use": reference.case.use, "wanted": reference.eager}
        try:
            values = self._run(self.golden, inputs, reference.training, backward, mode, **options).values
            return reference.sampled({name: value for name, value in values.items() if name in reference.eager})
        except Exception as error:
            raise self._cannot_run("in float64, which is what candidates are measured against", error) from error

    def _draw(self, reference: Reference, noise: _Noise, runs: int) -> None:
        """Run with rounding errors until `noise` has so many draws."""
        noise.kinks.mode = "measure"
        while noise.kinks.draws < runs:
            run = noise.kinks.draws
            noisy = self._golden_run(reference, noise.kinks, noise.units_of(run), seed=7 + run)
            noise.add(noisy, reference.golden)

    def _flips(self, reference: Reference, kinks: Kinks) -> dict[str, Tensor]:
        """The largest change of every element when elements near a kink lie on its other side."""
        kinks.mode = "flip"
        flips: dict[str, Tensor] = {}
        for kinks.subset in range(_SUBSETS if self.repeats > 3 else 2):
            for name, value in self._golden_run(reference, kinks).items():
                if value.is_floating_point() and name in reference.golden:
                    change = (value - reference.golden[name]).abs_()
                    flips[name] = torch.maximum(flips[name], change) if name in flips else change
        return flips

    def _cannot_run(self, what: str, error: Exception) -> ModelFileError:
        return ModelFileError(f"{self.file.name}: Model must run {what}, it raised {type(error).__name__}: {error}")

    def _run(
        self,
        model: nn.Module,
        inputs: Sequence[Any],
        training: bool,
        cotangent: Callable[[int, Tensor], Tensor] | None,
        mode: AbstractContextManager[Any] | None,
        **options: Any,
    ) -> Trial:
        with contextlib.ExitStack() as plainly:
            if isinstance(mode, Arithmetic):  # single operations, so that the roundings inside are made as well
                plainly.enter_context(torch.backends.cudnn.flags(enabled=False))
                plainly.enter_context(sdpa_kernel(SDPBackend.MATH))
                plainly.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
            return run_trial(model, inputs, training=training, cotangent=cotangent, mode=mode, **options)


def _copies(inputs: Sequence[Any], *, double: bool = False) -> list[Any]:
    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copied = value.detach().clone()
        return _doubled(copied) if double else copied

    return [copy(value) for value in inputs]


def _doubled(value: Tensor) -> Tensor:
    """In float64 or complex128, if it is of such a kind."""
    return value.to(torch.complex128) if value.is_complex() else value.double() if value.is_floating_point() else value


def _units(dtypes: set[torch.dtype], given: set[torch.dtype], device: torch.device, use: Sequence[str] = ()) -> Units:
    """The precision of a chain: the coarsest of the `dtypes` it stores, accumulated in float32 (float64 for float64).

    `given`: the dtypes of parameters, buffers and inputs.
    Under autocast both operands of every product are rounded first, which casts nothing in float64.
    """
    if not dtypes or dtypes == {torch.float64}:
        return Units(2.0**-52, 2.0**-52)  # the golden run rounds as well
    coarsest = max(dtypes, key=unit_roundoff)
    grid = coarsest if coarsest in (torch.float16, torch.bfloat16) else None
    rounded = 2.0**-11 if device.type == "cuda" and torch.float32 in dtypes else 0.0
    operand, convolved = rounded * tf32_allowed(), rounded * tf32_allowed_to_convolutions()
    cast = autocast_dtype(use)
    if cast in dtypes:
        operand = convolved = unit_roundoff(cast)
    statistics = grid is not None and device.type == "cpu" and torch.float32 not in given
    accumulate = unit_roundoff(torch.float32)
    return Units(unit_roundoff(coarsest), accumulate, operand, convolved, grid, statistics=statistics)
