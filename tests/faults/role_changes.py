"""Changing the roles of a cluster's workers, as an operator does."""

from __future__ import annotations

from tiny_cluster import TinyCluster

from moonpool.base.cluster import CONDUCTOR_SERVICE, WorkerRole
from moonpool.base.rpc import AsyncClient
from moonpool.conductor.messages import SetRole
from moonpool.conductor.service import Conductor


def roles_known_to(conductor: Conductor) -> dict[str, WorkerRole]:
    return {worker.info.name: worker.info.role for worker in conductor.state.workers}


def roles(cluster: TinyCluster) -> dict[str, WorkerRole]:
    return roles_known_to(cluster.conductor)


async def set_role(cluster: TinyCluster, worker: str, role: WorkerRole | None) -> None:
    client = await AsyncClient.connect(cluster.address_of("c.sock"), CONDUCTOR_SERVICE, name="test")
    try:
        await client.call(SetRole(worker=worker, role=role))
    finally:
        client.close()


async def change(cluster: TinyCluster, worker: str, role: WorkerRole) -> None:
    await set_role(cluster, worker, role)
    await cluster.until(lambda: roles(cluster).get(worker) is role, f"{worker} is {role}")
