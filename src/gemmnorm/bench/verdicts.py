"""Faster, slower, the same, or undecidable: what interleaved samples of two variants allow to say.

Samples of one round are neighbours in time, so each round gives one ratio, peer's time over ours, in which drift
cancels. The interval holds their median with `CONFIDENCE` whatever their distribution: it runs between two order
statistics (the sign test turned around), so that single disturbed samples move nothing. Eight rounds are the least.
Sampling that ends at the first of several looks (`LOOKS`) errs more often than one look does: docs/benchmarking.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

CONFIDENCE = 0.99
MARGIN = 0.02  # an interval within ± this of 1 is the same time
LOOKS = (8, 12, 18, 27, 40, 60, 90)  # rounds after which the question is asked whether more are needed

Word = Literal["faster", "slower", "same", "undecidable"]


@dataclass(frozen=True)
class Verdict:
    """What was found about one variant against a peer.

    Attributes:
        verdict: "same" where the whole interval is within `MARGIN` of 1, else "faster" or "slower" where it leaves 1
            out, else "undecidable".
        ratio: median of peer's time over ours, round by round; low, high: the interval of that median.
        rounds: how many rounds were compared.
    """

    verdict: Word
    ratio: float
    low: float
    high: float
    rounds: int

    def as_dict(self) -> dict[str, Any]:
        """For a result file; an interval without an end is null there."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The order statistics between which the median of the distribution lies; without end where they are too few."""
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0  # the chance that fewer than `rank` values lie below the median, and as many above
    while 2 * (outside + math.comb(n, rank) * 0.5**n) <= 1 - confidence:
        outside += math.comb(n, rank) * 0.5**n
        rank += 1
    return (ordered[rank - 1], ordered[n - rank]) if rank else (0.0, math.inf)


def judge(ours: Sequence[float], peer: Sequence[float]) -> Verdict | None:
    """The verdict on two lists of samples, round by round; None without a round that both have."""
    ratios = [b / a for a, b in zip(ours, peer, strict=False) if a > 0]
    if not ratios:
        return None
    low, high = interval(ratios)
    word: Word = "undecidable"
    if low >= 1 - MARGIN and high <= 1 + MARGIN:
        word = "same"
    elif low > 1:
        word = "faster"
    elif high < 1:
        word = "slower"
    return Verdict(word, statistics.median(ratios), low, high, len(ratios))


def disturbed(samples: Sequence[float]) -> int:
    """How many samples something else has lengthened: more than three quartile distances above the upper quartile."""
    if len(samples) < 4:
        return 0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return sum(value > high + 3 * max(high - low, 0.01 * high) for value in samples)
