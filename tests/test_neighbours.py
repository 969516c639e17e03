"""Neighbouring blocks that load each tile of x together, a half each, in every schedule that the planner gives them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ways
from emulator import COMPILER
from test_emulated import check

from gemmnorm import plan

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no g++"), pytest.mark.usefixtures("no_small_panel")]


@pytest.mark.parametrize(
    ("schedule", "epilogue", "one_tile", "batch", "features"),
    [
        ("evaluate", "Evaluate", (256, 128), 700, 504),
        # Of the last tile each loads eight rows; the number of panels is odd, and the last has no feature.
        ("evaluate", "Evaluate", (128, 128), 270, 264),
        ("statistics", "Statistics", (128, 128), 400, 520),
        ("statistics", "Statistics", (256, 128), 270, 264),
        ("statistics", "Statistics", (192, 128), 270, 264),
        ("two-pass", "Normalize", (256, 128), 270, 264),
        ("two-pass", "Normalize", (128, 128), 1030, 136),
        ("gram", None, (256, 128), 270, 264),
        ("co-resident", "CoResident", (256, 128), 270, 264),
        ("co-resident", "CoResident", (128, 128), 300, 200),
        ("deferred", "Deferred", (256, 128), 270, 264),
        ("deferred", "Deferred", (192, 128), 270, 264),
        ("deferred", "Deferred", (128, 128), 400, 520),
    ],
    indirect=["one_tile"],
)
def test_neighbours_load_x_together(schedule, epilogue, one_tile, batch, features, forced):
    forced(ways.sharing_x(schedule))
    chip = plan.chip_for(90, 10 if schedule == "co-resident" else 4)
    strategy = "gemm_stats_apply" if schedule in ("statistics", "two-pass", "gram") else "one_kernel"
    training = schedule != "evaluate"
    for name, inner in (("bf16", 200), ("tf32", 100))[: 1 if schedule == "gram" else 2]:
        dtypes = ["bfloat16" if name == "bf16" else "float32"] * 4
        problem = plan.Problem(batch, inner, features, *dtypes, "native" if name == "bf16" else "tf32", chip=chip)
        found = plan.make_plan(replace(problem, training=training, save=training), strategy)
        assert {launch.cluster for launch in found.launches if launch.function == "fused_gemm"} == {2}
        check(chip, strategy, name, batch, inner, features, training, epilogue)


def test_only_where_rows_of_x_are_no_whole_sectors():
    for inner, shares in ((1000, True), (1008, False), (1024, False)):
        problem = plan.Problem(8192, inner, 2048, *["bfloat16"] * 4, "native", chip=plan.chip_for(90))
        assert any(ways.sharing_x("co-resident")(c) for _, c in plan.ranking(problem)) == shares
    assert ways.sharing_x("co-resident")(plan.ranking(replace(problem, in_features=1000))[0][1])  # and it is taken
