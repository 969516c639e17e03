"""`verify` under autocast around the model: reported, with what differs in words, and not demanded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_verify import TRAPS
from test_verify_use import MODEL, after, product

from gemmnorm.export import export
from gemmnorm.userfiles import load_candidate_file, load_model_file
from gemmnorm.verify import check_files, judge
from gemmnorm.verify.families import FAMILIES, plan_cases
from gemmnorm.verify.golden import _units
from gemmnorm.verify.schedule import Schedule
from gemmnorm.verify.trial import AUTOCAST, AUTOCAST_FP16, AUTOCASTS, run_trial

pytestmark = pytest.mark.usefixtures("warm_processes")

LAST_IS_A_PRODUCT = MODEL.replace("self.bn(self.gemm(x) * self.scale)", "self.gemm(self.bn(x @ self.gemm.weight.t()))")
LAST_IS_A_PRODUCT = LAST_IS_A_PRODUCT.replace("nn.Linear(24, 32)", "nn.Linear(32, 32)").replace("24)]", "32)]")
KNOWS_NO_AUTOCAST = """
class ModelNew(Model):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)
"""
READS_BITS = """
class ModelNew(Model):
    def forward(self, x):
        z = self.gemm(x)
        z = z if z.dtype == torch.float32 else z + (z.detach().view(torch.int16).float() - z).detach()
        return self.bn(z * self.scale)
"""


@pytest.fixture(params=["autocast", "autocast in float16"])
def judged(request: pytest.FixtureRequest, tmp_path: Path):
    """Property and warnings by one of the cases of autocast, behind the plain one."""
    name = request.param

    def judge_source(candidate: str, model: str = MODEL, seeds: int = 1) -> tuple[bool | None, str]:
        (tmp_path / "model.py").write_text(model)
        (tmp_path / "new.py").write_text(model + candidate)
        file = load_model_file(tmp_path / "model.py")
        schedule = Schedule(file, seeds, "cpu")
        schedule.cases = [[c for c in cases if c.name in ("plain", name)] for cases in schedule.cases]
        result = judge(load_candidate_file(tmp_path / "new.py"), file, schedule.references())
        assert result["equal"], result["reason"]
        return result["properties"][name.replace(" in ", "_")], " ".join(
            w for w in result["warnings"] if "autocast" in w
        )

    return judge_source


@pytest.mark.parametrize("model", [MODEL, LAST_IS_A_PRODUCT])
def test_the_same_function_is_right_under_autocast(judged, model):
    assert judged("ModelNew = Model", model, seeds=3) == (True, "")


def test_a_float32_file_is_right_where_the_original_gives_float32(judged):
    assert judged(KNOWS_NO_AUTOCAST, seeds=3) == (True, "")


@pytest.mark.parametrize(
    "folded", ["F.linear(x, w * s[:, None], b * s).float()", "(F.linear(x, w, b) * s.to(F.linear(x, w).dtype)).float()"]
)
def test_another_order_of_roundings_is_right(judged, folded):
    body = f"w, b, s = self.gemm.weight, self.gemm.bias, self.scale\n        return self.bn({folded})"
    assert judged(f"\nclass ModelNew(Model):\n    def forward(self, x):\n        {body}\n", seeds=3) == (True, "")


def test_other_dtypes_are_told(judged):
    found, said = judged(KNOWS_NO_AUTOCAST, LAST_IS_A_PRODUCT)
    assert found is False and "another dtype of output in train mode (float32, expected " in said


def test_other_values_are_told(judged):
    found, said = judged(READS_BITS)
    assert found is False and "another value of output in train mode" in said and "times what rounding explains" in said


def test_one_gradient_of_another_value_is_told(judged):
    doubled = product("gx = gx.to(ctx.dtype); gw = gw.to(ctx.dtype) * (1 if g.dtype == torch.float32 else 2)")
    doubled = doubled.replace("x, w = ctx.saved", "ctx.dtype = g.dtype; x, w = (t.to(g.dtype) for t in ctx.saved")
    found, said = judged(doubled.replace("_tensors\n        gx", "_tensors)\n        gx"))
    assert found is False and "another value of grad:gemm.weight" in said


def test_what_raises_is_told(judged):
    found, said = judged(product("pass"))  # its backward multiplies float32 by bfloat16
    assert found is False and "it raises RuntimeError" in said and "dtype" in said


def test_an_end_of_the_process_is_no_fault(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "new.py").write_text(MODEL + after("torch.is_autocast_enabled('cpu') and __import__('os')._exit(3)"))
    result = check_files(str(tmp_path / "model.py"), str(tmp_path / "new.py"), 1, "cpu")
    assert result["equal"] and result["properties"]["autocast"] is False, result["reason"]
    assert any("it ends its process" in w for w in result["warnings"])
    assert result["properties"]["autocast_float16"] is None  # there was no process left


@pytest.mark.parametrize(
    "model",
    [
        MODEL.replace("return self.bn(self", "1 / (not torch.is_autocast_enabled('cpu'))\n        return self.bn(self"),
        MODEL.replace("self.bn = nn.BatchNorm1d(32)", "self.bn = nn.BatchNorm1d(32)\n        self.to(torch.float64)")
        .replace("torch.randn(100, 24)", "torch.randn(100, 24).double()"),
        MODEL.replace("self.bn(self.gemm(x) * self.scale)", "self.gemm(x) - self.gemm(x * (1 + 1e-5))"),
    ],
    ids=["raises there itself", "float64", "no digit left"],
)  # fmt: skip
def test_where_autocast_tells_nothing(judged, model):
    assert judged("ModelNew = Model", model) == (None, "")


def test_an_exported_file_is_right_under_autocast(tmp_path):
    new = tmp_path / "new.py"
    new.write_text(export(str(TRAPS / "model.py"), None).source)
    result = check_files(str(TRAPS / "model.py"), str(new), 1, "cpu")
    assert result["equal"] and result["properties"]["autocast"] is True, result["warnings"]


def test_autocast_is_the_last_case_of_the_last_seed():
    """Its calls may end the process or spoil its memory."""
    cases = [plan_cases(i, 3, shared=i > 3, full_rows=None, full_everywhere=True) for i in range(3)]
    assert [sum(c.name.startswith("autocast") for c in seed) for seed in cases] == [0, 0, 2]
    assert [c.use for c in cases[-1][-2:]] == [c.use for c in FAMILIES[-2:]] == [(word,) for word in AUTOCASTS]


def test_autocast_is_around_the_forward_and_casts_nothing_of_float64():
    model, seen = torch.nn.Linear(4, 6), []
    model.register_full_backward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    for word, half in AUTOCASTS.items():
        for dtype, wanted in ((torch.float32, half), (torch.float64, torch.float64)):
            x = [torch.randn(7, 4, dtype=dtype)]
            found = run_trial(model.to(dtype), x, training=True, cotangent=lambda i, y: torch.ones_like(y), use=(word,))
            assert found.outputs[0].dtype == wanted and found.values["grad:weight"].dtype == dtype
    assert seen == [False] * 4


def test_operands_of_products_are_rounded_under_autocast():
    found, cpu = {torch.float32, torch.bfloat16}, torch.device("cpu")
    assert _units(found, found, cpu, (AUTOCAST,)).operand == 2.0**-8 and _units(found, found, cpu).operand == 0
    assert _units({torch.float32}, found, cpu, (AUTOCAST,)).operand == 0
    assert _units({torch.float32, torch.float16}, found, cpu, (AUTOCAST_FP16,)).operand == 2.0**-11
