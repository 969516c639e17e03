"""Plans of calls whose statistics are those of all ranks of a process group: ordinary plans, cut where ranks exchange.

    forward    "statistics"  the product, and this rank's statistics as one row     all_gather of that row
               "normalize"   the ranks' rows merged, then what follows a merge
    backward   "sums"        this rank's share of the two means that da takes off   all_reduce of the two
               "gradient"    da, and the two products

Nothing of the layer can be computed beside the all_reduce: both products are of da, every element of which needs it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from . import choice
from .candidates import Candidate
from .cublas import CublasForward
from .gemm import Gemm
from .gradient import Backward
from .problem import Chip, Problem, type_members
from .steps import ROWS, VECTORS, Buffer, Extent, Launch, Plan

MERGE = "merge_statistics"  # the launch at which a forward is cut
COLUMNS = 16  # features of a block that merges ranks: on all ranks as many, so that all add up in one order
# Few: while they wait, kernels of other streams, a collective among them, need multiprocessors too.
EXCHANGE_BLOCKS = 16
CUT = ("gemm_stats_apply", "cublas_folded_bn")  # strategies with such plans


def _cuts(candidate: Candidate) -> bool:
    """Its plan merges statistics of the product in a launch of their own, and has the product, if at all, before."""
    variant = candidate.variant
    if candidate.problem.copied:
        return False
    if candidate.strategy == "gemm_stats_apply" and isinstance(variant, Gemm):
        return variant.schedule == "statistics" or (variant.schedule == "two-pass" and not candidate.problem.save)
    return candidate.strategy == "cublas_folded_bn" and variant == CublasForward()


def strategies(problem: Problem) -> tuple[str, ...]:
    """The strategies that serve `problem` (in training) with synchronised statistics, the fastest first."""
    problem = _not_empty(problem)
    if choice.why_no_kernels(problem):
        return ()
    return tuple(dict.fromkeys(c.strategy for _, c in choice.ranking(problem) if _cuts(c)))


def _not_empty(problem: Problem) -> Problem:
    return replace(problem, batch=max(problem.batch, 1))


def forward(problem: Problem, strategy: str, ranks: int) -> tuple[Plan, Plan, Plan]:
    """The plan that is cut, and its parts "statistics" and "normalize".

    An empty rank runs the second alone, without what follows its merge.
    """
    ranked = choice.ranking(_not_empty(problem), "forward", strategy)
    chosen = next(c for _, c in ranked if _cuts(c))
    whole = chosen.plan()
    stored = not isinstance(chosen.variant, Gemm) or chosen.variant.schedule != "two-pass"
    at = next(i for i, step in enumerate(whole.steps) if getattr(step, "function", "") == MERGE)
    merge = whole.steps[at]
    assert isinstance(merge, Launch)
    features, own = Extent(problem.out_features), whole.keeps_offsets
    known = {buffer.role: buffer for buffer in (*whole.outputs, *whole.workspace)}
    product = Buffer("product", problem.dtype, (ROWS, features))
    local = Buffer("local_statistics", "float32", (Extent(2 * problem.out_features + 1),))
    vectors = [Buffer(role, "float32", (features,)) for role in ("mean", "rstd", "row_count")]
    pack = replace(
        merge,
        entry="fused_gemm_scale_bn_pack",
        source="memory_bound/ranks.cuh",
        function="pack_statistics",
        config=tuple(member for member in merge.config if member[0] in ("kColumns", "kRows")),
        params=("group_mean", "group_m2", "local_statistics", "batch", "features"),
        absent=(),
    )
    merge_ranks = replace(
        merge,
        entry="fused_gemm_scale_bn_merge",
        source="memory_bound/ranks.cuh",
        function="merge_ranks",
        config=(*type_members(problem, "LR"), ("kColumns", COLUMNS)),
        params=("gathered", *VECTORS, "running_mean", "running_var", "num_batches_tracked", "momentum", "eps",
                "mean", "rstd", "row_count", "ranks", "batch", "features"),
        grid=Extent(-(-problem.out_features // COLUMNS)),
        numbers=(("ranks", ranks),),
        absent=(),
    )  # fmt: skip
    statistics = replace(
        whole,
        phase="statistics",
        steps=(*whole.steps[:at], pack),
        outputs=(*((product,) if stored else ()), *((known["group_mean"],) if own else ()), local),
        workspace=tuple(known[role] for role in ("group_m2", *(() if own else ("group_mean",)))),
        aliases=(("y", "product"),) if stored else (),  # a GEMM that takes statistics stores no y
    )
    normalize = replace(
        whole,
        problem=problem,
        phase="normalize",
        steps=(merge_ranks, *(whole.steps[at + 1 :] if problem.batch else ())),
        outputs=(Buffer("y", problem.out_dtype, (ROWS, features)), *vectors),
        workspace=(),
        aliases=() if stored else (("product", "y"),),
    )
    return whole, statistics, normalize


def backward(problem: Problem, strategy: str) -> tuple[Plan, Plan]:
    """The plans "sums" and "gradient"."""
    ranked = (c for _, c in choice.ranking(problem, "backward", strategy))
    whole = next(c for c in ranked if c.variant == Backward("three launches")).plan()
    sums, merge, *rest = whole.steps
    assert isinstance(merge, Launch)
    merge = replace(
        merge,
        params=(*merge.params, "row_count"),
        absent=tuple(field for field in merge.absent if field != "row_count"),
    )
    means = tuple(buffer for buffer in whole.workspace if buffer.role in ("mean_grad", "slope_grad"))
    product = tuple(buffer for buffer in whole.workspace if buffer.role == "grad_product")
    share = replace(
        whole,
        phase="sums",
        steps=(sums, merge),
        outputs=(*whole.outputs[2:], *means),
        workspace=tuple(buffer for buffer in whole.workspace if buffer not in (*means, *product)),
    )
    return share, replace(whole, phase="gradient", steps=tuple(rest), outputs=whole.outputs[:2], workspace=product)


def exchange_bytes(capacity: int, ranks: int) -> int:
    """Of the memory that every rank has for `exchange` of up to `capacity` numbers: `ExchangeMemory` of each block."""
    of_block = 8 * 2 * ranks * -(-capacity // EXCHANGE_BLOCKS) + 4
    return EXCHANGE_BLOCKS * -(-of_block // 128) * 128


def exchange(
    chip: Chip, shape: tuple[int, ...], capacity: int, ranks: int, rank: int, limit_ms: int, adds_up: bool
) -> Plan:
    """A float32 tensor of every rank, of one `shape` that fits in `capacity` numbers: all of them [ranks, *shape], or
    what they `adds_up` to, in the order of the ranks."""
    count = math.prod(shape)
    launch = Launch(
        entry="fused_gemm_scale_bn_exchange",
        source="memory_bound/exchange.cuh",
        function="exchange",
        config=(
            ("kRanks", ranks),
            ("kPart", -(-capacity // EXCHANGE_BLOCKS)),
            ("kSum", "true" if adds_up else "false"),
        ),
        params=("sent", "received", "peers", "rank", "count", "limit_ms"),
        grid=Extent(EXCHANGE_BLOCKS),
        block=512,
        resident=1,
        numbers=(("rank", rank), ("count", count), ("limit_ms", limit_ms)),
    )
    received = Buffer("received", "float32", tuple(map(Extent, shape if adds_up else (ranks, *shape))))
    problem = Problem(batch=1, in_features=1, out_features=count, chip=chip)
    return Plan(problem, "exchange", "gemm_stats_apply", steps=(launch,), outputs=(received,))
