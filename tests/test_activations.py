"""The table of activations: names, recognition, values, derivatives and the C++ expressions."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from emulator import COMPILER, compiled_function
from torch import nn

from gemmnorm import GemmNormError, activations

MODULES = {
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "leaky_relu(0.2)": nn.LeakyReLU(0.2),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "hardtanh(-0.5,0.75)": nn.Hardtanh(-0.5, 0.75),
    "hardtanh(0.0,6.0)": nn.ReLU6(),
}
# What kernels/common/functions.cuh computes, in float64.
FUNCTIONS = {
    "sigmoid": lambda v: 1 / (1 + math.exp(min(-v, 700.0))),
    "tanh_derivative": lambda v: 1 / math.cosh(v) ** 2,
    "bell": lambda v: math.exp(-v * v / 2),
    "normal_distribution": lambda v: math.erfc(-v / math.sqrt(2)) / 2,
}
POINTS = torch.tensor([-30.0, -3.0, -0.5, -1e-3, 0.0, 1e-3, 0.3, 0.75, 2.0, 6.0, 30.0, math.inf, -math.inf])


def test_every_row_is_covered_here():
    assert {activations.parse(name)[0].name for name in MODULES} == {row.name for row in activations.TABLE}


@pytest.mark.parametrize("name", MODULES)
def test_recognised_and_computed_as_pytorch_does(name):
    module = MODULES[name]
    assert activations.from_module(module) == name
    z = torch.cat([POINTS, torch.tensor([math.nan])]).double().requires_grad_()
    expected = module(z)
    assert torch.allclose(activations.forward(z, name), expected, equal_nan=True)
    (gradient,) = torch.autograd.grad(expected.sum(), z)
    got = activations.backward(torch.ones_like(z), z.detach(), name)
    assert torch.allclose(got, gradient, equal_nan=True)


@pytest.mark.parametrize("name", MODULES)
def test_the_expressions_for_the_kernels(name):
    """The C++ text, translated to Python, against PyTorch: a slip in a constant shows here, without a GPU."""
    text = activations.cuda_struct(name)
    assert "identity = false" in text
    value, gradient = (_translated(text, which) for which in ("value", "gradient"))
    module = MODULES[name]
    for z in [p.item() for p in POINTS if p.isfinite()]:
        at = torch.tensor(z, dtype=torch.float64, requires_grad=True)
        expected = module(at)
        (slope,) = torch.autograd.grad(expected, at)
        assert value(z) == pytest.approx(expected.item(), rel=1e-5, abs=1e-6), z
        if z not in (0.0, -0.5, 0.75, 6.0):  # a kink has no derivative; PyTorch's choice there is tested on the GPU
            assert gradient(z, -3.0) == pytest.approx(-3.0 * slope.item(), rel=1e-4, abs=1e-5), z


@pytest.mark.parametrize("name", MODULES)
def test_the_function_that_an_exported_file_calls(name):
    function = eval(activations.python_source(name), {"torch": torch})
    z = torch.cat([POINTS, torch.tensor([math.nan])])
    assert torch.allclose(function(z), MODULES[name](z), equal_nan=True)


def test_a_function_with_infinite_parameters():
    function = eval(activations.python_source("hardtanh(0.0,inf)"), {"torch": torch})
    assert torch.equal(function(POINTS), torch.relu(POINTS))


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_kernels(name):
    """As the host compiles the kernels' source: relative errors of float32, and what is beyond its range."""
    function = compiled_function(name)
    for z in torch.linspace(-9, 9, 1801).tolist():
        assert function(z) == pytest.approx(FUNCTIONS[name](z), rel=1e-5, abs=1e-12), z
        if abs(z) < 2:
            assert function(z) == pytest.approx(FUNCTIONS[name](z), rel=5e-7), z
    assert math.isnan(function(math.nan))
    limits = {z: function(z) for z in (-math.inf, -1e20, -200.0, 200.0, 1e20, math.inf)}
    rising = name in ("sigmoid", "normal_distribution")
    assert all(limit == (1.0 if rising and z > 0 else 0.0) for z, limit in limits.items())


def _translated(text: str, which: str):
    """The body of `float which(float g, float z) { return …; }` as a Python function of z and g."""
    body = re.search(rf"float {which}\((?:float g, )?float z\) {{ return (.*?); }}", text).group(1)
    body = _conditional(re.sub(r"(?<=[0-9.])f\b", "", body)).replace("||", " or ").replace("gemmnorm::", "")
    names = {**FUNCTIONS, "tanhf": math.tanh, "fabsf": abs, "larger": max}
    return lambda z, g=1.0: eval(body, {"__builtins__": {}}, {**names, "z": z, "g": g})


def _conditional(text: str) -> str:
    """C's `a ? b : c` as Python's `(b if a else c)`, inside parentheses too."""
    question, colon = _outside(text, "?"), _outside(text, ":")
    if question >= 0:
        condition, yes, no = text[:question], text[question + 1 : colon], text[colon + 1 :]
        return f"(({_conditional(yes)}) if ({_conditional(condition)}) else ({_conditional(no)}))"
    opening = text.find("(")
    if opening < 0:
        return text
    depth, closing = 0, opening
    for closing in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[closing], 0)
        if depth == 0:
            break
    return f"{text[:opening]}({_conditional(text[opening + 1 : closing])}){_conditional(text[closing + 1 :])}"


def _outside(text: str, letter: str) -> int:
    """Where `letter` stands outside all parentheses, or -1."""
    depth = 0
    for i, found in enumerate(text):
        depth += {"(": 1, ")": -1}.get(found, 0)
        if found == letter and depth == 0:
            return i
    return -1


def test_canonical_strings():
    assert activations.canonical(None) is None
    assert activations.canonical("leaky_relu") == "leaky_relu(0.01)"
    assert activations.canonical(" hardtanh( 0 , 6 ) ") == "hardtanh(0.0,6.0)"
    assert activations.canonical("relu") == "relu"
    assert activations.canonical("relu6") == activations.from_call(F.relu6, (object(),), {}) == "hardtanh(0.0,6.0)"


def test_a_module_in_place_of_a_name_is_refused_in_a_sentence():
    with pytest.raises(GemmNormError, match="expected its name"):
        activations.canonical(torch.nn.ReLU())


@pytest.mark.parametrize("name", ["swish", "relu(1)", "leaky_relu(a)", "hardtanh(1)", "relu; evil", ""])
def test_unknown_names_are_refused(name):
    with pytest.raises(GemmNormError) as caught:
        activations.canonical(name)
    assert isinstance(caught.value, ValueError)
    assert "activation" in str(caught.value)


def test_functions_and_methods():
    z = object()
    assert activations.from_call(F.relu, (z,), {}) == "relu"
    assert activations.from_call("relu_", (z,), {}) == "relu"
    assert activations.from_call(F.gelu, (z,), {"approximate": "tanh"}) == "gelu_tanh"
    assert activations.from_call(F.gelu, (z,), {}) == "gelu"
    assert activations.from_call(F.leaky_relu, (z, 0.3), {}) == "leaky_relu(0.3)"
    assert activations.from_call(F.hardtanh, (z,), {"max_val": 2.0}) == "hardtanh(-1.0,2.0)"
    assert activations.from_call(F.relu6, (z,), {}) == "hardtanh(0.0,6.0)"
    assert activations.from_call(torch.tanh, (z,), {}) == "tanh"
    assert activations.from_call(F.softmax, (z,), {}) is None
    assert activations.from_call(F.leaky_relu, (z, object()), {}) is None


def test_subclasses_are_not_taken_for_their_parents():
    class Mine(nn.ReLU):
        def forward(self, x):
            return x

    assert activations.from_module(Mine()) is None


def test_infinite_parameters_are_written_as_bits():
    assert "__int_as_float(0x7f800000)" in activations.cuda_struct("hardtanh(0.0,inf)")
