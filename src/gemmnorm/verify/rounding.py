"""How large rounding errors may be: measured by making them, one per operation, in float64.

A comparison needs to know the error that *some honest implementation* could have. For a chain of which only the
source is known, the answer is measured (the method is stochastic arithmetic; Vignes 1993, "A stochastic arithmetic for
reliable scientific computation"; Parker 1997, "Monte Carlo arithmetic"). The original runs in float64 under
`Arithmetic`, a dispatch mode that multiplies the result of every floating-point operation by 1 + u·ξ, with u the
unit roundoff of the arithmetic being judged and ξ uniform in [−1, 1].  What then happens to outputs, statistics and
gradients is what *one rounding per operation* does to them: cancellation, the amplification of a column with
|mean| ≫ std or of a constant column, a gradient that is exactly zero by cancellation; all without knowing the model.

Three things are more than one relative rounding:

- a product over a reduction of length K: u·(‖x_i‖·‖w_j‖ + √K·|a_ij|). A sum of K terms in sequence carries u times the
  root of the sum of its squared partial sums; that is u·‖x‖‖w‖ for terms of random sign and u·√K·|a| for terms of
  one sign. Implementations that add in blocks stay below both.
- a column sum or mean over n rows: 4·u·n·rms for the sum (runs of up to about 48 rows in sequence, then a tree); in the
  backward of LayerNorm and GroupNorm √(3n)·u·n·rms (all rows in sequence, and equal rows round alike), and in every sum
  of equal addends: what one backward of `y.sum()` adds up.
- BatchNorm, `addmm` and other fused operations: decomposed, so that the roundings happen inside. What is as
  large as the result may be stored on the way (a product, a centred tensor) and is rounded like a result; what
  is one number per feature stays at the accumulator's precision. On a CPU PyTorch rounds the statistics of a BatchNorm
  that is all of 16 bits to 16 bits, normalises with those and saves them for the backward.
- 16-bit storage. At |mean| ≫ std a column may land on one value of the grid, and its variance is then 0; or it may
  straddle two, and its variance is then that of the grid. Two kinds of runs alternate. One makes the rounding
  for real, on a grid whose phase is random per feature (v ↦ round(v·c)/c, c in [1, 2)). The other multiplies by
  1 + u·ξ with ξ a hash of the value: as good as independent where values differ by more than 2⁻¹⁶, equal for
  equal values, so that constant columns stay constant.

The same mode with no rounding at all is how the golden model runs: it turns casts to lower precision inside a
model (`x.float()`, `x.to(torch.bfloat16)`) into float64, so that the golden stays golden, and constants that it
holds or makes in lower precision likewise, which float64 would not mix with. What a generator draws stays what the
original draws: in float64 the same seed gives other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Arithmetic", "DtypeRecorder", "Kinks", "Units", "unit_roundoff"]

_LOW = (torch.float32, torch.float16, torch.bfloat16)
_EQUAL = 8.0  # roundings by which addends differ that are equal but for those
_SUM_RUN = 4.0  # sums of n rows: 4·u·n·rms, the square root of a third of 48 rows added in sequence


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to `dtype`: 2⁻²⁴ for float32, 2⁻⁸ for bfloat16."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Units:
    """Unit roundoffs of the arithmetic that is imitated.

    storage     of the tensors that operations return
    accumulate  of per-feature results inside a fused operation, and along a reduction
    operand     of a product's operands where they are rounded first (TF32: 2⁻¹¹), else 0
    convolved   likewise of a convolution's
    grid        the 16-bit dtype that tensors are stored in, if they are: its rounding is made for real
    hashed      ξ is a hash of the value (the other kind of run for 16-bit storage)
    statistics  of a normalisation are stored as tensors are: PyTorch's in 16 bits on a CPU
    """

    storage: float
    accumulate: float
    operand: float = 0.0
    convolved: float = 0.0
    grid: torch.dtype | None = None
    hashed: bool = False
    statistics: bool = False


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Moving, choosing or negating values rounds nothing.
# Results that rounding, which is monotone, does not take beyond numbers that every dtype has.
_BOUNDS = {"sigmoid": (0.0, 1.0), "_softmax": (0.0, 1.0), "tanh": (-1.0, 1.0)}
_EXACT = _names(
    """_local_scalar_dense _reshape_alias _to_copy _unsafe_view abs alias amax amin arange argmax argmin as_strided
    bernoulli bernoulli_ cat chunk clamp clamp_ clamp_max clamp_min clone constant_pad_nd copy copy_ detach diagonal
    embedding empty empty_like empty_strided expand eye fill fill_ flatten full full_like gather hardtanh hardtanh_
    hardtanh_backward index index_put index_put_ index_select lift_fresh masked_fill masked_fill_ max
    max_pool2d_with_indices maximum min minimum narrow native_dropout neg neg_ new_empty new_empty_strided new_full
    new_ones new_zeros normal_ ones ones_like permute rand rand_like randn randn_like relu relu_ repeat reshape
    scalar_tensor scatter select select_backward sgn sign slice slice_backward slice_scatter sort split squeeze stack t
    threshold threshold_ threshold_backward to topk transpose tril triu unbind uniform_ unsqueeze view where zero_ zeros
    zeros_like"""
)
_PRODUCTS = frozenset({"mm", "bmm", "mv", "dot"})
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
_MEANS = frozenset({"mean", "var_mean"})
_DECOMPOSED = _names(
    """addbmm addmm addmv baddbmm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    native_batch_norm_backward native_layer_norm native_layer_norm_backward native_group_norm
    native_group_norm_backward _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data"""
)


# Those that normalise by the statistics as they are stored. LayerNorm and GroupNorm store what they have used.
_BY_STORED_STATISTICS = frozenset({"native_batch_norm", "_native_batch_norm_legit"})

# Draws, which depend on the dtype.
_DRAWN = _names("normal normal_ rand rand_like randn randn_like uniform_")

# PyTorch adds all rows of these in sequence on a CPU: √(n/3)·u·n·rms, three times that where equal rows round alike.
_SEQUENTIAL = frozenset({"native_layer_norm_backward", "native_group_norm_backward"})


class Arithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Run everything in float64; with `units`, make one rounding error per operation (see the module's page)."""

    def __init__(self, units: Units | None = None, *, seed: int = 0, kinks: Kinks | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.units = units
        self.kinks = kinks
        self._seed = seed
        self._depth = 0
        self._calls = 0
        self._fused = ""  # the fused operation being decomposed
        self._large = 0  # size of the largest tensor that the fused operation being decomposed was given
        self._drawn = torch.get_default_dtype()  # before float64 is, for the run
        self._pools: dict[torch.device, tuple[Tensor, torch.Generator]] = {}
        if kinks is not None:
            kinks.start()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name in _DRAWN:
            return _drawn_as(self._drawn, func, args, kwargs)
        if kwargs.get("dtype") in _LOW:
            kwargs["dtype"] = torch.float64
        args = tuple(_promoted(func, i, a) for i, a in enumerate(args))
        if self.kinks is not None and self._depth == 0:
            self.kinks.visit(name, args)
        if self.units is None:
            return func(*args, **kwargs)
        if name in _DECOMPOSED and func in decomposition_table:
            self._depth += 1
            outer, self._large = self._large, max((a.numel() for a in args if _is_real(a) and a.ndim > 1), default=0)
            within, self._fused = self._fused, name
            try:
                with self:
                    result = decomposition_table[func](*args, **kwargs)
            finally:
                self._depth, self._large, self._fused = self._depth - 1, outer, within
            self._round(result, (), name)
            return result
        result = func(*args, **kwargs)
        if name == "copy_" and self._depth:  # a fused operation stores its running statistics
            self._store(result)
        elif name not in _EXACT and not any(tag == torch.Tag.inplace_view for tag in func.tags):
            self._round(result, args, name)
        return result

    def _round(self, result: Any, args: tuple[Any, ...], name: str) -> None:
        assert self.units is not None
        outputs = [o for o in (result if isinstance(result, (tuple, list)) else (result,)) if _is_real(o)]
        inputs = [a for a in args if isinstance(a, Tensor)]
        if any(tensor.layout != torch.strided for tensor in (*outputs, *inputs)):
            raise NotImplementedError("it computes with sparse tensors, whose rounding errors are not known")
        # An output that is another view of an input was not computed; an in-place result is the input itself.
        outputs = [o for o in outputs if not any(o is not a and _same_memory(o, a) for a in inputs)]
        if not outputs:
            return
        if name in _PRODUCTS:
            self._add(outputs[0], self._product_error(outputs[0], inputs[0], inputs[1]))
        elif name in _CONVOLUTIONS:
            for output in outputs:
                length = max(a.numel() for a in inputs) / max(1, output.shape[0] if output.ndim else 1)
                rms = _rms(output)
                unit = self.units.accumulate * math.sqrt(length) + self.units.convolved
                self._add(output, unit * (output.abs() + rms))
        elif name in _MEANS or name == "sum":
            mean = outputs[-1]
            count = inputs[0].numel() / max(1, mean.numel())
            rms = _reduced_rms(inputs[0], mean, args)
            error = rms * (self.units.accumulate * (count if name == "sum" else 1.0))
            self._add(mean, error * self._run(inputs[0], mean, args, count))
            for variance in outputs[:-1]:  # and the square of the mean's own error: the variance of constant columns
                self._relative(variance, _SUM_RUN * self.units.accumulate)
                variance.add_((rms.reshape(variance.shape) * (_SUM_RUN * self.units.accumulate)).square_())
        # Inside a fused operation values live in the accumulator's precision. So do the statistics it saves, on a GPU.
        saved = 1 if name.startswith("native_") or name.startswith("_native_") else len(outputs)
        for index, output in enumerate(outputs):
            vector = output.ndim < 2 or output.numel() < self._large
            statistic = index >= saved and not name.endswith("_backward")
            used = name == "var_mean" and self._fused in _BY_STORED_STATISTICS
            if self.units.statistics and (statistic or used):
                self._store(output)
            elif statistic or (self._depth > 0 and vector):
                self._relative(output, self.units.accumulate)
            else:
                self._store(output)
            if name in _BOUNDS:
                output.clamp_(*_BOUNDS[name])

    def _run(self, source: Tensor, result: Tensor, args: tuple[Any, ...], count: float) -> Tensor | float:
        """How many u·rms a mean over `count` rows errs by: more where these are added in sequence and round alike."""
        assert self.units is not None
        alike = max(_SUM_RUN, math.sqrt(3 * count))
        if self._fused in _SEQUENTIAL or alike == _SUM_RUN or not source.is_floating_point():
            return alike
        dims = _reduced(args)
        over = () if dims is None else dims
        high, low = source.amax(over, keepdim=True), source.amin(over, keepdim=True)
        equal = high - low <= _EQUAL * self.units.storage * torch.maximum(high.abs(), low.abs())
        return torch.where(equal.reshape(result.shape), alike, _SUM_RUN)

    def _product_error(self, product: Tensor, left: Tensor, right: Tensor) -> Tensor:
        assert self.units is not None
        length = left.shape[-1]
        rows = torch.linalg.vector_norm(left, dim=-1)
        columns = torch.linalg.vector_norm(right, dim=-2 if right.ndim > 1 else -1)
        if left.ndim > 1 and right.ndim > 1:
            norms = rows.unsqueeze(-1) * columns.unsqueeze(-2)
        else:
            norms = rows * columns
        rounded_operands = math.sqrt(2.0 / max(1, length)) * self.units.operand
        error = product.abs().mul_(math.sqrt(length) * self.units.accumulate)
        return error.add_(norms, alpha=self.units.accumulate + rounded_operands)

    def _store(self, tensor: Tensor) -> None:
        """Round a result to the storage dtype."""
        assert self.units is not None
        if self.units.hashed and _is_real(tensor):
            phase = self._uniform(tensor.new_empty(()))
            hashed = tensor.abs().clamp_(min=1e-300).log2_().mul_(2.0**16).add_(phase).frac_().abs_()
            tensor.addcmul_(tensor, hashed.mul_(2).sub_(1), value=self.units.storage)
        elif self.units.grid is None or not _is_real(tensor):
            self._relative(tensor, self.units.storage)
        elif tensor.numel():
            phase = self._uniform(tensor[(0,) * (tensor.ndim - 1)] if tensor.ndim else tensor).add(3).div_(2)
            tensor.copy_((tensor * phase).to(self.units.grid).double().div_(phase))

    def _relative(self, tensor: Tensor, unit: float) -> None:
        if _is_real(tensor):
            tensor.addcmul_(tensor, self._uniform(tensor), value=unit)

    def _add(self, tensor: Tensor, error: Tensor) -> None:
        tensor.addcmul_(error, self._uniform(tensor))

    def _uniform(self, like: Tensor) -> Tensor:
        """Uniform numbers in [−1, 1]; large tensors read a strided window of one pool instead of drawing each."""
        pool, generator = self._pools.get(like.device, (torch.empty(0), None))
        if generator is None:
            generator = torch.Generator(like.device).manual_seed(self._seed)
        self._calls += 1
        columns = like.shape[-1] if like.ndim else 1
        rows = like.numel() // columns if columns else 0
        start = (self._calls * 7919) % 4093
        need = start + 13 * rows + columns
        if pool.numel() < need or like.numel() <= 4096:
            count = like.numel() if like.numel() <= 4096 else 2 * need
            drawn = torch.rand(count, dtype=torch.float64, device=like.device, generator=generator).mul_(2).sub_(1)
            if like.numel() <= 4096:
                self._pools[like.device] = (pool, generator)
                return drawn.reshape(like.shape)
            pool = drawn
        self._pools[like.device] = (pool, generator)
        return pool.as_strided((rows, columns), (13, 1), start).reshape(like.shape)


# --------------------------------------------------------------------------------- where a derivative jumps


_KINK_POINTS: dict[str, Callable[[tuple[Any, ...]], tuple[float, ...]]] = {
    **dict.fromkeys(("relu", "relu_", "leaky_relu", "leaky_relu_", "abs", "elu", "prelu"), lambda a: (0.0,)),
    **dict.fromkeys(("gt", "ge", "lt", "le", "threshold", "threshold_", "clamp_min", "clamp_max"), lambda a: (a[1],)),
    **dict.fromkeys(("hardtanh", "hardtanh_"), lambda a: (a[1], a[2]) if len(a) > 2 else (-1.0, 1.0)),
    **dict.fromkeys(("clamp", "clamp_"), lambda a: tuple(a[1:3])),
    **dict.fromkeys(("hardswish", "hardswish_", "hardsigmoid", "hardsigmoid_"), lambda a: (-3.0, 3.0)),
}


@dataclass
class _KinkCall:
    value: Tensor  # the golden input of the operation, float32
    points: tuple[float, ...]
    squares: Tensor | None = None  # of its rounding errors, summed over draws
    near: Tensor | None = None


@dataclass
class Kinks:
    """Elements that rounding can carry across the kink of a ReLU and its kin, where the derivative jumps.

    Two honest implementations may put such an element on different sides, and then its gradient differs by all of
    itself. Three passes: "record" keeps the inputs of such operations in the golden run, "measure" collects
    their rounding errors in the noisy runs, "flip" mirrors the elements within four errors of a kink: all of them,
    and in further runs random halves, because the effects of two may cancel. The largest difference between a flipped
    and the golden run is what the comparison additionally allows, and only where it arises.
    """

    mode: Literal["record", "measure", "flip"] = "record"
    calls: list[_KinkCall] = field(default_factory=list)
    draws: int = 0
    subset: int = 0  # 0: flip all elements near a kink; else a random half of them
    _next: int = 0

    def start(self) -> None:
        self._next = 0
        if self.mode == "measure":
            self.draws += 1

    def visit(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in _KINK_POINTS or not args or not _is_real(args[0]):
            return
        points = tuple(float(p) for p in _KINK_POINTS[name](args) if isinstance(p, (int, float)))
        if not points:
            return
        value: Tensor = args[0]
        if self.mode == "record":
            self.calls.append(_KinkCall(value.float(), points))
            return
        if self._next >= len(self.calls):
            return
        call = self.calls[self._next]
        self._next += 1
        if call.value.shape != value.shape:
            return
        if self.mode == "measure":
            squares = (value.float() - call.value).square_()
            call.squares = squares if call.squares is None else call.squares.add_(squares)
        elif call.near is not None:
            chosen = call.near
            if self.subset:
                generator = torch.Generator(value.device).manual_seed(1009 * self.subset + self._next)
                coins = torch.rand(value.shape, device=value.device, generator=generator)
                chosen = chosen & (coins < 0.5)
            for point in call.points:
                near = chosen & ((value - point).abs() <= (value - call.points[0]).abs())
                beyond = torch.where(value == point, value + 1e-30, 2 * point - value)
                value.copy_(torch.where(near, beyond, value))  # in place: backward reads the same tensor

    def mark(self, pool: Callable[[Tensor], Tensor]) -> int:
        """Decide which elements are near a kink, given a function that pools squared errors; return how many."""
        count = 0
        for call in self.calls:
            if call.squares is None:
                continue
            reach = 4 * pool(call.squares / max(1, self.draws)).sqrt_()
            call.near = torch.zeros_like(call.value, dtype=torch.bool)
            for point in call.points:
                call.near |= (call.value - point).abs() <= reach
            count += int(call.near.sum())
        return count


class DtypeRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note which floating-point dtypes a run produces: the coarsest one is the storage precision of the chain."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if _is_real(output) and output.numel() > 1:
                self.dtypes.add(output.dtype)
        return result


def _promoted(func: Any, index: int, value: Any) -> Any:
    """An operand, or a list of them, in float64; what the operation writes into or returns a view of stays itself."""
    if isinstance(value, (list, tuple)):
        return type(value)(_promoted(func, index, item) for item in value) if any(map(_is_low, value)) else value
    if not _is_low(value) or (
        func._schema.arguments[index].alias_info and func is not torch.ops.aten.lift_fresh.default
    ):
        return value
    return value.double()


def _drawn_as(default: torch.dtype, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the original's generator gives: drawn in its precision, and then float64."""
    low = [a.to(default) if isinstance(a, Tensor) and a.dtype == torch.float64 else a for a in args]
    if func._schema.name.endswith("_"):
        return args[0].copy_(func(*low, **kwargs))
    if any(argument.name == "dtype" for argument in func._schema.arguments):
        kwargs["dtype"] = kwargs.get("dtype") or default
    return func(*low, **kwargs).double()


def _is_low(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in _LOW


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def _reduced_rms(source: Tensor, result: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Root mean square of `source` over the dimensions that the reduction removed, in the result's shape."""
    dims = _reduced(args)
    if dims is None or not source.is_floating_point():
        return _rms(source).expand(result.shape)
    return source.square().mean(dims, keepdim=True).sqrt().reshape(result.shape)


def _reduced(args: tuple[Any, ...]) -> Any:
    """The dimensions that a reduction removes; None for all."""
    return args[1] if len(args) > 1 and isinstance(args[1], (list, tuple, int)) and args[1] != [] else None


def _rms(source: Tensor) -> Tensor:
    """Root mean square of what is finite: one NaN must not take the errors of all other rows with it."""
    return source.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()
