"""Tables for a terminal that keep their figures whole."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table


class FittingTable:
    """A table that leaves whole columns out, rather than letters of figures, where there is no room for all.

    Args:
        left: so many columns are words, at the left.
        spare: columns, by number, that may go: the first of them goes first.
    """

    def __init__(self, title: str, columns: Sequence[str], left: int, spare: Sequence[int]) -> None:
        self._title, self._columns, self._left, self._spare = title, columns, left, spare
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """One cell for each column."""
        self._rows.append(cells)

    def _without(self, gone: Sequence[int]) -> Table:
        table = Table(title=self._title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        kept = [i for i in range(len(self._columns)) if i not in gone]
        for i in kept:
            table.add_column(self._columns[i], justify="left" if i < self._left else "right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(row[i] for i in kept))
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=10_000)
        for count in range(len(self._spare) + 1):
            table = self._without(self._spare[:count])
            if Measurement.get(console, unlimited, table).maximum <= options.max_width:
                break
        yield table
