"""A user's model is executed, built and recorded once for each thing that is done with it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from gemmnorm.cli import explain, optimize
from gemmnorm.export import export

# Says in a file what happens to it, by an installed package, whose own affair that is. A fused `forward` does not call
# `note`: a recording keeps the operations alone.
NOTING = """
def note(what):
    open(LOG, "a").write(what + "\\n")
"""
MODEL = """
import sys
import torch
from torch import nn

sys.path.append(PACKAGES)
from noting import note

note("executed")

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        note("built")
        self.gemm = nn.Linear(width, 8)
        self.bn = nn.BatchNorm1d(8)

    def forward(self, x):
        note("forward")
        return self.bn(self.gemm(x))

def get_inputs():
    note("inputs")
    return [torch.randn(16, 12)]

def get_init_inputs():
    note("arguments")
    return [12]
"""
ONCE = {"executed": 1, "built": 1, "arguments": 1, "inputs": 1, "forward": 2}  # recorded in training and in evaluation


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "noting", raising=False)
    path, packages = tmp_path / "model.py", tmp_path / "site-packages"
    packages.mkdir()
    (packages / "noting.py").write_text(NOTING.replace("LOG", repr(str(tmp_path / "log"))))
    path.write_text(MODEL.replace("PACKAGES", repr(str(packages))))
    return path


# … and once more without memory, which shows how many rows a chain is given.
WRITTEN = {**ONCE, "forward": 3}


def happened(model: Path) -> dict[str, int]:
    return dict(Counter((model.parent / "log").read_text().split()))


def test_for_optimize(model: Path) -> None:
    answer = optimize.child_export(str(model), str(model.with_name("new.py")), None, "sm_80", None)
    assert answer["matches"] and model.with_name("new.py").exists()
    assert happened(model) == WRITTEN


def test_for_export(model: Path) -> None:
    export(model, None)
    assert happened(model) == WRITTEN


def test_for_explain(model: Path) -> None:
    assert explain.child(str(model), "sm_90", None)["matches"] == 1
    assert happened(model) == ONCE
