"""Sections about the comparisons of `verify`: the worst of each quantity, each case, and every single one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...bench import Document
from .. import figures
from .charts import Mark, Row, Scale, dots, legend
from .html import Html, folded, section, table, tag

_FIRST = 12  # failures at the head of the page
_MOST = 4000  # comparisons that one page lists one by one; of more, the worst over the draws
_WRONG = 1e3  # where an error over limit that is not finite, or is beyond, stands in a chart
_LEAST = 1e-3


def sections(document: Document) -> Iterable[Html]:
    """Everything about one verdict."""
    checks = [check for check in document.get("checks") or [] if "case" in check]
    summary = document.get("summary") or []
    broken = [check for check in checks if not check["ok"]]
    if broken:
        title = f"{len(broken)} failed comparisons" if len(broken) > 1 else "The failed comparison"
        lead = f"The first {_FIRST}; the others stand among all checks." if len(broken) > _FIRST else None
        yield section(title, _listed(broken[:_FIRST], case=True), lead=lead)
    lead = "The worst comparison of each quantity, as error over limit: left of the line is equal."
    yield section("Every quantity", _chart(summary, lambda c: str(c["quantity"])), lead=lead)
    lead = "The worst comparison of each case."
    yield section("Every case", _chart(checks, lambda c: str(c["case"])), lead=lead)
    yield section("Every check", _every(checks), lead="Errors are relative to the norm of the float64 result.")
    facts = [
        [name.replace("_", " "), figures.in_words(value)] for name, value in (document.get("properties") or {}).items()
    ]
    facts += [[kind.removesuffix("s"), text] for kind in ("warnings", "skipped") for text in document.get(kind) or []]
    yield section("Besides", table(("", ""), facts, words=2) if facts else "")


def _ratio(check: Document) -> float:
    found = figures.number(check.get("ratio"))
    return _WRONG if found is None else min(max(found, _LEAST), _WRONG)


def _chart(checks: Sequence[Document], name: Callable[[Document], str]) -> Html | None:
    """One row for each name and, in it, the worst of each phase."""
    if not checks:
        return None
    worst: dict[str, dict[str, Document]] = {}
    for check in checks:
        phases = worst.setdefault(name(check), {})
        if check["phase"] not in phases or _ratio(check) > _ratio(phases[check["phase"]]):
            phases[check["phase"]] = check
    rows = []
    for title, phases in worst.items():
        marks = [Mark(_ratio(c), "wrong" if not c["ok"] else p, f"{p}: {_told(c)}") for p, c in phases.items()]
        largest = max(phases.values(), key=_ratio)
        known = figures.number(largest.get("ratio"))
        figure = "named" if known is None else f"{known:.2f}" if known < 1000 else f"{known:.0e}"
        rows.append(Row(title, marks, tag("b", figure, class_="" if largest["ok"] else "bad")))
    high = max(2.0, *(_ratio(c) for phases in worst.values() for c in phases.values()))
    entries = [("train", "training"), ("eval", "evaluation"), ("wrong", "failed"), ("limitmark", "the limit")]
    broken = any(not c["ok"] for phases in worst.values() for c in phases.values())
    shown = legend(e for e in entries if broken or e[0] != "wrong")
    return tag("article", shown, dots([("", rows)], Scale(_LEAST / 1.3, 1.3 * high), limit=1.0, names="long"))


def _told(check: Document) -> str:
    return (
        f"{check['quantity']}, {check['measure']}: error {figures.error(check.get('error'))}, {check.get('note') or ''}"
    )


def _every(checks: Sequence[Document]) -> list[Any]:
    if len(checks) > _MOST:
        worst: dict[tuple[str, ...], Document] = {}
        for check in checks:
            key = tuple(str(check[k]) for k in ("case", "phase", "quantity", "measure"))
            if key not in worst or _ratio(check) > _ratio(worst[key]):
                worst[key] = check
        checks = list(worst.values())
    parts: list[Any] = []
    for case in dict.fromkeys(check["case"] for check in checks):
        mine = [check for check in checks if check["case"] == case]
        bad = sum(not check["ok"] for check in mine)
        ending = f", {bad} failed" if bad else ""
        title = [tag("b", str(case)), tag("span", f" {len(mine)} comparisons{ending}", class_="muted")]
        parts.append(folded(title, _listed(mine)))
    return parts


def _listed(checks: Sequence[Document], *, case: bool = False) -> Html:
    columns = (
        *(("case",) if case else ()),
        "phase",
        "quantity",
        "measure",
        "draw",
        "error",
        "eager’s",
        "allowed",
        "of it",
        "worst at",
        "",
    )
    lines = []
    for c in checks:
        ratio = figures.number(c.get("ratio"))
        place = ", ".join(map(str, c.get("position") or [])) or "–"
        lines.append(
            [*([str(c["case"])] if case else []), str(c["phase"]), str(c["quantity"]), str(c["measure"]),
             str(c.get("seed", "")), figures.error(c.get("error")), figures.error(c.get("eager_error")),
             figures.error(c.get("limit")),
             "–" if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}" if ratio < 1e3 else f"{ratio:.0e}",
             place, "" if c["ok"] else tag("b", c.get("note") or "NOT EQUAL", class_="bad")]
        )  # fmt: skip
    return table(columns, lines, words=3 + case)
