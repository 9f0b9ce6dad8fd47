"""Turns a checked request body into choices that can run. All checks of the request come before that."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import struct
import time
from typing import TypeVar

from moonpool.base.errors import Unavailable, Unreachable
from moonpool.base.keys import tenant_root
from moonpool.conductor.retries import Retries, RetryPolicy
from moonpool.frontend.choice import Choice, ChoiceEvent, ChoiceRequest, ChoiceRunner, Emit
from moonpool.frontend.metrics import FrontendMetrics
from moonpool.frontend.preparing import Preparer
from moonpool.frontend.prompts import Endpoint, ServedModel, output_room
from moonpool.frontend.replies import PromptTokensDetails, Usage
from moonpool.frontend.schema import SamplingBody
from moonpool.frontend.tenants import Tenant, Tenants
from moonpool.frontend.text import TextAssembler
from moonpool.frontend.tracing import RequestTrace
from moonpool.frontend.workers import ClusterDirectory, ClusterView, Connections

_B = TypeVar("_B", bound=SamplingBody)


class ClientRequest:
    """One client request in progress: its choices, and what they have used so far."""

    def __init__(self, request_id: str, model: str, prompts: list[list[int]], choices: list[Choice]) -> None:
        self.request_id = request_id
        self.model = model
        self.created = int(time.time())
        self._choices = choices
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_output_tokens = 0
        self._cached_tokens = 0
        self._per_prompt = len(choices) // len(prompts)

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_output_tokens,
            total_tokens=self._num_prompt_tokens + self._num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens),
        )

    async def run(self, emit: Emit) -> None:
        """Run all choices at the same time and await `emit` with each event. The first failure, which is raised, and a
        cancellation end all choices."""

        async def count_and_emit(event: ChoiceEvent) -> None:
            self._count(event)
            await emit(event)

        if len(self._choices) == 1:
            await self._choices[0].run(count_and_emit)
            return
        tasks = [asyncio.create_task(choice.run(count_and_emit)) for choice in self._choices]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _count(self, event: ChoiceEvent) -> None:
        self._num_output_tokens += len(event.tokens)
        # Later choices of a prompt reuse what the first one has just computed; that is not a cache hit to report.
        if event.prefill is not None and event.index % self._per_prompt == 0:
            self._cached_tokens += event.prefill.local_tokens + event.prefill.pool_tokens


class RequestHandler:
    """Shared by all endpoints. The caller owns and closes the connections and the preparer."""

    def __init__(
        self,
        model: ServedModel,
        tenants: Tenants,
        connections: Connections,
        preparer: Preparer,
        *,
        policy: RetryPolicy,
        request_timeout_s: float,
        expected_workers: tuple[str, ...] = (),
        expected_nodes: tuple[str, ...] = (),
    ) -> None:
        self.model = model
        self.tenants = tenants
        self.connections = connections
        self._preparer = preparer
        self.cluster = ClusterDirectory(connections)
        self.metrics = FrontendMetrics()
        self.expected_workers = expected_workers
        self.expected_nodes = expected_nodes
        self._policy = policy
        self._request_timeout_s = request_timeout_s

    async def prepare_request(
        self, request_id: str, tenant: Tenant, endpoint: Endpoint[_B], raw: bytes, trace: RequestTrace | None = None
    ) -> tuple[ClientRequest, _B]:
        """Return the request, which is not running yet, and the checked body of `raw`. Raise InvalidInput or one of its
        subclasses for a bad body, Unavailable if no workers have registered in time."""
        prepared = await self._preparer.prepare(endpoint, raw)
        view = await self._view()
        choices = self._choices(request_id, tenant, prepared.body, prepared.prompts, view, trace)
        if trace is not None:
            trace.prepared()
        return ClientRequest(request_id, self.model.name, prepared.prompts, choices), prepared.body

    async def _view(self) -> ClusterView:
        """Return what all workers have in common. Wait for workers if none have registered yet."""
        retries = Retries(self._policy)
        while True:
            try:
                return await self.cluster.view()
            except Unavailable as error:
                is_cut_off = isinstance(error, Unreachable)
                pause_s = retries.refused(time.monotonic(), for_load=False, has_tokens=False, is_cut_off=is_cut_off)
                if pause_s is None or self.connections.closed:
                    raise
            await asyncio.sleep(pause_s)

    def _choices(
        self,
        request_id: str,
        tenant: Tenant,
        body: SamplingBody,
        prompts: list[list[int]],
        view: ClusterView,
        trace: RequestTrace | None,
    ) -> list[Choice]:
        root = tenant_root(tenant.secret, view.identity)
        base_seed = secrets.randbits(63) if body.seed is None else body.seed
        max_len = min(self.model.max_model_len, view.max_tokens)
        choices: list[Choice] = []
        for prompt in prompts:
            room = output_room(len(prompt), body, max_len)
            first: Choice | None = None
            for number in range(body.num_choices):
                index = len(choices)
                request = ChoiceRequest(
                    request_id=f"{request_id}-{index}",
                    prompt=prompt,
                    root=root,
                    block_tokens=view.block_tokens,
                    params=body.sampling(
                        max_tokens=room, seed=derive_seed(base_seed, number), defaults=self.model.sampling
                    ),
                    timeout_s=self._request_timeout_s,
                    tenant=tenant.name,
                    weight=tenant.weight,
                    priority=-(body.priority or 0),  # as in vLLM, a client's lower number is served first
                )
                choices.append(self._choice(index, request, body, first, trace))
                first = first or choices[-1]
        return choices

    def _choice(
        self,
        index: int,
        request: ChoiceRequest,
        body: SamplingBody,
        first: Choice | None,
        trace: RequestTrace | None,
    ) -> Choice:
        noted = None if trace is None else trace.choice(index)
        runner = ChoiceRunner(request, self.connections, self._policy, noted)
        assembler = TextAssembler(self.model.codec.stream(), body.stops, request.params.min_tokens)
        return Choice(index, runner, assembler, self.metrics, after=first)


def derive_seed(seed: int, number: int) -> int:
    """Return the seed of a prompt's `number`-th choice. Choice 0 uses `seed` itself; the others differ from it."""
    if number == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QI", seed % 2**64, number), digest_size=8, person=b"moonpool-choice")
    return int.from_bytes(digest.digest(), "little")
