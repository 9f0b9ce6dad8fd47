"""A peer that does not let a worker in: the log says so once, and the client's API key is not blamed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import MoonpoolError, PeerLost, Unauthorized, Unavailable
from moonpool.engine.kv_memory import KvLayout
from moonpool.transfer.engine import TransferEngine
from moonpool.worker.kv_link.decode_peers import DecodePeers
from moonpool.worker.kv_link.pieces import HostPieces
from moonpool.worker.kv_link.pool import PoolHealth, PoolWriter
from moonpool.worker.kv_link.push import Push
from moonpool.worker.kv_link.send_queue import SendQueue, Urgency
from moonpool.worker.messages import Ticket, TokenOut

LAYOUT = KvLayout(num_pages=1, num_layers=1, num_kv_heads=1, block_tokens=4, head_dim=4, dtype="float32")


def test_each_refusal_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    health = PoolHealth()
    for error in (Unauthorized("a: set secret_file"), Unauthorized("b: set secret_file"), PeerLost("c"), None) * 3:
        health.record_error(error)
    advice = "its blocks are misses and none is put there until this setting is corrected"
    assert [record.getMessage() for record in caplog.records] == [
        f"a: set secret_file; {advice}",
        f"b: set secret_file; {advice}",
    ]


def test_a_pool_that_refuses_is_logged_and_does_not_rest(caplog: pytest.LogCaptureFixture) -> None:
    health = PoolHealth()
    for _ in range(3):
        health.record_error(Unauthorized("no access to segment 'n.dram': set secret_file"))
    assert not health.is_resting, "other nodes of the pool may let it in"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


class AtOnce:
    def put(self, urgency: Urgency, task: Callable[[], None], lane: str = "") -> None:
        task()

    def put_answered(self, call: Future[None], task: Callable[[], None], lane: str = "") -> None:
        call.add_done_callback(lambda _: task())


class Peers(DecodePeers):
    """Takes every call."""

    def __init__(self) -> None:
        super().__init__("p", asyncio.new_event_loop())
        self._events.close()

    def open(self, address: str, call: object) -> Future[Any]:
        answered: Future[Any] = Future()
        answered.set_result(self)
        return answered

    def send(self, client: object, call: object) -> None: ...


class Guarded:
    def open(self, descriptor: SegmentDescriptor) -> None:
        raise Unauthorized("the caller's secret is not the owner's; see secret_file")


def test_a_refused_hand_off_is_no_fault_of_the_client(caplog: pytest.LogCaptureFixture) -> None:
    peers, outcomes = Peers(), list[MoonpoolError | None]()
    for epoch in range(2):
        segment = SegmentDescriptor(name="d/kv", nbytes=LAYOUT.total_nbytes, incarnation=1, host="h", endpoints=())
        ticket = Ticket(
            request_id="r",
            epoch=epoch,
            address="tcp:10.0.0.2:7900",
            segment=segment,
            pages=[0],
            num_present_blocks=0,
            generation=1,
        )
        push = Push(
            ticket,
            [],
            queue=cast(SendQueue, AtOnce()),
            memory=HostPieces(memoryview(bytearray(LAYOUT.total_nbytes)), LAYOUT),
            pool=cast(PoolWriter, None),
            peers=peers,
            transfer=cast(TransferEngine, Guarded()),
        )
        push.begin([0], 0, 0)
        push.commit(TokenOut(1), 3, outcomes.append)
    for outcome in outcomes:
        assert type(outcome) is Unavailable, "another decode worker may do; 401 would blame the client"
        assert "tcp:10.0.0.2:7900" in str(outcome)
        assert "secret_file" in str(outcome)
    assert len(outcomes) == 2
    assert len(caplog.records) == 1
