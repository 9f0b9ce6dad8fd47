"""The whole report: one HTML file without a script, a font or a link to anywhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from moonpool.base.units import format_nbytes
from moonpool.sim.outcome import Outcome
from moonpool.sim.report.conclusion import conclusion
from moonpool.sim.report.figures import LINK_NAMES, alone, compared
from moonpool.sim.report.labels import label, shown
from moonpool.sim.report.style import CSS
from moonpool.sim.report.table import table

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(outcomes: Sequence[Outcome], command: str) -> str:
    """Return the report on replays of one trace on one fleet, at least one, made by `command`.

    Same arguments, same bytes.
    """
    first = outcomes[0]
    title = f"Replay of {first.trace}, load x {first.load:g}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="headline">{escape(conclusion(outcomes))}</p>',
        f"<p>Made by:</p><pre>{escape(command)}</pre>",
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
    rows = [(label(name), shown(name, value)) for name, value in first.machine.items()]
    rows.append(("targets", f"TTFT {first.ttft_target_s:g} s, TBT {first.tbt_target_s * 1e3:g} ms"))
    rows += [(each.system, each.about) for each in outcomes]
    said = "Simulated: what is taken for granted, and where times come from."
    return f'<h2>Assumptions</h2><div class="card"><p>{said}</p>{table((), rows, kind="facts")}</div>'


def _numbers(outcomes: Sequence[Outcome]) -> str:
    names = list(outcomes[0].numbers)
    rows = [[label(name), *(shown(name, each.numbers[name]) for each in outcomes)] for name in names]
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
