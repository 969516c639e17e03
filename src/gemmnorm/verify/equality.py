"""Compare a candidate with the original: the measures, and the limits that every measure is held to.

Three values of one tensor meet here: the candidate's, *eager's* (the original in its own precision) and the *golden*
one (the original in float64). Errors are distances from the golden. With `spread` the standard deviation of
what one rounding error per operation does to each element (`gemmnorm.verify.rounding`), u the unit roundoff of the
result's dtype::

    ‖candidate − golden‖  ≤  max( EAGER·‖eager − golden‖,  SLACK·‖spread‖ + STORE·u·‖golden‖ ) + FLIP·‖flips‖

for the whole tensor, for each row, for each column and for each element, with a SLACK of its own each.
docs/verification.md says where the constants come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "EAGER",
    "FLIP",
    "NO_DIGITS",
    "PERIOD",
    "SLACK",
    "STORE",
    "Limits",
    "Measure",
    "compare",
    "pool",
    "without_digits",
]

EAGER = 1.25  # as good as eager, with room for another order of the same operations
# How many spreads an error may measure. One element lies in the tails of its own error and of its estimated spread;
# the errors of a row or a column may all come from one rounding (of an outlier, of a mean); a whole tensor's do not.
SLACK = {"global": 3.0, "row": 6.0, "column": 6.0, "worst": 9.0}
NO_DIGITS = 0.1  # a spread of so much of the value: its effect is not linear in the roundings, and its tails are heavy
STORE = 4.0  # the rounding of the result itself, and of what it was made from, in ulps
FLIP = 2.0  # some of the elements near a kink may weigh more than the subsets that were flipped
PERIOD = 8  # features and rows of one role repeat with this period (gemmnorm.verify.families)


@dataclass(frozen=True)
class Measure:
    """One comparison. Errors are relative to `scale`: the golden norm, or the norm before cancellation if larger.

    error, eager_error, limit  are None where a value is not finite; `position` is the worst element, row or column
    ratio                      error over limit, the number that calibration looks at (inf for a wrong NaN)
    """

    measure: str
    error: float | None
    eager_error: float | None
    limit: float | None
    ratio: float
    ok: bool
    position: list[int]
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["ratio"] = self.ratio if math.isfinite(self.ratio) else None
        return fields


@dataclass(frozen=True)
class Limits:
    """What rounding may do to one tensor, in the tensor's own units.

    spread  standard deviation per element of one rounding error per operation (float64, the tensor's shape)
    flips   largest change of each element when elements within reach of a kink lie on the other side, or None; of
            integers and booleans, which of them a rounding error changes
    """

    spread: Tensor | None = None
    flips: Tensor | None = None


def pool(squares: Tensor) -> Tensor:
    """The largest of each element's mean square and those of its role: of the whole role, its row and its column in it.

    A few draws say little about one element. Elements whose indices agree modulo `PERIOD` in the last two
    dimensions play the same role in every family of inputs, so their mean square stands in where it is larger. Single
    rows and columns may stand out (an outlier among the inputs); there the mean square of that row or column does.
    """
    if squares.numel() <= 1:
        return squares
    matrix = squares.reshape(-1, squares.shape[-1])
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % PERIOD, 0, -rows % PERIOD))
    roles = padded.reshape(-1, PERIOD, padded.shape[1] // PERIOD, PERIOD)  # [rows, role, columns, role]
    residues = torch.arange(PERIOD, device=squares.device)
    of_row, of_column = ((n - residues + PERIOD - 1).div(PERIOD, rounding_mode="floor").clamp(1) for n in matrix.shape)
    of_row = of_row[:, None, None]  # how many rows and columns have each role
    in_row, in_column = roles.sum(2, keepdim=True) / of_column, roles.sum(0, keepdim=True) / of_row
    in_role = in_row.sum(0, keepdim=True) / of_row
    for mean in (in_row, in_column, in_role):
        roles = torch.maximum(roles, mean)
    return roles.reshape(padded.shape)[:rows, :columns].reshape(squares.shape)


def compare(
    candidate: Tensor, eager: Tensor, golden: Tensor, limits: Limits | None = None, *, unit: float | None = None
) -> list[Measure]:
    """Measure a candidate's tensor against eager and golden: one entry per measure, each with its worst position.

    A shape or dtype that differs from eager's gives a single failed measure of that name. Tensors of integers and
    booleans must agree exactly, but where rounding errors decide them. NaN and infinities: where golden and eager are
    finite the candidate must be; where the golden is not finite the candidate must not be either, unless eager is;
    where only eager overflowed anything goes.
    """
    if tuple(candidate.shape) != tuple(eager.shape):
        return [_failure("shape", f"shape {list(candidate.shape)}, expected {list(eager.shape)}")]
    if candidate.dtype != eager.dtype:
        return [_failure("dtype", f"dtype {candidate.dtype}, expected {eager.dtype}".replace("torch.", ""))]
    if not eager.is_floating_point():
        return [_exact(candidate, eager, limits.flips if limits else None)]
    if candidate.numel() == 0:
        return [Measure("worst", 0.0, 0.0, 0.0, 0.0, True, [])]
    unit = torch.finfo(eager.dtype).eps / 2 if unit is None else unit
    tiny = torch.finfo(eager.dtype).smallest_normal
    golden = golden.double()
    judged, wrong = _finite(candidate, eager, golden)
    if wrong is not None:
        return [wrong]
    zero = golden.new_zeros(())
    fields = {
        "error": torch.where(judged, candidate.double() - golden, zero),
        "eager": torch.where(judged, eager.double() - golden, zero),
        "golden": torch.where(judged, golden, zero),
    }
    limits = limits or Limits()
    for name, value in (("spread", limits.spread), ("flips", limits.flips)):
        if value is not None:
            fields[name] = torch.where(judged, value, zero).nan_to_num(0.0)
        if name == "spread" and value is not None and fields[name].norm() > NO_DIGITS * fields["golden"].norm():
            fields[name] = 2 * fields[name]
    shape = list(golden.shape)
    columns = shape[-1] if shape else 1
    matrix = {name: value.reshape(-1, columns) for name, value in fields.items()}
    measures = []
    if golden.ndim >= 2:
        for measure, dims in (("global", (0, 1)), ("row", (1,)), ("column", (0,))):
            count = math.prod(matrix["error"].shape[d] for d in dims)
            norms = {name: torch.linalg.vector_norm(value, dim=dims) for name, value in matrix.items()}
            measures.append(_judge(measure, norms, count, unit, tiny, shape))
    elif golden.ndim == 1 and golden.numel() > 1:
        norms = {name: torch.linalg.vector_norm(value) for name, value in fields.items()}
        measures.append(_judge("global", norms, golden.numel(), unit, tiny, shape))
    if "spread" in fields and golden.ndim >= 2:
        # One draw may leave an element without error by luck: the quieter of its row and its column stands in.
        across = matrix["spread"].square()
        quiet = torch.minimum(across.mean(1, keepdim=True), across.mean(0, keepdim=True)).sqrt()
        matrix["spread"] = torch.maximum(matrix["spread"], quiet)
    measures.append(_judge("worst", {name: value.abs() for name, value in matrix.items()}, 1, unit, tiny, shape))
    return measures


def without_digits(measures: Sequence[Measure]) -> list[Measure]:
    """The measures of a tensor of which nobody's arithmetic has a digit: errors are told and not judged."""
    note = "rounding errors of any size change it altogether"
    return [replace(m, ratio=0.0, ok=True, note=note) if m.measure in SLACK and not m.ok else m for m in measures]


def _judge(measure: str, norms: dict[str, Tensor], count: int, unit: float, tiny: float, shape: list[int]) -> Measure:
    error, eager, golden = norms["error"], norms["eager"], norms["golden"]
    spread = norms.get("spread", torch.zeros_like(error))
    floor = spread * SLACK[measure] + golden * (STORE * unit) + 4 * tiny * math.sqrt(count)
    limit = torch.maximum(EAGER * eager, floor)
    if "flips" in norms:
        limit = limit + FLIP * norms["flips"]
    ratios = torch.where(error == 0, torch.zeros_like(error), error / limit)
    index = int(ratios.argmax()) if ratios.ndim else 0
    ratio = float(ratios.flatten()[index])
    at = {name: float(value.flatten()[index]) for name, value in norms.items()}
    scale = max(at["golden"], at.get("spread", 0.0) / unit, tiny)
    if measure == "worst":
        position = [int(i) for i in torch.unravel_index(torch.tensor(index), shape or [1])] if shape else []
    else:
        position = [index] if measure in ("row", "column") else []
    return Measure(
        measure,
        at["error"] / scale,
        at["eager"] / scale,
        float(limit.flatten()[index]) / scale,
        ratio,
        ratio <= 1.0,
        position,
    )


def _finite(candidate: Tensor, eager: Tensor, golden: Tensor) -> tuple[Tensor, Measure | None]:
    """The elements to be measured, and a failed measure if NaN or infinity stands where it must not (or is missing)."""
    golden_finite, eager_finite, candidate_finite = golden.isfinite(), eager.isfinite(), candidate.isfinite()
    judged = golden_finite & eager_finite
    invented = judged & ~candidate_finite
    swallowed = ~golden_finite & ~eager_finite & candidate_finite
    for mask, text in ((invented, "{}, where the original is finite"), (swallowed, "{}, where the original is {}")):
        if bool(mask.any()):
            where = tuple(int(i) for i in mask.nonzero()[0])
            note = text.format(float(candidate[where]), float(eager[where])) + f"; {int(mask.sum())} such elements"
            return judged, Measure("worst", None, None, None, math.inf, False, list(where), note)
    return judged, None


def _exact(candidate: Tensor, eager: Tensor, ties: Tensor | None) -> Measure:
    """`ties`: where a rounding error makes another of them."""
    different = candidate != eager
    if ties is not None:
        different &= ~ties.to(different.device)
    if not bool(different.any()):
        return Measure("exact", 0.0, 0.0, 0.0, 0.0, True, [])
    where = tuple(int(i) for i in different.nonzero()[0])
    note = f"{candidate[where].item()}, expected {eager[where].item()}"
    return Measure("exact", float(different.double().mean()), 0.0, 0.0, math.inf, False, list(where), note)


def _failure(measure: str, note: str) -> Measure:
    return Measure(measure, None, None, None, math.inf, False, [], note)
