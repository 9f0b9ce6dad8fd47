"""One choice's life across workers: route, then attempts, each going on from the last accepted token.

Whatever happens, the caller sees each token once and in order, and an end: a finish reason or an error. Sampling is a
function of (seed, position), so a replanned request continues with the very tokens it would have had. Closing the
events gives back everything that workers hold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded, FatalRequest, MoonpoolError, Overloaded, Unavailable
from moonpool.base.keys import chain_keys
from moonpool.conductor.messages import BeforeDecode, Decision, PrefillEnded, RequestEnded, Route
from moonpool.conductor.retries import Retries, RetryPolicy
from moonpool.engine.sequence import SamplingParams
from moonpool.frontend.attempt import LOST, Attempt, TokenBatch
from moonpool.frontend.workers import Connections
from moonpool.worker.messages import PrefillReply, RequestSpec

_LOG = logging.getLogger(__name__)
_ASK_S = 5.0


@dataclass(frozen=True)
class ChoiceRequest:
    """What to generate, in the words of workers."""

    request_id: str
    prompt: list[int]
    root: bytes
    block_tokens: int
    params: SamplingParams
    timeout_s: float
    tenant: str = ""
    priority: int = 0  # the highest first


class ChoiceRunner:
    """Runs one ChoiceRequest. The deadline starts now."""

    def __init__(self, request: ChoiceRequest, connections: Connections, policy: RetryPolicy) -> None:
        self._request = request
        self._connections = connections
        self._retries = Retries(policy)
        self._deadline = Deadline(request.timeout_s)
        self._output: list[int] = []
        self._first: PrefillReply | None = None
        self._outcome = "cancelled"  # unless something else happens first
        self.ttft_s: float | None = None
        self._last_s = 0.0  # when the newest token came, from the start

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._request.prompt)

    @property
    def num_attempts(self) -> int:
        return self._retries.num_attempts

    def stop(self) -> None:
        """The caller has all it wants and closes the events next; without this, closing means it went away."""
        self._outcome = "done"

    async def events(self) -> AsyncGenerator[TokenBatch, None]:
        """Raises Overloaded, Unavailable, DeadlineExceeded, FatalRequest, or what a worker refused for good."""
        try:
            while True:
                attempt = await self._plan()
                try:
                    async with aclosing(attempt.batches()) as batches:
                        async for batch in batches:
                            await self._accept(batch, attempt.decision)
                            if attempt.survived:
                                self._retries.survived()
                            yield batch
                    self.stop()
                    return
                except LOST as error:
                    await self._recover(attempt, error)
        except MoonpoolError as error:
            self._outcome = error.code
            raise
        finally:
            self._report_end()

    async def _plan(self) -> Attempt:
        self._retries.begin()
        request = self._request
        tokens = [*request.prompt, *self._output]
        keys = await asyncio.to_thread(chain_keys, request.root, tokens, request.block_tokens)
        decision = await self._route(keys, len(tokens))
        spec = RequestSpec(
            request_id=request.request_id,
            epoch=self.num_attempts,
            tokens=tokens,
            num_prompt_tokens=len(request.prompt),
            root=request.root,
            params=request.params,
            timeout_s=self._deadline.remaining_s(),
            alone=self._retries.alone,
        )
        return Attempt(self._connections, decision, spec, self._deadline)

    async def _route(self, keys: list[bytes], num_tokens: int) -> Decision:
        """Waits for its turn, and for workers or a conductor to come back. A request that has tokens already is not
        refused for load; it waits too."""
        while True:
            try:
                return await self._ask(keys, num_tokens)
            except (Overloaded, Unavailable) as error:
                pause_s = self._retries.refused(
                    self._elapsed_s, for_load=isinstance(error, Overloaded), has_tokens=bool(self._output)
                )
                if pause_s is None or self._connections.closed:
                    raise
            await self._pause(pause_s)

    async def _ask(self, keys: list[bytes], num_tokens: int) -> Decision:
        conductor = await self._connections.conductor()
        route = Route(
            request_id=self._request.request_id,
            keys=keys,
            num_tokens=num_tokens,
            max_tokens=self._request.params.max_tokens - len(self._output),
            exclude=tuple(sorted(self._retries.failed)),
            tenant=self._request.tenant,
            priority=self._request.priority,
        )
        # It may have to wait for its turn; a conductor that stands still is noticed by its silence.
        return await conductor.call(route, timeout_s=self._deadline.remaining_s())

    async def _accept(self, batch: TokenBatch, decision: Decision) -> None:
        """Overloaded when its answer must not be written; then the batch does not count."""
        if batch.prefill is not None:
            may_be_refused = decision.asks_before_decode and not self._output and batch.finish_reason is None
            await self._tell_prefill_ended(may_be_refused)
        self._output += [out.token for out in batch.tokens]
        self._last_s = self._elapsed_s
        if self._first is None and batch.prefill is not None:
            self._first = batch.prefill
            self.ttft_s = self._elapsed_s

    async def _tell_prefill_ended(self, may_be_refused: bool) -> None:
        request_id = self._request.request_id
        if not may_be_refused:
            self._connections.tell_conductor(PrefillEnded(request_id=request_id))
            return
        try:
            conductor = await self._connections.conductor()
            await conductor.call(BeforeDecode(request_id=request_id), timeout_s=_ASK_S)
        except Unavailable as error:  # a conductor that is away refuses nobody
            _LOG.debug("%s: the conductor was not asked before decoding: %s", request_id, error)

    async def _recover(self, attempt: Attempt, error: MoonpoolError) -> None:
        """Returns when another attempt makes sense, raises what the client is told otherwise."""
        pause_s = self._retries.lost(attempt.failed, attempt.loss)
        if self._connections.closed:
            raise Unavailable("the front end is stopping") from error
        self._check_deadline()
        if self._retries.is_fatal:
            raise FatalRequest(
                "workers died while they computed this request, the last one with nothing else in its batch; "
                "it is not tried again"
            ) from error
        if pause_s is None:
            raise Unavailable(f"gave up after {self.num_attempts} attempts: {error}") from error
        _LOG.warning(
            "%s: attempt %d failed after %d tokens (%s: %s)",
            self._request.request_id,
            self.num_attempts,
            len(self._output),
            error.code,
            error,
        )
        self._connections.tell_conductor(self._ended(error.code))
        await self._pause(pause_s)

    async def _pause(self, pause_s: float) -> None:
        await asyncio.sleep(min(pause_s, self._deadline.remaining_s()))
        self._check_deadline()

    @property
    def _elapsed_s(self) -> float:
        return self._request.timeout_s - self._deadline.remaining_s()

    def _check_deadline(self) -> None:
        if self._deadline.expired():
            raise DeadlineExceeded(f"the request was not finished within {self._request.timeout_s:g} s")

    def _report_end(self) -> None:
        self._connections.tell_conductor(self._ended(self._outcome))

    def _ended(self, outcome: str) -> RequestEnded:
        first = self._first
        return RequestEnded(
            request_id=self._request.request_id,
            ttft_s=self.ttft_s,
            cached_tokens=0 if first is None else first.local_tokens + first.pool_tokens,
            pool_tokens=0 if first is None else first.pool_tokens,
            output_tokens=len(self._output),
            outcome=outcome,
            tbt_s=self._tbt_s(),
        )

    def _tbt_s(self) -> float | None:
        """Mean time between its tokens; None with less than two of them."""
        gaps = len(self._output) - 1
        return None if self.ttft_s is None or gaps < 1 else (self._last_s - self.ttft_s) / gaps
