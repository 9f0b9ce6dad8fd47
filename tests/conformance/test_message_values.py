"""Any value in any field of any message: the answer is one of our errors or a reply, never "a bug", and the connection
goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from message_values import MessageValues
from msgspec import inspect

from moonpool.base.cluster import CONDUCTOR_SERVICE
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import Internal, InvalidInput, MoonpoolError, ProtocolError
from moonpool.base.frames import FrameDecoder, FrameKind, encode_frame
from moonpool.base.rpc import Call, Hello, RpcPeer, RpcServer
from moonpool.base.rpc.protocol import decode_error, encode_call, encode_value
from moonpool.conductor import messages as c
from moonpool.conductor.service import Conductor, ConductorConfig
from moonpool.master.service import Master, MasterConfig
from moonpool.store import messages as m


class Wire:
    """An asyncio transport that keeps what is written."""

    def __init__(self, peer: RpcPeer) -> None:
        self.peer = peer
        self.frames = FrameDecoder()
        self.is_closed = False
        self.written: list[Any] = []

    def write(self, data: bytes) -> None:
        self.written += self.frames.feed(data)

    def get_extra_info(self, _: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def is_reading(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.peer.connection_lost(None)

    abort = close


class Connection:
    """One peer of a server, without a socket; each call is answered before the next, or left waiting."""

    def __init__(self, server: RpcServer, service: str) -> None:
        self._peer, self._ids = RpcPeer(server), 0
        self.wire = Wire(self._peer)
        self._peer.connection_made(self.wire)  # type: ignore[arg-type]
        self._peer.data_received(encode_value(FrameKind.HELLO, 0, Hello(service)))

    async def send(self, body: bytes) -> MoonpoolError | None:
        """The error that the call was answered with, if it was answered at once and with one."""
        self._ids += 1
        self.wire.written.clear()
        self._peer.data_received(encode_frame(FrameKind.CALL, self._ids, body))
        while self._peer._turn is not None:  # noqa: ASYNC110 - a turn of the loop, as many as it needs
            await asyncio.sleep(0)
        assert not self.wire.is_closed, "the connection goes on"
        errors = [decode_error(frame.body) for frame in self.wire.written if frame.kind is FrameKind.ERROR]
        return errors[0] if errors else None

    async def call(self, call: Call[Any]) -> MoonpoolError | None:
        return await self.send(encode_call(call, 1)[len(encode_frame(FrameKind.CALL, 1)) :])

    def close(self) -> None:
        self.wire.close()


@contextlib.asynccontextmanager
async def master_at(path: Path) -> AsyncIterator[Master]:
    rules = MasterConfig(data_dir=str(path / "data"), listen=f"unix:{path}/m.sock", tick_s=3600.0, max_objects=4096)
    master = Master(rules)
    await master.start()
    try:
        yield master
    finally:
        await master.close()


def server_of(role: Master | Conductor) -> RpcServer:
    assert role._server is not None
    return role._server


async def filled(server: RpcServer) -> Connection:
    """With a segment and three objects, so that calls find something."""
    connection = Connection(server, m.SERVICE)
    segment = SegmentDescriptor(
        name="a.dram", nbytes=1 << 20, incarnation=1, host="h", endpoints=(), granule_nbytes=4096
    )
    assert await connection.call(m.MountSegment("n0", segment)) is None
    assert await connection.call(m.Heartbeat("a.dram", 1)) is None
    assert await connection.call(m.PutStart([b"k0", b"k1", b"k2"], [5000] * 3, m.PutOptions())) is None
    return connection


async def fuzz(connection: Connection, calls: list[type[Call[Any]]], seed: int, count: int) -> list[str]:
    values, bugs = MessageValues(seed), []
    for _ in range(count):
        call = values.rng.choice(calls)
        body = values.body(call)
        error = await connection.send(body)
        if isinstance(error, Internal):
            bugs.append(f"{call.__name__}: {error} for {msgspec.msgpack.decode(body, strict=False)!r:.500}")
    return bugs


@pytest.mark.parametrize("seed", range(3))
async def test_the_master_answers_any_values(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with master_at(tmp_path) as master:
        connection = await filled(server_of(master))
        assert await fuzz(connection, list(server_of(master).handlers), seed, 1000) == []
        master.state.check_integrity()
        assert await connection.call(m.Exist([b"k0"])) is None
        connection.close()


@pytest.mark.parametrize("seed", range(3))
async def test_the_conductor_answers_any_values(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    conductor = Conductor(ConductorConfig(address=f"unix:{tmp_path}/c.sock"))
    await conductor.start()
    connection = Connection(server_of(conductor), CONDUCTOR_SERVICE)
    assert await fuzz(connection, list(server_of(conductor).handlers), seed, 1000) == []
    assert await connection.call(c.Status()) is None
    connection.close()
    await conductor.close()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            m.PutStart([b"k"], [1], m.PutOptions(num_replicas=2**40)),
            "options.num_replicas must be an integer from 1 to",
        ),
        (m.PutStart([b"k"], [2**64 - 1], m.PutOptions()), r"sizes\[0\] must be an integer from 0 to"),
        (m.PutStart([b"k"], [1], m.PutOptions(soft_pin_s=math.nan)), "soft_pin_s must be a number from 0 to 1e.09"),
        (m.ListObjects(limit=2**40), "limit must be an integer from 1 to 2147483647"),
        (m.ListObjects(cursor=-1), "cursor must be"),
        (m.Subscribe(since=2**64 - 1), "since must be"),
    ],
)
async def test_a_refusal_names_field_and_range(call: Call[Any], message: str, tmp_path: Path) -> None:
    async with master_at(tmp_path) as master:
        connection = await filled(server_of(master))
        error = await connection.call(call)
        assert isinstance(error, InvalidInput)
        assert error.param is not None
        with pytest.raises(InvalidInput, match=message):
            raise error
        assert isinstance(await connection.send(msgspec.msgpack.encode(["Exist", 5])), ProtocolError)
        assert await connection.call(m.Exist([b"k0"])) is None
        connection.close()


def test_what_cannot_be_sent_names_the_field() -> None:
    with pytest.raises(InvalidInput, match="trace_block_tokens of ExportTrace") as raised:
        encode_call(c.ExportTrace(trace_block_tokens=2**70), 1)
    assert raised.value.param == "trace_block_tokens"
    with pytest.raises(InvalidInput, match="options of PutStart"):
        encode_call(m.PutStart([b"k"], [1], m.PutOptions(num_replicas=2**70)), 1)


def numbers_without_range(kind: inspect.Type, at: str) -> list[str]:
    """The places in a message where any 64-bit integer or any float is taken."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            return [at] if kind.ge is None or kind.le is None else []
        case inspect.StructType():
            return [each for field in kind.fields for each in numbers_without_range(field.type, f"{at}.{field.name}")]
        case inspect.UnionType():
            return [each for one in kind.types for each in numbers_without_range(one, at)]
        case inspect.TupleType():
            return [each for one in kind.item_types for each in numbers_without_range(one, at)]
        case inspect.ListType() | inspect.VarTupleType():
            return numbers_without_range(kind.item_type, at)
        case inspect.DictType():
            return numbers_without_range(kind.key_type, at) + numbers_without_range(kind.value_type, at)
    return []


async def test_every_number_that_is_sent_has_a_range(tmp_path: Path) -> None:
    conductor = Conductor(ConductorConfig(address=f"unix:{tmp_path}/c.sock"))
    async with master_at(tmp_path) as master:
        calls = [*server_of(master).handlers, *server_of(conductor).handlers]
        without = [each for call in calls for each in numbers_without_range(inspect.type_info(call), call.__name__)]
        # An SSD's descriptor spans 2**63 addresses, one more than msgspec's ranges can say; mount() checks it. Stamps
        # and their limit have all 64 bits. A metric may have any value, and is only passed on.
        exempt = ("descriptor.nbytes", "Heartbeat.generation_limit", "FenceAhead.spans", ".samples.value")
        assert [each for each in without if not each.endswith(exempt)] == []


class Inner(msgspec.Struct):
    number: Annotated[int, msgspec.Meta(ge=1, le=5)]


class Outer(Call[None]):
    maybe: Inner | None
    pairs: list[tuple[str, Annotated[int, msgspec.Meta(ge=0, le=9)]]]
    table: dict[str, Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ([{"number": 9}, [], {}], "maybe.number"),
        ([None, [["a", 1], ["b", 10]], {}], "pairs[1][1]"),
        ([None, [], {"x": math.inf}], "table[...]"),
    ],
)
async def test_the_way_to_a_field_is_told(values: list[Any], field: str) -> None:
    server = RpcServer("testing", {Outer: lambda call, peer: None})
    connection = Connection(server, "testing")
    error = await connection.send(msgspec.msgpack.encode(["Outer", *values]))
    assert isinstance(error, InvalidInput)
    assert error.param == field
    connection.close()
