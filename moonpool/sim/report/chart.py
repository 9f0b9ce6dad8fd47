"""Lines and stacked areas as SVG text. Pure functions; what they draw can be read off by hovering, and in a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from moonpool.sim.report.scale import AxisScale, linear, logarithmic, short
from moonpool.sim.report.style import color, dashes

_WIDTH, _HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 470, 10, 212
_MAX_BANDS = 60


class Series(NamedTuple):
    """`y` over `x`, both equally long, `x` ascending. `hue` numbers its colour."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    hue: int


class Mark(NamedTuple):
    """A line across the chart at some x, with a word."""

    x: float
    word: str


def line_chart(
    series: Sequence[Series],
    *,
    x_name: str,
    y_name: str,
    log_x: bool = False,
    marks: Sequence[Mark] = (),
    y_values: Sequence[float] = (),
) -> str:
    """`y_values` are numbers that the y axis has to reach besides those drawn."""
    all_x = [value for each in series for value in each.x] + [mark.x for mark in marks]
    x = logarithmic(all_x, _LEFT, _RIGHT) if log_x else linear(all_x, _LEFT, _RIGHT, is_round=False)
    y = linear([*y_values, *(value for each in series for value in each.y)], _BOTTOM, _TOP)
    drawn = "".join(_line(each, x, y) for each in reversed(series))  # the first is drawn on top of the others
    return _frame(x, y, x_name, y_name, drawn + _marks(marks, x) + _bands(series, x, x_name, y_name))


def area_chart(series: Sequence[Series], *, x_name: str, y_name: str) -> str:
    """One on top of the other, the first at the bottom. All have the same x."""
    x = linear([value for each in series for value in each.x], _LEFT, _RIGHT, is_round=False)
    floors = [[0.0] * len(series[0].x)] if series else []
    for each in series:
        floors.append([below + value for below, value in zip(floors[-1], each.y, strict=True)])
    y = linear(floors[-1] if floors else (), _BOTTOM, _TOP)
    drawn = "".join(_area(each, floors[at], floors[at + 1], x, y) for at, each in enumerate(series))
    return _frame(x, y, x_name, y_name, drawn + _bands(series, x, x_name, y_name))


def legend(names: Sequence[tuple[str, int]]) -> str:
    """(name, hue) of what a chart shows."""
    items = "".join(
        f'<li><svg viewBox="0 0 22 10" aria-hidden="true"><path d="M0 5H22" stroke="{color(hue)}" stroke-width="4"'
        f"{dashes(hue)}/></svg>{escape(name)}</li>"
        for name, hue in names
    )
    return f'<ul class="legend">{items}</ul>'


def thinned(length: int, most: int) -> list[int]:
    """At most so many places among 0..length - 1, evenly, the last one included."""
    if length <= most:
        return list(range(length))
    return [round(at * (length - 1) / (most - 1)) for at in range(most)]


def _frame(x: AxisScale, y: AxisScale, x_name: str, y_name: str, inside: str) -> str:
    rows = "".join(
        f'<path class="axis" d="M{_LEFT} {y.at(tick):.1f}H{_RIGHT}"/>'
        f'<text x="{_LEFT - 5}" y="{y.at(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        for tick in y.ticks()
    )
    columns = "".join(
        f'<path class="axis" d="M{x.at(tick):.1f} {_BOTTOM}v4"/>'
        f'<text x="{x.at(tick):.1f}" y="{_BOTTOM + 17}" text-anchor="middle">{short(tick)}</text>'
        for tick in x.ticks()
    )
    label = f'<text x="{(_LEFT + _RIGHT) / 2:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(x_name)}</text>'
    about = escape(f"{y_name} over {x_name}", quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{about}">{rows}{columns}{label}{inside}</svg>'


def _points(xs: Sequence[float], ys: Sequence[float], x: AxisScale, y: AxisScale) -> str:
    return " ".join(f"{x.at(one):.1f},{y.at(other):.1f}" for one, other in zip(xs, ys, strict=True))


def _line(series: Series, x: AxisScale, y: AxisScale) -> str:
    stroke = f'stroke="{color(series.hue)}"{dashes(series.hue)}'
    return f'<polyline class="series" {stroke} points="{_points(series.x, series.y, x, y)}"/>'


def _area(series: Series, low: Sequence[float], high: Sequence[float], x: AxisScale, y: AxisScale) -> str:
    upper = _points(series.x, high, x, y)
    lower = _points(series.x[::-1], low[::-1], x, y)
    return f'<polygon fill="{color(series.hue)}" fill-opacity="0.75" points="{upper} {lower}"/>'


def _marks(marks: Sequence[Mark], x: AxisScale) -> str:
    return "".join(
        f'<path class="target" d="M{x.at(mark.x):.1f} {_TOP}V{_BOTTOM}"/>'
        f'<text x="{x.at(mark.x) - 4:.1f}" y="{_BOTTOM - 6}" text-anchor="end">{escape(mark.word)}</text>'
        for mark in marks
    )


def _bands(series: Sequence[Series], x: AxisScale, x_name: str, y_name: str) -> str:
    """Invisible columns that tell all values at their place when hovered."""
    width = (_RIGHT - _LEFT) / _MAX_BANDS
    found: list[dict[str, tuple[float, float]]] = [{} for _ in range(_MAX_BANDS)]
    for each in series:
        for one, other in zip(each.x, each.y, strict=True):
            found[min(int((x.at(one) - _LEFT) / width), _MAX_BANDS - 1)][each.name] = one, other
    return "".join(
        f'<rect class="band" x="{_LEFT + at * width:.1f}" y="{_TOP}" width="{width:.1f}" height="{_BOTTOM - _TOP}">'
        f"<title>{escape(_told(band, x_name, y_name))}</title></rect>"
        for at, band in enumerate(found)
        if band
    )


def _told(band: dict[str, tuple[float, float]], x_name: str, y_name: str) -> str:
    first = next(iter(band.values()))[0]
    lines = [f"{name}: {short(value)}" for name, (_, value) in band.items()]
    return "\n".join([f"{x_name} {short(first)}; {y_name}", *lines])
