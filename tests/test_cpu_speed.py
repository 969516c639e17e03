"""Without a GPU a fused model is as fast as the original. The bound is lenient, because test machines are shared.

`benchmarks/cpu.py` prints the figures (lab/README.md holds them); the aim is 1.05.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

BOUND = 1.25
_path = Path(__file__).parents[1] / "benchmarks" / "cpu.py"
_spec = importlib.util.spec_from_file_location("benchmarks_cpu", _path)
cpu = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cpu)


@pytest.mark.parametrize("phase", cpu.PHASES)
@pytest.mark.parametrize("size", cpu.SIZES[:2])
def test_as_fast_as_the_original(size, phase):
    ratios = []
    for _ in range(4):  # one quiet moment is enough
        ratios.append(cpu.compare(size, phase, 60)[2])
        if ratios[-1] <= BOUND:
            return
    raise AssertionError(f"{size} {phase}: {min(ratios):.2f} × eager, allowed {BOUND}")
