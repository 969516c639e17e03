"""Plans for one tile of rows in training: a cluster of blocks owns a panel of columns and shares out K."""

from __future__ import annotations

from .cost import gemm_seconds
from .library import GROUP_ROWS, GROUPS, ROWS, VECTORS
from .problem import CHIPS, DTYPE_BYTES, Problem, c_types
from .split import ROW_BYTES
from .steps import Buffer, Extent, Launch, Map, Plan

TILE_ROWS = 2 * GROUP_ROWS
COLUMNS = 32  # of a panel
# Blocks of a cluster → stages of each, in the order of preference; those left out are not used. Eight leave room for a
# second block on a multiprocessor, because sixteen clusters of eight need not fit side by side.
STAGES = {4: 8, 2: 8}
RESIDENT = {8: 2}


def splits(problem: Problem) -> int:
    """Blocks that share out K; 0 where the kernel does not serve `problem`, or others serve it better.

    Every block gets at least one stage of K, and all clusters run at once.
    """
    chip = problem.chip or CHIPS[90]
    if not problem.training or problem.split or problem.batch > TILE_ROWS:
        return 0
    steps = -(-problem.in_features * DTYPE_BYTES[problem.dtype] // ROW_BYTES)
    panels = -(-problem.out_features // COLUMNS)
    return next((n for n in STAGES if n <= steps and n * panels <= chip.multiprocessors), 0)


def shared_bytes(stages: int, blocks: int) -> int:
    """sizeof(SmallPanelShared): the kernel asserts at compile time that it is."""
    columns = COLUMNS // blocks  # that a block finishes
    warps = 4 if columns < 8 else 8
    size = stages * (TILE_ROWS + COLUMNS) * ROW_BYTES + TILE_ROWS * COLUMNS * 4
    size += 2 * warps * 2 * columns * 4 + 16 * stages + 8
    return -(-size // 1024) * 1024


def forward(problem: Problem, strategy: str) -> Plan:
    """The whole chain in one launch."""
    blocks, types, size = splits(problem), c_types(problem), DTYPE_BYTES[problem.dtype]
    stages, features = STAGES[blocks], Extent(problem.out_features)
    shared = shared_bytes(stages, blocks)
    launch = Launch(
        "fused_gemm_scale_bn",
        "small_panel.cuh",
        "small_panel",
        (
            types["T"] if size == 2 else "gemmnorm::tf32",
            *types.values(),
            str(COLUMNS),
            str(stages),
            str(shared),
            str(blocks),
            "Activation",
        ),
        ("map_x", "map_weight", "stored_product", "y", *VECTORS, "running_mean", "running_var", "num_batches_tracked",
         "bn_weight", "bn_bias", "momentum", "eps", "group_mean", "mean", "rstd", "counters", "keep_product", "batch",
         "in_features", "features"),
        Extent(-(-problem.out_features // COLUMNS) * blocks),
        block=288,
        resident=RESIDENT.get(blocks, 1),
        shared=shared,
        cluster=blocks,
        maps=(
            Map("map_x", "x", TILE_ROWS, ROW_BYTES // size),
            Map("map_weight", "weight", COLUMNS, ROW_BYTES // size),
        ),
        numbers=(("keep_product", int(problem.save)),),
    )  # fmt: skip
    y = Buffer("y", problem.out_dtype, (ROWS, features))
    product = Buffer("product", problem.dtype, (ROWS, features))
    group_mean = Buffer("group_mean", "float32", (GROUPS, features))
    vectors = tuple(Buffer(role, "float32", (features,)) for role in ("mean", "rstd"))
    return Plan(
        problem,
        "forward",
        strategy,
        (launch,),
        (y, product, group_mean, *vectors) if problem.save else (y,),
        () if problem.save else vectors,
        counters=1,
        seconds=gemm_seconds(problem) * 1.06,
        floor=gemm_seconds(problem),
    )
