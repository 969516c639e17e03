"""Launches that sweep a [B, O] product: its statistics, their merge, the normalisation (kernels/memory_bound/).

All but `cluster_normalize` are for every GPU from compute capability 8.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from . import panels
from .panels import ClusterPanel
from .problem import CHIPS, DTYPE_BYTES, Problem, type_members
from .steps import GROUP_ROWS, THREADS, VECTORS, Extent, Launch

ROWS_OF_A_WARP = (8, 16, 32, 64, 128)  # in `cluster_normalize`


@dataclass(frozen=True)
class Tiling:
    """How a memory-bound kernel cuts up a [B, O] tensor.

    Attributes:
        width: elements that a thread moves at once: 16 bytes of the product where the feature count allows it.
        threads: of a block along the features: no more than there are features for, and the most that still give every
            multiprocessor two blocks.
        blocks: the grid, a group of rows each.
    """

    width: int
    threads: int
    blocks: Extent

    @property
    def members(self) -> tuple[tuple[str, int], ...]:
        """Members of the kernel's `Config`, (name, value)."""
        return ("kVector", self.width), ("kThreadsX", self.threads)


def tiling(problem: Problem) -> Tiling:
    """The tiling for `problem`."""
    wanted = 2 * (problem.chip or CHIPS[80]).multiprocessors
    width = 16 // DTYPE_BYTES[problem.dtype]
    while problem.out_features % width:
        width //= 2
    groups = -(-problem.batch // GROUP_ROWS)
    enough = next((n for n in (4, 8, 16) if n * width >= problem.out_features), 32)  # to cover all features
    threads = min(8, enough)
    for wider in (32, 16):
        if wider <= enough and groups * -(-problem.out_features // (wider * width)) >= wanted:
            threads = wider
            break
    return Tiling(width, threads, Extent(-(-problem.out_features // (width * threads)), GROUP_ROWS))


def merge_columns(problem: Problem) -> int:
    """Features of a block of the merging kernels: fewer where blocks would not fill the multiprocessors, down to one
    where the threads that this leaves for a feature have groups to merge."""
    least = 1 if -(-problem.batch // GROUP_ROWS) > THREADS // 4 else 4
    fills = (n for n in (16, 4) if problem.out_features >= n * (problem.chip or CHIPS[80]).multiprocessors)
    return next(fills, least)


def merge_grid(problem: Problem) -> Extent:
    """The blocks of the merging kernels."""
    return Extent(-(-problem.out_features // merge_columns(problem)))


def _flag(value: bool) -> str:
    return "true" if value else "false"


def form(problem: Problem, fold: bool = True) -> str:
    """The kernels' template argument that says which formula serves the mode."""
    name = "kRunning" if not problem.training else "kFolded" if fold else "kScaled"
    return f"gemmnorm::Form::{name}"


def column_statistics(problem: Problem, fold: bool) -> Launch:
    """Mean and M2 of every group of rows of the product."""
    t = tiling(problem)
    return Launch(
        "fused_gemm_scale_bn_statistics",
        "memory_bound/statistics.cuh",
        "column_statistics",
        (*type_members(problem, "TL"), *t.members, ("kFold", _flag(fold))),
        ("product", *VECTORS, "group_mean", "group_m2", "num_batches_tracked", "batch", "features"),
        t.blocks,
    )


def merge(problem: Problem, fold: bool, rows: int = GROUP_ROWS) -> Launch:
    """The merge of all groups, of so many rows, into mean and rstd, and the update of the running statistics."""
    return Launch(
        "fused_gemm_scale_bn_merge",
        "memory_bound/statistics.cuh",
        "merge_statistics",
        (*type_members(problem, "LR"), ("kFold", _flag(fold)), ("kColumns", merge_columns(problem)), ("kRows", rows)),
        ("group_mean", "group_m2", *VECTORS, "running_mean", "running_var", "num_batches_tracked", "momentum", "eps",
         "mean", "rstd", "batch", "features"),
        merge_grid(problem),
    )  # fmt: skip


def normalize(problem: Problem, fold: bool, offset: str, after_product: bool) -> Launch:
    """Scale, shift, normalisation and activation over the product; `offset` is the role of what was subtracted.

    It begins with rows that the L2 still has: the last ones `after_product`, else the first, which `column_statistics`
    reads last.
    """
    t = tiling(problem)
    return Launch(
        "fused_gemm_scale_bn_apply" if problem.training else "fused_gemm_scale_bn_evaluate",
        "memory_bound/normalize.cuh",
        "normalize",
        (
            *type_members(problem),
            *t.members,
            ("kForm", form(problem, fold)),
            ("kReversed", _flag(after_product)),
            ("Activation", "Activation"),
        ),
        ("product", "offset", *VECTORS, "mean", "rstd", "running_mean", "running_var", "bn_weight", "bn_bias", "eps",
         "y", "batch", "features"),
        t.blocks,
        roles=(("offset", offset),),
    )  # fmt: skip


def cluster_panels(problem: Problem) -> Iterator[ClusterPanel]:
    """Panels for `cluster_normalize`, which holds the product."""
    size = DTYPE_BYTES[problem.dtype]
    return panels.cluster_panels(problem, ROWS_OF_A_WARP, size, vectors=3, numbers=2 if size == 4 else 1)


def normalize_panels(problem: Problem, panel: ClusterPanel) -> Launch:
    """Statistics and normalisation in one launch: a cluster for each panel of this panel."""
    grid, resident = panel.launched(problem, 2)
    return Launch(
        "fused_gemm_scale_bn_apply",
        "memory_bound/cluster_normalize.cuh",
        "cluster_normalize",
        (*type_members(problem), *panel.members, ("Activation", "Activation")),
        ("product", *VECTORS, "running_mean", "running_var", "num_batches_tracked", "bn_weight", "bn_bias", "momentum",
         "eps", "mean", "rstd", "y", "counters", "batch", "features"),
        grid,
        resident=resident,
        shared=panel.shared,
        cluster=panel.cluster,
    )  # fmt: skip
