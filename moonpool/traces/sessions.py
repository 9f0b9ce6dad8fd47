"""Sessions: they begin, go on turn by turn with a growing context, and end. Chat and agents are made of them.

Sessions begin evenly over the time of the trace. All sessions take their next turn together, as columns, so a million
requests take seconds. How many sessions there are follows from how many requests are wanted: what would come after the
trace's end is cut off, as it is in a trace that was recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.traces.arrivals import Arrivals, draw_arrivals
from moonpool.traces.columns import Floats, Ints
from moonpool.traces.prefixes import ROOT, PrefixPlan, in_order
from moonpool.traces.quantiles import Quantiles, constant

_MAX_GO_ON = 0.99


class SessionTurns(msgspec.Struct, frozen=True, kw_only=True):
    """How a session goes on.

    The next input is the last input, the answer, and `added_tokens` (which may be negative: a history cut short). A
    share of `edited` turns keeps only a part of the last input, `kept_share`, and is as long as `edited_growth` says.
    """

    go_on: tuple[tuple[float, ...], ...]  # chance of another turn, by turn (the last row: all later ones) and by input
    input_edges: tuple[float, ...] = ()  # between the columns of go_on
    think_s: Quantiles  # from a request's arrival to the next one's
    added_tokens: Quantiles
    edited: float = 0.0
    kept_share: Quantiles = constant(1.0)
    edited_growth: Quantiles = constant(0.0)  # next input - last input
    max_input: int = 131072

    def __post_init__(self) -> None:
        if not self.go_on or any(len(row) != len(self.input_edges) + 1 for row in self.go_on):
            raise InvalidInput("go_on needs a row per turn, each with one column more than there are input_edges")


class Beginnings(NamedTuple):
    """The first requests of sessions, one row each, in no order."""

    num_input: Ints
    stem: Ints
    stem_tokens: Ints


class _Turn(NamedTuple):
    """One turn of all sessions that are still there."""

    session: Ints
    arrival_s: Floats
    num_input: Ints
    num_output: Ints
    kept_tokens: Ints

    def rows(self, which: Ints) -> _Turn:
        return _Turn(
            self.session[which],
            self.arrival_s[which],
            self.num_input[which],
            self.num_output[which],
            self.kept_tokens[which],
        )


def plan_sessions(
    begin: Beginnings,
    turns: SessionTurns,
    output: Quantiles,
    *,
    num_requests: int,
    rate_per_s: float,
    arrivals: Arrivals,
    rng: np.random.Generator,
) -> PrefixPlan:
    """Exactly `num_requests` rows. `begin` has as many sessions as there could be: num_requests."""
    times = draw_arrivals(arrivals, num_requests, rate_per_s, rng)
    duration_s = num_requests / rate_per_s
    steps = [_first_turn(begin, output, duration_s, rng)]
    while len(steps[-1].session):
        steps.append(_next_turn(steps[-1], len(steps), turns, output, duration_s, rng))
    sessions = np.concatenate([step.session for step in steps])
    per_session = np.bincount(sessions, minlength=len(begin.stem))
    num_sessions = int(np.searchsorted(np.cumsum(per_session), num_requests)) + 1
    excess = int(per_session[:num_sessions].sum()) - num_requests
    rows = _chosen(steps, num_sessions, int(per_session[num_sessions - 1]) - excess)
    return in_order(_joined(steps, rows, begin), times)


def _first_turn(begin: Beginnings, output: Quantiles, duration_s: float, rng: np.random.Generator) -> _Turn:
    count = len(begin.stem)
    num_output = np.maximum(output.draw_tokens(count, rng), 1)
    starts = rng.random(count) * duration_s
    return _Turn(np.arange(count), starts, begin.num_input, num_output, np.zeros(count, np.int64))


def _next_turn(
    last: _Turn, number: int, turns: SessionTurns, output: Quantiles, duration_s: float, rng: np.random.Generator
) -> _Turn:
    count = len(last.session)
    chances = np.minimum(np.array(turns.go_on[min(number, len(turns.go_on)) - 1]), _MAX_GO_ON)
    go_on = rng.random(count) < chances[np.searchsorted(turns.input_edges, last.num_input, side="right")]
    arrival_s = last.arrival_s + turns.think_s.draw(count, rng)
    is_edited = rng.random(count) < turns.edited
    growth = np.where(
        is_edited,
        turns.edited_growth.draw_tokens(count, rng),
        last.num_output + turns.added_tokens.draw_tokens(count, rng),
    )
    num_input = np.maximum(last.num_input + growth, 1)
    kept_share = np.where(is_edited, turns.kept_share.draw(count, rng), 1.0)
    num_output = np.maximum(output.draw_tokens(count, rng), 1)
    kept_tokens = np.rint(last.num_input * kept_share).astype(np.int64)
    there = go_on & (arrival_s < duration_s) & (num_input <= turns.max_input)
    return _Turn(last.session, arrival_s, num_input, num_output, kept_tokens).rows(np.flatnonzero(there))


def _chosen(steps: list[_Turn], num_sessions: int, num_last: int) -> list[Ints]:
    """Which rows of each turn are in the trace: the first sessions, and of the last one of them `num_last` turns."""
    last = num_sessions - 1
    return [
        np.flatnonzero((step.session < last) | ((step.session == last) & (turn < num_last)))
        for turn, step in enumerate(steps)
    ]


def _joined(steps: list[_Turn], rows: list[Ints], begin: Beginnings) -> PrefixPlan:
    parts = [step.rows(chosen) for step, chosen in zip(steps, rows, strict=True)]
    whole = _Turn(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    parent = np.full(len(whole.session), ROOT, np.int64)
    latest = np.full(len(begin.stem), ROOT, np.int64)  # row of each session's last turn so far
    base = 0
    for part in parts:
        here = np.arange(base, base + len(part.session))
        parent[here] = latest[part.session]
        latest[part.session] = here
        base += len(here)
    return PrefixPlan(
        whole.arrival_s,
        whole.num_input,
        whole.num_output,
        parent,
        whole.kept_tokens,
        begin.stem[whole.session],
        begin.stem_tokens[whole.session],
    )
