"""Problem → every way that could serve it: strategy × kernel × tile × schedule × where operands are converted.

A candidate is data: it names its choices, and can make the plan that follows from them, or says why it cannot serve.
Refusals are physical or logical (shared memory, clusters that run at once, TMA's alignment, what a kernel computes);
what is merely slow is a candidate like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from . import cast, cost, cost_twice, cublas, gradient, gram, memory_bound, small
from .cublas import CublasForward
from .gemm import Gemm, refusal
from .gradient import Backward
from .problem import CHIPS, DTYPE_BYTES, Problem
from .small import SmallPanel, clusters_at_once
from .split import ALL_ROWS
from .steps import Plan
from .tile import STAGES, WIDE, Tile, swapped

LARGEST_CLUSTER = 4  # blocks of `fused_gemm`: of larger ones fewer run at once than there are multiprocessors for
# Panels that are worked on together: 4 to 16 differ by some percent, and a small last group costs most.
GROUP_PANELS, OTHER_GROUP_PANELS = 8, (4, 6, 8, 12, 16, 24)
WEIGHT_SHARE = 1 / 8  # of the L2, up to which the weight stays there while x and y go by
SHARING = 2  # blocks that load x together
SHARES = (0.0, 0.25, 0.5)  # of the rows that later waves need, converted before as well; or all


# The choices of a candidate: how `fused_gemm`, `small_panel`, cuBLAS or a backward go about it. Each class has `words`,
# for its name, and `plan`.
Variant = Gemm | SmallPanel | CublasForward | Backward


@dataclass(frozen=True)
class Candidate:
    """One way to serve a problem.

    Attributes:
        strategy: of `STRATEGIES`.
        variant: all other choices; None where the strategy cannot serve whatever they are.
        refusal: why it cannot serve, or None.
    """

    problem: Problem
    phase: str
    strategy: str
    variant: Variant | None = None
    refusal: str | None = None

    @property
    def choices(self) -> str:
        """All but the strategy, in a few words."""
        words = self.variant.words(self.problem) if self.variant else ""
        copied = f"{' and '.join(self.problem.copied)} copied" if self.problem.copied else ""
        return f"{words} {copied}".strip()

    @property
    def name(self) -> str:
        """All choices in a few words: unique among the candidates of a problem."""
        return f"{self.strategy} {self.choices}".rstrip()

    @property
    def listed(self) -> str:
        """Its name in a table of measured bests: a backward's holds whatever strategy its forward ran by."""
        return self.choices if self.phase == "backward" else self.name

    def counted(self) -> tuple[cost.Form, cost.Counted]:
        """The form of its terms, and what they multiply."""
        problem = self.problem
        match self.variant:
            case Backward(gemm=Gemm() as gemm):
                return cost_twice.again_terms, cost_twice.count_again(problem, gemm)
            case Backward() as backward:
                return cost.backward_terms, cost.count_backward(problem, backward)
            case Gemm(schedule="two-pass") as gemm:
                return cost_twice.two_pass_terms, cost_twice.count_two_passes(problem, gemm)
            case Gemm(schedule="gram") as gemm:
                return cost_twice.gram_terms, cost_twice.count_gram(problem, gemm)
            case Gemm() as gemm:
                return cost.gemm_terms, cost.count_gemm(problem, gemm)
            case SmallPanel() as panel:
                return cost.small_terms, cost.count_small(problem, panel)
            case CublasForward(panel):
                return cost.cublas_terms, cost.count_cublas(problem, panel)
            case None:
                raise AssertionError(self.refusal)

    def terms(self) -> dict[str, float]:
        """The parts of the predicted time, µs."""
        form, counted = self.counted()
        return form(counted, cost.constants(self.problem))

    def cost(self) -> float:
        """The predicted time, µs."""
        return sum(self.terms().values())

    def plan(self) -> Plan:
        """The plan of these choices, with its predicted time."""
        floor = _product_seconds(self.problem) * (2 if self.phase == "backward" else 1)
        assert self.variant is not None and self.refusal is None
        made = self.variant.plan(self.problem, self.strategy)
        return replace(made, seconds=self.cost() * 1e-6, floor=floor)


def candidates(problem: Problem, phase: str = "forward") -> tuple[Candidate, ...]:
    """All of them, those that cannot serve included."""
    if phase == "backward":
        return tuple(_backwards(problem))
    every = cast.with_copies(problem)
    small_panels = (c for p in every for c in _small(p))
    gemms = (c for p in every if not (p.split and p.copied) for c in _gemms(p))  # what is split is read once as it is
    return (*_cublas(problem), *small_panels, *gemms)


def _product_seconds(problem: Problem) -> float:
    """The forward's product alone, by cuBLAS."""
    c, sizes = cost.constants(problem), (problem.batch, problem.out_features, problem.in_features)
    return float(c.first + cost.product_time(cost.count_product(problem, *sizes), c)) * 1e-6


def with_other_group_panels(problem: Problem) -> tuple[Candidate, ...]:
    """Candidates with other numbers of panels worked on together: microseconds that only a measurement can tell."""
    return tuple(
        replace(found, variant=replace(gemm, group_panels=count))
        for found in _gemms(problem)
        if isinstance(gemm := found.variant, Gemm) and gemm.schedule != "co-resident" and not gemm.converts(problem)
        for count in OTHER_GROUP_PANELS
        if _several_waves(problem, gemm.tile) and gemm.group_panels != count <= gemm.panels
    )


def _cublas(problem: Problem) -> Iterator[Candidate]:
    reason = cublas.refusal(problem)
    for strategy in ("cublas_folded_bn", "cublas_bn"):
        yield Candidate(problem, "forward", strategy, CublasForward(), reason)
    for panel in memory_bound.cluster_panels(problem):
        yield Candidate(problem, "forward", "cublas_folded_bn", CublasForward(panel), reason)


def _small(problem: Problem) -> Iterator[Candidate]:
    """Few tiles of rows, K shared out among the blocks of a cluster."""
    reason = refusal(problem, "one_kernel") or cast.unaligned(problem)
    if problem.training and small.row_tiles(problem) > small.LARGEST_CLUSTER:
        reason = reason or f"small_panel has at most {small.LARGEST_CLUSTER} tiles of {small.TILE_ROWS} rows"
    if problem.prepared:
        reason = reason or "small_panel splits operands in another way"
    for panel in small.PANELS:
        wide = problem.split and panel.columns > small.MOST_SPLIT_COLUMNS
        panel_reason = "the fragments of split operands do not fit the registers" if wide else None
        if panel.cluster_size(problem) > small.LARGEST_CLUSTER:
            panel_reason = f"a cluster has at most {small.LARGEST_CLUSTER} blocks"
        yield Candidate(problem, "forward", "one_kernel", panel, reason or panel_reason)


def tiles(problem: Problem) -> tuple[Tile, ...]:
    """The tiles that `fused_gemm` has for the problem's operands."""
    size, planes = (2, 2) if problem.split else (DTYPE_BYTES[problem.dtype], 1)

    def staged(rows: int, columns: int) -> bool:
        return planes == 1 and (swapped(rows, columns) or (DTYPE_BYTES[problem.dtype] == 2 and columns >= 64))

    return tuple(
        tile
        for (bytes_, parts, rows, columns), stages in STAGES.items()
        if (bytes_, parts) == (size, planes)
        for tile in (Tile(rows, columns, stages, size, planes, staged(rows, columns)),)
        if not tile.overlap or _half_sectors(problem)
    )


def _half_sectors(problem: Problem) -> bool:
    """Every other row of y, and of the product, begins in the middle of a sector."""
    row = problem.out_features * DTYPE_BYTES[problem.out_dtype]
    return problem.out_dtype == problem.dtype and row % cast.SECTOR_BYTES == cast.SECTOR_BYTES // 2


def _gemms(problem: Problem) -> Iterator[Candidate]:
    strategies = ("one_kernel", "gemm_stats_apply") if problem.training else ("one_kernel",)
    for strategy in strategies:
        reason = refusal(problem, strategy) or (None if problem.split else cast.unaligned(problem))
        if reason is not None:
            yield Candidate(problem, "forward", strategy, refusal=reason)
            continue
        for tile in tiles(problem):
            for gemm in _schedules(problem, strategy, tile):
                for found in (*_conversions(problem, gemm), *_sharing(problem, gemm)):
                    yield Candidate(problem, "forward", strategy, found)


def _schedules(problem: Problem, strategy: str, tile: Tile) -> Iterator[Gemm]:
    """What one tile's way of working can be, with all operands converted before."""
    rows, panels = tile.counts(problem)
    together, chunks = _group_panels(problem, tile), cast.chunks(problem)
    everything = Gemm(tile, "", together, panels, weight_rows=problem.out_features, chunks=chunks)
    by_rows = replace(everything, group_panels=_panels_by_rows(problem, tile), queued=_queued(problem, tile))
    if not problem.training:
        yield replace(by_rows, schedule="evaluate")
    elif strategy == "gemm_stats_apply":
        if not tile.overlap:
            yield replace(by_rows, schedule="statistics")
        yield replace(by_rows, schedule="two-pass")
        if gram.serves(problem):
            yield replace(by_rows, schedule="gram")
    elif tile.overlap:  # the statistics are not known: two tiles would have the same features
        return
    elif rows == 1:
        if not tile.halves_rows:
            yield replace(everything, schedule="single-tile")
    else:
        yield replace(everything, schedule="deferred")
        yield from _co_resident(problem, everything)


def _queued(problem: Problem, tile: Tile) -> bool:
    """Whether blocks take tiles as they become free: with several each, where the ring holds at least half of K.

    Memory decides there, and serves blocks worse that drift apart. Where K is large, neighbours that stay in step load
    the same x at the same time, which wins more.
    """
    return tile.steps(problem) <= 2 * tile.stages and _several_waves(problem, tile) and not problem.split


def _several_waves(problem: Problem, tile: Tile) -> bool:
    rows, panels = tile.counts(problem)
    return rows * panels > (problem.chip or CHIPS[90]).multiprocessors


def _group_panels(problem: Problem, tile: Tile) -> int:
    """Panels that are worked on together, so that the L2 holds what their tiles share: all, where there are few.

    Else a divisor of the number of multiprocessors. In the static order a block's tiles are then all of one panel of
    each group, and their weight lies in the part of the L2 that is near.
    """
    _, panels = tile.counts(problem)
    most = max(1, GROUP_PANELS * tile.rows // WIDE)
    together = _dividing((problem.chip or CHIPS[90]).multiprocessors, most)
    return panels if 2 * panels <= 3 * together else together


def _panels_by_rows(problem: Problem, tile: Tile) -> int:
    """The same where no panel has to be complete early: all, if y is larger than the L2 and the weight small beside it.

    Device memory takes whole rows of y faster than pieces of 256 bytes whose neighbours nobody writes meanwhile.
    """
    l2 = (problem.chip or CHIPS[90]).l2_bytes
    of_y = problem.batch * problem.out_features * DTYPE_BYTES[problem.out_dtype]
    of_weight = problem.out_features * problem.in_features * DTYPE_BYTES[problem.dtype]
    return tile.counts(problem)[1] if of_y > l2 and of_weight <= WEIGHT_SHARE * l2 else _group_panels(problem, tile)


def _dividing(panels: int, most: int) -> int:
    return max(n for n in range(1, most + 1) if panels % n == 0)


def _co_resident(problem: Problem, everything: Gemm) -> Iterator[Gemm]:
    """All tiles of a panel at once: as clusters, by one wave of blocks, or by several over whole panels."""
    blocks, tile = (problem.chip or CHIPS[90]).multiprocessors, everything.tile
    rows, panels = tile.counts(problem)
    together = replace(everything, schedule="co-resident")
    if rows <= LARGEST_CLUSTER and panels <= clusters_at_once(blocks, rows):
        yield replace(together, cluster=rows, group_panels=1)
    if rows * panels <= blocks:
        yield replace(together, group_panels=_dividing(panels, GROUP_PANELS))
    elif rows <= blocks and not problem.split:
        waves = -(-panels // (blocks // rows))
        at_once = -(-panels // waves)
        several = replace(together, panels=at_once, group_panels=_dividing(at_once, GROUP_PANELS))
        yield several
        if tile.waits:
            yield replace(several, in_registers=True)


def _sharing(problem: Problem, gemm: Gemm) -> Iterator[Gemm]:
    """Two neighbours that each load half of a tile of x for both, where rows are no whole sectors of the L2.

    Tiles of fewer features gain too, but are seldom the best candidates: 0.2% of the time over 88 problems.
    """
    rows, panels = gemm.tile.counts(problem, SHARING)
    wide = gemm.tile.rows >= WIDE and gemm.tile.step == WIDE
    if not (wide and cast.misaligned(problem)) or gemm.cluster > 1 or gemm.panels == 1:
        return
    together = -(-gemm.group_panels // SHARING)  # pairs
    if gemm.schedule == "co-resident":
        blocks = (problem.chip or CHIPS[90]).multiprocessors
        at_once = min(-(-gemm.panels // SHARING), blocks // (rows * SHARING))
        if at_once == 0:
            return
        panels, together = at_once * SHARING, _dividing(at_once, GROUP_PANELS // SHARING)
    yield replace(gemm, panels=panels, group_panels=together * SHARING, sharing=SHARING, queued=False)


def _conversions(problem: Problem, gemm: Gemm) -> Iterator[Gemm]:
    """All operands converted before the product; or only what its first wave needs, and a share of the rest."""
    yield gemm
    # The second product of two begins before the first is done, and would read rows that are not converted yet.
    if not (problem.split or problem.made) or gemm.schedule in ("single-tile", "gram", "two-pass"):
        return
    if gemm.tile.overlap:
        return
    if problem.split and not gemm.has_conversion(problem):
        return
    if problem.made and problem.in_features % cast.COLUMNS:  # the kernel casts whole chunks
        return
    blocks, tile = (problem.chip or CHIPS[90]).multiprocessors, gemm.tile
    rows, panels = tile.counts(problem)
    if not _several_waves(problem, tile):
        return
    converts_x, converts_weight = problem.split or "x" in problem.made, problem.split or "weight" in problem.made
    if problem.prepared:
        converts_weight = False
    if rows * gemm.group_panels >= blocks:  # the first wave lies along x within the first group of panels
        first_rows, first_panels = -(-blocks // gemm.group_panels), gemm.group_panels
    else:
        first_rows, first_panels = rows, blocks // (rows * gemm.group_panels) * gemm.group_panels
    for share in SHARES if problem.split else SHARES[:1]:
        x_tiles = first_rows + int(share * (rows - first_rows)) if converts_x else rows
        w_tiles = first_panels + int(share * (panels - first_panels)) if converts_weight else panels
        x_rows = ALL_ROWS if x_tiles >= rows else x_tiles * tile.rows
        weight_rows = min(problem.out_features, w_tiles * tile.columns)
        found = replace(gemm, x_rows=x_rows, weight_rows=weight_rows)
        if found.converts(problem):
            yield found
        if problem.made and x_rows == ALL_ROWS and found.chunks > 1:
            yield replace(found, chunks=-(-found.chunks // 2))


def _backwards(problem: Problem) -> Iterator[Candidate]:
    """Candidates of a backward. They serve after every strategy, which differ only in where the product's offset is."""
    kernels = refusal(replace(problem, save=False), "one_kernel")
    if not problem.keep_product:
        yield from _multiplied_again(problem)
        return
    own = "one_kernel" if kernels is None and problem.training else "cublas_folded_bn"
    split_products = (False, True) if problem.split and problem.training and own == "one_kernel" else (False,)
    for split in split_products:
        panels = tuple(gradient.cluster_panels(problem))
        for panel in panels:
            yield Candidate(problem, "backward", own, Backward("cluster_gradient", split, panel))
        if not panels:
            reason = "no cluster of eight blocks holds the batch, or the mode or the GPU has none"
            yield Candidate(problem, "backward", own, Backward("cluster_gradient", split), reason)
        unit = gradient.persistent_launch(problem, split)
        reason_unit = None if unit else "a panel does not fit the L2 twice, or the mode or the GPU has no such kernel"
        yield Candidate(problem, "backward", own, Backward("persistent_gradient", split), reason_unit)
        yield Candidate(problem, "backward", own, Backward("three launches", split))


def _multiplied_again(problem: Problem) -> Iterator[Candidate]:
    """The backward where the forward has kept no product."""
    reason = gradient.refusal_to_recompute(problem)
    for tile in (tile for tile in tiles(problem) if not tile.overlap):
        _, across = tile.counts(problem)
        together, queued = _panels_by_rows(problem, tile), _queued(problem, tile)
        gemm = Gemm(tile, "gradient", together, across, weight_rows=problem.out_features, queued=queued)
        passes = None if gradient.brings_gradient(problem, tile) else "y's gradient does not fit the staging buffers"
        yield Candidate(problem, "backward", "one_kernel", Backward("multiplied again", gemm=gemm), reason or passes)
