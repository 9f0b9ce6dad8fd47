"""One request on its way through the simulated cluster, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moonpool.sim.world.clock import SimTimers
from moonpool.traces.columns import Trace, TraceRequest

REFUSED: Final = 1
DONE: Final = 2
LOST: Final = 3


class Job:
    """`number` is its row in the trace. Times are None until they are known."""

    __slots__ = (
        "alone_s",
        "arrival_s",
        "asks_before_decode",
        "attempt",
        "compute_s",
        "decode",
        "dram_tokens",
        "end_s",
        "first_entry",
        "first_gap_s",
        "first_token_s",
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
        self.keys = keys  # of the prompt's full blocks
        self.runs: list[tuple[int, int, int]] = []  # of these blocks (runs.py)
        self.num_runs_passed = 0  # computed or reused already
        self.max_pool_blocks: int | None = None
        self.asks_before_decode = False
        self.is_wasted = False  # its prompt was computed, and then it was refused
        self.num_flows = 0  # of its KV, on their way to the decode worker
        self.prefill = ""  # until the decode worker has all of its KV
        self.decode = ""
        self.attempt = 0  # grows when a worker is lost: what belongs to an earlier one counts no more
        self.num_retries = 0
        self.prefill_start_s = self.first_token_s = self.end_s = 0.0
        self.first_entry, self.first_gap_s = 0, 0.0  # in its decode worker's log of steps
        self.compute_s = 0.0  # of prefill workers
        self.alone_s = 0.0  # the same of the attempt under way
        self.local_tokens = self.dram_tokens = self.remote_tokens = self.ssd_tokens = 0  # reused, by where they were
        self.ttft_s: float | None = None
        self.tbt_s: float | None = None  # the mean of the longest tenth of the gaps between its tokens
        self.predicted_ttft_s: float | None = None
        self.outcome = 0
        self.reason = ""

    @property
    def reused_tokens(self) -> int:
        return self.local_tokens + self.dram_tokens + self.remote_tokens + self.ssd_tokens

    @property
    def mean_gap_s(self) -> float | None:
        """Between its tokens; None where there is none, or it has not ended."""
        if self.tbt_s is None or self.num_output < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.num_output - 1)


def follow(clock: SimTimers, trace: Trace, arrived: Callable[[int, TraceRequest], None]) -> None:
    """`arrived` hears of each request and its row when the clock has come to it."""
    requests = enumerate(iter(trace))

    def wait_for_next() -> None:
        entry = next(requests, None)
        if entry is not None:
            clock.at(entry[1].arrival_s, lambda: now(*entry))

    def now(number: int, request: TraceRequest) -> None:
        arrived(number, request)
        wait_for_next()

    wait_for_next()
