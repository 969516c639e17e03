"""The tiles of `fused_gemm`: their sizes, stages and shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import cast
from .panels import SHARED
from .problem import Problem
from .split import ROW_BYTES
from .steps import GROUP_ROWS

WIDE, TALL = 128, 256  # columns, or rows, of a tile that is multiplied as W·xᵀ
# Bytes of an element, its planes, rows and columns of the tile → stages of the ring.
STAGES = {
    (2, 1, 256, 128): 3, (2, 1, 192, 128): 4, (2, 1, 128, 128): 5, (2, 1, 64, 128): 7,
    (2, 1, 256, 64): 4, (2, 1, 128, 64): 8, (2, 1, 128, 32): 10,
    (2, 1, 256, 136): 3,
    (4, 1, 256, 128): 3, (4, 1, 192, 128): 4, (4, 1, 128, 128): 5, (4, 1, 64, 128): 7,
    (4, 1, 256, 64): 4, (4, 1, 128, 64): 8, (4, 1, 128, 32): 10,
    (2, 2, 128, 128): 3, (2, 2, 64, 128): 4, (2, 2, 128, 64): 4, (2, 2, 128, 32): 4,
}  # fmt: skip


def swapped(rows: int, columns: int) -> bool:
    """Whether such a tile is multiplied as W·xᵀ."""
    return columns == WIDE or (rows == TALL and columns < WIDE)


def width(rows: int, columns: int) -> int:
    """N of the wgmma instruction. M is 64 for each consumer: rows of the tile, or features where it is swap-AB."""
    return columns if not swapped(rows, columns) else rows if columns == WIDE else rows // 2


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
    def swapped(self) -> bool:
        """Whether it is multiplied as W·xᵀ."""
        return swapped(self.rows, self.columns)

    @property
    def overlap(self) -> int:
        """Columns that it shares with the tile before: of two neighbours either has whole sectors of every row of y."""
        return self.columns % (cast.SECTOR_BYTES // 2)

    @property
    def step(self) -> int:
        """Columns from one tile to the next."""
        return self.columns - self.overlap

    @property
    def halves_rows(self) -> bool:
        """Whether its consumers share out the rows of the same features."""
        return self.swapped and self.columns < WIDE

    @property
    def width(self) -> int:
        """N of the wgmma instruction."""
        return width(self.rows, self.columns)

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
        """At least sizeof(GemmShared): the kernel asserts it when it is compiled."""
        size = self.stages * self.planes * (self.rows + self.columns) * ROW_BYTES
        size += 2 * (max(self.rows, 128) * self.step if self.staged else 1024)
        size += 32 if self.swapped else 2 * 4 * self.columns * 4  # sums over warps
        size += (2 * 2 + 4) * self.columns * 4  # coefficients and statistics
        size += (2 * 2 * self.width + 2 * 64) * 4 if self.planes == 2 else 0  # powers of two
        size += 2 * self.stages * 8 + 5 * 8 + 64 + 32 * 12  # barriers; BlockTiles
        return -(-size // 1024) * 1024

    def without_overlap(self) -> Tile:
        """The tile of as many columns as from one tile to the next: its panels are the same."""
        if not self.overlap:
            return self
        stages = STAGES[self.size, self.planes, self.rows, self.step]
        return replace(self, columns=self.step, stages=stages)

    def without_staging(self) -> Tile:
        """Stages of a kernel that stores no tile: the ring has that memory too."""
        found = replace(self, staged=False)
        stage = self.planes * (self.rows + self.columns) * ROW_BYTES + 2 * 8
        return replace(found, stages=self.stages + (SHARED - found.shared) // stage)

    def steps(self, problem: Problem) -> int:
        """Stages of K."""
        return -(-problem.in_features // self.k)

    @property
    def group_rows(self) -> int:
        """Rows of one partial mean and M2."""
        return self.width if self.swapped else GROUP_ROWS

    def counts(self, problem: Problem, shared_by: int = 1) -> tuple[int, int]:
        """Tiles along the batch; and along the features, a multiple of `shared_by`."""
        columns = self.step * shared_by
        return -(-problem.batch // self.rows), -(-problem.out_features // columns) * shared_by
