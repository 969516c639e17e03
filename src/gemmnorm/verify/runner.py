"""The candidate's side: its model, the calls that it is asked for, and what is seen while it runs.

:class:`Runner` serves in the judge's process (tests, calibration) or, behind ``userfiles.bare``, in one of its own.
There this file and those that it imports are all of the package that the process holds, under other names: a file
finds no verifier in its modules, its stack or its environment, and no reference's result in its memory.  So nothing
here may import more than the loader of files, and everything that goes in and out is plain values and tensors.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..userfiles import ModelFile, load_candidate_file, load_model_file, without_dropout
from .outputs import take_apart

__all__ = ["Runner", "Trial", "load", "load_in_place", "moves", "run_trial", "same_inputs", "shared_outputs"]

_WAIT = 0.05  # seconds in which work that goes on after the call shows
_STILL = 1e-5  # of an output's norm: what moves it by less has left rounding errors behind
_SEED = 8_675_309_421  # nobody else's
_CALLS, _CALLS_SECONDS = 150, 0.5  # further calls, for what counts them

# What measures, compares and draws, wherever harnesses do so: nobody's model has to replace it.
_WATCHED = {
    "time": "time perf_counter perf_counter_ns monotonic process_time",
    "torch": "allclose equal isclose manual_seed initial_seed get_rng_state set_rng_state rand randn randn_like",
    "torch.testing": "assert_close",
    "torch.Tensor": "__eq__ allclose equal clone copy_ cpu data_ptr normal_ uniform_",
    "torch.cuda": "synchronize Event Stream current_stream manual_seed",
    "torch.cuda.Event": "record elapsed_time synchronize",
    "torch.nn.Module": "load_state_dict state_dict __call__",
    "torch.autograd": "backward",
}


@dataclass
class Trial:
    """One run of one model.  ``values`` by quantity: "output", "bn.running_var", "grad:gemm.weight", "grad:input0"."""

    values: dict[str, Tensor]
    others: list[Any]  # outputs that are neither tensors nor floating-point numbers
    inputs: list[Any]  # as they are after the run
    outputs: list[Tensor]  # the tensors themselves, not copies
    structure: str  # of the output: "(Tensor, {'aux': Tensor})"

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
) -> Trial:
    """Run ``model`` forward, and backward against ``cotangent(i, output_i)`` unless that is None; collect everything.

    The inputs are used as they are (floating-point ones become leaves that require gradients, and the model gets what
    has the same memory and is no leaf: it may write into it).
    """
    model.train(training)
    model.zero_grad(set_to_none=True)
    leaves = []
    for value in inputs:
        if isinstance(value, Tensor) and value.is_floating_point():
            value.grad = None
            value.requires_grad_(cotangent is not None)
        leaves.append(value)
    given = [_Given.apply(v) if isinstance(v, Tensor) and v.requires_grad else v for v in leaves]
    with mode or contextlib.nullcontext(), torch.set_grad_enabled(cotangent is not None):
        found = take_apart(model(*given))
        outputs = found.tensors
        values = {_output_name(i, len(outputs)): y.detach().clone() for i, y in enumerate(outputs)}
        if cotangent is not None:
            pairs = [(y, cotangent(i, y).to(y)) for i, y in enumerate(outputs) if y.requires_grad]
            if pairs:
                torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    values.update({f"output number[{i}]": number for i, number in enumerate(found.numbers)})
    parameters = dict(model.named_parameters())
    for name, buffer in model.state_dict().items():
        if name not in parameters and training:
            values[name] = buffer.detach().clone()
    if cotangent is not None:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                values[f"grad:{name}"] = parameter.grad.detach()
        for i, value in enumerate(leaves):
            if isinstance(value, Tensor) and value.grad is not None:
                values[f"grad:input{i}"] = value.grad.detach()
    model.zero_grad(set_to_none=True)
    return Trial(values, found.others, leaves, outputs, found.structure)


class _Given(torch.autograd.Function):  # type: ignore[misc]
    """A leaf as an input that is none: the same memory, and gradients go to the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _output_name(index: int, count: int) -> str:
    return "output" if count == 1 else f"output[{index}]"


def load_in_place(model: nn.Module, state: Mapping[str, Tensor], *, buffers_only: bool = False) -> None:
    """Write a state into a model as an optimizer would: element by element, in place, behind no hook's back."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if not (buffers_only and name in parameters):
                value.copy_(state[name])


def same_inputs(after: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether tensors kept every bit (NaN equals NaN)."""
    pairs = [(a, b) for a, b in zip(after, before, strict=True) if isinstance(b, Tensor)]
    return all(a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs)


class Runner:
    """A candidate's file and its model, built anew for each seed.

    Every method takes and returns plain values and tensors.  What the candidate raises comes out as it is.
    """

    def __init__(self, file: ModelFile, device: str) -> None:
        self.file, self.device = file, torch.device(device)
        self.name = file.name
        self.model = nn.Module()
        self._state: dict[str, Tensor] = {}
        self._memory: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        self._outputs: list[tuple[torch.Size, torch.dtype]] = []
        self.functions = _watched()
        self.dropout: tuple[contextlib.ExitStack, list[str]] = (contextlib.ExitStack(), [])

    def use_threads(self, count: int) -> None:
        """As many of the CPU's as the judge finds worth having."""
        torch.set_num_threads(count)

    def build(self, seed: int, positional: list[Any], keyword: dict[str, Any]) -> dict[str, Tensor]:
        """Construct the model right after seeding; its state_dict as constructed."""
        self.model = self.file.build_whole(seed, (positional, keyword))
        self._state = {}
        own = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.model.to(self.device)
        return own

    def load(self, changed: dict[str, Tensor], how: str, buffers_only: bool = False) -> None:
        """Take over a state of which ``changed`` differs from the one before, as a Case's ``load`` says."""
        self._state.update({name: value.to(self.device) for name, value in changed.items()})
        if how == "state_dict" and not buffers_only:
            self.model.load_state_dict(self._state, strict=True)
        else:
            load_in_place(self.model, self._state, buffers_only=buffers_only or how == "keep")

    def run(self, inputs: list[Any], training: bool, cotangents: list[Tensor] | None) -> dict[str, Any]:
        """One run: its values, and what was seen besides.

        values, others, kinds, structure  as of :class:`Trial`
        mutated   the inputs changed
        late      an output changed after the call had returned
        threads   names of threads that the call started and that still ran when it returned
        reseeded  the call set the random generator's seed; drawn: it moved the generator
        """
        given = self._inputs(inputs)
        self._poison()
        torch.manual_seed(_SEED)
        before, generator = set(threading.enumerate()), torch.get_rng_state()

        def cotangent(index: int, output: Tensor) -> Tensor:
            assert cotangents is not None
            more = index >= len(cotangents)  # outputs than the original, which is found by the structure
            return torch.zeros_like(output) if more else cotangents[index].to(output.device)

        trial = run_trial(self.model, given, training=training, cotangent=None if cotangents is None else cotangent)
        started = [t for t in threading.enumerate() if t not in before and t.is_alive()]
        kept = list(trial.values.values())[: len(trial.outputs)]
        for thread in started:
            thread.join(_WAIT)
        late = bool(started) and not _all_same(trial.outputs, kept)
        reseeded = torch.initial_seed() != _SEED
        self._outputs = [(y.shape, y.dtype) for y in trial.outputs]
        return {
            "values": trial.values,
            "others": trial.others,
            "kinds": trial.kinds,
            "structure": trial.structure,
            "mutated": not same_inputs(trial.inputs, inputs),
            "late": late,
            "threads": [t.name for t in started],
            "reseeded": reseeded,
            "drawn": not torch.equal(torch.get_rng_state(), generator),
        }

    def side_effects(self, inputs: list[Any], training: bool, own: Sequence[int] = ()) -> dict[str, bool]:
        """Call twice, then again as at first.

        own        which outputs two calls of the original share as well, such as a parameter: not looked at
        shared     the two calls' outputs lie in the same memory; changed: the second overwrote the first's
        late       an output changed while nothing was called, whatever the two calls share
        repeats    the same inputs gave the same bits
        """
        flat: list[list[Tensor]] = []
        kept: list[list[Tensor]] = []
        late = False
        for factor in (1.0, 0.5):
            given = self._inputs(inputs)
            for value in given:
                if isinstance(value, Tensor) and value.is_floating_point():
                    value.data.mul_(factor)
            trial = run_trial(self.model, given, training=training, cotangent=None)
            flat.append(_made(trial.outputs, given, own))
            returned = [y.clone() for y in flat[-1]]
            time.sleep(_WAIT)
            late = late or not _all_same(flat[-1], returned)
            kept.append([y.clone() for y in flat[-1]])
        first, second = flat
        shared = any(_memory(a) == _memory(b) != 0 for a in first for b in second)
        changed = not _all_same(first, kept[0])
        load_in_place(self.model, self._state, buffers_only=True)
        given = self._inputs(inputs)
        again = run_trial(self.model, given, training=training, cotangent=None).outputs
        repeats = _all_same(_made(again, given, own), kept[0])
        return {"shared": shared, "changed": changed, "late": late, "repeats": repeats}

    def wears_off(self, inputs: list[Any]) -> int:
        """How many further calls in evaluation it takes until the answer is quite another one; 0 if it stays."""
        first = self._forward(inputs)
        begin = time.monotonic()
        for call in range(1, _CALLS + 1):
            if any(_far(a, b) for a, b in zip(self._forward(inputs), first, strict=True)):
                return call
            if time.monotonic() - begin > _CALLS_SECONDS:
                break
        return 0

    def prepacked(self, inputs: list[Any]) -> bool:
        """Whether evaluation misses a change of the weights that version counters do not show (``p.data``)."""
        with torch.no_grad():
            for parameter in self._parameters().values():
                parameter.data.mul_(1.5)
            unseen = self._forward(inputs)
            for parameter in self._parameters().values():
                parameter.mul_(1.0)
            seen = self._forward(inputs)
        load_in_place(self.model, self._state)
        return any(_far(a, b) for a, b in zip(unseen, seen, strict=True))

    def insensitive(self, inputs: list[Any], names: list[str]) -> list[str]:
        """Which of these parameters, buffers and inputs ("input0") an output in evaluation does not depend on."""
        return [name for name, by in moves(self.model, self._state, self._inputs(inputs), names) if by < _STILL]

    def unwritten(self, inputs: list[Any], training: bool) -> int:
        """How many elements of the outputs hold what lay in their memory before: NaN, as memory is filled with it."""
        if not hasattr(torch.utils, "deterministic"):
            return 0
        strict, warn = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            filled = run_trial(self.model, self._inputs(inputs), training=training, cotangent=None)
        finally:
            torch.use_deterministic_algorithms(strict, warn_only=warn)
        load_in_place(self.model, self._state, buffers_only=True)
        return sum(int(y.isnan().sum()) for y in filled.outputs if y.is_floating_point())

    def unordered(self, inputs: list[Any]) -> bool:
        """Whether evaluation gives another answer while the current stream has yet to write the inputs."""
        if self.device.type != "cuda":
            return False
        others = [1.5 * v + 0.25 if isinstance(v, Tensor) and v.is_floating_point() else v for v in inputs]
        self._forward(others)
        torch.cuda.synchronize(self.device)
        at_once = [y.clone() for y in self._forward(inputs)]
        given = self._inputs(inputs)
        torch.cuda.synchronize(self.device)
        waited, again = (run_trial(self.model, given, training=False, cotangent=None).outputs for _ in range(2))
        torch.cuda.synchronize(self.device)
        return any(_far(a, b) and not _far(c, b) for a, b, c in zip(at_once, waited, again, strict=True))

    def dropped(self) -> bool:
        """Whether a dropout that is switched off would have dropped something."""
        return bool(self.dropout[1])

    def patched(self) -> list[str]:
        """Which functions that measure, compare or draw are no longer PyTorch's or Python's own."""
        now = _watched()
        return [n for n, function in self.functions.items() if now.get(n) is not function and _foreign(now.get(n))]

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.is_floating_point()}

    def _forward(self, inputs: list[Any]) -> list[Tensor]:
        return run_trial(self.model, self._inputs(inputs), training=False, cotangent=None).outputs

    def _inputs(self, inputs: list[Any]) -> list[Any]:
        """The inputs in memory that earlier calls of the same shape used, behind PyTorch's version counters."""
        result = []
        if self.device.type == "cuda":
            torch.cuda._sleep(5_000_000)  # whoever does not wait for the current stream reads the inputs too early
        for index, value in enumerate(inputs):
            if isinstance(value, Tensor):
                key = (index, value.shape, value.dtype)
                if key not in self._memory:
                    self._memory[key] = value.detach().to(self.device, copy=True)
                memory = self._memory[key].detach()
                memory.data.copy_(value)
                value = memory
            result.append(value)
        if len(self._memory) > 64:
            self._memory.clear()
        return result

    def _poison(self) -> None:
        """Fill memory of the outputs' sizes with NaN and give it back: who does not write does not find old results."""
        held = []
        for shape, dtype in self._outputs:
            if dtype.is_floating_point and shape.numel() <= 1 << 24:
                held += [torch.full(shape, float("nan"), dtype=dtype, device=self.device) for _ in range(3)]


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
        yield name, max((_distance(a, b) for a, b in zip(outputs(), before, strict=True)), default=0.0)
        with torch.no_grad():
            target.copy_(kept)
    load_in_place(model, state)


def _watched() -> dict[str, object]:
    found: dict[str, object] = {}
    for owner, names in _WATCHED.items():
        first, *rest = owner.split(".")
        value: Any = {"time": time, "torch": torch}[first]
        for part in rest:
            value = getattr(value, part, None)
        found.update({f"{owner}.{name}": getattr(value, name, None) for name in names.split()})
    return found


def _foreign(function: object) -> bool:
    """Whether PyTorch did not define it: importing its compiler wraps functions of its own."""
    code = getattr(function, "__code__", None)
    return code is None or not code.co_filename.startswith(os.path.dirname(torch.__file__) + os.sep)


def _kind(value: Tensor) -> str:
    """What is special about a tensor: its class, or attributes of its own that stand before PyTorch's."""
    if type(value) not in (Tensor, nn.Parameter):
        return type(value).__qualname__
    own = sorted(name for name in vars(value) if hasattr(Tensor, name)) if hasattr(value, "__dict__") else []
    return f"Tensor with its own {', '.join(own)}" if own else ""


def _made(outputs: Sequence[Tensor], given: Sequence[Any], own: Sequence[int]) -> list[Tensor]:
    """The outputs without those of these numbers, and without an input that is given back: that is no fault."""
    memory = {_memory(v) for v in given if isinstance(v, Tensor)}
    return [y for i, y in enumerate(outputs) if i not in own and _memory(y) not in memory]


def shared_outputs(model: nn.Module, inputs: Sequence[Any], training: bool) -> list[int]:
    """Which outputs of two calls lie in the same memory."""
    copies = [[v.detach().clone() if isinstance(v, Tensor) else v for v in inputs] for _ in range(2)]
    first, second = (run_trial(model, given, training=training, cotangent=None).outputs for given in copies)
    return [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if _memory(a) == _memory(b) != 0]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _all_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(same_inputs([a], [b.to(a.device)]) for a, b in zip(left, right, strict=True))


def _distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖; infinite for another shape."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.detach().double().nan_to_num(0.0), b.detach().double().nan_to_num(0.0)
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def _far(a: Tensor, b: Tensor) -> bool:
    """Apart by more than another order of summation explains."""
    return _distance(a, b) > 0.02


def load(model_path: str, candidate_path: str, device: str, precision: str | None) -> Runner:
    """The runner of a file in this process, after the model's file: what that sets (default dtype) holds for both."""
    with contextlib.suppress(Exception):  # the judge has run it as well, and says what is wrong with it
        load_model_file(model_path)
    functions = _watched()
    off = contextlib.ExitStack()  # for as long as the process lives
    dropped = off.enter_context(without_dropout())
    runner = Runner(load_candidate_file(candidate_path, precision), device)
    runner.functions, runner.dropout = functions, (off, dropped)
    return runner
