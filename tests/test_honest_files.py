"""What is ordinary in somebody's file, path or terminal, and must not end in a traceback or in "not equal"."""

from __future__ import annotations

import ast
import builtins
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemmnorm.cli import main as cli
from gemmnorm.export import export
from gemmnorm.userfiles import DROPOUT_NOTE, without_dropout
from gemmnorm.verify.answer import check_files

pytestmark = pytest.mark.usefixtures("warm_processes")

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm = nn.Linear(6, 4)

    def forward(self, x):
        return self.gemm(x)

def get_inputs():
    return [torch.randn(9, 6)]

def get_init_inputs():
    return []
"""
ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run(command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """What a shell does with `gemmnorm COMMAND`."""
    line = f"{sys.executable} -m gemmnorm {command}"
    how = {**os.environ, **(environment or {})}
    return subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, errors="replace", env=how)


# ---------------------------------------------------------------------------------------------- terminals and paths


@pytest.mark.parametrize("environment", [ASCII, C_LOCALE], ids=["ascii", "C"])
def test_a_terminal_that_lacks_characters_changes_no_exit_code(environment: dict[str, str]) -> None:
    Path("m.py").write_text(MODEL)
    for command in ("verify m.py m.py --device cpu --quick --no-report", "--help"):
        done = run(command, environment)
        assert done.returncode == 0 and "Traceback" not in done.stderr and done.stdout, done.stderr


def test_a_closed_standard_output_changes_no_exit_code() -> None:
    Path("m.py").write_text(MODEL)
    done = run("verify m.py m.py --device cpu --quick --json r.json >&- 2>&- <&-")
    assert done.returncode == 0 and json.loads(Path("r.json").read_text())["equal"]


def test_a_path_that_the_locale_cannot_decode() -> None:
    Path("mö.py").write_text(MODEL)
    done = run("verify mö.py mö.py --device cpu --quick --json r.json --report ö.html", C_LOCALE)
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("r.json").read_text())["model"] == "mö.py" and "mö.py" in Path("ö.html").read_text()


def test_a_fault_of_our_own_is_no_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cli._RUN, "doctor", lambda *_: 1 // 0)
    assert cli.main(["doctor"]) == 2 and "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--json=", "expected a path; got ''"),
        ("--report=", "expected a path; got ''"),
        ("--device=", "expected cpu, cuda or cuda:N; got ''"),
        ("--device=meta", "expected cpu, cuda or cuda:N; got 'meta'"),
    ],
)
def test_options_that_name_nothing_are_refused(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("m.py").write_text(MODEL)
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", "m.py", "m.py", option])
    assert ended.value.code == 2 and said in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ what is written


CHAIN = """
import torch
from torch import nn
from torch import *

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm, self.bn = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return nn.functional.hardtanh(self.bn(self.gemm(x)), 0.0, math.inf)

def get_inputs():
    return [torch.randn(9, 6)]

def get_init_inputs():
    return []
"""


def test_a_written_file_calls_nothing_that_the_model_could_have_renamed() -> None:
    """`from torch import *` makes `any`, `all` and `float` PyTorch's."""
    Path("m.py").write_text(CHAIN.replace("import torch\n", "import math\nimport torch\n", 1))
    tail = export("m.py", None).source.partition("import builtins as _builtins\n")[2]
    read = {node.id for node in ast.walk(ast.parse(tail)) if isinstance(node, ast.Name)}
    assert read & set(dir(builtins)) == {"staticmethod"}
    assert cli.main(["optimize", "m.py", "--device", "cpu", "--quick", "--no-compile", "-q"]) == 0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("optimize m.py -o j.py --json j.py", "--json: expected a file of its own; got j.py, which is NEW.py as well"),
        ("optimize m.py --json m_new.txt", "got m_new.txt, which is NEW.txt as well"),
        ("optimize m.py -o link.py", "output: expected a path other than the model's own; got link.py"),
        ("verify m.py m.py --json r.html", "--report: expected a file of its own; got r.html, which is --json as well"),
        ("verify m.py m.py --json r --report ./r", "got ./r, which is --json as well"),
    ],
)
def test_two_files_that_are_written_are_never_one(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("m.py").write_text(MODEL)
    os.link("m.py", "link.py")
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["link.py", "m.py"]


# ------------------------------------------------------------------------------------- a file is equal to itself


OBJECTS = """
import dataclasses
import torch

@dataclasses.dataclass
class Out:
    y: torch.Tensor
    loss: float = 0.5

class Named(dict):
    pass

class Plain:
    def __init__(self, y):
        self.y = y
"""
FORWARD = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm, self.bn, self.t = nn.Linear(8, 8), nn.BatchNorm1d(8), torch.randn(8, 8)
        self.inner = MODULE

    def forward(self, x):
        y = self.bn(self.gemm(x))
        BODY

def get_inputs():
    return [torch.randn(24, 8)]

def get_init_inputs():
    return []
"""


def itself(body: str, other: str | None = None, module: str = "nn.ReLU(inplace=True)") -> dict[str, Any]:
    """What `verify` says of a forward that does `body`, and of a replacement that does `other`, or the same."""
    text = (OBJECTS + FORWARD).replace("MODULE", module)
    Path("model.py").write_text(text.replace("BODY", body))
    Path("new.py").write_text(text.replace("BODY", other or body).replace("class Model(", "class ModelNew("))
    return check_files("model.py", "new.py", 1, "cpu", effort="quick")


@pytest.mark.parametrize(
    "body",
    [
        "return torch.ones(3, y.shape[0]) @ y",
        "return torch.zeros(3, 8).index_add(0, torch.arange(y.shape[0]) % 3, y)",
        "return y @ self.t",
        "return y @ torch.tensor(self.t.tolist(), dtype=torch.float32)",
        "return torch.lerp(y, self.t[:1].expand_as(y), self.t[1:2].expand_as(y))",
        "return y @ torch.empty(8, 8).normal_(generator=torch.Generator().manual_seed(0))",
    ],
)
def test_constants_of_float32(body: str) -> None:
    """Where the original runs in float64, so do they."""
    found = itself(body)
    assert found["equal"], found["reason"]


def test_what_a_generator_draws_is_the_originals() -> None:
    """In float64 it would be other numbers, and each would be an error of the original's own."""
    draw = "y @ torch.randn(8, 8, generator=torch.Generator().manual_seed(0))"
    found = itself(f"return {draw}")
    assert found["equal"] and found["properties"]["output_error"]["eval"]["eager_error"] < 1e-6, found["reason"]
    assert not itself(f"return {draw}", f"return {draw} * 1.001")["equal"]


@pytest.mark.parametrize(
    "body",
    [
        "x += 1; return self.gemm(x)",
        "return self.bn(self.gemm(self.inner(x)))",
        "F.relu(x, inplace=True); return x",
    ],
)
def test_a_forward_that_writes_into_its_input(body: str) -> None:
    found = itself(body)
    assert found["equal"], found["reason"]
    assert not found["properties"]["inputs_mutated"]


def test_a_replacement_alone_that_writes_into_its_input_is_refused() -> None:
    found = itself("return self.gemm(x * 2)", "x *= 2; return self.gemm(x)")
    assert found["fault"]["class"] == "inputs_changed"


@pytest.mark.parametrize(
    ("result", "module"),
    [
        ("self.inner(y[None])", "nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)"),
        ("F.scaled_dot_product_attention(y, y, y, dropout_p=0.5 * self.training)", "None"),
        ("self.inner(y[:, None])[0]", "nn.GRU(8, 4, 2, dropout=0.5, batch_first=True)"),
        ("torch.dropout(y, 0.5, self.training)", "None"),
    ],
)
def test_every_dropout_draws_nothing(result: str, module: str) -> None:
    found = itself(f"return {result}", module=module)
    assert found["equal"] and DROPOUT_NOTE in found["warnings"], found["reason"]
    assert not itself(f"return {result}", f"return {result} * 1.001", module)["equal"]


def test_dropouts_are_pytorchs_again() -> None:
    gru, x = nn.GRU(4, 4, 2, dropout=0.5), torch.ones(3, 2, 4)
    functions = F.scaled_dot_product_attention, nn.GRU.forward, torch.dropout
    with without_dropout() as used:
        assert torch.equal(gru(x)[0], gru(x)[0]) and used == ["GRU"] and gru.dropout == 0.5
    assert (F.scaled_dot_product_attention, nn.GRU.forward, torch.dropout) == functions
    assert not torch.equal(gru(x)[0], gru(x)[0])


@pytest.mark.parametrize(
    ("output", "other"),
    [
        ("Out(y)", "Out(y * 1.001)"),
        ("Out(y, 2.0)", "Out(y, 2.001)"),
        ("Named(y=y)", "Named(y=y * 1.001)"),
        ("Named(y=y)", "{'y': y}"),
        ("Plain(y)", "Plain(y * 1.001)"),
        ("Plain([y, {'z': Out(y)}])", "Plain([y, {'z': Out(y * 1.001)}])"),
        ("(y, y.mean().item())", "(y, y.mean().item() * 1.001)"),
        ("(y, y.detach().numpy())", "(y, y.detach().numpy() * 1.001)"),
        ("torch.fft.rfft(y)", "torch.fft.rfft(y).conj()"),
        ("torch.fft.rfft(y)", "torch.view_as_real(torch.fft.rfft(y))"),
        ("(y, self.gemm.bias, self.bn.running_mean)", "(y, self.gemm.bias, self.bn.running_var)"),
        ("(y, self.gemm.bias.clone())", "(y, self.gemm.bias)"),
        ("(y, Plain)", "(y, Out)"),
    ],
)
def test_whatever_a_forward_returns_is_equal_to_itself(output: str, other: str) -> None:
    found = itself(f"return {output}")
    assert found["equal"], found["reason"]
    assert not itself(f"return {output}", f"return {other}")["equal"]


def test_numbers_of_the_same_value_need_not_be_the_same_bits() -> None:
    found = itself("return y, y.mean().item()", "return y, (y.sum() / y.numel()).item()")
    assert found["equal"], found["reason"]


@pytest.mark.parametrize(
    ("text", "instead", "said"),
    [
        ("nn.BatchNorm1d(8)", "nn.LazyBatchNorm1d()", "bn.weight waits for the first call (a lazy module)"),
        ("BODY", "return y.to_sparse()", "expected dense tensors as outputs, got one of layout torch.sparse_coo"),
        ("BODY", "return (y + 0).to_sparse() @ self.t", "it computes with sparse tensors, whose rounding errors"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(text: str, instead: str, said: str) -> None:
    Path("m.py").write_text(FORWARD.replace(text, instead).replace("BODY", "return y").replace("MODULE", "None"))
    found = check_files("m.py", "m.py", 1, "cpu", effort="quick")
    assert found["verdict"] == "model_bad" and said in found["reason"], found["reason"]
