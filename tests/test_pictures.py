"""The pictures of docs/ are what their script draws today."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # where it finds what it draws with
_spec = importlib.util.spec_from_file_location("pictures", ROOT / "benchmarks" / "pictures.py")
pictures = importlib.util.module_from_spec(_spec)
sys.modules["pictures"] = pictures  # dataclasses look there
_spec.loader.exec_module(pictures)


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_a_picture_is_up_to_date(name):
    path = pictures.PICTURES / name
    assert path.read_text(encoding="utf-8") == pictures.DRAWN[name](), "run: python benchmarks/pictures.py"


def test_every_file_on_the_way_of_a_call_exists():
    assert all((pictures.PACKAGE / path).exists() for path, _, _ in pictures.WAY)


def test_the_example_of_kernels_md():
    """2048 × 2048 → 8192 in bf16 training, as the page tells it."""
    forward = pictures.plan.make_plan(pictures.problem(2048, 2048, 8192)).launches[0]
    assert (forward.source, forward.member("Epilogue<>")) == ("gemm/kernel.cuh", "gemmnorm::CoResidentEpilogue")
    assert (forward.member("kTileRows"), forward.member("kTileColumns")) == (256, 128)
    assert forward.grid.value(2048) == 128
    backward = pictures.plan.make_plan(pictures.problem(2048, 2048, 8192), None, "backward").launches[0]
    assert backward.function == "cluster_gradient"


def test_the_order_of_tiles_is_the_schedulers():
    """`tile_at` has the lines of tile_scheduler.cuh, and gives every tile once."""
    source = (pictures.PACKAGE / "kernels" / "gemm" / "tile_scheduler.cuh").read_text(encoding="utf-8")
    assert "first = group * group_panels;" in source and "return {rest / panels, first + rest % panels};" in source
    tile_at = sys.modules["kernel_pictures"].tile_at
    assert len({tile_at(t, 5, 7, 3) for t in range(35)}) == 35
    assert [tile_at(t, 2, 3, 2) for t in range(6)] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
