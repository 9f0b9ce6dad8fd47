"""Takes orders: turns a checked body into running choices. Everything that can be refused is refused before that."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import struct
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from moonpool.base.errors import Unavailable
from moonpool.base.keys import tenant_root
from moonpool.conductor.retries import Retries, RetryPolicy
from moonpool.frontend.choice import Choice, ChoiceEvent, run_together
from moonpool.frontend.generation import ChoiceRequest, ChoiceRunner
from moonpool.frontend.metrics import FrontendMetrics
from moonpool.frontend.preparing import Preparer
from moonpool.frontend.prompts import Endpoint, ServedModel, output_room
from moonpool.frontend.replies import PromptTokensDetails, Usage
from moonpool.frontend.schema import SamplingBody
from moonpool.frontend.tenants import Tenant, Tenants
from moonpool.frontend.text import TextAssembler
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

    async def events(self) -> AsyncGenerator[ChoiceEvent, None]:
        async with aclosing(run_together(self._choices)) as events:
            async for event in events:
                self._count(event)
                yield event

    def _count(self, event: ChoiceEvent) -> None:
        self._num_output_tokens += len(event.tokens)
        # Later choices of a prompt reuse what the first one computed just now; that is no hit worth telling.
        if event.prefill is not None and event.index % self._per_prompt == 0:
            self._cached_tokens += event.prefill.local_tokens + event.prefill.pool_tokens


class RequestHandler:
    """Shared by all endpoints. What it is given belongs to the caller, who also closes it."""

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
    ) -> None:
        self.model = model
        self.tenants = tenants
        self.connections = connections
        self._preparer = preparer
        self.cluster = ClusterDirectory(connections)
        self.metrics = FrontendMetrics()
        self.expected_workers = expected_workers
        self._policy = policy
        self._request_timeout_s = request_timeout_s

    async def take(
        self, request_id: str, tenant: Tenant, endpoint: Endpoint[_B], raw: bytes
    ) -> tuple[ClientRequest, _B]:
        """Return the order and the checked body of `raw`. Raise InvalidInput and its kin, and Unavailable if no
        workers have come by then. Starts nothing yet."""
        prepared = await self._preparer.prepare(endpoint, raw)
        view = await self._view()
        choices = self._choices(request_id, tenant, prepared.body, prepared.prompts, view)
        return ClientRequest(request_id, self.model.name, prepared.prompts, choices), prepared.body

    async def _view(self) -> ClusterView:
        """Return what all workers have in common. A front end that has just started waits for them, as requests do."""
        retries = Retries(self._policy)
        while True:
            try:
                return await self.cluster.view()
            except Unavailable:
                pause_s = retries.refused(time.monotonic(), for_load=False, has_tokens=False)
                if pause_s is None or self.connections.closed:
                    raise
            await asyncio.sleep(pause_s)

    def _choices(
        self, request_id: str, tenant: Tenant, body: SamplingBody, prompts: list[list[int]], view: ClusterView
    ) -> list[Choice]:
        root = tenant_root(tenant.secret, view.identity)
        base_seed = secrets.randbits(63) if body.seed is None else body.seed
        max_len = min(self.model.max_model_len, view.max_tokens)
        choices: list[Choice] = []
        for prompt in prompts:
            room = output_room(len(prompt), body, max_len, self.model.sampling)
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
                    priority=-(body.priority or 0),  # vLLM's are the other way round
                )
                choices.append(self._choice(index, request, body, first))
                first = first or choices[-1]
        return choices

    def _choice(self, index: int, request: ChoiceRequest, body: SamplingBody, first: Choice | None) -> Choice:
        generation = ChoiceRunner(request, self.connections, self._policy)
        assembler = TextAssembler(self.model.codec.stream(), body.stops, request.params.min_tokens)
        return Choice(index, generation, assembler, self.metrics, after=first)


def derive_seed(seed: int, number: int) -> int:
    """The seed of a prompt's `number`-th choice: the first uses the seed itself, the others differ from it."""
    if number == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QI", seed % 2**64, number), digest_size=8, person=b"moonpool-choice")
    return int.from_bytes(digest.digest(), "little")
