"""The control calls of an engine: everything that peers ask for beside moving bytes.

There is one ControlHandler per engine. Its transports bring the calls (tcp by an ASK frame, shm by its Unix socket) and
share its table of segments. Transports that bypass the owner's processor (nixl, cuda) ask here for what they need to
reach a segment, and ask the fence before and after a write.

Every call is small (64 KiB at most) and answered at once: a handler waits for nothing.

Peers may also leave messages, which stay in the Mailbox until the owner takes them. A full mailbox refuses messages, it
never drops any.
"""

from __future__ import annotations

import heapq
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
_SEGMENTS_PER_PAGE = 512  # about 150 KiB; an answer has at most 1 MiB
_SPANS_PER_CALL = 2000  # about 40 KiB; a call has at most 64
MAX_MESSAGE_NBYTES = 32 * 1024
_MAX_MESSAGES = 4096
_MAX_NBYTES = 16 * 1024 * 1024


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says about itself. `topology` is None where it was not discovered."""

    host: str
    incarnation: int
    topology: Topology | None = None


class Describe(Call[SegmentDescriptor]):
    """Ask for the descriptor of a segment by its name."""

    name: str


class ListSegments(Call[list[SegmentDescriptor]]):
    """Ask for the segments whose names begin with `prefix`: a page of them, sorted by name, that follow the name
    `after`. An empty page is the end.
    """

    prefix: str
    after: str = ""


class Introduce(Call[PeerInfo]):
    """Ask an engine for its PeerInfo."""


class Notify(Call[None]):
    """Leave a message; Overloaded when the mailbox is full."""

    name: str
    incarnation: int
    message: bytes


class Admit(Call[None]):
    """Ask the fence to admit a write; see Fence.admit_all(). Without spans: ask whether the segment is served."""

    name: str
    incarnation: int
    spans: Spans
    generation: int


class Confirm(Call[None]):
    """Ask, after a write, whether the spans still belong to the generation."""

    name: str
    incarnation: int
    spans: Spans
    generation: int


class Attach(Call[bytes]):
    """Ask for what the transport `scheme` needs to reach the segment, in its own format."""

    scheme: str
    name: str
    incarnation: int
    hello: bytes = b""


CALLS: tuple[type[Call[Any]], ...] = (Describe, ListSegments, Introduce, Notify, Admit, Confirm, Attach)
_DECODER = CallDecoder(CALLS)


class ControlClient(Protocol):
    """Sends calls to the ControlHandler of an engine."""

    def ask(self, call: Call[R], timeout_s: float) -> R:
        """Return the owner's answer or raise its error; PeerLost or DeadlineExceeded when there is no answer."""
        ...


class ControlHandler:
    """Answers control calls, without waiting. Thread-safe."""

    def __init__(self, incarnation: int = 0, topology: Callable[[], Topology | None] = lambda: None) -> None:
        self.segments = ServedSegments()
        self.mailbox = Mailbox()
        self._incarnation = incarnation
        self._topology = topology
        self._descriptors: dict[str, SegmentDescriptor] = {}
        self._attach: dict[str, Callable[[Segment, bytes], bytes]] = {}
        self._lock = threading.Lock()

    def serve(self, segment: Segment) -> None:
        """AlreadyExists when another segment has that name; several transports may serve the same segment."""
        self.segments.add(segment)

    def publish(self, descriptor: SegmentDescriptor) -> None:
        """Answer Describe with this descriptor from now on."""
        with self._lock:
            self._descriptors[descriptor.name] = descriptor

    def withdraw(self, name: str) -> None:
        """Idempotent."""
        with self._lock:
            self._descriptors.pop(name, None)
        self.segments.remove(name)

    def on_attach(self, scheme: str, answer: Callable[[Segment, bytes], bytes]) -> None:
        """Call `answer(segment, hello)` for Attach calls of that transport."""
        self._attach[scheme] = answer

    def close(self) -> None:
        self.segments.clear()
        self.mailbox.close()

    def answer_body(self, body: bytes) -> bytes:
        """Decode a call, answer it and encode the answer. Raises MoonpoolError; ProtocolError if it is no call."""
        return msgspec.msgpack.encode(self.answer(_DECODER.decode(body)))

    def answer(self, call: Call[Any]) -> object:
        match call:
            case Describe(name):
                return self._describe(name)
            case ListSegments(prefix, after):
                return self._page(prefix, after)
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

    def _page(self, prefix: str, after: str) -> list[SegmentDescriptor]:
        with self._lock:
            names = [name for name in self._descriptors if name > after and name.startswith(prefix)]
            return [self._descriptors[name] for name in heapq.nsmallest(_SEGMENTS_PER_PAGE, names)]

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
    client: ControlClient,
    call: type[Admit | Confirm],
    name: str,
    incarnation: int,
    spans: Spans,
    generation: int,
    deadline: Deadline,
) -> None:
    """Ask the fence about all spans, in as many calls as they need. Without spans make one call, which checks that the
    owner serves this incarnation.
    """
    for start in range(0, max(1, len(spans)), _SPANS_PER_CALL):
        some = spans[start : start + _SPANS_PER_CALL]
        client.ask(call(name, incarnation, some, generation), deadline.remaining_s())


class LocalControlClient:
    """Calls a ControlHandler of this process."""

    def __init__(self, handler: ControlHandler) -> None:
        self._handler = handler

    def ask(self, call: Call[R], timeout_s: float) -> R:
        answer: Any = self._handler.answer(call)
        return answer  # type: ignore[no-any-return]


class Notification(NamedTuple):
    """A message of a peer about a segment of this engine; the peers agree on its format."""

    segment: str
    message: bytes


class Mailbox:
    """Messages in order of arrival. Thread-safe."""

    def __init__(self, max_messages: int = _MAX_MESSAGES, max_nbytes: int = _MAX_NBYTES) -> None:
        self._max_messages = max_messages
        self._max_nbytes = max_nbytes
        self._changed = threading.Condition()
        self._messages: deque[Notification] = deque()
        self._waiting: set[Pending[None]] = set()
        self._nbytes = 0
        self._closed = False

    def put(self, notification: Notification) -> None:
        """Add a message; Overloaded when there is no room, which the sender gets as the answer."""
        size = len(notification.message)
        check_message(notification.message)
        with self._changed:
            if len(self._messages) >= self._max_messages or self._nbytes + size > self._max_nbytes:
                raise Overloaded(f"{len(self._messages)} messages wait for the owner of {notification.segment!r}")
            self._messages.append(notification)
            self._nbytes += size
            self._changed.notify()
        self._resolve_waiting()

    def next_arrival(self) -> Pending[None]:
        """Return a Pending that is done when there are messages, or the mailbox is closed. It removes no message."""
        pending: Pending[None] = Pending(lambda: self._stop_waiting(pending))
        with self._changed:
            is_here = bool(self._messages) or self._closed
            if not is_here:
                self._waiting.add(pending)
        if is_here:
            pending.resolve(None)
        return pending

    def take_all(self, timeout_s: float = 0.0) -> list[Notification]:
        """Return and remove all messages; wait at most `timeout_s` for the first one."""
        deadline = Deadline(timeout_s)
        with self._changed:
            while not self._messages and not self._closed:
                if not self._changed.wait(deadline.remaining_s()):
                    break
            taken, self._nbytes = list(self._messages), 0
            self._messages.clear()
            return taken

    def close(self) -> None:
        """Idempotent. Waiting calls return what there is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._resolve_waiting()

    def _resolve_waiting(self) -> None:
        """Resolve without holding the lock: callbacks may call this object."""
        with self._changed:
            waiting, self._waiting = self._waiting, set()
        for pending in waiting:
            pending.resolve(None)

    def _stop_waiting(self, pending: Pending[None]) -> None:
        with self._changed:
            self._waiting.discard(pending)
        pending.fail(Cancelled("no longer waited for"))


def check_message(message: bytes) -> None:
    if len(message) > MAX_MESSAGE_NBYTES:
        raise InvalidInput(f"a message has at most {MAX_MESSAGE_NBYTES} bytes, not {len(message)}")
