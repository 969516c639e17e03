"""`benchmarks/models.py` at sizes for a CPU: the document, its table, and what happens to a model that is not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import models


@pytest.fixture
def without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)


def test_eager_and_fused_side_by_side(tmp_path, capsys, without_timm):
    path = tmp_path / "models.json"
    assert models.main(f"--tiny --no-compile --seconds 0 --only tabular,levit,flashsac --json {path}".split()) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["kind"] == "models" and document["source_hash"] and document["environment"]["torch"]
    assert [row["model"] for row in document["rows"]] == ["tabular"] * 2 + ["flashsac"] * 2
    for eager, fused in zip(document["rows"][::2], document["rows"][1::2], strict=True):
        assert (eager["way"], fused["way"]) == ("eager", "fused")
        assert eager["chains"] == 0 and fused["chains"] in (2, 3)
        assert fused["calls"]["fused"] >= 3 * fused["chains"] and not fused["calls"]["unfused"]
        assert eager["wall_ms"] > 0 and fused["wall_ms"] > 0
        assert max(fused["deviation"].values()) < 1e-3 and max(fused["error"].values()) < 1e-2
    said = capsys.readouterr().out
    assert "levit, all: " in said and "timm" in said and "fused" in said


@pytest.mark.parametrize("name", ["pointnet", "simsiam", "barlow", "projector"])
def test_every_model_trains_and_its_fused_twin_computes_the_same(name):
    trained = models.Trained(name, models.Options("cpu", tiny=True))
    trained.compare()
    assert max(trained.errors["deviation"].values()) < 1e-2, trained.errors
    for way in ("eager", "fused"):
        trained.add(way)
    assert not trained.failed
    called = models.calls_of(trained.ways[1].module)
    assert called["chains"] >= 3 and called["calls"]["fused"] >= 3


def test_a_way_that_fails_is_a_line_and_not_the_end(monkeypatch):
    trained = models.Trained("tabular", models.Options("cpu", tiny=True))
    monkeypatch.setattr(
        models.gemmnorm, "fuse", lambda module: module.register_forward_hook(lambda *_: 1 / 0) and module
    )
    for way in ("eager", "fused"):
        trained.add(way)
    assert [way.name for way in trained.ways] == ["eager"]
    assert trained.failed["fused"].startswith("ZeroDivisionError")


def test_a_ratio_beside_each_time(capsys):
    row = {"model": "m", "batch": "1 row", "dtype": "float32", "way": "eager", "wall_ms": 4.0, "device_ms": 3.0}
    row |= {
        "peak_mb": 7.0,
        "kept_mb": 5.0,
        "error": None,
        "chains": 0,
        "calls": {"fused": 0, "unfused": {}},
        "compiled": [],
    }
    other = row | {"way": "fused", "wall_ms": 1.0, "chains": 2, "calls": {"fused": 6, "unfused": {"why": 2}}}
    models.Console(width=140).print(models.table([row, other]))
    said = capsys.readouterr().out
    assert "0.25" in said and "6 of 8" in said and "m: 1 row, float32" in said
