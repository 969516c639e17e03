"""Plans for small batches: a cluster of blocks owns a panel of columns, and its blocks share out K."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import DTYPE_BYTES, Problem, type_members
from .split import ROW_BYTES
from .steps import GROUP_ROWS, GROUPS, OPERAND_MAPS, ROWS, VECTORS, Buffer, Extent, Launch, Plan, operand_maps

TILE_ROWS = 2 * GROUP_ROWS
NEIGHBOURS = 18  # multiprocessors among which a cluster of more than two has to find room


@dataclass(frozen=True)
class Shape:
    """How the kernel cuts up a problem.

    Attributes:
        columns: of a panel; blocks: for each tile of its rows, each of which multiplies its part of K.
        stages: of a block's ring; all of them are in flight at once.
    """

    columns: int
    blocks: int
    stages: int

    def cluster_size(self, problem: Problem) -> int:
        """Blocks of a cluster: in training it has all tiles of the batch."""
        return self.blocks * (tiles(problem) if problem.training else 1)

    def shared(self, thirds: bool, together: int) -> int:
        """sizeof(SmallShared), or more. `thirds`: float32 in three parts; `together`: tiles of a cluster."""
        columns = self.columns // self.blocks  # that a block finishes
        warps = 4 if columns < 8 else 8
        size = self.stages * (TILE_ROWS + self.columns) * ROW_BYTES + TILE_ROWS * self.columns * 4
        size += 2 * 3 * self.columns * ROW_BYTES if thirds else 0
        size += 2 * warps * 2 * columns * 4 + 16 * (self.stages // 2 if thirds else self.stages) + 8
        size += 2 * 16 * (together + 1) * columns + 16 if together > 1 else 16
        return -(-size // 1024) * 1024


CLUSTER = 16  # blocks, the most that Hopper runs
SPLIT_COLUMNS = 32  # of split operands, whose fragments fit the registers
SHAPES = (
    Shape(128, 4, 4), Shape(64, 8, 4), Shape(64, 4, 6), Shape(64, 2, 6),
    Shape(32, 8, 8), Shape(32, 4, 8), Shape(32, 2, 8), Shape(32, 1, 8),
)  # fmt: skip


def tiles(problem: Problem) -> int:
    """Number of tiles of 128 rows in the batch."""
    return -(-problem.batch // TILE_ROWS)


def clusters_at_once(multiprocessors: int, blocks: int) -> int:
    """Clusters of so many blocks that run at once, one block to a multiprocessor.

    Pairs of multiprocessors are neighbours, and a cluster of three keeps two pairs to itself (measured: 33 run at once
    on 132 multiprocessors, 40 do not).
    """
    if blocks <= 3:
        return multiprocessors // (blocks + blocks // 3)
    return multiprocessors // NEIGHBOURS * (NEIGHBOURS // blocks)


def small_plan(problem: Problem, strategy: str, found: Shape) -> Plan:
    """The whole chain in one launch."""
    size = DTYPE_BYTES[problem.dtype]
    together = tiles(problem) if problem.training else 1
    features, shared = Extent(problem.out_features), found.shared(problem.split, together)
    operands = ("x", "weight") if problem.split and not problem.training else ()
    results = ("stored_product", "num_batches_tracked", "group_mean", "mean", "rstd", "counters")
    absent = (*(() if operands else ("x", "weight")), *(() if problem.training else results))
    absent += ("merged_slope", "merged_shift", "fallback_features", "amax_state", "weight_amax", "weight_abs_sum")
    half = "T" if size == 2 else None
    launch = Launch(
        "fused_gemm_scale_bn" if problem.training else "fused_gemm_scale_bn_evaluate",
        "small/kernel.cuh",
        "small_panel",
        (
            *type_members(problem),
            ("Operand", half or ("gemmnorm::bf16x3" if problem.split else "gemmnorm::tf32")),
            ("kColumns", found.columns),
            ("kStages", found.stages // 2 if problem.split else found.stages),
            ("kSharedBytes", shared),
            ("kShares", found.blocks),
            ("kTiles", together),
            ("kTraining", str(problem.training).lower()),
            ("Activation", "Activation"),
        ),
        (*OPERAND_MAPS, *operands, *(results if problem.training else ()), "y", *VECTORS, "running_mean",
         "running_var", "bn_weight", "bn_bias", "momentum", "eps", "keep_product", "batch", "in_features", "features"),
        Extent(-(-problem.out_features // found.columns) * found.blocks, TILE_ROWS),
        block=288,
        resident=1,
        shared=shared,
        cluster=found.cluster_size(problem),
        maps=operand_maps("x", "weight", (TILE_ROWS, found.columns), ROW_BYTES // size, problem.split),
        numbers=(("keep_product", int(problem.saves_product)),),
        absent=absent,
    )  # fmt: skip
    y = Buffer("y", problem.out_dtype, (ROWS, features))
    product = Buffer("product", problem.dtype, (ROWS, features)), Buffer("group_mean", "float32", (GROUPS, features))
    vectors = tuple(Buffer(role, "float32", (features,)) for role in ("mean", "rstd"))
    return Plan(
        problem,
        "forward",
        strategy,
        (launch,),
        (y, *(product if problem.saves_product else ()), *(vectors if problem.save else ())),
        vectors if problem.training and not problem.save else (),
        counters=int(problem.training),
    )
