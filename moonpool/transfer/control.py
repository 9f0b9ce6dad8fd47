"""What a peer may ask an engine beside moving bytes: what it serves, who it is, and leave a message.

One desk per engine; its transports bring the calls (tcp by an ASK frame, shm by its Unix socket) and share its table of
segments. Transports whose bytes pass the owner's processor by (nixl, cuda) ask here for what they need to reach a
segment, and for the fence's leave before and after a write.

Every call is small (64 KiB at most) and answered at once; none makes the owner wait for anybody.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from moonpool.base.clock import Deadline
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import Cancelled, InvalidInput, NotFound, Overloaded
from moonpool.base.rpc.protocol import Call, CallDecoder, as_moonpool_error
from moonpool.transfer.memory.fence import Fence, Spans
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.pending import Pending
from moonpool.transfer.topology import Topology
from moonpool.transfer.transports.base import ServedSegments, check_bounds

R = TypeVar("R")
_SPANS_PER_CALL = 2000  # about 40 KiB; a call has at most 64
MAX_MESSAGE_NBYTES = 32 * 1024
_MAX_MESSAGES = 4096
_MAX_NBYTES = 16 * 1024 * 1024


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, as it introduces itself. `topology` is None where it was not looked at."""

    host: str
    incarnation: int
    topology: Topology | None = None


class Describe(Call[SegmentDescriptor]):
    """How to reach a segment of which only the name is known."""

    name: str


class Introduce(Call[PeerInfo]):
    pass


class Notify(Call[None]):
    """Leaves a message; Overloaded when nobody takes them."""

    name: str
    incarnation: int
    message: bytes


class Admit(Call[None]):
    """The fence's leave to write; see Fence.admit_all(). With no spans it asks only whether the segment is served."""

    name: str
    incarnation: int
    spans: Spans
    generation: int


class Confirm(Call[None]):
    """Whether the spans still belong to the generation, after a write."""

    name: str
    incarnation: int
    spans: Spans
    generation: int


class Attach(Call[bytes]):
    """What the transport `scheme` needs to reach the segment, in its own format."""

    scheme: str
    name: str
    incarnation: int
    hello: bytes = b""


CALLS: tuple[type[Call[Any]], ...] = (Describe, Introduce, Notify, Admit, Confirm, Attach)
_DECODER = CallDecoder(CALLS)


class ControlClient(Protocol):
    """A way to somebody's desk."""

    def ask(self, call: Call[R], timeout_s: float) -> R:
        """The owner's answer or its error; PeerLost or DeadlineExceeded when there is none."""
        ...


class ControlHandler:
    """Thread-safe; answers without waiting."""

    def __init__(self, incarnation: int = 0, topology: Callable[[], Topology | None] = lambda: None) -> None:
        self.segments = ServedSegments()
        self.mailbox = Mailbox()
        self._incarnation = incarnation
        self._topology = topology
        self._descriptors: dict[str, SegmentDescriptor] = {}
        self._attach: dict[str, Callable[[Segment, bytes], bytes]] = {}
        self._lock = threading.Lock()

    def serve(self, segment: Segment) -> None:
        """AlreadyExists when another segment has that name; the same one may come again, by another transport."""
        self.segments.add(segment)

    def publish(self, descriptor: SegmentDescriptor) -> None:
        """From now on Describe answers with it."""
        with self._lock:
            self._descriptors[descriptor.name] = descriptor

    def withdraw(self, name: str) -> None:
        """Idempotent."""
        with self._lock:
            self._descriptors.pop(name, None)
        self.segments.remove(name)

    def on_attach(self, scheme: str, answer: Callable[[Segment, bytes], bytes]) -> None:
        """Calls `answer(segment, hello)` for Attach calls of that transport."""
        self._attach[scheme] = answer

    def close(self) -> None:
        self.segments.clear()
        self.mailbox.close()

    def answer_body(self, body: bytes) -> bytes:
        """A call as it came, answered as it goes; raises MoonpoolErrors, ProtocolError for what is no call."""
        return msgspec.msgpack.encode(self.answer(_DECODER.decode(body)))

    def answer(self, call: Call[Any]) -> object:
        match call:
            case Describe(name):
                return self._describe(name)
            case Introduce():
                return PeerInfo(host=host_id(), incarnation=self._incarnation, topology=self._topology())
            case Notify(name, incarnation, message):
                self.segments.find(name, incarnation)
                self.mailbox.put(Notification(name, message))
                return None
            case Admit(name, incarnation, spans, generation):
                fence = self._fence(name, incarnation, spans)
                if fence is not None:
                    fence.admit_all(spans, generation)
                return None
            case Confirm(name, incarnation, spans, generation):
                fence = self._fence(name, incarnation, spans)
                if fence is not None:
                    fence.confirm_all(spans, generation)
                return None
            case Attach(scheme, name, incarnation, hello):
                return self._attached(scheme, self.segments.find(name, incarnation), hello)
        raise InvalidInput(f"{type(call).__name__} is not answered here")

    def _describe(self, name: str) -> SegmentDescriptor:
        with self._lock:
            descriptor = self._descriptors.get(name)
        if descriptor is None:
            raise NotFound(f"no segment {name!r} is served here")
        return descriptor

    def _fence(self, name: str, incarnation: int, spans: Spans) -> Fence | None:
        segment = self.segments.find(name, incarnation)
        for offset, nbytes in spans:
            check_bounds(offset, nbytes, segment.nbytes)
        return segment.fence

    def _attached(self, scheme: str, segment: Segment, hello: bytes) -> bytes:
        answer = self._attach.get(scheme)
        if answer is None:
            raise NotFound(f"segment {segment.name!r} is not served by {scheme} here")
        try:
            return answer(segment, hello)
        except Exception as error:
            raise as_moonpool_error(error) from error


def ask_fence(
    line: ControlClient,
    call: type[Admit | Confirm],
    name: str,
    incarnation: int,
    spans: Spans,
    generation: int,
    deadline: Deadline,
) -> None:
    """The fence's word on all spans, in as many calls as they need. With no spans it is still asked once, and so makes
    sure that the owner serves this incarnation.
    """
    for start in range(0, max(1, len(spans)), _SPANS_PER_CALL):
        some = spans[start : start + _SPANS_PER_CALL]
        line.ask(call(name, incarnation, some, generation), deadline.remaining_s())


class LocalControlClient:
    """To a desk of this process."""

    def __init__(self, desk: ControlHandler) -> None:
        self._desk = desk

    def ask(self, call: Call[R], timeout_s: float) -> R:
        answer: Any = self._desk.answer(call)
        return answer  # type: ignore[no-any-return]


class Notification(NamedTuple):
    """What a peer says about a segment of ours: "these pages are written", in words the two have agreed on."""

    segment: str
    message: bytes


class Mailbox:
    """First come, first taken. Thread-safe."""

    def __init__(self, max_messages: int = _MAX_MESSAGES, max_nbytes: int = _MAX_NBYTES) -> None:
        self._max_messages = max_messages
        self._max_nbytes = max_nbytes
        self._changed = threading.Condition()
        self._messages: deque[Notification] = deque()
        self._waiting: set[Pending[None]] = set()
        self._nbytes = 0
        self._closed = False

    def put(self, notification: Notification) -> None:
        """Overloaded when there is no room: the sender learns that nobody takes its messages."""
        size = len(notification.message)
        check_message(notification.message)
        with self._changed:
            if len(self._messages) >= self._max_messages or self._nbytes + size > self._max_nbytes:
                raise Overloaded(f"{len(self._messages)} messages wait for the owner of {notification.segment!r}")
            self._messages.append(notification)
            self._nbytes += size
            self._changed.notify()
        self._tell()

    def arrival(self) -> Pending[None]:
        """Over when there is something to take, or the box is closed. It takes nothing: who gives up loses nothing."""
        pending: Pending[None] = Pending(lambda: self._give_up(pending))
        with self._changed:
            is_here = bool(self._messages) or self._closed
            if not is_here:
                self._waiting.add(pending)
        if is_here:
            pending.resolve(None)
        return pending

    def take(self, timeout_s: float = 0.0) -> list[Notification]:
        """All that is there, in order of arrival; waits for the first one at most so long, empty if none came."""
        deadline = Deadline(timeout_s)
        with self._changed:
            while not self._messages and not self._closed:
                if not self._changed.wait(deadline.remaining_s()):
                    break
            taken, self._nbytes = list(self._messages), 0
            self._messages.clear()
            return taken

    def close(self) -> None:
        """Idempotent. Whoever waits gets what there is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        """Without the lock: what they do next is not known here."""
        with self._changed:
            waiting, self._waiting = self._waiting, set()
        for pending in waiting:
            pending.resolve(None)

    def _give_up(self, pending: Pending[None]) -> None:
        with self._changed:
            self._waiting.discard(pending)
        pending.fail(Cancelled("no longer waited for"))


def check_message(message: bytes) -> None:
    if len(message) > MAX_MESSAGE_NBYTES:
        raise InvalidInput(f"a message has at most {MAX_MESSAGE_NBYTES} bytes, not {len(message)}")
