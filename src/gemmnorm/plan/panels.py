"""Panels of columns that a cluster of blocks holds in shared memory (kernels/common/cluster_panels.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .problem import CHIPS, DTYPE_BYTES, Chip, Problem
from .steps import THREADS, Extent

WARPS = THREADS // 32
# Lanes of a warp along the features, 16 bytes each: whole lines of 128 bytes, or halves, for more or smaller blocks.
WIDE, NARROW = 8, 4
CLUSTERS = (1, 2, 4, 8)  # 8 blocks are allowed on any GPU that has clusters
SHARED = 227 * 1024  # bytes that a block can have on Hopper


@dataclass(frozen=True)
class ClusterPanel:
    """A panel of columns, and how the blocks of a cluster share it out.

    Attributes:
        lanes: of a warp along the features, 16 bytes each; rows: of a warp; cluster: blocks.
        size: bytes of an element of the product; held: bytes of shared memory for each element of a panel.
        vectors: floats of a column beside sums; numbers: that are summed for each column.
    """

    lanes: int
    rows: int
    cluster: int
    size: int
    held: int
    vectors: int
    numbers: int

    @property
    def columns(self) -> int:
        """Features of a panel."""
        return self.lanes * 16 // self.size

    @property
    def shared(self) -> int:
        """sizeof(Shared): the kernel asserts at compile time that it is."""
        held = self.rows * WARPS * self.held
        return self.columns * (held + self.vectors * 4 + 2 * WARPS * self.numbers * 4) + 2 * 8

    @property
    def members(self) -> tuple[tuple[str, int], ...]:
        """Members of the kernel's `Config`, (name, value)."""
        return (
            ("kThreadsX", self.lanes), ("kRowsPerWarp", self.rows), ("kCluster", self.cluster),
            ("kSharedBytes", self.shared),
        )  # fmt: skip

    def words(self) -> str:
        """In a candidate's name."""
        return f"{self.lanes * 16} bytes, {self.rows} rows, {self.cluster} blocks"

    def launched(self, problem: Problem, most: int) -> tuple[Extent, int]:
        """The grid, and how many blocks run on one multiprocessor: at most so many, those that take the least time."""
        chip = problem.chip or CHIPS[90]
        panels, cluster = -(-problem.out_features // self.columns), self.cluster

        def clusters(resident: int) -> int:
            """That run at once: of clusters of four or eight one multiprocessor in eleven is left over."""
            blocks = chip.multiprocessors * resident
            return max(1, (blocks if cluster <= 2 else blocks * 10 // 11) // cluster)

        def rounds(resident: int) -> float:
            """The time that they take, with what does not overlap."""
            return -(-panels // clusters(resident)) * (resident + 0.5)

        resident = min(range(min(most, SHARED // (self.shared + 1024)) or 1, 0, -1), key=rounds)
        return Extent(min(panels, clusters(resident)) * cluster), resident


def hopper(problem: Problem) -> Chip | None:
    """The GPU, where clusters can serve: Hopper's, in training, rows of whole 16 bytes."""
    chip, whole = problem.chip, problem.out_features * DTYPE_BYTES[problem.dtype] % 16 == 0
    return chip if chip and chip.arch == 90 and problem.training and whole else None


def cluster_panels(
    problem: Problem, rows: tuple[int, ...], held: int, vectors: int, numbers: int
) -> Iterator[ClusterPanel]:
    """All that hold the batch: for each number of blocks with the fewest rows, by wide and by narrow panels."""
    if hopper(problem) is None:
        return
    for cluster in CLUSTERS:
        holding = [n for n in rows if n * cluster * WARPS >= problem.batch]
        for lanes in (WIDE, NARROW):
            panel = ClusterPanel(
                lanes, holding[0] if holding else 0, cluster, DTYPE_BYTES[problem.dtype], held, vectors, numbers
            )
            if holding and panel.shared <= SHARED:
                yield panel
