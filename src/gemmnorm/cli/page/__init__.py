"""A result file as one HTML page: no network, no script, made from the JSON alone.

- `build.py`     kinds of documents → the sections of the page, the verdict first
- `timings.py`   sections about times and errors
- `over_time.py` sections about older results
- `checks.py`    sections about the comparisons of `verify`
- `plans.py`     sections about plans, their candidates and the parts of their predicted time
- `charts.py`    charts, of positioned HTML elements: text keeps its size on a phone and its colour follows the theme
- `html.py`      elements, with everything escaped
- `style.css`    wide, phone, dark, print

The charts are not drawn by a plotting library on purpose: its pictures neither reflow on a phone nor follow a theme.
"""

from .build import MARK, page

__all__ = ["MARK", "page"]
