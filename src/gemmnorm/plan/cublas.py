"""Plans of a forward that cuBLAS multiplies for: the product, and the memory-bound launches after it."""

from __future__ import annotations

from dataclasses import dataclass

from . import cast, memory_bound
from .panels import ClusterPanel
from .problem import Problem
from .steps import GROUPS, ROWS, Buffer, Extent, Plan, Product, Step


def refusal(problem: Problem) -> str | None:
    """Why cuBLAS cannot multiply, or None."""
    return "the weight is there as split operands only" if problem.prepared else None


@dataclass(frozen=True)
class CublasForward:
    """What follows the product: one launch by clusters that hold such panels; for None, three memory-bound launches."""

    panel: ClusterPanel | None = None

    def words(self, problem: Problem) -> str:
        """In a candidate's name."""
        return f"in one launch, {self.panel.words()}" if self.panel else ""

    def plan(self, problem: Problem, strategy: str) -> Plan:
        """The plan of these choices."""
        return cast.in_front(problem, lambda p: forward(p, strategy, self.panel))


def forward(problem: Problem, strategy: str, panel: ClusterPanel | None = None) -> Plan:
    """GEMM, group statistics, merge, normalise; in evaluation the GEMM and the normalisation alone.

    With `panel`, statistics and normalisation by clusters that hold such.
    """
    fold = strategy == "cublas_folded_bn"
    features = Extent(problem.out_features)
    steps: list[Step] = [Product("product", "x", "weight", transpose_right=True)]
    workspace: list[Buffer] = []
    if panel is not None:
        steps.append(memory_bound.normalize_panels(problem, panel))
    elif problem.training:
        steps += [memory_bound.column_statistics(problem, fold), memory_bound.merge(problem, fold)]
        workspace += [Buffer(role, "float32", (GROUPS, features)) for role in ("group_mean", "group_m2")]
    if panel is None:
        steps.append(memory_bound.normalize(problem, fold, "offset", after_product=not problem.training))
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
        counters=int(panel is not None),
    )
