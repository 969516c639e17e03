"""Plans with the own GEMM for Hopper: statistics in its epilogue, and the whole chain in one kernel."""

from __future__ import annotations

from dataclasses import dataclass

from . import library
from .cost import gemm_seconds
from .library import GROUP_ROWS, GROUPS, ROWS, VECTORS
from .problem import CHIPS, DTYPE_BYTES, Problem, c_types
from .steps import Buffer, Extent, Launch, Map, Plan, Step

TILE_ROWS = 2 * GROUP_ROWS
ROW_BYTES = 128  # of K in one pipeline stage
STAGES = {(2, 256): 3, (2, 128): 5, (2, 64): 8, (2, 32): 10, (4, 256): 4, (4, 128): 6, (4, 64): 8, (4, 32): 10}
MOST_GROUPS_IN_ONE_WAVE = 32  # beyond, every block would read too many partial results
COUNTERS = 2  # before the two of each panel


@dataclass(frozen=True)
class Tile:
    """The GEMM's tile: 128 rows by `columns`, a ring of `stages`, and the shared memory that takes."""

    columns: int
    stages: int
    size: int  # bytes of an operand's element

    @property
    def k(self) -> int:
        """Elements of K in one stage."""
        return ROW_BYTES // self.size

    @property
    def shared(self) -> int:
        """sizeof(GemmShared): the kernel asserts at compile time that it is."""
        staged = self.size == 2 and self.columns >= 64
        size = self.stages * (TILE_ROWS + self.columns) * ROW_BYTES
        size += 2 * (GROUP_ROWS * self.columns * 2 if staged else 1024)
        size += (2 * 4 + 2 * 2 + 2) * self.columns * 4
        size += 2 * self.stages * 8 + 4 * 8 + 4
        return -(-size // 1024) * 1024

    def counts(self, problem: Problem) -> tuple[int, int]:
        """Tiles along the batch and along the features."""
        return -(-problem.batch // TILE_ROWS), -(-problem.out_features // self.columns)


def refusal(problem: Problem) -> str | None:
    """Why the Hopper kernels cannot serve `problem`, or None."""
    chip = problem.chip
    if chip is None or chip.arch != 90:
        return "the kernels use Hopper's instructions (compute capability 9.0)"
    if problem.dtype == "float32" and problem.arithmetic != "tf32":
        return "float32 accuracy is not to be had from one TF32 product"
    size = DTYPE_BYTES[problem.dtype]
    if problem.in_features * size % 16 or problem.out_features * size % 16:
        return "a row of x or of the product is no multiple of 16 bytes, which the copy engine asks for"
    if not problem.training and problem.save:
        return "in evaluation the product is not kept, and gradients are wanted"
    return None


def choose_tile(problem: Problem) -> Tile:
    """The tile with the least predicted time: waves of blocks × (main loop + epilogue), in clocks."""
    size = DTYPE_BYTES[problem.dtype]
    chip = problem.chip or CHIPS[90]

    def clocks(tile: Tile) -> float:
        rows, panels = tile.counts(problem)
        waves = -(-rows * panels // chip.multiprocessors)
        steps = -(-problem.in_features // tile.k)
        return waves * (steps * max(4.0 * tile.columns, 330.0 + tile.columns) + 2500 + 8 * tile.columns)

    return min((Tile(columns, STAGES[size, columns], size) for columns in (256, 128, 64, 32)), key=clocks)


def forward(problem: Problem, strategy: str) -> Plan:
    """`one_kernel`: a single launch. `gemm_stats_apply`: the GEMM with statistics, the merge, the normalisation."""
    tile = choose_tile(problem)
    chip = problem.chip or CHIPS[90]
    types, features = c_types(problem), Extent(problem.out_features)
    rows, panels = tile.counts(problem)
    one_wave = rows * panels <= chip.multiprocessors and -(-problem.batch // GROUP_ROWS) <= MOST_GROUPS_IN_ONE_WAVE
    if not problem.training:
        finish = "kEvaluate"
    elif strategy == "gemm_stats_apply":
        finish = "kStatistics"
    else:
        finish = "kOneBlock" if rows == 1 else "kOneWave" if one_wave else "kPersistent"
    half = problem.dtype != "float32"
    group_panels = _group_panels(problem, tile)
    boxes, boxes_y = (ROW_BYTES // DTYPE_BYTES[dtype] for dtype in (problem.dtype, problem.out_dtype))
    launch = Launch(
        {"kEvaluate": "fused_gemm_scale_bn_evaluate", "kStatistics": "fused_gemm_statistics"}.get(
            finish, "fused_gemm_scale_bn"
        ),
        "fused_gemm.cuh",
        "fused_gemm",
        (
            types["T"] if half else "gemmnorm::tf32",
            *types.values(),
            str(tile.columns),
            str(tile.stages),
            str(tile.shared),
            f"gemmnorm::Finish::{finish}",
            "Activation",
        ),
        ("map_x", "map_weight", "map_product", "map_y", "stored_product", "y", *VECTORS, "running_mean", "running_var",
         "num_batches_tracked", "bn_weight", "bn_bias", "momentum", "eps", "group_mean", "group_m2", "mean", "rstd",
         "merged_slope", "merged_shift", "counters", "group_panels", "stream_x", "keep_product", "batch", "in_features",
         "features"),
        Extent(panels, TILE_ROWS, chip.multiprocessors),
        block=384,
        resident=1,
        shared=tile.shared,
        cooperative=finish in ("kOneWave", "kPersistent"),
        maps=(
            Map("map_x", "x", TILE_ROWS, tile.k),
            Map("map_weight", "weight", tile.columns, tile.k),
            Map("map_product", "product", GROUP_ROWS, boxes if problem.training else boxes_y),
            Map("map_y", "y", GROUP_ROWS, boxes_y),
        ),
        numbers=(
            ("group_panels", group_panels),
            ("stream_x", int(group_panels < panels and not _fits_l2(problem))),
            ("keep_product", int(problem.save or strategy == "gemm_stats_apply")),
        ),
    )  # fmt: skip
    steps: tuple[Step, ...] = (launch,)
    product = Buffer("product", problem.dtype, (ROWS, features))
    y = Buffer("y", problem.out_dtype, (ROWS, features))
    partial = [Buffer(role, "float32", (GROUPS, features)) for role in ("group_mean", "group_m2")]
    vectors = [Buffer(role, "float32", (features,)) for role in ("mean", "rstd")]
    merged = ("merged_slope", "merged_shift") if finish == "kPersistent" else ()
    workspace = [Buffer(role, "float32", (features,)) for role in merged]
    aliases: tuple[tuple[str, str], ...] = ()
    outputs = [y]
    if problem.training and problem.save:
        outputs += [product, partial[0], *vectors]
        workspace.append(partial[1])
    elif problem.training:
        workspace += [*partial, *vectors]
    if not problem.save:
        if problem.training and problem.dtype != problem.out_dtype:
            workspace.append(product)
        else:
            aliases = (("product", "y"),)
    if finish == "kStatistics":
        steps += (library.merge(problem, fold=True), library.normalize(problem, fold=True, offset="group_mean"))
    return Plan(
        problem,
        "forward",
        strategy,
        steps,
        tuple(outputs),
        tuple(workspace),
        aliases,
        counters=COUNTERS + 2 * panels if finish in ("kOneBlock", "kOneWave", "kPersistent") else 0,
        seconds=gemm_seconds(problem) * (1.06 if problem.training else 1.01),
        floor=gemm_seconds(problem),
    )


def _fits_l2(problem: Problem) -> bool:
    """Whether x stays in the L2 while all panels use it."""
    return problem.batch * problem.in_features * DTYPE_BYTES[problem.dtype] <= 30e6


def _group_panels(problem: Problem, tile: Tile) -> int:
    """Panels that are worked on together: as many as one wave completes; more where x is too large to be read again."""
    chip = problem.chip or CHIPS[90]
    rows, panels = tile.counts(problem)
    least = 1 if _fits_l2(problem) else 4
    return max(1, min(panels, 8, max(chip.multiprocessors // rows, least)))
