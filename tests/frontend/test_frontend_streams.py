"""Many open streams at one front end: every one ends whole, and files (in soak: memory) do not grow meanwhile.

The front end is a process of its own; its conductor and its workers, which answer at once, are another one
(benchmarks/_instant_workers.py). Tokens come one by one, so a stream is open for seconds; when it ends, its client
opens the next one over a new connection.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from waiting import HANG_S, wait_until

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _instant_workers import InstantCluster
from _live_load import free_port

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

MODEL = "smollm2"
NUM_TOKENS = 6
_BODY = json.dumps({"model": MODEL, "prompt": "word " * 60, "max_tokens": NUM_TOKENS, "stream": True}).encode()
_HEAD = (
    f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(_BODY)}\r\nconnection: close\r\n\r\n".encode()
)


@contextmanager
def front_end(folder: Path, conductor_address: str) -> Iterator[tuple[psutil.Process, int]]:
    port = free_port()
    options = ("--conductor-address", conductor_address, "--state-dir", str(folder), "--model", MODEL)
    listen = ("--listen", f"tcp:127.0.0.1:{port}", "--log-level", "ERROR", "--max-connections", "2000")
    process = subprocess.Popen([sys.executable, "-m", "moonpool", "frontend", *options, *listen])
    try:
        wait_until(lambda: process.poll() is not None or _is_healthy(port), "the front end has started")
        assert process.poll() is None, "the front end has ended"
        yield psutil.Process(process.pid), port
    finally:
        process.terminate()
        process.wait(HANG_S)


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=HANG_S).is_success
    except httpx.HTTPError:
        return False


async def read_stream(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_HEAD + _BODY)
        answer = await reader.read()
    finally:
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    assert answer.count(b'"text":') == NUM_TOKENS
    assert b"data: [DONE]" in answer


async def keep_open(process: psutil.Process, port: int, num_streams: int, seconds: float) -> tuple[list[int], int]:
    """Keep `num_streams` streams open. Return the front end's memory, a sample a second, and the number of streams."""
    ends_s, num_read = time.monotonic() + seconds, 0
    samples: list[int] = []

    async def client(number: int) -> None:
        nonlocal num_read
        await asyncio.sleep(number / num_streams)  # not all in the same moment
        while time.monotonic() < ends_s:
            await read_stream(port)
            num_read += 1

    async def sample() -> None:
        while time.monotonic() < ends_s:
            await asyncio.sleep(1)
            samples.append(process.memory_info().rss)

    async with asyncio.TaskGroup() as group:
        group.create_task(sample())
        for number in range(num_streams):
            group.create_task(client(number))
    return samples, num_read


async def read_in_rounds(port: int, num_streams: int, num_rounds: int) -> None:
    async def client() -> None:
        for _ in range(num_rounds):
            await read_stream(port)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_streams):
            group.create_task(client())


@contextmanager
def watched(tmp_path: Path, pause_s: float) -> Iterator[tuple[psutil.Process, int]]:
    """A front end that must have nothing left to do, and no more files open than before, when the streams are over."""
    cluster = InstantCluster(tmp_path, num_tokens=NUM_TOKENS, pause_s=pause_s)
    with cluster, front_end(tmp_path, cluster.conductor_address) as (process, port):
        asyncio.run(read_stream(port))
        num_files = process.num_fds() + 4  # and the scrape's own connection
        yield process, port
        page = httpx.get(f"http://127.0.0.1:{port}/metrics?roles=own", timeout=HANG_S).text
        [running] = [line for line in page.splitlines() if line.startswith("moonpool_requests_running")]
        assert float(running.split()[-1]) == 0
        wait_until(lambda: process.num_fds() <= num_files, f"at most {num_files} open files")


def test_many_open_streams_end_whole_and_leave_nothing_open(tmp_path: Path) -> None:
    with watched(tmp_path, pause_s=0.3) as (_, port):
        asyncio.run(read_in_rounds(port, num_streams=200, num_rounds=3))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("num_streams", "seconds", "pause_s", "max_growth_nbytes"),
    [(200, 12, 0.3, 12 << 20), (1000, 600, 4.0, 24 << 20)],
    ids=["200 streams, 12 s", "1000 streams, ten minutes"],
)
def test_memory_stays_flat_with_many_open_streams(
    tmp_path: Path, num_streams: int, seconds: float, pause_s: float, max_growth_nbytes: int
) -> None:
    """The median of the last third of the samples against that of the first. The allocator's pools are the noise: 5 MB
    in the short run, on two cores that others used too."""
    with watched(tmp_path, pause_s) as (process, port):
        # The first streams fill buffers, caches and the allocator's pools.
        asyncio.run(keep_open(process, port, num_streams, seconds / 3))
        samples, num_read = asyncio.run(keep_open(process, port, num_streams, seconds))
        assert num_read >= num_streams
        third = max(1, len(samples) // 3)
        growth_nbytes = statistics.median(samples[-third:]) - statistics.median(samples[:third])
        assert growth_nbytes < max_growth_nbytes, f"{num_read} streams, memory in bytes: {samples}"
