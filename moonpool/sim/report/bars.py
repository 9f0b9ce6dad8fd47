"""Horizontal stacked bars as SVG text, one bar per system. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from moonpool.sim.report.scale import linear, short
from moonpool.sim.report.style import color

_WIDTH, _RIGHT = 480, 412
_BAR, _NAME = 16, 15  # heights


def bar_chart(bars: Mapping[str, Sequence[float]], parts: Sequence[str], *, most: float | None = None) -> str:
    """For each name the sizes of its parts, shares of 1. The axis ends at `most`, or where the longest does."""
    totals = [sum(sizes) for sizes in bars.values()]
    x = linear(totals if most is None else [most], 0, _RIGHT)
    step = _BAR + _NAME + 8
    rows = "".join(
        f'<text x="0" y="{at * step + 11}">{escape(name)}</text>'
        + _parts(sizes, parts, at * step + _NAME, x.high)
        + f'<text x="{x.at(total) + 5:.1f}" y="{at * step + _NAME + 12}">{total:.1%}</text>'
        for at, ((name, sizes), total) in enumerate(zip(bars.items(), totals, strict=True))
    )
    about = escape(", ".join(parts), quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {len(bars) * step}" role="img" aria-label="{about}">{rows}</svg>'


def _parts(sizes: Sequence[float], parts: Sequence[str], top: int, most: float) -> str:
    drawn, begin = "", 0.0
    for hue, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        width = size / most * _RIGHT
        if size > 0:
            drawn += (
                f'<rect x="{begin:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{color(hue)}">'
                f"<title>{escape(part)}: {short(size * 100)} %</title></rect>"
            )
        begin += width
    return drawn
