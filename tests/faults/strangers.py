"""A program that attacks every port of a service at a fixed rate: with HTTP requests, RPC frames, memory requests.

    python strangers.py SEED ATTACKS_PER_S TARGETS [COUNT]       TARGETS: JSON of the class Targets

It ends after COUNT attacks; without a count it runs until it is killed, at the lowest priority. The ports take turns.
Each attack is one connection and ends after _PATIENCE_S; at most _MAX_OPEN are open at a time, and others are left out
or, with a count, wait. What a seed does depends on nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import struct
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # for message_values; this runs as a script

from message_values import FLOATS, INTEGERS, TEXTS, MessageValues

import moonpool.conductor.messages as conductor_messages
import moonpool.store.messages as store_messages
import moonpool.store.messages.session_calls as node_messages
import moonpool.worker.messages as worker_messages
from moonpool.base import cluster
from moonpool.base.frames import FrameKind, encode_frame
from moonpool.base.rpc import Call
from moonpool.base.rpc.protocol import Hello
from moonpool.transfer import control
from moonpool.transfer.transports.shm import server as shm_server
from moonpool.transfer.transports.tcp import guard
from moonpool.transfer.transports.tcp.frames import FrameOp, Request, pack_ask, pack_request

_PATIENCE_S = 4.0
_MAX_OPEN = 60
# These calls are an operator's, and the ports cannot tell who is one: where they are understood they do what they say.
_HONEST_EFFECTS = {"RemoveMatching", "UnmountSegment", "DrainSegment", "MountSegment"}
_MAX_TOKENS = 2  # whatever is valid among the bodies is answered soon
_CHAT_FIELDS = ("messages", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "logprobs", "top_logprobs",
                "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stream", "stream_options",
                "stop_token_ids", "priority", "response_format", "tools", "max_completion_tokens", "min_tokens",
                "ignore_eos", "timeout_s", "user", "no_such_field")  # fmt: skip
_PATHS = ("/v1/chat/completions", "/v1/completions")
_QUERIES = (
    "/v1/records?limit={}",
    "/v1/records/{}",
    "/v1/records/trace?limit={}",
    "/health?{}",
    "/v1/models/{}",
    "/{}",
    "/metrics?{}",
)


class Targets(msgspec.Struct):
    """Addresses: `http` and `tcp` are host:port, the others are paths of Unix sockets. `model` is the one served."""

    model: str
    http: str | None = None
    store: list[str] = []
    conductor: list[str] = []
    worker: list[str] = []
    node: list[str] = []
    shm: list[str] = []
    tcp: list[str] = []


Attack = Callable[[], Coroutine[Any, Any, None]]


def calls_in(*modules: Any) -> list[type[Call[Any]]]:
    """The calls that the modules define or import."""
    found = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    calls = [call for call in found if issubclass(call, Call) and call.__struct_config__.tag is not None]
    return sorted(
        (c for c in calls if c.__name__ not in _HONEST_EFFECTS | {"Call", "StreamCall"}), key=lambda c: c.__name__
    )


SERVICES = {
    "store": calls_in(store_messages),
    "conductor": calls_in(conductor_messages, cluster),
    "worker": calls_in(worker_messages),
    "node": calls_in(node_messages),
    "shm": calls_in(shm_server, control),
}
_SERVICE_NAMES = {
    "store": "store",
    "conductor": cluster.CONDUCTOR_SERVICE,
    "worker": cluster.WORKER_SERVICE,
    "node": node_messages.SERVICE,
}
_ROLES = ("store", "conductor", "worker")


class Bodies:
    """Bodies of calls and of HTTP requests: strange values in fields that exist, sometimes broken as a whole."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._values = MessageValues(rng.getrandbits(32))

    def of_call(self, call: type[Call[Any]]) -> bytes:
        return self._damage(self._values.body(call))

    def of_json(self, fields: tuple[str, ...], fixed: dict[str, Any]) -> bytes:
        """A JSON object with a few of `fields` and any values, then `fixed`."""
        names = self.rng.sample(fields, self.rng.randrange(min(6, len(fields))))
        return self._damage(json.dumps({name: self._any() for name in names} | fixed).encode())

    def _any(self, depth: int = 0) -> Any:
        rng = self.rng
        kind = rng.randrange(8 if depth < 3 else 6)
        if kind <= 1:
            return rng.choice((*INTEGERS, 2**64, 2**70, -(2**70), 10**400))
        if kind == 2:
            return rng.choice((*FLOATS, 1e-46, 1e-40))
        if kind == 3:
            return rng.choice(TEXTS)
        if kind <= 5:
            return rng.choice((None, True, False, [], {}))
        if kind == 6:
            return [self._any(depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice(TEXTS[:8]): self._any(depth + 1) for _ in range(rng.randrange(3))}

    def _damage(self, body: bytes) -> bytes:
        rng = self.rng
        kind = rng.randrange(12)
        if kind == 0:
            return body[: rng.randrange(len(body))]
        if kind == 1:
            at = rng.randrange(len(body))
            return body[:at] + rng.randbytes(rng.randrange(1, 9)) + body[at + 1 :]
        if kind == 2:  # nested without end
            return body[: rng.randrange(len(body))] + rng.choice((b"\x91", b"[", b'{"a":')) * rng.choice((10, 30_000))
        return body


class Stranger:
    """Chooses and runs attacks; `targets` says where to."""

    def __init__(self, seed: int, targets: Targets) -> None:
        self.rng = random.Random(seed)
        self.bodies = Bodies(self.rng)
        self._targets = targets
        self._attacks = {
            "http": [self.http_bytes, self.http_body, self.http_body, self.http_query, self.http_slow],
            **{kind: [self._rpc(kind, path) for path in getattr(targets, kind)] for kind in _ROLES},
            "memory": [
                *(self._rpc("node", path) for path in targets.node),
                *(self._shm(path) for path in targets.shm),
                *(self._tcp(address) for address in targets.tcp),
            ],
        }
        if targets.http is None:
            del self._attacks["http"]

    async def run(self, attacks_per_s: float, count: int | None) -> None:
        open_attacks: set[asyncio.Task[None]] = set()
        ports = itertools.cycle([attacks for attacks in self._attacks.values() if attacks])
        async with asyncio.TaskGroup() as group:  # a bug of an attack ends the program
            num_begun = 0
            while count is None or num_begun < count:
                if len(open_attacks) < _MAX_OPEN:
                    task = group.create_task(self._bounded(self.rng.choice(next(ports))))
                    open_attacks.add(task)
                    task.add_done_callback(open_attacks.discard)
                    num_begun += 1
                await asyncio.sleep(1 / attacks_per_s)

    async def _bounded(self, attack: Attack) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_PATIENCE_S):
                await attack()

    async def _say(self, address: str, data: bytes, *, pieces: int = 1, reads: bool | None = None) -> None:
        """Send `data`, in `pieces` with pauses between them, read what comes or do not, and reset the connection."""
        if ":" in address:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
        else:
            reader, writer = await asyncio.open_unix_connection(address)
        try:
            step = max(1, len(data) // pieces)
            for at in range(0, len(data), step):
                writer.write(data[at : at + step])
                await writer.drain()
                if pieces > 1:
                    await asyncio.sleep(_PATIENCE_S / pieces)
            if self.rng.random() < 0.7 if reads is None else reads:
                async with asyncio.timeout(self.rng.random()):
                    while await reader.read(1 << 16):
                        pass
        finally:
            writer.transport.abort()

    # -- HTTP ----------------------------------------------------------------------------------------------------

    def _http_head(self, path: str, body_nbytes: int | None) -> bytes:
        rng = self.rng
        lines = [f"POST {path} HTTP/1.1", "Host: x"]
        if rng.random() < 0.8:
            lines.append("Content-Type: " + rng.choice(("application/json", "text/plain", "\x01", "a" * 3000)))
        if body_nbytes is None:
            lines.append("Transfer-Encoding: chunked")
        else:
            lie = rng.choice((body_nbytes,) * 5 + (0, body_nbytes + 1, 2**24, 2**63, -1))
            lines.append(f"Content-Length: {lie}")
        if rng.random() < 0.1:
            lines += [f"X-{i}: " + "v" * rng.choice((1, 10_000)) for i in range(rng.choice((10, 200)))]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"

    async def http_bytes(self) -> None:
        rng = self.rng
        start = rng.choice(
            (
                b"GET / HTTP/1.1\r\n",
                b"POST /v1/completions HTTP/1.1\r\n",
                b"PRI * HTTP/2.0\r\n\r\n",
                b"\x16\x03\x01",
                b"",
            )
        )
        filler = rng.choice(
            (rng.randbytes(300), b"A: " + b"b" * 200_000 + b"\r\n", b"h: v\r\n" * 2000, b"\r\n" * 50, b"\0" * 1000)
        )
        assert self._targets.http is not None
        await self._say(self._targets.http, start + filler)

    async def http_body(self) -> None:
        rng, path = self.rng, self.rng.choice(_PATHS)
        prompt: dict[str, Any] = {"prompt": "hello"} if path.endswith("/completions") and "chat" not in path else {}
        fixed = (
            {"model": self._targets.model, "max_tokens": _MAX_TOKENS}
            | prompt
            | ({} if prompt else {"messages": [{"role": "user", "content": "hello"}]})
        )
        if rng.random() < 0.2:
            fixed.pop(rng.choice([name for name in fixed if name != "max_tokens"]))
        if rng.random() < 0.1:
            fixed["messages"] = [{"role": "user", "content": ""}] * 100_000
        body = self.bodies.of_json(_CHAT_FIELDS, fixed)
        chunked = rng.random() < 0.3
        data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
        assert self._targets.http is not None
        await self._say(self._targets.http, self._http_head(path, None if chunked else len(body)) + data)

    async def http_query(self) -> None:
        path = self.rng.choice(_QUERIES).format(
            self.rng.choice(("-1", "a" * 5000, "99999999999999999999", "%00", "nan", ""))
        )
        assert self._targets.http is not None
        await self._say(self._targets.http, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    async def http_slow(self) -> None:
        head = self._http_head(_PATHS[0], 1000)
        assert self._targets.http is not None
        await self._say(self._targets.http, head + b"{" * self.rng.choice((0, 900)), pieces=20)

    # -- RPC -----------------------------------------------------------------------------------------------------

    def _frames(self, calls: list[type[Call[Any]]], count: int) -> bytes:
        rng = self.rng
        frames = bytearray()
        for _ in range(count):
            kind = FrameKind.CALL if rng.random() < 0.85 else rng.choice(list(FrameKind))
            frame = encode_frame(kind, rng.choice((0, 1, rng.getrandbits(64))), self.bodies.of_call(rng.choice(calls)))
            frames += self._break(frame) if rng.random() < 0.15 else frame
        return bytes(frames)

    def _break(self, frame: bytes) -> bytes:
        changed, rng = bytearray(frame), self.rng
        kind = rng.randrange(3)
        if kind == 0:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        elif kind == 1:  # announces far more than comes
            changed[4:8] = struct.pack("<I", rng.choice((2**20, 60 << 20, 2**32 - 1)))
        else:
            changed[rng.randrange(min(24, len(changed))) :] = rng.randbytes(rng.randrange(200))
        return bytes(changed)

    def _rpc(self, kind: str, path: str) -> Attack:
        async def attack() -> None:
            rng = self.rng
            name = _SERVICE_NAMES[kind] if rng.random() < 0.9 else rng.choice(("", "x" * 1000))
            hello = Hello(name, rng.choice(("stranger", "", "é" * 5000)), rng.getrandbits(63), rng.random() < 0.2)
            opening = encode_frame(FrameKind.HELLO, 0, msgspec.msgpack.encode(hello)) if rng.random() < 0.95 else b""
            await self._say(path, opening + self._frames(SERVICES[kind], rng.choice((1, 3, 30))))

        return attack

    # -- memory --------------------------------------------------------------------------------------------------

    def _shm(self, path: str) -> Attack:
        async def attack() -> None:
            await self._say(path, self._frames(SERVICES["shm"], self.rng.choice((1, 1, 5))))

        return attack

    def _tcp(self, address: str) -> Attack:
        async def attack() -> None:
            rng = self.rng
            opening = guard.FRAME_NBYTES if rng.random() < 0.5 else 0
            start = (
                b"" if not opening else (guard.MAGIC + bytes((guard.VERSION, 1, 1, 0))).ljust(guard.FRAME_NBYTES, b"\0")
            )
            await self._say(address, start + b"".join(self._memory_request() for _ in range(rng.choice((1, 3, 20)))))

        return attack

    def _memory_request(self) -> bytes:
        rng = self.rng
        op, nbytes = rng.choice((FrameOp.READ, FrameOp.WRITE, FrameOp.ASK)), rng.choice((0, 1, 64, 4096))
        if op is FrameOp.ASK:
            frame = pack_ask(rng.getrandbits(64), self.bodies.of_call(rng.choice(SERVICES["shm"]))[:60_000])
        else:
            numbers = (rng.choice((0, 4096, 2**40, 2**62)), nbytes, rng.choice((0, 1, 2**40, 2**62)))
            name = rng.choice(("node.dram", "node-tcp.dram", "x"))
            frame = pack_request(Request(op, rng.getrandbits(64), name, rng.choice((0, 1, 2**63)), *numbers))
            frame += rng.randbytes(nbytes) if op is FrameOp.WRITE else b""
        return self._break(frame) if rng.random() < 0.3 else frame


def main() -> None:
    seed, attacks_per_s, targets, *count = sys.argv[1:]
    if not count:
        os.nice(19)
    stranger = Stranger(int(seed), msgspec.json.decode(targets, type=Targets))
    asyncio.run(stranger.run(float(attacks_per_s), int(count[0]) if count else None))


if __name__ == "__main__":
    main()
