"""A process with one end of an RPC connection, to be stopped and continued.

    python rpc_child.py server|client ADDRESS asyncio|uvloop PING_INTERVAL_S SILENCE_LIMIT_S

A server prints its address; a client prints "connected" and does so again each time it has lost the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop
from rpc_service import Echo, Service

from moonpool.base.rpc import AsyncClient, SilenceLimits


class Child:
    """The parent's side. `line` waits for what the child prints next."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(20):
            return (await self._process.stdout.readline()).decode().strip()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def child(role: str, address: str, loop: str, silence_limits: SilenceLimits) -> AsyncIterator[Child]:
    intervals = [str(silence_limits.ping_interval_s), str(silence_limits.silence_limit_s)]
    command = [sys.executable, str(Path(__file__)), role, address, loop, *intervals]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        yield Child(process)
    finally:
        process.kill()  # works on a stopped process too
        await process.communicate()


async def serve(address: str, silence_limits: SilenceLimits) -> None:
    print(await Service(silence_limits).server.listen(address), flush=True)
    await asyncio.Event().wait()


async def stay_connected(address: str, silence_limits: SilenceLimits) -> None:
    while True:
        client = await AsyncClient.connect(
            address, "testing", name="child", timeout_s=20, silence_limits=silence_limits
        )
        await client.call(Echo(b"here"))
        print("connected", flush=True)
        await client.closed.wait()


def main(role: str, address: str, loop: str, interval_s: str, limit_s: str) -> None:
    silence_limits = SilenceLimits(float(interval_s), float(limit_s))
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run((serve if role == "server" else stay_connected)(address, silence_limits))


if __name__ == "__main__":
    main(*sys.argv[1:])
