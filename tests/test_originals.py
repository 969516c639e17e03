"""Functions of PyTorch's and Python's that a file has put others in the place of."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemmnorm.bench import FileOptions, bench_files
from gemmnorm.userfiles import functions, replaced, without_dropout

TRAPS = "tests/traps/"
QUICK = FileOptions(compile=False, phases=("train_fwd",), budget_s=0.2)


def looks_like_pytorchs(self: Any, input: Any) -> Any:
    return F.linear(input, self.weight, self.bias)


PATCHES = {
    "torch.nn.Linear.forward": lambda patch: patch.setattr(nn.Linear, "forward", looks_like_pytorchs),
    "torch.nn.BatchNorm1d.forward": lambda patch: patch.setattr(nn.BatchNorm1d, "forward", nn.Identity.__repr__),
    "torch.nn.functional.linear": lambda patch: patch.setattr(F, "linear", lambda *a: F.bilinear(*a)),
    "torch.nn.functional.batch_norm": lambda patch: patch.setattr(F.batch_norm, "__code__", (lambda: 0).__code__),
    "torch.nn.functional.relu": lambda patch: patch.setattr(F.relu, "__defaults__", (True,)),
    "torch.Tensor.mul": lambda patch: patch.setattr(torch.Tensor, "mul", lambda a, b: b, raising=False),
    "torch.Tensor.__matmul__": lambda patch: patch.setattr(torch.Tensor, "__matmul__", lambda a, b: b),
    "torch.nn.Module.__call__": lambda patch: patch.setattr(nn.Module, "__call__", lambda *a: None),
    "torch.cuda.Event.record": lambda patch: patch.setattr(torch.cuda.Event, "record", lambda *a: None),
    "torch.addmm": lambda patch: patch.setattr(torch, "addmm", lambda *a: None),
    "time.perf_counter": lambda patch: patch.setattr(time, "perf_counter", lambda: 0.0),
}


@pytest.mark.parametrize("name", PATCHES)
def test_what_is_replaced_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = functions()
    assert replaced(before) == []
    with monkeypatch.context() as patch:
        PATCHES[name](patch)
        assert name in replaced(before)
    assert replaced(before) == []


def test_code_with_the_name_of_pytorchs_file_is_not_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    before, found = functions(), dict[str, Any]()
    exec(compile("def linear(input, weight, bias=None):\n    return input", F.__file__, "exec"), vars(F).copy(), found)
    monkeypatch.setattr(F, "linear", found["linear"])
    assert replaced(before) == ["torch.nn.functional.linear"]


def test_what_pytorch_puts_there_itself_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = functions()
    monkeypatch.setattr(torch, "manual_seed", torch._disable_dynamo(torch.manual_seed))
    assert torch.manual_seed is not before["torch.manual_seed"].function
    with without_dropout():
        assert replaced(before) == []
    monkeypatch.setattr(torch, "manual_seed", torch.seed)  # one of its own, and another
    assert replaced(before) == ["torch.manual_seed"]


def test_no_time_stands_beside_what_a_file_has_slowed() -> None:
    """The others are timed without it, whenever it puts its functions there."""
    names = ["honest_folded.py", "trap_slows_eager.py", "trap_slows_eager_by_code.py", "honest_three_products.py"]
    paths = [TRAPS + name for name in names]
    document = bench_files(TRAPS + "model.py", paths, QUICK)
    assert document["status"] == "failed"
    assert {*document["failed"]} == {*paths[1:3]}
    assert "replaces torch.nn.Linear.forward" in document["failed"][paths[1]]
    assert "replaces torch.nn.functional.batch_norm" in document["failed"][paths[2]]
    timed = {row["variant"] for row in document["rows"]}
    assert {"eager", paths[0], paths[3]} <= timed and not timed & {*paths[1:3]}
