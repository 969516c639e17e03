"""Charts of positioned HTML elements. Places are percentages of a track, so that a chart is as wide as the screen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .html import Html, tag


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis from `low` to `high`."""

    low: float
    high: float

    @staticmethod
    def over(values: Iterable[float], *, room: float = 1.12) -> Scale:
        """From the smallest to the largest of the values, with room at both ends."""
        found = [v for v in values if v > 0 and math.isfinite(v)] or [1.0]
        return Scale(min(found) / room, max(found) * room)

    def place(self, value: float) -> float:
        """Percent from the left, within the track."""
        if self.high <= self.low:
            return 50.0
        share = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        return 100 * min(max(share, 0.0), 1.0)

    def ticks(self, most: int = 7) -> list[float]:
        """Round values on the axis: 1, 2, 5 of each decade, or fewer."""
        decades = range(math.floor(math.log10(self.low)) - 1, math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            found = [s * 10.0**d for d in decades for s in steps if self.low <= s * 10.0**d <= self.high]
            if len(found) <= most:
                return found
        return found[:: -(-len(found) // most)]


@dataclass(frozen=True)
class Mark:
    """One value: its class (which says the shape and the colour) and what a pointer over it reads."""

    value: float
    kind: str
    title: str


@dataclass(frozen=True)
class Row:
    """A line of a dot chart: its name, its marks, what stands at the right, and a line from one value to another."""

    name: str
    marks: Sequence[Mark]
    figure: Any = ""
    span: tuple[float, float] | None = None
    kind: str = ""


def percent(value: float) -> str:
    return f"{value:.2f}%"


def dots(
    groups: Sequence[tuple[str, Sequence[Row]]], scale: Scale, *, limit: float | None = None, names: str = ""
) -> Html:
    """Groups of rows of marks on one logarithmic axis; `limit` is drawn through all of them.

    `names` is "long" where the rows' names want room.
    """

    def line(value: float, kind: str) -> Html:
        return tag("i", class_=kind, style=f"left:{percent(scale.place(value))}")

    def row(item: Row) -> Html:
        inside: list[Any] = [line(value, "grid") for value in scale.ticks()]
        if limit is not None:
            inside.append(line(limit, "limit"))
        if item.span:
            left, right = sorted(map(scale.place, item.span))
            style = f"left:{percent(left)};width:{percent(right - left)}"
            inside.append(tag("i", class_=f"span {item.kind}", style=style))
        for mark in item.marks:
            place = f"left:{percent(scale.place(mark.value))}"
            inside.append(tag("b", class_=f"mark {mark.kind}", style=place, title=mark.title))
        return tag(
            "div",
            tag("span", item.name, class_="name", title=item.name),
            tag("span", *inside, class_="track"),
            tag("span", item.figure, class_="figure"),
            class_="row",
        )

    shown = []
    for title, rows in groups:
        shown += [tag("h4", title) if title else "", *map(row, rows)]
    labels = [tag("em", f"{v:g}", style=f"left:{percent(scale.place(v))}") for v in scale.ticks()]
    axis = tag("div", tag("span", class_="name"), tag("span", *labels, class_="track"), tag("span", class_="figure"))
    return tag("div", *shown, Html(axis.replace("<div>", '<div class="row axis">', 1)), class_=f"dots {names}")


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """What the marks mean: kind → words."""
    return tag("p", (tag("span", tag("b", class_=f"mark {kind}"), text) for kind, text in entries), class_="legend")


@dataclass(frozen=True)
class Part:
    """One piece of a bar."""

    name: str
    value: float
    kind: str = ""


Bar = tuple[str, Sequence[Part], Any]  # its name, its parts, and the figure at the right


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], *, names: str = "") -> Html:
    """Groups of bars, all from the same zero on one scale; `names` as in `dots`."""
    longest = max((sum(p.value for p in parts) for _, rows in groups for _, parts, _ in rows), default=1.0) or 1.0
    return tag(
        "div",
        ([tag("h4", title) if title else None, _bars(rows, longest)] for title, rows in groups),
        class_=f"bars {names}",
    )


def _bars(rows: Sequence[Bar], longest: float) -> list[Html]:
    lines = []
    for name, parts, figure in rows:
        pieces = [
            tag("i", class_=f"part {p.kind}", style=f"width:{percent(100 * p.value / longest)}", title=p.name)
            for p in parts
            if p.value > 0
        ]
        lines.append(
            tag(
                "div",
                tag("span", name, class_="name", title=name),
                tag("span", *pieces, class_="bar"),
                tag("span", figure, class_="figure"),
                class_="row",
            )
        )
    return lines


@dataclass(frozen=True)
class Point:
    """A point of a scatter chart, and the point that it came from."""

    x: float
    y: float
    kind: str
    label: str = ""
    title: str = ""
    since: tuple[float, float] | None = None


def powers(value: float) -> str:
    """A power of ten as such, anything else as it is."""
    exponent = round(math.log10(value))
    raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if abs(value / 10.0**exponent - 1) < 1e-9 and abs(exponent) > 2 else f"{value:g}"


def scatter(points: Sequence[Point], x_title: str, y_title: str, *, level: float | None = None) -> Html:
    """Points on two logarithmic axes, with a line from where each came from; `level` is a horizontal line."""
    xs = [v for p in points for v in ((p.x, p.since[0]) if p.since else (p.x,))]
    ys = [v for p in points for v in ((p.y, p.since[1]) if p.since else (p.y,))] + ([level] if level else [])
    across, up = Scale.over(xs, room=1.35), Scale.over(ys, room=1.8 if level is None else 1.2)

    def at(x: float, y: float) -> str:
        return f"left:{percent(across.place(x))};bottom:{percent(up.place(y))}"

    lines = [
        tag("line", x1=percent(across.place(p.since[0])), y1=percent(100 - up.place(p.since[1])),
            x2=percent(across.place(p.x)), y2=percent(100 - up.place(p.y)), class_=p.kind)
        for p in points if p.since
    ]  # fmt: skip
    inside: list[Any] = [
        *(tag("i", class_="grid v", style=f"left:{percent(across.place(v))}") for v in across.ticks(5)),
        *(tag("i", class_="grid h", style=f"bottom:{percent(up.place(v))}") for v in up.ticks(5)),
        tag("i", class_="limit h", style=f"bottom:{percent(up.place(level))}") if level else None,
        tag("svg", *lines, aria_hidden="true") if lines else None,
        *(tag("em", f"{v:g}", class_="x", style=f"left:{percent(across.place(v))}") for v in across.ticks(5)),
        *(tag("em", powers(v), class_="y", style=f"bottom:{percent(up.place(v))}") for v in up.ticks(5)),
    ]
    for p in points:
        if p.since:
            inside.append(tag("b", class_=f"mark hollow {p.kind}", style=at(*p.since)))
        inside.append(tag("b", class_=f"mark {p.kind}", style=at(p.x, p.y), title=p.title))
        if p.label:
            inside.append(tag("u", p.label, class_=p.kind, style=at(p.x, p.y)))
    return tag(
        "figure",
        tag("div", *inside, class_="plot"),
        tag("figcaption", tag("span", f"→ {x_title}"), tag("span", f"↑ {y_title}")),
        class_="scatter",
    )


@dataclass(frozen=True)
class Step:
    """What one run measured: its number from 0, the value, the class of its mark, what a pointer over it reads."""

    run: int
    value: float
    kind: str
    title: str


Trend = tuple[str, Sequence[tuple[str, Sequence[Step]]]]  # a row's name, and its figures, each with its steps


def trends(groups: Sequence[tuple[str, Sequence[Trend]]], runs: int, *, names: str = "") -> Html:
    """Groups of rows of small line charts over so many runs, with the last value at the right of each; `names` as in
    `dots`."""

    def row(name: str, figures: Sequence[tuple[str, Sequence[Step]]]) -> Html:
        parts = []
        for symbol, steps in figures:
            last = f"{steps[-1].value:.2f}" if steps else "–"
            parts += [_line(steps, runs), tag("span", tag("em", symbol), tag("b", last), class_="figure")]
        return tag("div", tag("span", name, class_="name", title=name), *parts, class_="row")

    shown = ([tag("h4", title), *(row(*item) for item in rows)] for title, rows in groups)
    return tag("div", *shown, class_=f"trends {names}")


def _line(steps: Sequence[Step], runs: int) -> Html:
    """One line on a logarithmic axis of its own, which shows no less than a tenth: noise stays small."""
    values = [step.value for step in steps]
    room = max(1.0, math.sqrt(1.1 * min(values) / max(values))) if values else 1.0
    scale = Scale.over(values, room=room)

    def at(step: Step) -> tuple[str, str]:
        return percent(100 * step.run / max(runs - 1, 1)), percent(100 - scale.place(step.value))

    places = [at(step) for step in steps]
    lines = [tag("line", x1=a[0], y1=a[1], x2=b[0], y2=b[1]) for a, b in itertools.pairwise(places)]
    marks = [
        tag("b", class_=f"mark {step.kind}", style=f"left:{x};top:{y}", title=step.title)
        for step, (x, y) in zip(steps, places, strict=True)
    ]
    return tag("span", tag("svg", *lines, aria_hidden="true"), *marks, class_="track")
