"""Two small models: how long requests wait for a prefill node, and how slow decoding gets. Pure.

Prefill: one FIFO queue, served by the first free node; exact for this rule and the given arrivals. Decode: a fluid
model of equal nodes. Time is cut into equal parts; in each part the open sequences are spread evenly over the nodes,
and steps take what the cost model says. How long a sequence is open depends on the steps, so this is iterated until it
converges.
"""

from __future__ import annotations

from heapq import heapreplace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moonpool.sim.physics.cost import DecodeCost
from moonpool.traces.columns import Floats, Ints

_PART_S = 3.0
_MAX_PARTS = 1500
_MAX_ROUNDS = 40  # for loads that do not converge
_CONVERGED = 0.003


def fifo_waits(arrival_s: Floats, service_s: Floats, num_servers: int) -> Floats:
    """Return the time from each arrival until a server starts it."""
    free_s = [float("-inf")] * num_servers
    waits = []
    for arrival, service in zip(arrival_s.tolist(), service_s.tolist(), strict=True):
        begin = arrival if arrival > free_s[0] else free_s[0]  # max() takes twice as long
        heapreplace(free_s, begin + service)
        waits.append(begin - arrival)
    return np.array(waits, np.float64)


class Decoding(NamedTuple):
    """Per request: its longest time between tokens, and whether its node was full at some time."""

    tbt_s: Floats
    crowded: NDArray[np.bool_]


class DecodeRoom(NamedTuple):
    """The capacity of one decode node."""

    max_num_seqs: int
    kv_tokens: int


def decode_gaps(
    cost: DecodeCost, room: DecodeRoom, begin_s: Floats, num_input: Ints, num_output: Ints, num_nodes: int
) -> Decoding:
    """Return the decode result of requests that have their first token at `begin_s`. TBT is 0 for one token."""
    left = np.maximum(num_output - 1, 0)
    fluid = _Fluid(cost, begin_s, left, num_input + num_output / 2, num_nodes)
    end_s = fluid.converge()
    first, last = fluid.parts(begin_s), fluid.parts(end_s)
    tbt_s = np.where(left > 0, range_maximum(fluid.step_s, first, last), 0.0)
    seqs, kv_tokens = fluid.load(end_s)
    full = ((seqs > room.max_num_seqs) | (kv_tokens > room.kv_tokens)).astype(np.float64)
    return Decoding(tbt_s, range_maximum(full, first, last) > 0)


class _Fluid:
    def __init__(self, cost: DecodeCost, begin_s: Floats, left: Ints, context: Floats, num_nodes: int) -> None:
        self._cost, self._begin_s, self._left, self._context = cost, begin_s, left, context
        self._num_nodes = num_nodes
        self._begun: _Starts | None = None
        alone_s = cost.decode_step_s(1, round(float(context.mean())))
        spare_s = 4 * alone_s * float(left.max()) + _PART_S
        span_s = float(begin_s.max() - begin_s.min()) + spare_s
        num_parts = min(_MAX_PARTS, int(span_s / _PART_S) + 1)
        self._edges = float(begin_s.min()) + np.linspace(0.0, span_s, num_parts + 1)
        self.step_s = np.full(num_parts, alone_s)

    def converge(self) -> Floats:
        """Return when each request ends. Slower steps mean more open sequences and so slower steps; starting from the
        fastest steps, the iteration is monotone."""
        end_s = self._ends()
        for _ in range(_MAX_ROUNDS):
            before_s, self.step_s = self.step_s, self._steps(*self.load(end_s))
            end_s = self._ends()
            if np.all(np.abs(self.step_s - before_s) <= _CONVERGED * before_s):
                break
        return end_s

    def load(self, end_s: Floats) -> tuple[Floats, Floats]:
        """Return the mean open sequences and KV tokens of one node in each part of the time."""
        if self._begun is None:
            self._begun = _Starts.of(self._begin_s, self._context, self._edges)
        ended = _Starts.of(end_s, self._context, self._edges)
        part_s = np.diff(self._edges) * self._num_nodes
        seqs, kv_tokens = self._begun.seqs_s - ended.seqs_s, self._begun.tokens_s - ended.tokens_s
        return np.diff(seqs) / part_s, np.diff(kv_tokens) / part_s

    def parts(self, time_s: Floats) -> Ints:
        where: Ints = np.searchsorted(self._edges, time_s, side="right") - 1
        return np.clip(where, 0, len(self.step_s) - 1)

    def _steps(self, seqs: Floats, kv_tokens: Floats) -> Floats:
        """Return the step time of each part. Fewer than one sequence on average means one sequence part of the time."""
        whole = np.maximum(seqs, 1.0)
        tokens = kv_tokens * whole / np.maximum(seqs, 1e-9)
        tokens = np.where(seqs > 0, tokens, 0.0)
        step_s: Any = self._cost.decode_step_s
        if not self._cost.per_window_token_s:
            return np.asarray(step_s(whole, tokens))  # without a window the formula works on arrays
        pairs = zip(np.rint(whole).tolist(), np.rint(tokens).tolist(), strict=True)
        return np.array([step_s(int(each), int(kv)) for each, kv in pairs])

    def _ends(self) -> Floats:
        """Return when each sequence has made its tokens, one per step since it began."""
        steps = np.concatenate(([0.0], np.cumsum(np.diff(self._edges) / self.step_s)))
        wanted = np.interp(self._begin_s, self._edges, steps) + self._left
        beyond_s = np.maximum(wanted - steps[-1], 0.0) * self.step_s[-1]
        ends: Floats = np.interp(wanted, steps, self._edges) + beyond_s
        return ends


class _Starts(NamedTuple):
    """Sums over all sequences started, at each of some times: of the time since their start, and of that times their
    tokens."""

    seqs_s: Floats
    tokens_s: Floats

    @classmethod
    def of(cls, start_s: Floats, tokens: Floats, at_s: Floats) -> _Starts:
        order = np.argsort(start_s, kind="stable")
        starts, weights = start_s[order], tokens[order]
        count = np.searchsorted(starts, at_s, side="right")
        return cls(count * at_s - _sums(starts)[count], _sums(weights)[count] * at_s - _sums(weights * starts)[count])


def _sums(values: Floats) -> Floats:
    """Return the prefix sums, beginning with 0."""
    sums: Floats = np.concatenate(([0.0], np.cumsum(values)))
    return sums


def range_maximum(values: Floats, first: Ints, last: Ints) -> Floats:
    """Return the maximum of values[first..last], both included, for many ranges (sparse table)."""
    rows = [values]
    width = 1
    while 2 * width <= len(values):
        previous = rows[-1]
        rows.append(np.maximum(previous[:-width], previous[width:]))
        width *= 2
    lengths = last - first + 1
    levels = np.frexp(lengths.astype(np.float64))[1] - 1
    found = np.empty(len(first), np.float64)
    for level in np.unique(levels).tolist():
        here = levels == level
        row = rows[level]
        found[here] = np.maximum(row[first[here]], row[last[here] - (1 << level) + 1])
    return found
