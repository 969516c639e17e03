"""The exported file: its text, its Python part on the CPU, its CUDA part through nvcc where there is one."""

from __future__ import annotations

import re
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import stir, worst
from torch import nn

from gemmnorm import reference
from gemmnorm.errors import GemmNormError, GemmNormRuntimeError, GemmNormValueError
from gemmnorm.plan import STRATEGIES, Launch, Problem, chip_for, make_plan
from gemmnorm.tools import cpp, export, host_function
from gemmnorm.tools.export import compile_check
from gemmnorm.tools.kernel_text import Kernels
from gemmnorm.tools.model_file import ModelFileError, load_source

EXAMPLES = Path(__file__).parents[1] / "examples"

# Several chains in several modules: a number and tensors as scales, activations as modules and as functions, names that
# the generated forward has to keep or to import.
NESTED = '''\
"""A model file."""
import torch
import torch.nn.functional as F
from torch import nn


@torch.fx.wrap
def doubled(x):
    return x * 2


class Block(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.gain = nn.Parameter(torch.randn(()))
        self.bn = nn.BatchNorm1d(out)

    def forward(self, x):
        return F.leaky_relu(self.bn(self.linear(x) * self.gain), 0.2)


class Model(nn.Module):
    def __init__(self, width, hidden=24):
        super().__init__()
        self.block = Block(width, hidden)
        self.again = Block(hidden, hidden)
        self.linear = nn.Linear(hidden, hidden)
        self.norm = nn.BatchNorm1d(hidden, affine=False, momentum=None)
        self.act = nn.LeakyReLU(0.3)
        self.head = nn.Sequential(nn.Linear(hidden, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        x = self.again(self.block(x))
        x = self.act(self.norm(self.linear(F.dropout(doubled(x), 0.0, self.training)) * 0.5))
        return self.head(x)


def get_inputs():
    return [torch.randn(40, 32)]


def get_init_inputs():
    return [32]
'''

SINGLE = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_features, out_features, scale_shape):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features, dtype=torch.DTYPE)
        self.scale = nn.Parameter(torch.randn(scale_shape, dtype=torch.DTYPE))
        self.bn = nn.BatchNorm1d(out_features, dtype=torch.DTYPE)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)


def get_inputs():
    return [torch.randn(96, 64, dtype=torch.DTYPE)]


def get_init_inputs():
    return [64, 48, SHAPE]
"""


def write(folder: Path, text: str, name: str = "model.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def single(folder: Path, dtype: str = "float32", shape: str = "(48,)") -> Path:
    return write(folder, SINGLE.replace("DTYPE", dtype).replace("SHAPE", shape))


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    return export.export(write(folder, NESTED), folder / "model_new.py", target="sm_80")


def same(new: nn.Module, old: nn.Module, x: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Output, gradients and buffers of both, in training and in evaluation."""
    for training in (True, False):
        new.train(training), old.train(training)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [model(value) for model, value in zip((new, old), inputs, strict=True)]
        grad = torch.randn_like(outputs[1])
        for output in outputs:
            output.backward(grad)
        pairs = [("y", *outputs), ("x", inputs[0].grad, inputs[1].grad)]
        pairs += [(n, p.grad, q.grad) for (n, p), q in zip(new.named_parameters(), old.parameters(), strict=True)]
        pairs += [(n, b, c) for (n, b), c in zip(new.named_buffers(), old.buffers(), strict=True)]
        for name, got, expected in pairs:
            if got is None or expected is None:
                assert got is expected, name
                continue
            wrong = worst(got.detach(), expected.detach(), tolerance, tolerance * max(1.0, expected.abs().max().item()))
            assert wrong is None, f"{name}: {wrong}"
        new.zero_grad(), old.zero_grad()


def both(module: Any) -> tuple[Any, Any]:
    """(ModelNew, Model) drawn from one seed."""
    found = []
    for cls in (module.ModelNew, module.Model):
        torch.manual_seed(5)
        found.append(cls(*module.get_init_inputs()))
    return found[0], found[1]


# --- the text --------------------------------------------------------------------------------------------------------


def generated(result: Any, original: str) -> str:
    assert result.source.startswith(original)
    return result.source[len(original) :]


def test_the_source_stands_first_word_for_word_and_the_rest_is_what_harnesses_accept(nested):
    text = generated(nested, NESTED)
    for word in (r"\btry\s*:", "except", r"\bpass\b", "__file__", "from __future__", "import threading", r"\.half\("):
        assert not re.search(word, text), word
    assert not re.search(r"torch\.cuda\.[sS]tream|class\s+\w+.*\((torch\.)?Tensor\)|_make_subclass", text)
    for word in ("load_inline", "__global__", "threadIdx.", "fused_gemm_scale_bn_", "class ModelNew(Model):"):
        assert word in text
    assert text.isascii()
    assert nested.path.read_text() == nested.source
    assert not list(nested.path.parent.glob(".*")), "a temporary file was left"


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "reference"])
def test_every_strategy_is_written_in_ascii_and_with_accepted_words(tmp_path, strategy):
    path = single(tmp_path, "bfloat16")
    result = export.export(path, None, target="sm_90", strategy=strategy)
    assert result.strategy == strategy and generated(result, path.read_text()).isascii()
    assert strategy in {plan.strategy for plan in result.plans}


def test_a_source_in_another_encoding_and_without_a_last_newline_is_kept(tmp_path):
    text = "# -*- coding: latin-1 -*-\n# é\n" + SINGLE.replace("DTYPE", "float32").replace("SHAPE", "()").rstrip()
    path = tmp_path / "model.py"
    path.write_bytes(text.encode("latin-1"))
    result = export.export(path, tmp_path / "new.py", target="sm_80")
    assert result.path.read_bytes().startswith(text.encode("latin-1") + b"\n")


def test_the_kernels_are_those_of_the_plans(nested):
    text = nested.source
    launched = {launch.entry for plan in nested.plans for launch in plan.launches}
    assert all(f" {entry}(" in text for entry in launched)
    names = re.findall(r"__launch_bounds__\(\d+, \d+\) (\w+)\(", text)
    assert len(names) == len(set(names))
    called = set(re.findall(r"launch\((\w+),", text))
    assert called == set(names)


def test_one_entry_for_equal_launches_and_one_name_for_each():
    kernels = Kernels()
    small, other = (Problem(64, 32, 32, chip=chip_for(80), activation=name) for name in (None, "relu"))
    first, second = (make_plan(problem, "cublas_bn").launches for problem in (small, other))
    assert [kernels.name(launch, small) for launch in first] == [kernels.name(launch, small) for launch in first]
    assert kernels.name(first[0], small) == kernels.name(second[0], other)
    assert kernels.name(first[-1], small) != kernels.name(second[-1], other)
    assert "struct Identity {" in kernels.text() and "struct Relu {" in kernels.text()


def test_what_the_printer_does_not_know_is_an_error_that_names_it(monkeypatch):
    @dataclass(frozen=True)
    class Newer(Launch):
        cluster: int = 1

    monkeypatch.setitem(host_function._KNOWN, Newer, host_function._KNOWN[Launch])
    plan = make_plan(Problem(64, 32, 32, chip=chip_for(80)), "cublas_bn")
    launch = plan.launches[0]
    fields = {name: getattr(launch, name) for name in Launch.__dataclass_fields__}
    host_function.check_known(Newer(**fields))
    with pytest.raises(GemmNormRuntimeError, match="Newer has cluster=2"):
        host_function.check_known(Newer(**fields, cluster=2))
    body = host_function.Body(plan, Kernels(), ())
    with pytest.raises(GemmNormRuntimeError, match="unheard_of"):
        body._argument(replace(launch, arguments=("unheard_of",)), "unheard_of")


def test_a_plan_for_few_rows_hands_larger_batches_on():
    problem = Problem(64, 512, 512, "bfloat16", "bfloat16", "bfloat16", "bfloat16", "native", chip=chip_for(90))
    site = cpp.plan_site(problem, "one_kernel")
    assert [len(site.forward[True, save]) for save in (True, False)] == [2, 2]
    assert "if (batch > 128)\n    return forward_training_large_batch(x, " in cpp.cuda_text([site]).host


# --- the Python part on the CPU --------------------------------------------------------------------------------------


def test_the_python_part_runs_from_a_string_and_equals_the_model(nested):
    module = load_source(nested.source, "nested_new")
    new, old = both(module)
    assert isinstance(new, module.Model) and type(new.block) is module.FusedBlock
    for (name, a), (other, b) in zip(new.state_dict().items(), old.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    new.load_state_dict(old.state_dict())
    same(new, old, torch.randn(40, 32))


def test_another_construction_than_the_exported_one(nested):
    module = load_source(nested.source, "nested_new")
    torch.manual_seed(1)
    new = module.ModelNew(8, hidden=12)
    old = module.Model(8, hidden=12)
    old.load_state_dict(new.state_dict())
    same(new, old, torch.randn(20, 8))
    for model in (new, old):
        model.act, model.extra = nn.Tanh(), nn.ReLU()
    same(new, old, torch.randn(20, 8))


def test_the_constructor_looks_the_same(nested):
    import inspect

    module = load_source(nested.source, "nested_new")
    assert inspect.signature(module.ModelNew) == inspect.signature(module.Model)


def test_one_row_in_training_and_an_empty_batch_are_pytorchs_own(nested):
    module = load_source(nested.source, "nested_new")
    new, _ = both(module)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        new(torch.randn(1, 32))
    assert new.eval()(torch.randn(0, 32)).shape == (0, 3)


class KernelsInPyTorch(types.SimpleNamespace):
    """What the compiled extension offers, in plain PyTorch and with the parameters in the order of the C++ functions."""

    def __init__(self, activation: str | None, features: int) -> None:
        super().__init__()
        self.activation, self.features, self.calls = activation, features, []

    def __getattr__(self, name: str) -> Any:
        direction, mode = name.split("_")[:2]
        return lambda *args: getattr(self, f"run_{direction}")(mode == "training", *args)

    def run_forward(self, training, x, weight, bias, scale, number, mean, var, count, gamma, beta, momentum, eps, save):
        self.calls.append(("forward", training, save))
        scale = number if scale is None else scale
        found = reference.forward(
            x, weight, bias, scale, mean, var, count, gamma, beta, training, momentum, eps, self.activation, save
        )
        return list(found) if save else [found[0]]

    def run_backward(
        self, training, grad, x, weight, bias, scale, number, gamma, beta, product, mean, rstd, eps, needs
    ):
        self.calls.append(("backward", training))
        factor = number if scale is None else scale
        found = list(
            reference.backward(
                grad, x, weight, bias, factor, gamma, beta, product, mean, rstd, training, eps, self.activation, needs
            )
        )
        if found[3] is not None and found[3].numel() == 1:  # the kernels leave the sum over features to Python
            share = torch.zeros(self.features)
            share[0] = found[3].sum()
            found[3] = share
        return [g if need else None for g, need in zip(found, needs, strict=True)]


@pytest.mark.parametrize("shape", ["(48,)", "(1, 48)", "(1,)", "()"])
def test_the_autograd_function_hands_everything_to_the_right_place(tmp_path, monkeypatch, shape):
    result = export.export(single(tmp_path, shape=shape), None, target="sm_80")
    module = load_source(result.source, "single_new")
    kernels = KernelsInPyTorch(None, 48)
    monkeypatch.setattr(module, "kernels_on", lambda device: kernels)
    monkeypatch.setattr(module.FusedChain, "serves", lambda *args: True)
    new, old = both(module)
    stir(new), stir(old)
    same(new, old, torch.randn(30, 64), 1e-4)
    assert kernels.calls == [("forward", t, True) if d else ("backward", t) for t in (True, False) for d in (1, 0)]
    for model in (new, old):
        model.bn.momentum = None
        model.gemm.weight.requires_grad_(False)
    same(new.train(), old.train(), torch.randn(30, 64), 1e-4)
    kernels.calls.clear()
    with torch.no_grad():
        new(torch.randn(30, 64))
    assert kernels.calls == [("forward", False, False)]
    x = torch.randn(30, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(new.train()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_what_the_kernels_were_generated_for(nested, monkeypatch):
    """Each reason to run the modules instead; on the CPU no warning, for what is a pity one."""
    module = load_source(nested.source, "nested_new")
    new, _ = both(module)
    chain, x = module.fused_gemm_bn_relu, torch.randn(8, 24)
    linear, bn, act = new.head[0], new.head[1], new.head[2]
    assert not chain.serves(x, linear, bn, None, act)
    there = types.SimpleNamespace(
        device=torch.device("cuda", 0), shape=x.shape, dtype=x.dtype, dim=x.dim, is_contiguous=x.is_contiguous
    )
    reasons = chain.mismatch(there, linear, bn, None)
    assert reasons == "a tensor is on another device than the input, or of a subclass"
    there.dtype = torch.bfloat16
    assert "generated for torch.float32, not for torch.bfloat16" in chain.mismatch(there, linear, bn, None)
    there.shape = (8, 23)
    assert "Linear(24, 16)" in chain.mismatch(there, linear, bn, None)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda: True)
    assert "autocast" in chain.mismatch(there, linear, bn, None)
    with pytest.warns(UserWarning, match="plain PyTorch operations: the kernels were not generated for autocast") as got:
        assert not chain.serves(there, linear, bn, None, act)
        assert not chain.serves(there, linear, bn, None, act)
    assert len(got) == 1
    for change in ({"linear": nn.Identity()}, {"act": nn.Tanh()}, {"bn": nn.SyncBatchNorm(16)}):
        given = {"linear": linear, "bn": bn, "act": act, **change}
        assert not chain.serves(there, given["linear"], given["bn"], None, given["act"])
    handle = linear.register_forward_hook(lambda *_: None)
    assert not chain.serves(there, linear, bn, None, act)
    handle.remove()


def test_no_toolkit_and_another_gpu_are_reasons(nested, monkeypatch):
    import torch.utils.cpp_extension

    module = load_source(nested.source, "nested_new")
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    assert "CUDA_HOME" in module.why_not_here(device)
    module.why_not_here.cache_clear()
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", "/somewhere")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "capability 8.0 or newer, and this GPU has 7.5" in module.why_not_here(device)
    module.why_not_here.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    assert module.why_not_here(device) is None


def test_a_file_for_hopper_asks_for_hopper_and_for_tf32(tmp_path, monkeypatch):
    module = load_source(
        export.export(single(tmp_path), None, target="sm_90", strategy="one_kernel").source, "hopper_new"
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/somewhere")
    for capability, served in (((8, 0), False), ((9, 0), True), ((10, 0), False)):
        module.why_not_here.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, c=capability: c)
        assert (module.why_not_here(torch.device("cuda", 0)) is None) == served
    new, _ = both(module)
    x = types.SimpleNamespace(device=torch.device("cuda", 0), shape=(96, 64), dtype=torch.float32)
    assert "TF32" in module.fused_gemm_scale_bn.mismatch(x, new.gemm, new.bn, new.scale)


# --- what cannot be written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("nn.BatchNorm1d(out_features, dtype=torch.float32)", "nn.LayerNorm(out_features)"), "no Linear → BatchNorm1d"),
        (("self.gemm(x) * self.scale", "self.gemm(x) + self.scale"), "add stands between"),
        (("torch.float32", "torch.float64"), "gemm → × scale → bn: .*float64"),
        (("randn(scale_shape, dtype=torch.float32)", "randn(scale_shape, dtype=torch.float16)"), "and float16"),
        (("import torch\n", "import torch\nFusedChain = 1\n"), "defines FusedChain"),
        (("return self.bn", "import functools; return self.bn"), None),
    ],
)
def test_a_model_that_cannot_be_written_says_why(tmp_path, change, message):
    text = SINGLE.replace("DTYPE", "float32").replace("SHAPE", "(48,)")
    assert change[0] in text
    path = write(tmp_path, text.replace(*change))
    if message is None:
        assert export.export(path, None, target="sm_80").source
        return
    with pytest.raises(GemmNormValueError, match=message):
        export.export(path, tmp_path / "new.py", target="sm_80")
    assert [p.name for p in tmp_path.iterdir()] == ["model.py"]


def test_bad_arguments(tmp_path):
    path = single(tmp_path)
    with pytest.raises(GemmNormValueError, match="target: expected sm_80"):
        export.export(path, None, target="sm_75")
    with pytest.raises(GemmNormValueError, match="strategy: expected"):
        export.export(path, None, strategy="fastest")
    with pytest.raises(GemmNormValueError, match="gemm → × scale → bn: one_kernel: .*Hopper"):
        export.export(path, None, strategy="one_kernel", target="sm_80")
    with pytest.raises(GemmNormValueError, match="no kernels to write out"):
        export.export(path, None, strategy="reference", target="sm_80")
    with pytest.raises(ModelFileError):
        export.export(tmp_path / "missing.py", None)
    with pytest.raises(OSError):
        export.export(path, tmp_path / "no such folder" / "new.py", target="sm_80")


def test_a_model_that_meta_cannot_construct_is_constructed_for_real(tmp_path):
    text = SINGLE.replace("DTYPE", "float32").replace("SHAPE", "(48,)")
    extra = "        self.size = float(torch.ones(3).sum())\n        assert self.size == 3\n\n    def forward"
    path = write(tmp_path, text.replace("\n    def forward", extra, 1))
    result = export.export(path, None, target="sm_80")
    assert {plan.problem.batch for plan in result.plans} == {96}


# --- the CUDA part ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(export.find_nvcc() is None, reason=export.NO_NVCC)
def test_the_cuda_part_compiles(nested):
    assert compile_check(nested.path, "sm_80") is None


@pytest.mark.skipif(export.find_nvcc() is None, reason=export.NO_NVCC)
def test_the_cuda_part_compiles_for_hopper(tmp_path):
    path = single(tmp_path, "bfloat16")
    result = export.export(path, tmp_path / "new.py", target="sm_90", strategy="one_kernel")
    assert compile_check(result.path, "sm_90") is None


def test_what_does_not_compile_gives_the_log(tmp_path, monkeypatch):
    parts = "".join(f'{name} = r"""\n{text}\n"""\n' for name, text in (
        ("CUDA_DECLARATIONS", ""), ("CUDA_KERNELS", "int broken = missing;"), ("CUDA_HOST", ""),
    ))  # fmt: skip
    path = write(tmp_path, parts)
    if export.find_nvcc() is not None:
        assert "missing" in compile_check(path, "sm_80")
        assert "no CUDA code" in compile_check(write(tmp_path, "x = 1\n"), "sm_80")
    monkeypatch.setattr(export, "find_nvcc", lambda: None)
    assert compile_check(path, "sm_80") == export.NO_NVCC


def test_errors_are_gemmnorms():
    assert issubclass(GemmNormValueError, GemmNormError)
