"""Finding `Linear → (× scale) → BatchNorm (→ activation)` in the recording of one `forward`.

Every BatchNorm that a Linear feeds ends up either as a `Chain` or as a `Refusal` with its reason; so do the near
misses, where a BatchNorm's input comes from a Linear through something that may not stand between.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from .. import activations
from ..children import (
    NORMS,
    POINTWISE,
    dimensions,
    is_as_pytorch_has_it,
    is_batch_norm,
    is_linear,
    is_plain_tensor,
    is_untouched,
    norm_class,
    product_class,
    why_not,
)
from .outside import is_of_users
from .tracing import Trace
from .values import Method
from .views import Layout, Source, asks_only_for_the_shape, step, viewed

_MULTIPLY = (operator.mul, torch.mul, torch.multiply, "mul", "multiply", "__mul__", "__rmul__")
_MULTIPLY_IN_PLACE = (operator.imul, "mul_", "multiply_")
_DIVIDE = (operator.truediv, torch.div, torch.divide, torch.true_divide, "div", "divide", "true_divide", "__truediv__")
_DIVIDE_IN_PLACE = (operator.itruediv, "div_", "divide_", "true_divide_")
_IN_PLACE_OPERATORS = {
    getattr(operator, name)
    for name in (
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"),
        *("ilshift", "irshift", "setitem", "delitem"),
    )
}
# Functions that write to an argument without saying so in their names: running statistics, rows longer than `max_norm`.
_WRITE_STATE = {F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm}
_RENORM = (F.embedding, F.embedding_bag)
_NEAR = 4  # so many operations between a Linear and a BatchNorm still make a near miss
_RANKS = range(2, 6)  # dimensions of x that a chain with views is tried for
# Dimensions of what a BatchNorm takes; of a SyncBatchNorm, those of what it was converted from.
_NORMALISED: dict[Any, tuple[tuple[int, ...], ...]] = {
    nn.BatchNorm1d: ((2, 3),), nn.BatchNorm2d: ((4,),), nn.SyncBatchNorm: ((2, 3), (4,)),
}  # fmt: skip
_PRODUCTS = (operator.matmul, torch.matmul, torch.mm, torch.addmm, torch.bmm, torch.einsum, "matmul", "mm", "addmm")
_FUNCTIONS = {F.linear: "nn.Linear", F.conv1d: "nn.Conv1d", F.conv2d: "nn.Conv2d"}
# What takes a value however it lies in memory, and gives the same; and what lays it out otherwise, for those after it.
_TAKES_ANY_STRIDES = {
    *("max", "amax", "min", "amin", "mean", "sum", "logsumexp"),
    *("contiguous", "reshape", "flatten"),
}
_REORDERS = {"transpose", "permute", "swapaxes", "mT"}


@dataclass(frozen=True)
class Chain:
    """One chain of a `forward`. Names are dotted paths below the module that owns the `forward`.

    Attributes:
        linear, bn: the children.
        scale: the name of the parameter or buffer, a number, or None.
        activation: canonical string (`gemmnorm.activations`) or None.
        activation_module: its name where a child computes it, None where a function does.
        in_features, out_features, bias, affine: of the children.
        scale_shape: shape of the scale tensor, None where it is no tensor.
        ranks: how many dimensions x may have.
        views: what the product's shape goes through before `bn`, in words.
        pointwise: `linear` is a convolution over single positions.
        exact: the classes are those of `torch.nn`, not others that compute the same.
        any_strides: the strides of a result with three dimensions may be other than the original's.
        synchronised: `bn` is a SyncBatchNorm, which it may become after `fuse`.
    """

    linear: str
    bn: str
    scale: str | float | None
    activation: str | None
    activation_module: str | None
    in_features: int
    out_features: int
    bias: bool
    affine: bool
    scale_shape: tuple[int, ...] | None
    ranks: tuple[int, ...] = (2,)
    views: tuple[str, ...] = ()
    pointwise: bool = False
    exact: bool = True
    any_strides: bool = False
    synchronised: bool = field(default=False, compare=False)

    @property
    def is_plain(self) -> bool:
        """An `nn.Linear` and an `nn.BatchNorm1d` with nothing but a scale between: x [B, I], product [B, O]."""
        return self.exact and not self.views

    def __str__(self) -> str:
        scale = [] if self.scale is None else [f"× {self.scale}"]
        steps = [self.linear, *scale, *self.views, self.bn]
        if self.activation is not None:
            steps.append(self.activation_module or self.activation)
        return " → ".join(steps)


@dataclass(frozen=True)
class Refusal:
    """Something that looks like a chain and is left alone. Reads `location: reason`, below module `owner`."""

    owner: str
    location: str
    reason: str

    def __str__(self) -> str:
        return f"{self.location or 'the model itself'}: {self.reason}"


@dataclass(frozen=True)
class Found:
    """A chain and its nodes in the graph that it was found in.

    Attributes:
        input: what the chain is called with.
        nodes: what disappears, from the product to the last.
        views: those of them that say how the product is laid out.
        bn: where the call stands.
    """

    chain: Chain
    input: fx.Node
    nodes: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...]
    bn: fx.Node

    @property
    def product(self) -> fx.Node:
        return self.nodes[0]

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]


class _Refused(Exception):
    """The reason why a candidate is no chain."""


def match(owner: nn.Module, graph: fx.Graph, only_plain: bool = False) -> tuple[list[Found], list[tuple[str, str]]]:
    """The chains of `graph`, and (location, reason) of each candidate that is none.

    `only_plain`: chains that are not `Chain.is_plain` are among the latter.
    """
    found, refused = [], []
    for node in graph.nodes:
        by_function = node.op == "call_function" and node.target is F.batch_norm
        if not by_function and not is_batch_norm(called_module(owner, node)):
            continue
        source = node.args[0] if by_function and node.args else _only_input(node)
        if not isinstance(source, fx.Node):
            continue
        path = _path(owner, source)
        if path is None:
            near = _near_miss(owner, source)
            if near is not None:
                end = "F.batch_norm" if by_function else node.target
                refused.append((f"{near[0]} → {end}", near[1]))
            continue
        if by_function:
            refused.append((f"{path[0].target} → F.batch_norm", "a function call; only an nn.BatchNorm1d is fused"))
            continue
        try:
            chain = _chain(owner, path, node)
            if only_plain and not chain.chain.is_plain:
                raise _Refused("an exported file holds only nn.Linear → nn.BatchNorm1d of a matrix; use gemmnorm.fuse")
            found.append(chain)
        except _Refused as reason:
            refused.append((f"{path[0].target} → {node.target}", str(reason)))
    return [_with_strides(f, found) for f in found], refused


def is_linear_call(trace: Trace) -> bool:
    """The recording is `F.linear(x, self.weight, self.bias)`, whether there is a bias or not, and nothing else."""
    calls = [node for node in trace.graph.nodes if node.op not in ("placeholder", "get_attr")]
    if len(calls) != 2 or calls[0].target is not F.linear or calls[1].args[0] is not calls[0]:
        return False
    given = {**dict(zip(("input", "weight", "bias"), calls[0].args, strict=False)), **calls[0].kwargs}
    x, weight, bias = (given.get(name) for name in ("input", "weight", "bias"))
    bias_is_own = isinstance(bias, fx.Node) and bias.op == "get_attr" and bias.target == "bias"
    bias_is_own |= bias is None and ("", "bias", None) in trace.attributes
    weight_is_own = isinstance(weight, fx.Node) and weight.op == "get_attr" and weight.target == "weight"
    placeholders = [node for node in trace.graph.nodes if node.op == "placeholder"]
    return placeholders == [x] and weight_is_own and bias_is_own and not trace.asks_more_than("bias")


def called_module(owner: nn.Module, node: Any) -> nn.Module | None:
    """The child that a `call_module` node calls; None for every other node."""
    if isinstance(node, fx.Node) and node.op == "call_module":
        return owner.get_submodule(str(node.target))
    return None


def scaled(node: fx.Node) -> tuple[list[Any], str] | None:
    """The operands of a multiplication or division, and which of the two it is; None for every other node."""
    if node.op not in ("call_function", "call_method"):
        return None
    for targets, kind in ((_MULTIPLY, "×"), (_MULTIPLY_IN_PLACE, "×="), (_DIVIDE, "÷"), (_DIVIDE_IN_PLACE, "÷=")):
        if node.target in targets:
            operands = [*node.args, *(node.kwargs[k] for k in ("input", "other") if k in node.kwargs)]
            extra = set(node.kwargs) - {"input", "other"}
            return (operands, kind) if len(operands) == 2 and not extra else None
    return None


def _only_input(node: fx.Node) -> fx.Node | None:
    """The single tensor that a child is called with."""
    given = [*node.args, *node.kwargs.values()]
    return given[0] if len(given) == 1 and isinstance(given[0], fx.Node) else None


def _path(owner: nn.Module, node: fx.Node, scales: int = 1) -> list[fx.Node] | None:
    """From the product of a Linear to `node`: views and at most one multiplication. None where it is nothing such."""
    if is_linear(called_module(owner, node)):
        return [node]
    given = viewed(owner, node)
    parts = scaled(node)
    operands, left = ([given], scales) if given is not None else (parts[0], scales - 1) if parts else ([], 0)
    for operand in operands[: 1 if parts and parts[1] not in ("×", "") else 2] if left >= 0 else ():
        path = _path(owner, operand, left) if isinstance(operand, fx.Node) else None
        if path is not None:
            return [*path, node]
    return None


def _chain(owner: nn.Module, path: list[fx.Node], bn: fx.Node) -> Found:
    product = path[0]
    gemm: Any = called_module(owner, product)
    norm: Any = called_module(owner, bn)
    for module, node in ((gemm, product), (norm, bn)):
        if reason := why_not(module, str(node.target)):
            raise _Refused(reason)
    if isinstance(norm, nn.SyncBatchNorm) and product_class(gemm) is not nn.Linear:
        raise _Refused("the ranks would have to agree how a convolution's x lies in memory")
    x = _only_input(product)
    if x is None:
        raise _Refused(f"{product.target} is not called with one tensor")
    out_features, in_features = gemm.weight.shape[:2]
    if norm.num_features != out_features:
        raise _Refused(f"{product.target} gives {out_features} features and {bn.target} takes {norm.num_features}")
    if (norm.running_mean is None) != (norm.running_var is None):
        raise _Refused(f"{bn.target} has only one of running_mean and running_var")
    _check_users(owner, path, bn)
    factor = next((n for n in path if viewed(owner, n) is None and n is not product), None)
    scale = None if factor is None else _scale(owner, *_factor(factor, path))
    shape = tuple(resolve(owner, scale).shape) if isinstance(scale, str) else None
    if shape not in (None, (out_features,), (1, out_features), (1,), ()):
        raise _Refused(
            f"the scale {scale} has shape {shape}; handled are ({out_features},), (1, {out_features}), (1,) and ()"
        )
    disturber = next((n for n in between(product, bn) if n not in path and _changes_in_place(owner, n)), None)
    if disturber is not None:
        raise _Refused(f"{describe(owner, disturber)} may change a tensor in place between the two")
    views = tuple(n for n in path if n is not product and n is not factor)
    last, activation, activation_module = _activation(owner, bn) or (bn, None, None)
    chain = Chain(
        linear=str(product.target),
        bn=str(bn.target),
        scale=scale,
        activation=activation,
        activation_module=activation_module,
        in_features=in_features,
        out_features=out_features,
        bias=gemm.bias is not None,
        affine=norm.affine,
        scale_shape=shape,
        ranks=_ranks(owner, path, bn, factor if shape and shape != (1,) else None),
        views=tuple(describe(owner, view) for view in views),
        pointwise=product_class(gemm) is not nn.Linear,
        exact=type(gemm) is nn.Linear and type(norm) in NORMS,
        synchronised=isinstance(norm, nn.SyncBatchNorm),
    )
    return Found(chain, x, tuple(dict.fromkeys((*path, bn, last))), views, bn)


def _check_users(owner: nn.Module, path: list[fx.Node], bn: fx.Node) -> None:
    """Raise where a value between the product and `bn` has another user than the next, but for the product's shape."""
    for node, following in zip(path, (*path[1:], bn), strict=True):
        others = [user for user in node.users if user is not following]
        if any(node is not path[0] or not asks_only_for_the_shape(user, node) for user in others):
            raise _Refused(f"the output of {describe(owner, node)} is used {len(node.users)} times")


def _ranks(owner: nn.Module, path: list[fx.Node], bn: fx.Node, factor: fx.Node | None) -> tuple[int, ...]:
    """For how many dimensions of x the features end up where `bn` normalises, and at the end where `factor` scales.

    Raises `_Refused` where there are none.
    """
    gemm: Any = called_module(owner, path[0])
    norm: Any = called_module(owner, bn)
    given: Any = _only_input(path[0])
    product = product_class(gemm)
    starts = [Layout(dimensions(product), 1)] if product in POINTWISE else [Layout(rank, rank - 1) for rank in _RANKS]
    ends: list[tuple[int, int]] = []  # dimensions of x, and of what `bn` gets
    for start in starts:
        layout: Layout | None = start
        source = Source(path[0], given, gemm.weight.shape[1], gemm.weight.shape[0], start)
        for node in path[1:]:
            if node is factor and layout is not None and layout.axis != layout.rank - 1:
                layout = None
            if layout is not None and viewed(owner, node) is not None:
                layout = step(owner, node, layout, source)
        if layout is not None and layout.axis == 1:
            ends.append((start.rank, layout.rank))
    for accepted in _NORMALISED[norm_class(norm)]:
        if found := tuple(rank for rank, end in ends if end in accepted):
            return found
    between = " and ".join(describe(owner, node) for node in path[1:])
    does = f"after {between} the features are not certain to be" if between else "the features are not"
    raise _Refused(f"{does} where {bn.target} ({type(norm).__name__}) normalises")


def _factor(node: fx.Node, path: list[fx.Node]) -> tuple[Any, str]:
    """The other operand of the multiplication `node` on the path, and what kind of multiplication it is."""
    operands, kind = scaled(node) or ([], "")
    return next((o for o in operands if o not in path), path[0]), kind


def _with_strides(found: Found, all_found: list[Found]) -> Found:
    """`found`, noting where nobody can tell which strides its result has."""
    users = list(found.result.users)
    inputs = {(f.input, f.product) for f in all_found if f.chain.pointwise}

    def takes_any(user: fx.Node) -> bool:
        if user.op == "call_function":
            name = user.args[1] if user.target is getattr else getattr(user.target, "__name__", "")
        else:
            name = user.target if user.op == "call_method" else None
        if name in _REORDERS:  # a `view` of it works or not by how it lies
            return bool(user.users) and all(map(takes_any, user.users))
        return (found.result, user) in inputs or name in _TAKES_ANY_STRIDES

    if found.chain.is_plain or not users or not all(map(takes_any, users)):
        return found
    return replace(found, chain=replace(found.chain, any_strides=True))


def _scale(owner: nn.Module, factor: Any, kind: str) -> str | float:
    if isinstance(factor, bool) or (isinstance(factor, int) and abs(factor) >> 63):
        raise _Refused(f"the factor {factor} is no number that a tensor's product takes")
    if isinstance(factor, float) and math.isnan(factor):
        raise _Refused("the factor is not a number")
    if isinstance(factor, (int, float)):
        if kind in ("×", "×="):
            return float(factor)
        if factor and math.isfinite(factor) and abs(math.frexp(factor)[0]) == 0.5 and abs(math.frexp(factor)[1]) <= 126:
            return 1.0 / factor  # exact, and so is the product with it
        raise _Refused(f"divided by {factor}: only a power of two has an exact reciprocal")
    if kind.startswith("÷"):
        raise _Refused("divided by a tensor; only a product is fused")
    if not (isinstance(factor, fx.Node) and factor.op == "get_attr"):
        raise _Refused("the factor is computed in forward; fused are a parameter, a buffer and a number")
    name = str(factor.target)
    if not is_plain_tensor(resolve(owner, name)):
        raise _Refused(f"the factor {name} is a {type(resolve(owner, name)).__name__}")
    if kind == "×=":
        raise _Refused(f"multiplied by {name} in place, which keeps the dtype under autocast; write y = y * {name}")
    return name


def resolve(owner: nn.Module, path: str) -> Any:
    """The attribute at a dotted path below `owner`."""
    return operator.attrgetter(path)(owner) if all(map(str.isidentifier, path.split("."))) else _walk(owner, path)


def _walk(owner: nn.Module, path: str) -> Any:
    value: Any = owner
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _activation(owner: nn.Module, bn: fx.Node) -> tuple[fx.Node, str, str | None] | None:
    """(node, canonical string, child's name) of the activation that alone uses the normalised value."""
    if len(bn.users) != 1:
        return None
    node = next(iter(bn.users))
    if node.op == "call_module":
        module = owner.get_submodule(str(node.target))
        if _only_input(node) is bn and is_untouched(module) and is_as_pytorch_has_it(type(module)):
            name = activations.from_module(module)
            return None if name is None else (node, name, str(node.target))
    elif node.op in ("call_function", "call_method") and node.args and node.args[0] is bn:
        name = activations.from_call(node.target, node.args, dict(node.kwargs))
        return None if name is None else (node, name, None)
    return None


def between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """What runs after `first` and before `last`."""
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _changes_in_place(owner: nn.Module, node: fx.Node) -> bool:
    """Whether it does, or nobody can tell: a module or a function of the user's may do anything."""
    module = called_module(owner, node)
    if module is not None:
        inside = [*module.modules()]
        renorms = any(getattr(m, "max_norm", None) is not None for m in inside)  # an Embedding, its weight
        return renorms or any(getattr(m, "inplace", False) or is_of_users(type(m)) for m in inside)
    if node.op == "call_function" and node.target in _WRITE_STATE:
        return True
    if node.target in _RENORM and (len(node.args) > 3 or node.kwargs.get("max_norm") is not None):
        return True
    if isinstance(node.target, Method) or (node.op == "call_function" and node.target in _IN_PLACE_OPERATORS):
        return True
    if "out" in node.kwargs or (node.op == "call_function" and _is_of_users(node.target)):
        return True
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    is_operator = getattr(node.target, "__module__", "") == "_operator"  # `and_` and its like change nothing
    return (name.endswith("_") and not name.endswith("__") and not is_operator) or bool(node.kwargs.get("inplace"))


def _is_of_users(function: Any) -> bool:
    """A function, the `apply` of an `autograd.Function`, or an operator of neither Python's nor PyTorch's own."""
    holder = getattr(function, "__self__", None)
    module = str(getattr(function, "__module__", ""))
    custom = module.startswith("torch._ops.") and not module.endswith(".aten")
    return custom or is_of_users(holder if isinstance(holder, type) else function)


def _near_miss(owner: nn.Module, source: fx.Node) -> tuple[str, str] | None:
    """(the Linear's name, reason) where a product feeds a BatchNorm through what cannot be fused."""
    between: list[str] = []
    node: fx.Node | None = source
    while node is not None and len(between) <= _NEAR:
        module = called_module(owner, node)
        if is_linear(module):
            return str(node.target), f"{' and '.join(reversed(between))} stand{'s' * (len(between) == 1)} between"
        if node.op == "call_function" and node.target in _FUNCTIONS:
            name = getattr(node.target, "__name__", "")
            return f"F.{name}", f"a function call; only an {_FUNCTIONS[node.target]} is fused"
        if node.op in ("call_function", "call_method") and node.target in _PRODUCTS:
            return describe(owner, node), "a product of tensors; only an nn.Linear is fused"
        if node.op in ("placeholder", "get_attr") or is_batch_norm(module) or isinstance(module, nn.Sequential):
            return None
        if module is not None and not type(module).__module__.startswith("torch.nn."):
            return None
        between.append(describe(owner, node))
        inputs = [n for n in node.all_input_nodes if n.op != "get_attr"]
        node = inputs[0] if inputs else None
    return None


def describe(owner: nn.Module, node: fx.Node) -> str:
    """How a reason names a node: `drop (Dropout)`, `add`, `.view()`."""
    if node.op == "call_module":
        module = called_module(owner, node)
        return f"{node.target} ({type(module).__name__})"
    if node.op == "call_method":
        return f".{node.target}()"
    return str(getattr(node.target, "__name__", node.target))
