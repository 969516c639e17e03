"""What is wrong with a candidate, by name: from the first case that failed, and a few probes of the candidate.

The comparison decides whether a file is equal; nothing here does. A name tells the reader where to look.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .candidate import Candidate, Check
from .golden import Reference
from .rounding import Units, unit_roundoff
from .trial import distance

__all__ = ["FAULTS", "Fault", "name_fault"]

# Class in the JSON → what it means; in the order in which they are told where several apply.
FAULTS: dict[str, str] = {
    "tampering": "replaces or resets what computes, measures, compares or draws",
    "out_of_memory": "takes more memory than there is",
    "raises": "raises where the original computes",
    "crashes": "ends its process",
    "hangs": "gives no answer in time",
    "parameters": "has other names, shapes or dtypes in its state_dict",
    "late_work": "goes on computing after the call has returned",
    "lazy_output": "returns an object that computes when it is looked at",
    "inputs_changed": "writes into its inputs",
    "shared_outputs": "returns the same memory twice",
    "changes_with_calls": "computes something else after a number of calls",
    "refusal": "accepts what the original refuses",
    "dropout": "has another dropout",
    "not_finite": "treats NaN and infinity otherwise",
    "uninitialised_memory": "returns memory that it did not write",
    "constant_output": "returns what does not depend on its inputs",
    "ignores_parameters": "does not follow all parameters and buffers, or follows them late",
    "replayed_output": "gives an earlier answer again",
    "partly_computed": "computes a part of the output only",
    "lower_precision": "computes in a precision below the original's",
    "missing_gradient": "returns fewer gradients",
    "wrong_output": "computes another function",
    "wrong_state": "updates running statistics or counters otherwise",
    "wrong_gradient": "has another derivative",
}

Fault = dict[str, str]  # class, sentence
_PROBED = 24  # parameters, buffers and inputs that are varied one by one
_NOISE = 0.6  # of an error's variance must be left beside the value itself for it to count as rounding
_KEPT = 0.02  # of an output's norm: apart by less, it is the same but for roundings
_INSIDE = 0.9  # of the elements of a block are wrong where a block was not computed


def name_fault(candidate: Candidate, reference: Reference, checks: Sequence[Check]) -> Fault:
    """The fault that a failed case shows. Runs the candidate a few times more; never raises for what it does."""
    known = {**_called(checks), **candidate.seen}
    kept = set(known) == {"replayed_output"} and reference.case.same_inputs  # or packed weights
    if not known or kept:
        with contextlib.suppress(Exception):  # a candidate that cannot be probed has failed already
            known.update(_probed(candidate, reference, [c for c in checks if not c["ok"]]))
    kind = next((k for k in FAULTS if k in known), None) or _by_quantity(checks)
    return {"class": kind, "sentence": known.get(kind, f"it {FAULTS[kind]}")}


def _called(checks: Sequence[Check]) -> Fault:
    """What a call that raised, or should have, tells."""
    notes = [c["note"] for c in checks if c["quantity"] == "call" and not c["ok"]]
    if not notes:
        return {}
    if notes[0].startswith("accepts"):
        return {"refusal": f"it {notes[0]}"}
    memory = any(word in notes[0] for word in ("MemoryError", "OutOfMemory", "not enough memory", "allocate memory"))
    return {"out_of_memory" if memory else "raises": f"it {notes[0]}"}


def _by_quantity(checks: Sequence[Check]) -> str:
    failed = [c for c in checks if not c["ok"]]
    if any(c["quantity"].startswith("output") for c in failed):
        return "wrong_output"
    if any(not c["quantity"].startswith("grad:") for c in failed):
        return "wrong_state"
    return "missing_gradient" if any(c["measure"] == "missing" for c in failed) else "wrong_gradient"


def _probed(candidate: Candidate, reference: Reference, failed: Sequence[Check]) -> Iterator[tuple[str, str]]:
    """Faults that a few further runs show, the plainest first."""
    side, inputs = candidate.side, reference.inputs
    names = list(dict.fromkeys(c["quantity"].removesuffix(" without autograd") for c in failed))
    wrong = [n for n in names if n in candidate.values and n in reference.golden]
    outputs = [n for n in wrong if n.startswith("output")]
    if outputs and reference.case.inputs == "not finite":
        yield "not_finite", "it treats NaN and infinity otherwise than the original"
        return
    if outputs and side.call("unordered", inputs):
        yield "late_work", "it does not wait for the work that the current stream has before it"
        return
    if outputs and (unwritten := side.call("unwritten", inputs, reference.training)):
        yield "uninitialised_memory", f"{unwritten} elements of its output hold what their memory held before"
        return
    given = [f"input{i}" for i, v in enumerate(inputs) if isinstance(v, Tensor) and v.is_floating_point()]
    state = [name for name, v in reference.state.items() if v.is_floating_point()][:_PROBED]
    still = set(side.call("insensitive", inputs, given + state)) - reference.insensitive(given + state)
    if "replayed_output" in candidate.seen and still >= set(state):
        return
    if given and still >= set(given):
        yield "constant_output", "its output does not depend on its inputs"
    elif still:
        ignored = ", ".join(name for name in given + state if name in still)
        yield "ignores_parameters", f"its output does not follow {ignored}"
    # Of what follows only numbers tell, not outputs of another kind or in another container.
    measured = {c["quantity"].removesuffix(" without autograd") for c in failed if c["error"] is not None}
    wrong, outputs = ([name for name in found if name in measured] for found in (wrong, outputs))
    if outputs and (p := _unscaled(candidate, reference, outputs)):
        yield "dropout", f"it keeps elements without the factor 1/(1 - p) of its dropout, p = {p:g}"
        return
    for name in outputs:
        if where := _block(candidate.values[name], reference.eager[name], reference.golden[name]):
            yield "partly_computed", f"of its output only {where} is wrong, the rest is right"
    if bits := _bits(candidate.values, reference, wrong):
        which = "TF32 or float16" if bits > 9.5 else "bfloat16"
        yield "lower_precision", f"its errors are those of operands rounded to {bits:.0f} bits ({which})"


def _unscaled(candidate: Candidate, reference: Reference, names: Sequence[str]) -> float:
    """The probability of a dropout without whose factor the outputs are right; 0 where there is none."""
    for _, p, _ in reference.drops or []:
        golden = [(1 - p) * reference.golden[n] for n in names]
        if p < 1 and all(
            distance(reference.sampled(candidate.values)[n], g) < _KEPT for n, g in zip(names, golden, strict=True)
        ):
            return float(p)
    return 0.0


def _block(value: Tensor, eager: Tensor, golden: Tensor) -> str:
    """Where the wrong elements lie if they fill a block and nothing else is wrong; else empty."""
    if golden.ndim < 2 or value.shape != golden.shape:
        return ""
    value, eager, golden = (t.double().reshape(-1, t.shape[-1]) for t in (value.to(golden.device), eager, golden))
    usual = (eager - golden).abs().mean() + 1e-3 * golden.abs().mean()
    bad = (value - golden).abs() > 8 * usual
    if not bool(bad.any()):
        return ""
    rows, columns = (bad.any(d).nonzero().flatten() for d in (1, 0))
    top, bottom, left, right = int(rows[0]), int(rows[-1]), int(columns[0]), int(columns[-1])
    block = bad[top : bottom + 1, left : right + 1]
    if block.double().mean() < _INSIDE or not max(16, 0.01 * bad.numel()) < block.numel() < 0.9 * bad.numel():
        return ""
    return f"[{top}:{bottom + 1}, {left}:{right + 1}]"


def _bits(values: dict[str, Tensor], reference: Reference, names: Sequence[str]) -> float:
    """How many bits operands were rounded to, if that explains every error and they look like rounding; else 0."""
    judged = [n for n in names if reference.golden[n].ndim > 1 and n not in reference.samples]
    if not judged or any(reference.eager[n].dtype != torch.float32 for n in judged):
        return 0.0
    own = unit_roundoff(torch.float32)
    for unit in (2.0**-11, 2.0**-8):
        spreads = reference.spreads_of(Units(own, own, operand=unit))
        ratios = []
        for name in judged:
            error = values[name].to(reference.golden[name].device).double() - reference.golden[name]
            ratios.append(float(error.norm() / spreads[name].norm().clamp(min=1e-300)))
            if not math.isfinite(ratios[-1]) or _noise(error, reference.golden[name]) < _NOISE:
                return 0.0
        if max(ratios) <= 3.0:
            return -math.log2(unit * max(max(ratios), 2.0**-8))
    return 0.0


def _noise(error: Tensor, golden: Tensor) -> float:
    """The part of an error's variance that no multiple of the value and no constant, column by column, explains."""
    error, golden = (t.reshape(-1, t.shape[-1]) for t in (error, golden))
    if error.shape[0] < 8:
        return 1.0
    left = error - error.mean(0)
    centred = golden - golden.mean(0)
    slope = (left * centred).sum(0) / centred.square().sum(0).clamp(min=1e-300)
    left = left - slope * centred
    return float(left.square().sum() / error.square().sum().clamp(min=1e-300))
