"""A job: one request of the trace in the simulated cluster, with its state and its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moonpool.sim.world.clock import SimClock
from moonpool.traces.columns import Trace, TraceRequest

REFUSED: Final = 1
DONE: Final = 2
LOST: Final = 3


class Job:
    """`number` is the row of the request in the trace. Times are None until they are known."""

    __slots__ = (
        "alone_s",
        "arrival_s",
        "asked_tokens",
        "asks_before_decode",
        "attempt",
        "compute_s",
        "decode",
        "dram_tokens",
        "end_s",
        "expected_tokens",
        "first_entry",
        "first_gap_s",
        "first_token_s",
        "handoff_s",
        "is_wasted",
        "keys",
        "local_tokens",
        "max_pool_blocks",
        "num_flows",
        "num_input",
        "num_output",
        "num_retries",
        "num_runs_passed",
        "number",
        "outcome",
        "predicted_ttft_s",
        "prefill",
        "prefill_start_s",
        "reason",
        "remote_tokens",
        "request_id",
        "runs",
        "ssd_tokens",
        "tbt_s",
        "ttft_s",
    )

    def __init__(self, number: int, arrival_s: float, num_input: int, num_output: int, keys: list[bytes]) -> None:
        self.number, self.arrival_s, self.num_input, self.num_output = number, arrival_s, num_input, num_output
        self.request_id = str(number)
        self.keys = keys  # chain keys of the full blocks of the prompt
        self.runs: list[tuple[int, int, int]] = []  # the runs of these blocks, see BlockRuns
        self.num_runs_passed = 0  # runs whose blocks are computed or reused already
        self.max_pool_blocks: int | None = None
        self.asked_tokens = 0  # of the answer at most, as the client has asked
        self.expected_tokens = 0  # of the prompt, which the conductor expects to be reused
        self.asks_before_decode = False
        self.is_wasted = False  # it was refused after its prompt had been computed
        self.num_flows = 0  # flows of its KV to the decode worker, not ended yet
        self.prefill = ""  # its prefill worker, until the decode worker has all of its KV
        self.decode = ""
        self.attempt = 0  # grows when a worker is lost; callbacks of earlier attempts are ignored
        self.num_retries = 0
        self.prefill_start_s = self.first_token_s = self.end_s = 0.0
        self.handoff_s = 0.0  # that the conductor learns from; 0: none was measured
        self.first_entry, self.first_gap_s = (
            0,
            0.0,
        )  # in the step log of its decode worker
        self.compute_s = 0.0  # time on prefill workers, all attempts together
        self.alone_s = 0.0  # the same, of the current attempt
        self.local_tokens = self.dram_tokens = self.remote_tokens = self.ssd_tokens = 0  # reused, by where it was
        self.ttft_s: float | None = None
        self.tbt_s: float | None = None  # mean of the longest tenth of the gaps between its tokens
        self.predicted_ttft_s: float | None = None
        self.outcome = 0
        self.reason = ""

    @property
    def reused_tokens(self) -> int:
        return self.local_tokens + self.dram_tokens + self.remote_tokens + self.ssd_tokens

    @property
    def mean_gap_s(self) -> float | None:
        """Return the mean time between its tokens; None if it has fewer than two tokens or has not ended."""
        if self.tbt_s is None or self.num_output < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.num_output - 1)


def schedule_arrivals(clock: SimClock, trace: Trace, on_arrival: Callable[[int, TraceRequest], None]) -> None:
    """Call `on_arrival` with the row number and the request at each arrival time of the trace.

    Only the next arrival is in the event queue: a short queue is faster than a long one.
    """
    requests = enumerate(iter(trace))

    def schedule_next() -> None:
        entry = next(requests, None)
        if entry is not None:
            clock.call_at(entry[1].arrival_s, lambda: arrive(*entry))

    def arrive(number: int, request: TraceRequest) -> None:
        on_arrival(number, request)
        schedule_next()

    schedule_next()
