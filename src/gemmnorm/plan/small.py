"""Plans for small batches: a cluster of blocks owns a panel of columns, and its blocks share out K."""

from __future__ import annotations

from dataclasses import dataclass

from . import cast
from .problem import DTYPE_BYTES, Problem, type_members
from .split import ROW_BYTES
from .steps import GROUP_ROWS, GROUPS, OPERAND_MAPS, ROWS, VECTORS, Buffer, Extent, Launch, Plan, operand_maps

TILE_ROWS = 2 * GROUP_ROWS
NEIGHBOURS = 18  # multiprocessors among which a cluster of more than two has to find room


@dataclass(frozen=True)
class SmallPanel:
    """The choices of a `small_panel`: how it cuts up a problem.

    Attributes:
        columns: of a panel; blocks: for each tile of its rows, each of which multiplies its part of K.
        stages: of a block's ring; all of them are in flight at once.
    """

    columns: int
    blocks: int
    stages: int

    def words(self, problem: Problem) -> str:
        """In a candidate's name."""
        return f"128x{self.columns} by {self.blocks} blocks along K"

    def plan(self, problem: Problem, strategy: str) -> Plan:
        """The plan of these choices."""
        return cast.in_front(problem, lambda p: _one_launch(p, strategy, self))

    def cluster_size(self, problem: Problem) -> int:
        """Blocks of a cluster: in training it has all tiles of the batch."""
        return self.blocks * (row_tiles(problem) if problem.training else 1)

    def shared(self, thirds: bool, together: int) -> int:
        """sizeof(SmallShared), or more. `thirds`: float32 in three parts; `together`: tiles of a cluster."""
        columns = self.columns // self.blocks  # that a block finishes
        warps = 4 if columns < 8 else 8
        size = self.stages * (TILE_ROWS + self.columns) * ROW_BYTES + TILE_ROWS * self.columns * 4
        size += 2 * 3 * self.columns * ROW_BYTES if thirds else 0
        size += 2 * warps * 2 * columns * 4 + 16 * (self.stages // 2 if thirds else self.stages) + 8
        size += 2 * 16 * (together + 1) * columns + 16 if together > 1 else 16
        return -(-size // 1024) * 1024


LARGEST_CLUSTER = 16  # blocks of `small_panel`, the most that Hopper runs
MOST_SPLIT_COLUMNS = 32  # of a panel of split operands, whose fragments have to fit the registers
PANELS = (
    SmallPanel(128, 4, 4), SmallPanel(64, 8, 4), SmallPanel(64, 4, 6), SmallPanel(64, 2, 6),
    SmallPanel(32, 8, 8), SmallPanel(32, 4, 8), SmallPanel(32, 2, 8), SmallPanel(32, 1, 8),
)  # fmt: skip


def row_tiles(problem: Problem) -> int:
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


def _one_launch(problem: Problem, strategy: str, panel: SmallPanel) -> Plan:
    """The whole chain by `small_panel`, of operands that need no cast."""
    size = DTYPE_BYTES[problem.dtype]
    together = row_tiles(problem) if problem.training else 1
    features, shared = Extent(problem.out_features), panel.shared(problem.split, together)
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
            ("kColumns", panel.columns),
            ("kStages", panel.stages // 2 if problem.split else panel.stages),
            ("kSharedBytes", shared),
            ("kShares", panel.blocks),
            ("kTiles", together),
            ("kTraining", str(problem.training).lower()),
            ("Activation", "Activation"),
        ),
        (*OPERAND_MAPS, *operands, *(results if problem.training else ()), "y", *VECTORS, "running_mean",
         "running_var", "bn_weight", "bn_bias", "momentum", "eps", "keep_product", "batch", "in_features", "features"),
        Extent(-(-problem.out_features // panel.columns) * panel.blocks, TILE_ROWS),
        block=288,
        resident=1,
        shared=shared,
        cluster=panel.cluster_size(problem),
        maps=operand_maps("x", "weight", (TILE_ROWS, panel.columns), ROW_BYTES // size, problem.split),
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
