"""The README's figures are the result file's, its lists are whole. (tests/test_docs.py runs its snippets.)"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from gemmnorm import activations
from gemmnorm.plan import STRATEGIES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
_spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "readme_table.py")
readme_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(readme_table)


def test_every_strategy_and_activation_is_named():
    for strategy in STRATEGIES:
        assert f"| `{strategy}` |" in README
    for row in activations.TABLE:
        assert row.name.removesuffix("_tanh") in README


# --- the table of figures ---------------------------------------------------------------------------------------------


def row(**changes):
    base = {
        "case": "kb33", "batch": 1024, "in_features": 8192, "out_features": 8192, "precision": "bf16",
        "autocast": False, "phase": "train_fwd", "strategy": "one_kernel", "chosen": True, "ms": 0.18, "gemm_ms": 0.175,
        "eager_ms": 0.237, "compile_ms": 0.205,
    }  # fmt: skip
    return {**base, **changes}


DOCUMENT = {
    "schema": 1, "created": "2026-01-02T03:04:05", "command": "gemmnorm bench --suite full",
    "environment": {"gpu": "NVIDIA H200", "torch": "2.11.0", "driver": "580", "cuda": "13.0"},
    "rows": [
        row(case="v0", ms=0.0075, gemm_ms=None, compile_ms=None),
        row(strategy="cublas_bn", chosen=False, ms=9.0),
        row(),
        row(phase="eval_fwd", ms=0.17),
        row(autocast=True, ms=0.19),
    ],
}  # fmt: skip


def test_the_table_of_a_result_file():
    text = readme_table.table(DOCUMENT, "h200")
    lines = [line for line in text.split("\n") if line.startswith("| kb33") or line.startswith("| v0")]
    assert lines[0] == "| kb33 1024 × 8192 → 8192 | bf16 | 0.175 | 0.237 | 0.205 | **0.180** | 1.03 |"
    assert lines[1].startswith("| kb33 1024 × 8192 → 8192 | amp |")
    assert lines[2] == "| v0 1024 × 8192 → 8192 | bf16 | — | 0.237 | — | **0.0075** | — |"
    assert "Evaluation, forward" in text and "0.97" in text and "**9.00**" not in text
    assert "NVIDIA H200" in text and "torch 2.11.0" in text and "`gemmnorm bench --suite full`" in text


def test_writing_and_checking(tmp_path):
    readme, result = tmp_path / "README.md", tmp_path / "h200.json"
    readme.write_text("before\n<!-- table:h200 -->\nold\n<!-- /table:h200 -->\nafter\n")
    assert readme_table.main([str(result), str(readme), "--check"]) == 1
    assert readme_table.main([str(result), str(readme)]) == 0
    assert readme_table.UNMEASURED in readme.read_text()
    result.write_text(json.dumps(DOCUMENT))
    assert readme_table.main([str(result), str(readme), "--check"]) == 1
    readme_table.main([str(result), str(readme)])
    assert readme_table.main([str(result), str(readme), "--check"]) == 0
    assert readme.read_text().startswith("before\n") and readme.read_text().endswith("\nafter\n")


def test_the_readme_shows_the_figures_that_are_there():
    assert readme_table.main(["--check"]) == 0, "run: python benchmarks/readme_table.py"


def test_so_does_the_page_of_the_h100():
    result = ROOT / "benchmarks" / "results" / "h100.json"
    assert readme_table.main([str(result), str(ROOT / "docs" / "h100.md"), "--check"]) == 0


def test_so_does_the_page_of_several_ranks():
    result = ROOT / "benchmarks" / "results" / "h200-x2.json"
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    text = (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8")
    assert rows and all(readme_table.milliseconds(row["wall_ms"]) in text for row in rows)
    assert readme_table.main([str(result), str(ROOT / "docs" / "ranks.md"), "--check"]) == 0
