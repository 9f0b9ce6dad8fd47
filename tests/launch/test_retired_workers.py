"""Every conductor knows which workers are not started again: also one that has told no worker to leave, and one that
starts later. /health misses none of these workers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from waiting import until
from worker_info import info

from moonpool.base.cluster import CONDUCTOR_SERVICE, RegisterWorker
from moonpool.base.process import Lifeline
from moonpool.base.rpc import AsyncClient
from moonpool.conductor.service import Conductor, ConductorConfig
from moonpool.launch.control import ControlServer, WorkerMaker
from moonpool.launch.launcher import Launcher
from moonpool.launch.plan import ServeConfig, one_machine, plan_machine, plan_roles


class Service:
    """The launcher's calls and the conductors of a service whose processes are not started."""

    def __init__(self, folder: Path, lifeline: Lifeline) -> None:
        config = ServeConfig(prefill=2, decode=2, conductors=2)
        machine = plan_machine(config, num_cores=2)
        wiring = one_machine(machine, folder, config.conductors)
        self.launcher = Launcher(plan_roles(config, machine, folder, folder, wiring), lifeline, lambda seconds: None)
        self.control = ControlServer(self.launcher, WorkerMaker(config, machine, wiring, folder))
        self.conductors = {
            name: Conductor(ConductorConfig(address=address, name=name)) for name, address in wiring.conductors
        }

    async def restart(self, name: str) -> None:
        await self.conductors[name].close()
        self.conductors[name] = Conductor(self.conductors[name].config)
        await self.conductors[name].start()

    async def until_left(self, *names: str) -> None:
        def all_know() -> bool:
            return all(each.state.roles.all_left() == set(names) for each in self.conductors.values())

        await until(all_know, f"every conductor knows that {names} have left")


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, Lifeline() as lifeline:
        service = Service(Path(folder), lifeline)
        for each in service.conductors.values():
            await each.start()
        await service.control.start()
        yield service
        await service.control.close()
        for each in service.conductors.values():
            await each.close()


async def test_a_worker_killed_before_it_says_that_it_leaves_is_not_missed(service: Service) -> None:
    """One conductor has told it to leave. Another one knows it as registered only, and sees its connection end."""
    conductor = service.conductors["conductor-1"]
    with contextlib.closing(await AsyncClient.connect(conductor.config.address, CONDUCTOR_SERVICE)) as worker:
        await worker.call(RegisterWorker(info("decode-1")))
        service.launcher.retire("decode-1", at_once=False)
        await service.until_left("decode-1")
    await until(lambda: not conductor.state.workers, "it is killed")
    await service.until_left("decode-1")


async def test_a_conductor_that_starts_again_is_told_what_has_left(service: Service) -> None:
    service.launcher.retire("decode-1", at_once=True)
    service.launcher.retire("prefill-1", at_once=True)
    await service.until_left("decode-1", "prefill-1")
    for name in service.conductors:
        await service.restart(name)
    await service.until_left("decode-1", "prefill-1")


async def test_a_worker_that_registers_again_before_it_leaves_has_left_all_the_same(service: Service) -> None:
    """It had not heard yet that it is to leave when its conductor was restarted."""
    service.launcher.retire("decode-1", at_once=False)
    await service.until_left("decode-1")
    conductor = service.conductors["conductor"]
    with contextlib.closing(await AsyncClient.connect(conductor.config.address, CONDUCTOR_SERVICE)) as worker:
        await worker.call(RegisterWorker(info("decode-1")))
    await until(lambda: not conductor.state.workers, "it is killed")
    await service.until_left("decode-1")


async def test_what_a_launcher_said_last_counts_until_another_one_starts_the_worker(service: Service) -> None:
    service.launcher.retire("decode-1", at_once=True)
    await service.until_left("decode-1")
    await service.control.close()
    await until(lambda: not any(each.state.roles.retired for each in service.conductors.values()), "it is gone")
    await service.until_left("decode-1")
    for conductor in service.conductors.values():
        with contextlib.closing(await AsyncClient.connect(conductor.config.address, CONDUCTOR_SERVICE)) as worker:
            await worker.call(RegisterWorker(info("decode-1")))
    await service.until_left()
