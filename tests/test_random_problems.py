"""`gemmnorm bench --random`: the draw, the classes and the report."""

from __future__ import annotations

import pytest

from gemmnorm.bench import random_problems
from gemmnorm.bench.random_problems import FLOPS, STEPS
from gemmnorm.cli import main, report


def test_a_seed_draws_the_same_problems_and_more_of_them_only_add() -> None:
    few, many = random_problems.draw(3, 5), random_problems.draw(3, 200)
    assert many[:5] == few and random_problems.draw(4, 5) != few
    for case in many:
        sizes = case.batch, case.in_features, case.out_features
        assert all(size % STEPS[0] == 0 and size >= STEPS[0] for size in sizes)
        assert FLOPS[0] <= 2 * sizes[0] * sizes[1] * sizes[2] <= FLOPS[1]
    whole = sum(all(n % 128 == 0 for n in (c.batch, c.in_features, c.out_features)) for c in many)
    assert 60 < whole < 140
    for part in ("bias", "scale", "activation"):
        assert 60 < sum(bool(getattr(case, part)) for case in many) < 140


def test_every_third_problem_is_measured_with_its_backward() -> None:
    cells = random_problems.cells([0, 1], 4, ["bf16", "amp"])
    assert len(cells) == 2 * 2 * (2 * 4 + 2)
    assert {cell.label for cell in cells} == {"bf16", "amp"}
    assert all(cell.phase == "eval_fwd" for cell in random_problems.cells([0], 2, None, ["eval_fwd"]))


def row(batch: int, wide: int, gemm: float, ms: float, eager: float, compiled: float | None) -> dict[str, object]:
    return {
        "case": "random-0-0", "batch": batch, "in_features": wide, "out_features": 512, "precision": "bf16",
        "autocast": False, "phase": "train_fwd", "strategy": "one_kernel", "ms": ms, "gemm_ms": gemm,
        "eager_ms": eager, "compile_ms": compiled, "predicted_ms": 1.2 * ms, "flops": 2.0 * batch * wide * 512,
        "bytes": 2.0 * (batch * wide + 512 * wide + batch * 512),
    }  # fmt: skip


CEILINGS = {"copy_gb_per_s": 4000.0, "tflops": {"bf16": 800.0}}


def test_classes_means_and_what_is_slower() -> None:
    rows = [
        row(4096, 4096, 0.2, 0.4, 0.8, None),
        row(4096, 4100, 0.2, 0.1, 0.2, 0.4),
        row(65536, 64, 0.03, 0.06, 0.12, 0.05),
        row(264, 512, 0.01, 0.01, 0.02, 0.03),
    ]
    found = {group.name: group for group in random_problems.classes(rows, CEILINGS)}
    every = found["all"]
    assert every.mean(random_problems.r) == pytest.approx((2 * 0.5 * 2 * 1) ** 0.25)
    assert every.worst(random_problems.s, min) == pytest.approx(2) and every.slower == 1 and every.predicted == 1.0
    assert every.mean(random_problems.c) == pytest.approx((4 * 5 / 6 * 3) ** (1 / 3))
    assert [len(group.rows) for group in found.values()] == [4, 1, 3, 1, 1, 1, 1]


def test_the_report_shows_the_classes_and_the_worst() -> None:
    rows = [row(65536, 64, 0.03, 0.06, 0.12, 0.05)]
    document = {
        "schema": report.SCHEMA, "kind": "bench", "random": {"seeds": [0], "count": 1}, "rows": rows,
        "ceilings": CEILINGS, "environment": {}, "notes": [], "not_applicable": [],
    }  # fmt: skip
    text = report.text(document)
    assert "memory-bound" in text and "65536 × 64 → 512" in text and "1.20" in text


def test_what_is_benched_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["bench", "--random", "0", "--suite", "cpu"])
    assert "expected one of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["bench", "--random", "x"])
    assert "expected numbers" in capsys.readouterr().err
