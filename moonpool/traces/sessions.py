"""Sessions: turn by turn with a growing context, and the trace of chained block ids that they make.

Sessions begin evenly over the time of the trace. All sessions take their next turn together, as columns, so a million
requests take seconds. The number of sessions follows from the number of requests wanted: turns after the trace's end
are cut off, as in a recorded trace.

A stem is what several sessions begin with: a system prompt, a document, an agent's tools. All stems begin with the same
`common_tokens`. The first request of a session begins with its stem, each later one with a part of the request that it
continues. Only whole blocks are shared. Ids are numbered by first appearance.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import MOONCAKE_BLOCK_TOKENS, Floats, Ints, Trace, blocks_of, offsets_of
from moonpool.traces.distributions import Arrivals, Quantiles, constant, draw_arrivals

ROOT = -1  # the parent of a conversation's first request


class PrefixPlan(NamedTuple):
    """One row per request, sorted by arrival; a parent comes before its children."""

    arrival_s: Floats
    num_input: Ints
    num_output: Ints
    parent: Ints  # a row, or ROOT
    kept_tokens: Ints  # tokens of the parent's input that this input begins with
    stem: Ints
    stem_tokens: Ints  # of this row's stem, including the common ones


def in_order(plan: PrefixPlan, arrival_s: Floats | None = None) -> PrefixPlan:
    """Sort the plan by its arrivals, then use `arrival_s`, if given. No child may arrive before its parent."""
    order = np.argsort(plan.arrival_s, kind="stable")
    rows = np.empty(len(order), np.int64)
    rows[order] = np.arange(len(order))
    parent = plan.parent[order]
    return PrefixPlan(
        arrival_s=plan.arrival_s[order] if arrival_s is None else arrival_s,
        num_input=plan.num_input[order],
        num_output=plan.num_output[order],
        parent=np.where(parent == ROOT, ROOT, rows[parent]),
        kept_tokens=plan.kept_tokens[order],
        stem=plan.stem[order],
        stem_tokens=plan.stem_tokens[order],
    )


def to_trace(
    plan: PrefixPlan, *, name: str, common_tokens: int = 0, block_tokens: int = MOONCAKE_BLOCK_TOKENS
) -> Trace:
    """Return the trace in which these requests share blocks as planned."""
    parent, shared = _with_stems(plan, common_tokens)
    kept = np.minimum(shared, np.minimum(plan.num_input, np.where(parent == ROOT, 0, plan.num_input[parent])))
    kept //= block_tokens
    counts = blocks_of(plan.num_input, block_tokens)
    offsets = offsets_of(counts)
    ids = _fresh_ids(counts, offsets, kept)
    for row in np.flatnonzero(kept).tolist():
        begin, from_, num = offsets[row], offsets[parent[row]], kept[row]
        ids[begin : begin + num] = ids[from_ : from_ + num]
    return Trace(
        name=name,
        block_tokens=block_tokens,
        arrival_s=plan.arrival_s,
        num_input=plan.num_input,
        num_output=plan.num_output,
        block_ids=ids,
        block_offsets=offsets,
    )


def _with_stems(plan: PrefixPlan, common_tokens: int) -> tuple[Ints, Ints]:
    """Return parents and shared tokens. Roots continue the first root of their stem, which continues request 0."""
    rows = np.arange(len(plan.parent))
    roots = np.flatnonzero(plan.parent == ROOT)
    _, first_at, which = np.unique(plan.stem[roots], return_index=True, return_inverse=True)
    parent, shared = plan.parent.copy(), plan.kept_tokens.copy()
    parent[roots], shared[roots] = roots[first_at][which], plan.stem_tokens[roots]
    founders = parent == rows
    parent[founders], shared[founders] = 0, common_tokens
    if len(parent):
        parent[0] = ROOT
    return parent, shared


def _fresh_ids(counts: Ints, offsets: Ints, kept: Ints) -> Ints:
    """Number all blocks except the kept ones, whose ids the caller fills in."""
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    is_new = within >= np.repeat(kept, counts)
    ids: Ints = np.cumsum(is_new) - 1
    return ids


_MAX_GO_ON = 0.99


class SessionTurns(msgspec.Struct, frozen=True, kw_only=True):
    """How a session continues.

    The next input is the last input, the answer and `added_tokens` (negative if the history is cut). A share `edited`
    of the turns keeps only the part `kept_share` of the last input, and grows by `edited_growth`.
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


class SessionStarts(NamedTuple):
    """The first requests of sessions, one row each, in any order."""

    num_input: Ints
    stem: Ints
    stem_tokens: Ints


class _Turn(NamedTuple):
    """One turn of all sessions that have not ended."""

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
    begin: SessionStarts,
    turns: SessionTurns,
    output: Quantiles,
    *,
    num_requests: int,
    rate_per_s: float,
    arrivals: Arrivals,
    rng: np.random.Generator,
) -> PrefixPlan:
    """Return a plan of exactly `num_requests` rows. `begin` has `num_requests` sessions, the most that are needed."""
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


def _first_turn(begin: SessionStarts, output: Quantiles, duration_s: float, rng: np.random.Generator) -> _Turn:
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
    """Return which rows of each turn are in the trace: the first sessions, of the last one `num_last` turns."""
    last = num_sessions - 1
    return [
        np.flatnonzero((step.session < last) | ((step.session == last) & (turn < num_last)))
        for turn, step in enumerate(steps)
    ]


def _joined(steps: list[_Turn], rows: list[Ints], begin: SessionStarts) -> PrefixPlan:
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
