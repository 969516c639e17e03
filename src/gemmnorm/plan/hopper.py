"""Plans with the own GEMM for Hopper: statistics in its epilogue, and the whole chain in one kernel."""

from __future__ import annotations

from dataclasses import dataclass

from . import cast, library
from .cost import gemm_seconds, split_seconds
from .library import GROUP_ROWS, GROUPS, ROWS, VECTORS
from .problem import CHIPS, DTYPE_BYTES, Problem, type_members
from .small import clusters_at_once
from .split import ALL_ROWS, PREPARED, ROW_BYTES, counters_to_recompute, recompute, split_operands, split_rows
from .steps import Buffer, Extent, Launch, Map, Plan, Step

WIDE = 128  # columns of a tile that is multiplied as W·xᵀ
# Bytes of an element, its parts, rows and columns of the tile → stages of the ring.
STAGES = {
    (2, 1, 256, 128): 3, (2, 1, 128, 128): 5, (2, 1, 64, 128): 7, (2, 1, 128, 64): 8, (2, 1, 128, 32): 10,
    (4, 1, 256, 128): 3, (4, 1, 128, 128): 5, (4, 1, 64, 128): 7, (4, 1, 128, 64): 8, (4, 1, 128, 32): 10,
    (2, 2, 128, 128): 3, (2, 2, 64, 128): 4, (2, 2, 128, 64): 4, (2, 2, 128, 32): 4,
}  # fmt: skip
MOST_ROWS_IN_REGISTERS = (
    4096  # whose tiles wait for each other there; of more, every block would read too many statistics
)
SPLIT_FLOPS = 1.2e8  # of one product; below, the launches around split operands cost more than they save
LARGE_X = 1e8  # bytes from where reading x again costs more than stored tiles that leave the L2
LONG_TILE = 3072  # stages × width from where other warps can normalise a tile during the next one's main loop
MOST_TOGETHER = 4  # tiles of a panel; of larger clusters fewer run at once than there are multiprocessors for
MOST_SPLIT_FEATURES = 1 << 24  # times 127 rows of a tile is below 2^31
FEW_ROWS = 1024  # below which there is little time to make W's rows beside the product
COUNTERS = 2  # before the two of each panel
BANDS, RING_BYTES = 64, 25 * 1024  # counters of x's rows where the kernel makes any; shared memory where it splits them
# Fields of the rows that the kernel converts, and of what only split operands have.
_CONVERTED = ("source_x", "source_weight", "converted_x", "converted_weight")
_SPLIT = ("x_exponents", "weight_exponents", "weight_largest", "weight_total", "weight_checksums", "most", "flagged")


@dataclass(frozen=True)
class Tile:
    """The GEMM's tile: `rows` by `columns`, a ring of `stages`, and the shared memory that takes."""

    rows: int
    columns: int
    stages: int
    size: int  # bytes of an operand's element in shared memory
    planes: int  # of an operand: 2 where it is split
    staged: bool  # the product passes through shared memory on its way out

    @property
    def width(self) -> int:
        """Of the instruction that multiplies it: columns, or rows where the two consumers share out the columns."""
        return self.rows if self.columns == WIDE else self.columns

    @property
    def waits(self) -> bool:
        """Whether a finished tile has room to wait in shared memory."""
        return self.staged and self.size == 2

    @property
    def k(self) -> int:
        """Elements of K in one stage."""
        return ROW_BYTES // self.size

    @property
    def shared(self) -> int:
        """sizeof(GemmShared): the kernel asserts at compile time that it is."""
        size = self.stages * self.planes * (self.rows + self.columns) * ROW_BYTES
        size += 2 * (max(self.rows, 128) * self.columns if self.staged else 1024)
        size += 2 * (2 if self.columns == WIDE else 4) * self.width * 4
        size += (2 * 2 + 4) * self.columns * 4
        size += 2 * 64 * 4 + 2 * self.stages * 8 + 9 * 8
        return -(-size // 1024) * 1024

    def counts(self, problem: Problem) -> tuple[int, int]:
        """Tiles along the batch and along the features."""
        return -(-problem.batch // self.rows), -(-problem.out_features // self.columns)


def refusal(problem: Problem, strategy: str) -> str | None:
    """Why the Hopper kernels cannot serve `problem`, or None."""
    chip = problem.chip
    if chip is None or chip.arch != 90:
        return "the kernels use Hopper's instructions (compute capability 9.0)"
    if problem.arithmetic == "ieee":
        return "float32 arithmetic is asked for by name"
    if problem.split and problem.out_features >= MOST_SPLIT_FEATURES:
        return "the kernel finds float32 results by 32-bit offsets, which so many features exceed"
    if problem.split and strategy == "gemm_stats_apply":
        return "float32 by split operands is built into one_kernel only"
    size = DTYPE_BYTES[problem.dtype]
    if problem.in_features * size % 16 or problem.out_features * size % 16:
        return "a row of x or of the product is no multiple of 16 bytes, which the copy engine asks for"
    if not problem.training and problem.save:
        return "in evaluation the product is not kept, and gradients are wanted"
    return None


def better_served(problem: Problem) -> tuple[str, str] | None:
    """A strategy that is faster than `one_kernel` where that could serve, and why: `lab/sweep.py` on an H200."""
    tile, chip = choose_tile(problem), problem.chip or CHIPS[90]
    rows, panels = tile.counts(problem)
    batch, features, k = problem.batch, problem.out_features, problem.in_features
    splits_k = "cublas_folded_bn", "few or small tiles with a long K leave multiprocessors idle; the library splits K"
    if problem.split:
        side = batch * features / (batch + features)  # operations for an element that is split
        # Whole tiles of rows by many features, for which the library takes longer.
        whole = batch % tile.rows == 0 and features >= 2 * WIDE and (k <= 4096 or not problem.training)
        if k > 256:
            least = 115 if problem.training and not whole else 113
        else:
            least = 256 if problem.training or batch > 8192 else 245
        if problem.flops < SPLIT_FLOPS or batch <= GROUP_ROWS or side < least:
            return "cublas_folded_bn", "so small a product is done before its operands could be split"
        few = rows * panels <= chip.multiprocessors / (4 if k >= 4096 and not whole else 8)
        return splits_k if few and k >= 2048 else None
    wide, many = tile.columns == WIDE, batch > MOST_ROWS_IN_REGISTERS
    idle = rows * panels < 64 or (tile.columns == 32 and rows * panels <= chip.multiprocessors / 2)
    alone = problem.training and rows == 1 and batch > GROUP_ROWS  # kOneBlock
    small = tile.columns == 32 and not (many or alone)
    hangs = problem.training and batch % tile.rows > 0  # boxes of x over the last row, which take longer
    if tile.size == 4:
        long = 2048 if hangs else 3072
    else:
        long = 2048 if problem.training or rows > 1 else 6144
    if (k >= 2048 and (idle or (wide and 2 * features <= WIDE))) or (small and k >= long):
        return splits_k
    if problem.training and tile.size == 2 and tile.width == 64 and wide and rows >= 4 and k >= 4096 and not many:
        return splits_k
    if not problem.training:
        return None
    if tile.size == 4 and rows == 2 and k <= 512 and panels <= clusters_at_once(chip.multiprocessors, rows):
        return "gemm_stats_apply", "two tiles with a short K wait longer for each other than two more launches take"
    waits_long = tile.width <= 64 and batch > 2048
    if not tile.waits and many:
        waits_long |= tile.width <= 128 and rows * panels <= chip.multiprocessors
        waits_long |= k <= 256 and batch > 8192
    if waits_long:
        return "gemm_stats_apply", "small tiles of so many rows would wait long for each other's statistics"
    return None


def choose_tile(problem: Problem) -> Tile:
    """The tile with the least predicted time: waves of blocks × (main loop + epilogue), in clocks."""
    size, planes = (2, 2) if problem.split else (DTYPE_BYTES[problem.dtype], 1)
    chip = problem.chip or CHIPS[90]

    def clocks(tile: Tile) -> float:
        rows, panels = tile.counts(problem)
        waves = -(-rows * panels // chip.multiprocessors)
        steps = -(-problem.in_features // tile.k)
        products = 3 if planes == 2 else 1
        return waves * (steps * max(4.0 * products * tile.width, 330.0 + tile.width) + 2500 + 8 * tile.width)

    halved = DTYPE_BYTES[problem.dtype] == 2
    tiles = [
        Tile(rows, columns, stages, size, planes, planes == 1 and (columns == WIDE or (halved and columns >= 64)))
        for (bytes_, parts, rows, columns), stages in STAGES.items()
        if (bytes_, parts) == (size, planes)
    ]
    # Of two that are as large: the faster one, but in training the one that has all rows of such a batch.
    worse = (64, WIDE) if problem.training and 64 < problem.batch <= 128 else (128, 64)
    tiles = [tile for tile in tiles if (tile.rows, tile.columns) != worse] or tiles
    return min(tiles, key=clocks)


def _rows_ahead(problem: Problem, tile: Tile, group_panels: int) -> tuple[int, int]:
    """Rows of x and of the weight to be split or cast before the product begins; the kernel does the others itself.

    What the first wave of tiles reads, and a share of the rest: the warps that split inside the kernel are slower than
    the tensor cores (docs/float32.md has the times).
    """
    blocks = (problem.chip or CHIPS[90]).multiprocessors
    rows, panels = tile.counts(problem)
    alone = problem.training and rows == 1  # kOneBlock, which makes no rows
    if alone or rows * panels <= blocks or not (problem.split or problem.cast):
        return ALL_ROWS, problem.out_features
    if rows * group_panels >= blocks:  # along x within the first group of panels
        m_tiles, n_tiles = -(-blocks // group_panels), group_panels
    else:
        m_tiles, n_tiles = rows, blocks // (rows * group_panels) * group_panels
        begin_late = blocks - rows * n_tiles  # of the first wave, in the next group of panels
        n_tiles += min(begin_late, group_panels, panels - n_tiles) if 10 * begin_late >= blocks else 0
    if problem.cast:
        m_tiles = m_tiles if "x" in problem.cast else rows
        n_tiles = n_tiles if "weight" in problem.cast else panels
    elif m_tiles < rows:
        of_x, of_weight = (1, 3) if problem.in_features >= 4096 else (0, 0)
        m_tiles += (rows - m_tiles) * of_x // 10
        n_tiles += -(-(panels - n_tiles) * of_weight // 10)
    else:  # only the weight is left: the fewer tiles a panel has, the less time there is for its rows
        tenths = 0 if rows * tile.rows >= FEW_ROWS else 10 - rows * tile.rows // 128
        # In training those warps normalise tiles as well: often, where K is short.
        if problem.in_features < (4096 if problem.training else 2048 if rows * tile.rows < 2048 else 1024):
            tenths = 10
        n_tiles += -(-(panels - n_tiles) * tenths // 10)
    return (
        ALL_ROWS if m_tiles == rows else m_tiles * tile.rows,
        min(problem.out_features, n_tiles * tile.columns),
    )


def _chunks_ahead(problem: Problem, tile: Tile, x_rows: int) -> int:
    """Chunks of K that are cast before the product begins, of the rows that are; the kernel casts the others meanwhile.

    All of them where rows of x are left to it too, where x has so few rows that its tiles soon need the next of W's,
    and in many waves, of which only the first would begin earlier (docs/time.md has the times).
    """
    found, (rows, panels) = cast.chunks(problem), tile.counts(problem)
    waves = rows * panels / (problem.chip or CHIPS[90]).multiprocessors
    early = x_rows == ALL_ROWS and 1 < waves <= 4 and rows * tile.rows >= FEW_ROWS
    return -(-found // 2) if early else found


def forward(problem: Problem, strategy: str) -> Plan:
    """`one_kernel`: a single launch. `gemm_stats_apply`: the GEMM with statistics, the merge, the normalisation."""
    tile = choose_tile(problem)
    chip = problem.chip or CHIPS[90]
    features = Extent(problem.out_features)
    rows, panels = tile.counts(problem)
    at_once = _panels_at_once(problem, tile)
    if not problem.training:
        finish = "kEvaluate"
    elif strategy == "gemm_stats_apply":
        finish = "kStatistics"
    else:
        finish = "kOneBlock" if rows == 1 else "kWholePanels" if at_once else "kPersistent"
    half, short = problem.dtype != "float32", problem.in_features * tile.width < LONG_TILE * tile.k
    grid = Extent(panels, tile.rows, chip.multiprocessors)
    cluster, group_panels = 1, _group_panels(problem, tile)
    if finish == "kWholePanels":
        grid = Extent(at_once, tile.rows, chip.multiprocessors)
        group_panels = max(n for n in range(1, group_panels + 1) if at_once % n == 0)
    # One tile for every block, few to a panel: those are a cluster, so that they run at the same time as it is.
    together = finish == "kWholePanels" and rows <= MOST_TOGETHER and at_once == panels
    if together and panels <= clusters_at_once(chip.multiprocessors, rows):
        cluster, group_panels = rows, 1
    x_rows, weight_rows = _rows_ahead(problem, tile, group_panels)
    if problem.prepared:
        weight_rows = problem.out_features
    # Rows that are left to the kernel, whose blocks then wait for each other.
    begun = _chunks_ahead(problem, tile, x_rows)
    left = x_rows != ALL_ROWS or weight_rows < problem.out_features or begun < cast.chunks(problem)
    ahead = finish in ("kPersistent", "kEvaluate") if problem.split else left
    shared = tile.shared + (RING_BYTES if ahead and problem.split else 0)
    boxes, boxes_y = (ROW_BYTES // DTYPE_BYTES[dtype] for dtype in (problem.dtype, problem.out_dtype))
    operands = [f"split_{name}" if problem.split else cast.operand(problem, name) for name in cast.OPERANDS]
    made = _converted_roles(problem, ahead)
    own = _SPLIT if problem.prepared else tuple(field for field in _SPLIT if field != "weight_checksums")
    own = own if problem.split else ()
    absent = tuple(field for field in (*_CONVERTED, *_SPLIT) if field not in (*dict(made), *own))
    launch = Launch(
        {"kEvaluate": "fused_gemm_scale_bn_evaluate", "kStatistics": "fused_gemm_statistics"}.get(
            finish, "fused_gemm_scale_bn"
        ),
        "gemm/fused_gemm.cuh",
        "fused_gemm",
        (
            *type_members(problem),
            ("Operand", "T" if half else "gemmnorm::split" if problem.split else "gemmnorm::tf32"),
            ("kTileRows", tile.rows),
            ("kTileColumns", tile.columns),
            ("kStages", tile.stages),
            ("kSharedBytes", shared),
            ("kFinish", f"gemmnorm::Finish::{finish}"),
            ("Activation", "Activation"),
        ),
        ("map_x", "map_weight", "map_product", "map_y", "stored_product", "y", *VECTORS, "running_mean", "running_var",
         "num_batches_tracked", "bn_weight", "bn_bias", "momentum", "eps", "group_mean", "group_m2", "mean", "rstd",
         "merged_slope", "merged_shift", "counters", *dict(made), *own, "x_rows", "weight_rows", "begun",
         "group_panels", "in_registers", "stream_x", "keep_product", "batch", "in_features", "features"),
        grid,
        block=384,
        resident=1,
        shared=shared,
        cluster=cluster,
        cooperative=left or finish == "kPersistent" or (finish == "kWholePanels" and cluster == 1),
        maps=(
            Map("map_x", operands[0], tile.rows, tile.k, fits=not problem.training),
            Map("map_weight", operands[1], tile.columns, tile.k),
            Map("map_product", "product", GROUP_ROWS, boxes if problem.training else boxes_y, exact=True),
            Map("map_y", "y", GROUP_ROWS, boxes_y, exact=True),
        ),
        numbers=(
            ("x_rows", x_rows),
            ("weight_rows", weight_rows),
            ("begun", begun),
            ("group_panels", group_panels),
            ("in_registers", int(finish == "kWholePanels" and short and problem.out_dtype == problem.dtype)),
            ("stream_x", int(finish != "kWholePanels" and half and _bytes_of_x(problem) > LARGE_X)),
            ("keep_product", int(problem.save or strategy == "gemm_stats_apply")),
        ),
        roles=made,
        absent=absent,
    )  # fmt: skip
    steps: tuple[Step, ...] = (launch,)
    product = Buffer("product", problem.dtype, (ROWS, features))
    y = Buffer("y", problem.out_dtype, (ROWS, features))
    partial = [Buffer(role, "float32", (GROUPS, features)) for role in ("group_mean", "group_m2")]
    vectors = [Buffer(role, "float32", (features,)) for role in ("mean", "rstd")]
    merges = finish == "kPersistent" or (finish == "kWholePanels" and tile.waits)
    merged = ("merged_slope", "merged_shift") if merges else ()
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
    counters = COUNTERS + 2 * panels if finish in ("kOneBlock", "kWholePanels", "kPersistent") else 0
    if ahead:
        counters = COUNTERS + 2 * panels + (panels + BANDS) * cast.chunks(problem)
    if problem.split:
        counters = (counters or COUNTERS + 2 * panels) + counters_to_recompute(problem)
        steps = (split_rows(problem, True, x_rows, 0 if problem.prepared else weight_rows), launch, recompute(problem))
        workspace += split_operands(problem)
        workspace.append(Buffer("flagged", "int32", (features,)))
        workspace += [Buffer(role, "float32", (features,)) for role in ("weight_largest", "weight_total")]
        if problem.prepared:
            workspace = [buffer for buffer in workspace if buffer.role not in PREPARED]
    if finish == "kStatistics":
        steps += (library.merge(problem, fold=True), library.normalize(problem, fold=True, offset="group_mean"))
    found = Plan(
        problem,
        "forward",
        strategy,
        steps,
        tuple(outputs),
        tuple(workspace),
        aliases,
        counters=counters,
        seconds=(split_seconds if problem.split else gemm_seconds)(problem) * (1.06 if problem.training else 1.01),
        floor=gemm_seconds(problem),
    )
    return cast.with_operands(found, x_rows, weight_rows, begun) if problem.cast else found


def _converted_roles(problem: Problem, ahead: bool) -> tuple[tuple[str, str], ...]:
    """(field, role) of the rows that the kernel converts to operands itself."""
    if problem.split:
        roles = tuple((f"{name}", f"split_{name}") for name in cast.OPERANDS)
    else:
        roles = tuple((f"wide_{name}", f"cast_{name}") for name in cast.OPERANDS if ahead and name in problem.cast)
    names = [name for name in cast.OPERANDS if problem.split or (ahead and name in problem.cast)]
    pairs = zip(names, roles, strict=True)
    return tuple(pair for name, (a, b) in pairs for pair in ((f"source_{name}", a), (f"converted_{name}", b)))


def _bytes_of_x(problem: Problem) -> int:
    return problem.batch * problem.in_features * DTYPE_BYTES[problem.dtype]


def _fits_l2(problem: Problem) -> bool:
    """Whether x stays in the L2 while all panels use it."""
    return _bytes_of_x(problem) <= 30e6


def _panels_at_once(problem: Problem, tile: Tile) -> int:
    """Panels whose tiles one wave of blocks works on, all of them, where that takes no more waves; else 0.

    Not for many rows whose tiles cannot wait in shared memory, nor where x would be read from memory again for every
    few panels (lab/README.md has the times).
    """
    blocks = (problem.chip or CHIPS[90]).multiprocessors
    rows, panels = tile.counts(problem)
    few_rows = tile.waits or problem.batch <= MOST_ROWS_IN_REGISTERS
    if rows * panels <= blocks and few_rows:
        return panels
    waves = -(-rows * panels // blocks)
    at_once = -(-panels // waves)
    if rows * at_once > blocks or problem.split or not few_rows or not (_fits_l2(problem) or at_once >= 4):
        return 0
    together = (_multiple(at_once, most) for most in range(_group_panels(problem, tile), 0, -1))
    return next(n for n in together if n * rows <= blocks)


def _multiple(number: int, of: int) -> int:
    """`number`, rounded up."""
    return -(-number // of) * of


def _group_panels(problem: Problem, tile: Tile) -> int:
    """Panels that are worked on together: as many as one wave completes; more where x is too large to be read again.

    Measured (lab/README.md).
    """
    chip = problem.chip or CHIPS[90]
    rows, panels = tile.counts(problem)
    if not _fits_l2(problem):
        most = 8 if tile.rows < 256 else 12 if _bytes_of_x(problem) > LARGE_X else 4 if problem.training else 8
        groups = -(-panels // most)
        return _multiple(-(-panels // groups), 2)  # groups of about the same size
    return max(1, min(panels, 8, rows * tile.rows // 256, chip.multiprocessors // rows))
