"""Result files as text: tables for a terminal. Every JSON that a gemmnorm command writes renders here, by its `kind`.

Nothing is computed that is not in the file, but ratios: R = ms / gemm_ms (what the whole chain costs in units of the
bare GEMM), S = eager_ms / ms (the speed-up over eager).
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..bench import SCHEMA, Document, random_problems
from ..errors import GemmNormError
from . import figures, over_time
from .tables import FittingTable

_WIDTH = 150  # where the output is no terminal


class ReportError(GemmNormError, ValueError):
    """A file that is no result of ours, or of another version."""


def load(path: str | Path) -> Document:
    """Read a result file.

    Raises:
        ReportError: it is missing, no JSON, of an unknown kind, or of another schema.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{path}: expected a result file, got {error.strerror or error}") from error
    except ValueError as error:
        raise ReportError(f"{path}: expected JSON, got {error}") from error
    check(document, str(path))
    return dict(document)


def load_runs(paths: Sequence[str]) -> list[tuple[str, Document]]:
    """Names and documents of result files; of a folder, of every result file in it.

    Raises:
        ReportError: a path is neither, as in `load`.
    """
    runs = []
    for path in map(Path, paths):
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            try:
                runs.append((file.name if file.is_absolute() else str(file), load(file)))
            except ReportError:
                if file == path:
                    raise
    return runs


def check(document: Any, name: str = "document") -> None:
    """Raise `ReportError` unless `document` can be rendered."""
    if not isinstance(document, dict) or "schema" not in document:
        raise ReportError(f'{name}: expected a gemmnorm result with a "schema"; got {type(document).__name__}')
    if document["schema"] != SCHEMA:
        raise ReportError(f"{name}: expected schema {SCHEMA}; got {document['schema']!r} (of another gemmnorm?)")
    if kind_of(document) not in RENDERERS:
        raise ReportError(f"{name}: expected a kind of {', '.join(RENDERERS)}; got {kind_of(document)!r}")


def kind_of(document: Document) -> str:
    """Which renderer a document wants; the published benchmark files carry no kind, `verify()`'s answer a tool."""
    return str(document.get("kind") or document.get("tool") or "bench")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process with exit code 1, which here is a verdict."""
        raise BrokenPipeError


def console(*, stderr: bool = False, file: io.StringIO | None = None) -> Console:
    """A console that does not squeeze tables into 80 columns where nobody looks, unless COLUMNS says so."""
    made = _Console(stderr=stderr, file=file, highlight=False)
    if not made.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        made = _Console(stderr=stderr, file=file, highlight=False, width=_WIDTH)
    return made


def render(document: Document) -> list[RenderableType]:
    """The document as things that rich can print.

    Raises:
        ReportError: entries are missing, or are something else than a command of ours writes.
    """
    check(document)
    try:
        return list(RENDERERS[kind_of(document)](document))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ReportError(f"expected a whole result of kind {kind_of(document)}; {error!r} is amiss") from error


def brief(document: Document) -> list[RenderableType]:
    """The verdict alone, where the document is about one; else all of it."""
    shorter = {"verify": _verdict_with_warnings, "optimize": _verdict_on_file}.get(kind_of(document))
    return render(document) if shorter is None else list(shorter(document))


def text(document: Document) -> str:
    """The document as plain text."""
    buffer = io.StringIO()
    out = Console(file=buffer, width=_WIDTH, highlight=False, no_color=True, legacy_windows=False)
    for part in render(document):
        out.print(part)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


# --- bench -----------------------------------------------------------------------------------------------------------


def _environment(document: Document) -> Iterable[RenderableType]:
    env = document.get("environment")
    if not env:
        return
    where = env.get("gpu") or f"{env.get('cpu') or 'CPU'} ({env.get('threads', '?')} threads)"
    parts = [f"torch {env.get('torch')}", f"Python {env.get('python')}"]
    for name in ("cuda", "driver", "nvrtc"):
        if env.get(name) and env.get("gpu"):
            parts.append(f"{name} {env[name]}")
    yield Text(f"{where}, {', '.join(parts)}; {document.get('created', 'no date')}")


def _bench(document: Document) -> Iterable[RenderableType]:
    yield from _environment(document)
    found = document.get("ceilings") or {}
    if found.get("copy_gb_per_s"):
        rates = ", ".join(f"{p} {r:.3g}" for p, r in (found.get("tflops") or {}).items() if r)
        yield Text(f"ceilings: copy {found['copy_gb_per_s']:.0f} GB/s both ways; GEMM {rates} TFLOP/s")
    rows = document.get("rows", [])
    if document.get("random"):
        yield from _random(document)
        return
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        yield _times(mine)
        extras = _further(mine)
        if extras is not None:
            yield extras
    if rows:
        yield Text(
            "R: ms / bare GEMM.  S: eager / ms.  bound: share of the roofline of one product in this precision (float32"
            " by split operands is beyond it).  ●: planner's choice.  ±: half IQR."
        )
    yield from _left_out(document)


def _random(document: Document) -> Iterable[RenderableType]:
    """Random problems: a table by class for each precision and phase, and the ten worst rows."""
    rows, found = document["rows"], document.get("ceilings") or {}
    yield Text(f"random problems of the seeds {', '.join(map(str, document['random']['seeds']))}")
    columns = ["class", "n", "R", "worst", "S", "worst", "C", "worst", "slower", "predicted"]
    for condition in dict.fromkeys((figures.condition(row), row["phase"]) for row in rows):
        mine = [row for row in rows if (figures.condition(row), row["phase"]) == condition]
        table = FittingTable(" ".join(map(str, condition)), columns, 1, (9, 7, 5, 3, 6, 8, 1))
        for group in random_problems.classes(mine, found):
            if not group.rows:
                continue
            ratios = (random_problems.r, max), (random_problems.s, min), (random_problems.c, min)
            shown = [
                f(value)
                for ratio, pick in ratios
                for f, value in ((_two, group.mean(ratio)), (_two, group.worst(ratio, pick)))
            ]
            near = group.predicted
            table.add_row(
                group.name, str(len(group.rows)), *shown, str(group.slower), "–" if near is None else f"{near:.0%}"
            )
        yield table
    worst = sorted((row for row in rows if row.get("eager_ms")), key=random_problems.behind, reverse=True)[:10]
    columns = ["problem", "", "phase", "strategy", "ms", "GEMM", "eager", "compile", "behind"]
    table = FittingTable("the ten worst", columns, 4, (3, 5, 6, 7, 4))
    for row in worst:
        table.add_row(
            f"{row['batch']} × {row['in_features']} → {row['out_features']}",
            figures.condition(row),
            str(row["phase"]),
            str(row["strategy"]),
            *(figures.milliseconds(row.get(key)) for key in ("ms", "gemm_ms", "eager_ms", "compile_ms")),
            f"{random_problems.behind(row):.2f}",
        )
    yield table
    yield Text(
        "R: ms / bare GEMM.  S: eager / ms.  C: torch.compile / ms.  Geometric means.  slower: by 3% than the faster of"
        " both.  predicted: share within 25%."
    )
    yield from _left_out(document)


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _times(rows: Sequence[Document]) -> FittingTable:
    first = rows[0]
    parts = [name for name in ("bias", "scale") if first.get(name)]
    parts += [first["activation"]] if first.get("activation") else []
    title = f"{first['case']}  {first['batch']} × {first['in_features']} → {first['out_features']}"
    columns = ["precision", "phase", "strategy", "ms", "GEMM", "R", "eager", "S", "compile", "R of it", "bound"]
    columns += ["error", "eager's"]
    tf32, judged = (any(row.get(key) for row in rows) for key in ("eager_tf32_ms", "verdicts"))
    columns += ["eager tf32"] * tf32 + ["than peers"] * judged
    spare = (*((13,) if tf32 else ()), 10, 9, 12, 11, 8, 6, 4, len(columns) - 1, 2)
    table = FittingTable(f"{title}  ({', '.join(parts) or 'no bias, no scale'})", columns, 3, spare)
    previous = None
    for row in rows:
        head = (figures.condition(row), str(row["phase"]))
        cells = [*(head if head != previous else ("", "")), f"{row['strategy']}{' ●' if row.get('chosen') else ''}"]
        bound, ms = figures.number(row.get("bound_ms")), figures.number(row.get("ms"))
        cells += [
            figures.with_spread(row),
            figures.milliseconds(row.get("gemm_ms")),
            figures.ratio(row.get("ms"), row.get("gemm_ms")),
            figures.milliseconds(row.get("eager_ms")),
            figures.ratio(row.get("eager_ms"), row.get("ms")),
            figures.milliseconds(row.get("compile_ms")),
            figures.ratio(row.get("compile_ms"), row.get("gemm_ms")),
            "–" if bound is None or not ms else f"{100 * bound / ms:.0f}%" if bound <= ms else "> 100%",
            figures.error(row.get("error")),
            figures.error(row.get("eager_error")),
        ]
        cells += [figures.milliseconds(row.get("eager_tf32_ms"))] * tf32 + [figures.standing(row)] * judged
        table.add_row(*cells)
        previous = head
    return table


def _further(rows: Sequence[Document]) -> FittingTable | None:
    """Graph replay, host time, sustained time and memory, where any of it was measured."""
    shown = [row for row in rows if figures.has_further(row)]
    columns = [c for c in figures.FURTHER if any(row.get(c[1]) is not None for row in shown)]
    if not shown:
        return None
    titles = ["precision", "phase", "strategy", *(title for title, _, _ in columns)]
    table = FittingTable("", titles, 3, (2, *range(len(titles) - 1, 3, -1)))
    for row in shown:
        table.add_row(
            figures.condition(row),
            str(row["phase"]),
            str(row["strategy"]),
            *(show(row.get(key)) for _, key, show in columns),
        )
    return table


def _left_out(document: Document) -> Iterable[RenderableType]:
    by_reason: dict[str, Counter[str]] = {}
    for item in document.get("not_applicable", []):
        by_reason.setdefault(item["reason"], Counter())[item["strategy"]] += 1
    for reason, strategies in by_reason.items():
        names = ", ".join(f"{name} ({count} cells)" for name, count in strategies.items())
        yield Text(f"not run: {names}: {reason}")
    for note in document.get("notes", []):
        yield Text(f"note: {note}")
    yield from over_time.sections(document)


def _bench_files(document: Document) -> Iterable[RenderableType]:
    yield from _environment(document)
    if document.get("report"):
        yield Text(f"{document['model']}: {document['report']}")
    columns = ["phase", "variant", "ms", "R", "S", "than peers", "samples", "error", "eager's"]
    table = FittingTable(f"{document['model']}{_cast(document)}", columns, 2, (6, 8, 7, 5))
    previous = None
    for row in document.get("rows", []):
        phase = row["phase"]
        if phase != previous and row.get("gemm_ms") is not None:
            table.add_row(phase, "bare GEMMs", figures.milliseconds(row["gemm_ms"]), "1.00", *[""] * 5)
            previous, phase = phase, ""
        table.add_row(
            phase if phase != previous else "",
            str(row["variant"]),
            figures.with_spread(row),
            figures.ratio(row.get("ms"), row.get("gemm_ms")),
            figures.ratio(row.get("eager_ms"), row.get("ms")),
            figures.standing(row),
            str(row.get("samples", "–")),
            figures.error(row.get("error")),
            figures.error(row.get("eager_error")),
        )
        previous = row["phase"]
    if document.get("rows"):
        yield table
        yield Text("R: ms / bare GEMMs.  S: eager / ms.  ±: half the interquartile range.")
    for name, why in (document.get("failed") or {}).items():
        yield Text(f"FAILED {name}: {why}", style="red")
    if document.get("detail"):
        yield Text(str(document["detail"]), style="red")
    for note in document.get("notes", []):
        yield Text(f"note: {note}")
    yield from over_time.sections(document)


def _cast(document: Document) -> str:
    return f" in {document['precision']}" if document.get("precision") else ""


def _verdict(document: Document) -> Iterable[RenderableType]:
    equal = bool(document.get("equal"))
    word = str(document.get("verdict", "")).replace("_", " ")
    style = "bold green" if equal else "bold red"
    yield Text(f"{document['candidate']} against {document['model']}{_cast(document)}: {word}", style=style)
    if document.get("reason"):
        yield Text(str(document["reason"]))


def _verdict_with_warnings(document: Document) -> Iterable[RenderableType]:
    yield from _verdict(document)
    yield from _sentences(document, "warnings")


def _sentences(document: Document, heading: str) -> Iterable[RenderableType]:
    for sentence in document.get(heading) or []:
        yield Text(f"{heading.removesuffix('s')}: {sentence}")


def _verify(document: Document) -> Iterable[RenderableType]:
    yield from _verdict(document)
    summary = document.get("summary") or []
    if summary:
        columns = ["phase", "quantity", "measure", "error", "eager's", "allowed", "of it", ""]
        table = FittingTable("the worst of each", columns, 3, (4, 5, 2, 3))
        for check in summary:
            ratio = figures.number(check.get("ratio"))
            table.add_row(
                str(check["phase"]),
                str(check["quantity"]),
                str(check["measure"]),
                figures.error(check.get("error")),
                figures.error(check.get("eager_error")),
                figures.error(check.get("limit")),
                "–" if ratio is None else f"{ratio:.2f}" if ratio < 1000 else f"{ratio:.1e}",
                "" if check["ok"] else "NOT EQUAL",
            )
        yield table
        total = len(document.get("checks") or [])
        seeds, failures = document.get("seeds"), document.get("failures", 0)
        yield Text(f"{total} comparisons; draws of weights and inputs: {seeds}; failed: {failures}")
    for name, value in (document.get("properties") or {}).items():
        yield Text(f"{name.replace('_', ' ')}: {figures.in_words(value)}")
    for heading in ("warnings", "skipped"):
        yield from _sentences(document, heading)
    if document.get("detail") and not document.get("equal"):
        yield Text(str(document["detail"]).rstrip(), style="dim")


# The kernels of a replacement that is equal, where there was no GPU to run them.
_KERNELS = {
    "compiled": "its kernels were compiled, not run",
    "not compiled": "its kernels were neither compiled nor run",
}
_VERDICTS = {
    "equal": "equal",
    "not equal": "NOT EQUAL",
    "not compiled": "NOT COMPILED: equal on the CPU, but nvcc refuses its kernels",
    "failed": "the replacement could not be written",
    "refused": "cannot be written out",
    "bad model": "the model is bad",
    "no chain": "no chain to replace",
}


def verdict_of(document: Document) -> str:
    """What a document of kind "optimize" comes to, in words."""
    words = _VERDICTS[str(document["status"])]
    return f"{words} on the CPU; {_KERNELS[ran]}" if (ran := document.get("kernels")) in _KERNELS else words


def _optimize(document: Document) -> Iterable[RenderableType]:
    status = str(document["status"])
    found = document.get("export") or {}
    if found.get("matches"):
        yield Text(f"{document['model']}: {found['report']}")
    judged, timed = document.get("verify"), document.get("bench")
    if judged is not None:
        yield from _verify({**judged, "properties": {}} if status == "equal" else judged)
    if timed is not None:
        yield from _bench_files({**timed, "report": ""})
    yield from _verdict_on_file({**document, "verify": None} if judged else document)


def _verdict_on_file(document: Document) -> Iterable[RenderableType]:
    """What became of the file, and what was run to know it."""
    judged = document.get("verify")
    if judged is not None:
        yield Text(str(judged["reason"]))
        yield from _sentences(judged, "warnings")
    for sentence in document.get("said") or []:
        yield Text(str(sentence))
    colour = "red" if document["status"] != "equal" else "yellow" if document.get("kernels") in _KERNELS else "green"
    yield Text(f"{document['output']}: {verdict_of(document)}", style=f"bold {colour}")
    if document.get("detail") and judged is None:
        yield Text(str(document["detail"]))
    if document.get("files"):
        yield Text(f"wrote {', '.join(document['files'])}")
    else:
        yield Text("nothing was written")


_MARKS = {"ok": ("✓", "green"), "missing": ("✗", "red"), "warning": ("!", "yellow"), "note": ("·", "")}


def _doctor(document: Document) -> Iterable[RenderableType]:
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in document.get("checks", []):
        mark, style = _MARKS.get(check["state"], ("?", ""))
        table.add_row(Text(mark, style=style), check["name"], check["found"], Text(check["advice"], style="dim"))
    yield table
    yield Text("will run:", style="bold")
    for line in document.get("runs", []):
        yield Text(f"  {line}")
    commands = document.get("commands", [])
    if commands:
        yield Text("to mend it:", style="bold")
    for command in commands:
        yield Text(f"  {command}")


def _explain(document: Document) -> Iterable[RenderableType]:
    yield Text(str(document["subject"]), style="bold")
    for line in document.get("lines", []):
        yield Text(str(line))
    if document.get("detail"):
        yield Text(str(document["detail"]), style="red")


def _tune(document: Document) -> Iterable[RenderableType]:
    yield from _environment(document)
    for title in dict.fromkeys(row["title"] for row in document["rows"]):
        table = FittingTable(title, ("", "chosen before", "measured best", "µs", "best µs", "gain"), 3, (1, 2))
        for row in document["rows"]:
            if row["title"] == title:
                best = row["best"] if row["line"] else "the same"
                us = (figures.microseconds(row["chosen_us"]), figures.microseconds(row["best_us"]))
                table.add_row(row["phase"], row["chosen"], best, *us, f"{1 - row['best_us'] / row['chosen_us']:.1%}")
        yield table
    for row in document["rows"]:
        where = f"{row['title']}, {row['phase']}"
        for name, why in row["failed"].items():
            yield Text(f"{where}: {name} does not run: {why}", style="yellow")
        for name, far in row["wrong"].items():
            yield Text(f"{where}: {name} is left out, its results differ by {far:.1e}", style="red")
    if document.get("detail"):
        yield Text(str(document["detail"]), style="red" if document["status"] == "failed" else "")
    if document["rows"]:
        yield Text(tuned(document), style="bold")


def tuned(document: Document) -> str:
    """What `tune` has gained, in a sentence."""
    before = sum(row["chosen_us"] for row in document["rows"])
    saved = before - sum(row["best_us"] for row in document["rows"])
    if not any(row["line"] for row in document["rows"]):
        return f"nothing to gain: no candidate is faster than the planner's choice for certain; {before:.1f} µs in all"
    return f"{saved:.1f} of {before:.1f} µs in all are gained ({saved / before:.1%}), by {document['path']}"


RENDERERS: dict[str, Callable[[Document], Iterable[RenderableType]]] = {
    "bench": _bench,
    "bench-files": _bench_files,
    "verify": _verify,
    "optimize": _optimize,
    "doctor": _doctor,
    "explain": _explain,
    "tune": _tune,
}
