"""Figures of result files as words; one may be missing (null), or a string such as "inf"."""

from __future__ import annotations

from typing import Any

from ..bench import Document


def number(value: Any) -> float | None:
    """A figure of the file; strings such as "inf" are figures too."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def in_words(value: Any) -> str:
    """What `verify` found of a property: yes, no, names, a figure, or several of these."""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {in_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(str(item) or "the model itself" for item in value) or "none"
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "not known"}[value]
    return f"{value:.2g}" if isinstance(value, float) else str(value) or "none"


def milliseconds(value: Any) -> str:
    """Three or four significant digits; a dash where nothing was measured."""
    ms = number(value)
    if ms is None:
        return "–"
    return f"{ms:.1f}" if ms >= 100 else f"{ms:.2f}" if ms >= 10 else f"{ms:.3f}" if ms >= 0.1 else f"{ms:.4f}"


def with_spread(row: Document) -> str:
    """A row's median, and half the distance between its quartiles."""
    spread = number(row.get("ms_iqr"))
    return milliseconds(row.get("ms")) + ("" if spread is None else f" ±{milliseconds(spread / 2)}")


def quotient(top: Any, bottom: Any) -> float | None:
    """top / bottom, or None where either is missing or nothing can be divided."""
    a, b = number(top), number(bottom)
    return None if a is None or not b else a / b


def ratio(top: Any, bottom: Any) -> str:
    """top / bottom with two decimals."""
    value = quotient(top, bottom)
    return "–" if value is None else f"{value:.2f}"


def error(value: Any) -> str:
    """A relative error."""
    found = number(value)
    return "–" if found is None else f"{found:.1e}"


def microseconds(value: Any) -> str:
    """One decimal."""
    found = number(value)
    return "–" if found is None else f"{found:.1f}"


def megabytes(value: Any) -> str:
    """Bytes as MB."""
    found = number(value)
    return "–" if found is None else f"{found / 1e6:.3g}" if found < 1e9 else f"{found / 1e6:.0f}"


def span(value: Any) -> str:
    """Of a variant's kernels the milliseconds from the first start to the last end, and how many there are."""
    return "–" if not value else f"{milliseconds(value['span_ms'])} ({value['count']})"


FURTHER = (  # title, key, how it is shown
    ("graph µs", "graph_us", microseconds),
    ("eager", "eager_graph_us", microseconds),
    ("compile", "compile_graph_us", microseconds),
    ("host µs", "host_us", microseconds),
    ("eager", "eager_host_us", microseconds),
    ("sustained ms", "sustained_ms", milliseconds),
    ("GEMM", "gemm_sustained_ms", milliseconds),
    ("eager", "eager_sustained_ms", milliseconds),
    ("kept MB", "peak_activation_bytes", megabytes),
    ("eager", "eager_activation_bytes", megabytes),
    ("span ms (kernels)", "kernels", span),
    ("GEMM", "gemm_kernels", span),
    ("eager", "eager_kernels", span),
)
_OWN = ("graph_us", "host_us", "sustained_ms", "peak_activation_bytes", "kernels")


def has_further(row: Document) -> bool:
    """Whether any of the further figures was measured of this very row."""
    return any(row.get(key) is not None for key in _OWN)


_STANDINGS = ("slower", "undecidable", "same", "faster")


def standing(row: Document) -> str:
    """The least of the verdicts against the peers: "faster" is faster than all of them."""
    found = [v["verdict"] for v in (row.get("verdicts") or {}).values()]
    return min(found, key=_STANDINGS.index, default="–")


def condition(row: Document) -> str:
    """The row's precision, or amp."""
    return "amp" if row.get("autocast") else str(row.get("precision"))
