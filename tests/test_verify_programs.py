"""What programs do around a model, and `verify` with it: inference mode, exchanged parameters, optimizers, settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_verify_use import MODEL, after

from gemmnorm.userfiles import load_candidate_file, load_model_file
from gemmnorm.verify import judge
from gemmnorm.verify.rounding import Arithmetic, Units
from gemmnorm.verify.schedule import Schedule

pytestmark = pytest.mark.usefixtures("warm_processes")

# Packed while the weight stays; what is made in inference mode cannot be saved for a backward.
PACKED = """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, packed):
        ctx.save_for_backward(x, packed)
        return x @ packed
    @staticmethod
    def backward(ctx, g):
        x, packed = ctx.saved_tensors
        return g @ packed.t(), g.t() @ x, None
class ModelNew(Model):
    key = None
    def forward(self, x):
        w = self.gemm.weight
        key = w.data_ptr(), w._version
        if key != self.key:
            with torch.inference_mode(MODE):
                self.key, self.packed = key, w.detach().t().contiguous()
        return self.bn((Product.apply(x, w, self.packed) + self.gemm.bias) * self.scale)
"""
# The parameter itself in a list, which copy.deepcopy copies along and `assign` does not reach.
CAPTURED = """
class ModelNew(Model):
    def __init__(self):
        super().__init__()
        self.held = [self.gemm.weight]
    def forward(self, x):
        return self.bn(F.linear(x, self.held[0], self.gemm.bias) * self.scale)
"""
REORDERED = """
class ModelNew(Model):
    def __init__(self):
        super().__init__()
        scale = self.scale
        del self.scale
        self.scale = scale
        self.gemm = self._modules.pop("gemm")
"""


@pytest.fixture
def judged(tmp_path: Path):
    def judge_source(candidate: str, names: tuple[str, ...] = ("plain", "evaluation"), seeds: int = 1):
        (tmp_path / "model.py").write_text(MODEL)
        (tmp_path / "new.py").write_text(MODEL + candidate)
        file = load_model_file(tmp_path / "model.py")
        schedule = Schedule(file, seeds, "cpu")
        schedule.cases = [[c for c in cases if c.name in names] for cases in schedule.cases]
        return judge(load_candidate_file(tmp_path / "new.py"), file, schedule.references())

    return judge_source


def test_what_programs_do_leaves_the_same_model_the_same(judged):
    result = judged("ModelNew = Model")
    assert result["equal"] and not result["warnings"] and result["properties"]["same_parameter_order"]


def test_a_version_that_inference_mode_does_not_count(judged):
    """Tensors that are made in inference mode have no version counter, and PyTorch raises."""
    result = judged(after("self.seen = x._version"))
    assert not result["equal"] and result["fault"]["class"] == "raises" and "version counter" in result["reason"]
    assert "evaluation, after training" in {c["case"] for c in result["checks"] if not c["ok"]}


def test_what_inference_mode_leaves_behind(judged):
    assert judged(PACKED.replace("MODE", "False"))["equal"]
    result = judged(PACKED.replace("MODE", "torch.is_inference_mode_enabled()"))
    assert not result["equal"] and result["fault"]["class"] == "raises" and "nference tensors" in result["reason"]


def test_parameters_that_are_exchanged_and_not_followed_are_told(judged):
    result = judged(CAPTURED)
    assert result["equal"] and any("load_state_dict(assign=True)" in w for w in result["warnings"]), result["reason"]


def test_a_loader_of_its_own_need_not_assign(judged):
    own = after("pass").replace(
        "n = 0", "def load_state_dict(self, s, strict=True):\n        super().load_state_dict(s)"
    )
    assert judged(own)["equal"]


def test_another_order_of_parameters_is_told(judged):
    result = judged(REORDERED)
    assert result["equal"] and result["properties"]["same_parameter_order"] is False, result["reason"]
    assert any("PARAMETER ORDER" in w for w in result["warnings"])


def test_autocast_that_is_left_on_is_a_fault(judged):
    left_on = """
class ModelNew(Model):
    def forward(self, x):
        torch.set_autocast_enabled("cpu", False)
        y = super().forward(x)
        torch.set_autocast_enabled("cpu", True)
        return y
"""
    try:
        result = judged(left_on)
    finally:
        torch.set_autocast_enabled("cpu", False)
    assert not result["equal"] and result["fault"]["class"] == "tampering"
    assert "leaves the autocast of the process changed" in result["reason"]


def test_a_copy_at_the_end_is_the_same_function(judged):
    """Its backward gives BatchNorm's a whole tensor of equal cotangents, whose sum PyTorch makes in another order."""
    result = judged(after("y = y.double().float()"), ("127 rows",), seeds=5)
    assert result["equal"], result["reason"]


def test_equal_addends_round_alike():
    x, units = torch.ones(300, 5, dtype=torch.float64), Units(2.0**-24, 2.0**-24)
    x[:, 3:] += torch.randn(300, 2, dtype=torch.float64) * 0.01
    with Arithmetic(units, seed=3):
        runs = torch.stack([x.sum(0) for _ in range(200)])
        whole = torch.stack([x[:, :3].mean() for _ in range(200)])
        one_by_one = torch.stack([x[:5].sum(0) for _ in range(200)])
    found = runs.std(0) / 300 / 2.0**-24  # of numbers uniform in [-1, 1]: the square root of a third of the range
    assert (found[:3] - 30 / 3**0.5).abs().max() < 2.5 and (found[3:] - 4 / 3**0.5).abs().max() < 0.5
    assert abs(whole.std() * 2.0**24 - 30) < 3
    assert (one_by_one.std(0) / 5 * 2.0**24 - 4 / 3**0.5).abs().max() < 0.6
