"""What a written file calls the model's classes, and what of the model's names it leaves alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from export_support import HEAD, written

from gemmnorm.errors import GemmNormValueError

BLOCK = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin, self.bn = nn.Linear(width, width), nn.BatchNorm1d(width)
    def forward(self, x):
        return torch.relu(self.bn(self.lin(x)))
"""
MODEL = """
class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block = {}(width)
    def forward(self, x):
        return self.block(x)
"""


def indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def the_same(text: str) -> bool:
    """Whether `ModelNew`, with its chains in fused classes, gives what `Model` does."""
    space: dict[str, Any] = {"__name__": "written"}
    exec(compile(text, "new.py", "exec"), space)
    model, new = space["Model"](24), space["ModelNew"](24)
    assert "_Fused" in type(new.block).__name__
    new.load_state_dict(model.state_dict())
    x = torch.randn(16, 24)
    return torch.equal(model(x), new(x))


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module beside the model's file that has a block of its own."""
    (tmp_path / "its_blocks.py").write_text(HEAD + BLOCK + "\ndef make(width):\n    return Block(width)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "its_blocks", raising=False)


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("from its_blocks import Block as B\n" + MODEL.format("B"), "B"),
        ("from its_blocks import make\n" + MODEL.format("make"), "held_Block_1"),
        ("import its_blocks\n" + MODEL.format("its_blocks.Block"), "held_Block_1"),
        ("class Parts:" + indented(BLOCK) + "\n" + MODEL.format("Parts.Block"), "Parts.Block"),
        (BLOCK + "Layer = Block\ndel Block\n" + MODEL.format("Layer"), "Layer"),
        (BLOCK + "Block_ = Block\nBlock = 'taken'\n" + MODEL.format("Block_"), "Block_"),
    ],
)
def test_a_class_is_called_as_the_file_can(tmp_path: Path, blocks: None, model: str, base: str) -> None:
    text = written(tmp_path, model)
    assert re.findall(r"^class _FusedBlock1\((.*)\):$", text, re.M) == [base]
    assert the_same(text)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("def make(width):" + indented(BLOCK) + "\n    return Block(width)\n" + MODEL.format("make"), "Block: exp"),
        (BLOCK.replace("Block", "ModelNew") + MODEL.format("ModelNew"), "ModelNew: the written file needs"),
        (BLOCK + "def _children():\n    return 1\n" + MODEL.format("Block"), "_children: the written file needs"),
        (
            "F = 24\nfrom torch.nn.functional import dropout\n"
            + BLOCK.replace("return torch.relu", "return dropout", 1).replace("(x)))", "(x)), F / 48)")
            + MODEL.format("Block"),
            "F: the written file needs",
        ),
    ],
)  # fmt: skip
def test_a_file_that_would_change_a_name_is_refused(tmp_path: Path, model: str, said: str) -> None:
    with pytest.raises(GemmNormValueError, match=said):
        written(tmp_path, model)
    assert not (tmp_path / "new.py").exists()


def test_a_named_tuple_is_written(tmp_path: Path) -> None:
    model = (
        "from typing import NamedTuple\n"
        "class Out(NamedTuple):\n    y: torch.Tensor\n    z: torch.Tensor\n"
        + BLOCK.replace("return torch.relu", "y = torch.relu")
        + "        return Out(y, y + 1)\n"
        + MODEL.format("Block").replace("self.block(x)", "self.block(x).z")
    )
    text = written(tmp_path, model)
    assert "return Out(" in text.split("class _FusedBlock1")[1]
    assert the_same(text)
