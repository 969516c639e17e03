"""`fused_gemm` as explicit choices make it: a tile, a schedule, what is converted before. Nothing is decided here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import cast, gram, memory_bound
from .problem import CHIPS, DTYPE_BYTES, Problem, type_members
from .split import (
    ALL_ROWS,
    OF_A_GUARD,
    OPERANDS,
    PREPARED,
    ROW_BYTES,
    fallback,
    fallback_counters,
    split_operands,
    split_rows,
)
from .steps import (
    GROUP_ROWS,
    GROUPS,
    OPERAND_MAPS,
    ROWS,
    VECTORS,
    Buffer,
    Extent,
    Launch,
    Map,
    Plan,
    Step,
    operand_maps,
)
from .tile import Tile

LARGE_X = 1e8  # bytes from where reading x again costs more than stored tiles that leave the L2
MOST_SPLIT_FEATURES = 1 << 24  # times 127 rows of a tile is below 2^31
ENTRIES = {
    "evaluate": "fused_gemm_scale_bn_evaluate",
    "statistics": "fused_gemm_statistics",
    "exact-statistics": "fused_gemm_statistics",
    "missing-statistics": "fused_gemm_statistics",
    "normalize": "fused_gemm_scale_bn_apply",
}
COUNTERS = 2  # before the two of each panel
BANDS, RING_BYTES = 64, 25 * 1024  # counters of x's rows where the kernel converts; shared memory where it splits them
# Schedule → the kernel's epilogue, and its file (kernels/gemm/epilogue_<file>.cuh).
EPILOGUES = {
    # The running statistics are known.
    "evaluate": ("EvaluateEpilogue", "evaluate"),
    # Two more launches merge the groups' statistics and normalise.
    "statistics": ("StatisticsEpilogue", "statistics"),
    # Of "two-pass", merged by another launch; of "gram", where the Gram matrix has not given them. The last launch of
    # both multiplies again, with known statistics.
    "exact-statistics": ("ExactStatisticsEpilogue", "statistics"),
    "missing-statistics": ("MissingStatisticsEpilogue", "statistics"),
    "normalize": ("NormalizeEpilogue", "evaluate"),
    # A block has all rows of its features.
    "single-tile": ("SingleTileEpilogue", "single_tile"),
    # The tiles of some panels run at once, and wait on the chip for their panel's statistics.
    "co-resident": ("CoResidentEpilogue", "co_resident"),
    # Tiles are stored, and normalised out of the L2 once their panel is complete.
    "deferred": ("DeferredEpilogue", "deferred"),
}
FIRST = {"two-pass": "exact-statistics", "gram": "missing-statistics"}  # schedules that multiply twice, and their first
UNSTORED = (*FIRST, *FIRST.values(), "normalize")  # schedules that have no use for a product
ONE_LAUNCH = ("single-tile", "co-resident", "deferred")  # training schedules that are one
# Fields of the operands that the kernel converts, and of what only split operands have.
_CONVERTED = ("source_x", "source_weight", "converted_x", "converted_weight")
_SPLIT = (
    "x_exponents",
    "weight_exponents",
    "weight_amax",
    "weight_abs_sum",
    "weight_checksums",
    "amax_state",
    "fallback_features",
)


def refusal(problem: Problem, strategy: str) -> str | None:
    """Why the Hopper kernels cannot serve `problem`, or None."""
    chip = problem.chip
    if chip is None or chip.arch != 90:
        return "the kernels use Hopper's instructions (compute capability 9.0)"
    if problem.arithmetic == "ieee":
        return "float32 arithmetic is asked for by name"
    if problem.prepared and (problem.training or not problem.split):
        return "a weight is split ahead for evaluation in float32 only"
    if problem.split and problem.out_features >= MOST_SPLIT_FEATURES:
        return "the kernel finds float32 results by 32-bit offsets, which so many features exceed"
    if problem.split and strategy == "gemm_stats_apply":
        return "float32 by split operands is built into one_kernel only"
    size = DTYPE_BYTES[problem.dtype]
    if problem.out_features * size % 16 and not problem.split:
        return "a row of the product is no multiple of 16 bytes, which TMA asks for"
    if not problem.training and problem.save:
        return "in evaluation the product is not kept, and gradients are wanted"
    return None


@dataclass(frozen=True)
class Gemm:
    """Every choice of a `fused_gemm` that the problem leaves open.

    Attributes:
        tile: of a block.
        schedule: a key of `EPILOGUES`; or of `FIRST`: "two-pass" multiplies for the statistics and again for y, "gram"
            has them from the Gram matrix of x, and the first product only where that is inexact; or "gradient", for
            the backward that multiplies again.
        group_panels: panels (columns of tiles) that are worked on together, so that the L2 holds what they share.
        panels: that the grid has blocks for; all of them, or, co-resident, as many as run at once.
        cluster: blocks; the tiles of a panel where those are a cluster.
        sharing: blocks of a cluster, neighbours along the features, that load each tile of x once for all of them.
        queued: blocks take tiles as they become free, by a counter of the launch.
        in_registers: co-resident tiles wait for their panel in registers, where shared memory has room too.
        weight_rows, x_rows, chunks: of the operands, that a launch before converts; the kernel converts the others
            beside its multiplications. All of the weight are `out_features`, all of x `ALL_ROWS`, whatever the batch.
            Chunks of `cast.COLUMNS` of K.
    """

    tile: Tile
    schedule: str
    group_panels: int
    panels: int
    weight_rows: int
    x_rows: int = ALL_ROWS
    chunks: int = 1
    cluster: int = 1
    sharing: int = 1
    queued: bool = False
    in_registers: bool = False

    def words(self, problem: Problem) -> str:
        """In a candidate's name."""
        found = f"{self.tile.rows}x{self.tile.columns} {self.schedule}, {self.panels} panels by {self.group_panels}"
        if self.cluster > 1:
            found += f" in clusters of {self.cluster}"
        if self.sharing > 1:
            found += f" sharing x by {self.sharing}"
        if self.queued:
            found += " queued"
        if self.in_registers:
            found += " in registers"
        if self.converts(problem):
            x = "x" if self.x_rows == ALL_ROWS else f"x[:{self.x_rows}]"
            found += f" {x} w[:{self.weight_rows}] k[:{self.chunks}] converted before"
        return found

    def plan(self, problem: Problem, strategy: str) -> Plan:
        """The plan of these choices."""
        return gemm_plan(problem, strategy, self)

    def converts(self, problem: Problem) -> bool:
        """Rows or columns are left to the kernel, whose blocks then wait for each other."""
        rows_left = self.x_rows != ALL_ROWS or self.weight_rows < problem.out_features
        return rows_left or self.chunks < cast.chunks(problem)

    def has_conversion(self, problem: Problem) -> bool:
        """The kernel has the code that converts operands; where it splits them, even if none are left to it."""
        return self.schedule in ("deferred", "evaluate") if problem.split else self.converts(problem)

    def in_step(self, problem: Problem) -> Gemm:
        """With a ring of one stage more than a tile takes, where blocks take tiles and store rows of partial sectors.

        What two neighbouring tiles write to the same sector meets in the L2, unless a block is several tiles ahead.
        """
        if not self.queued or not self.partial_sectors(problem):
            return self
        return replace(self, tile=replace(self.tile, stages=min(self.tile.stages, self.tile.steps(problem) + 1)))

    def partial_sectors(self, problem: Problem) -> int:
        """How many of the matrices it stores have rows that are no whole sectors, where tiles share those."""
        return 0 if self.tile.overlap else partial_sectors(problem, self.schedule)

    @property
    def merges(self) -> bool:
        """A warp merges a panel's statistics for tiles that have left the registers."""
        return self.schedule == "deferred" or (self.schedule == "co-resident" and self.tile.waits)


def fused_gemm(
    problem: Problem,
    gemm: Gemm,
    entry: str,
    epilogue: str,
    conversion: str,
    *,
    more_shared: int,
    operands: tuple[str, str],
    matrices: tuple[Map, ...],
    fields: tuple[str, ...],
    numbers: tuple[tuple[str, int], ...],
    tile_counter: int,
) -> Launch:
    """What all launches of `fused_gemm` have in common.

    Args:
        entry: the launch's name; epilogue, conversion: types of the kernel.
        more_shared: bytes of shared memory beside `Tile.shared`.
        operands: roles of x and the weight as they are multiplied.
        matrices: that are read or stored by tiles beside the operands.
        fields: of `Params`, between the maps and the numbers; numbers: that the plan decides.
        tile_counter: which of the plan's counters blocks take tiles by, if they do.
    """
    tile, shared = gemm.tile, gemm.tile.shared + more_shared
    operand = "T" if problem.dtype != "float32" else "gemmnorm::fp16x2" if problem.split else "gemmnorm::tf32"
    numbers += (
        *((("tile_counter", tile_counter),) if gemm.queued else ()),
        ("stream_x", int(streams_x(problem, gemm.schedule))),
        ("keep_product", int(writes_product(problem, gemm.schedule))),
    )
    return Launch(
        entry,
        "gemm/kernel.cuh",
        "fused_gemm",
        (
            *type_members(problem),
            ("Operand", operand),
            ("kTileRows", tile.rows),
            ("kTileColumns", tile.columns),
            ("kStages", tile.stages),
            ("kSharing", gemm.sharing),
            ("kQueued", int(gemm.queued)),
            ("kSharedBytes", shared),
            ("Epilogue<>", f"gemmnorm::{epilogue}"),
            ("Conversion<>", f"gemmnorm::{conversion}"),
            ("Activation", "Activation"),
        ),
        (*OPERAND_MAPS, *(m.role for m in matrices), *fields, *dict(numbers), "batch", "in_features", "features"),
        Extent(gemm.panels, tile.rows, (problem.chip or CHIPS[90]).multiprocessors // gemm.sharing * gemm.sharing),
        block=384,
        resident=1,
        shared=shared,
        cluster=max(gemm.cluster, gemm.sharing),
        maps=(
            *operand_maps(*operands, (tile.rows, tile.columns), tile.k, shared=gemm.sharing, overlap=tile.overlap),
            *matrices,
        ),
        numbers=numbers,
    )


def gemm_launch(problem: Problem, gemm: Gemm, tile_counter: int = 0) -> Launch:
    """A forward's launch. `tile_counter`: which of the plan's counters blocks take tiles by, if they do."""
    schedule, converts = gemm.schedule, gemm.has_conversion(problem)
    if schedule in FIRST.values():
        gemm = replace(gemm, tile=gemm.tile.without_overlap().without_staging())
    else:
        gemm = gemm.in_step(problem)
    boxes, boxes_y = (ROW_BYTES // DTYPE_BYTES[dtype] for dtype in (problem.dtype, problem.out_dtype))
    boxes_product = boxes if product_has_buffer(problem, schedule) else boxes_y
    results = (("product", boxes_product), ("y", boxes_y)) if gemm.tile.staged else ()  # else from registers to memory
    x, weight = (f"split_{name}" if problem.split else cast.operand(problem, name) for name in cast.OPERANDS)
    made = _converted_roles(problem, converts)
    own = _SPLIT if problem.prepared else tuple(field for field in _SPLIT if field != "weight_checksums")
    own = own if problem.split else ()
    absent = tuple(field for field in (*_CONVERTED, *_SPLIT) if field not in (*dict(made), *own))
    absent += ("inexact",) if schedule != "missing-statistics" else ()
    epilogue, file = EPILOGUES[schedule]
    parts = [f"gemm/epilogue_{file}.cuh"]
    parts += [f"gemm/conversion_{'split' if problem.split else 'cast'}.cuh"] if converts else []
    parts += ["gemm/mainloop_split.cuh"] if problem.split else []
    launch = fused_gemm(
        problem,
        gemm,
        ENTRIES.get(schedule, "fused_gemm_scale_bn"),
        epilogue,
        ("SplitConversion" if problem.split else "CastConversion") if converts else "NoConversion",
        more_shared=RING_BYTES if converts and problem.split else 0,
        operands=(x, weight),
        matrices=tuple(found for name, columns in results for found in _result_maps(name, columns, gemm.tile)),
        fields=(
            "stored_product", "y", *VECTORS, "running_mean", "running_var", "num_batches_tracked",
            *(("inexact",) if schedule == "missing-statistics" else ()), "bn_weight", "bn_bias", "momentum", "eps",
            "group_mean", "group_m2", "mean", "rstd", "merged_slope", "merged_shift", "counters", *dict(made), *own,
        ),
        numbers=(
            ("x_rows", gemm.x_rows),
            ("weight_rows", gemm.weight_rows),
            ("chunks_converted", gemm.chunks),
            ("group_panels", gemm.group_panels),
            ("in_registers", int(gemm.in_registers)),
        ),
        tile_counter=tile_counter,
    )  # fmt: skip
    waits = schedule == "deferred" or (schedule == "co-resident" and gemm.cluster == 1)
    return replace(
        launch,
        cooperative=waits or gemm.converts(problem),
        roles=made,
        absent=absent,
        parts=tuple(parts),
    )


def _result_maps(name: str, columns: int, tile: Tile) -> tuple[Map, ...]:
    """By which tiles store a matrix: with an overlap, even and odd rows by a map each."""
    if not tile.overlap:
        return (Map(f"map_{name}", name, GROUP_ROWS, columns, exact=True),)
    even, odd = (Map(f"map_{kind}{name}", name, tile.rows // 4, columns, exact=True) for kind in ("", "odd_"))
    return replace(even, parity=0), replace(odd, parity=1)


def streams_x(problem: Problem, schedule: str) -> bool:
    """The L2 lets go of x first."""
    return schedule != "co-resident" and problem.dtype != "float32" and bytes_of_x(problem) > LARGE_X


def _converted_roles(problem: Problem, converts: bool) -> tuple[tuple[str, str], ...]:
    """(field, role) of the rows that the kernel converts to operands itself."""
    names = [name for name in cast.OPERANDS if problem.split or (converts and name in problem.made)]
    source, target = ("", "split_") if problem.split else ("given_", "cast_")
    return tuple(
        pair
        for name in names
        for pair in ((f"source_{name}", f"{source}{name}"), (f"converted_{name}", f"{target}{name}"))
    )


def bytes_of_x(problem: Problem) -> int:
    """Bytes of x as it is multiplied."""
    return problem.batch * problem.in_features * DTYPE_BYTES[problem.dtype]


def writes_product(problem: Problem, schedule: str) -> bool:
    """A launch stores every tile of the product: where gradients are wanted, or another launch normalises it."""
    return schedule == "statistics" or (problem.saves_product and schedule not in (*FIRST.values(), "gradient"))


def stored_dtypes(problem: Problem, schedule: str) -> tuple[str, ...]:
    """Of the matrices [batch, out_features] that tiles store."""
    product = writes_product(problem, schedule) or schedule in ("deferred", "gradient")
    y = schedule not in ("statistics", "gradient", *FIRST.values())
    return (problem.dtype,) * product + (problem.out_dtype,) * y


def partial_sectors(problem: Problem, schedule: str) -> int:
    """How many of these have rows that are no whole sectors: two neighbouring tiles write to those at their border."""
    rows = [problem.out_features * DTYPE_BYTES[dtype] for dtype in stored_dtypes(problem, schedule)]
    return sum(row % cast.SECTOR_BYTES > 0 for row in rows)


def product_has_buffer(problem: Problem, schedule: str) -> bool:
    """The product has memory of its own type; else its role shares y's, and nothing is stored under it."""
    return problem.training and (problem.saves_product or schedule not in UNSTORED)


def gemm_plan(problem: Problem, strategy: str, gemm: Gemm) -> Plan:
    """`one_kernel`: the launch alone. `gemm_stats_apply`: with statistics, then their merge and the normalisation.

    That reads the product, or multiplies again, after a pass that only took statistics or after the Gram matrix of x.

    What converts operands comes before, and of split ones a launch that computes flagged features once more after it.
    """
    features = Extent(problem.out_features)
    twice, by_gram = gemm.schedule in FIRST, gemm.schedule == "gram"
    own, queued = _own_counters(problem, gemm), 2 if twice else 1
    counters = own + queued * gemm.queued + (fallback_counters(problem) if problem.split else 0)
    launch = gemm_launch(problem, replace(gemm, schedule=FIRST.get(gemm.schedule, gemm.schedule)), own)
    steps: tuple[Step, ...] = (gram.launch(problem), launch) if by_gram else (launch,)
    product = Buffer("product", problem.dtype, (ROWS, features))
    y = Buffer("y", problem.out_dtype, (ROWS, features))
    partial = [Buffer(role, "float32", (GROUPS, features)) for role in ("group_mean", "group_m2")]
    vectors = [Buffer(role, "float32", (features,)) for role in ("mean", "rstd")]
    merged = ("merged_slope", "merged_shift") if gemm.merges else ()
    workspace = [Buffer(role, "float32", (features,)) for role in merged]
    workspace += gram.workspace(problem) if by_gram else ()
    aliases: tuple[tuple[str, str], ...] = ()
    outputs = [y]
    if problem.training:
        outputs += [product, partial[0]] if problem.saves_product else []
        outputs += vectors if problem.save else []
        workspace += partial[1:] if problem.saves_product else partial
        workspace += [] if problem.save else vectors
    if not problem.saves_product:
        if product_has_buffer(problem, gemm.schedule) and problem.dtype != problem.out_dtype:
            workspace.append(product)
        else:
            aliases = (("product", "y"),)
    if problem.split:
        weight_rows = 0 if problem.prepared else gemm.weight_rows
        steps = (split_rows(problem, gemm.x_rows, weight_rows, (*OPERANDS, *OF_A_GUARD)), launch, fallback(problem))
        workspace += split_operands(problem)
        workspace.append(Buffer("fallback_features", "int32", (features,)))
        workspace += [Buffer(role, "float32", (features,)) for role in ("weight_amax", "weight_abs_sum")]
        if problem.prepared:
            workspace = [buffer for buffer in workspace if buffer.role not in PREPARED]
    merge = memory_bound.merge(problem, True, gemm.tile.without_overlap().group_rows)
    if gemm.schedule == "statistics":
        steps += (merge, memory_bound.normalize(problem, fold=True, offset="group_mean", after_product=True))
    elif twice:
        again = replace(
            gemm, schedule="normalize", x_rows=ALL_ROWS, weight_rows=problem.out_features, chunks=cast.chunks(problem)
        )
        steps += (*(() if by_gram else (merge,)), gemm_launch(problem, again, own + 1))
    found = Plan(
        problem, "forward", strategy, steps, tuple(outputs), tuple(workspace), aliases, counters=counters
    )  # fmt: skip
    return cast.with_operands(found, gemm.x_rows, gemm.weight_rows, gemm.chunks) if problem.made else found


def _own_counters(problem: Problem, gemm: Gemm) -> int:
    """32-bit numbers that the kernel counts with, those left out by which blocks take tiles."""
    _, panels = gemm.tile.counts(problem, gemm.sharing)
    of_panels = COUNTERS + 2 * panels
    if gemm.schedule == "gram":
        return COUNTERS + max(gram.tiles(problem)[0], panels)
    if gemm.has_conversion(problem):
        return of_panels + (panels + BANDS) * cast.chunks(problem)
    return of_panels if gemm.schedule in ONE_LAUNCH or problem.split else 0
