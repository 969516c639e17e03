"""Right candidates where rounding decides: many chains in series, ties; wrong ones on the way that serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmnorm.verify.answer import check_files

HEAD = "import torch\nfrom torch import nn\n"
INPUTS = "def get_inputs():\n    return [torch.randn(40, 16)]\ndef get_init_inputs():\n    return [16]\n"
DEEP = """
class Model(nn.Module):
    def __init__(self, n, depth=4):
        super().__init__()
        self.l = nn.ModuleList(nn.Linear(n, n) for _ in range(depth))
        self.b = nn.ModuleList(nn.BatchNorm1d(n) for _ in range(depth))
    def product(self, l, x):
        return l(x)
    def forward(self, x):
        for l, b in zip(self.l, self.b):
            x = torch.relu(b(self.product(l, x)))
        return torch.sigmoid(x)
"""
OTHER_ORDER = "l(x)", "x.flip(1) @ l.weight.flip(1).t() + l.bias"
ONE = """
class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.lin, self.bn = nn.Linear(n, n), nn.BatchNorm1d(n)
        self.scale = nn.Parameter(torch.ones(n))
        self.register_buffer("centre", torch.zeros(n))
        self.down, self.up = nn.Parameter(torch.randn(2, n)), nn.Parameter(torch.zeros(n, 2))
    def forward(self, x):
        x = x - self.centre
        z = self.lin(x) + x @ self.down.t() @ self.up.t()
        return torch.relu(self.bn(z * self.scale))
"""
DECIDED = ONE.replace("return torch.relu(", "y = (").rstrip() + "\n        return y, y.argmax(1), y > 0\n"
# What is wrong with a candidate of ONE, and how: the text that is another.
WRONG = {
    "a buffer": ("x - self.centre", "x"),
    "what begins as zeros": ("@ self.up.t()", "@ (2 * self.up).t()"),
    "a scale, where it serves": ("z * self.scale", "z * (self.scale if torch.is_grad_enabled() else self.scale.abs())"),
    "inference mode": ("x - self.centre", "x - self.centre + float(torch.is_inference_mode_enabled())"),
}  # fmt: skip


def verdict(folder: Path, model: str, change: tuple[str, str]) -> dict[str, object]:
    assert change[0] in model
    (folder / "model.py").write_text(HEAD + model + INPUTS)
    (folder / "new.py").write_text(HEAD + model.replace(*change).replace("Model", "ModelNew") + INPUTS)
    return check_files(str(folder / "model.py"), str(folder / "new.py"), 1, "cpu")


@pytest.mark.parametrize("model", [DEEP, DECIDED], ids=["four chains", "an argmax and comparisons"])
def test_another_order_of_the_same_sum_is_equal(model: str, tmp_path: Path) -> None:
    there, instead = OTHER_ORDER
    change = OTHER_ORDER if model is DEEP else (f"self.{there[0]}in(x)", instead.replace("l.", "self.lin."))
    found = verdict(tmp_path, model, change)
    assert found["verdict"] == "equal", found["reason"]


def test_a_wrong_gradient_of_a_deep_model_is_found(tmp_path: Path) -> None:
    found = verdict(tmp_path, DEEP, ("l(x)", "l(x) + 0.1 * (l(x) - l(x).detach())"))
    assert found["verdict"] == "not_equal"


@pytest.mark.parametrize("name", WRONG)
def test_what_a_checkpoint_or_a_server_brings_is_met(name: str, tmp_path: Path) -> None:
    assert verdict(tmp_path, ONE, WRONG[name])["verdict"] == "not_equal"


def test_tensors_of_inference_mode_are_not_given_back(tmp_path: Path) -> None:
    inside = "with torch.inference_mode(not (self.training or torch.is_grad_enabled())):\n            return torch.relu"
    found = verdict(tmp_path, ONE, ("return torch.relu", inside))
    assert found["verdict"] == "not_equal" and "tensor of inference mode" in str(found["reason"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("torch.relu(self.bn(z * self.scale))", "torch.relu(self.bn(z * self.scale))[:, :8]"), "shape [33, 8]"),
        (("torch.relu(self.bn(z * self.scale))", "torch.relu(self.bn(z * self.scale)).t()"), "expected [33, 16]"),
    ],
)
def test_another_shape_is_told_as_such(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    assert said in str(verdict(tmp_path, ONE, change)["reason"])
