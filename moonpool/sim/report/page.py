"""The whole report: one HTML file without a script, a font or a link to anywhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from moonpool.sim.outcome import Outcome
from moonpool.sim.report.figures import alone, compared
from moonpool.sim.report.scale import short
from moonpool.sim.report.style import CSS
from moonpool.sim.report.table import table

_LONG = 1e9  # numbers from here on are told with three figures
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(outcomes: Sequence[Outcome]) -> str:
    """Of replays of one trace on one fleet, at least one. Same outcomes, same bytes."""
    first = outcomes[0]
    title = f"Replay of {first.trace}, load x {first.load:g}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _assumptions(first, outcomes),
        "<h2>Beside each other</h2>",
        _grid(compared(outcomes)),
        f'<h2>Numbers</h2><div class="card">{_numbers(outcomes)}</div>',
        *(f"<h2>{escape(each.system)}</h2><p>{escape(each.about)}</p>{_grid(alone(each))}" for each in outcomes),
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{CSS}</style>\n</head>\n"
        f"<body><main>\n{chr(10).join(parts)}\n</main></body>\n</html>\n"
    )


def _grid(figures: Iterable[str]) -> str:
    return f'<div class="grid">{"".join(figures)}</div>'


def _assumptions(first: Outcome, outcomes: Sequence[Outcome]) -> str:
    rows = [(_worded(name), _value(value)) for name, value in first.machine.items()]
    rows.append(("targets", f"TTFT {first.ttft_target_s:g} s, TBT {first.tbt_target_s:g} s"))
    rows += [(each.system, each.about) for each in outcomes]
    said = "Simulated: what is taken for granted, and where times come from."
    return f'<h2>Assumptions</h2><div class="card"><p>{said}</p>{table((), rows, kind="facts")}</div>'


def _value(value: str | int | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) and value < _LONG else short(value)


def _worded(name: str) -> str:
    return name.replace("nbytes", "bytes").replace("_", " ")


def _numbers(outcomes: Sequence[Outcome]) -> str:
    names = list(outcomes[0].numbers)
    rows = [[_worded(name), *(_value(each.numbers[name]) for each in outcomes)] for name in names]
    kinds = list(dict.fromkeys(kind for each in outcomes for kind in each.links))
    for kind in kinds:
        rows.append([f"{kind}: bytes, mean and peak use", *(_link(each, kind) for each in outcomes)])
    for reason in dict.fromkeys(reason for each in outcomes for reason in each.refusals):
        rows.append([f"refused: {reason}", *(str(each.refusals.get(reason, 0)) for each in outcomes)])
    return table(["", *(each.system for each in outcomes)], rows)


def _link(outcome: Outcome, kind: str) -> str:
    use = outcome.links.get(kind)
    return f"{short(use.nbytes)}, {use.mean_share:.1%}, {use.peak_share:.1%}" if use is not None else "-"
