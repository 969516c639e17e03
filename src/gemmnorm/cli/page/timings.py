"""Sections about times and errors: documents of kind "bench" (suites, random problems) and "bench-files"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...bench import Document, random_problems
from .. import figures
from .charts import Bar, Mark, Part, Point, Row, Scale, bars, dots, legend, scatter
from .html import Html, folded, section, table, tag

PHASES = {
    "train_fwd": "training, forward",
    "eval_fwd": "evaluation, forward",
    "train_fwd_bwd": "training, forward and backward",
}
_MARKS = (
    ("ours", "gemmnorm"),
    ("eager", "eager"),
    ("compile", "torch.compile"),
    ("graph", "eager in a CUDA graph"),
    ("roof", "roofline"),
    ("limitmark", "the bare GEMM"),
)
_PEERS = (("eager", "eager_ms"), ("compile", "compile_ms"), ("graph", "eager_graphed_ms"))
_PEER_KEYS = tuple(key for _, key in _PEERS)


def chosen(document: Document) -> list[Document]:
    """The planner's choice of each cell."""
    return [row for row in document.get("rows", []) if row.get("chosen")]


def graphed(rows: Iterable[Document]) -> bool:
    """Whether eager was also timed in a CUDA graph."""
    return any(row.get("eager_graphed_ms") for row in rows)


def mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of those that are there."""
    logs = [math.log(v) for v in values if v]
    return math.exp(sum(logs) / len(logs)) if logs else None


def behind(row: Document) -> float | None:
    """The time over that of the fastest peer."""
    peers = [t for key in _PEER_KEYS if (t := figures.number(row.get(key)))]
    return figures.quotient(row.get("ms"), min(peers)) if peers else None


def suite(document: Document) -> Iterable[Html]:
    """Everything about a suite: times against the bare GEMM, errors, what is beyond the product, all figures."""
    rows = document.get("rows", [])
    cases = list(dict.fromkeys(row["case"] for row in rows))
    ours = chosen(document)
    yield section(
        "Speed",
        (_speed_of_case(name, [row for row in ours if row["case"] == name]) for name in cases),
        lead="Time in units of the bare GEMM, on a logarithmic axis; left is faster. The line goes from eager to"
        " gemmnorm. The roofline is what a large GEMM and a copy reached in the same run; float32 is faster than"
        " it, because its product runs on the tensor cores.",
    )
    yield section(
        "Error against time",
        tag("div", *(_errors_of_case(name, ours) for name in cases), class_="pair"),
        lead="Training, forward. Each line begins at eager (hollow) and ends at gemmnorm (filled): left is faster, down"
        " is closer to float64.",
    )
    yield section(
        "Where the time goes",
        (_beyond(name, [r for r in ours if r["case"] == name and r["phase"] == "train_fwd"]) for name in cases),
        lead="Training, forward: microseconds beyond the bare GEMM, the price of scale, statistics, normalisation and"
        " activation. “–” is less than nothing: the whole chain is faster than its product by cuBLAS.",
    )
    yield section(
        "The plan and its candidates",
        (folded(_title(name, rows), _candidates([r for r in rows if r["case"] == name])) for name in cases),
        lead="Every strategy that serves a cell, measured side by side; ● is the planner's choice.",
    )
    further = (folded(_title(name, rows), _further([r for r in rows if r["case"] == name])) for name in cases)
    yield section("Further figures", further)


def _title(case: str, rows: Sequence[Document]) -> Html:
    first = next(row for row in rows if row["case"] == case)
    parts = [name for name in ("bias", "scale") if first.get(name)]
    parts += [str(first["activation"])] if first.get("activation") else []
    return Html(
        tag("b", case) + tag("span", f" {_sizes(first)}" + (f", {', '.join(parts)}" if parts else ""), class_="muted")
    )


def _sizes(row: Document) -> str:
    return f"{row['batch']} × {row['in_features']} → {row['out_features']}"


def _in_gemms(row: Document, key: str) -> float | None:
    return figures.quotient(row.get(key), row.get("gemm_ms"))


def _speed_of_case(case: str, rows: Sequence[Document]) -> Html:
    if not rows:
        return Html("")
    keys = [("ours", "ms"), *_PEERS, ("roof", "bound_ms")]
    values = [v for row in rows for _, key in keys if (v := _in_gemms(row, key))]
    scale = Scale.over([*values, 1.0])

    def line(row: Document) -> Row:
        shown = [(kind, key, v) for kind, key in reversed(keys) if (v := _in_gemms(row, key))]
        names = dict(_MARKS)
        marks = [Mark(v, kind, f"{names[kind]}: {figures.milliseconds(row[key])} ms") for kind, key, v in shown]
        ours, eager = _in_gemms(row, "ms"), _in_gemms(row, "eager_ms")
        figure = [tag("b", figures.milliseconds(row.get("ms"))), " ms"]
        figure += [tag("span", f"{figures.ratio(row['eager_ms'], row['ms'])}×", class_="chip")] if eager else []
        span = (ours, eager) if ours and eager else None
        kind = "good" if span and span[0] <= span[1] else "bad"
        return Row(figures.condition(row), marks, figure, span, kind)

    groups = [(PHASES.get(p, str(p)), [line(r) for r in rows if r["phase"] == p]) for p in _phases(rows)]
    used = {kind for kind, key in keys if any(_in_gemms(row, key) for row in rows)} | {"limitmark"}
    return tag(
        "article",
        tag("h3", _title(case, rows)),
        legend((kind, text) for kind, text in _MARKS if kind in used),
        dots(groups, scale, limit=1.0),
        tag("p", "The figure at the right is gemmnorm's time, and eager's over it.", class_="note"),
    )


def _phases(rows: Iterable[Document]) -> list[str]:
    return list(dict.fromkeys(row["phase"] for row in rows))


def _errors_of_case(case: str, rows: Sequence[Document]) -> Html | None:
    points = []
    for row in rows:
        x, y = figures.number(row.get("ms")), figures.number(row.get("error"))
        since = figures.number(row.get("eager_ms")), figures.number(row.get("eager_error"))
        if row["case"] != case or row["phase"] != "train_fwd" or row.get("autocast") or not x or not y:
            continue
        told = f"{row['precision']}: {figures.milliseconds(x)} ms, error {figures.error(y)}"
        begin = (since[0], since[1]) if since[0] and since[1] and math.isfinite(since[1]) else None
        points.append(Point(x, y, str(row["precision"]), str(row["precision"]), told, begin))
    if not points:
        return None
    title = tag("h3", _title(case, rows))
    return tag("article", title, scatter(points, "milliseconds", "error against float64"))


def _beyond(case: str, rows: Sequence[Document]) -> Html | None:
    found = [row for row in rows if figures.number(row.get("gemm_ms"))]
    if not found:
        return None
    keys = (
        ("eager", "eager", "eager_ms"),
        ("torch.compile", "compile", "compile_ms"),
        ("gemmnorm", "ours strong", "ms"),
    )
    groups: list[tuple[str, list[Bar]]] = []
    for row in found:
        times = [
            (name, kind, 1e3 * (ms - row["gemm_ms"]))
            for name, kind, key in keys
            if (ms := figures.number(row.get(key)))
        ]
        lines: list[Bar] = []
        for name, kind, more in times:
            shown = f"{more:.1f} µs" if more > 0 else "–"
            lines.append((name, [Part(f"{name}: {more:.1f} µs", max(more, 0.0), kind)], shown))
        groups.append((figures.condition(row), lines))
    return tag("article", tag("h3", _title(case, rows)), bars(groups))


def _candidates(rows: Sequence[Document]) -> Html:
    columns = ("precision", "phase", "strategy", "ms", "predicted", "GEMM", "R", "eager", "S", "compile", "than peers",
               "error", "eager’s", "samples")  # fmt: skip
    lines = []
    for row in rows:
        name = f"{row['strategy']} ●" if row.get("chosen") else str(row["strategy"])
        ms, gemm = row.get("ms"), row.get("gemm_ms")
        lines.append(
            [figures.condition(row), PHASES.get(row["phase"], row["phase"]), name, figures.with_spread(row),
             figures.milliseconds(row.get("predicted_ms")), figures.milliseconds(gemm), figures.ratio(ms, gemm),
             figures.milliseconds(row.get("eager_ms")), figures.ratio(row.get("eager_ms"), ms),
             figures.milliseconds(row.get("compile_ms")), figures.standing(row), figures.error(row.get("error")),
             figures.error(row.get("eager_error")), str(row.get("samples", "–"))]
        )  # fmt: skip
    return table(columns, lines, words=3)


def _further(rows: Sequence[Document]) -> Html | None:
    shown = [row for row in rows if row.get("chosen") and figures.has_further(row)]
    columns = [c for c in figures.FURTHER if any(row.get(c[1]) is not None for row in shown)]
    lines = [
        [
            figures.condition(row),
            PHASES.get(row["phase"], row["phase"]),
            *(show(row.get(key)) for _, key, show in columns),
        ]
        for row in shown
    ]
    return table(["precision", "phase", *(title for title, _, _ in columns)], lines, words=2) if shown else None


# --- random problems -------------------------------------------------------------------------------------------------


def random(document: Document) -> Iterable[Html]:
    """Problems drawn from seeds: each one a point, the worst by name."""
    rows = [row for row in document["rows"] if behind(row) and row.get("gemm_ms")]
    groups = dict.fromkeys((figures.condition(row), row["phase"]) for row in rows)
    charts = []
    for group in groups:
        mine = [row for row in rows if (figures.condition(row), row["phase"]) == group]
        points = [
            Point(row["gemm_ms"], 1 / (behind(row) or 1.0), "ours" if (behind(row) or 0) <= 1 else "worse",
                  title=f"{_sizes(row)}: {figures.milliseconds(row['ms'])} ms")
            for row in mine
        ]  # fmt: skip
        title = f"{group[0]}, {PHASES.get(group[1], group[1])}"
        charts.append(
            tag(
                "article",
                tag("h3", title),
                scatter(points, "bare GEMM, ms", "times as fast as the fastest peer", level=1.0),
            )
        )
    yield section(
        "Speed",
        tag("div", *charts, class_="pair"),
        lead="Each point is a problem that nobody tuned for. Above the line gemmnorm is faster than every peer.",
    )
    worst = sorted(rows, key=random_problems.behind, reverse=True)[:10]
    lines = [
        [_sizes(row), figures.condition(row),
         PHASES.get(row["phase"], row["phase"]), str(row["strategy"]), figures.milliseconds(row["ms"]),
         figures.milliseconds(row.get("gemm_ms")), figures.milliseconds(row.get("eager_ms")),
         figures.milliseconds(row.get("compile_ms")), f"{behind(row):.2f}"]
        for row in worst
    ]  # fmt: skip
    columns = ("problem", "precision", "phase", "strategy", "ms", "GEMM", "eager", "compile", "behind")
    yield section("The ten worst", table(columns, lines, words=4))


# --- model files -----------------------------------------------------------------------------------------------------

_KINDS = {"eager": "eager", "compile": "compile", "fused": "ours", "candidate": "ours strong", "graph": "graph"}


def files(document: Document) -> Iterable[Html]:
    """A model file and its replacements: times by phase, errors."""
    rows = document.get("rows", [])
    articles = []
    for phase in _phases(rows):
        mine = [row for row in rows if row["phase"] == phase]
        gemm = figures.number(mine[0].get("gemm_ms"))
        lines: list[Bar] = []
        if gemm:
            lines.append(("bare GEMMs", [Part("bare GEMMs", gemm, "floor")], f"{figures.milliseconds(gemm)} ms"))
        for row in mine:
            told = f"{row['variant']}: {figures.milliseconds(row['ms'])} ms"
            eager = tag("span", f"{figures.ratio(row.get('eager_ms'), row['ms'])}×", class_="chip")
            part = Part(told, float(row["ms"]), _KINDS.get(row.get("kind", ""), ""))
            lines.append((str(row["variant"]), [part], [f"{figures.milliseconds(row['ms'])} ms", eager]))
        articles.append(tag("article", tag("h3", PHASES.get(phase, phase)), bars([("", lines)])))
    yield section("Speed", articles, lead="Milliseconds, and eager's time over it. Shorter is faster.")
    columns = ("phase", "variant", "ms", "R", "S", "than peers", "samples", "error", "eager’s")
    lines_of = [
        [PHASES.get(row["phase"], row["phase"]), str(row["variant"]), figures.with_spread(row),
         figures.ratio(row["ms"], row.get("gemm_ms")), figures.ratio(row.get("eager_ms"), row["ms"]),
         figures.standing(row), str(row.get("samples", "–")),
         figures.error(row.get("error")), figures.error(row.get("eager_error"))]
        for row in rows
    ]  # fmt: skip
    told = "R: time over the bare GEMMs'. S: eager's time over it. ±: half the distance between the quartiles."
    yield section(
        "Every time", folded(f"{len(rows)} times", table(columns, lines_of, words=2)) if rows else "", lead=told
    )
    failed = [tag("li", tag("b", name), f": {why}") for name, why in (document.get("failed") or {}).items()]
    yield section("Failed", tag("ul", *failed) if failed else "")
