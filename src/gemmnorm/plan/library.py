"""Plans around the library's GEMM: memory-bound kernels that run on every GPU from compute capability 8.0."""

from __future__ import annotations

from dataclasses import dataclass

from .cost import gemm_seconds, sweep_seconds
from .problem import CHIPS, DTYPE_BYTES, Problem, c_types
from .steps import NOTHING, Buffer, Extent, Launch, Plan, Product, Step

GROUP_ROWS = 64  # rows of one statistics group, in every strategy
MERGE_COLUMNS = 16  # features per block of the merging kernels
ROWS = Extent(1, 1)
GROUPS = Extent(1, GROUP_ROWS)
VECTORS = ("bias", "scale", "scale_stride", "scale_value")


@dataclass(frozen=True)
class Tiling:
    """How a memory-bound kernel cuts up a [B, O] tensor.

    Attributes:
        width: elements that a thread moves at once: 16 bytes of the product where the feature count allows it.
        threads: of a block along the features: the widest that still gives every multiprocessor two blocks.
        groups: statistics groups that a block works through, so that it reads its coefficients less often.
        blocks: the grid.
    """

    width: int
    threads: int
    groups: int
    blocks: Extent

    @property
    def constants(self) -> tuple[str, str]:
        return str(self.width), str(self.threads)


def tiling(problem: Problem, most_groups: int = 1) -> Tiling:
    """The tiling for `problem`, with at most that many groups a block."""
    wanted = 2 * (problem.chip or CHIPS[80]).multiprocessors
    width = 16 // DTYPE_BYTES[problem.dtype]
    while problem.out_features % width:
        width //= 2
    groups = -(-problem.batch // GROUP_ROWS)
    threads = 8
    for wider in (32, 16):
        if groups * -(-problem.out_features // (wider * width)) >= wanted:
            threads = wider
            break
    panels = -(-problem.out_features // (width * threads))
    per_block = most_groups if groups * panels >= 4 * most_groups * wanted else 1
    return Tiling(width, threads, per_block, Extent(panels, GROUP_ROWS * per_block))


def _merge_grid(problem: Problem) -> Extent:
    return Extent(-(-problem.out_features // MERGE_COLUMNS))


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _form(problem: Problem, fold: bool = True) -> str:
    name = "kRunning" if not problem.training else "kFolded" if fold else "kScaled"
    return f"gemmnorm::Form::{name}"


def merge(problem: Problem, fold: bool) -> Launch:
    """The merge of all groups into mean and rstd, and the update of the running statistics."""
    types = c_types(problem)
    return Launch(
        "fused_gemm_scale_bn_merge",
        "statistics.cuh",
        "merge_statistics",
        (types["L"], types["R"], _flag(fold)),
        ("group_mean", "group_m2", *VECTORS, "running_mean", "running_var", "num_batches_tracked", "momentum", "eps",
         "mean", "rstd", "batch", "features"),
        _merge_grid(problem),
    )  # fmt: skip


def normalize(problem: Problem, fold: bool, offset: str) -> Launch:
    """Scale, shift, normalisation and activation over the product; `offset` is the role of what was subtracted."""
    t = tiling(problem, 4)
    return Launch(
        "fused_gemm_scale_bn_apply" if problem.training else "fused_gemm_scale_bn_evaluate",
        "normalize.cuh",
        "normalize",
        (*c_types(problem).values(), *t.constants, str(t.groups), _form(problem, fold), "Activation"),
        ("product", offset, *VECTORS, "mean", "rstd", "running_mean", "running_var", "bn_weight", "bn_bias", "eps", "y",
         "batch", "features"),
        t.blocks,
    )  # fmt: skip


def forward(problem: Problem, strategy: str) -> Plan:
    """GEMM, group statistics, merge, normalise; in evaluation the GEMM and the normalisation alone."""
    t, types = tiling(problem), c_types(problem)
    fold = strategy == "cublas_folded_bn"
    features = Extent(problem.out_features)
    steps: list[Step] = [Product("product", "x", "weight", transpose_right=True)]
    workspace: list[Buffer] = []
    if problem.training:
        statistics = Launch(
            "fused_gemm_scale_bn_statistics",
            "statistics.cuh",
            "column_statistics",
            (types["T"], types["L"], *t.constants, _flag(fold)),
            ("product", *VECTORS, "group_mean", "group_m2", "num_batches_tracked", "batch", "features"),
            t.blocks,
        )
        steps += [statistics, merge(problem, fold)]
        workspace += [Buffer(role, "float32", (GROUPS, features)) for role in ("group_mean", "group_m2")]
    steps.append(normalize(problem, fold, "offset"))
    product = Buffer("product", problem.dtype, (ROWS, features))
    vectors = [Buffer(role, "float32", (features,)) for role in ("mean", "rstd")]
    outputs, aliases = [Buffer("y", problem.out_dtype, (ROWS, features))], []
    if problem.save:
        outputs += [product, *vectors]
    else:
        workspace += vectors if problem.training else []
        if problem.dtype == problem.out_dtype:
            aliases.append(("product", "y"))
        else:
            workspace.append(product)
    return Plan(
        problem,
        "forward",
        strategy,
        tuple(steps),
        tuple(outputs),
        tuple(workspace),
        tuple(aliases),
        seconds=gemm_seconds(problem) + sweep_seconds(problem, 2 if problem.training else 1, writes=1),
        floor=gemm_seconds(problem),
    )


def backward(problem: Problem, strategy: str, exponents: tuple[str, str] = (NOTHING, NOTHING)) -> Plan:
    """Column sums, their merge, the gradient of the product, and two products by the library.

    The same for every strategy: what a forward saves is the product, and the mean and rstd of each feature. `exponents`
    are the roles of x's exponents and of those of the gradient's columns, where the products are not the library's.
    """
    single, several, types = tiling(problem), tiling(problem, 4), c_types(problem)
    form = _form(problem)
    features = Extent(problem.out_features)
    steps: tuple[Step, ...] = (
        Launch(
            "fused_gemm_scale_bn_gradient_sums",
            "gradient.cuh",
            "gradient_sums",
            (*types.values(), *single.constants, form, "Activation"),
            ("grad_y", "product", "offset", *VECTORS, "mean", "rstd", "bn_weight", "bn_bias", "group_sum",
             "group_dot", "group_linear", "batch", "features"),
            single.blocks,
            resident=2 if problem.training else 1,
        ),
        Launch(
            "fused_gemm_scale_bn_gradient_merge",
            "gradient.cuh",
            "merge_gradients",
            (types["L"], types["R"], form),
            ("group_sum", "group_dot", "group_linear", "scale", "scale_stride", "scale_value", "rstd", "bn_weight",
             "eps", "mean_grad", "slope_grad", exponents[1], "grad_bias", "grad_scale", "grad_bn_weight",
             "grad_bn_bias", "batch", "features"),
            _merge_grid(problem),
        ),
        Launch(
            "fused_gemm_scale_bn_gradient_apply",
            "gradient.cuh",
            "product_gradient",
            (*types.values(), *several.constants, str(several.groups), form, "Activation"),
            ("grad_y", "product", "offset", *VECTORS, "mean", "rstd", "bn_weight", "bn_bias", "mean_grad",
             "slope_grad", *exponents, "grad_product", "batch", "features"),
            several.blocks,
            # erff beside eight columns' coefficients takes more than the 128 registers that two blocks leave a thread.
            resident=1 if problem.activation == "gelu" else 2,
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
            Buffer("grad_x", problem.dtype, (ROWS, Extent(problem.in_features))),
            Buffer("grad_weight", problem.dtype, (features, Extent(problem.in_features))),
            Buffer("grad_bias", problem.linear_dtype, (features,)),
            Buffer("grad_scale", "float32", (features,)),
            Buffer("grad_bn_weight", problem.norm_dtype, (features,)),
            Buffer("grad_bn_bias", problem.norm_dtype, (features,)),
        ),
        (
            *(Buffer(role, "float32", (GROUPS, features)) for role in sums),
            *(Buffer(role, "float32", (features,)) for role in ("mean_grad", "slope_grad")),
            Buffer("grad_product", problem.dtype, (ROWS, features)),
        ),
        seconds=2 * gemm_seconds(problem) + sweep_seconds(problem, 4, writes=1),
        floor=2 * gemm_seconds(problem),
    )
