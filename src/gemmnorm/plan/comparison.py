"""Every candidate of a problem in words: its predicted time and the terms of it, or the reason why it cannot serve."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from . import tables
from .candidates import candidates
from .choice import ranking, why_no_kernels
from .gradient import refusal_to_recompute
from .problem import DTYPE_BYTES
from .steps import GROUP_ROWS, Plan

LEAST = 0.05  # µs of a term that is worth its words


def kept(plan: Plan) -> list[str]:
    """A line of text on what lies between forward and backward; none where nothing is kept, or by plain ops."""
    problem = plan.problem
    if not problem.save or plan.strategy == "reference":
        return []
    line = f"kept for the backward, beside x and the weight: {kept_bytes(plan):,} bytes"
    if refusal_to_recompute(problem) is None:
        other = replace(plan, problem=replace(problem, keep_product=not problem.keep_product))
        line += f" ({kept_bytes(other):,} with keep_product={other.problem.keep_product})"
    return [line]


def kept_bytes(plan: Plan) -> int:
    """Bytes of the product, where it is kept, and of the statistics."""
    p = plan.problem
    rows = 2 + (-(-p.batch // GROUP_ROWS) if plan.keeps_offsets else 0)
    return p.out_features * (p.batch * DTYPE_BYTES[p.dtype] * p.keep_product + rows * DTYPE_BYTES["float32"])


def comparison(plan: Plan) -> list[str]:
    """Lines of text: the candidates beside `plan`, the best first, then those that cannot serve, by reason.

    A problem in the table of measured bests begins with that candidate, whatever is predicted (docs/planner.md).
    """
    problem, phase = plan.problem, plan.phase
    if why_no_kernels(problem) or phase == "prepare":
        return []
    strategy = plan.strategy if phase == "backward" else None
    ranked = [(us, found) for us, found in ranking(problem, phase, strategy) if found.strategy != "cublas_bn"]
    known = tables.measured_best(problem, phase)
    lines = ["candidates, predicted µs:"]
    for us, found in ranked:
        measured = " (measured to be the best)" if known in (found.name, found.choices) else ""
        terms = ", ".join(f"{name} {value:.1f}" for name, value in found.terms().items() if value >= LEAST)
        lines.append(f"  {us:8.1f}  {found.choices if phase == 'backward' else found.name}{measured}: {terms}")
    refused = defaultdict(list)
    for candidate in candidates(problem, phase):
        if candidate.refusal is not None:
            refused[candidate.refusal].append(candidate.name)
    lines += [f"  cannot serve: {', '.join(names)}: {reason}" for reason, names in refused.items()]
    return lines
