"""The predicted times of what multiplies twice, or has statistics before it multiplies, by the terms of `cost`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import gram
from .cost import (
    Constants,
    Counted,
    count_cast,
    count_gemm,
    count_products,
    empty,
    gemm_terms,
    kept_by_l2,
    misaligned_loads,
    overlapped,
    pass_terms,
    products_time,
)
from .gemm import FIRST, Gemm, bytes_of_x
from .problem import CHIPS, DTYPE_BYTES, Problem
from .tile import TALL


def count_two_passes(problem: Problem, gemm: Gemm) -> Counted:
    """`fused_gemm` for statistics, their merge, and `fused_gemm` once more, as in evaluation."""
    second = _count_normalize(problem, gemm)
    first = replace(gemm, tile=gemm.tile.without_overlap(), schedule=FIRST["two-pass"])
    return {"first": count_gemm(problem, first), "second": second}


def _count_normalize(problem: Problem, gemm: Gemm) -> Counted:
    """`fused_gemm` once the statistics are known, of an x that was read for them."""
    known = replace(problem, training=False, cast=(), copied=())
    counted = count_gemm(known, replace(gemm, schedule="normalize"))
    of_x = bytes_of_x(problem)
    _keep(counted, problem, gemm, of_x, 0)
    return counted | {"misaligned": misaligned_loads(problem)}


def _keep(counted: Counted, problem: Problem, gemm: Gemm, of_x: float, others: float) -> None:
    """Take off what the L2 still has of x and of so many other bytes, which the launch before read too."""
    near = kept_by_l2(problem, of_x + others)
    counted["traffic"] -= (of_x + others) * near
    counted["tall_bytes"] -= of_x * near * (gemm.tile.rows == TALL)


def count_gram(problem: Problem, gemm: Gemm) -> Counted:
    """Statistics by the Gram matrix of x, a launch that finds them, and `fused_gemm`."""
    counted, size = empty(), DTYPE_BYTES[problem.dtype]
    count_cast(problem, counted, problem.batch, problem.out_features, problem.in_features)
    counted["launches"] += 1
    blocks, parts = (problem.chip or CHIPS[90]).multiprocessors, gram.parts(problem)
    row_tiles, column_tiles = gram.tiles(problem)
    stages = gram.stages(problem)
    return counted | {
        "second": _count_normalize(problem, gemm),
        "gram_stages": float(stages),
        "gram_far_bytes": float(bytes_of_x(problem)),
        "gram_bytes": float(size * gram.across(problem) ** 2 * min(gram.TILE, problem.in_features) * problem.batch),
        "gram_partial_bytes": 8.0 * parts * gram.TILE**2 * -(-problem.batch // (gram.stage_rows(problem) * stages)),
        "gram_tiles": float(-(-row_tiles * column_tiles // blocks)),
        # Of the block with the longest tile, or of all blocks alike.
        "gram_squares": max(column_tiles, row_tiles * column_tiles * (column_tiles + 1) / 2 / blocks),
    }


def count_again(problem: Problem, gemm: Gemm) -> Counted:
    """`fused_gemm` for sums, their merge, and `fused_gemm` for the product's gradient; two products by cuBLAS."""
    out_size, problem = DTYPE_BYTES[problem.out_dtype], replace(problem, cast=())
    sums = count_gemm(problem, replace(gemm, schedule=FIRST["two-pass"]))  # it stores nothing either
    # It writes the product's gradient as an evaluation writes y.
    known = replace(problem, training=False, out_dtype=problem.dtype)
    gradient = count_gemm(known, replace(gemm, schedule="normalize"))
    grad_y = problem.batch * problem.out_features * out_size
    for n in (sums, gradient):  # y's gradient comes while a tile is multiplied
        n["traffic"] += grad_y
    _keep(gradient, problem, gemm, bytes_of_x(problem), grad_y)
    return {"first": sums, "second": gradient, **count_products(problem)}


# --- what it takes ---------------------------------------------------------------------------------------------------


def two_pass_terms(n: Mapping[str, Any], c: Constants) -> dict[str, Any]:
    first, second = gemm_terms(n["first"], c), gemm_terms(n["second"], c)
    second["prologue"] = second["prologue"] - c.first + c.launch
    return {name: first[name] + second[name] for name in first}


def gram_terms(n: Mapping[str, Any], c: Constants) -> dict[str, Any]:
    second = gemm_terms(n["second"], c)
    second["prologue"] = second["prologue"] - c.first + c.launch
    matrix = overlapped(n["gram_stages"] * c.gram_stage_ns / 1e3, n["gram_bytes"] / c.l2_bandwidth / 1e6)
    matrix = overlapped(matrix, n["gram_far_bytes"] / c.bandwidth / 1e6)
    return {
        "Gram matrix": c.first + c.gram + matrix + n["gram_partial_bytes"] / c.l2_bandwidth / 1e6,
        "squares": n["gram_tiles"] * c.gram_tile + n["gram_squares"] * c.gram_square_ns / 1e3,
        **{name: value + second.get(name, 0.0) for name, value in pass_terms(n, c).items()},
        **{name: value for name, value in second.items() if name not in pass_terms(n, c)},
    }


def again_terms(n: Mapping[str, Any], c: Constants) -> dict[str, Any]:
    return {"products": products_time(n, c), **two_pass_terms(n, c)}
