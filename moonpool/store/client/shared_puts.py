"""Objects whose pieces several processes write: each writes its own, and one also writes the headers and ends the puts.

The owner begins the puts in a session of their own (SessionClient.share), which every process that writes in mapped
memory joins. Their space is released only when all of them have left that session, whatever happens to any of them: a
process that is stopped in the middle of a copy still holds it, and one that dies lets go.

    owner   begin(requests) -> SharedPut          others   join(session, requests, spaces) -> PutSessions
            writes its pieces                              write their pieces, answer with written(), leave()
            add() of all others, end()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moonpool.base.errors import MoonpoolError
from moonpool.store.client.put_request import PutRequest, bundle_puts
from moonpool.store.client.put_session import PiecePuts, PutSession
from moonpool.store.messages import Placement
from moonpool.store.messages.shared_space import SharedSpace


class SharedPut(NamedTuple):
    """Puts that were begun together. `puts` has the error where there is no space."""

    session: int
    puts: list[PutSession | MoonpoolError]


class SharedPuts:
    """Thread-safe, as PiecePuts is."""

    def __init__(self, pieces: PiecePuts) -> None:
        self._pieces = pieces
        self._sessions, self._calls = pieces.tools.sessions, pieces.tools.calls

    def begin(self, requests: Sequence[PutRequest]) -> SharedPut:
        """Get space for each request, as PiecePuts.begin(), in a new session. Call end() afterwards in any case; if
        this raises, nothing is left."""
        session = self._sessions.share()
        try:
            return SharedPut(session, self._begin(requests, session))
        except BaseException:
            self._sessions.leave(session)  # what was granted is freed with the session
            raise

    def _begin(self, requests: Sequence[PutRequest], session: int) -> list[PutSession | MoonpoolError]:
        begun: dict[int, PutSession | MoonpoolError] = {}
        sizes = [request.nbytes for request in requests]
        for positions in bundle_puts(requests, sizes, range(len(requests))):
            some = [requests[at] for at in positions]
            granted = self._calls.start_shared(some, [sizes[at] for at in positions], session)
            for index, at in enumerate(positions):
                begun[at] = granted.errors[index] or self._put(
                    requests[at], granted.generations[index], granted.replicas[index], session
                )
        return [begun[at] for at in range(len(requests))]

    def join(self, session: int, requests: Sequence[PutRequest], spaces: Sequence[SharedSpace]) -> list[PutSession]:
        """Take part in puts that another process has begun. Call leave() afterwards in any case."""
        if session:
            self._sessions.join(session)
        return [
            self._put(request, space.generation, space.replicas, session)
            for request, space in zip(requests, spaces, strict=True)
        ]

    def leave(self, session: int) -> None:
        """This process writes no more. Idempotent."""
        self._sessions.leave(session)

    def end(self, shared: SharedPut, complete: Sequence[PutSession]) -> list[MoonpoolError | None]:
        """Write the headers of the complete objects and make them visible; return the error of each. The space of all
        others is released when every process has left."""
        try:
            outcomes = self._pieces.finish(complete) if complete else []
        finally:
            if not shared.session:  # no memory of this machine: writes that are late are refused by their generation
                self._give_back(shared, complete)
            self._sessions.leave(shared.session)
        return outcomes

    def _give_back(self, shared: SharedPut, complete: Sequence[PutSession]) -> None:
        rest = [each for each in shared.puts if isinstance(each, PutSession) and each not in complete]
        self._calls.give_back([each.key for each in rest], [each.generation for each in rest], settled=False)

    def _put(self, request: PutRequest, generation: int, replicas: Sequence[Placement], session: int) -> PutSession:
        return PutSession(request, generation, replicas, session, self._pieces)
