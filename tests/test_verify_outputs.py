"""What `verify` looks at in an output besides its numbers: containers, keys, and samples of large tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_verify import ROUNDED_ONCE, TRAPS

from gemmnorm.verify import verify

pytestmark = pytest.mark.usefixtures("warm_processes")

MODEL = """
import torch
from collections import namedtuple
from torch import nn

Pair = namedtuple("Pair", "y z")

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm = nn.Linear(6, 4)

    def forward(self, x):
        y = self.gemm(x)
        return OUTPUT

def get_inputs():
    return [torch.randn(INPUTS)]

def get_init_inputs():
    return []
"""


def judged(folder: Path, output: str, other: str, inputs: str = "9, 6") -> tuple[bool, str]:
    """Whether a model that returns `other` is the one that returns `output`, and why not."""
    paths = []
    for name, text in (("model.py", output), ("new.py", other)):
        source = MODEL.replace("OUTPUT", text).replace("INPUTS", inputs)
        paths.append(folder / name)
        paths[-1].write_text(source if name == "model.py" else source.replace("class Model(", "class ModelNew("))
    verdict = verify(*paths, effort="quick", device="cpu")
    return verdict["equal"], verdict["reason"]


@pytest.mark.parametrize(
    "output", ["(y,)", "[y, y * 2]", "{'y': y, 'z': y * 2}", "Pair(y, y * 2)", "(y, {'z': [y * 2]})"]
)
def test_the_same_containers_are_equal(output: str, tmp_path: Path) -> None:
    assert judged(tmp_path, output, output)[0]


@pytest.mark.parametrize(
    ("output", "other", "said"),
    [
        ("y", "(y,)", "the output is (Tensor,), the original's is Tensor"),
        ("(y, y * 2)", "(y,)", "the output is (Tensor,), the original's is (Tensor, Tensor)"),
        ("(y, y * 2)", "(y, y * 2, y)", "the output is (Tensor, Tensor, Tensor)"),
        ("(y, y * 2)", "[y, y * 2]", "the output is [Tensor, Tensor]"),
        ("Pair(y, y * 2)", "(y, y * 2)", "the original's is (y=Tensor, z=Tensor)"),
        ("{'y': y}", "{'z': y}", "the output is {'z': Tensor}, the original's is {'y': Tensor}"),
        ("(y, None)", "(y, y)", "the original's is (Tensor, NoneType)"),
    ],
)
def test_other_containers_are_not(output: str, other: str, said: str, tmp_path: Path) -> None:
    equal, reason = judged(tmp_path, output, other)
    assert not equal and said in reason and "rounded" not in reason


def test_samples_of_tensors_of_three_dimensions(tmp_path: Path) -> None:
    """Of so many elements a sample of the first dimension is compared."""
    large = "80, 2048, 6"
    assert judged(tmp_path, "y.exp()", "y.exp()", large)[0]
    equal, reason = judged(tmp_path, "y.exp()", "y.exp() * torch.linspace(1, 1.01, 2048)[:, None]", large)
    assert not equal and "raises" not in reason


@pytest.mark.parametrize("draw", [2000, 2004, 20011])
def test_statistics_that_pytorch_rounds_to_16_bits_are_within_the_limits(draw: int, tmp_path: Path) -> None:
    """On the CPU a BatchNorm in bfloat16 does; with two rows some feature, or its gradient, shows it."""
    source = (TRAPS / "model.py").read_text()
    drawn = f"torch.manual_seed({draw} + torch.initial_seed())\n    return [torch.randn(160"
    path, new = tmp_path / "model.py", tmp_path / "new.py"
    path.write_text(source.replace("return [torch.randn(160", drawn))
    new.write_text(source + ROUNDED_ONCE)
    result = verify(path, new, effort="quick", device="cpu", precision="bf16")
    assert result["equal"], result["reason"]
