"""Runs a plan: allocates its tensors, binds arguments by role, launches in order."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import driver, plan, reference
from .errors import GemmNormWarning
from .plan import Buffer, Chip, Launch, Plan, Problem, Product

_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
    torch.int64: "int64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@functools.lru_cache(maxsize=64)
def chip(device: torch.device) -> Chip | None:
    """What the planner needs to know of `device`; None where the kernels cannot run on it."""
    if device.type != "cuda" or torch.version.cuda is None or driver.unavailable() is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    return plan.chip_for(properties.major * 10 + properties.minor, properties.multi_processor_count)


def arithmetic(dtype: torch.dtype) -> str:
    """How float32 products may be computed, by PyTorch's own switches.

    "tf32" where TF32 is allowed; "ieee" where float32 arithmetic is asked for by name
    (`torch.backends.cuda.matmul.fp32_precision = "ieee"`, where PyTorch has it); "float32", the default: float32
    accuracy by whatever arithmetic. "native" for other dtypes.
    """
    if dtype != torch.float32:
        return "native"
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is None:
        return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
    return {"tf32": "tf32", "ieee": "ieee"}.get(precision, "float32")


def output_dtype(x: Tensor, scale: Tensor | None) -> torch.dtype:
    """The dtype that the chain of PyTorch ops returns: a scale with dimensions takes part in type promotion."""
    return x.dtype if scale is None or scale.dim() == 0 else torch.promote_types(x.dtype, scale.dtype)


def _size(size: int | torch.SymInt) -> int:
    """A number for the planner: under a symbolic trace the size that the trace was started with.

    No guard is installed. The strategy that is baked into a traced graph serves every batch size, because what a
    strategy can serve depends on the batch only where that is empty.
    """
    if isinstance(size, torch.SymInt):
        return int(getattr(size.node, "hint", None) or 1024)
    return size


def problem_of(
    x: Tensor,
    weight: Tensor,
    linear: Tensor | None,
    norm: Tensor | None,
    out_dtype: torch.dtype,
    activation: str | None,
    training: bool,
    save: bool,
    scaled: bool,
) -> Problem:
    """The planner's view of a call. `linear` and `norm` are any of the tensors whose dtype the group has, or None."""
    return Problem(
        _size(x.shape[0]),
        _size(x.shape[1]),
        _size(weight.shape[0]),
        _NAMES.get(x.dtype, str(x.dtype)),
        _NAMES.get(out_dtype, str(out_dtype)),
        "float32" if linear is None else _NAMES.get(linear.dtype, str(linear.dtype)),
        "float32" if norm is None else _NAMES.get(norm.dtype, str(norm.dtype)),
        arithmetic(x.dtype),
        activation,
        training,
        save,
        scaled,
        chip(x.device),
    )


_warned: set[str] = set()
_recorders: list[list[Plan]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[Plan]]:
    """Collects the forward plans of the calls made inside."""
    plans: list[Plan] = []
    _recorders.append(plans)
    try:
        yield plans
    finally:
        _recorders.remove(plans)


def unobserved() -> bool:
    """Nobody is recording plans."""
    return not _recorders


def resolve(problem: Problem, strategy: str | None) -> str:
    """The strategy that will run: the one asked for where it can serve, else the planner's choice.

    Compiles what it needs, so that a kernel that does not compile or load on this machine is found out here: then
    the next strategy takes over, with one warning.
    """
    return _resolved(problem, plan.check_strategy(strategy))


@functools.lru_cache(maxsize=4096)
def _resolved(problem: Problem, requested: str | None) -> str:
    verdicts = plan.applicable(problem)
    for name in plan.preference(requested):
        if verdicts[name] is not None:
            continue
        try:
            _bound(plan.cached_plan(problem, name, "forward"))
            if problem.save:
                _bound(plan.cached_plan(problem, name, "backward"))
        except Exception as error:
            if name not in _warned:
                _warned.add(name)
                warnings.warn(
                    f"{name} cannot run here, the next strategy takes over: {error}", GemmNormWarning, stacklevel=2
                )
            continue
        return name
    return "reference"


@dataclass(frozen=True)
class _Bound:
    """A plan with its kernels loaded, and the sizes of what it allocates."""

    steps: tuple[Product | driver.Launcher, ...]
    buffers: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    workspace: tuple[tuple[str, int], ...]
    workspace_bytes: int


@functools.lru_cache(maxsize=4096)
def _bound(chosen: Plan) -> _Bound:
    batch = chosen.problem.batch
    steps = tuple(driver.Launcher(step, chosen.problem) if isinstance(step, Launch) else step for step in chosen.steps)
    # What the library or the copy engine takes is a tensor of its own; all float32 scratch is one allocation.
    products = {
        role for step in chosen.steps if isinstance(step, Product) for role in (step.out, step.left, step.right)
    }
    products |= {m.tensor for step in chosen.launches for m in step.maps}
    tensors = [b for b in (*chosen.outputs, *chosen.workspace) if b in chosen.outputs or b.role in products]
    scratch = [b for b in chosen.workspace if b not in tensors]
    offset, workspace = 0, []
    for buffer in scratch:
        workspace.append((buffer.role, offset))
        offset += -(-_count(buffer, batch) * plan.DTYPE_BYTES[buffer.dtype] // 256) * 256
    return _Bound(
        steps,
        tuple((b.role, tuple(e.value(batch) for e in b.shape), _DTYPES[b.dtype]) for b in tensors),
        tuple(workspace),
        offset,
    )


def _count(buffer: Buffer, batch: int) -> int:
    count = 1
    for extent in buffer.shape:
        count *= extent.value(batch)
    return count


def run(chosen: Plan, tensors: dict[str, Tensor | None], scalars: dict[str, Any]) -> dict[str, Tensor | None]:
    """Run `chosen` on the current stream of the tensors' device.

    Args:
        tensors: inputs by role; an output set to None here is not computed.
        scalars: numbers by role, as numpy scalars of the kernel's type.

    Returns:
        `tensors` with the plan's outputs added.
    """
    bound = _bound(chosen)
    x = tensors["x"]
    assert x is not None
    device = x.device
    index = device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return run(chosen, tensors, scalars)
    driver.enter(index)
    for role, shape, dtype in bound.buffers:
        if role not in tensors:
            tensors[role] = torch.empty(shape, dtype=dtype, device=device)
    pointers: dict[str, Any] = {role: 0 if t is None else t.data_ptr() for role, t in tensors.items()}
    if bound.workspace_bytes:
        scratch = torch.empty(bound.workspace_bytes, dtype=torch.uint8, device=device)
        base = scratch.data_ptr()
        for role, offset in bound.workspace:
            pointers[role] = base + offset
    for alias, role in chosen.aliases:
        pointers[alias] = pointers[role]
        tensors[alias] = tensors[role]
    pointers.update(scalars)
    stream = driver.current_stream(index)
    if chosen.counters:
        pointers["counters"] = _counters(device).take(driver.stream_handle(index), chosen.counters).data_ptr()
    for step in bound.steps:
        if isinstance(step, Product):
            out = tensors[step.out]
            if out is not None:
                left, right = tensors[step.left], tensors[step.right]
                assert left is not None and right is not None
                torch.mm(
                    left.t() if step.transpose_left else left, right.t() if step.transpose_right else right, out=out
                )
        else:
            if step.maps:
                pointers.update(
                    (m.role, driver.tensor_map(_present(tensors, m.tensor), m.rows, m.columns)) for m in step.maps
                )
                pointers["stored_product"] = pointers["product"]
                pointers.update(step.numbers)
            step(stream, [pointers.get(role, 0) for role in step.arguments])
    return tensors


def _present(tensors: dict[str, Tensor | None], role: str) -> Tensor:
    found = tensors[role]
    assert found is not None, role
    return found


class _Counters:
    """Device memory that is zero whenever no kernel runs on it: the kernels leave it as they found it.

    Calls on one stream follow each other and share their numbers; a captured call may be replayed at any time, beside
    anything, so it gets numbers of its own for good.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_stream: dict[tuple[int, int], Tensor] = {}
        self._pool = torch.zeros(0, dtype=torch.int32, device=device)

    def take(self, stream: int, count: int) -> Tensor:
        capturing = torch.cuda.is_current_stream_capturing()
        key = (stream, 1 << max(count - 1, 31).bit_length())
        found = None if capturing else self._by_stream.get(key)
        if found is None:
            size = key[1]
            if self._pool.numel() < size:
                self._pool = torch.zeros(max(size, 1 << 16), dtype=torch.int32, device=self._device)
                if not capturing:
                    torch.cuda.current_stream(self._device).synchronize()  # other streams will use the rest of it
            found, self._pool = self._pool[:size], self._pool[size:]
            if not capturing:
                self._by_stream[key] = found
        return found


@functools.lru_cache(maxsize=64)
def _counters(device: torch.device) -> _Counters:
    return _Counters(device)


def _dense(t: Tensor) -> Tensor:
    """Contiguous and aligned to 16 bytes, as the kernels read it."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


def _unified(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Contiguous vectors of one dtype that the kernels know; float32 where they differ."""
    dtypes = {v.dtype for v in vectors if v is not None}
    if len(dtypes) <= 1 and dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
        return tuple(None if v is None else v.contiguous() for v in vectors)
    return tuple(None if v is None else v.float().contiguous() for v in vectors)


def _first(*tensors: Tensor | None) -> Tensor | None:
    return next((t for t in tensors if t is not None), None)


def _vectors(bias: Tensor | None, scale: Tensor | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    if scale is not None and scale.device != device:
        scale = scale.to(device)
    bias, scale = _unified(bias, scale)
    return bias, scale


def _scalars(problem: Problem, scale: Tensor | None, scale_value: float, eps: float) -> dict[str, Any]:
    return {
        "scale_stride": driver.int32(0 if scale is None or scale.numel() < problem.out_features else 1),
        "scale_value": driver.float32(scale_value),
        "eps": driver.float32(eps),
        "batch": driver.int32(problem.batch),
        "features": driver.int32(problem.out_features),
        "in_features": driver.int32(problem.in_features),
    }


def describe(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    scale_value: float,
    running_mean: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    training: bool,
    activation: str | None,
    save: bool,
) -> Problem:
    """The problem that a call poses, with the dtypes that the kernels will see."""
    linear = _first(bias, scale)
    norm = _first(running_mean, bn_weight, bn_bias)
    problem = problem_of(
        x,
        weight,
        linear,
        norm,
        output_dtype(x, scale),
        activation,
        training,
        save,
        scale is not None or scale_value != 1.0,
    )
    if bias is not None and scale is not None and bias.dtype != scale.dtype:
        problem = replace(problem, linear_dtype="float32")
    return problem


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    scale_value: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: str | None,
    strategy: str | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, product, offset, mean, rstd of one forward; the last four empty unless `save`."""
    problem = describe(
        x, weight, bias, scale, scale_value, running_mean, bn_weight, bn_bias, training, activation, save
    )
    chosen = plan.cached_plan(problem, resolve(problem, strategy), "forward")
    for recorder in _recorders:
        recorder.append(chosen)
    if chosen.strategy == "reference":
        y, product, mean, rstd = reference.forward(
            x, weight, bias, scale_value if scale is None else scale, running_mean, running_var, num_batches_tracked,
            bn_weight, bn_bias, training, momentum, eps, activation, save,
        )  # fmt: skip
        return y, product, x.new_empty(0, dtype=torch.float32), mean, rstd
    bias, scale = _vectors(bias, scale, x.device)
    if running_mean is not None:
        bn_weight, bn_bias = (
            None if v is None else v.to(running_mean.dtype).contiguous() for v in (bn_weight, bn_bias)
        )
    else:
        bn_weight, bn_bias = _unified(bn_weight, bn_bias)
    state, write_back = _running_state(running_mean, running_var)
    if any(launch.maps for launch in chosen.launches):
        x, weight = _dense(x), _dense(weight)
    tensors: dict[str, Tensor | None] = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "scale": scale,
        "running_mean": state[0],
        "running_var": state[1],
        "num_batches_tracked": num_batches_tracked if training else None,
        "bn_weight": bn_weight,
        "bn_bias": bn_bias,
    }
    scalars = _scalars(problem, scale, scale_value, eps)
    scalars["momentum"] = driver.float32(momentum)
    out = run(chosen, tensors, scalars)
    if training and write_back is not None:
        write_back()
    y = out["y"]  # type: ignore[assignment]
    assert y is not None
    if not save:
        nothing = [x.new_empty(0, dtype=torch.float32) for _ in range(3)]
        return y, x.new_empty(0), *nothing  # type: ignore[return-value]
    offset = out["group_mean"] if "group_mean" in out else x.new_empty(0, dtype=torch.float32)
    product, mean, rstd = out["product"], out["mean"], out["rstd"]  # type: ignore[assignment]
    assert product is not None and offset is not None and mean is not None and rstd is not None
    return y, product, offset, mean, rstd


def _running_state(
    mean: Tensor | None, var: Tensor | None
) -> tuple[tuple[Tensor | None, Tensor | None], Callable[[], None] | None]:
    """The running statistics as the kernels take them, and what copies them back if those are copies."""
    if mean is None or var is None or (mean.is_contiguous() and var.is_contiguous() and mean.dtype == var.dtype):
        return (mean, var), None
    copies = (mean.contiguous(), var.to(mean.dtype).contiguous())

    def write_back() -> None:
        mean.copy_(copies[0])
        var.copy_(copies[1])

    return copies, write_back


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    scale_value: float,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    product: Tensor,
    offset: Tensor,
    mean: Tensor,
    rstd: Tensor,
    training: bool,
    eps: float,
    activation: str | None,
    strategy: str,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias, scale, bn_weight, bn_bias; None where `needs` is False."""
    if strategy == "reference" or x.shape[0] == 0:
        return reference.backward(
            grad, x, weight, bias, scale_value if scale is None else scale, bn_weight, bn_bias, product, mean, rstd,
            training, eps, activation, needs,
        )  # fmt: skip
    problem = describe(
        x, weight, bias, scale, scale_value, _first(bn_weight, bn_bias), bn_weight, bn_bias, training, activation, True
    )
    chosen = plan.cached_plan(problem, strategy, "backward")
    shapes = tuple(None if t is None else (t.shape, t.dtype) for t in (bias, scale, bn_weight, bn_bias))
    bias, scale = _vectors(bias, scale, x.device)
    bn_weight, bn_bias = _unified(bn_weight, bn_bias)
    tensors: dict[str, Tensor | None] = {
        "grad_y": _dense(grad),
        "x": x,
        "weight": weight,
        "bias": bias,
        "scale": scale,
        "bn_weight": bn_weight,
        "bn_bias": bn_bias,
        "product": product,
        "offset": offset if offset.numel() else None,
        "mean": mean,
        "rstd": rstd,
    }
    roles = ("grad_x", "grad_weight", "grad_bias", "grad_scale", "grad_bn_weight", "grad_bn_bias")
    for role, needed, value in zip(roles, needs, (x, weight, bias, scale, bn_weight, bn_bias), strict=True):
        if not needed or value is None:
            tensors[role] = None
    out = run(chosen, tensors, _scalars(problem, scale, scale_value, eps))
    grads = [out[role] for role in roles]
    for i, like in enumerate(shapes, start=2):
        gradient = grads[i]
        if gradient is None or like is None:
            continue
        shape, dtype = like
        if gradient.numel() != shape.numel():  # one scale for all features: their gradients' sum
            gradient = gradient.sum()
        grads[i] = gradient.reshape(shape).to(dtype)
    return tuple(grads)
