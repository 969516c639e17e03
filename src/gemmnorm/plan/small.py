"""Plans for one tile of rows: a cluster of blocks owns a panel of columns and shares out K."""

from __future__ import annotations

from dataclasses import dataclass

from .cost import gemm_seconds
from .library import GROUP_ROWS, GROUPS, ROWS, VECTORS
from .problem import CHIPS, DTYPE_BYTES, Problem, type_members
from .split import ROW_BYTES
from .steps import Buffer, Extent, Launch, Map, Plan

TILE_ROWS = 2 * GROUP_ROWS
NEIGHBOURS = 18  # multiprocessors among which a cluster of more than two has to find room


@dataclass(frozen=True)
class Shape:
    """How the kernel cuts up a problem.

    Attributes:
        columns: of a panel; blocks: of the cluster that owns it, each of which multiplies its part of K.
        stages: of a block's ring; all of them are in flight at once.
        least, most: stages of K, all blocks together, that it is preferred for.
        resident: blocks that fit on one multiprocessor.
    """

    columns: int
    blocks: int
    stages: int
    least: int = 0
    most: int = 1 << 30
    resident: int = 1

    def shared(self, thirds: bool) -> int:
        """sizeof(SmallPanelShared): the kernel asserts at compile time that it is. `thirds`: float32 in three parts."""
        columns = self.columns // self.blocks  # that a block finishes
        warps = 4 if columns < 8 else 8
        size = self.stages * (TILE_ROWS + self.columns) * ROW_BYTES + TILE_ROWS * self.columns * 4
        size += 2 * 3 * self.columns * ROW_BYTES if thirds else 0
        size += 2 * warps * 2 * columns * 4 + 16 * (self.stages // 2 if thirds else self.stages) + 8
        return -(-size // 1024) * 1024


# Of split operands: columns whose fragments fit the registers, and stages of K for a block beyond which the library is
# faster in training.
SPLIT_COLUMNS, MOST_SPLIT_STEPS = 32, 28
HALF_OF_THEM = 1056  # features that two blocks for every 32 of, on half of an H200's multiprocessors, share out
VERY_FEW = 4  # rows that the library multiplies by vectors, about
# In the order of preference, by the times of lab/README.md; none of them: the kernel is not used.
SHAPES = (Shape(64, 8, 4, least=64), Shape(32, 4, 8), Shape(32, 2, 8), Shape(32, 1, 8, most=16))


def clusters_at_once(multiprocessors: int, blocks: int) -> int:
    """Clusters of so many blocks that run at once, one block to a multiprocessor; pairs are neighbours."""
    return multiprocessors // blocks if blocks <= 2 else multiprocessors // NEIGHBOURS * (NEIGHBOURS // blocks)


def shape(problem: Problem) -> Shape | None:
    """The first of `SHAPES` that gives every block a stage of K and lets all clusters run at once, or None."""
    blocks = (problem.chip or CHIPS[90]).multiprocessors
    if problem.prepared or problem.batch > TILE_ROWS:
        return None
    least = 1024 if problem.split else 2048 if 128 < problem.out_features <= HALF_OF_THEM else 4096
    if problem.batch == 1 and problem.dtype == "float32" and problem.in_features >= least:
        return None  # a vector: the library multiplies those without tensor cores
    steps = -(-problem.in_features * DTYPE_BYTES[problem.dtype] // ROW_BYTES)
    for found in SHAPES:
        if problem.split and found.columns > SPLIT_COLUMNS:
            continue
        panels = -(-problem.out_features // found.columns)
        at_once = found.resident * clusters_at_once(blocks, found.blocks)
        if max(found.blocks, found.least) <= steps <= found.most and panels <= at_once:
            # Of more rows the other kernel is faster too.
            slow = problem.split and problem.batch > GROUP_ROWS and _library_is_faster(problem, found)
            return None if slow else found
    return None


def better_served(problem: Problem) -> tuple[str, str] | None:
    """A strategy that is faster than this kernel where it serves, and why."""
    found = shape(problem)
    if found and _library_is_faster(problem, found):
        return "cublas_folded_bn", "the library takes K apart into more parts, or multiplies so few rows as vectors"
    return None


def _library_is_faster(problem: Problem, found: Shape) -> bool:
    """By the times of `lab/sweep.py`."""
    batch, features, training, blocks = problem.batch, problem.out_features, problem.training, found.blocks
    if not problem.split:
        few = batch <= VERY_FEW and problem.dtype == "float32" and not training
        return blocks == 2 and problem.in_features >= (4096 if few else 8192) and features <= HALF_OF_THEM
    of_block = problem.in_features * DTYPE_BYTES[problem.dtype] / ROW_BYTES / blocks  # stages of K
    if batch <= VERY_FEW and blocks <= 2 and problem.in_features >= (512 if training else 256):
        return True
    if batch <= VERY_FEW and of_block > 20 and (training or features <= 256):
        return True
    if blocks == 1 and batch <= 2 * VERY_FEW:
        return True
    if 8 < batch <= 16 and features > 512 and (of_block <= 32 or not training):
        return False  # of so many rows the library is slow, with K up to 8192 at least
    if features <= 256:  # which leave many multiprocessors idle
        return of_block > ((14, 20) if training else (20, 40))[features > 128]
    if training:
        return of_block > MOST_SPLIT_STEPS
    return batch <= GROUP_ROWS and of_block > (64 if features > HALF_OF_THEM else 40)


def forward(problem: Problem, strategy: str) -> Plan:
    """The plan by the rules of this file."""
    found = shape(problem)
    assert found is not None
    return small_plan(problem, strategy, found)


def small_plan(problem: Problem, strategy: str, found: Shape) -> Plan:
    """The whole chain in one launch."""
    size = DTYPE_BYTES[problem.dtype]
    features, shared = Extent(problem.out_features), found.shared(problem.split)
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
            ("Operand", half or ("gemmnorm::thirds" if problem.split else "gemmnorm::tf32")),
            ("kColumns", found.columns),
            ("kStages", found.stages // 2 if problem.split else found.stages),
            ("kSharedBytes", shared),
            ("kCluster", found.blocks),
            ("kTraining", str(problem.training).lower()),
            ("Activation", "Activation"),
        ),
        ("map_x", "map_weight", *operands, *(results if problem.training else ()), "y", *VECTORS, "running_mean",
         "running_var", "bn_weight", "bn_bias", "momentum", "eps", "keep_product", "batch", "in_features", "features"),
        Extent(-(-problem.out_features // found.columns) * found.blocks),
        block=288,
        resident=found.resident,
        shared=shared,
        cluster=found.blocks,
        maps=(
            Map("map_x", "x", TILE_ROWS, ROW_BYTES // size, problem.split, fits=True),
            Map("map_weight", "weight", found.columns, ROW_BYTES // size, problem.split),
        ),
        numbers=(("keep_product", int(problem.save)),),
        absent=absent,
    )  # fmt: skip
    y = Buffer("y", problem.out_dtype, (ROWS, features))
    kept = Buffer("product", problem.dtype, (ROWS, features)), Buffer("group_mean", "float32", (GROUPS, features))
    vectors = tuple(Buffer(role, "float32", (features,)) for role in ("mean", "rstd"))
    return Plan(
        problem,
        "forward",
        strategy,
        (launch,),
        (y, *kept, *vectors) if problem.save else (y,),
        vectors if problem.training and not problem.save else (),
        counters=int(problem.training),
        seconds=gemm_seconds(problem) * (1.06 if problem.training else 1.01),
        floor=gemm_seconds(problem),
    )
