"""Operands that autocast wants in half precision, or whose rows TMA reads slowly or not at all: the pass that casts or
copies them into padded rows, in front of any plan that knows of none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .problem import DTYPE_BYTES, Problem, type_members
from .split import ALL_ROWS, ROW_BYTES
from .steps import ROWS, THREADS, Buffer, Extent, Launch, Plan, Product

OPERANDS = ("x", "weight")
CAST = ("cast_x", "cast_weight")  # roles of the same, cast or copied
COLUMNS = 2048  # of K, that are converted at a time
WORDS = 8  # of four elements, that a thread of the pass has in flight
LINE_THREADS = 8  # that read a line of 128 bytes
SECTOR_BYTES = 32  # that the L2 and device memory move at a time


def operand(problem: Problem, name: str) -> str:
    """The role of x or the weight as it is multiplied; any other as it is."""
    return f"cast_{name}" if name in problem.made else name


def all_padded(problem: Problem) -> bool:
    """All rows that are multiplied begin at whole lines, because both operands are made here."""
    return len(problem.made) == len(OPERANDS)


def misaligned(problem: Problem) -> float:
    """Whether rows that are multiplied, as they are in memory, are no whole sectors: 1 or 0."""
    row = problem.in_features * DTYPE_BYTES[problem.dtype]
    return float(not problem.split and row % SECTOR_BYTES > 0 and not all_padded(problem))


def unaligned(problem: Problem) -> str | None:
    """Why TMA cannot read the operands, or None."""
    aligned = problem.in_features * DTYPE_BYTES[problem.dtype] % 16 == 0 or all_padded(problem)
    return None if aligned else "a row of x or the weight is no multiple of 16 bytes, which TMA asks for"


def with_copies(problem: Problem) -> tuple[Problem, ...]:
    """`problem` as it is, and with all operands made here, where TMA cannot read them.

    Rows that it can read and that are no whole lines are not worth a copy: that won in 2 of 228 problems, by 3%.
    """
    if problem.prepared or unaligned(problem) is None:
        return (problem,)
    return problem, replace(problem, copied=tuple(name for name in OPERANDS if name not in problem.cast))


def converted_bytes(problem: Problem, name: str) -> float:
    """Bytes read and written for each element of an operand that is cast or copied."""
    return float(DTYPE_BYTES["float32" if name in problem.cast else problem.dtype] + DTYPE_BYTES[problem.dtype])


def operands(problem: Problem) -> tuple[Buffer, ...]:
    """The memory of what is made. Rows are padded to whole lines, which TMA loads faster than others."""
    shapes, line = {"x": ROWS, "weight": Extent(problem.out_features)}, ROW_BYTES // DTYPE_BYTES[problem.dtype]
    columns, pitch = Extent(problem.in_features), -(-problem.in_features // line) * line
    return tuple(Buffer(f"cast_{name}", problem.dtype, (shapes[name], columns), pitch) for name in problem.made)


def chunks(problem: Problem) -> int:
    """Number of chunks of K that are cast one after another; 1 where nothing is cast."""
    return -(-problem.in_features // COLUMNS) if problem.made else 1


def rows_of_block(columns: int) -> int:
    """Rows, of so many columns that are converted, for a block of the pass: as many as leave a thread `WORDS` words."""
    threads = LINE_THREADS
    while threads < THREADS and threads * WORDS * 4 < columns:
        threads *= 2
    return THREADS // threads


def cast_rows(problem: Problem, x_rows: int, weight_rows: int, chunk_count: int) -> Launch:
    """The pass that casts or copies the first rows of x, or a few more, and of the weight, so many chunks of each."""
    rows = weight_rows if "weight" in problem.made else 0
    each = rows_of_block(min(chunk_count * COLUMNS, problem.in_features))
    before = -(-rows // each)
    grid = Extent(1, each, limit=0 if x_rows == ALL_ROWS else -(-x_rows // each) + before, plus=before)
    return Launch(
        "fused_gemm_cast_operands",
        "memory_bound/cast.cuh",
        "cast_rows",
        type_members(problem, "T"),
        (
            *(f"{kind}_{name}" for name in problem.made for kind in ("given", "cast")),
            "weight_rows",
            "rows_of_block",
            "chunks_converted",
            "in_features",
            "batch",
        ),
        grid if "x" in problem.made else Extent(before),
        absent=tuple(f"{kind}_{name}" for name in OPERANDS if name not in problem.made for kind in ("given", "cast")),
        resident=4,
        numbers=(("weight_rows", rows), ("rows_of_block", each), ("chunks_converted", chunk_count)),
    )


def in_front(problem: Problem, build: Callable[[Problem], Plan]) -> Plan:
    """The plan that `build` makes for operands that need no cast, after the pass that casts or copies all of them."""
    chosen = build(replace(problem, cast=(), copied=()))
    if not problem.made:
        return chosen
    steps = tuple(
        replace(step, left=operand(problem, step.left), right=operand(problem, step.right))
        if isinstance(step, Product)
        else replace(step, maps=tuple(replace(m, tensor=operand(problem, m.tensor)) for m in step.maps))
        for step in chosen.steps
    )
    return with_operands(replace(chosen, problem=problem, steps=steps), ALL_ROWS, problem.out_features, chunks(problem))


def with_operands(chosen: Plan, x_rows: int, weight_rows: int, chunk_count: int) -> Plan:
    """`chosen` after a pass that converts so many chunks of so many rows; what is cast is kept for gradients."""
    problem, found = chosen.problem, operands(chosen.problem)
    keeps = {f"cast_{name}" for name in problem.cast if problem.save}
    kept, lost = ([b for b in found if (b.role in keeps) == kept] for kept in (True, False))
    return replace(
        chosen,
        steps=(cast_rows(problem, x_rows, weight_rows, chunk_count), *chosen.steps),
        outputs=(*chosen.outputs, *kept),
        workspace=(*chosen.workspace, *lost),
    )
