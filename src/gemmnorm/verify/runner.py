"""The candidate's side: its model, the calls that it is asked for, and what is seen while it runs.

`Runner` serves in the judge's process (tests, calibration) or, behind `userfiles.bare`, in one of its own.
There this file and those that it imports are all of the package that the process holds, under other names: a file
finds no verifier in its modules, its stack or its environment, and no reference's result in its memory. So nothing
here may import more than the loader of files, and everything that goes in and out is plain values and tensors.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..userfiles import ModelFile, functions, load_candidate_file, load_model_file, replaced, without_dropout
from .conventions import conventions
from .outputs import take_apart
from .process import changed_settings, put_back, settings
from .trial import (
    arranged,
    distance,
    entries,
    load_in_place,
    memory_of,
    moves,
    run_trial,
    same_inputs,
    set_back,
    set_mode,
)

__all__ = ["Runner", "load"]

_WAIT = 0.05  # seconds in which work that goes on after the call shows
_STILL = 1e-5  # of an output's norm: what moves it by less has left rounding errors behind
_SEED = 8_675_309_421  # nobody else's
_COPIED = 1 << 28  # elements of a state of which there is room for two more
_HELD, _HELD_ELEMENTS = 20, 1 << 26  # calls whose outputs are all kept, as far as those go
_CALLS, _CALLS_SECONDS = 150, 0.5  # further calls, for what counts them


class Runner:
    """A candidate's file and its model, built anew for each seed.

    Every method takes and returns plain values and tensors. What the candidate raises comes out as it is.
    """

    def __init__(self, file: ModelFile, device: str) -> None:
        self.file, self.device = file, torch.device(device)
        self.name = file.name
        self.model = nn.Module()
        self._state: dict[str, Tensor] = {}
        self._volatile: dict[str, Tensor] = {}
        self._arguments: tuple[list[Any], dict[str, Any]] = ([], {})
        self._judged: list[Tensor] = []
        self.settings_left: list[str] = []
        self._memory: dict[tuple[Any, ...], Tensor] = {}
        self._outputs: list[tuple[torch.Size, torch.dtype]] = []
        self.functions = functions()
        self.dropout: tuple[contextlib.ExitStack, list[str]] = (contextlib.ExitStack(), [])

    def use_threads(self, count: int) -> None:
        """As many of the CPU's as the judge finds worth having."""
        torch.set_num_threads(count)

    def build(
        self, seed: int, positional: list[Any], keyword: dict[str, Any], volatile: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        """Construct the model right after seeding; its state_dict as constructed.

        `volatile` names buffers outside the state_dict that loading a state sets back as well.
        """
        found = settings()
        self.model = self.file.build_whole(seed, (positional, keyword))
        # Random states have been set to the seed.
        self.settings_left += [name for name in changed_settings(found) if "random state" not in name]
        self._state, self._seed, self._arguments = {}, seed, (positional, keyword)
        own = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.model.to(self.device)
        buffers = self.model.named_buffers()
        self._volatile = {name: b.detach().clone() for name, b in buffers if name in volatile}
        return own

    def entries(self) -> dict[str, str]:
        """What each parameter and buffer is."""
        return entries(self.model)

    def left(self) -> list[str]:
        """Settings of the process that loading the file or building the model changed."""
        return sorted(set(self.settings_left))

    def load(self, changed: dict[str, Tensor], how: str, buffers_only: bool = False) -> None:
        """Take over a state of which `changed` differs from the one before, as a Case's `load` says."""
        self._state.update({name: value.to(self.device) for name, value in changed.items()})
        if how == "state_dict" and not buffers_only:
            self.model.load_state_dict(self._state, strict=True)
            set_back(self.model, self._volatile)
        else:
            self._restore(buffers_only=buffers_only or how == "keep")

    def _restore(self, *, buffers_only: bool = True) -> None:
        load_in_place(self.model, self._state, buffers_only=buffers_only)
        set_back(self.model, self._volatile)

    def run(
        self, inputs: list[Any], training: bool, cotangents: list[Tensor] | None, use: Sequence[str] = ()
    ) -> dict[str, Any]:
        """One run: its values, and what was seen besides.

        values, others, kinds, structure, require, state, changed, spoiled, left, drops  as of `Trial`
        mutated   the inputs changed
        late      an output changed after the call had returned
        threads   names of threads that the call started and that still ran when it returned
        reseeded  the call set the random generator's seed; drawn: it moved the generator
        """
        given = self._inputs(inputs, use)
        self._poison()
        torch.manual_seed(_SEED)
        before, generator = set(threading.enumerate()), torch.get_rng_state()

        def cotangent(index: int, output: Tensor) -> Tensor:
            assert cotangents is not None
            more = index >= len(cotangents)  # outputs than the original, which is found by the structure
            return torch.zeros_like(output) if more else cotangents[index].to(output.device)

        backward = None if cotangents is None else cotangent
        state = {**self._state, **self._volatile}
        trial = run_trial(self.model, given, training=training, cotangent=backward, use=use, before=state)
        started = [t for t in threading.enumerate() if t not in before and t.is_alive()]
        kept = list(trial.values.values())[: len(trial.outputs)]
        for thread in started:
            thread.join(_WAIT)
        late = bool(started) and not _all_same(trial.outputs, kept)
        reseeded = torch.initial_seed() != _SEED
        self._outputs = [(y.shape, y.dtype) for y in trial.outputs]
        self._judged = kept
        return {
            "values": trial.values,
            "others": trial.others,
            "kinds": trial.kinds,
            "structure": trial.structure,
            "require": trial.require,
            "state": sorted(trial.state),  # the reader of PyTorch 2.4 takes no sets
            "changed": sorted(trial.changed),
            "spoiled": trial.spoiled,
            "left": trial.left,
            "drops": trial.drops,
            "mutated": not same_inputs(trial.inputs, inputs),
            "late": late,
            "threads": [t.name for t in started],
            "reseeded": reseeded,
            "drawn": not torch.equal(torch.get_rng_state(), generator),
        }

    def side_effects(self, inputs: list[Any], training: bool, own: Sequence[int] = ()) -> dict[str, bool]:
        """Call twice, then some times more, then again as at first, after a run on the same inputs.

        own        which outputs two calls of the original share as well, such as a parameter: not looked at
        shared     outputs of two calls, all of which are kept, lie in the same memory; changed: one overwrote another's
        late       an output changed while nothing was called, whatever the two calls share
        repeats    the same inputs gave the same bits; strays: quite another answer than that run, which was judged
        """
        kept: list[list[Tensor]] = []
        late, strays, judged = False, False, self._judged
        self._restore()
        for factor in (1.0, 0.5):
            given = self._scaled(inputs, factor)
            trial = run_trial(self.model, given, training=training, cotangent=None)
            strays = strays or (factor == 1.0 and _any_far(trial.outputs, judged))
            outputs = _made(trial.outputs, given, own)
            returned = [y.clone() for y in outputs]
            time.sleep(_WAIT)
            late = late or not _all_same(outputs, returned)
            kept.append([y.clone() for y in outputs])
        del trial, outputs
        # Buffers may be written again only after some calls, or only where gradients are wanted.
        held = [self._held(inputs, training, gradients, own) for gradients in (False, True)]
        shared, changed = (any(found) for found in zip(*held, strict=True))
        self._restore()
        given = self._inputs(inputs)
        again = run_trial(self.model, given, training=training, cotangent=None).outputs
        repeats = _all_same(_made(again, given, own), kept[0])
        strays = strays or _any_far(again, judged)
        return {"shared": shared, "changed": changed, "late": late, "repeats": repeats, "strays": strays}

    def _held(self, inputs: list[Any], training: bool, gradients: bool, own: Sequence[int]) -> tuple[bool, bool]:
        """Whether the outputs of several calls, all kept, lie in the same memory, and whether they change meanwhile."""
        held: list[Tensor] = []
        copies: list[Tensor] = []
        places: list[int] = []
        size = sum(v.numel() for v in self._state.values()) if gradients else 1  # of what a graph may keep
        for call in range(min(_HELD, max(3, _HELD_ELEMENTS // max(size, 1)))):
            given = self._scaled(inputs, 0.5 if call % 2 else 1.0)
            with put_back(), torch.set_grad_enabled(gradients):
                set_mode(self.model, training)
                outputs = _made(take_apart(self.model(*given)).tensors, given, own)
            held += outputs
            copies += [y.detach().clone() for y in outputs]
            places += {memory_of(y) for y in outputs} - {0}
            if sum(y.numel() for y in held) > _HELD_ELEMENTS:
                break
        changed = not all(_all_same([y.detach()], [copy]) for y, copy in zip(held, copies, strict=True))
        return len({*places}) < len(places), changed

    def instances(self, inputs: list[Any]) -> str:
        """What goes wrong with a second instance beside the model, and with a copy of it; empty if nothing does.

        Another instance takes over other weights, and so do the model, in evaluation, and a copy: all must agree, and
        leave each other alone. A copy that raises is told as "copy: ...", since the original's may do so too, and
        parameters that `load_state_dict(assign=True)` exchanges and that it does not follow as "assign: ...".
        """
        if sum(v.numel() for v in self._state.values()) > _COPIED:
            return ""
        model = self.model
        moved = {*dict(model.named_parameters(remove_duplicate=False))}  # other buffers may not bear other values
        moved |= {n for n in self._state if n.rpartition(".")[2] in ("running_mean", "running_var")}
        shifted = {n: self._shifted(v) if n in moved else v for n, v in self._state.items()}
        self._restore()
        before = self._forward(inputs)
        with torch.random.fork_rng(devices=[]):
            other = self.file.build(self._seed, self._arguments).to(self.device)  # with the same constants
        load_in_place(other, shifted)
        try:
            if _any_far(self._forward(inputs), before):
                return "it gives another answer once a second instance has been built"
            self.model = other
            expected = self._forward(inputs)
            try:
                self.model = copy.deepcopy(model)
            except Exception as error:
                return f"copy: copy.deepcopy of it raises {type(error).__name__}: {error}"
            load_in_place(model, shifted)
            copied, self.model = self.model, model
            if _any_far(self._forward(inputs), expected):
                return "it does not follow weights that are loaded in evaluation mode"
            load_in_place(model, self._state)
            load_in_place(copied, shifted)
            self.model = copied
            if _any_far(self._forward(inputs), expected):
                return "a copy by copy.deepcopy does not follow its own weights"
            self.model = model
            if _any_far(self._forward(inputs), before):
                return "it follows the weights of another instance or copy"
            self.model = other
            return self._exchanged(inputs, shifted, expected)
        finally:
            self.model = model
            load_in_place(model, self._state)

    def _exchanged(self, inputs: list[Any], state: dict[str, Tensor], expected: list[Tensor]) -> str:
        """Whether the model does not follow parameters that others are put in place of; a loader of its own may not."""
        load_in_place(self.model, self._state)
        self._forward(inputs)
        try:
            self.model.load_state_dict({n: v.clone() for n, v in state.items()}, strict=True, assign=True)
        except TypeError:
            return ""
        stale = _any_far(self._forward(inputs), expected)
        return "assign: it does not follow parameters that load_state_dict(assign=True) exchanges" if stale else ""

    @staticmethod
    def _shifted(value: Tensor) -> Tensor:
        return 1.25 * value + 0.125 * value.abs().mean() if value.is_floating_point() else value

    def conventions(self, inputs: list[Any]) -> dict[str, Any]:
        """Of the model, see conventions.py."""
        return conventions(self.model, self._inputs(inputs))

    def wears_off(self, inputs: list[Any]) -> tuple[int, bool]:
        """How many further calls in evaluation it takes until the answer is quite another one; 0 if it stays.

        And whether that answer became the first one again while nothing was called: then it only came late.
        """
        first = self._forward(inputs)
        begin = time.monotonic()
        for call in range(1, _CALLS + 1):
            answer = self._forward(inputs)
            if _any_far(answer, first):
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                return call, not _any_far(answer, first)
            if time.monotonic() - begin > _CALLS_SECONDS:
                break
        return 0, False

    def prepacked(self, inputs: list[Any]) -> bool:
        """Whether evaluation misses a change of the weights that version counters do not show (`p.data`)."""
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
        self._restore()
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
        """Whether a dropout, which keeps every element, would have dropped something."""
        return bool(self.dropout[1])

    def patched(self) -> list[str]:
        """Which functions that compute, measure, compare or draw are no longer PyTorch's or Python's own."""
        return replaced(self.functions)

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.is_floating_point()}

    def _forward(self, inputs: list[Any]) -> list[Tensor]:
        return run_trial(self.model, self._inputs(inputs), training=False, cotangent=None).outputs

    def _inputs(self, inputs: list[Any], use: Sequence[str] = ()) -> list[Any]:
        """The inputs in memory that earlier calls of the same shape used, behind PyTorch's version counters."""
        result = []
        if self.device.type == "cuda":
            torch.cuda._sleep(5_000_000)  # whoever does not wait for the current stream reads the inputs too early
        for index, value in enumerate(inputs):
            if isinstance(value, Tensor):
                key = (index, value.shape, value.dtype, tuple(use))
                if key not in self._memory:
                    self._memory[key] = arranged(value.to(self.device), use)
                memory = self._memory[key].detach()
                memory.data.copy_(value)
                value = memory
            result.append(value)
        if len(self._memory) > 64:
            self._memory.clear()
        return result

    def _scaled(self, inputs: list[Any], factor: float) -> list[Any]:
        """Other inputs in the same memory."""
        given = self._inputs(inputs)
        for value in given:
            if isinstance(value, Tensor) and value.is_floating_point():
                value.data.mul_(factor)
        return given

    def _poison(self) -> None:
        """Fill memory of the outputs' sizes with NaN and give it back: who does not write does not find old results."""
        held = []
        for shape, dtype in self._outputs:
            if dtype.is_floating_point and shape.numel() <= 1 << 24:
                held += [torch.full(shape, float("nan"), dtype=dtype, device=self.device) for _ in range(3)]


def _made(outputs: Sequence[Tensor], given: Sequence[Any], own: Sequence[int]) -> list[Tensor]:
    """The outputs without those of these numbers, and without an input that is given back: that is no fault."""
    memory = {memory_of(v) for v in given if isinstance(v, Tensor)}
    return [y for i, y in enumerate(outputs) if i not in own and memory_of(y) not in memory]


def _all_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(same_inputs([a], [b.to(a.device)]) for a, b in zip(left, right, strict=True))


def _far(a: Tensor, b: Tensor) -> bool:
    """Apart by more than another order of summation explains."""
    return distance(a, b) > 0.02


def _any_far(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return any(_far(a, b) for a, b in zip(left, right, strict=False))


def load(model_path: str, candidate_path: str, device: str, precision: str | None) -> Runner:
    """The runner of a file in this process, after the model's file: what that sets (default dtype) holds for both."""
    with contextlib.suppress(Exception):  # the judge has run it as well, and says what is wrong with it
        load_model_file(model_path)
    off = contextlib.ExitStack()  # for as long as the process lives
    dropped = off.enter_context(without_dropout())
    found, written = settings(), functions()
    runner = Runner(load_candidate_file(candidate_path, precision), device)
    runner.settings_left = changed_settings(found)
    runner.functions, runner.dropout = written, (off, dropped)
    return runner
