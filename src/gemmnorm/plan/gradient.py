"""Plans of the backward: up to the gradient of the product one launch where a cluster can hold a panel, else three."""

from __future__ import annotations

from .cost import gemm_seconds, sweep_seconds
from .library import GROUP_ROWS, GROUPS, ROWS, VECTORS, form, merge_grid, tiling
from .problem import DTYPE_BYTES, Problem, c_types
from .steps import NOTHING, THREADS, Buffer, Extent, Launch, Plan, Product

WARPS = THREADS // 32
LANES = 4  # of a warp along the features: 64 bytes of a row
MOST_BLOCKS = 8  # of a cluster on any GPU that has clusters
SHARED = 227 * 1024  # bytes that a block can have on Hopper
_CHEAP = ("relu", "leaky_relu", "hardtanh")
_PARAMETERS = ("grad_bias", "grad_scale", "grad_bn_weight", "grad_bn_bias")


def launches(problem: Problem, exponents: tuple[str, str]) -> tuple[tuple[Launch, ...], tuple[Buffer, ...]]:
    """The launches and what they need besides the gradients.

    `exponents` are the roles of x's exponents and of those of the gradient's columns, for products of split operands.
    """
    product = Buffer("grad_product", problem.dtype, (ROWS, Extent(problem.out_features)))
    panel = one_launch(problem, exponents)
    if panel is not None:
        return (panel,), (product,)
    return _three_launches(problem, exponents), (*_between(problem), product)


def one_launch(problem: Problem, exponents: tuple[str, str]) -> Launch | None:
    """A cluster for each panel of columns, which reads the product and y's gradient once; None if none can."""
    size, out_size = DTYPE_BYTES[problem.dtype], DTYPE_BYTES[problem.out_dtype]
    width = 16 // size
    if problem.chip is None or problem.chip.arch != 90 or not problem.training or problem.out_features % width:
        return None
    groups = -(-problem.batch // GROUP_ROWS)
    cluster = 1
    while cluster < MOST_BLOCKS and groups > cluster * WARPS:
        cluster *= 2
    per_warp, columns = -(-groups // (cluster * WARPS)), LANES * width
    shared = per_warp * WARPS * GROUP_ROWS * columns * (size + out_size) + columns * (5 * 4 + WARPS * 8 + 8)
    if shared > SHARED:
        return None
    panels = -(-problem.out_features // columns)
    cheap = (problem.activation or "relu").split("(")[0] in _CHEAP  # few registers
    return Launch(
        "fused_gemm_scale_bn_gradient",
        "panel_gradient.cuh",
        "panel_gradient",
        (*c_types(problem).values(), str(LANES), str(per_warp), str(cluster), str(shared), "Activation"),
        ("grad_y", "product", "offset", *VECTORS[1:], "mean", "rstd", "bn_weight", "bn_bias", "eps", *exponents,
         *_PARAMETERS, "grad_product", "batch", "features"),
        Extent(panels * cluster),
        resident=min(3 if cheap else 2, SHARED // shared),
        shared=shared,
        cluster=cluster,
    )  # fmt: skip


def most_rows(plan: Plan) -> int | None:
    """The largest batch that a backward's launches serve; None for any."""
    for launch in plan.launches:
        if launch.function == "panel_gradient":
            per_warp, cluster = (int(constant) for constant in launch.constants[5:7])
            return per_warp * cluster * WARPS * GROUP_ROWS
    return None


def _three_launches(problem: Problem, exponents: tuple[str, str]) -> tuple[Launch, ...]:
    """Column sums of every group of rows, their merge, and the gradient of the product."""
    single, several, types, kind = tiling(problem), tiling(problem, 4), c_types(problem), form(problem)
    return (
        Launch(
            "fused_gemm_scale_bn_gradient_sums",
            "gradient.cuh",
            "gradient_sums",
            (*types.values(), *single.constants, kind, "Activation"),
            ("grad_y", "product", "offset", *VECTORS, "mean", "rstd", "bn_weight", "bn_bias", "group_sum",
             "group_dot", "group_linear", "batch", "features"),
            single.blocks,
            resident=2 if problem.training else 1,
        ),
        Launch(
            "fused_gemm_scale_bn_gradient_merge",
            "gradient.cuh",
            "merge_gradients",
            (types["L"], types["R"], kind),
            ("group_sum", "group_dot", "group_linear", "scale", "scale_stride", "scale_value", "rstd", "bn_weight",
             "eps", "mean_grad", "slope_grad", exponents[1], *_PARAMETERS, "batch", "features"),
            merge_grid(problem),
        ),
        Launch(
            "fused_gemm_scale_bn_gradient_apply",
            "gradient.cuh",
            "product_gradient",
            (*types.values(), *several.constants, str(several.groups), kind, "Activation"),
            ("grad_y", "product", "offset", *VECTORS, "mean", "rstd", "bn_weight", "bn_bias", "mean_grad",
             "slope_grad", *exponents, "grad_product", "batch", "features"),
            several.blocks,
            # GELU's beside eight columns' coefficients takes more than the 128 registers that two blocks leave.
            resident=1 if problem.activation == "gelu" else 2,
        ),
    )  # fmt: skip


def _between(problem: Problem) -> tuple[Buffer, ...]:
    """What the three launches hand to each other."""
    features = Extent(problem.out_features)
    sums = ("group_sum", "group_dot") + (() if problem.training else ("group_linear",))
    return (
        *(Buffer(role, "float32", (GROUPS, features)) for role in sums),
        *(Buffer(role, "float32", (features,)) for role in ("mean_grad", "slope_grad")),
    )


def backward(problem: Problem, strategy: str, exponents: tuple[str, str] = (NOTHING, NOTHING)) -> Plan:
    """The gradient of the product, and two products by the library.

    The same for every strategy: what a forward saves is the product, and the mean and rstd of each feature. `exponents`
    as in `launches`.
    """
    features = Extent(problem.out_features)
    steps, workspace = launches(problem, exponents)
    of_x, of_weight = problem.grad_dtypes or (problem.dtype, problem.dtype)
    return Plan(
        problem,
        "backward",
        strategy,
        (
            *steps,
            Product("grad_x", "grad_product", "weight"),
            Product("grad_weight", "grad_product", "x", transpose_left=True),
        ),
        (
            Buffer("grad_x", of_x, (ROWS, Extent(problem.in_features))),
            Buffer("grad_weight", of_weight, (features, Extent(problem.in_features))),
            Buffer("grad_bias", problem.linear_dtype, (features,)),
            Buffer("grad_scale", "float32", (features,)),
            Buffer("grad_bn_weight", problem.norm_dtype, (features,)),
            Buffer("grad_bn_bias", problem.norm_dtype, (features,)),
        ),
        workspace,
        seconds=2 * gemm_seconds(problem) + sweep_seconds(problem, 2 if len(steps) == 1 else 4, writes=1),
        floor=2 * gemm_seconds(problem),
    )
