"""The control answers the same by whatever line it is asked."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Internal,
    InvalidInput,
    NotFound,
    Overloaded,
    PeerLost,
    ProtocolError,
    StaleGeneration,
)
from moonpool.transfer.control import (
    Admit,
    Attach,
    Confirm,
    ControlClient,
    ControlHandler,
    Describe,
    Introduce,
    ListSegments,
    LocalControlClient,
    Mailbox,
    Notification,
    Notify,
)
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.topology import read_topology
from moonpool.transfer.transports.shm.transport import ShmTransport, UnixControlClient
from moonpool.transfer.transports.tcp.transport import TcpTransport

T = 5.0


class Office:
    """A control with one fenced segment, and a line to it."""

    def __init__(self, way: str, run_dir: Path) -> None:
        self.control = ControlHandler(incarnation=7, topology=read_topology)
        self.segment = Segment.over("seg", bytearray(1000), granule_nbytes=100, incarnation=3)
        self.control.serve(self.segment)
        self.close: Callable[[], None] = lambda: None
        self.line: ControlClient = LocalControlClient(self.control)
        if way == "tcp":
            owner, peer = TcpTransport("127.0.0.1", control=self.control), TcpTransport(None)
            self.line = peer.line(owner.serve(self.segment))

            def close_both() -> None:
                owner.close()
                peer.close()

            self.close = close_both
        if way == "unix":
            shm = ShmTransport(str(run_dir), control=self.control)
            self.line = UnixControlClient(shm.serve(self.segment).removeprefix("shm:"))
            self.close = shm.close


@pytest.fixture(params=["local", "tcp", "unix"])
def office(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Office]:
    made = Office(request.param, tmp_path)
    yield made
    made.close()


def test_it_introduces_its_engine(office: Office) -> None:
    info = office.line.ask(Introduce(), T)
    assert (info.host, info.incarnation) == (host_id(), 7)
    assert info.topology == read_topology()


def test_it_describes_what_was_published(office: Office) -> None:
    with pytest.raises(NotFound, match="seg"):
        office.line.ask(Describe("seg"), T)
    descriptor = SegmentDescriptor(name="seg", nbytes=1000, incarnation=3, host="h", endpoints=("tcp:a:1",))
    office.control.publish(descriptor)
    assert office.line.ask(Describe("seg"), T) == descriptor
    office.control.withdraw("seg")
    with pytest.raises(NotFound):
        office.line.ask(Describe("seg"), T)


def test_the_fence_is_asked_at_a_distance(office: Office) -> None:
    fence = office.segment.fence
    assert fence is not None
    office.line.ask(Admit("seg", 3, [(0, 100), (250, 100)], 5), T)
    assert [fence.generation_at(at) for at in (0, 100, 200, 300, 400)] == [5, 0, 5, 5, 0]
    office.line.ask(Confirm("seg", 3, [(0, 100), (250, 100)], 5), T)
    fence.stamp(300, 1, 6)
    with pytest.raises(StaleGeneration):
        office.line.ask(Confirm("seg", 3, [(0, 100), (250, 100)], 5), T)
    with pytest.raises(StaleGeneration):
        office.line.ask(Admit("seg", 3, [(100, 100), (250, 100)], 5), T)
    assert fence.generation_at(100) == 0, "all or none"
    with pytest.raises(InvalidInput):
        office.line.ask(Admit("seg", 3, [(950, 51)], 9), T)
    with pytest.raises(InvalidInput):
        office.line.ask(Confirm("seg", 3, [(-1, 5)], 9), T)
    with pytest.raises(NotFound, match="incarnation"):
        office.line.ask(Admit("seg", 2, [], 0), T)


def test_transports_answer_for_themselves(office: Office) -> None:
    with pytest.raises(NotFound, match="nixl"):
        office.line.ask(Attach("nixl", "seg", 3), T)
    office.control.on_attach("nixl", lambda segment, hello: segment.name.encode() + hello)
    assert office.line.ask(Attach("nixl", "seg", 3, b"!"), T) == b"seg!"
    with pytest.raises(NotFound):
        office.line.ask(Attach("nixl", "gone", 3, b"!"), T)
    office.control.on_attach("nixl", lambda segment, hello: bytes(hello[99]))
    with pytest.raises(Internal, match="IndexError"):
        office.line.ask(Attach("nixl", "seg", 3, b"!"), T)
    assert office.line.ask(Introduce(), T).incarnation == 7, "the control outlives a transport's bug"


def test_messages_are_kept_until_taken(office: Office) -> None:
    office.line.ask(Notify("seg", 3, b"one"), T)
    office.line.ask(Notify("seg", 3, b"two"), T)
    assert office.control.mailbox.take_all(T) == [Notification("seg", b"one"), Notification("seg", b"two")]
    assert office.control.mailbox.take_all() == []
    with pytest.raises(NotFound):
        office.line.ask(Notify("seg", 4, b"late"), T)


def test_one_name_one_segment() -> None:
    control, segment = ControlHandler(), Segment.over("seg", bytearray(1), incarnation=1)
    control.serve(segment)
    control.serve(segment)
    with pytest.raises(AlreadyExists):
        control.serve(Segment.over("seg", bytearray(1), incarnation=1))


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgspec.msgpack.encode(["Shutdown"]), msgspec.msgpack.encode(["Describe", 5])]
)
def test_what_is_no_call_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        ControlHandler().answer_body(body)


def test_nobody_there(tmp_path: Path) -> None:
    peer = TcpTransport(None)
    with pytest.raises(PeerLost):
        peer.line("tcp:127.0.0.1:9").ask(Introduce(), T)
    with pytest.raises(PeerLost):
        UnixControlClient(str(tmp_path / "no.sock")).ask(Introduce(), T)
    peer.close()


def test_an_owner_that_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = TcpTransport(None)
        with pytest.raises(DeadlineExceeded):
            peer.line(f"tcp:127.0.0.1:{silent.getsockname()[1]}").ask(Introduce(), 0.1)
        peer.close()


def test_a_mailbox_is_bounded() -> None:
    box = Mailbox(max_messages=2, max_nbytes=10)
    box.put(Notification("s", b"12345"))
    with pytest.raises(Overloaded):
        box.put(Notification("s", b"123456"))
    box.put(Notification("s", b"12345"))
    with pytest.raises(Overloaded):
        box.put(Notification("s", b""))
    assert len(box.take_all()) == 2
    box.put(Notification("s", b"1234567890"))


def test_segments_are_listed_in_pages() -> None:
    handler, names = ControlHandler(), [f"x-{number:04}" for number in range(1200)]
    for name in ("a", "z", *reversed(names)):
        handler.publish(
            SegmentDescriptor(name=name, nbytes=1, incarnation=1, host="h", endpoints=("tcp:h:1",), secondary=())
        )
    found: list[str] = []
    while page := handler.answer(ListSegments("x-", found[-1] if found else "")):
        assert isinstance(page, list)
        found += [each.name for each in page]
    assert found == names
    handler.withdraw("x-0001")
    left = cast(list[SegmentDescriptor], handler.answer(ListSegments("x-")))
    assert [each.name for each in left[:2]] == ["x-0000", "x-0002"]
