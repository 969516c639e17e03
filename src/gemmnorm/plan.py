"""Problem → Plan: which strategy, which kernels, which tiles and grids, which workspace. Pure: no GPU is asked.

A plan is data. `runtime` runs it, `tools/export.py` prints it as C++, `explain` prints it as English; none of them
decides anything. Grids and sizes are expressions in the batch size (`Extent`), because an exported file has the feature
counts as constants and the batch as an argument.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .errors import GemmNormValueError

STRATEGIES = ("cublas_bn", "cublas_folded_bn", "gemm_stats_apply", "one_kernel", "reference")
GROUP_ROWS = 128  # rows of one statistics group, in every strategy
THREADS = 256  # of a block of the memory-bound kernels
MERGE_COLUMNS = 16  # features per block of the merging kernels

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8}
C_TYPES = {"float32": "float", "float16": "gemmnorm::half", "bfloat16": "gemmnorm::bfloat16"}

_requested: str | None = None


def check_strategy(strategy: str | None) -> str | None:
    """The strategy asked for: the argument, else `set_strategy`'s, else `GEMMNORM_STRATEGY`; None leaves the choice.

    Raises:
        GemmNormValueError: the name is not one of `STRATEGIES`.
    """
    strategy = strategy or _requested or os.environ.get("GEMMNORM_STRATEGY") or None
    if strategy is not None and strategy not in STRATEGIES:
        raise GemmNormValueError(f"strategy: expected None or one of {', '.join(STRATEGIES)}; got {strategy!r}")
    return strategy


def set_strategy(strategy: str | None) -> contextlib.AbstractContextManager[None]:
    """Ask for one strategy in all later calls; None gives the choice back to the planner.

    Takes effect at once. Used as a context manager (`with set_strategy("cublas_bn"): …`) it is undone at the end.
    A strategy that cannot serve a problem is replaced by the planner's choice, which `explain` reports.
    """
    global _requested
    previous = _requested
    if strategy is not None and strategy not in STRATEGIES:
        raise GemmNormValueError(f"strategy: expected None or one of {', '.join(STRATEGIES)}; got {strategy!r}")
    _requested = strategy
    return _restoring(previous)


@contextlib.contextmanager
def _restoring(previous: str | None) -> Iterator[None]:
    global _requested
    try:
        yield
    finally:
        _requested = previous


@dataclass(frozen=True)
class Chip:
    """What the planner knows of a GPU. Rates are dense and per second; `bandwidth` counts bytes read plus written.

    Attributes:
        arch: compute capability × 10, e.g. 90.
        multiprocessors: number of SMs.
        bandwidth: of device memory.
        tensor_half, tensor_tf32, vector_fp32: FLOP/s for fp16/bf16, TF32, and float32 arithmetic.
    """

    arch: int = 80
    multiprocessors: int = 108
    bandwidth: float = 1.4e12
    tensor_half: float = 250e12
    tensor_tf32: float = 125e12
    vector_fp32: float = 18e12


# Rates that library kernels reach on random data, by compute capability (A100, L40S/4090, H200, B200, RTX 50). The
# H200's are measured (benchmarks/results/h200.json), the others scaled from datasheets: they serve `explain`'s
# prediction and never change a result.
CHIPS = {
    80: Chip(),
    86: Chip(86, 84, 0.8e12, 120e12, 60e12, 30e12),
    89: Chip(89, 128, 0.85e12, 260e12, 130e12, 60e12),
    90: Chip(90, 132, 4.2e12, 790e12, 415e12, 51e12),
    100: Chip(100, 148, 6.5e12, 1500e12, 750e12, 60e12),
    120: Chip(120, 170, 1.5e12, 350e12, 170e12, 90e12),
}


def chip_for(arch: int, multiprocessors: int | None = None) -> Chip:
    """The nearest known chip at or below `arch`, with the machine's own count of multiprocessors."""
    known = CHIPS[max((a for a in CHIPS if a <= arch), default=80)]
    return replace(known, arch=arch, multiprocessors=multiprocessors or known.multiprocessors)


def target(arch: int) -> str:
    """The name NVRTC and nvcc want: `sm_90a` for Hopper, whose own instructions need the `a`."""
    return f"sm_{arch}a" if arch == 90 else f"sm_{arch}"


@dataclass(frozen=True)
class Problem:
    """Everything a plan depends on. B × I times (O × I)ᵀ.

    Attributes:
        batch, in_features, out_features: B, I, O.
        dtype: of x, the weight and the product (the compute dtype).
        out_dtype: of y and its gradient: what the chain of PyTorch ops returns.
        linear_dtype, norm_dtype: of (bias, scale) and of (running statistics, γ, β).
        arithmetic: "tf32" | "float32" (float32 accuracy by any arithmetic) | "ieee" (float32 arithmetic), for float32
            operands; "native" otherwise.
        activation: canonical string or None.
        training: batch statistics (else running ones).
        save: keep what a backward needs.
        scaled: a scale is there (a tensor or a number other than 1).
        chip: the GPU; None for any other device.
    """

    batch: int
    in_features: int
    out_features: int
    dtype: str = "float32"
    out_dtype: str = "float32"
    linear_dtype: str = "float32"
    norm_dtype: str = "float32"
    arithmetic: str = "float32"
    activation: str | None = None
    training: bool = True
    save: bool = False
    scaled: bool = True
    chip: Chip | None = field(default_factory=lambda: chip_for(90))

    @property
    def flops(self) -> float:
        """Floating-point operations of one product."""
        return 2.0 * self.batch * self.in_features * self.out_features

    @property
    def gemm_rate(self) -> float:
        """FLOP/s at which the product can run."""
        chip = self.chip or CHIPS[80]
        if self.dtype in ("float16", "bfloat16"):
            return chip.tensor_half
        return chip.tensor_tf32 if self.arithmetic == "tf32" else chip.vector_fp32


@dataclass(frozen=True)
class Extent:
    """times · ⌈batch / rows⌉, or just `times` where rows is 0: a size that an exported file can print."""

    times: int
    rows: int = 0

    def value(self, batch: int) -> int:
        return self.times * (-(-batch // self.rows) if self.rows else 1)

    def cpp(self) -> str:
        if not self.rows:
            return str(self.times)
        groups = "batch" if self.rows == 1 else f"((batch + {self.rows - 1}) / {self.rows})"
        return groups if self.times == 1 else f"{self.times} * {groups}"


@dataclass(frozen=True)
class Buffer:
    """A tensor that the plan allocates: role, dtype, and shape as extents."""

    role: str
    dtype: str
    shape: tuple[Extent, ...]


@dataclass(frozen=True)
class Product:
    """A product by the library: out = left · right, either operand transposed. Roles name the tensors."""

    out: str
    left: str
    right: str
    transpose_left: bool = False
    transpose_right: bool = False


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        entry: the kernel's name, saying what it fuses.
        source: file under kernels/ that holds `function`.
        function: the device function template that the entry calls.
        constants: its template arguments, in order.
        arguments: roles, in the order of the function's parameters (`ROLES` has their types).
        grid: number of blocks. block: threads of each. resident: blocks that must fit on one multiprocessor.
    """

    entry: str
    source: str
    function: str
    constants: tuple[str, ...]
    arguments: tuple[str, ...]
    grid: Extent
    block: int = THREADS
    resident: int = 2


Step = Product | Launch

# Every role that a launch can name: C type ({T} compute, {Y} output, {L} bias and scale, {R} BatchNorm's) and shape.
ROLES: dict[str, tuple[str, str]] = {
    "product": ("const {T}*", "[batch, features]"),
    "offset": ("const float*", "[groups, features] or null"),
    "bias": ("const {L}*", "[features] or null"),
    "scale": ("const {L}*", "[features] or [1] or null"),
    "scale_stride": ("int", "1 for a vector, 0 for one number"),
    "scale_value": ("float", "the scale where it is a plain number"),
    "group_mean": ("float*", "[groups, features]"),
    "group_m2": ("float*", "[groups, features]"),
    "num_batches_tracked": ("long long*", "[1] or null"),
    "running_mean": ("{R}*", "[features] or null"),
    "running_var": ("{R}*", "[features] or null"),
    "momentum": ("float", "negative for the cumulative average"),
    "eps": ("float", ""),
    "mean": ("float*", "[features]"),
    "rstd": ("float*", "[features]"),
    "bn_weight": ("const {R}*", "[features] or null"),
    "bn_bias": ("const {R}*", "[features] or null"),
    "y": ("{Y}*", "[batch, features]"),
    "batch": ("int", ""),
    "features": ("int", ""),
    "grad_y": ("const {Y}*", "[batch, features]"),
    "group_sum": ("float*", "[groups, features]"),
    "group_dot": ("float*", "[groups, features]"),
    "group_linear": ("float*", "[groups, features] or null"),
    "mean_grad": ("float*", "[features]"),
    "slope_grad": ("float*", "[features]"),
    "grad_product": ("{T}*", "[batch, features]"),
    "grad_bias": ("{L}*", "[features] or null"),
    "grad_scale": ("float*", "[features] or null"),
    "grad_bn_weight": ("{R}*", "[features] or null"),
    "grad_bn_bias": ("{R}*", "[features] or null"),
}

_VECTORS = ("bias", "scale", "scale_stride", "scale_value")


@dataclass(frozen=True)
class Plan:
    """What to run, in order, and what to allocate before.

    Attributes:
        problem: what it was made for; phase: "forward" or "backward".
        strategy: the one that was chosen; reasons: why others were not, strategy → sentence.
        steps: products and launches.
        outputs: tensors handed back; workspace: tensors that die with the call.
        aliases: role → role whose memory it shares (y over the product where nothing needs it later).
        seconds: predicted time; floor: the product alone at the rate of the library.
    """

    problem: Problem
    phase: str
    strategy: str
    steps: tuple[Step, ...] = ()
    outputs: tuple[Buffer, ...] = ()
    workspace: tuple[Buffer, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    floor: float = 0.0

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.steps if isinstance(step, Launch))

    def __str__(self) -> str:
        p = self.problem
        kind = ("training" if p.training else "evaluation") + " " + self.phase
        where = "plain PyTorch ops" if self.strategy == "reference" else f"sm_{p.chip.arch if p.chip else 80}"
        lines = [
            f"{p.batch} × {p.in_features} → {p.out_features}, {p.dtype}"
            + (f" ({p.arithmetic})" if p.dtype == "float32" else "")
            + f", {kind}: {self.strategy} ({where})"
        ]
        for step in self.steps:
            if isinstance(step, Product):
                left = step.left + ("ᵀ" if step.transpose_left else "")
                right = step.right + ("ᵀ" if step.transpose_right else "")
                lines.append(f"  {step.out} = {left} · {right} by the library's GEMM")
            else:
                lines.append(f"  {step.entry}: {step.grid.value(p.batch)} blocks of {step.block} threads")
        if self.seconds:
            ratio = self.seconds / self.floor
            lines.append(f"  predicted {self.seconds * 1e6:.1f} µs, {ratio:.2f} × the bare GEMM's {self.floor * 1e6:.1f} µs")
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons]
        return "\n".join(lines)


def applicable(problem: Problem) -> dict[str, str | None]:
    """For every strategy None where it can serve the problem, else the reason why not."""
    chip = problem.chip
    kernels: str | None = None
    if chip is None:
        kernels = "the tensors are not on an NVIDIA GPU that the kernels can run on"
    elif chip.arch < 80:
        kernels = f"compute capability {chip.arch / 10} is below 8.0"
    elif problem.dtype not in C_TYPES or problem.out_dtype not in C_TYPES:
        kernels = f"{problem.dtype} is computed by plain PyTorch ops"
    elif problem.batch == 0 or problem.out_features == 0 or problem.in_features == 0:
        kernels = "there is nothing to compute"
    elif problem.batch > 2**30 or problem.out_features > 2**30:
        kernels = "a dimension is beyond 2³⁰"
    hopper = "the Hopper kernels are not part of this version"
    return {
        "cublas_bn": kernels,
        "cublas_folded_bn": kernels,
        "gemm_stats_apply": kernels or hopper,
        "one_kernel": kernels or hopper,
        "reference": None,
    }


# What the planner prefers, first the best.
_PREFERENCE = ("cublas_folded_bn", "cublas_bn", "reference")


def make_plan(problem: Problem, strategy: str | None = None, phase: str = "forward") -> Plan:
    """The plan for `problem`: that of `strategy` where it applies, else the planner's choice, with the reasons."""
    verdicts = applicable(problem)
    order = ((strategy,) if strategy else ()) + _PREFERENCE
    chosen = next(name for name in order if verdicts[name] is None)
    reasons = tuple((name, reason) for name, reason in verdicts.items() if reason is not None)
    if chosen == "reference":
        return Plan(problem, phase, chosen, reasons=reasons)
    build = _forward if phase == "forward" else _backward
    return replace(build(problem, chosen), reasons=reasons)


def vector_width(problem: Problem, limit: int = 8) -> int:
    """Elements that one thread moves at once: 16 bytes of the product where the feature count allows it."""
    width = min(limit, 16 // DTYPE_BYTES[problem.dtype])
    while problem.out_features % width:
        width //= 2
    return width


def tile_threads(problem: Problem, width: int) -> int:
    """Threads along the features: the widest tile that still gives every multiprocessor two blocks."""
    chip = problem.chip or CHIPS[80]
    groups = -(-problem.batch // GROUP_ROWS)
    for threads in (32, 16):
        if groups * -(-problem.out_features // (threads * width)) >= 2 * chip.multiprocessors:
            return threads
    return 8


# The statistics kernel keeps its share of the tile in registers, unpacked: 16 rows of at most this many elements.
STATISTICS_WIDTH = 4


@dataclass(frozen=True)
class _Tiling:
    """How a memory-bound kernel cuts up a [B, O] tensor: template arguments (width, threads), and the grid."""

    width: int
    threads: int
    grid: Extent

    @property
    def constants(self) -> tuple[str, str]:
        return str(self.width), str(self.threads)


def _tiling(problem: Problem, limit: int = 8) -> _Tiling:
    width = vector_width(problem, limit)
    threads = tile_threads(problem, width)
    return _Tiling(width, threads, Extent(-(-problem.out_features // (width * threads)), GROUP_ROWS))


def _merge_grid(problem: Problem) -> Extent:
    return Extent(-(-problem.out_features // MERGE_COLUMNS))


def c_types(problem: Problem) -> dict[str, str]:
    """The C type of each letter in `ROLES`."""
    return {
        "T": C_TYPES[problem.dtype],
        "Y": C_TYPES[problem.out_dtype],
        "L": C_TYPES[problem.linear_dtype],
        "R": C_TYPES[problem.norm_dtype],
    }


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _form(problem: Problem, fold: bool = True) -> str:
    name = "kRunning" if not problem.training else "kFolded" if fold else "kScaled"
    return f"gemmnorm::Form::{name}"


def _rows(problem: Problem) -> Extent:
    return Extent(1, 1)


def _forward(problem: Problem, strategy: str) -> Plan:
    """GEMM, group statistics, merge, normalise; the last alone in evaluation."""
    t, types = _tiling(problem), c_types(problem)
    narrow = _tiling(problem, STATISTICS_WIDTH)
    fold = strategy == "cublas_folded_bn"
    features = Extent(problem.out_features)
    groups = Extent(1, GROUP_ROWS)
    steps: list[Step] = [Product("product", "x", "weight", transpose_right=True)]
    workspace: list[Buffer] = []
    if problem.training:
        steps += [
            Launch(
                "fused_gemm_scale_bn_statistics",
                "statistics.cuh",
                "column_statistics",
                (types["T"], types["L"], *narrow.constants, _flag(fold)),
                ("product", *_VECTORS, "group_mean", "group_m2", "num_batches_tracked", "batch", "features"),
                narrow.grid,
            ),
            Launch(
                "fused_gemm_scale_bn_merge",
                "statistics.cuh",
                "merge_statistics",
                (types["L"], types["R"], _flag(fold)),
                ("group_mean", "group_m2", *_VECTORS, "running_mean", "running_var", "num_batches_tracked",
                 "momentum", "eps", "mean", "rstd", "batch", "features"),
                _merge_grid(problem),
            ),
        ]  # fmt: skip
        workspace += [Buffer(role, "float32", (groups, features)) for role in ("group_mean", "group_m2")]
    steps.append(
        Launch(
            "fused_gemm_scale_bn_apply" if problem.training else "fused_gemm_scale_bn_evaluate",
            "normalize.cuh",
            "normalize",
            (*types.values(), *t.constants, _form(problem, fold), "Activation"),
            ("product", "offset", *_VECTORS, "mean", "rstd", "running_mean", "running_var", "bn_weight", "bn_bias",
             "eps", "y", "batch", "features"),
            t.grid,
        )
    )  # fmt: skip
    product = Buffer("product", problem.dtype, (_rows(problem), features))
    y = Buffer("y", problem.out_dtype, (_rows(problem), features))
    in_place = not problem.save and problem.dtype == problem.out_dtype
    vectors = [Buffer(role, "float32", (features,)) for role in ("mean", "rstd")]
    keep = problem.save
    outputs = (product,) if in_place else (y, product) if keep else (y,)
    if not in_place and not keep:
        workspace.append(product)
    if keep or problem.training:
        (outputs, workspace) = ((*outputs, *vectors), workspace) if keep else (outputs, [*workspace, *vectors])
    passes = (1 if problem.training else 0) + 1
    return Plan(
        problem,
        "forward",
        strategy,
        tuple(steps),
        outputs,
        tuple(workspace),
        (("y", "product"),) if in_place else (),
        seconds=_gemm_seconds(problem) + _pass_seconds(problem, passes, writes=1),
        floor=_gemm_seconds(problem),
    )


def _backward(problem: Problem, strategy: str) -> Plan:
    """Column sums, their merge, the gradient of the product, and two products by the library.

    The same for every strategy: what a forward saves is the product, and the mean and rstd of each feature.
    """
    t, types = _tiling(problem), c_types(problem)
    form = _form(problem)
    features = Extent(problem.out_features)
    groups = Extent(1, GROUP_ROWS)
    panel = (*types.values(), *t.constants, form, "Activation")
    steps: tuple[Step, ...] = (
        Launch(
            "fused_gemm_scale_bn_gradient_sums",
            "gradient.cuh",
            "gradient_sums",
            panel,
            ("grad_y", "product", "offset", *_VECTORS, "mean", "rstd", "bn_weight", "bn_bias", "group_sum",
             "group_dot", "group_linear", "batch", "features"),
            t.grid,
            resident=2 if problem.training else 1,
        ),
        Launch(
            "fused_gemm_scale_bn_gradient_merge",
            "gradient.cuh",
            "merge_gradients",
            (types["L"], types["R"], form),
            ("group_sum", "group_dot", "group_linear", "scale", "scale_stride", "scale_value", "rstd", "bn_weight",
             "eps", "mean_grad", "slope_grad", "grad_bias", "grad_scale", "grad_bn_weight", "grad_bn_bias", "batch",
             "features"),
            _merge_grid(problem),
        ),
        Launch(
            "fused_gemm_scale_bn_gradient_apply",
            "gradient.cuh",
            "product_gradient",
            panel,
            ("grad_y", "product", "offset", *_VECTORS, "mean", "rstd", "bn_weight", "bn_bias", "mean_grad",
             "slope_grad", "grad_product", "batch", "features"),
            t.grid,
        ),
        Product("grad_x", "grad_product", "weight"),
        Product("grad_weight", "grad_product", "x", transpose_left=True),
    )  # fmt: skip
    sums = ("group_sum", "group_dot") + (() if problem.training else ("group_linear",))
    return Plan(
        problem,
        "backward",
        strategy,
        steps,
        (
            Buffer("grad_x", problem.dtype, (_rows(problem), Extent(problem.in_features))),
            Buffer("grad_weight", problem.dtype, (features, Extent(problem.in_features))),
            Buffer("grad_bias", problem.linear_dtype, (features,)),
            Buffer("grad_scale", "float32", (features,)),
            Buffer("grad_bn_weight", problem.norm_dtype, (features,)),
            Buffer("grad_bn_bias", problem.norm_dtype, (features,)),
        ),
        (
            *(Buffer(role, "float32", (groups, features)) for role in sums),
            *(Buffer(role, "float32", (features,)) for role in ("mean_grad", "slope_grad")),
            Buffer("grad_product", problem.dtype, (_rows(problem), features)),
        ),
        seconds=2 * _gemm_seconds(problem) + _pass_seconds(problem, 4, writes=1),
        floor=2 * _gemm_seconds(problem),
    )


def _gemm_seconds(problem: Problem) -> float:
    """The product at the library's rate, or at the memory's where that is what limits it."""
    chip = problem.chip or CHIPS[80]
    size = DTYPE_BYTES[problem.dtype]
    traffic = size * (
        problem.batch * problem.in_features
        + problem.out_features * problem.in_features
        + problem.batch * problem.out_features
    )
    return max(problem.flops / problem.gemm_rate, traffic / chip.bandwidth) + 3e-6


def _pass_seconds(problem: Problem, reads: int, writes: int) -> float:
    """`reads` reads and `writes` writes of a [B, O] tensor, and 2 µs a launch."""
    chip = problem.chip or CHIPS[80]
    elements = problem.batch * problem.out_features
    traffic = elements * (reads * DTYPE_BYTES[problem.dtype] + writes * DTYPE_BYTES[problem.out_dtype])
    return traffic / chip.bandwidth + 2e-6 * (reads + writes)


@functools.lru_cache(maxsize=4096)
def cached_plan(problem: Problem, strategy: str | None, phase: str) -> Plan:
    """`make_plan`, remembered."""
    return make_plan(problem, strategy, phase)
