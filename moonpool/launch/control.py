"""A running launcher takes orders here: `moonpool scale` asks over a socket in the run directory, which only its user
can open; with `serve --tour` the front ends ask, too. The launcher tells all conductors which workers it does not start
again, so that /health misses none of them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moonpool.base.address import split_addresses
from moonpool.base.backoff import Backoff
from moonpool.base.cluster import CONDUCTOR_SERVICE, LAUNCHER_SERVICE, REQUEST_LIMITS, RetiredWorkers, WorkerRole
from moonpool.base.errors import ConfigError, InvalidInput, Unavailable
from moonpool.base.rpc import AsyncClient, Call, RpcPeer, RpcServer
from moonpool.base.rpc.reconnect import ReconnectingClient
from moonpool.base.run_dirs import LAUNCHER, socket_address
from moonpool.conductor.messages import TAKEOVER_S, DrainWorker, Status
from moonpool.engine.config import gpu_index
from moonpool.frontend.tour_messages import FillPool, KillWorker
from moonpool.launch.checks import require_memory
from moonpool.launch.launcher import Launcher
from moonpool.launch.machine import MachinePlan, Wiring, WorkerPart
from moonpool.launch.messages import ListWorkers, Scale, ScaleReply, WorkerProcess
from moonpool.launch.plan import MOST_OF_A_KIND, Role, ServeConfig, plan_worker
from moonpool.launch.role_settings import RoleTables, with_settings
from moonpool.launch.scaling import plan_scale
from moonpool.launch.supervisor import State
from moonpool.launch.tour import TourControl

_LOG = logging.getLogger(__name__)
_R = TypeVar("_R")
_ASK_S = 5.0
_RECONNECT_S = _ASK_AGAIN_S = 0.2
_WORKER, _FRONTEND = "worker", "frontend"  # commands of roles


@dataclass(frozen=True, slots=True)
class WorkerMaker:
    """Makes the roles of workers beyond those that the service started with."""

    config: ServeConfig
    machine: MachinePlan
    wiring: Wiring
    run_dir: Path
    prefix: str = ""
    role_tables: RoleTables = field(default_factory=dict)

    def make(self, role: WorkerRole, number: int, index: int) -> Role:
        """Return worker `number` of the role, the `index`th of all: devices are given in turn. Raise ConfigError on a
        GPU whose memory was divided among the workers of the start."""
        devices = [name.strip() for name in self.config.device.split(",")]
        gpu = gpu_index(devices[index % len(devices)])
        if gpu is not None and self.config.kv_nbytes is None:
            raise ConfigError("the workers share the whole GPU: start the service with --kv to add workers later")
        device, kv_nbytes = "cpu" if gpu is None else f"cuda:{gpu}", self.config.kv_nbytes or self.config.host_kv_nbytes
        # Without a number of threads a worker follows the number of workers on its machine.
        part = WorkerPart(self.prefix, role.value, number, device, self.config.threads, kv_nbytes)
        worker = plan_worker(self.config, self.machine, self.wiring, self.run_dir, part)
        return with_settings(worker, self.role_tables, os.environ)


class ControlServer:
    """Serves Scale and ListWorkers, with a tour its calls too, from `await start()` until `await close()`. One Scale at
    a time."""

    def __init__(
        self, launcher: Launcher, maker: WorkerMaker, require: Callable[[int, int], None] | None = None
    ) -> None:
        self._launcher, self._maker = launcher, maker
        self._require_memory = require or require_memory
        self._busy = asyncio.Lock()
        self._telling: list[asyncio.Task[None]] = []
        handlers: dict[type[Call[Any]], Callable[[Any, RpcPeer], Any]] = {
            Scale: self._scale,
            ListWorkers: self._list_workers,
        }
        if maker.config.tour:
            tour = TourControl(launcher, maker.wiring.master, maker.config.secret_file)
            handlers |= {KillWorker: tour.kill, FillPool: tour.fill}
        self._server = RpcServer(LAUNCHER_SERVICE, handlers, name=LAUNCHER, incarnation=time.time_ns())

    async def start(self) -> str:
        conductors = split_addresses(self._maker.wiring.conductor)
        self._telling = [asyncio.create_task(self._keep_telling(each), name="retired workers") for each in conductors]
        return await self.listen()

    async def listen(self) -> str:
        """Listen at the socket in the run directory, once more if that was removed."""
        return await self._server.listen(socket_address(self._maker.run_dir, LAUNCHER))

    async def close(self) -> None:
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)
        await self._server.close()

    async def _keep_telling(self, conductor: str) -> None:
        """Tell that conductor which workers are not started again, once there are any, and after a restart."""
        while not self._launcher.retired(_WORKER):
            await self._launcher.retirement.wait()
        client = ReconnectingClient(
            conductor,
            CONDUCTOR_SERVICE,
            [self._tell_retired],
            name=LAUNCHER,
            backoff=Backoff(_RECONNECT_S, _RECONNECT_S),
            on_lost=lambda error, was_connected: _LOG.debug("%s hears of no retired workers: %s", conductor, error),
            silence_limits=REQUEST_LIMITS,
        )
        with closing(client):
            await client.run()

    async def _tell_retired(self, conductor: AsyncClient) -> None:
        while True:
            change = self._launcher.retirement
            await conductor.call(RetiredWorkers(names=self._launcher.retired(_WORKER)), timeout_s=_ASK_S)
            await change.wait()

    def _list_workers(self, call: ListWorkers, peer: RpcPeer) -> list[WorkerProcess]:
        launcher = self._launcher
        alive = [(name, launcher.state_of(name)) for name in launcher.known(_WORKER)]
        return [
            WorkerProcess(name=name, is_ready=state is State.READY, last_end=launcher.last_end_of(name))
            for name, state in alive
            if state is not State.GONE
        ]

    async def _scale(self, call: Scale, peer: RpcPeer) -> ScaleReply:
        wanted = {WorkerRole.PREFILL: call.prefill, WorkerRole.DECODE: call.decode}
        for role, number in wanted.items():
            if number is not None and number > MOST_OF_A_KIND:
                raise InvalidInput(f"{role} must be 0 to {MOST_OF_A_KIND}", param=role.value)
        async with self._busy:
            if not self._launcher.is_serving:
                raise Unavailable("the service is starting or stopping; try again when it serves")
            return await self._carry_out({role: number for role, number in wanted.items() if number is not None})

    async def _carry_out(self, wanted: dict[WorkerRole, int]) -> ScaleReply:
        launcher = self._launcher
        registered = {one.info.name: one.info.role for one in (await self._ask(Status())).workers}
        own = {role.name: WorkerRole(str(role.options["role"])) for role in launcher.roles(_WORKER)}
        present = {name: registered.get(name, role) for name, role in own.items()}
        for kind, number in wanted.items():
            if number == 0 and not any(each is kind for name, each in registered.items() if name not in own):
                raise InvalidInput(f"no {kind} worker would be left: leave at least one", param=kind.value)
        taken = {name for name in launcher.known(_WORKER) if launcher.state_of(name) is not State.GONE}
        plan = plan_scale(present, wanted, taken, self._maker.prefix)
        roles = [self._maker.make(kind, number, len(own) + index) for index, (kind, number) in enumerate(plan.starts)]
        self._require_memory(0, sum(_host_nbytes(role) for role in roles))
        for role in roles:
            launcher.add(role)
        for name in plan.drains:
            if name in registered:
                await self._drain(name)
            launcher.retire(name, at_once=name not in registered)
        self._change_expected(set(plan.drains), [role.name for role in roles])
        return ScaleReply(started=tuple(role.name for role in roles), draining=plan.drains)

    async def _drain(self, name: str) -> None:
        """Drain the worker. Ask for a while: when the conductor that may change workers has just ended, another one
        gets the right some seconds later. Raise Unavailable if none does."""
        deadline_s = time.monotonic() + TAKEOVER_S
        while True:
            try:
                return await self._ask(DrainWorker(worker=name))
            except Unavailable:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(_ASK_AGAIN_S)

    def _change_expected(self, gone: set[str], new: list[str]) -> None:
        """Let front ends that are started again expect the workers that there are then."""
        for role in self._launcher.roles(_FRONTEND)[:1]:
            expected = role.options["expected_workers"]
            assert isinstance(expected, tuple)
            names = (*(name for name in expected if name not in gone), *new)
            self._launcher.change_options(_FRONTEND, expected_workers=names)

    async def _ask(self, call: Call[_R]) -> _R:
        """Return the answer of the first conductor that does what is asked. Raise Unavailable if none does."""
        addresses = split_addresses(self._maker.wiring.conductor)
        for number, address in enumerate(addresses, start=1):
            try:
                client = await AsyncClient.connect(
                    address, CONDUCTOR_SERVICE, name=LAUNCHER, timeout_s=_ASK_S, silence_limits=REQUEST_LIMITS
                )
                with closing(client):
                    return await client.call(call, timeout_s=_ASK_S)
            except Unavailable:
                if number == len(addresses):
                    raise
        raise AssertionError("there is at least one address")


def _host_nbytes(role: Role) -> int:
    """Return the bytes of main memory that the worker's pages need."""
    nbytes = role.options["kv_nbytes"]
    return nbytes if role.options["device"] == "cpu" and isinstance(nbytes, int) else 0
