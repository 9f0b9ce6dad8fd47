"""Charts as SVG text and tables as HTML text: lines, stacked areas, stacked bars. Pure; all text is escaped.

Each value of a chart can be read by hovering over it and in the table below the chart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from moonpool.sim.report.style import Hue, fill, stroke

_LEAST = 1e-300  # below this, the steps of a scale underflow
_STEPS = (1.0, 2.0, 5.0, 10.0)
_LOG_STEPS = (1.0, 2.0, 5.0)
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps numbers low..high to positions begin..end; with `is_log` (low > 0) on a logarithmic scale."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value; values outside the scale are at its edge."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.begin + part * (self.end - self.begin)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.is_log else _ticks(self.low, self.high)


def linear(values: Sequence[float], begin: float, end: float, *, is_round: bool = True) -> AxisScale:
    """Return a scale from 0 to the highest value, or to the next round number."""
    highest = max([value for value in values if math.isfinite(value)], default=0.0)
    if highest < _LEAST:
        return AxisScale(0.0, 1.0, begin, end)
    step = _step(0.0, highest)
    return AxisScale(0.0, math.ceil(highest / step - 1e-9) * step if is_round else highest, begin, end)


def logarithmic(values: Sequence[float], begin: float, end: float) -> AxisScale:
    """Return a scale over all positive values, at least a factor of ten."""
    positive = [value for value in values if 0 < value < math.inf]
    low, high = (min(positive), max(positive)) if positive else (0.1, 1.0)
    decade = 10.0 ** math.floor(math.log10(low * 1.0001))
    low = max(decade * step for step in _LOG_STEPS if decade * step <= low * 1.0002)
    return AxisScale(low, max(high * 1.05, low * 10), begin, end, is_log=True)


def _step(low: float, high: float, about: int = 5) -> float:
    rough = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(unit * step for step in _STEPS if unit * step >= rough * 0.999999)


def _ticks(low: float, high: float) -> list[float]:
    step = _step(low, high)
    count = math.floor((high - low) / step + 1e-9)
    return [low + at * step for at in range(count + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = _LOG_STEPS if len(decades) <= 3 else (1.0,)
    found = [10.0**decade * step for decade in decades for step in steps]
    return [each for each in found if low * 0.9999 <= each <= high * 1.0001]


def short(value: float) -> str:
    """Format a number with three digits, and k, M, G or T for thousands."""
    for size, letter in _PREFIXES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}" if value else "0"


_WIDTH, _HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 470, 10, 212
_MAX_BANDS = 60


class Series(NamedTuple):
    """`y` over `x`, of the same length, `x` ascending."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    hue: Hue


class Mark(NamedTuple):
    """A labelled vertical line at `x`."""

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
    """`y_values` are further numbers that the y axis has to include."""
    all_x = [value for each in series for value in each.x] + [mark.x for mark in marks]
    x = logarithmic(all_x, _LEFT, _RIGHT) if log_x else linear(all_x, _LEFT, _RIGHT, is_round=False)
    y = linear([*y_values, *(value for each in series for value in each.y)], _BOTTOM, _TOP)
    drawn = "".join(_line(each, x, y) for each in reversed(series))  # the first series is on top
    return _frame(x, y, x_name, y_name, drawn + _marks(marks, x) + _bands(series, x, x_name, y_name))


def area_chart(series: Sequence[Series], *, x_name: str, y_name: str) -> str:
    """Stack the series, the first at the bottom. All have the same x."""
    x = linear([value for each in series for value in each.x], _LEFT, _RIGHT, is_round=False)
    floors = [[0.0] * len(series[0].x)] if series else []
    for each in series:
        floors.append([below + value for below, value in zip(floors[-1], each.y, strict=True)])
    y = linear(floors[-1] if floors else (), _BOTTOM, _TOP)
    drawn = "".join(_area(each, floors[at], floors[at + 1], x, y) for at, each in enumerate(series))
    return _frame(x, y, x_name, y_name, drawn + _bands(series, x, x_name, y_name))


def legend(names: Sequence[tuple[str, Hue]], *, of_lines: bool = False) -> str:
    """Return a legend of (name, hue) pairs, with patches of colour or with the lines of a chart."""
    items = "".join(
        f'<li><svg viewBox="0 0 22 10" aria-hidden="true">{_sample(hue, of_lines)}</svg>{escape(name)}</li>'
        for name, hue in names
    )
    return f'<ul class="legend">{items}</ul>'


def _sample(hue: Hue, of_line: bool) -> str:
    if of_line:
        return f'<path d="M0 5H22" {stroke(hue)} stroke-width="4"/>'
    return f'<rect width="22" height="10" rx="2" fill="{fill(hue)}"/>'


def thinned(length: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices of 0..length - 1, including the last."""
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
    return f'<polyline class="series" {stroke(series.hue)} points="{_points(series.x, series.y, x, y)}"/>'


def _area(series: Series, low: Sequence[float], high: Sequence[float], x: AxisScale, y: AxisScale) -> str:
    upper = _points(series.x, high, x, y)
    lower = _points(series.x[::-1], low[::-1], x, y)
    return f'<polygon fill="{fill(series.hue)}" points="{upper} {lower}"/>'


def _marks(marks: Sequence[Mark], x: AxisScale) -> str:
    return "".join(
        f'<path class="target" d="M{x.at(mark.x):.1f} {_TOP}V{_BOTTOM}"/>'
        f'<text x="{x.at(mark.x) - 4:.1f}" y="{_BOTTOM - 6}" text-anchor="end">{escape(mark.word)}</text>'
        for mark in marks
    )


def _bands(series: Sequence[Series], x: AxisScale, x_name: str, y_name: str) -> str:
    """Return invisible columns that show all values at their x when hovered."""
    width = (_RIGHT - _LEFT) / _MAX_BANDS
    found: list[dict[str, tuple[float, float]]] = [{} for _ in range(_MAX_BANDS)]
    for each in series:
        for one, other in zip(each.x, each.y, strict=True):
            found[min(int((x.at(one) - _LEFT) / width), _MAX_BANDS - 1)][each.name] = one, other
    return "".join(
        f'<rect class="band" x="{_LEFT + at * width:.1f}" y="{_TOP}" width="{width:.1f}" height="{_BOTTOM - _TOP}">'
        f"<title>{escape(_band_text(band, x_name, y_name))}</title></rect>"
        for at, band in enumerate(found)
        if band
    )


def _band_text(band: dict[str, tuple[float, float]], x_name: str, y_name: str) -> str:
    first = next(iter(band.values()))[0]
    lines = [f"{name}: {short(value)}" for name, (_, value) in band.items()]
    return "\n".join([f"{x_name} {short(first)}; {y_name}", *lines])


_BARS_WIDTH, _BARS_RIGHT = 480, 412
_BAR, _NAME = 16, 15  # heights


class Bar(NamedTuple):
    """One system's bar, stacked from shares of 1."""

    name: str
    sizes: Sequence[float]
    system: int


def bar_chart(bars: Sequence[Bar], parts: Sequence[str], *, most: float | None = None) -> str:
    """Draw the bars, each in tints of its system's colour. The axis ends at `most`, or at the longest bar."""
    totals = [sum(each.sizes) for each in bars]
    x = linear(totals if most is None else [most], 0, _BARS_RIGHT)
    step = _BAR + _NAME + 8
    rows = "".join(
        f'<text x="0" y="{at * step + 11}">{escape(bar.name)}</text>'
        + _parts(bar, parts, at * step + _NAME, x.high)
        + f'<text x="{x.at(total) + 5:.1f}" y="{at * step + _NAME + 12}">{total:.1%}</text>'
        for at, (bar, total) in enumerate(zip(bars, totals, strict=True))
    )
    about = escape(", ".join(parts), quote=True)
    return f'<svg viewBox="0 0 {_BARS_WIDTH} {len(bars) * step}" role="img" aria-label="{about}">{rows}</svg>'


def _parts(bar: Bar, parts: Sequence[str], top: int, most: float) -> str:
    drawn, begin = "", 0.0
    for at, (size, part) in enumerate(zip(bar.sizes, parts, strict=True)):
        width = size / most * _BARS_RIGHT
        if size > 0:
            paint = fill(Hue(bar.system, at))
            drawn += (
                f'<rect x="{begin:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{paint}">'
                f"<title>{escape(part)}: {short(size * 100)} %</title></rect>"
            )
        begin += width
    return drawn


_MAX_ROWS = 15


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """Return an HTML table; without a head row if `head` is empty."""
    top = f"<thead><tr>{''.join(f'<th>{escape(each)}</th>' for each in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{escape(kind, quote=True)}">{top}<tbody>{body}</tbody></table></div>'


def folded(text: str) -> str:
    return f"<details><summary>as a table</summary>{text}</details>"


def series_table(series: Sequence[Series], x_name: str) -> str:
    """Return tables with at most 15 rows of the series; series with the same x share a table."""
    tables, left = "", list(series)
    while left:
        alike = [each for each in left if each.x == left[0].x]
        left = [each for each in left if each.x != left[0].x]
        xs = alike[0].x
        rows = [[short(xs[at]), *(short(each.y[at]) for each in alike)] for at in thinned(len(xs), _MAX_ROWS)]
        tables += table([x_name, *(each.name for each in alike)], rows)
    return tables
