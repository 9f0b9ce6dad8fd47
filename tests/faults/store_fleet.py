"""A pool of real processes under test: started, stopped, killed, started again, and asked whether it is in order."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from severe import SevereError
from store_check import CHECK_SERVICE, CheckPool, CheckReport, PassTime, Span, check_address
from store_nursery import Nursery, Role
from store_time import pass_here, passing_time
from waiting import HANG_S, wait_until

from moonpool.base.errors import MoonpoolError, NoSpace
from moonpool.base.rpc import BlockingClient, Call
from moonpool.master.journal import Journal
from moonpool.master.rules import PoolRules
from moonpool.master.state import PoolState
from moonpool.master.state.recovery import restore
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.messages import SERVICE, Lookup, Placement, SegmentInfo, Segments, Stats, StoreStats
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

MIB = 1 << 20
_FAST_DIR = "/dev/shm" if Path("/dev/shm").is_dir() else None  # thousands of syncs, and short names for sockets
# Promises last for long, and pass_time() ends them; but orders to a node, which may still carry them out, last longer.
RULES: dict[str, Any] = {
    "heartbeat_s": 0.1,
    "tick_s": 0.01,
    "segment_ttl_s": 3600.0,
    "lease_s": 60.0,
    "put_discard_s": 60.0,
    "put_release_s": 60.0,
    "order_timeout_s": 36_000.0,
}
PROMISES_S = 61.0  # longer than any of them, but that of a node's memory
# What a client takes for a master or a node that does not answer: tests of it have other limits.
PATIENT: dict[str, Any] = {
    "rpc_timeout_s": 60.0,
    "retry_s": 60.0,
    "connect_timeout_s": 60.0,
    "transfer_timeout_s": 60.0,
    "read_timeout_s": 60.0,
}


def overlap(spans: Iterable[Span], others: Iterable[Span]) -> bool:
    several = list(others)
    return any(
        name == other and at < start + nbytes and start < at + size
        for name, at, size in spans
        for other, start, nbytes in several
    )


class Fleet:
    """One master, nodes by name, and clients in this process. Everything ends with it."""

    def __init__(self, nursery: Nursery, folder: Path, **rules: Any) -> None:
        self.folder = folder
        self.address = f"unix:{folder}/m.sock"
        self.run_dir = str(folder / "run")
        self.rules = {**RULES, **rules}
        self.data_dir = folder / "master"
        self.master: Role | None = None
        self.nodes: dict[str, Role] = {}
        self._node_configs: dict[str, dict[str, Any]] = {}
        self._past: set[int] = set()  # incarnations of segments whose node has ended, as far as they were known
        self._nursery = nursery
        self._has_load = False
        self._stack = ExitStack()

    # processes

    def bear(self, role: str, **config: Any) -> Role:
        made = self._nursery.bear(role, config)
        self._stack.callback(made.close)
        return made

    def start_master(self) -> Role:
        self.master = self.bear("master", data_dir=str(self.data_dir), listen=self.address, **self.rules)
        self.master.expect("ready")
        return self.master

    def start_node(self, name: str, dram_nbytes: int = 16 * MIB, ssd_nbytes: int = 0, **config: Any) -> Role:
        """Also again, after its end; then without any settings."""
        if name not in self._node_configs:
            ssd = {"ssd_dir": str(self.folder / f"{name}.ssd"), "ssd_nbytes": ssd_nbytes} if ssd_nbytes else {}
            self._node_configs[name] = {"dram_nbytes": dram_nbytes, "retry_s": 0.02, **ssd, **config}
        self._past |= {info.descriptor.incarnation for info in self._infos() if info.node == name}
        node = self.nodes[name] = self.bear_node(name, **self._node_configs[name])
        node.expect("ready")
        return node

    def bear_node(self, name: str, **config: Any) -> Role:
        return self.bear("node", **{"name": name, "master_address": self.address, "run_dir": self.run_dir, **config})

    def actor(self, role: str, **config: Any) -> Role:
        """A process that uses the pool."""
        made = self.bear(role, address=self.address, run_dir=self.run_dir, **config)
        self._has_load |= role == "load"
        return made

    def restart_master(self) -> None:
        assert self.master is not None
        self.master.kill()
        self.start_master()
        self.wait_ok()

    # asking

    def client(self, *, shm: bool = True, **config: Any) -> Store:
        settings = ClientConfig(**PATIENT | config)
        timeout_s = settings.transfer_timeout_s
        engine = TransferEngine(TransferConfig(run_dir=self.run_dir, shm=shm, tcp_host=None, timeout_s=timeout_s))
        self._stack.callback(engine.close)
        return self._stack.enter_context(Store(self.address, engine=engine, config=settings))

    def ask(self, call: Call[Any]) -> Any:
        with closing(BlockingClient(self.address, SERVICE)) as client:
            return client.call(call, timeout_s=HANG_S)

    def report(self) -> CheckReport:
        with closing(BlockingClient(check_address(self.address), CHECK_SERVICE)) as client:
            return client.call(CheckPool(), timeout_s=HANG_S)

    def check(self) -> CheckReport:
        report = self.report()
        if report.problem is not None:
            raise SevereError(f"the master's state: {report.problem}")
        return report

    def pass_time(self, seconds: float = PROMISES_S) -> None:
        """Let so much time pass at once, here and at the master. Nobody else may be reading or writing."""
        assert not self._has_load, "loads rely on promises"
        pass_here(seconds)
        with closing(BlockingClient(check_address(self.address), CHECK_SERVICE)) as client:
            client.call(PassTime(seconds), timeout_s=HANG_S)

    def wait_settled(self) -> None:
        """No put is open, no space on its way, and no process holds a pin, once every promise has ended."""
        wait_until(lambda: not self.check().on_its_way["copy"], "nodes copy nothing")
        wait_until(self._is_settled, "no space is lost and no key is blocked")

    def _is_settled(self) -> bool:
        report = self.check()
        is_held = bool(report.homeless or report.num_pins)
        if is_held and not self._has_load:
            self.pass_time()  # once for each promise: a put is given up, and then its space is kept for its writer
        return not is_held

    def wait_ok(self) -> None:
        """Every segment takes part."""
        expected = {f"{name}.dram" for name in self.nodes}
        expected |= {f"{name}.ssd" for name in self.nodes if "ssd_dir" in self._node_configs[name]}
        wait_until(lambda: expected <= self._names_ok(), f"{expected} are ok")

    def _names_ok(self) -> set[str]:
        current = {each.descriptor.name for each in self._infos() if each.descriptor.incarnation not in self._past}
        try:
            return {each.name for each in self.stats().segments if each.status == "ok" and each.name in current}
        except MoonpoolError:
            return set()

    def _infos(self) -> list[SegmentInfo]:
        """What the master knows; nothing while it is away."""
        with contextlib.suppress(MoonpoolError):
            infos: list[SegmentInfo] = self.ask(Segments())
            return infos
        return []

    def stats(self) -> StoreStats:
        stats: StoreStats = self.ask(Stats())
        return stats

    def counter(self, name: str) -> int:
        """One of the master's."""
        return self.stats().counters.get(name, 0)

    def places(self, keys: Iterable[bytes]) -> dict[bytes, tuple[Placement, ...]]:
        """Where the stored ones lie; grants no lease."""
        asked = list(keys)
        found = self.ask(Lookup(keys=asked, lease=False))
        return {key: info.replicas for key, info in zip(asked, found, strict=True) if info is not None}

    def spans(self, keys: Iterable[bytes]) -> list[Span]:
        """The space that the stored ones take."""
        found = self.ask(Lookup(keys=list(keys), lease=False))
        return [(p.segment, p.offset, info.nbytes) for info in found if info is not None for p in info.replicas]

    def port_of(self, segment: str) -> int:
        """Where its node serves it by tcp."""
        infos = {info.descriptor.name: info.descriptor for info in self.ask(Segments())}
        (endpoint,) = [each for each in infos[segment].endpoints if each.startswith("tcp:")]
        return int(endpoint.rpartition(":")[2])

    def restored(self) -> PoolState:
        """The state as a master would find it in the journal now."""
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            copied = Path(scratch) / "data"
            _copy_folder(self.data_dir, copied)
            names = PoolRules.__dataclass_fields__
            rules = PoolRules(**{name: value for name, value in self.rules.items() if name in names})
            journal, replay = Journal.open(copied)
            try:
                state = PoolState(rules, journal.epoch, journalled=True)
                restore(state, replay, 0.0)
                return state
            finally:
                journal.close()

    def close(self) -> None:
        self._stack.close()


def fill(client: Store, prefix: bytes, value: Callable[[int], bytes]) -> list[bytes]:
    """Puts objects that nothing evicts until there is no space for another one; their keys."""
    keys: list[bytes] = []
    while True:
        key = b"%s-%d" % (prefix, len(keys))
        try:
            assert client.put(key, value(len(keys)), pinned=True)
        except NoSpace:
            return keys
        keys.append(key)


@contextmanager
def open_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mp-", dir=_FAST_DIR) as made:
        yield Path(made)


@contextmanager
def open_fleet(nursery: Nursery, *, start: bool = True, **rules: Any) -> Iterator[Fleet]:
    """With a master, and no node yet."""
    with passing_time(), open_folder() as folder:
        fleet = Fleet(nursery, folder, **rules)
        try:
            if start:
                fleet.start_master()
            yield fleet
        finally:
            fleet.close()


def _copy_folder(source: Path, target: Path) -> None:
    """Copy the master's folder while the master uses it: again when a file was replaced or removed meanwhile."""
    while True:
        try:
            shutil.copytree(source, target)
            return
        except shutil.Error as error:
            if any("No such file" not in why for _, _, why in error.args[0]):
                raise
            shutil.rmtree(target)
