"""The HTML report of a replay: one file with charts and tables, without scripts, fonts or external links. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from moonpool.base.units import format_nbytes
from moonpool.sim.outcome import Outcome
from moonpool.sim.report.chart import (
    Bar,
    Mark,
    Series,
    area_chart,
    bar_chart,
    folded,
    legend,
    line_chart,
    series_table,
    table,
)
from moonpool.sim.report.labels import conclusion, format_value, headline, label, system_numbers
from moonpool.sim.report.style import CSS, Hue
from moonpool.sim.world.results import HIT_PLACES

_TIME = "time, s"
_PLACES = ("the GPUs' own pages", "own node's memory", "other nodes' memory", "disks")
LINK_NAMES = {
    "nic_out": "network, sent",
    "nic_in": "network, received",
    "h2d": "memory to GPUs",
    "d2h": "GPUs to memory",
    "ssd_read": "SSD read",
    "ssd_write": "SSD write",
}
_GIGA = 1e9


def _compared(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Return the figures with all systems in one chart."""
    yield _effective(outcomes)
    yield _hits(outcomes)
    first = outcomes[0]
    yield _cdf(outcomes, "ttft_s", "Time to first token", "TTFT, s", first.ttft_target_s)
    yield _cdf(
        outcomes,
        "tbt_s",
        "Time between tokens (mean of a request's longest tenth)",
        "TBT, ms",
        first.tbt_target_s,
        in_ms=True,
    )
    yield _lines("Requests under way", _column(outcomes, "open"), "requests")
    for name, title in (("refused", "Refused so far"), ("preemptions", "Preempted so far")):
        series = _used(_column(outcomes, name))
        if series:
            yield _lines(title, series, "requests")


def _alone(outcome: Outcome, system: int) -> Iterator[str]:
    """Return the figures of one system over time."""
    columns = outcome.over_time
    kinds = [name.removesuffix("_busy_share") for name in columns if name.endswith("_busy_share")]
    states = [f"{kind}_{state}" for kind in kinds for state in ("running", "waiting")]
    yield _areas("Requests by state", _picked(outcome, system, states), "requests")
    busy = _picked(outcome, system, [f"{kind}_busy_share" for kind in kinds], "_busy_share")
    yield _lines("GPUs busy", _times(busy, 100.0), "% of the time", top=100.0)
    batches = [f"{kind}_{size}_batch" for kind in kinds for size in ("mean", "largest")]
    yield _lines("Requests in a worker's batch", _picked(outcome, system, batches, "_batch"), "requests")
    pool = _used(_picked(outcome, system, ["pool_dram_nbytes", "pool_ssd_nbytes"], "pool_", "_nbytes"))
    if pool:
        yield _areas("Pool contents", _times(pool, 1 / _GIGA), "GB")
    links = _links(outcome, system)
    if links:
        yield _lines("Moved over all links of a kind", links, "GB/s")
    copies = _used(_picked(outcome, system, [name for name in columns if name.startswith("replicas_")], "replicas_"))
    if copies:
        yield _lines("Nodes that hold the block of each rank by use", copies, "nodes")


def _figure(title: str, chart: str, names: str = "", under: str = "") -> str:
    return f"<figure><h3>{escape(title)}</h3>{names}{chart}{under}</figure>"


def _effective(outcomes: Sequence[Outcome]) -> str:
    numbers = system_numbers(outcomes)
    bars = [Bar(each.system, [each.numbers["effective_share"]], at) for at, each in zip(numbers, outcomes, strict=True)]
    first = outcomes[0]
    title = f"Requests done within TTFT {first.ttft_target_s:g} s and TBT {first.tbt_target_s * 1e3:g} ms"
    return _figure(title, bar_chart(bars, ["done within both targets"], most=1.0))


def _hits(outcomes: Sequence[Outcome]) -> str:
    bars = [
        Bar(each.system, [each.numbers[f"hit_share_{place}"] for place in HIT_PLACES], at)
        for at, each in zip(system_numbers(outcomes), outcomes, strict=True)
    ]
    rows = [[each.name, *(f"{share:.1%}" for share in each.sizes)] for each in bars]
    names = legend([(place, Hue(None, part)) for part, place in enumerate(_PLACES)])
    under = folded(table(["system", *_PLACES], rows))
    return _figure("Prompt tokens reused, by where they were", bar_chart(bars, _PLACES), names, under)


def _cdf(
    outcomes: Sequence[Outcome], name: str, title: str, x_name: str, target_s: float, *, in_ms: bool = False
) -> str:
    """Draw a CDF over all requests: a system that refuses or loses some does not reach 100 %."""
    series, times = [], 1e3 if in_ms else 1.0
    for at, each in zip(system_numbers(outcomes), outcomes, strict=True):
        values = [value * times for value in each.quantiles[name]]
        share = each.numbers["num_done"] / each.numbers["num_requests"] * 100
        heights = [step / (len(values) - 1) * share for step in range(len(values))]
        series.append(Series(each.system, values, heights, Hue(at)))
    drawn = line_chart(
        series,
        x_name=x_name,
        y_name="% of requests",
        log_x=True,
        marks=[Mark(target_s * times, "target")],
        y_values=[100.0],
    )
    quantiles = (50, 90, 95, 99, 100)
    rows = [
        [each.name, *(f"{each.x[at]:.4g}" if each.x else "-" for at in quantiles)] for each in series
    ]  # 101 quantiles: number 50 is the median
    under = folded(table([f"{x_name}, of those done", *(f"{at} % within" for at in quantiles)], rows))
    return _figure(f"{title}: % of requests", drawn, _legend(series, of_lines=True), under)


def _lines(title: str, series: Sequence[Series], y_name: str, *, top: float = 0.0) -> str:
    chart = line_chart(series, x_name=_TIME, y_name=y_name, y_values=[top])
    under = folded(series_table(series, _TIME))
    return _figure(f"{title} ({y_name})", chart, _legend(series, of_lines=True), under)


def _areas(title: str, series: Sequence[Series], y_name: str) -> str:
    chart = area_chart(series, x_name=_TIME, y_name=y_name)
    return _figure(f"{title} ({y_name})", chart, _legend(series), folded(series_table(series, _TIME)))


def _legend(series: Sequence[Series], *, of_lines: bool = False) -> str:
    return legend([(each.name, each.hue) for each in series], of_lines=of_lines)


def _times(series: Sequence[Series], factor: float) -> list[Series]:
    return [each._replace(y=[value * factor for value in each.y]) for each in series]


def _column(outcomes: Sequence[Outcome], name: str) -> list[Series]:
    return [
        Series(each.system, each.over_time["time_s"], each.over_time[name], Hue(at))
        for at, each in zip(system_numbers(outcomes), outcomes, strict=True)
    ]


def _picked(outcome: Outcome, system: int, names: Sequence[str], *left_out: str) -> list[Series]:
    """Return columns as series; the parts of their names in `left_out` are left out of the labels."""
    columns, found = outcome.over_time, []
    for part, name in enumerate(names):
        label = name
        for piece in left_out:
            label = label.replace(piece, "")
        found.append(Series(label.replace("_", " "), columns["time_s"], columns[name], Hue(system, part)))
    return found


def _used(series: Sequence[Series]) -> list[Series]:
    return [each for each in series if any(each.y)]


def _links(outcome: Outcome, system: int) -> list[Series]:
    """Return the rates of the links in use, of the network only those sent: every byte sent is received."""
    width_s, rates = outcome.links_over_time.bucket_s, outcome.links_over_time.nbytes_per_s
    kinds = [kind for kind in rates if kind in LINK_NAMES and kind != "nic_in"]
    used = [(LINK_NAMES[kind], rates[kind]) for kind in kinds if any(rates[kind])]
    return [
        Series(name, [at * width_s for at in range(len(values))], [each / _GIGA for each in values], Hue(system, part))
        for part, (name, values) in enumerate(used)
    ]


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(outcomes: Sequence[Outcome], made_by: Mapping[str, str]) -> str:
    """Return the report on replays of one trace on one fleet, at least one.

    `made_by` says at the end of the page how to make it again: the command, the version, the seed. The same arguments
    give the same bytes.
    """
    first = outcomes[0]
    title = f"Replay of {first.trace}, load x {first.load:g}"
    numbered = zip(system_numbers(outcomes), outcomes, strict=True)
    parts = [
        f"<p>{escape(title)}</p>",
        f"<h1>{escape(headline(outcomes))}</h1>",
        f'<p class="headline">{escape(conclusion(outcomes))}</p>',
        "<h2>Comparison</h2>",
        _grid(_compared(outcomes)),
        f'<h2>Numbers</h2><div class="card">{_numbers(outcomes)}</div>',
        _assumptions(first, outcomes),
        *(_section(each, at) for at, each in numbered),
        f'<h2>Made by</h2><div class="card">{table((), made_by.items(), kind="facts")}</div>',
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{CSS}</style>\n</head>\n"
        f"<body><main>\n{chr(10).join(parts)}\n</main></body>\n</html>\n"
    )


def _section(outcome: Outcome, system: int) -> str:
    title = legend([(outcome.system, Hue(system))])
    return f"<h2>{title}</h2><p>{escape(outcome.about)}</p>{_grid(_alone(outcome, system))}"


def _grid(figures: Iterable[str]) -> str:
    return f'<div class="grid">{"".join(figures)}</div>'


def _assumptions(first: Outcome, outcomes: Sequence[Outcome]) -> str:
    rows = [(label(name), format_value(name, value)) for name, value in first.machine.items()]
    rows.append(("targets", f"TTFT {first.ttft_target_s:g} s, TBT {first.tbt_target_s * 1e3:g} ms"))
    rows += [(each.system, each.about) for each in outcomes]
    note = "Simulated: the assumptions, and the source of the times."
    return f'<h2>Assumptions</h2><div class="card"><p>{note}</p>{table((), rows, kind="facts")}</div>'


def _numbers(outcomes: Sequence[Outcome]) -> str:
    names = list(outcomes[0].numbers)
    rows = [[label(name), *(format_value(name, each.numbers[name]) for each in outcomes)] for name in names]
    kinds = list(dict.fromkeys(kind for each in outcomes for kind in each.links))
    for kind in kinds:
        rows.append(
            [f"{LINK_NAMES.get(kind, kind)}: moved, mean and peak use", *(_link(each, kind) for each in outcomes)]
        )
    for reason in dict.fromkeys(reason for each in outcomes for reason in each.refusals):
        rows.append([f"refused: {reason}", *(str(each.refusals.get(reason, 0)) for each in outcomes)])
    return table(["", *(each.system for each in outcomes)], rows)


def _link(outcome: Outcome, kind: str) -> str:
    use = outcome.links.get(kind)
    return f"{format_nbytes(int(use.nbytes))}, {use.mean_share:.1%}, {use.peak_share:.1%}" if use is not None else "-"
