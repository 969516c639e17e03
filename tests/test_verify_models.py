"""Models that are ordinary and that `verify` must not blame a right candidate for, nor call bad."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemmnorm.userfiles import ModelFileError, load_candidate_file, load_model_file
from gemmnorm.verify import judge
from gemmnorm.verify.schedule import Schedule

MODEL = """
import copy, random
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self, k=1.0):
        super().__init__()
        self.gemm = nn.Linear(24, 32)
        self.bn = nn.BatchNorm1d(32)
        self.k = k
        INIT

    def forward(self, x):
        FORWARD

def get_inputs():
    return [INPUTS]

def get_init_inputs():
    return [ARGUMENTS]
"""


def model(forward: str, init: str = "", inputs: str = "torch.randn(100, 24)", arguments: str = "") -> str:
    made = {"INIT": init, "FORWARD": forward, "INPUTS": inputs, "ARGUMENTS": arguments}
    text = MODEL
    for name, value in made.items():
        text = text.replace(name, value.replace("\n", "\n        "))
    return text


Verdict = Callable[..., tuple[dict[str, Any], list[str]]]


@pytest.fixture
def judged(tmp_path: Path) -> Verdict:
    """(verdict, what was skipped)"""

    def judge_source(source: str, candidate: str = "ModelNew = Model") -> tuple[dict[str, Any], list[str]]:
        (tmp_path / "model.py").write_text(source)
        (tmp_path / "new.py").write_text(f"{source}\n{candidate}\n")
        file = load_model_file(tmp_path / "model.py")
        schedule = Schedule(file, 1, "cpu", "quick")
        result = judge(load_candidate_file(tmp_path / "new.py"), file, schedule.references())
        return result, schedule.skipped

    return judge_source


Y = "y = self.bn(self.gemm(x))\n"
BYOL = model(
    "if self.training:\n    with torch.no_grad():\n"
    "        self.target.weight.mul_(0.9).add_(self.gemm.weight, alpha=0.1)\n"
    f"{Y}return y, self.target(x).detach()",
    "self.target = copy.deepcopy(self.gemm).requires_grad_(False)",
)
FIRST_CALL = model(
    f"{Y}if self.training and not self.ready:\n    with torch.no_grad():\n"
    "        self.loc.copy_(0.5 - y.mean(0))\n        self.ready.fill_(True)\nreturn y + self.loc",
    "self.loc = nn.Parameter(torch.zeros(32))\nself.register_buffer('ready', torch.tensor(False))",
)
COMPLEX = model(
    "z = torch.fft.rfft(self.gemm(x))\nreturn self.bn(torch.fft.irfft(PRODUCT, n=32))".replace("PRODUCT", "z * self.w"),
    "self.w = nn.Parameter(torch.randn(17, dtype=torch.cfloat))",
)
TIED = model(
    "return self.bn(self.b(self.a(x)))",
    "self.a = nn.Linear(24, 24)\nself.b = nn.Linear(24, 24)\nself.b.weight = self.a.weight\n"
    "self.bn = nn.BatchNorm1d(24)",
)
ORDINARY = {
    "a momentum target": BYOL,
    "set by the first call": FIRST_CALL,
    "a table of 40 rows": model(
        f"{Y}return y + self.t[:len(x)]", "self.register_buffer('t', torch.randn(40, 32))", "torch.randn(40, 24)"
    ),
    "batches of 16": model(
        "return torch.cat([self.bn(part) for part in self.gemm(x).split(16)])", inputs="torch.randn(64, 24)"
    ),
    "what is not finite": model(f"{Y}if not x.isfinite().all():\n    raise ValueError('x')\nreturn y"),
    "a category in x": model(
        "return self.bn(self.gemm(torch.cat([self.e(x[:, 0].long()), x[:, 1:]], 1)))",
        "self.e = nn.Embedding(10, 8)\nself.gemm = nn.Linear(31, 32)",
        "torch.cat([torch.randint(0, 10, (100, 1)).float(), torch.randn(100, 23)], 1)",
    ),
    "an argument that is drawn": model(f"{Y}return y * self.k", arguments="torch.rand(()).item()"),
    "Python's random numbers": model(f"{Y}return y * self.c", "self.c = random.uniform(1, 2)"),
    "NumPy's random numbers": model(f"{Y}return y[:, self.p]", "self.p = np.random.permutation(32)"),
    "a buffer of probabilities": model(
        f"{Y}return F.binary_cross_entropy(torch.sigmoid(y), self.t.expand_as(y), reduction='none')",
        "self.register_buffer('t', torch.rand(32))",
    ),
    "complex parameters": COMPLEX,
    "tied parameters": TIED,
}

NOT_FINITE = ("what is not finite", "a category in x", "a buffer of probabilities")  # raise there


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_model_is_equal_to_itself(judged: Verdict, name: str) -> None:
    result, skipped = judged(ORDINARY[name])
    assert result["equal"], result["reason"]
    left_out = " ".join(skipped)
    warnings = [w for w in result["warnings"] if "autocast" not in w]
    assert not warnings, warnings
    assert ("“NaN and infinity”" in left_out) == (name in NOT_FINITE), skipped
    assert len(skipped) <= (8 if name in ("a category in x", "a table of 40 rows") else 1), skipped
    assert ("“64 rows" in left_out) == (name == "a table of 40 rows"), skipped
    assert ("other batch sizes" in left_out) == (name == "batches of 16"), skipped


@pytest.mark.parametrize(
    ("source", "candidate"),
    [
        (BYOL, "self.target.weight.mul_(0.9).add_(self.gemm.weight, alpha=0.1) if self.training else None"),
        (FIRST_CALL, "self.loc.mul_(1.01) if self.training else None"),
        (ORDINARY["an argument that is drawn"], "self.k *= 1.01"),
        (ORDINARY["a table of 40 rows"], "self.bn.bias.add_(0.001)"),
    ],
)
def test_a_change_of_it_is_seen(judged: Verdict, source: str, candidate: str) -> None:
    forward = f"    def forward(self, x):\n        with torch.no_grad():\n            {candidate}\n"
    result, _ = judged(source, f"class ModelNew(Model):\n{forward}        return super().forward(x)")
    assert not result["equal"]


def test_complex_parameters_by_other_operations(judged: Verdict) -> None:
    parts = "torch.complex(z.real * w.real - z.imag * w.imag, z.real * w.imag + z.imag * w.real)"
    candidate = (
        "class ModelNew(Model):\n    def forward(self, x):\n        z, w = torch.fft.rfft(self.gemm(x)), self.w\n"
        f"        return self.bn(torch.fft.irfft({parts}, n=32))"
    )
    assert judged(COMPLEX, candidate)[0]["equal"]
    assert not judged(COMPLEX, candidate.replace("self.w\n", "self.w * 1.001\n"))[0]["equal"]


def test_tied_parameters_in_another_order(judged: Verdict) -> None:
    """The first name is the other one: `named_parameters()` leaves the second out."""
    init = "super().__init__()\n        a = self._modules.pop('a')\n        self._modules['a'] = a"
    result, _ = judged(TIED, f"class ModelNew(Model):\n    def __init__(self):\n        {init}")
    assert result["equal"], result["reason"]
    untied = "super().__init__()\n        self.b.weight = nn.Parameter(self.a.weight.detach().clone())"
    assert not judged(TIED, f"class ModelNew(Model):\n    def __init__(self):\n        {untied}")[0]["equal"]


@pytest.mark.parametrize("phase", ["training", "evaluation"])
def test_random_numbers_are_refused_in_either_phase(judged: Verdict, phase: str) -> None:
    draws = f"self.training == {phase == 'training'}"
    with pytest.raises(ModelFileError, match=f"in {phase} it draws random numbers"):
        judged(model(f"{Y}return y + torch.randn_like(y) if {draws} else y"))


def test_random_numbers_that_the_original_draws_too_are_no_news(judged: Verdict) -> None:
    source = model(f"{Y}torch.rand(1)\nreturn y")
    assert "draws random numbers" not in " ".join(judged(source)[0]["warnings"])
    plain = source.replace("torch.rand(1)", "pass")
    drawing = (
        "class ModelNew(Model):\n    def forward(self, x):\n        torch.rand(1)\n        return super().forward(x)"
    )
    assert "draws random numbers" in " ".join(judged(plain, drawing)[0]["warnings"])


def test_what_a_rounding_error_makes_the_original_refuse_is_not_the_candidates_fault(judged: Verdict) -> None:
    source = model(f"{Y}p = torch.sigmoid(2.5 * y)\nif (p > 1).any():\n    raise ValueError('p')\nreturn p")
    result, _ = judged(
        source, "class ModelNew(Model):\n    def forward(self, x):\n        return super().forward(x.clone())"
    )
    assert result["equal"], result["reason"]


def test_extra_state_is_refused_in_a_sentence(judged: Verdict) -> None:
    extra = "\n    def get_extra_state(self):\n        return {'a': 1}\n"
    with pytest.raises(ModelFileError, match="must have tensors in its state_dict, _extra_state is dict"):
        judged(model(f"{Y}return y").replace("\n    def forward", f"{extra}\n    def forward"))


def test_tensors_inside_of_containers_are_named_as_left_out(judged: Verdict) -> None:
    source = model("return self.bn(self.gemm(x[0] * x[1]))", inputs="torch.randn(9, 24), [torch.randn(9, 24)] * 2")
    _, skipped = judged(source.replace("forward(self, x)", "forward(self, first, x)"))
    assert any("inside of containers" in sentence for sentence in skipped)


def test_a_candidate_may_compile_as_often_as_it_is_asked_for_something_else(judged: Verdict) -> None:
    candidate = (
        "class ModelNew(Model):\n    def __init__(self):\n        super().__init__()\n"
        "        self.compile(fullgraph=True, backend='eager')"
    )
    result, _ = judged(model(f"{Y}return y"), candidate)
    assert result["equal"], result["reason"]
