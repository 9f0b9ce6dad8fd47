"""Run as a script by store_pool.RoleProcess: `store_role.py ROLE JSON`. Says one line when it is ready."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from typing import Any

from severe import check_bytes

from moonpool.base.errors import MoonpoolError, NoSpace
from moonpool.master.service import Master, MasterConfig
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.client.put_request import PutRequest
from moonpool.store.client.put_session import PutSession
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

# A host that stalls for a moment is no outage, and a master that was killed comes back.
PATIENT = ClientConfig(retry_s=60.0, rpc_timeout_s=60.0, silence_s=60.0)


def say(line: str) -> None:
    print(line, flush=True)


async def run_master(config: dict[str, Any]) -> None:
    master = Master(MasterConfig(**config))
    say(await master.start())
    await until_terminated()
    await master.close()


async def run_node(config: dict[str, Any]) -> None:
    node = Node(NodeConfig(**config))
    await node.start()
    say("mounted")
    await until_terminated()
    await node.close()


async def until_terminated() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


def begin_and_hang(address: str, run_dir: str, key: str) -> None:
    """Starts a put, writes half of it, and waits to be killed."""
    with (
        TransferEngine(TransferConfig(run_dir=run_dir, tcp_host=None)) as engine,
        Store(address, engine=engine, config=PATIENT) as client,
    ):
        session = client.piece_puts.begin([PutRequest(key.encode(), (4096, 4096))])[0]
        assert isinstance(session, PutSession)
        session.write_piece(0, bytes(4096))
        client.pin_many([b"pinned"])
        say("half written")
        signal.pause()


def write_when_told(address: str, run_dir: str, key: str, nbytes: int, shm: bool) -> None:
    """Starts a put, and waits for SIGUSR1 before it writes the first byte. Says what the write and the end brought."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # before threads are started, which inherit it
    with (
        TransferEngine(TransferConfig(run_dir=run_dir, tcp_host=None, shm=shm)) as engine,
        Store(address, engine=engine, config=PATIENT) as client,
    ):
        session = client.piece_puts.begin([PutRequest(key.encode(), (nbytes,))])[0]
        assert isinstance(session, PutSession)
        (place,) = session.replicas
        say(f"granted {place.generation}")
        signal.sigwait({signal.SIGUSR1})
        try:
            session.write_piece(0, b"\xee" * nbytes)
            error = client.piece_puts.finish([session])[0]
        except MoonpoolError as refused:
            error = refused
        say("stored" if error is None else f"{type(error).__name__}: {error}")


def put_and_hang(address: str, run_dir: str, num_puts: int) -> None:
    """Puts small objects one by one, and waits to be killed with space that was granted ahead."""
    with (
        TransferEngine(TransferConfig(run_dir=run_dir, tcp_host=None)) as engine,
        Store(address, engine=engine, config=PATIENT) as client,
    ):
        for number in range(num_puts):
            client.put(b"hung-%d" % number, b"v")
        say("put")
        signal.pause()


def value_of(number: int) -> bytes:
    return random.Random(number).randbytes(1000 + 37 * number)


def put_and_get(address: str, run_dir: str, seed: int, num_keys: int, shm: bool) -> None:
    """Puts and gets a shared set of keys in an order of its own; every value read must be right."""
    say("begun")
    with (
        TransferEngine(TransferConfig(run_dir=run_dir, tcp_host=None, shm=shm)) as engine,
        Store(address, engine=engine, config=PATIENT) as client,
    ):
        numbers = list(range(num_keys)) * 3
        random.Random(seed).shuffle(numbers)
        num_refused = 0
        for number in numbers:
            key, value = b"key-%d" % number, value_of(number)
            found = client.get(key)
            if found is not None:
                check_bytes(found, value, f"key {number}")
            if found is None:
                try:
                    client.put(key, value)
                except NoSpace:
                    num_refused += 1
        counters = client.counters()
        assert counters["corrupt_replicas"] == 0
        assert counters.get("refused_no_space", 0) == num_refused


def main() -> None:
    role, config = sys.argv[1], json.loads(sys.argv[2])
    if role == "master":
        asyncio.run(run_master(config))
    elif role == "node":
        asyncio.run(run_node(config))
    elif role == "hang":
        begin_and_hang(**config)
    elif role == "write_when_told":
        write_when_told(**config)
    elif role == "put_and_hang":
        put_and_hang(**config)
    else:
        put_and_get(**config)


if __name__ == "__main__":
    main()
