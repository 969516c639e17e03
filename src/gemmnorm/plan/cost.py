"""Predicted times, for `explain`."""

from __future__ import annotations

from .problem import CHIPS, DTYPE_BYTES, Problem


def gemm_seconds(problem: Problem) -> float:
    """The product at the library's rate, or at the memory's where that is what limits it."""
    chip = problem.chip or CHIPS[80]
    size = DTYPE_BYTES[problem.dtype]
    traffic = size * (
        problem.batch * problem.in_features
        + problem.out_features * problem.in_features
        + problem.batch * problem.out_features
    )
    return max(problem.flops / problem.gemm_rate, traffic / chip.bandwidth) + 3e-6


def sweep_seconds(problem: Problem, reads: int, writes: int) -> float:
    """`reads` reads and `writes` writes of a [B, O] tensor, and 2 µs a launch."""
    chip = problem.chip or CHIPS[80]
    elements = problem.batch * problem.out_features
    traffic = elements * (reads * DTYPE_BYTES[problem.dtype] + writes * DTYPE_BYTES[problem.out_dtype])
    return traffic / chip.bandwidth + 2e-6 * (reads + writes)


def cast_seconds(problem: Problem, x_rows: int, weight_rows: int, columns: int) -> float:
    """Reading so many columns of rows of float32 and writing them in half precision, and 2 µs for the launch."""
    chip = problem.chip or CHIPS[80]
    rows = x_rows * ("x" in problem.cast) + weight_rows * ("weight" in problem.cast)
    return 6 * rows * columns / chip.bandwidth + 2e-6


def split_seconds(problem: Problem) -> float:
    """float32 by split operands: three half-precision products, after a pass that reads and writes x and the weight."""
    chip = problem.chip or CHIPS[90]
    elements = (problem.batch + problem.out_features) * problem.in_features
    return 3 * problem.flops / chip.tensor_half + 8 * elements / chip.bandwidth + 10e-6
