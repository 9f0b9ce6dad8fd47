"""Tables as HTML text. Pure; whatever is put in is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from moonpool.sim.report.chart import Series, thinned
from moonpool.sim.report.scale import short

_MAX_ROWS = 15


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """Without a head row where `head` is empty."""
    top = f"<thead><tr>{''.join(f'<th>{escape(each)}</th>' for each in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{escape(kind, quote=True)}">{top}<tbody>{body}</tbody></table></div>'


def folded(text: str, summary: str = "as a table") -> str:
    return f"<details><summary>{escape(summary)}</summary>{text}</details>"


def series_table(series: Sequence[Series], x_name: str) -> str:
    """A few of the rows; series with other x than the first have a table of their own."""
    tables, left = "", list(series)
    while left:
        alike = [each for each in left if each.x == left[0].x]
        left = [each for each in left if each.x != left[0].x]
        xs = alike[0].x
        rows = [[short(xs[at]), *(short(each.y[at]) for each in alike)] for at in thinned(len(xs), _MAX_ROWS)]
        tables += table([x_name, *(each.name for each in alike)], rows)
    return tables
