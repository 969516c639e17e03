"""Judging a candidate by references, in this process, and saying the result in one sentence."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..userfiles import BareProcessError, ModelFile, ModelFileError, how_it_died, progress
from .candidate import Candidate, Check, Local, Side
from .faults import Fault, name_fault
from .golden import Reference
from .reported import property_of

__all__ = ["judge"]

_TOLD_BY_NUMBERS = ("wrong_output", "wrong_state", "wrong_gradient", "missing_gradient", "raises", "refusal")
_TOLD_ALONE = ("parameters", "tampering")


def judge(
    candidate_file: ModelFile | Side,
    original: ModelFile,
    cases: Iterable[Reference],
    *,
    total: int = 0,
    device: str = "cpu",
    to_the_end: bool = False,
) -> dict[str, Any]:
    """Judge a candidate by references; the part of the dict that depends on the candidate.

    A file runs in this process; a Side where it is. Unless `to_the_end`, the first case with a failure is the last.
    """
    side = Local(candidate_file, device) if isinstance(candidate_file, ModelFile) else candidate_file
    found = _Found(side)
    try:
        found.judge(original, cases, total, to_the_end)
    except ModelFileError as error:
        if found.models_turn:
            raise
        return _broken(found, "candidate_raises", "raises", str(error))
    except BareProcessError as error:
        how = how_it_died(error.code)
        reason = f"{side.name}: ModelNew killed its process: it {how}"
        return _broken(found, "candidate_crashes", "crashes", reason)
    return found.result()


@dataclass
class _Found:
    """What is known so far. `models_turn` while it is the original that runs."""

    side: Side
    checks: list[Check] = field(default_factory=list)
    candidate: Candidate | None = None
    trouble: str = ""
    fault: Fault | None = None
    models_turn: bool = True

    def judge(self, original: ModelFile, cases: Iterable[Reference], total: int, to_the_end: bool) -> None:
        begin = time.monotonic()
        for done, reference in enumerate(cases):
            where = {"seed": reference.seed, "case": reference.case.name, "phase": reference.phase}
            if done:
                where["left_s"] = (time.monotonic() - begin) / done * (total - done)
            progress({"stage": "candidate", "done": done, "total": total, **where})
            self.models_turn = False
            if property_of(reference):  # its process may end there, and that is no fault
                self._look_for_patches()
            if not self._next(original, reference) and not to_the_end:
                break
            if self.candidate is None or self.candidate.mismatch or "CUDA error" in self.trouble:
                break  # where the context is lost, nothing that follows would be the model's fault
            progress({"stage": "model", "done": done + 1, "total": total, **where})
            self.models_turn = True
        if self.candidate is None:
            raise ValueError("judge: no references given")
        self._look_for_patches()

    def _look_for_patches(self) -> None:
        if self.candidate is not None and self.candidate.gone:
            return
        if patched := self.side.call("patched"):
            self.fault = {"class": "tampering", "sentence": f"it replaces {', '.join(patched)}"}

    def _next(self, original: ModelFile, reference: Reference) -> bool:
        """One case in one phase; whether nothing failed."""
        if self.candidate is None or self.candidate.seed != reference.seed:
            earlier = self.candidate
            self.candidate = Candidate(self.side, original, reference.seed)
            self.candidate.continue_from(earlier)
            if self.candidate.mismatch:
                sentence = f"parameters and buffers differ: {self.candidate.mismatch}"
                self.fault = {"class": "parameters", "sentence": sentence}
                return False
        found = self.candidate.check(reference)
        self.checks += found
        self.trouble = self.trouble or self.candidate.trouble
        well = all(check["ok"] for check in found)
        if not well and self.fault is None:
            self.fault = name_fault(self.candidate, reference, found)
        return well

    def result(self) -> dict[str, Any]:
        """The dict's part."""
        assert self.candidate is not None
        failed = [check for check in self.checks if not check["ok"]]
        result = _not_equal("", self.candidate, self.checks)
        if not failed and self.fault is None:
            praise = _praise(self.checks, self.candidate.properties["output_error"])
            return {**result, "equal": True, "verdict": "equal", "exit_code": 0, "reason": praise}
        assert self.fault is not None
        told = [] if self.fault["class"] in _TOLD_BY_NUMBERS and failed else [self.fault["sentence"]]
        told += [_sentence(_first_cause(failed))] if failed and self.fault["class"] not in _TOLD_ALONE else []
        result.update(reason=f"{self.side.name}: {'; '.join(told)}", fault=self.fault)
        if self.trouble:
            result.update(verdict="candidate_raises", detail=self.trouble)
        return result


def _broken(found: _Found, verdict: str, kind: str, reason: str) -> dict[str, Any]:
    """Where the candidate gave no answer at all."""
    memory = "MemoryError" in reason or "allocate memory" in reason
    fault = {"class": "out_of_memory" if memory else kind, "sentence": reason.partition(": ")[2]}
    known = _not_equal(reason, found.candidate, found.checks) if found.candidate else {"equal": False, "exit_code": 1}
    return {**known, "verdict": verdict, "reason": reason, "fault": fault}


def _not_equal(reason: str, candidate: Candidate, checks: list[Check]) -> dict[str, Any]:
    return {
        "equal": False,
        "verdict": "not_equal",
        "exit_code": 1,
        "reason": reason,
        "fault": None,
        "checks": [_plain(check) for check in checks],
        "summary": [_plain(check) for check in _summary(checks)],
        "failures": sum(not check["ok"] for check in checks),
        "properties": candidate.properties,
        "warnings": candidate.warnings(),
    }


def _summary(checks: list[Check]) -> list[Check]:
    """The worst check of each (phase, quantity), in order of first appearance."""
    worst: dict[tuple[str, str], Check] = {}
    for check in checks:
        key = (check["phase"], check["quantity"])
        if key not in worst or check["ratio"] > worst[key]["ratio"]:
            worst[key] = check
    return list(worst.values())


def _first_cause(failed: list[Check]) -> Check:
    """The failure to tell first: one without autograd's help if there is any, the most extreme among those."""
    return max(failed, key=lambda c: (not c["quantity"].startswith("grad:"), c["ratio"]))


def _sentence(check: Check) -> str:
    where = f"{check['quantity']} in {check['phase']} mode, case “{check['case']}”, seed {check['seed']}"
    if check["error"] is None or not math.isfinite(check["ratio"]):
        return f"{where}: {check['note'] or 'not finite'}"
    at = f" at {check['position']}" if check["position"] else ""
    return (
        f"{where}: {check['measure']} error {check['error']:.2e}{at}, allowed {check['limit']:.2e} "
        f"(the original's own error {check['eager_error']:.2e})"
    )


def _praise(checks: list[Check], errors: dict[str, dict[str, float] | None]) -> str:
    worst = max(checks, key=lambda c: c["ratio"])
    closest = f"the closest call stands at {worst['ratio']:.2f} of its limit ({_sentence(worst)})"
    beside = [
        f"{found['error']:.1e} in {phase} mode, the original's {found['eager_error']:.1e}"
        for phase, found in errors.items()
        if found is not None and found["error"] is not None and found["eager_error"] is not None
    ]
    ending = f"; its output's error on plain data: {', '.join(beside)}" if beside else ""
    return f"equal in {len(checks)} comparisons; {closest}{ending}"


def _plain(check: Check) -> dict[str, Any]:
    return {**check, "ratio": check["ratio"] if math.isfinite(check["ratio"]) else None}
