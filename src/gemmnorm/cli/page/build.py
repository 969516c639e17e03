"""Documents → pages: the verdict first, then everything that it rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...bench import Document
from .. import figures, report
from . import checks, over_time, plans, timings
from .html import Html, section, table, tag

MARK = '<meta name="generator" content="gemmnorm">'  # in every page: what has it may be overwritten
_STYLE = Path(__file__).with_name("style.css")


@dataclass
class Verdict:
    """What stands at the head of a page: good, bad, or neither; a word; a subject; a sentence; a few figures."""

    kind: str
    word: str
    subject: str
    sentence: str = ""
    tiles: list[tuple[str, str]] = field(default_factory=list)


def page(document: Document) -> str:
    """The document as one self-contained HTML page.

    Raises:
        ReportError: it is of an unknown kind or schema, or entries are missing.
    """
    report.check(document)
    head, sections = _KINDS[report.kind_of(document)]
    try:
        verdict, body = head(document), [*sections(document), *_ending(document)]
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise report.ReportError(
            f"expected a whole result of {report.kind_of(document)}; {error!r} is amiss"
        ) from error
    title = f"{verdict.subject}: {verdict.word}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            MARK,
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            tag("title", title),
            Html(f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>"),
            tag("main", _head(document, verdict), *body),
            "</html>\n",
        ]
    )


def _head(document: Document, verdict: Verdict) -> Html:
    tiles = [tag("div", tag("b", figure), tag("span", words)) for figure, words in verdict.tiles]
    symbol = {"good": "✓", "bad": "✗", "warn": "!"}.get(verdict.kind, "·")
    where = [tag("span", part) for part in _where(document)]
    return tag(
        "header",
        tag("p", "gemmnorm ", tag("span", report.kind_of(document).replace("-", " of ")), class_="brand"),
        tag("h1", verdict.subject),
        tag("p", tag("span", symbol, class_="symbol"), verdict.word, class_=f"verdict {verdict.kind}"),
        tag("p", verdict.sentence, class_="sentence") if verdict.sentence else None,
        tag("div", *tiles, class_="tiles") if tiles else None,
        tag("p", where, class_="muted facts") if where else None,
    )


def _environment(document: Document) -> Document:
    inner: Document = (document.get("bench") or {}) if isinstance(document.get("bench"), dict) else {}
    return document.get("environment") or inner.get("environment") or {}


def _where(document: Document) -> Iterable[str]:
    env = _environment(document)
    if env:
        yield str(env.get("gpu") or env.get("cpu") or "CPU")
        yield f"torch {env.get('torch')}"
    if document.get("created"):
        yield str(document["created"]).replace("T", " ").replace("+00:00", " UTC")


def _ending(document: Document) -> Iterable[Html]:
    """What every page ends with: notes, environment, the command."""
    notes = [*(document.get("said") or []), *(document.get("notes") or [])]
    notes += (document.get("bench") or {}).get("notes") or [] if isinstance(document.get("bench"), dict) else []
    reasons: dict[str, list[str]] = {}
    for item in document.get("not_applicable") or []:
        names = reasons.setdefault(str(item["reason"]), [])
        names += [item["strategy"]] if item["strategy"] not in names else []
    notes += [f"not run: {', '.join(names)}: {why}" for why, names in reasons.items()]
    yield section("Notes", tag("ul", *(tag("li", note) for note in notes)) if notes else "")
    env = [[key.replace("_", " "), _value(value)] for key, value in _environment(document).items() if value is not None]
    yield section("Environment", table(("", ""), env, words=2) if env else "")
    command = str(document.get("command") or "").replace(" && ", " &&\n")
    yield section(
        "The same again", tag("pre", command) if command else "", lead="The command that this page comes from."
    )
    yield tag("footer", "Written by gemmnorm from the result file alone.")


def _value(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


# --- the kinds -------------------------------------------------------------------------------------------------------


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _bench_head(document: Document) -> Verdict:
    rows = document["rows"] if document.get("random") else timings.chosen(document)
    known = [row for row in rows if timings.behind(row)]
    ahead = sum((timings.behind(row) or 0) <= 1 for row in known)
    slower = sum((timings.behind(row) or 0) > 1.03 for row in known)
    tiles = [
        (_times(timings.mean(figures.quotient(r.get("eager_ms"), r["ms"]) for r in rows)), "as fast as eager"),
        (
            _times(timings.mean(figures.quotient(r.get("compile_ms"), r["ms"]) for r in rows)),
            "as fast as torch.compile",
        ),
        (_times(timings.mean(figures.quotient(r["ms"], r.get("gemm_ms")) for r in rows)), "of the bare GEMM's time"),
        (f"{len(rows)}", "cells measured"),
    ]
    names = (
        ", ".join(dict.fromkeys(str(row["case"]) for row in rows)) if not document.get("random") else "random problems"
    )
    gpu = _environment(document).get("gpu")
    word = f"faster than its peers in {ahead} of {len(known)} cells" if known else "measured, without peers"
    if slower:
        word += f", slower in {slower}"
    kind = "good" if known and ahead > len(known) / 2 else "bad" if slower > len(known) / 2 else ""
    peers = "eager, torch.compile and eager in a CUDA graph" if timings.graphed(rows) else "eager and torch.compile"
    told = f"Geometric means over the cells, of the planner's choice. Peers: {peers}."
    return Verdict(kind, word, f"{names} on {gpu}" if gpu else names, told, tiles)


def _bench(document: Document) -> Iterable[Html]:
    yield over_time.comparison(document)
    yield over_time.history(document)
    yield from timings.random(document) if document.get("random") else timings.suite(document)


def _files_head(document: Document) -> Verdict:
    bad = document.get("status", "ok") != "ok"
    rows = [row for row in document.get("rows", []) if row.get("kind") in ("fused", "candidate")]
    best = min((row for row in rows if row.get("eager_ms")), key=lambda r: r["ms"] / r["eager_ms"], default=None)
    word = "failed" if bad else "measured"
    told = str(document.get("detail") or "")
    if best is not None:
        phase = timings.PHASES.get(best["phase"], best["phase"])
        told = f"At best {best['eager_ms'] / best['ms']:.2f} times as fast as eager: {best['variant']}, {phase}."
    return Verdict("bad" if bad else "", word, Path(str(document["model"])).name, told)


def _files(document: Document) -> Iterable[Html]:
    if document.get("report"):
        yield section("What was found", tag("p", document["report"], class_="pre"))
    yield over_time.comparison(document)
    yield over_time.history(document)
    yield from timings.files(document)


def _verify_head(document: Document) -> Verdict:
    listed = document.get("checks") or []
    candidate, model = Path(str(document["candidate"])).name, Path(str(document["model"])).name
    equal = bool(document["equal"])
    worst = max((r for c in listed if (r := figures.number(c.get("ratio"))) is not None), default=None)
    tiles = [(str(len(listed)), "comparisons"), (str(document.get("failures", 0)), "failed")]
    tiles += [(str(document.get("seeds", "–")), "draws of weights and inputs")]
    if worst is not None:
        tiles.append((f"{worst:.2f}" if worst < 1e3 else f"{worst:.0e}", "the largest error, over its limit"))
    word = str(document["verdict"]).replace("_", " ")
    return Verdict("good" if equal else "bad", word, f"{candidate} against {model}", str(document["reason"]), tiles)


def _verify(document: Document) -> Iterable[Html]:
    yield from checks.sections(document)
    if document.get("detail"):
        yield section("What it said", tag("pre", str(document["detail"]).rstrip()))


def _optimize_head(document: Document) -> Verdict:
    status = str(document["status"])
    judged = document.get("verify")
    found = _verify_head(judged) if judged else Verdict("", "", "")
    run = document.get("kernels") in (None, "run")
    kind = ("good" if run else "warn") if status == "equal" else "" if status == "no chain" else "bad"
    told = str((judged or {}).get("reason") or document.get("detail") or "")
    subject = f"{Path(str(document['output'])).name} for {Path(str(document['model'])).name}"
    return Verdict(kind, report.verdict_of(document), subject, told, found.tiles)


def _optimize(document: Document) -> Iterable[Html]:
    found = document.get("export") or {}
    if found.get("report"):
        yield section("What was found", tag("p", found["report"], class_="pre"))
    if document.get("bench"):
        yield from timings.files(document["bench"])
    if found.get("plans"):
        yield plans.sections(found["plans"])
    if document.get("verify"):
        yield from _verify(document["verify"])


def _explain_head(document: Document) -> Verdict:
    word = str(document.get("status", "ok"))
    if document.get("plans"):
        first = document["plans"][0]
        word = f"predicted: {first['us']:.1f} µs, {figures.ratio(first['us'], first['floor_us'])} × the bare GEMM"
    return Verdict("", word, str(document["subject"]), str(document.get("detail") or ""))


def _explain(document: Document) -> Iterable[Html]:
    if document.get("plans"):
        yield plans.sections(document["plans"])
    else:
        yield section("In words", tag("pre", "\n".join(map(str, document.get("lines", [])))))


def _tune_head(document: Document) -> Verdict:
    if not document["rows"]:
        return Verdict("bad", str(document["status"]), str(document["subject"]), str(document["detail"]))
    word = "measured here" if any(row["line"] for row in document["rows"]) else "nothing to gain"
    return Verdict("good", word, str(document["subject"]), report.tuned(document))


def _tune(document: Document) -> Iterable[Html]:
    rows = [
        [r["title"], r["phase"], r["chosen"], r["best"], f"{r['chosen_us']:.1f}", f"{r['best_us']:.1f}"]
        for r in document["rows"]
    ]
    columns = ("", "", "chosen before", "measured best", "µs", "best µs")
    yield section("What was measured", table(columns, rows, words=4))


def _doctor_head(document: Document) -> Verdict:
    missing = [c["name"] for c in document.get("checks", []) if c["state"] == "missing"]
    word = f"missing: {', '.join(missing)}" if missing else "everything is here"
    return Verdict("bad" if missing else "good", word, "This machine")


def _doctor(document: Document) -> Iterable[Html]:
    rows = [[c["name"], c["found"], c["state"], c["advice"]] for c in document.get("checks", [])]
    yield section("What is here", table(("", "found", "", ""), rows, words=4))
    yield section("What runs", tag("ul", *(tag("li", line) for line in document.get("runs", []))))
    yield section("What mends it", tag("pre", "\n".join(document["commands"])) if document.get("commands") else "")


_KINDS: dict[str, tuple[Callable[[Document], Verdict], Callable[[Document], Iterable[Html]]]] = {
    "bench": (_bench_head, _bench),
    "bench-files": (_files_head, _files),
    "verify": (_verify_head, _verify),
    "optimize": (_optimize_head, _optimize),
    "explain": (_explain_head, _explain),
    "tune": (_tune_head, _tune),
    "doctor": (_doctor_head, _doctor),
}
