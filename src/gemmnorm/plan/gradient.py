"""Plans of the backward: up to the gradient of the product three launches, or on Hopper in training one.

Where the forward has kept no product, two of three launches multiply it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from . import cast, gemm, panels
from .gemm import Gemm
from .memory_bound import form, merge_columns, merge_grid, tiling
from .panels import WARPS, WIDE, ClusterPanel
from .problem import DTYPE_BYTES, Problem, type_members
from .split import ROW_BYTES, split_backward
from .steps import GROUP_ROWS, ROWS, VECTORS, Buffer, Extent, Launch, Map, Plan, Product
from .tile import Tile

ROWS_OF_A_WARP = (16, 32, 64)
# Bytes of the product and y's gradient: read between the sums of some rows and their gradients, while sums are merged;
# and of a panel at most, of which two and more have to stay in the L2 (an H200 keeps some 30 MiB of what all read).
IN_FLIGHT, LARGEST_PANEL = 16 * 2**20, 12 * 2**20
SHARED_WITH_GRADIENT = 2048  # bytes that five numbers of a feature and the ring's barriers take beside `Tile.shared`
_PARAMETERS = ("grad_bias", "grad_scale", "grad_bn_weight", "grad_bn_bias")


@dataclass(frozen=True)
class Backward:
    """The choices of a backward.

    Attributes:
        kernel: up to the product's gradient: "cluster_gradient", "persistent_gradient", "three launches"; or, where the
            forward has kept no product, "multiplied again".
        split_products: the two products after it are of split operands; else by cuBLAS.
        panel: that a cluster of "cluster_gradient" holds.
        gemm: that multiplies again.
    """

    kernel: str
    split_products: bool = False
    panel: ClusterPanel | None = None
    gemm: Gemm | None = None

    def words(self, problem: Problem) -> str:
        """In a candidate's name."""
        shape = self.panel.words() if self.panel else self.gemm.words(problem) if self.gemm else ""
        products = "split products" if self.split_products else "cuBLAS products"
        return " ".join(filter(None, (self.kernel, shape, products)))

    def plan(self, problem: Problem, strategy: str) -> Plan:
        """The plan of these choices: up to the product's gradient, then two products."""
        found = _with_products(problem, strategy, *self._to_gradient(problem))
        return split_backward(problem, found) if self.split_products else found

    def _to_gradient(self, problem: Problem) -> tuple[tuple[Launch, ...], tuple[Buffer, ...], int]:
        """Launches up to the product's gradient, buffers and counters."""
        product = Buffer("grad_product", problem.dtype, (ROWS, Extent(problem.out_features)))
        if self.kernel == "cluster_gradient":
            assert self.panel is not None
            return (cluster_launch(problem, self.split_products, self.panel),), (product,), 0
        if self.kernel == "persistent_gradient":
            launch = persistent_launch(problem, self.split_products)
            assert launch is not None
            merged = _vectors(problem, "merged_slope", "merged_shift")
            panels_of_columns = -(-problem.out_features // _persistent_columns(problem))
            between = (*_between(problem, _persistent_rows(problem)), *merged)
            return (launch,), (*between, product), 2 + 2 * panels_of_columns
        buffers = (*_between(problem), product)
        if self.gemm is not None:
            return _multiplied_again(problem, self.gemm), buffers, 2 * self.gemm.queued
        return _three_launches(problem, self.split_products), buffers, 0


def refusal_to_recompute(problem: Problem) -> str | None:
    """Why the backward needs the product kept, or None."""
    if not problem.training:
        return "in evaluation the backward reads the product"
    if problem.split:
        return "float32 by split operands is not multiplied again"
    # The backward has x and the weight as they were multiplied, in rows that are padded or not.
    return gemm.refusal(problem, "one_kernel") or cast.unaligned(replace(problem, cast=(), copied=()))


def brings_gradient(problem: Problem, tile: Tile) -> bool:
    """The gradient of y can pass through the tile's staging buffers."""
    return tile.staged and (tile.swapped or DTYPE_BYTES[problem.out_dtype] == 2)


def _multiplied_again(problem: Problem, found: Gemm) -> tuple[Launch, ...]:
    """Sums of every group of rows, their merge, and the gradient of the product, which the first and last multiply."""
    return (
        _recomputed_product(problem, found, "GradientSumsEpilogue"),
        _merge(problem, False, found.tile.group_rows),
        _recomputed_product(problem, found, "GradientEpilogue"),
    )


def _recomputed_product(problem: Problem, found: Gemm, epilogue: str) -> Launch:
    """`fused_gemm` with y's gradient in its epilogue: sums over rows, or the gradient of the product."""
    sums = epilogue == "GradientSumsEpilogue"
    found = found if sums else found.in_step(problem)
    boxes, boxes_y = (ROW_BYTES // DTYPE_BYTES[dtype] for dtype in (problem.dtype, problem.out_dtype))
    grad_y = Map("map_grad_y", "grad_y", GROUP_ROWS, boxes_y, exact=True)
    grad_product = Map("map_grad_product", "grad_product", GROUP_ROWS, boxes, exact=True)
    launch = gemm.fused_gemm(
        problem,
        found,
        f"fused_gemm_scale_bn_gradient_{'sums' if sums else 'apply'}",
        epilogue,
        "NoConversion",
        more_shared=SHARED_WITH_GRADIENT,
        operands=("x", "weight"),
        matrices=(grad_y,) if sums else (grad_y, grad_product),
        fields=(
            *(("group_sum", "group_dot") if sums else ("mean_grad", "slope_grad")),
            *VECTORS, "bn_weight", "bn_bias", "mean", "rstd", "counters",
        ),
        numbers=(("group_panels", found.group_panels),),
        tile_counter=0 if sums else 1,
    )  # fmt: skip
    return replace(launch, absent=("num_batches_tracked", "inexact"), parts=("gemm/epilogue_gradient.cuh",))


def cluster_launch(problem: Problem, split_products: bool, panel: ClusterPanel) -> Launch:
    """A cluster for each panel of this shape, which reads the product and y's gradient once."""
    grid, resident = panel.launched(problem, 3 if problem.derivative_registers == "few" else 2)
    return Launch(
        "fused_gemm_scale_bn_gradient",
        "backward/cluster_gradient.cuh",
        "cluster_gradient",
        (*type_members(problem), *panel.members, ("Activation", "Activation")),
        ("grad_y", "product", "offset", *VECTORS[1:], "mean", "rstd", "bn_weight", "bn_bias", "eps",
         *_exponents(split_products), *_PARAMETERS, "grad_product", "batch", "features"),
        grid,
        resident=resident,
        shared=panel.shared,
        cluster=panel.cluster,
        absent=_exponents(not split_products),
    )  # fmt: skip


def _exponents(there: bool) -> tuple[str, ...]:
    """The fields for x's exponents and for those of the gradient's columns."""
    return ("x_exponents", "column_exponents") if there else ()


def cluster_panels(problem: Problem) -> Iterator[ClusterPanel]:
    """Panels for `cluster_gradient`, which holds the product and y's gradient."""
    held = DTYPE_BYTES[problem.dtype] + DTYPE_BYTES[problem.out_dtype]
    return panels.cluster_panels(problem, ROWS_OF_A_WARP, held, vectors=5, numbers=2)


def persistent_launch(problem: Problem, split_products: bool) -> Launch | None:
    """Persistent blocks that take work items, and read again out of the L2; None if that cannot keep a panel twice."""
    chip, columns = panels.hopper(problem), _persistent_columns(problem)
    row = columns * (DTYPE_BYTES[problem.dtype] + DTYPE_BYTES[problem.out_dtype])
    count, panel = -(-problem.out_features // columns), row * problem.batch
    if chip is None or panel > LARGEST_PANEL:
        return None
    shared = (WARPS * 2 + 1) * columns * 4 + 16
    return Launch(
        "fused_gemm_scale_bn_gradient",
        "backward/persistent_gradient.cuh",
        "persistent_gradient",
        (
            *type_members(problem),
            ("kRowsPerWarp", _persistent_rows(problem) // WARPS),
            ("kSharedBytes", shared),
            ("Activation", "Activation"),
        ),
        ("grad_y", "product", "offset", *VECTORS[1:], "mean", "rstd", "bn_weight", "bn_bias", "eps", "group_sum",
         "group_dot", "mean_grad", "slope_grad", "merged_slope", "merged_shift", *_exponents(split_products),
         *_PARAMETERS, "grad_product", "counters", "lag", "batch", "features"),
        Extent(count, _persistent_rows(problem), 2 * chip.multiprocessors, 1),  # one merges at least
        shared=shared,
        cooperative=True,
        numbers=(("lag", min(max(2, -(-IN_FLIGHT // panel)), count)),),
        absent=_exponents(not split_products),
    )  # fmt: skip


def _persistent_rows(problem: Problem) -> int:
    """Rows of a work item: what a block's registers hold."""
    return WARPS * (32 if problem.dtype == problem.out_dtype else 16)


def _persistent_columns(problem: Problem) -> int:
    """Features of a work item."""
    return WIDE * 16 // DTYPE_BYTES[problem.dtype]


def most_rows(plan: Plan) -> int | None:
    """The largest batch that a backward's launches serve; None for any."""
    for launch in plan.launches:
        if launch.function == "cluster_gradient":
            return int(launch.member("kRowsPerWarp")) * launch.cluster * WARPS
    return None


def _three_launches(problem: Problem, split_products: bool) -> tuple[Launch, ...]:
    """Column sums of every group of rows, their merge, and the gradient of the product."""
    t, kind, activation = tiling(problem), ("kForm", form(problem)), ("Activation", "Activation")
    many = problem.derivative_registers == "many"
    return (
        Launch(
            "fused_gemm_scale_bn_gradient_sums",
            "backward/gradient.cuh",
            "gradient_sums",
            (*type_members(problem), *t.members, kind, activation),
            ("grad_y", "product", "offset", *VECTORS, "mean", "rstd", "bn_weight", "bn_bias", "group_sum",
             "group_dot", "group_linear", "batch", "features"),
            t.blocks,
            # Three where the registers allow it: not many of them over two dtypes, nor the sums of an evaluation.
            resident=3 if problem.training and not (many and problem.out_dtype != problem.dtype) else 2,
        ),
        _merge(problem, split_products),
        Launch(
            "fused_gemm_scale_bn_gradient_apply",
            "backward/gradient.cuh",
            "product_gradient",
            (*type_members(problem), *t.members, kind, activation),
            ("grad_y", "product", "offset", *VECTORS, "mean", "rstd", "bn_weight", "bn_bias", "mean_grad",
             "slope_grad", *_exponents(split_products), "grad_product", "batch", "features"),
            t.blocks,
            # Many beside eight columns' coefficients are more than the 128 that two blocks leave a thread.
            resident=1 if many else 2,
            absent=_exponents(not split_products),
        ),
    )  # fmt: skip


def _merge(problem: Problem, split_products: bool, rows: int = GROUP_ROWS) -> Launch:
    """Sums over groups of so many rows → the gradients of per-feature parameters, and what the last launch needs."""
    return Launch(
        "fused_gemm_scale_bn_gradient_merge",
        "backward/gradient.cuh",
        "merge_gradients",
        (*type_members(problem, "LR"), ("kForm", form(problem)), ("kColumns", merge_columns(problem)), ("kRows", rows)),
        ("group_sum", "group_dot", "group_linear", "scale", "scale_stride", "scale_value", "rstd", "bn_weight", "eps",
         "mean_grad", "slope_grad", *_exponents(split_products)[1:], *_PARAMETERS, "batch", "features"),
        merge_grid(problem),
        absent=(*_exponents(not split_products)[1:], "row_count"),
    )  # fmt: skip


def _between(problem: Problem, rows: int = GROUP_ROWS) -> tuple[Buffer, ...]:
    """What launches, or work items, hand to each other: sums over so many rows."""
    shape = Extent(1, rows), Extent(problem.out_features)
    sums = ("group_sum", "group_dot") + (() if problem.training else ("group_linear",))
    return (*(Buffer(role, "float32", shape) for role in sums), *_vectors(problem, "mean_grad", "slope_grad"))


def _vectors(problem: Problem, *roles: str) -> tuple[Buffer, ...]:
    return tuple(Buffer(role, "float32", (Extent(problem.out_features),)) for role in roles)


def _with_products(
    problem: Problem, strategy: str, launches: tuple[Launch, ...], workspace: tuple[Buffer, ...], counters: int
) -> Plan:
    """`launches` up to the gradient of the product, and two products by cuBLAS.

    The same for every strategy: what a forward saves is the mean and rstd of each feature and, where that is kept, the
    product.
    """
    features = Extent(problem.out_features)
    of_x, of_weight = problem.grad_dtypes or (problem.dtype, problem.dtype)
    return Plan(
        problem,
        "backward",
        strategy,
        (
            *launches,
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
        counters=counters,
    )
