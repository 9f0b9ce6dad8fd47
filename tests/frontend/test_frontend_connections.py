"""Strangers at the front end's port: endless headers, silence, trickles, floods of connections, readers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from frontend_cluster import MODEL, ToyCluster, until_page
from waiting import HANG_S, until

from moonpool.frontend.connection import ConnectionLimits

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()


@contextlib.asynccontextmanager
async def opened(cluster: ToyCluster) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def status_of(reader: asyncio.StreamReader) -> int:
    """Reads one answer; its error must be in OpenAI's shape."""
    line = await asyncio.wait_for(reader.readline(), HANG_S)
    length = 0
    while (header := await reader.readline()).strip():
        name, _, value = header.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    body = json.loads(await reader.readexactly(length))
    status = int(line.split()[1])
    assert status < 400 or set(body["error"]) == {"message", "type", "param", "code"}
    return status


async def is_closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), HANG_S) == b""
    return True


def head(*headers: bytes, path: str = CHAT, method: str = "POST") -> bytes:
    return b"\r\n".join([f"{method} {path} HTTP/1.1".encode(), b"host: x", *headers, b"", b""])


async def serves(cluster: ToyCluster) -> bool:
    async with cluster.client() as http:
        return (await http.post(CHAT, content=BODY)).status_code == 200


async def test_too_many_and_too_large_headers(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster:
        many = head(*(b"x-%d: y" % i for i in range(200)))
        large = head(b"x: " + b"y" * 100_000)
        long_path = head(path="/" + "y" * 100_000)
        endless = b"GET / HTTP/1.1\r\nx: " + b"y" * 1_000_000
        for request in (many, large, long_path, endless):
            async with opened(cluster) as (reader, writer):
                writer.write(request)
                assert await status_of(reader) == 431, request[:40]
                assert await is_closed(reader)
        assert await serves(cluster)


async def test_headers_without_end_take_no_memory(tmp_path: Path) -> None:
    """A client that goes on sending after the refusal is cut off."""
    async with ToyCluster(tmp_path, limits=ConnectionLimits(max_drain_nbytes=1_000_000)) as cluster:
        async with opened(cluster) as (_, writer):
            writer.write(b"GET / HTTP/1.1\r\nx: ")
            with contextlib.suppress(ConnectionError):
                for _ in range(10_000):
                    writer.write(b"y" * 65536)
                    await writer.drain()
                raise AssertionError("600 MB of headers were taken")


async def test_nonsense_is_a_400_in_the_same_shape(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster, opened(cluster) as (reader, writer):
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        assert await status_of(reader) == 400
        assert await is_closed(reader)


async def test_connections_that_stand_still_end(tmp_path: Path) -> None:
    begun = (b"POST /v1/cha", head(b"content-length: 100")[:-1])
    in_body = (head(b"content-length: 100") + b"{", head(b"transfer-encoding: chunked") + b"1\r\n{\r\n1;x=")
    limits = ConnectionLimits(idle_s=1.0, head_s=1.0, body_s=1.0)
    async with ToyCluster(tmp_path, limits=limits) as cluster:

        async def ends(sent: bytes) -> None:
            async with opened(cluster) as (reader, writer):
                writer.write(sent)
                assert not sent or await status_of(reader) == 408
                assert await is_closed(reader)

        await asyncio.gather(*map(ends, (b"", *begun, *in_body)))
        assert cluster.num_seen == 0
        assert await serves(cluster)


async def test_idle_connections_make_room(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, limits=ConnectionLimits(max_connections=5)) as cluster:
        async with contextlib.AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(opened(cluster)) for _ in range(5)]
            for _ in range(3):
                assert await serves(cluster)
            assert await is_closed(silent[0][0]), "the oldest silent connection makes room first"


async def test_when_all_connections_are_in_use_health_is_still_served(tmp_path: Path) -> None:
    limits = ConnectionLimits(max_connections=3, reserve=4)
    async with ToyCluster(tmp_path, limits=limits) as cluster, contextlib.AsyncExitStack() as stack:
        cluster.prefill.may_go_on.clear()
        for _ in range(3):
            _, writer = await stack.enter_async_context(opened(cluster))
            writer.write(head(b"content-length: %d" % len(BODY)) + BODY)
        await until(lambda: cluster.prefill.num_active == 3, "all three have begun")
        async with cluster.client() as http:
            assert (await http.get("/health")).status_code == 200
            reply = await http.post(CHAT, content=BODY)
            assert (reply.status_code, reply.headers["connection"]) == (503, "close")
            assert "in use" in reply.json()["error"]["message"]
        cluster.prefill.may_go_on.set()
        await cluster.until_idle()


async def test_a_reader_that_stops_reading_is_cut_off(tmp_path: Path) -> None:
    """Its work at the workers ends too. The answer has some 8 MB, far more than the kernel's buffers hold."""
    body = {"model": MODEL, "prompt": ["x"] * 2, "n": 16, "stream": True, "ignore_eos": True, "max_tokens": 390}
    raw = json.dumps({**body, "logprobs": 20}).encode()
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the smaller, the sooner it is full
        sock.setblocking(False)
        async with ToyCluster(tmp_path, limits=ConnectionLimits(write_s=0.2)) as cluster:
            host, port = cluster.url.removeprefix("http://").split(":")
            await loop.sock_connect(sock, (host, int(port)))
            await loop.sock_sendall(sock, head(b"content-length: %d" % len(raw), path="/v1/completions") + raw)
            await until(lambda: cluster.decode.num_active > 0, "a decode has begun")
            labels = 'endpoint="/v1/completions",moonpool_name="frontend",moonpool_role="frontend",outcome="cancelled"'
            async with cluster.client() as http:
                await until_page(http, "/metrics?roles=own", f"moonpool_requests_total{{{labels}}} 1.0")
            await cluster.until_idle()


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster, opened(cluster) as (reader, writer):
        request = head(b"content-length: %d" % len(BODY)) + BODY
        writer.write(request + request + head(path="/health", method="GET"))
        assert [await status_of(reader) for _ in range(3)] == [200, 200, 200]


async def test_after_a_refused_body_the_connection_goes_on(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, max_body_nbytes=1000) as cluster, opened(cluster) as (reader, writer):
        for length in (b"content-length: 100000", b"content-length: 1001"):
            writer.write(head(length) + b" " * int(length.split()[1]))
            assert await status_of(reader) == 413
        writer.write(head(b"transfer-encoding: chunked") + b"3e8\r\n" + b" " * 1000 + b"\r\n1\r\n \r\n0\r\n\r\n")
        assert await status_of(reader) == 413
        writer.write(head(b"content-length: %d" % len(BODY)) + BODY)
        assert await status_of(reader) == 200
