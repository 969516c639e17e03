"""Which tile and schedule of `fused_gemm` serves a problem, by rules."""

from __future__ import annotations

from . import cast
from .gemm import BANDS, LARGE_X, MOST_SPLIT_FEATURES, STAGES, WIDE, Gemm, Tile, bytes_of_x, gemm_plan, refusal
from .library import GROUP_ROWS
from .problem import CHIPS, DTYPE_BYTES, Problem
from .small import clusters_at_once
from .split import ALL_ROWS
from .steps import Plan

__all__ = ["BANDS", "MOST_SPLIT_FEATURES", "refusal"]  # for others

MOST_ROWS_IN_REGISTERS = (
    4096  # whose tiles wait for each other there; of more, every block would read too many statistics
)
SPLIT_FLOPS = 1.2e8  # of one product; below, the launches around split operands cost more than they save
LONG_TILE = 3072  # stages × width from where other warps can normalise a tile during the next one's main loop
MOST_TOGETHER = 4  # tiles of a panel; of larger clusters fewer run at once than there are multiprocessors for
FEW_ROWS = 1024  # below which there is little time to make W's rows beside the product


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
    return gemm_plan(problem, strategy, choose(problem, strategy))


def choose(problem: Problem, strategy: str) -> Gemm:
    """By the rules of this file."""
    tile = choose_tile(problem)
    chip = problem.chip or CHIPS[90]
    rows, panels = tile.counts(problem)
    at_once = _panels_at_once(problem, tile)
    if not problem.training:
        schedule = "evaluate"
    elif strategy == "gemm_stats_apply":
        schedule = "statistics"
    else:
        schedule = "single-tile" if rows == 1 else "single-wave" if at_once else "persistent"
    short = problem.in_features * tile.width < LONG_TILE * tile.k
    cluster, group_panels, of_grid = 1, _group_panels(problem, tile), panels
    if schedule == "single-wave":
        of_grid = at_once
        group_panels = max(n for n in range(1, group_panels + 1) if at_once % n == 0)
    # One tile for every block, few to a panel: those are a cluster, so that they run at the same time as it is.
    together = schedule == "single-wave" and rows <= MOST_TOGETHER and at_once == panels
    if together and panels <= clusters_at_once(chip.multiprocessors, rows):
        cluster, group_panels = rows, 1
    x_rows, weight_rows = _rows_ahead(problem, tile, group_panels)
    if problem.prepared:
        weight_rows = problem.out_features
    in_registers = schedule == "single-wave" and short and problem.out_dtype == problem.dtype
    chunks = _chunks_ahead(problem, tile, x_rows)
    return Gemm(tile, schedule, group_panels, of_grid, cluster, in_registers, x_rows, weight_rows, chunks)


def _fits_l2(problem: Problem) -> bool:
    """Whether x stays in the L2 while all panels use it."""
    return bytes_of_x(problem) <= 30e6


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
        most = 8 if tile.rows < 256 else 12 if bytes_of_x(problem) > LARGE_X else 4 if problem.training else 8
        groups = -(-panels // most)
        return _multiple(-(-panels // groups), 2)  # groups of about the same size
    return max(1, min(panels, 8, rows * tile.rows // 256, chip.multiprocessors // rows))
