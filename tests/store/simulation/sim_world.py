"""A simulated cluster: one master, nodes with and without disks, clients, and the network between them.

Master, node and client are the production classes; what is below them is simulated (sim_patches.py). A supervisor
starts again what died, after a while.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from moonpool.base.errors import MoonpoolError
from moonpool.master.service import Master, MasterConfig
from moonpool.master.state.table import Flag
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node
from moonpool.node.ssd import SsdConfig
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.messages import GRANULE_NBYTES, Placement
from moonpool.transfer.memory.segment import Segment

from .sim_disk import SimOs
from .sim_history import History, describe
from .sim_journal import JournalDisk, SimJournal
from .sim_loop import SimLoop
from .sim_memory import MemoryWatch, SimEngine
from .sim_net import Network
from .sim_scheduler import Process, Scheduler

KIB = 1024
MASTER_ADDRESS = "tcp:master:7700"
CLIENT = ClientConfig(
    connect_timeout_s=1.0,
    rpc_timeout_s=3.0,
    retry_s=3.0,
    transfer_timeout_s=2.0,
    renew_after_s=1.5,
    max_view_nbytes=48 * KIB,
)
RULES: dict[str, Any] = {
    "lease_s": 1.0,
    "put_discard_s": 4.0,
    "put_release_s": 12.0,
    "heartbeat_s": 1.0,
    "segment_ttl_s": 4.0,
    "away_ttl_s": 60.0,
    "max_objects": 512,
    "step_objects": 16,
    "hot_hits": 2,
    "hot_window_s": 2.0,
    "hot_max_part": 0.3,
    "order_timeout_s": 30.0,
    "tick_s": 0.5,
}


class Violation(AssertionError):
    """The store broke a promise."""


class SimNodeConfig(NodeConfig):
    def ssd_log(self) -> SsdConfig:
        return SsdConfig(max_nbytes=self.ssd_nbytes, file_nbytes=64 * KIB, batch_nbytes=64 * KIB)


class SimSegment(Segment):
    """A node's memory, of which every write is watched."""

    watch: MemoryWatch

    @classmethod
    def make(cls, name: str, nbytes: int, watch: MemoryWatch) -> SimSegment:
        made = cls.over(name, bytearray(nbytes), granule_nbytes=GRANULE_NBYTES, incarnation=0)
        assert isinstance(made, SimSegment)
        made.watch = watch
        watch.add(made)
        return made

    def renew(self) -> None:
        made = SimSegment.make(self.name, self.nbytes, self.watch)
        self.fence, self._memory = made.fence, made._memory


class SimNode(Node):
    world: World

    @property
    def is_started(self) -> bool:
        return self._segment is not None

    def _allocate(self) -> Segment:
        return SimSegment.make(self.segment_name, self.config.dram_nbytes, self.world.watch)


class Member:
    """A place for a process: what runs there, and how to start it again."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.process: Process | None = None
        self.program: Any = None  # the Master, Node or client program
        self.num_starts = 0

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive


class World:
    def __init__(self, seed: int, keep_log: bool = False) -> None:
        self.seed = seed
        self.scheduler = Scheduler(seed)
        self.rng = self.scheduler.rng
        self.network = Network(self.scheduler)
        self.disks = SimOs(self.rng)
        self.journal_disk = JournalDisk()
        self.watch = MemoryWatch(self)
        self.history = History(lambda: self.scheduler.now_s, self.violated)
        self.engines: dict[str, SimEngine] = {}
        self.log: list[str] | None = [] if keep_log else None
        self.num_events = 0
        self.stall = 0.0  # how often a pause is a long one
        self.think_s = 0.3  # between two calls of a client
        self.call_s = 0.0  # for so long a call to the master keeps its event loop busy
        self.stop_in_copy: dict[Process, Callable[[], None]] = {}
        self.before_small_put: Callable[[Member], None] = lambda member: None
        self.granules: Sequence[int] = (12, 24, 40)  # of a node's memory
        self.num_nodes = (2, 4)  # at least, at most
        self.far_hosts: Sequence[str] = ("c",)  # of clients that have no node beside them
        self.favoured: dict[str, int] = {}  # calls of clients that have another weight now
        self.before_write: Callable[[], None] = lambda: None
        self.flips = False  # bits are flipped in this world
        self.disk_nodes: set[str] = set()
        self.dram_nbytes: dict[str, int] = {}
        self.snapshot_entries = self.rng.choice((20, 60, 100_000))
        self.sync_s = self.rng.choice((0.1, 1.0))  # of the journal
        self._digest = hashlib.blake2b(digest_size=16)
        self._last_incarnation = 0
        self._supervised = True
        self.master = Member("master", "m")
        self.nodes: list[Member] = []
        self.clients: list[Member] = []
        self.rules = RULES | {
            "eviction": self.rng.choice(("prefix", "lru", "s3fifo")),
            "high_watermark": self.rng.choice((0.8, 0.95)),
            "low_watermark": self.rng.choice((0.6, 0.75)),
        }

    # for the production code's patches

    def incarnation(self) -> int:
        self._last_incarnation = max(self._last_incarnation + 1, int(self.scheduler.now_s * 1e9))
        return self._last_incarnation

    def pause(self) -> None:
        """A moment in which others run; now and then it is long. Some processes are to be stopped right here."""
        process = self.scheduler.current
        stop = None if process is None else self.stop_in_copy.pop(process, None)
        if stop is not None:
            stop()
        self.scheduler.sleep(self.rng.random() * (2.0 if self.rng.random() < self.stall else 0.001))

    def open_journal(self) -> tuple[SimJournal, Any]:
        process = self.scheduler.current
        assert process is not None
        replay = list(self.journal_disk.replay())
        made = SimJournal(self.journal_disk, self.scheduler, process, self.sync_s, self.snapshot_entries)
        return made, iter(replay)

    # telling

    def note(self, what: str, *details: Any) -> None:
        self.num_events += 1
        line = f"{self.scheduler.now_s - 1000:9.4f} {what} {' '.join(describe(each) for each in details)}"
        self._digest.update(line.encode())
        if self.log is not None:
            self.log.append(line)

    def violated(self, sentence: str) -> None:
        self.note("VIOLATION", sentence)
        self.scheduler.fail(Violation(f"seed {self.seed}, {self.scheduler.now_s - 1000:.3f} s: {sentence}"))

    def digest(self) -> str:
        more = f"{self.scheduler.num_items} {self.network.num_messages} {self.scheduler.now_s:.6f}"
        return hashlib.blake2b(self._digest.digest() + more.encode(), digest_size=16).hexdigest()

    # starting

    def build(self) -> None:
        rng = self.rng
        self.start_master()
        for number in range(rng.randint(*self.num_nodes)):
            self.nodes.append(Member(f"n{number}", f"h{number}"))
        self.disk_nodes = {each.name for each in self.nodes if rng.random() < 0.6}
        self.dram_nbytes = {each.name: rng.choice(self.granules) * GRANULE_NBYTES for each in self.nodes}
        for member in self.nodes:
            self.start_node(member)

    def _spawn(self, member: Member) -> Process:
        member.num_starts += 1
        member.program = None if member is not self.master else member.program  # of the master the last state is asked
        process = member.process = Process(f"{member.name}.{member.num_starts}", member.host)
        self.network.dark.discard(member.host)
        self.network.adopt(process)
        return process

    def _run_async(self, member: Member, start: Callable[[], Any], on_end: Callable[[], None]) -> Process:
        process = self._spawn(member)
        loop = SimLoop(self.scheduler, process, self.network)

        async def life() -> None:
            try:
                await start()
            except MoonpoolError as error:
                self.note("ends", process.name, type(error).__name__, error)
                self.scheduler.call_later(0.0, None, self._end_of_life, process, on_end)

        self.scheduler.call_at(self.scheduler.now_s, process, lambda: loop.create_task(life()))
        return process

    def _end_of_life(self, process: Process, on_end: Callable[[], None]) -> None:
        self.scheduler.kill(process)
        on_end()

    def start_master(self) -> None:
        member = self.master
        if member.is_alive:
            return
        config = MasterConfig(data_dir="-", listen=MASTER_ADDRESS, **self.rules)

        async def start() -> None:
            member.program = Master(config)
            await member.program.start()
            await member.program.wait()

        process = self._run_async(member, start, lambda: self.restart_later(self.start_master))
        self.note("start", process.name)

    def start_node(self, member: Member) -> None:
        if member.is_alive:
            return
        ssd: dict[str, Any] = {}
        if member.name in self.disk_nodes:
            ssd = {"ssd_dir": f"/disk/{member.name}", "ssd_nbytes": 8 * 64 * KIB, "ssd_rest_s": 5.0}
        config = SimNodeConfig(
            name=member.name,
            master_address=MASTER_ADDRESS,
            dram_nbytes=self.dram_nbytes[member.name],
            run_dir=f"/run/{member.name}",
            **ssd,
        )

        async def start() -> None:
            member.program = SimNode(config)
            member.program.world = self
            await member.program.start()
            await member.program.wait()

        disk = self.disks.find(f"/disk/{member.name}/")[0]
        process = self._run_async(member, start, lambda: self.restart_later(lambda: self.start_node(member)))
        process.on_death.append(disk.end_process)
        process.on_death.append(lambda: self.history.losses_s.append(self.scheduler.now_s))
        self.note("start", process.name)

    def restart_later(self, start: Callable[[], None], delay_s: float | None = None) -> None:
        delay_s = 0.5 + self.rng.random() * 2 if delay_s is None else delay_s
        self.scheduler.call_later(delay_s, None, start)

    def make_client(self) -> tuple[Store, SimEngine]:
        """In the running thread's process."""
        process = self.scheduler.current
        assert process is not None
        engine = SimEngine(self, process)
        return Store(MASTER_ADDRESS, engine=engine, config=CLIENT), engine  # type: ignore[arg-type]

    def spawn_client(self, member: Member) -> Process:
        return self._spawn(member)

    def flip(self, place: Placement, at: int, bit: int) -> None:
        """A bit of a replica turns over, in memory or on disk."""
        name, _, tier = place.segment.rpartition(".")
        member = next(each for each in self.nodes if each.name == name)
        node = member.program
        if tier == "dram" and member.is_alive and node is not None and node.is_started:
            member.program.segment.memory[place.offset + at] ^= bit
        elif tier == "ssd":
            file = self.disks.find(f"/disk/{name}/")[0].log_files().get(place.offset >> 32)
            if file is not None:
                file.data[(place.offset & 0xFFFFFFFF) + at] ^= bit

    # looking

    @property
    def state(self) -> Any:
        """The master's, of its last life; None before its pool is restored."""
        pool = self.master.program._pool
        return None if pool is None else pool.state

    def is_away(self, key: bytes) -> bool:
        """Whether the object waits on a disk whose node is not there, or is being stored right now."""
        state = self.state
        if state is None:
            return True
        slot = state.index.table.find(key)
        if slot is None:
            return key in state.puts.pending
        return bool(state.index.table.flags[slot] & Flag.DORMANT) or slot is not None

    def check_state(self) -> None:
        if self.master.is_alive and self.state is not None and self.master.program._ticking is not None:
            self.state.check_integrity()

    def note_expelled(self) -> None:
        """The master may take a node for gone that lives: what it held is lost all the same."""
        self.history.losses_s.append(self.scheduler.now_s)
