"""What the processes of a fault test do (store_nursery.py starts them): a master, a node, and those that use them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from store_check import CHECK_SERVICE, CheckPool, PassTime, check_address, report_on
from store_late_roles import copy_late, put_late, view_late
from store_load import run_load
from store_time import PassingClock

from moonpool.base.errors import MoonpoolError
from moonpool.base.rpc import Call, RpcPeer, RpcServer
from moonpool.master.service import Master, MasterConfig
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node


def _say(line: str) -> None:
    print(line, flush=True)


def _run(role: str, serve: Callable[[], Awaitable[None]]) -> None:
    """Errors of ours are said, the rest is a bug."""
    level = os.environ.get("MOONPOOL_TEST_LOG", "CRITICAL")
    logging.basicConfig(
        level=level, format=f"%(relativeCreated)d {role}[%(process)d] %(name)s: %(message)s", force=True
    )

    async def main() -> None:
        try:
            await serve()
        except MoonpoolError as error:
            _say(f"error {error.code} {error}")

    asyncio.run(main())


async def _until_terminated() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


def run_master(**config: Any) -> None:
    async def serve() -> None:
        settings = MasterConfig(**config)
        clock = PassingClock(settings.tick_s + 0.2)
        master = Master(settings, clock)
        address = await master.start()

        def pass_time(call: PassTime) -> None:
            clock.passed_s += call.seconds

        handlers: dict[type[Call[Any]], Callable[[Any, RpcPeer], Any]] = {
            CheckPool: lambda call, peer: report_on(master.state),
            PassTime: lambda call, peer: pass_time(call),
        }
        check = RpcServer(CHECK_SERVICE, handlers, name="master")
        await check.listen(check_address(address))
        _say("ready")
        await _until_terminated()
        await check.close()
        await master.close()

    _run("master", serve)


def run_node(**config: Any) -> None:
    async def serve() -> None:
        node = Node(NodeConfig(**config))
        await node.start()
        _say("ready")
        await _until_terminated()
        await node.close()

    _run(f"node {config['name']}", serve)


ROLES: dict[str, Callable[..., None]] = {
    "master": run_master,
    "node": run_node,
    "load": run_load,
    "late_copy": copy_late,
    "late_view": view_late,
    "late_put": put_late,
}
