"""The README is checked: every snippet on it is run here, in CI or on a GPU, and its figures are the result file's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import gemmnorm
from gemmnorm import activations
from gemmnorm.plan import STRATEGIES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# (who runs it, language, text) of every fenced block
BLOCKS = [
    (who or "", language, text)
    for who, language, text in re.findall(r"(?:<!-- run: (\w+) -->\n)?^```(\w*)\n(.*?)^```$", README, re.S | re.M)
]
_spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "readme_table.py")
readme_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(readme_table)


def run(language: str, text: str, folder: Path, path: str) -> None:
    """Run a block in `folder`, with `gemmnorm` and `examples/` at hand as after an installation, and `path` besides."""
    tool = folder / "bin" / "gemmnorm"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gemmnorm "$@"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    (folder / "examples").symlink_to(ROOT / "examples")
    environment = {
        **os.environ,
        "PATH": f"{tool.parent}{os.pathsep}{path}",
        "PYTHONPATH": os.pathsep.join([str(Path(gemmnorm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euc", text]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def blocks(who: str) -> list[object]:
    return [pytest.param(lang, text, id=text.split("\n")[0][:40]) for by, lang, text in BLOCKS if by == who]


@pytest.mark.parametrize(("language", "text"), blocks("cpu"))
def test_what_runs_anywhere(language, text, tmp_path):
    run(language, text, tmp_path, "/usr/bin:/bin")  # without nvcc, which takes half a minute where it is found


@pytest.mark.gpu
@pytest.mark.parametrize(("language", "text"), [*blocks("gpu"), *blocks("cpu")])
def test_what_runs_on_a_gpu(language, text, tmp_path):
    run(language, text, tmp_path, os.environ["PATH"])


def test_every_block_is_run_by_somebody():
    assert {by for by, _, _ in BLOCKS} <= {"cpu", "gpu", "ci", ""}
    # The one block without a marker is the line of PyTorch that the first snippet replaces.
    assert [text for by, _, text in BLOCKS if not by and "# PyTorch" not in text] == []
    assert len(blocks("cpu")) >= 4 and len(blocks("gpu")) >= 1


def test_ci_runs_the_two_commands():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lines = [line.split("#")[0].strip() for by, _, text in BLOCKS if by == "ci" for line in text.strip().split("\n")]
    assert len(lines) == 2
    for command in lines:
        assert re.search(rf"^\s*{re.escape(command)}\b", script, re.M), command


def test_links_lead_somewhere():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if "results/" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


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
