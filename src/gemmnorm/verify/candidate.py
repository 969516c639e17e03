"""Judging what a candidate does against references: which quantities are compared, and which side effects are faults.

The candidate is built once per seed and then lives through all cases, as in training: its weights change under it
(`load_state_dict` and in-place updates alike), its inputs arrive in the same memory with new contents, and
training and evaluation alternate. So packed weights that go stale, outputs kept from an earlier call and buffers
that are returned twice show as wrong numbers; `_side_effects` also looks for them directly. The model itself lives
behind `gemmnorm.verify.runner.Runner`, as a rule in another process.
"""

from __future__ import annotations

import copy
import hashlib
import math
import traceback
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..userfiles import Bare, BareCallError, BareProcessError, ModelFile, ModelFileError, how_it_died
from .conventions import lacking
from .equality import SLACK, Measure, compare, without_digits
from .families import PLAIN
from .golden import Reference, Sample
from .reported import FATAL, difference, property_of, sentences, verdict_of
from .runner import Runner
from .trial import ADDED, DOUBLED, VOLATILE, WRITTEN, entries, same_inputs

__all__ = ["Candidate", "Check", "Local", "Remote", "Side"]

Check = dict[str, Any]
_SETTLED = 0.81  # of a provisional limit: no further runs; 0.8 is what the original's own errors give (1/EAGER)
_ALLCLOSE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
# A use that PyTorch may refuse: what its message says, the property that then holds, and the use instead.
_REFUSED = {
    WRITTEN: ("modified by an inplace operation", "output_needed", ()),
    ADDED: ("donated buffer", "one_backward", (DOUBLED,)),
}
_REMEMBERED = 1 << 20  # elements of an output that is remembered, to know it again


class Side(Protocol):
    """Where a Runner is: `call(method, *arguments)`; `name` is the file's."""

    name: str

    def call(self, method: str, *arguments: Any) -> Any: ...


class Local:
    """A Runner in this process: for files that are trusted (tests, calibration)."""

    def __init__(self, file: ModelFile, device: str) -> None:
        self.name = file.name
        self._runner = Runner(file, device)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._runner, method)(*arguments)


class Remote:
    """A Runner in a process that holds nothing of the judge's."""

    def __init__(self, bare: Bare, name: str, threads: int) -> None:
        self.name, self._bare, self._threads = name, bare, threads

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._threads:
                threads, self._threads = self._threads, 0
                self._bare.call("use_threads", threads)
            return self._bare.call(method, *arguments)
        except BareCallError as error:
            if error.type_name == ModelFileError.__name__:
                raise ModelFileError(error.message) from None
            raise


class Candidate:
    """A candidate model under one seed.

    mismatch    how its state_dict differs from the original's; empty if it does not
    properties  what the module's page of verify lists; None for what has not been looked at yet
    trouble     the first traceback of a call that raised
    seen        faults that need no comparison: class → sentence (`faults.py`)
    values      what the last case gave, by quantity
    differs     what differs in a use that is only reported, by property
    gone        its process has ended in such a use
    """

    def __init__(self, side: Side, original: ModelFile, seed: int) -> None:
        self.side, self.seed = side, seed
        model = original.build(seed, original.init_inputs())
        reference, kinds = model.state_dict(), entries(model)
        volatile = [name for name, kind in kinds.items() if kind == VOLATILE]
        own = side.call("build", seed, *original.init_inputs(), volatile)
        self.original, self.seed = original, seed
        self.mismatch = _mismatch(reference, own) or _other_kinds(kinds, found := side.call("entries"))
        same_order = not self.mismatch and _parameters(kinds) == _parameters(found)
        same_draw = not self.mismatch and all(_same(own[name], value) for name, value in reference.items())
        self.trouble = ""
        self.seen: dict[str, str] = {}
        self.values: dict[str, Tensor] = {}
        self.differs: dict[str, str] = {}
        self.gone = False
        self.properties: dict[str, Any] = {
            "same_parameter_names": not self.mismatch,
            "same_drawing_order": same_draw,
            "same_parameter_order": same_order,
            "inputs_mutated": None,
            "outputs_share_memory": None,
            "deterministic": None,
            "weights_prepacked": None,
            "moves_generator": False,
            "threads": [],
            "settings_left": side.call("left"),
            "instances": None,
            "output_needed": False,
            "one_backward": False,
            "frozen_statistics": None,
            "autocast": None,
            "autocast_float16": None,
            "missing_arguments": None,
            "hooks_not_run": None,
            "hooks_raise": None,
            "pickle_raises": None,
            "other_strides": None,
            "allclose_eager": {"train": None, "eval": None, "tolerance": None},
            "output_error": {"train": None, "eval": None},
        }
        self._sent: dict[str, Tensor] = {}
        self._answers: dict[bytes, str] = {}

    def continue_from(self, earlier: Candidate | None) -> None:
        """Carry over what an earlier seed found: a property once violated stays so."""
        if earlier is None:
            return
        new = self.properties
        own = {name: new[name] for name in ("same_parameter_names", "same_parameter_order")}
        self.properties = {**earlier.properties, **own}
        self.properties["same_drawing_order"] = new["same_drawing_order"] and earlier.properties["same_drawing_order"]
        self._settings(new["settings_left"], [])
        self.seen, self.differs = earlier.seen, earlier.differs

    def warnings(self) -> list[str]:
        """What is reported and not condemned."""
        return sentences(self.properties, self.differs)

    def check(self, reference: Reference) -> list[Check]:
        """Every comparison of one case in one phase; none where its use is reported and not demanded."""
        told = property_of(reference)
        if not told:
            return self._check(reference)
        if self.gone:
            return []
        seen = dict(self.seen)
        try:
            checks = self._check(reference)
        except BareProcessError as error:
            self.gone = True
            checks = [_check(reference, "call", _failed("call", f"ends its process: it {how_it_died(error.code)}"))]
        self.seen, self.trouble = seen, ""
        found = verdict_of(reference, checks)
        if found is not None and self.properties[told] is not False:
            self.properties[told] = found
            self.differs[told] = difference(checks)
        return []

    def _check(self, reference: Reference) -> list[Check]:
        self.trouble = ""
        try:
            self._load(reference)
            if reference.error is not None:
                return [self._expect_error(reference)]
            checks = self._compare(reference, reference.gradients, "")
            if wrong := [name for name in self.properties["settings_left"] if name in FATAL]:
                self.seen["tampering"] = f"it leaves the {' and the '.join(wrong)} of the process changed"
                checks.append(_check(reference, "settings", _failed("left", f"{' and '.join(wrong)} left changed")))
            plain = reference.case.weights in PLAIN and reference.case.inputs == "plain"
            served = plain or not reference.training
            if served and reference.gradients and reference.case.rows is not None:
                self._load(reference, buffers_only=True)
                checks += self._compare(reference, False, " without autograd")
            if reference.case.name == "plain":
                checks += self._side_effects(reference, all(check["ok"] for check in checks))
            if reference.case.name == "evaluation" and self.properties["instances"] is None:
                checks += self._instances(reference)
                self._load(reference)
                self.properties |= lacking(reference.conventions(), self.side.call("conventions", reference.inputs))
            return checks
        except BareProcessError:
            raise
        except Exception as error:
            self.trouble = error.traceback if isinstance(error, BareCallError) else traceback.format_exc()
            name = error.type_name if isinstance(error, BareCallError) else type(error).__name__
            note = f"raises {name}: {str(error).strip() or 'no message'}".splitlines()[0]
            return [_check(reference, "call", _failed("call", note))]

    def _load(self, reference: Reference, *, buffers_only: bool = False) -> None:
        """Hand the reference's state over, in the way that the case asks for; what has not changed is there already."""
        changed = {
            name: value
            for name, value in reference.state.items()
            if name not in self._sent or not torch.equal(self._sent[name], value)
        }
        self._sent.update(changed)
        self.side.call("load", changed, reference.case.load, buffers_only)

    def _expect_error(self, reference: Reference) -> Check:
        """The original refuses this input; so must the candidate."""
        try:
            self.side.call("run", reference.inputs, reference.training, None)
        except BareProcessError:
            raise
        except Exception:
            return _check(reference, "call", Measure("raises", 0.0, 0.0, 0.0, 0.0, True, []))
        note = f"accepts an input that the original refuses with {reference.error}"
        return _check(reference, "call", _failed("raises", note))

    def _compare(self, reference: Reference, gradients: bool, suffix: str) -> list[Check]:
        run = self._run(reference, gradients)
        self.values = {**self.values, **run["values"]} if suffix else run["values"]
        if run["structure"] != reference.structure:
            note = f"the output is {run['structure']}, the original's is {reference.structure}"
            return [_check(reference, "output", _failed("structure", note))]
        checks = [
            _check(reference, quantity, measure) for quantity, measure in self._conduct(reference, run, gradients)
        ]
        if run["others"] != reference.others:
            checks.append(_check(reference, "output", _failed("exact", "outputs that are no tensors differ")))
        found = self._measure(reference, gradients)
        if reference.refine is not None and any(m.ratio > _SETTLED for _, measures in found for m in measures):
            reference.refine()
            found = self._measure(reference, gradients)
        if any(not m.ok and m.measure in SLACK for _, measures in found for m in measures):
            none = reference.undetermined()
            found = [(name, without_digits(measures) if name in none else measures) for name, measures in found]
        for name, measures in found:
            shown = name + (suffix if name.startswith("output") else "")
            checks += [_check(reference, shown, measure) for measure in measures]
        wrong = any(not m.ok for name, measures in found for m in measures if name.startswith("output"))
        self._recognise(reference, wrong)
        if not suffix and "output" in self.values and "output" in reference.eager:
            self._beside_eager(reference, self.values["output"], dict(found)["output"])
        return checks

    def _run(self, reference: Reference, gradients: bool) -> dict[str, Any]:
        """One run. Where PyTorch itself refuses how the model is used (`_REFUSED`), another one in another way."""
        cotangents, use = reference.cotangents if gradients else None, reference.case.use
        try:
            return dict(self.side.call("run", reference.inputs, reference.training, cotangents, use))
        except RuntimeError as error:
            refused = next((w for w in use if w in _REFUSED and _REFUSED[w][0] in str(error)), None)
            if refused is None:
                raise
        _, found, instead = _REFUSED[refused]
        self.properties[found] = True
        self._load(reference, buffers_only=True)
        use = (*(word for word in use if word != refused), *instead)
        return dict(self.side.call("run", reference.inputs, reference.training, cotangents, use))

    def _conduct(self, reference: Reference, run: dict[str, Any], gradients: bool) -> list[tuple[str, Measure]]:
        """What a call did besides computing: failures, properties and faults that were seen as such."""
        failures = []
        mutated = not reference.mutates and run["mutated"]
        self.properties["inputs_mutated"] = bool(self.properties["inputs_mutated"] or mutated)
        self.properties["moves_generator"] |= run["drawn"] and not reference.drawn
        self.properties["threads"] = sorted({*self.properties["threads"], *run["threads"]})
        if mutated:
            failures.append(("inputs", _failed("unchanged", "the call changes its inputs")))
            self.seen["inputs_changed"] = "it writes into its inputs"
        if run["kinds"] != reference.kinds:
            odd = (
                next((a for a, b in zip(run["kinds"], reference.kinds, strict=False) if a != b), "nothing") or "Tensor"
            )
            failures.append(("output", _failed("kind", f"the output is a {odd}, the original's is a plain tensor")))
            why = "which a later backward refuses" if "inference" in odd else "which may compute when it is looked at"
            self.seen["lazy_output"] = f"it returns a {odd}, {why}"
        if run["late"]:
            failures.append(("output", _failed("late", "the output changes after the call has returned")))
            self.seen["late_work"] = f"a thread ({', '.join(run['threads'])}) works on after the call has returned"
        self._settings(run["left"], reference.left)
        if run["spoiled"] and not reference.spoils:
            failures.append(("grad:output", _failed("unchanged", "the backward changes the gradient that it is given")))
            self.seen["inputs_changed"] = "its backward writes into the gradient that it is given"
        if other := _other_drops(run["drops"], reference):
            failures.append(("dropout", _failed("exact", other)))
            self.seen["dropout"] = f"it {other}"
        left_alone = "the original leaves it as it is"
        for name in sorted(run["changed"]):
            if name in reference.state and name not in reference.eager:
                failures.append((name, _failed("unchanged", f"the call changes it, {left_alone}")))
        if gradients:
            failures += _surplus(reference, run)
        if run["reseeded"]:
            failures.append(("generator", _failed("seed", "the call sets the seed of the random generator")))
            self.seen["tampering"] = "it sets the random generator's seed, and so the inputs that a harness draws next"
        return failures

    def _settings(self, found: list[str], allowed: list[str]) -> None:
        """Remember settings of the process that are no longer what they were."""
        known = self.properties["settings_left"]
        self.properties["settings_left"] = sorted({*known, *(name for name in found if name not in allowed)})

    def _recognise(self, reference: Reference, wrong: bool) -> None:
        """Remember an answer, or know it again: the bits that were given in another case, where others are right."""
        output = next((v for name, v in self.values.items() if name.startswith("output")), None)
        if output is None or not 1 < output.numel() <= _REMEMBERED or bool((output == output.flatten()[0]).all()):
            return
        digest = hashlib.blake2b(output.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).digest()
        earlier = self._answers.setdefault(digest, reference.case.name)
        if wrong and earlier != reference.case.name:
            self.seen.setdefault(
                "replayed_output", f"it gives the answer of an earlier call again, of case “{earlier}”"
            )

    def _measure(self, reference: Reference, gradients: bool) -> list[tuple[str, list[Measure]]]:
        """Every quantity that the original has, compared under the reference's limits as they stand."""
        found = []
        for name, eager in reference.eager.items():
            if name.startswith("grad:") and not gradients:
                continue
            if name not in self.values:
                what = "gradient" if name.startswith("grad:") else "value"
                found.append((name, [_failed("missing", f"no {what}, the original has one")]))
                continue
            value, sample = self.values[name].to(eager.device), reference.samples.get(name)
            if sample and value.shape != sample.shape:
                note = f"shape {list(value.shape)}, expected {list(sample.shape)}"
                found.append((name, [_failed("shape", note)]))
                continue
            if sample:
                value = value[sample.rows]
            measures = compare(value, eager, reference.golden[name], reference.limits.get(name))
            found.append((name, [_in_full(m, sample) for m in measures] if sample else measures))
        return found

    def _beside_eager(self, reference: Reference, output: Tensor, measures: list[Measure]) -> None:
        """On plain data: its error and the original's, and the plain test of other harnesses, which decides nothing."""
        eager = reference.eager["output"]
        output = reference.sampled({"output": output.to(eager.device)})["output"]
        if reference.case.name not in ("plain", "full size") or not eager.is_floating_point():
            return
        if output.shape != eager.shape or output.dtype != eager.dtype:
            return
        whole = next((m for m in measures if m.measure in ("global", "worst")), None)
        if whole is not None:
            self.properties["output_error"][reference.phase] = {"error": whole.error, "eager_error": whole.eager_error}
        close = self.properties["allclose_eager"]
        tolerance = _ALLCLOSE.get(eager.dtype, 1e-4)
        same = torch.allclose(output.double(), eager.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        close["tolerance"] = tolerance
        close[reference.phase] = same and close[reference.phase] is not False

    def _side_effects(self, reference: Reference, well: bool) -> list[Check]:
        """What two calls share, whether the second repeats the first, and whether many calls stay the same."""
        found = self.side.call("side_effects", reference.inputs, reference.training)
        if (found["shared"] or found["changed"]) and (own := reference.shared()):
            self._load(reference, buffers_only=True)
            found = self.side.call("side_effects", reference.inputs, reference.training, own)
        shared, changed = found["shared"], found["changed"]
        self.properties["outputs_share_memory"] = bool(self.properties["outputs_share_memory"] or shared or changed)
        self.properties["deterministic"] = found["repeats"] and self.properties["deterministic"] is not False
        failures = []
        if shared or changed:
            what = "a later call overwrites it" if changed else "two calls return the same memory"
            self.seen["shared_outputs"] = f"its outputs share memory: {what}"
            failures.append(_failed("memory", what))
        if found["strays"] and well:
            self.seen["changes_with_calls"] = "the same call gives quite another answer when it is made again"
            failures.append(_failed("repeats", "another call on the same inputs gives quite another answer"))
        if found["late"]:
            self.seen["late_work"] = "its output changes after the call has returned"
            failures.append(_failed("late", "the output changes after the call has returned"))
        if not reference.training:
            calls, late = self.side.call("wears_off", reference.inputs)
            if late:
                self.seen["late_work"] = f"its output changes after the call has returned (call {calls})"
                failures.append(_failed("late", f"the output of call {calls} changes after the call has returned"))
            elif calls:
                self.seen["changes_with_calls"] = f"the same call gives another answer after {calls} more of them"
                failures.append(_failed("repeats", f"call {calls} on the same inputs gives another answer"))
            packed = not failures and self.side.call("prepacked", reference.inputs)
            self.properties["weights_prepacked"] = bool(packed or self.properties["weights_prepacked"])
        return [_check(reference, "output", measure) for measure in failures]

    def _instances(self, reference: Reference) -> list[Check]:
        """Several instances side by side, once."""
        said = self.properties["instances"] = self.side.call("instances", reference.inputs)
        if said.startswith("copy: "):
            try:
                copy.deepcopy(self.original.build(self.seed, self.original.init_inputs()))
            except Exception:  # the original cannot be copied either
                self.properties["instances"] = ""
        if said.startswith(("copy: ", "assign: ")):
            return []
        if said:
            self.seen["ignores_parameters"] = said
        return [_check(reference, "output", _failed("instances", said))] if said else []


def _surplus(reference: Reference, run: dict[str, Any]) -> list[tuple[str, Measure]]:
    """Gradients that the original does not give, and outputs that do not require one as the original's do."""
    surplus, missing = "a gradient, the original gives none", "no gradient, the original's output requires one"
    found = [(name, _failed("surplus", surplus)) for name in run["values"] if _new_gradient(name, reference)]
    for index, (own, wanted) in enumerate(zip(run["require"], reference.require, strict=False)):
        if own != wanted:
            name = "grad:output" if len(reference.require) == 1 else f"grad:output[{index}]"
            note = missing if wanted else "it requires a gradient, the original's is cut off from its graph"
            found.append((name, _failed("missing" if wanted else "surplus", note)))
    return found


def _other_drops(drops: list[list[Any]] | None, reference: Reference) -> str:
    """What dropouts would have done, beside the original's; "" where that is the same, or cannot be seen of both."""
    wanted = reference.drops
    if drops is None or wanted is None or drops == wanted:
        return ""

    def words(found: list[list[Any]]) -> str:
        return " and ".join(f"{p:g} of {elements} {kind}" for kind, p, elements in found) or "nothing"

    phase = "training" if reference.training else "evaluation"
    told = f"drops {words(drops)} in {phase}, the original {words(wanted)}"
    own = wanted and not drops and reference.training
    return f"{told} (a mask of random numbers of its own cannot be compared: use PyTorch's dropout)" if own else told


def _new_gradient(name: str, reference: Reference) -> bool:
    return name.startswith("grad:") and name not in reference.eager


def _parameters(kinds: dict[str, str]) -> list[str]:
    return [name for name, kind in kinds.items() if kind.endswith("parameter")]


def _other_kinds(reference: dict[str, str], own: dict[str, str]) -> str:
    """How parameters and buffers differ in what they are, in words."""
    return "; ".join(
        f"{name} is {own[name]}, expected {kind}"
        for name, kind in reference.items()
        if name in own and own[name] != kind and VOLATILE not in (kind, own[name])
    )


def _in_full(measure: Measure, sample: Sample) -> Measure:
    """A measure of sampled rows with the position that it has in the whole tensor.

    The sample is of the first dimension. What `compare` calls a row is an index of all dimensions but the last.
    """
    if measure.measure == "column" or not measure.position:
        return measure
    inner = math.prod(sample.shape[1:-1]) if measure.measure == "row" else 1
    first, rest = divmod(measure.position[0], inner)
    return replace(measure, position=[int(sample.rows[first]) * inner + rest, *measure.position[1:]])


def _mismatch(reference: dict[str, Tensor], own: dict[str, Tensor]) -> str:
    """How two state_dicts differ in names, shapes and dtypes, in words; empty if they do not."""
    parts = []
    if missing := [name for name in reference if name not in own]:
        parts.append(f"missing {', '.join(missing)}")
    if unknown := [name for name in own if name not in reference]:
        parts.append(f"unexpected {', '.join(unknown)}")
    for name, value in reference.items():
        if name in own and (own[name].shape != value.shape or own[name].dtype != value.dtype):
            got = f"{list(own[name].shape)} {own[name].dtype}"
            parts.append(f"{name} is {got}, expected {list(value.shape)} {value.dtype}".replace("torch.", ""))
    return "; ".join(parts)


def _same(a: Tensor, b: Tensor) -> bool:
    return same_inputs([a.cpu()], [b.cpu()])


def _failed(measure: str, note: str) -> Measure:
    return Measure(measure, None, None, None, math.inf, False, [], note)


def _check(reference: Reference, quantity: str, measure: Measure) -> Check:
    fields = {**measure.as_dict(), "ratio": measure.ratio}
    return {"seed": reference.seed, "case": reference.case.title, "phase": reference.phase, "quantity": quantity,
            **fields}  # fmt: skip
