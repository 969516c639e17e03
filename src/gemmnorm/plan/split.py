"""float32 products by split operands: what is split, what makes up for too small an exponent, the gradients."""

from __future__ import annotations

from dataclasses import replace

from .problem import CHIPS, Problem, type_members
from .steps import ROWS, THREADS, VECTORS, Buffer, Extent, Launch, Map, Plan

ROW_BYTES = 128  # of K in one pipeline stage
ALL_ROWS = 2**30  # of x, whatever the batch
SPLIT_COLUMNS = 64  # of K, high and then low
SPLIT_GEMM_TILE, SPLIT_GEMM_STAGES = 128, 3
WARP_COLUMNS = 1024  # of a row, that a warp holds


# What is kept of a weight that is split ahead of the calls, beside itself.
PREPARED = ("split_weight", "weight_exponents", "weight_amax", "weight_abs_sum", "weight_checksums")
# What `split_rows` gives where it is wanted, beside exponents: x and the weight split, sizes of rows that a guard wants
# to know, checksums of the weight's rows.
OPERANDS = ("split_x", "split_weight")
OF_A_GUARD = ("weight_amax", "weight_abs_sum", "amax_state")
OPTIONAL = (*OPERANDS, *OF_A_GUARD, "weight_checksums")


def rows_of_block(columns: int) -> int:
    """Rows, of so many columns, that a block of a pass splits: one, or one for each of its warps."""
    return THREADS // row_threads(columns)


def row_threads(columns: int) -> int:
    """Threads that split a row."""
    return 32 if columns <= WARP_COLUMNS else THREADS


def split_rows(problem: Problem, x_rows: int, weight_rows: int, optional: tuple[str, ...]) -> Launch:
    """The pass that splits the first rows of x and of the weight, and which of `OPTIONAL` it gives."""
    each = rows_of_block(problem.in_features)
    before = -(-weight_rows // each)
    return Launch(
        "fused_gemm_split_operands",
        "memory_bound/split.cuh",
        "split_rows",
        (("kRowThreads", row_threads(problem.in_features)),),
        (
            "x",
            "weight",
            "x_exponents",
            "weight_exponents",
            *optional,
            "weight_rows",
            "in_features",
            "batch",
        ),
        Extent(1, each, limit=0 if x_rows == ALL_ROWS else -(-x_rows // each) + before, plus=before),
        resident=4,
        numbers=(("weight_rows", weight_rows),),
        absent=tuple(field for field in OPTIONAL if field not in optional),
    )


def prepare(problem: Problem) -> Plan:
    """The weight alone, split: the buffers of `PREPARED`, of which the checksums come zeroed from the caller."""
    features = Extent(problem.out_features)
    launch = split_rows(problem, 0, problem.out_features, OPTIONAL)
    launch = replace(launch, grid=Extent(launch.grid.plus))
    weight, exponents = split_operands(problem)[1::2]
    sizes = (Buffer(role, "float32", (features,)) for role in ("weight_amax", "weight_abs_sum"))
    return Plan(problem, "prepare", "one_kernel", (launch,), (weight, exponents, *sizes))


def _padded(columns: int) -> Extent:
    """Columns of a split matrix."""
    return Extent(-(-columns // SPLIT_COLUMNS) * 2 * SPLIT_COLUMNS)


def split_operands(problem: Problem) -> tuple[Buffer, ...]:
    """The memory of x and the weight, split, and their exponents."""
    features, padded = Extent(problem.out_features), _padded(problem.in_features)
    return (
        Buffer("split_x", "float16", (ROWS, padded)),
        Buffer("split_weight", "float16", (features, padded)),
        Buffer("x_exponents", "int32", (ROWS,)),
        Buffer("weight_exponents", "int32", (features,)),
    )


def fallback_counters(problem: Problem) -> int:
    """Numbers that `fallback` needs: one for each 64 features, then `amax_state`."""
    return -(-problem.out_features // 64) + 4


def fallback(problem: Problem) -> Launch:
    """Features of too small an exponent, which the product has listed, once more in float32 arithmetic."""
    chip = problem.chip or CHIPS[90]
    return Launch(
        "fused_gemm_scale_bn_fallback",
        "gemm/fallback.cuh",
        "compute_fallback_features",
        (
            *type_members(problem, "LR"),
            ("kTraining", "true" if problem.training else "false"),
            ("Activation", "Activation"),
        ),
        ("x", "weight", "fallback_features", "amax_state", "stored_product", "y", *VECTORS, "running_mean",
         "running_var", "num_batches_tracked", "bn_weight", "bn_bias", "momentum", "eps", "group_mean", "mean", "rstd",
         "keep_product", "batch", "in_features", "features"),
        Extent(2 * chip.multiprocessors),
        numbers=(("keep_product", int(problem.saves_product)),),
    )  # fmt: skip


def split_backward(problem: Problem, plan: Plan) -> Plan:
    """`plan`, whose launches find the exponents, with its products by split operands.

    dx = da·W and dW = daᵀ·x add up along the rows of W and x, which is where their exponents belong: da is multiplied
    by those powers of two before it is split, by rows for one product and by columns for the other. So W and x are
    split as for the forward, and nothing is transposed. The kernels up to da need x's exponents alone: x is split once
    dx is there, and its pieces take the place of the weight's. What one of the products reads is made where that is
    wanted.
    """
    features, padded = Extent(problem.out_features), _padded(problem.out_features)
    split_x, split_weight, *exponents = split_operands(problem)
    by_rows, by_columns = (Buffer(role, "float16", (ROWS, padded)) for role in ("split_by_rows", "split_by_columns"))
    split_gradient = Launch(
        "fused_gemm_split_gradient",
        "backward/split_gradient.cuh",
        "split_gradient",
        (("kRowThreads", row_threads(problem.out_features)),),
        ("grad_product", "x_exponents", "weight_exponents", "column_exponents", "split_by_rows", "split_by_columns",
         "row_exponents", "batch", "features"),
        Extent(1, rows_of_block(problem.out_features)),
        resident=4,
    )  # fmt: skip
    steps = (
        split_rows(problem, ALL_ROWS, problem.out_features, ("split_weight",)),
        *plan.launches,
        split_gradient,
        _split_gemm(problem, "grad_x", ("split_by_rows", "split_weight", "row_exponents"), "batch", "features"),
        replace(split_rows(problem, ALL_ROWS, 0, ("split_x",)), only_for="grad_weight"),
        _split_gemm(problem, "grad_weight", ("split_by_columns", "split_x", "column_exponents"), "features", "batch"),
    )
    workspace = (
        *plan.workspace,
        *(replace(buffer, only_for="grad_x") for buffer in (split_weight, by_rows)),
        *(replace(buffer, only_for="grad_weight") for buffer in (split_x, by_columns)),
        *exponents,
        Buffer("row_exponents", "int32", (ROWS,)),
        Buffer("column_exponents", "int32", (features,)),
    )
    return replace(plan, steps=steps, workspace=workspace)


def _split_gemm(problem: Problem, out: str, operands: tuple[str, str, str], rows: str, inner: str) -> Launch:
    """out = left · right of split operands. Left is the gradient, transposed for the weight's."""
    chip, transposed = problem.chip or CHIPS[90], out == "grad_weight"
    size = SPLIT_GEMM_STAGES * 4 * SPLIT_GEMM_TILE * ROW_BYTES + 16 * SPLIT_GEMM_STAGES
    sides = (problem.out_features if transposed else problem.batch, problem.in_features)
    tiles = [-(-side // SPLIT_GEMM_TILE) for side in sides]
    shared = -(-size // 1024) * 1024
    return Launch(
        "fused_gemm_split_" + out,
        "backward/split_gemm.cuh",
        "split_gemm",
        (
            ("kTransposeA", "true" if transposed else "false"),
            ("kStages", SPLIT_GEMM_STAGES),
            ("kSharedBytes", shared),
        ),
        ("map_a", "map_b", "exponents", "out", "group_panels", "rows", "inner", "columns"),
        Extent(min(tiles[0] * tiles[1], chip.multiprocessors))
        if transposed
        else Extent(tiles[1], SPLIT_GEMM_TILE, chip.multiprocessors),
        block=384,
        resident=1,
        shared=shared,
        maps=(
            Map("map_a", operands[0], SPLIT_COLUMNS if transposed else SPLIT_GEMM_TILE, SPLIT_COLUMNS),
            Map("map_b", operands[1], SPLIT_COLUMNS, SPLIT_COLUMNS),
        ),
        # One wave of tiles about as wide as it is high.
        numbers=(("group_panels", max(1, min(tiles[1], chip.multiprocessors // min(tiles[0], 11)))),),
        only_for=out,
        roles=(("exponents", operands[2]), ("out", out), ("rows", rows), ("inner", inner), ("columns", "in_features")),
    )
