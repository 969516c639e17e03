"""Plans of a forward that cuBLAS multiplies for: the product, and the memory-bound launches after it."""

from __future__ import annotations

from . import memory_bound, panels
from .problem import Problem
from .steps import GROUPS, ROWS, Buffer, Extent, Plan, Product, Step


def forward(problem: Problem, strategy: str, shape: panels.Shape | None = None) -> Plan:
    """GEMM, group statistics, merge, normalise; in evaluation the GEMM and the normalisation alone.

    With `shape`, statistics and normalisation by clusters of that.
    """
    fold = strategy == "cublas_folded_bn"
    features = Extent(problem.out_features)
    steps: list[Step] = [Product("product", "x", "weight", transpose_right=True)]
    workspace: list[Buffer] = []
    if shape is not None:
        steps.append(memory_bound.normalize_panels(problem, shape))
    elif problem.training:
        steps += [memory_bound.column_statistics(problem, fold), memory_bound.merge(problem, fold)]
        workspace += [Buffer(role, "float32", (GROUPS, features)) for role in ("group_mean", "group_m2")]
    if shape is None:
        steps.append(memory_bound.normalize(problem, fold, "offset"))
    product = Buffer("product", problem.dtype, (ROWS, features))
    vectors = [Buffer(role, "float32", (features,)) for role in ("mean", "rstd")]
    outputs, aliases = [Buffer("y", problem.out_dtype, (ROWS, features))], []
    if problem.saves_product:
        outputs.append(product)
    if problem.save:
        outputs += vectors
    elif problem.training:
        workspace += vectors
    if not problem.saves_product:
        if problem.dtype == problem.out_dtype:
            aliases.append(("product", "y"))
        else:
            workspace.append(product)
    return Plan(
        problem,
        "forward",
        strategy,
        tuple(steps),
        tuple(outputs),
        tuple(workspace),
        tuple(aliases),
        counters=int(shape is not None),
    )
