"""What the planner chooses, held against the H200 that it is fitted to, and an H100 (benchmarks/fit_planner.py)."""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("numpy")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import fit_planner

from gemmnorm import plan
from gemmnorm.plan import cost, tables
from gemmnorm.plan.candidates import candidates

# Kind → bounds of the mean, the 90% and the 99% quantile of the chosen candidate's measured time over the best one's.
BOUNDS = {
    "bf16": (1.03, 1.09, 1.40),
    "fp16": (1.02, 1.06, 1.06),
    "tf32": (1.035, 1.10, 1.45),
    "fp32": (1.035, 1.11, 1.60),
    "amp": (1.05, 1.16, 1.40),
}
# Of each problem by name; a forward that keeps the product takes the line of one that does not.
HELD, SAVING = 1.03, 1.08


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_choices_are_close_to_the_measured_best(gpu: str) -> None:
    regrets = defaultdict(list)
    for row in fit_planner.rows(fit_planner.RESULTS.with_name(f"candidates-{gpu}.json.gz")):
        name = fit_planner.chosen(row)
        assert name is not None, row.problem
        regret = row.us[name] / row.best
        regrets[row.kind].append(regret)
        assert gpu == "h100" or not row.held or regret <= (SAVING if row.problem.save else HELD), (row.problem, name)
    for kind, found in regrets.items():
        ordered, (mean, most, nearly_all) = sorted(found), BOUNDS[kind]
        assert math.exp(sum(map(math.log, ordered)) / len(ordered)) <= mean, kind
        assert ordered[int(0.9 * (len(ordered) - 1))] <= most, kind
        assert ordered[int(0.99 * (len(ordered) - 1))] <= nearly_all, kind


H100 = fit_planner.RESULTS.with_name("candidates-h100.json.gz")


def shipped() -> dict[str, cost.Constants]:
    return {name: cost.Constants(**values) for name, values in tables.constants().items()}


def test_what_is_fitted_to_another_gpu_is_judged_with_its_bandwidth() -> None:
    row = fit_planner.rows(H100, newest=True)[0]
    times = fit_planner.predicted(row, shipped())
    expected = {c.name: c.cost() for c in candidates(row.problem, row.phase) if c.name in times}
    assert len(times) > 5 and times == pytest.approx(expected)


def test_some_constants_are_fitted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the Gram kernel come back from elsewhere, and no other changes."""
    known = shipped()
    moved = {name: asdict(c) | {"gram": 3 * c.gram} for name, c in known.items()}
    monkeypatch.setattr(tables, "constants", lambda: moved)
    found = fit_planner.fitted_alone(fit_planner.rows(H100, kept=False, newest=True), ["gram"])
    assert found["half"].gram == pytest.approx(known["half"].gram, rel=0.2) and found["cast"].gram == found["half"].gram
    for name, constants in found.items():
        assert asdict(constants) | {"gram": 0} == asdict(known[name]) | {"gram": 0}


@pytest.mark.parametrize("forward", ["one_kernel", "cublas_folded_bn"])
def test_every_line_of_the_table_of_bests_names_a_candidate_and_is_taken(forward: str) -> None:
    with tables.BEST.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) > 50 and tuple(lines[0]) == tables.COLUMNS
    for line in lines:
        dtype, out = line["dtype"], line["out_dtype"]
        sizes = (int(line[name]) for name in ("batch", "in_features", "out_features"))
        problem = plan.Problem(
            *sizes, dtype, out, out, out, line["arithmetic"],
            training=line["training"] == "1", save=line["save"] == "1",
            cast=tuple(filter(None, line["cast"].split("+"))), chip=plan.chip_for(90),
        )  # fmt: skip
        phase, of_own = line["phase"], line["candidate"].endswith("split products")
        if phase == "backward" and not (of_own and forward not in plan.OWN_GEMM):
            assert plan.ranking(problem, phase, forward)[0][1].listed == line["candidate"], line
        elif phase == "forward":
            assert plan.ranking(problem)[0][1].listed == line["candidate"], line
