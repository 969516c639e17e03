"""The activations that can follow the normalisation: one row each (docs/howto.md: how to add one).

A row says how the activation is recognised (module class, functions, tensor methods), how PyTorch computes it and its
derivative (`reference.py` uses these), and what the CUDA kernels compute, as two C++ expressions in the float `z`.
Elsewhere an activation is its canonical string: the name, with its parameters in parentheses if it has any, for
instance `"relu"` or `"hardtanh(0.0,6.0)"`.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import GemmNormValueError

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """One activation function φ(z), with parameters bound.

    Attributes:
        name: the canonical name, without parameters.
        module: the `nn.Module` class that computes it.
        calls: functions and tensor-method names that compute it (their in-place forms too).
        forward: (z [any shape], *parameters) → φ(z).
        backward: (grad, z, *parameters) → grad · φ'(z).
        value: C++ expression of φ(z), with the functions of `kernels/common/functions.cuh`; `{0}`, `{1}` stand for the
            parameters as float literals.
        gradient: C++ expression of g·φ'(z), in the floats `g` and `z`. Both let NaN through, as PyTorch does.
        parameters: (name, default) in the order of the canonical string; the names are those of the module's
            attributes and of the function's arguments.
        matches: further keyword arguments that a module or call must carry to be this activation (GELU's form).
    """

    name: str
    module: type[nn.Module]
    calls: tuple[Any, ...]
    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    value: str
    gradient: str
    parameters: tuple[tuple[str, float], ...] = ()
    matches: tuple[tuple[str, Any], ...] = ()


# 1 + tanh(u) is twice sigmoid(2u), which has digits left where tanh is near -1.
_GELU_TANH = "gemmnorm::sigmoid(1.5957691216057308f * (z + 0.044715f * z * z * z))"

TABLE: tuple[Activation, ...] = (
    Activation(
        "relu",
        nn.ReLU,
        (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"),
        torch.relu,
        lambda g, z: aten.threshold_backward(g, z, 0),
        "gemmnorm::larger(z, 0.0f)",
        "z <= 0.0f ? 0.0f : g",
    ),
    Activation(
        "gelu",
        nn.GELU,
        (F.gelu,),
        F.gelu,
        lambda g, z: aten.gelu_backward(g, z, approximate="none"),
        "z * gemmnorm::normal_distribution(z)",
        "g * (gemmnorm::normal_distribution(z) + 0.3989422804014327f * z * gemmnorm::bell(z))",
        matches=(("approximate", "none"),),
    ),
    Activation(
        "gelu_tanh",
        nn.GELU,
        (F.gelu,),
        lambda z: F.gelu(z, approximate="tanh"),
        lambda g, z: aten.gelu_backward(g, z, approximate="tanh"),
        f"z * {_GELU_TANH}",
        f"g * {_GELU_TANH} * (1.0f + z * (1.0f - {_GELU_TANH}) * 1.5957691216057308f * (1.0f + 0.134145f * z * z))",
        matches=(("approximate", "tanh"),),
    ),
    Activation(
        "silu",
        nn.SiLU,
        (F.silu,),
        F.silu,
        lambda g, z: aten.silu_backward(g, z),
        "z * gemmnorm::sigmoid(z)",
        "g * gemmnorm::sigmoid(z) * (1.0f + z * (1.0f - gemmnorm::sigmoid(z)))",
    ),
    Activation(
        "leaky_relu",
        nn.LeakyReLU,
        (F.leaky_relu, F.leaky_relu_),
        F.leaky_relu,
        lambda g, z, slope: aten.leaky_relu_backward(g, z, slope, False),
        "z > 0.0f ? z : z * {0}",
        "z > 0.0f ? g : g * {0}",
        parameters=(("negative_slope", 0.01),),
    ),
    Activation(
        "tanh",
        nn.Tanh,
        (F.tanh, torch.tanh, torch.tanh_, "tanh", "tanh_"),
        torch.tanh,
        lambda g, z: aten.tanh_backward(g, torch.tanh(z)),
        "tanhf(z)",
        "g * gemmnorm::tanh_derivative(z)",
    ),
    Activation(
        "sigmoid",
        nn.Sigmoid,
        (F.sigmoid, torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"),
        torch.sigmoid,
        lambda g, z: aten.sigmoid_backward(g, torch.sigmoid(z)),
        "gemmnorm::sigmoid(z)",
        "g * gemmnorm::sigmoid(z) * (1.0f - gemmnorm::sigmoid(z))",
    ),
    Activation(
        "hardtanh",
        nn.Hardtanh,
        (F.hardtanh, F.hardtanh_),
        F.hardtanh,
        lambda g, z, low, high: aten.hardtanh_backward(g, z, low, high),
        "z < {0} ? {0} : (z > {1} ? {1} : z)",
        "(z <= {0} || z >= {1}) ? 0.0f : g",
        parameters=(("min_val", -1.0), ("max_val", 1.0)),
    ),
)
_BY_NAME = {row.name: row for row in TABLE}
RELU6 = "hardtanh(0.0,6.0)"
_SPELLINGS = {"relu6": RELU6}  # other names of a row with its parameters
_CANONICAL = re.compile(r"(\w+)(?:\(([^()]*)\))?")


def _canonical(row: Activation, values: tuple[float, ...]) -> str:
    return row.name + ("({})".format(",".join(repr(float(v)) for v in values)) if values else "")


def _parse(activation: str) -> tuple[Activation, tuple[float, ...]]:
    """The table's row and the parameter values of a string such as `"leaky_relu(0.2)"`; defaults may be left out.

    Raises:
        GemmNormValueError: the name is unknown, or the number of parameters is wrong.
    """
    if not isinstance(activation, str):
        kind = type(activation).__name__
        raise GemmNormValueError(f'activation: expected its name, such as "relu" or "leaky_relu(0.2)"; got a {kind}')
    plain = activation.replace(" ", "")
    match = _CANONICAL.fullmatch(_SPELLINGS.get(plain, plain))
    row = _BY_NAME.get(match.group(1)) if match else None
    if match is None or row is None:
        known = ", ".join((*_BY_NAME, *_SPELLINGS))
        raise GemmNormValueError(f"activation: expected None or one of {known}; got {activation!r}")
    if match.group(2) is None:
        return row, tuple(default for _, default in row.parameters)
    try:
        values = tuple(float(v) for v in match.group(2).split(",") if v)
    except ValueError:
        values = ()
    if len(values) != len(row.parameters):
        names = ", ".join(name for name, _ in row.parameters) or "no parameters"
        raise GemmNormValueError(f"activation: {row.name} takes {names}; got {activation!r}")
    return row, values


_parsed = functools.lru_cache(maxsize=256)(_parse)


def parse(activation: str) -> tuple[Activation, tuple[float, ...]]:
    """`_parse`, which is remembered for texts."""
    return _parsed(activation) if isinstance(activation, str) else _parse(activation)


def _traceable(activation: str) -> tuple[Activation, tuple[float, ...]]:
    """`parse`; Dynamo warns of a cached function that it would trace."""
    return _parse(activation) if torch.compiler.is_compiling() else parse(activation)


def canonical(activation: str | None) -> str | None:
    """`activation` with its parameters spelled out, so that equal functions have equal strings; None stays None."""
    return None if activation is None else _canonical(*parse(activation))


def forward(z: Tensor, activation: str | None) -> Tensor:
    """φ(z), elementwise, in plain PyTorch; z itself for None."""
    if activation is None:
        return z
    row, values = _traceable(activation)
    return row.forward(z, *values)


def backward(grad: Tensor, z: Tensor, activation: str | None) -> Tensor:
    """grad · φ'(z), elementwise, in plain PyTorch; grad itself for None."""
    if activation is None:
        return grad
    row, values = _traceable(activation)
    return row.backward(grad, z, *values)


def python_source(activation: str) -> str:
    """A Python expression of φ as a function, by the first of the row's functions that PyTorch names publicly."""
    row, values = parse(activation)
    spaces = ((torch, "torch"), (F, "torch.nn.functional"))
    plain = [call.__name__ for call in row.calls if callable(call) and not call.__name__.endswith("_")]
    name = next(
        f"{prefix}.{name}" for space, prefix in spaces for name in plain if getattr(space, name, None) in row.calls
    )
    arguments = ["y", *map(_number, values), *(f"{key}={value!r}" for key, value in row.matches)]
    return name if len(arguments) == 1 else f"lambda y: {name}({', '.join(arguments)})"


def module_source(activation: str | None) -> str:
    """A Python expression of the classes of modules that compute φ, and of the values of their attributes; or None."""
    if activation is None:
        return "None"
    row, values = parse(activation)
    classes = [row.module, *([nn.ReLU6] if canonical(activation) == RELU6 else [])]
    attributes = [*row.matches, *((name, value) for (name, _), value in zip(row.parameters, values, strict=True))]
    found = (f"({name!r}, {_number(value)})," for name, value in attributes)
    return f"(({', '.join(f'torch.nn.{c.__name__}' for c in classes)},), ({' '.join(found)}))"


def _number(value: Any) -> str:
    """`value` as Python source; what is not finite by PyTorch's names."""
    finite = not isinstance(value, float) or math.isfinite(value)
    return repr(value) if finite else repr(value).replace("inf", "torch.inf").replace("nan", "torch.nan")


def cuda_struct(activation: str | None) -> str:
    """C++ source of `struct Activation` with `value(z)` and `gradient(g, z)`, for the kernels."""
    value, gradient = "z", "g"
    if activation is not None:
        row, values = parse(activation)
        literals = [f"({v!r}f)" if v == v and abs(v) != float("inf") else _special(v) for v in values]
        value, gradient = row.value.format(*literals), row.gradient.format(*literals)
    return (
        "struct Activation {\n"
        f"  static constexpr bool identity = {'true' if activation is None else 'false'};\n"
        f"  static __device__ __forceinline__ float value(float z) {{ return {value}; }}\n"
        f"  static __device__ __forceinline__ float gradient(float g, float z) {{ return {gradient}; }}\n"
        "};\n"
    )


def _special(value: float) -> str:
    bits = "0x7f800000" if value > 0 else "0xff800000" if value < 0 else "0x7fc00000"
    return f"__int_as_float({bits})"


def from_module(module: nn.Module) -> str | None:
    """The canonical string of an activation module, or None when it is not one of the table (exact types only)."""
    if type(module) is nn.ReLU6:
        return RELU6
    for row in TABLE:
        if type(module) is row.module and all(getattr(module, k) == v for k, v in row.matches):
            return _canonical(row, tuple(getattr(module, name) for name, _ in row.parameters))
    return None


def to_module(activation: str) -> nn.Module:
    """The module that computes `activation`."""
    row, values = parse(activation)
    names = (name for name, _ in row.parameters)
    return row.module(**dict(row.matches), **dict(zip(names, values, strict=True)))


def from_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The canonical string of a call `target(z, …)` (a function or a tensor method's name), or None.

    `args` starts with z, as in a `torch.fx` node. A parameter that is not a plain number gives None.
    """
    if target is F.relu6:
        return "hardtanh(0.0,6.0)"
    for row in TABLE:
        if target not in row.calls:
            continue
        bound = _bind(target, args, kwargs, row)
        if any(bound.get(k, "none") != v for k, v in row.matches):
            continue
        values = tuple(bound.get(name, default) for name, default in row.parameters)
        if all(isinstance(v, (int, float)) for v in values):
            return _canonical(row, values)
    return None


def _bind(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], row: Activation) -> dict[str, Any]:
    """Arguments by name. Builtins without a signature take their parameters in the order of the table."""
    try:
        return dict(inspect.signature(target).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        names = [name for name, _ in row.parameters]
        return {**dict(zip(names, args[1:], strict=False)), **kwargs}
