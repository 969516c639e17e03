"""Statistics of a product from the Gram matrix of x, before anybody multiplies it (kernels/gram/kernel.cuh)."""

from __future__ import annotations

from . import cast
from .problem import CHIPS, DTYPE_BYTES, Problem, type_members
from .steps import VECTORS, Buffer, Extent, Launch, Map

TILE = 128  # rows and columns of a block's part of the matrix; features of a tile of W·G
WARPS = 8
STEP = 64  # rows of x, unless `narrow`, or columns of the weight, in a stage; columns of the matrix in a tile of W·G
ROW_BYTES = 128
ROW_STAGES, COLUMN_STAGES = 6, 6  # of two operands, of three
SCALARS = 5  # sums over columns that a feature needs


def across(problem: Problem) -> int:
    """Tiles of columns of the matrix."""
    return -(-problem.in_features // TILE)


def parts(problem: Problem) -> int:
    """Number of 128 × 128 blocks of the Gram matrix, upper triangle only."""
    return across(problem) * (across(problem) + 1) // 2


def slices(problem: Problem) -> int:
    """Number of thread blocks that share one part, a slice of the rows each."""
    return (problem.chip or CHIPS[90]).multiprocessors // parts(problem)


def tiles(problem: Problem) -> tuple[int, int]:
    """Of W·G: along the features, and along the columns of the matrix."""
    return -(-problem.out_features // TILE), -(-problem.in_features // STEP)


def narrow(problem: Problem) -> bool:
    """The columns of x fit one box: a stage has twice the rows, half for each warpgroup."""
    return problem.in_features <= STEP


def stage_rows(problem: Problem) -> int:
    """Rows of x in a stage."""
    return STEP * (1 + narrow(problem))


def stages(problem: Problem) -> int:
    """Of x, in a slice."""
    return -(-problem.batch // (stage_rows(problem) * slices(problem)))


def serves(problem: Problem) -> bool:
    """The kernel has such operands, and a block for every part."""
    return problem.training and DTYPE_BYTES[problem.dtype] == 2 and slices(problem) > 0


def workspace(problem: Problem) -> tuple[Buffer, ...]:
    """The matrix and what it is made of; whether it is too inexact for any feature."""
    pitch, (row_tiles, column_tiles) = across(problem) * TILE, tiles(problem)
    shapes = {
        "gram_partial": (slices(problem) * parts(problem), TILE * TILE),
        "gram_sum": (slices(problem), pitch),
        "gram": (2 * pitch, pitch),
        "gram_columns": (3, pitch),
        "gram_scalars": (column_tiles * row_tiles, SCALARS * TILE),
    }
    made = [
        Buffer(role, "bfloat16" if role == "gram" else "float32", tuple(Extent(size) for size in shape))
        for role, shape in shapes.items()
    ]
    return (*made, Buffer("inexact", "int32", (Extent(1),)))


def launch(problem: Problem) -> Launch:
    """Mean and rstd of every feature, and its running statistics, where the matrix has the digits."""
    x, weight = (cast.operand(problem, name) for name in cast.OPERANDS)
    pitches = {buffer.role: buffer.pitch for buffer in cast.operands(problem)}
    columns = ROW_BYTES // DTYPE_BYTES[problem.dtype]
    blocks = (problem.chip or CHIPS[90]).multiprocessors
    return Launch(
        "fused_gemm_gram_statistics",
        "gram/kernel.cuh",
        "gram_statistics",
        (
            *type_members(problem, "T"),
            ("kRowStages", ROW_STAGES),
            ("kColumnStages", COLUMN_STAGES),
            ("kNarrow", int(narrow(problem))),
            ("kSharedBytes", SHARED),
        ),
        ("map_x", "map_weight", "map_gram", "x", "gram_partial", "gram_sum", "gram", "gram_columns", "gram_scalars",
         *VECTORS, "running_mean", "running_var", "num_batches_tracked", "momentum", "eps", "mean", "rstd", "inexact",
         "counters", "x_pitch", "batch", "in_features", "features"),
        Extent(blocks, limit=blocks),
        block=32 * (WARPS + 1),
        resident=1,
        shared=SHARED,
        cooperative=True,
        least=parts(problem),
        maps=(
            Map("map_x", x, STEP, columns),
            Map("map_weight", weight, TILE, columns),
            Map("map_gram", "gram", STEP, columns),
        ),
        roles=(("x", x),) if x != "x" else (),
        numbers=(("x_pitch", pitches.get(x, problem.in_features)),),
    )  # fmt: skip


# sizeof(GramShared): the kernel asserts at compile time that it is not more.
SHARED = (
    ROW_STAGES * 4 * STEP * ROW_BYTES  # boxes of x; then of the weight and the matrix
    + 2 * TILE * 2  # pivots
    + WARPS * 32 * 16  # sums of slices
    + 2 * 3 * STEP * 4  # numbers of x's columns
    + 16  # whether a tile is the last
    + 2 * (ROW_STAGES + COLUMN_STAGES) * 8
    + 1024
)
