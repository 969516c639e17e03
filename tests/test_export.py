"""The exported file: its Python on the CPU, its CUDA through nvcc where there is one, its build on a GPU."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from gemmnorm.errors import GemmNormValueError
from gemmnorm.tools import export as exporting
from gemmnorm.tools.model_file import load_source

EXAMPLES = Path(__file__).parents[1] / "examples"

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 24)
        self.gain = nn.Parameter(torch.randn(()))
        self.bn = nn.BatchNorm1d(24)

    def forward(self, x):
        return F.leaky_relu(self.bn(self.linear(x) * self.gain), 0.2)


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block = Block(width)
        self.head = nn.Sequential(nn.Linear(24, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.head(self.block(x))


def get_inputs():
    return [torch.randn(40, 32)]


def get_init_inputs():
    return [32]
"""


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "nested.py"
    path.write_text(MODEL)
    return exporting.export(path, path.with_name("nested_new.py"))


def compare(module, device: str, tolerance: float, batch: int = 40) -> None:
    """Model and ModelNew under one seed: names, outputs, gradients and buffers, in training and in evaluation."""
    arguments = module.get_init_inputs()
    torch.manual_seed(5)
    old = module.Model(*arguments).to(device)
    torch.manual_seed(5)
    new = module.ModelNew(*arguments).to(device)
    assert isinstance(new, module.Model)
    for (name, a), (other, b) in zip(old.state_dict().items(), new.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    for training in (True, False):
        old.train(training), new.train(training)
        x = torch.randn(batch, module.get_inputs()[0].shape[1], device=device)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ya, yb = old(a), new(b)
        grad = torch.randn_like(ya)
        ya.backward(grad), yb.backward(grad)
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(yb, ya, **close)
        torch.testing.assert_close(b.grad, a.grad, **close)
        for (name, p), q in zip(old.named_parameters(), new.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, msg=lambda text, name=name: f"{name}: {text}", **close)
        for p, q in zip(old.buffers(), new.buffers(), strict=True):
            torch.testing.assert_close(q, p, **close)
        with torch.no_grad():
            torch.testing.assert_close(new(x), old(x), **close)


def test_the_python_part_runs_from_a_string_and_equals_the_model(nested):
    compare(load_source(nested.source, "nested_new"), "cpu", 1e-5)


def test_the_file_is_the_source_word_for_word_then_what_harnesses_ask_for(nested):
    assert nested.source.startswith(MODEL.rstrip())
    generated = nested.source[len(MODEL.rstrip()) :]
    for word in (*exporting.REFUSED, r"__file__", r"from __future__"):
        assert not re.search(word, generated), word
    for word in ("load_inline", "__global__", "fused_gemm_scale_bn_", "class ModelNew(Model)"):
        assert word in generated
    assert nested.path.read_text() == nested.source


def test_a_model_without_a_chain_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "none.py"
    path.write_text(MODEL.replace("nn.BatchNorm1d(24)", "nn.LayerNorm(24)").replace("nn.BatchNorm1d(16)", "nn.ReLU()"))
    with pytest.raises(GemmNormValueError, match="chain"):
        exporting.export(path, tmp_path / "new.py")
    assert not (tmp_path / "new.py").exists()


def test_a_strategy_that_cannot_be_printed_says_so(tmp_path):
    with pytest.raises(GemmNormValueError, match="one_kernel"):
        exporting.export(EXAMPLES / "small.py", tmp_path / "new.py", strategy="one_kernel", target="sm_90")


@pytest.mark.parametrize("strategy", ["cublas_bn", "cublas_folded_bn"])
@pytest.mark.parametrize("name", ["kb33", "kb39"])
def test_the_committed_files_are_what_is_generated(name, strategy):
    committed = EXAMPLES / "model_new" / f"{name}_{strategy}.py"
    assert committed.read_text() == exporting.export(EXAMPLES / f"{name}.py", None, strategy=strategy).source


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_the_cuda_part_compiles(nested):
    assert exporting.compile_check(nested.path, "sm_90") is None
    assert exporting.compile_check(_broken(nested.path), "sm_90")


def _broken(path: Path) -> Path:
    broken = path.with_name("broken.py")
    broken.write_text(path.read_text().replace("const int64_t batch = x.size(0);", "const int64_t batch = y.size(0);"))
    return broken


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["nested", "small", "kb33_cublas_bn", "kb33_cublas_folded_bn", "kb39_cublas_folded_bn"]
)
def test_built_by_load_inline_and_equal(nested, name, tmp_path):
    """Every batch size runs the kernels; float32 without TF32, so that 1e-4 is asked of the founding files too."""
    if name == "nested":
        source = nested.source
    elif name == "small":
        source = exporting.export(EXAMPLES / "small.py", None).source
    else:
        source = (EXAMPLES / "model_new" / f"{name}.py").read_text()
    module = load_source(source, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert module._kernels_for(torch.device("cuda")) is not None
    calls = []
    original = module._FusedChain.apply
    module._FusedChain.apply = lambda *args: (calls.append(1), original(*args))[1]
    for batch in (40, 129, 1000):
        # Gradients are compared in the module's own scale, where sums over the batch reach thousands.
        compare(module, "cuda", 2e-4 if name == "nested" else 5e-3, batch)
    assert calls
    assert isinstance(module.ModelNew(*module.get_init_inputs()), nn.Module)
