"""A simulated program that uses the store: random calls of the production Store, each judged by the history."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from moonpool.base.errors import (
    AlreadyExists,
    Internal,
    InvalidInput,
    MoonpoolError,
    NoSpace,
    NotFound,
    ProtocolError,
    StaleGeneration,
)
from moonpool.base.rpc import Call
from moonpool.store import Store
from moonpool.store import messages as m
from moonpool.store.client import ObjectView, Put, PutOptions, PutRequest
from moonpool.store.client.put_session import PutSession

from .sim_history import Write, content
from .sim_world import Member, World

SIZES = (100, 3000, 4096, 7000, 9000)
LONGEST_CALL_S = 60.0  # of virtual time in which the caller was not stopped
_NOT_DONE = (AlreadyExists, NoSpace, InvalidInput)
_BUGS = (Internal, ProtocolError, AssertionError)


class _View:
    """A view that is held: its bytes stay what they are."""

    def __init__(
        self, view: ObjectView, data: bytes, began_s: float, viewed_s: float, until_s: float, master: int
    ) -> None:
        self.view, self.data, self.began_s, self.viewed_s, self.until_s = view, data, began_s, viewed_s, until_s
        self.master = master  # the incarnation to which the client was connected when it began


class Program:
    """Runs on a simulated thread until the world is told to end."""

    def __init__(self, world: World, member: Member, keys: Sequence[bytes]) -> None:
        self._world, self._member, self._keys = world, member, keys
        self._rng = world.rng
        self._views: list[_View] = []
        self._client: Store | None = None
        self._calls: list[tuple[int, Callable[[], None]]] = [
            (24, self._put),
            (12, self._put_one_by_one),
            (6, self._put_in_pieces),
            (24, self._get),
            (5, self._get_into),
            (9, self._view),
            (4, self._view_again_and_again),
            (6, self._close_views),
            (5, self._exist),
            (7, self._remove),
            (2, self._remove_matching),
            (4, self._pin),
            (4, self._order_about),
            (1, self._ask_why),
        ]
        self.is_over = False
        self.wants_end = False

    @property
    def client(self) -> Store:
        assert self._client is not None
        return self._client

    def run(self) -> None:
        self._client, _ = self._world.make_client()
        while not self.wants_end:
            self._world.scheduler.sleep(self._rng.expovariate(1 / self._world.think_s))
            weights = [self._world.favoured.get(_name(call), weight) for weight, call in self._calls]
            (_, call), *_ = self._rng.choices(self._calls, weights)
            self._timed(call)
        self._close_views(everything=True)
        self._timed(self.client.close)
        self.is_over = True

    def _timed(self, call: Callable[[], Any]) -> None:
        process, scheduler = self._member.process, self._world.scheduler
        assert process is not None
        name = _name(call)
        began_s, stopped_s = scheduler.now_s, process.stopped_s
        try:
            call()
        except _BUGS:
            raise
        except MoonpoolError as error:
            self._note(name, type(error).__name__, error)
        took_s = scheduler.now_s - began_s - (process.stopped_s - stopped_s)
        if took_s > LONGEST_CALL_S:
            self._world.violated(f"{process.name}: {name} took {took_s:.1f} s")

    def _note(self, what: str, *details: Any) -> None:
        self._world.note(self._member.name, what, *details)

    def _some(self, most: int) -> list[bytes]:
        count = 1 if self._rng.random() < 0.6 else self._rng.randint(2, min(most, len(self._keys)))
        return self._rng.sample(self._keys, count)

    # putting

    def _options(self) -> PutOptions:
        rng = self._rng
        return PutOptions(
            num_replicas=2 if rng.random() < 0.3 else 1,
            replace=rng.random() < 0.5,
            hard_pin=rng.random() < 0.04,
            soft_pin_s=rng.choice((0.0, 0.0, 0.0, 5.0)),
            all_replicas=rng.random() < 0.05,
        )

    def _put(self) -> None:
        options, keys = self._options(), self._some(4)
        writes = [self._begin(key, options) for key in keys]
        group = b"g%d" % self._rng.randrange(3) if self._rng.random() < 0.2 else b""
        parents = [b"", *keys[:-1]] if self._rng.random() < 0.3 else [b""] * len(keys)
        puts = [
            Put(write.key, [content(write.number, write.nbytes)], options=options, parent=parent, group=group)
            for write, parent in zip(writes, parents, strict=True)
        ]
        for write, error in zip(writes, self.client.put_objects(puts), strict=True):
            self._ended(write, error)

    def _put_one_by_one(self) -> None:
        """Small objects of one size: the client holds space for them."""
        nbytes, options = self._rng.choice(SIZES), PutOptions(hard_pin=self._rng.random() < 0.04)
        for number, key in enumerate(self._rng.sample(self._keys, self._rng.randint(2, 4))):
            write = self._world.history.put_begins(key, nbytes, options.hard_pin)
            put = Put(key, [content(write.number, nbytes)], options=options)
            if number:
                self._world.before_small_put(self._member)
            self._ended(write, self.client.put_objects([put])[0])

    def _put_in_pieces(self) -> None:
        options = self._options()
        write = self._begin(self._rng.choice(self._keys), options)
        data = content(write.number, write.nbytes)
        half = len(data) // 2
        request = PutRequest(key=write.key, piece_nbytes=(half, len(data) - half), options=options)
        begun = self.client.piece_puts.begin([request])[0]
        if isinstance(begun, MoonpoolError):
            self._ended(write, begun)
            return
        try:
            begun.write_piece(0, data[:half])
            self._world.scheduler.sleep(self._rng.expovariate(1.0))
            begun.write_piece(1, data[half:])
        except MoonpoolError as error:
            self._give_up(begun, write, error)
            return
        if self._rng.random() < 0.1:
            self._give_up(begun, write, StaleGeneration("the caller changed its mind"))
        else:
            self._ended(write, self.client.piece_puts.finish([begun])[0])

    def _give_up(self, begun: PutSession, write: Write, error: MoonpoolError) -> None:
        self.client.piece_puts.abort([begun])
        self._world.history.ended(write, False)
        self._note("gave up", write.number, error)

    def _begin(self, key: bytes, options: PutOptions) -> Write:
        return self._world.history.put_begins(key, self._rng.choice(SIZES), options.hard_pin)

    def _ended(self, write: Write, error: MoonpoolError | None) -> None:
        if isinstance(error, _BUGS):
            raise error
        done = True if error is None else False if isinstance(error, _NOT_DONE) else None
        self._world.history.ended(write, done)
        self._note("put", write.number, write.key, write.nbytes, "ok" if error is None else error)

    # getting

    def _get(self) -> None:
        began_s, keys = self._world.scheduler.now_s, self._some(5)
        for key, data in zip(keys, self.client.get_many(keys), strict=True):
            self._got(key, data, began_s)

    def _get_into(self) -> None:
        began_s, keys = self._world.scheduler.now_s, self._some(3)
        buffers = [[bytearray(5000), bytearray(5000)] for _ in keys]
        for key, parts, got in zip(keys, buffers, self.client.get_many_into(keys, buffers), strict=True):
            if isinstance(got, int):
                self._got(key, b"".join(parts)[:got], began_s)
            else:
                self._failed(key, got, began_s)

    def _got(self, key: bytes, data: bytes | None, began_s: float) -> None:
        if data is None:
            self._world.history.missed(key, began_s, self._world.is_away)
            self._note("miss", key)
        else:
            self._world.history.read(key, data, began_s)
            self._note("get", key, int.from_bytes(data[:8], "little"))

    def _failed(self, key: bytes, error: MoonpoolError, began_s: float) -> None:
        if isinstance(error, _BUGS):
            raise error
        if isinstance(error, NotFound):
            self._got(key, None, began_s)
        else:
            self._note("no", key, type(error).__name__, error)

    def _view(self) -> None:
        began_s, keys, master = self._world.scheduler.now_s, self._some(3), self.client.master.incarnation
        verify: Literal["once", "always"] = "always" if self._world.flips or self._rng.random() < 0.3 else "once"
        for key, view in zip(keys, self.client.view_many(keys, verify=verify), strict=True):
            if isinstance(view, MoonpoolError):
                self._failed(key, view, began_s)
                continue
            data = b"".join(bytes(piece) for piece in view.pieces)
            if not self._world.flips:
                self._got(key, data, began_s)
            now_s = self._world.scheduler.now_s
            self._views.append(_View(view, data, began_s, now_s, now_s + self._rng.expovariate(0.2), master))

    def _view_again_and_again(self) -> None:
        """One key, while others change it: after the first time mostly without a message."""
        key = self._rng.choice(self._keys)
        for _ in range(self._rng.randint(2, 5)):
            began_s = self._world.scheduler.now_s
            (view,) = self.client.view_many([key])
            if isinstance(view, MoonpoolError):
                self._failed(key, view, began_s)
            else:
                if not self._world.flips:
                    self._got(key, b"".join(bytes(piece) for piece in view.pieces), began_s)
                view.close()
            self._world.scheduler.sleep(self._rng.expovariate(5.0))

    def _close_views(self, everything: bool = False) -> None:
        now_s = self._world.scheduler.now_s
        over = [each for each in self._views if everything or each.until_s <= now_s]
        self._views = [each for each in self._views if each not in over]
        for each in over:
            data = b"".join(bytes(piece) for piece in each.view.pieces)
            is_forgotten = self._world.history.may_be_forgotten(each.began_s, each.viewed_s, each.master)
            if data != each.data and not self._world.flips and not is_forgotten:
                self._world.violated(f"a view of {each.view.key!r} changed while it was held by {self._member.name}")
            each.view.close()

    # the rest

    def _exist(self) -> None:
        began_s, keys = self._world.scheduler.now_s, self._some(5)
        for key, found in zip(keys, self.client.exist_many(keys), strict=True):
            if not found:
                self._got(key, None, began_s)

    def _remove(self) -> None:
        keys, force = self._some(3), self._rng.random() < 0.5
        writes = [self._world.history.removal_begins(key) for key in keys]
        removed: Sequence[bool | None] = [None] * len(keys)
        try:
            removed = self.client.remove_many(keys, force=force)
        finally:
            for write, done in zip(writes, removed, strict=True):
                self._world.history.ended(write, done)
        self._note("remove", keys, removed)

    def _remove_matching(self) -> None:
        digit = self._rng.choice("0123456789")
        keys = [key for key in self._keys if digit in key.decode()]
        writes = [self._world.history.removal_begins(key) for key in keys]
        removed = self.client.remove_matching(digit)
        for write in writes:
            self._world.history.ended(write, None)  # which of them went it does not say
        self._note("remove matching", digit, removed)

    def _pin(self) -> None:
        keys = self._some(2)
        pinned = self.client.pin_many(keys)
        self._note("pin", keys, pinned)
        self._world.scheduler.sleep(self._rng.expovariate(1.0))
        with contextlib.suppress(MoonpoolError):
            self.client.unpin_many([key for key, is_pinned in zip(keys, pinned, strict=True) if is_pinned])

    def _order_about(self) -> None:
        rng, nodes = self._rng, [each.name for each in self._world.nodes]
        source, target = (f"{name}.dram" for name in rng.sample(nodes, 2))
        key = rng.choice(self._keys)
        call: Call[Any] = rng.choice(
            [
                m.CopyObject(key, (target,)),
                m.CopyObject(key, (target,)),
                m.MoveObject(key, source, target),
                m.DrainSegment(source),
            ]
        )
        task = self.client.master.call_once(call)
        self._note("task", call, task)
        self._world.scheduler.sleep(rng.expovariate(0.5))
        if isinstance(call, m.DrainSegment):
            self.client.master.call_once(m.CancelTask(task))

    def _ask_why(self) -> None:
        key = self._rng.choice(self._keys)
        self._note("why", key, self.client.why(key), self.client.stats().num_objects)


def _name(call: Callable[[], Any]) -> str:
    return call.__name__.strip("_")
