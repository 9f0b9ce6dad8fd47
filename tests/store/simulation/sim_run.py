"""One seed: a world is built, used, troubled, healed and judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moonpool.store import Store

from .sim_client import Program
from .sim_faults import KINDS
from .sim_patches import Here
from .sim_world import Member, World

USED_S = 11.0  # for so long clients work while things go wrong
LEAST_EVENTS = 500  # or longer, until so much has happened
PATIENCE_S = 100.0  # for so long the store may take to be itself again


@dataclass(frozen=True)
class Outcome:
    seed: int
    digest: str  # of the whole history
    num_events: int
    num_messages: int
    num_items: int
    num_acknowledged: int
    num_hits: int
    kinds: tuple[str, ...]
    log: tuple[str, ...]
    failure: BaseException | None


class Simulation:
    def __init__(self, seed: int, keep_log: bool = False, kind: str = "") -> None:
        self.world = World(seed, keep_log)
        rng = self.world.rng
        self.world.think_s = rng.choice((0.1, 0.2, 0.4))
        self._keys = [b"key-%d" % number for number in range(rng.choice(KINDS[kind].num_keys))]
        self._programs: dict[str, Program] = {}
        self.faults = KINDS[kind](self.world, self.start_client)

    def run(self) -> Outcome:
        Here.world = self.world
        failure: BaseException | None = None
        try:
            self._live()
            self._heal()
            self._judge()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the seed's finding
            failure = error
        finally:
            self._end()
        world = self.world
        return Outcome(
            seed=world.seed,
            digest=world.digest(),
            num_events=world.num_events,
            num_messages=world.network.num_messages,
            num_items=world.scheduler.num_items,
            num_acknowledged=world.history.num_acknowledged,
            num_hits=world.history.num_hits,
            kinds=tuple(sorted(self.faults.kinds)),
            log=tuple(world.log or ()),
            failure=failure,
        )

    def start_client(self, member: Member) -> None:
        world = self.world
        if member.is_alive or self.faults.is_over:
            return
        process = world.spawn_client(member)
        program = self._programs[member.name] = Program(world, member, self._keys)
        world.note("start", process.name, process.host)
        world.scheduler.start_thread(process, program.run, member.name)

    # the parts of a seed

    def _live(self) -> None:
        world, rng = self.world, self.world.rng
        world.build()
        world.scheduler.run_for(2.0)
        hosts = [*(each.host for each in world.nodes), *world.far_hosts]
        for number in range(rng.randint(*self.faults.num_clients)):
            member = Member(f"c{number}", rng.choice(hosts))
            world.clients.append(member)
            self.start_client(member)
        self.faults.plan(USED_S)
        until_s = world.scheduler.now_s + USED_S
        while world.scheduler.now_s < until_s or world.num_events + world.network.num_messages < LEAST_EVENTS:
            world.scheduler.run_for(USED_S / 8)
            world.check_state()

    def _heal(self) -> None:
        """Everything runs again; every call that was begun ends."""
        world = self.world
        world.note("heal everything")
        self.faults.stop_all()
        for program in self._programs.values():
            program.wants_end = True
        deadline_s = world.scheduler.now_s + PATIENCE_S
        while any(self._is_busy(member) for member in world.clients):
            world.scheduler.run_for(1.0)
            if world.scheduler.now_s > deadline_s:
                names = [member.name for member in world.clients if self._is_busy(member)]
                world.violated(f"calls of {names} have not ended")
        for member in world.clients:
            if member.process is not None:
                world.scheduler.kill(member.process)
        world.scheduler.run_for(1.0)
        self._restart_drained()

    def _restart_drained(self) -> None:
        """A node that was drained to the end takes part again when it is started anew."""
        world = self.world
        drained = {each.node for each in world.state.table_of_segments.all() if each.draining}
        for member in world.nodes:
            if member.name in drained and member.process is not None:
                world.scheduler.kill(member.process)
                world.start_node(member)

    def _is_busy(self, member: Member) -> bool:
        return member.is_alive and not self._programs[member.name].is_over

    def _judge(self) -> None:
        """All that was acknowledged is there; no key is blocked; what nobody reads has no replicas for its readers; and
        all of it goes when it is told to.
        """
        world = self.world
        self._wait_for("the store to come to rest", self._is_quiet)
        world.check_state()
        member = Member("judge", self.world.rng.choice([each.host for each in world.nodes]))
        world.clients.append(member)
        world.spawn_client(member)
        self._ask(member, self._read_all)
        self._wait_for("the replicas of keys that are not hot any more to go", lambda: not world.state.index.table.hot)
        self._ask(member, lambda client: client.remove_all(force=True))
        self._wait_for("all space to be free", self._is_empty)
        self._ask(member, self._use_every_key)
        self._wait_for("all space to be free again", self._is_empty)
        world.check_state()
        self._check_members()

    def _ask(self, member: Member, question: Callable[[Store], object]) -> None:
        """On a thread of the judge; it ends."""
        world, done = self.world, list[bool]()

        def ask() -> None:
            with world.make_client()[0] as client:
                question(client)

        assert member.process is not None
        thread = world.scheduler.start_thread(member.process, ask, "judge")
        thread.on_end = lambda _, error: done.append(True) if error is None else world.scheduler.fail(error)
        self._wait_for("the judge's calls", lambda: bool(done), 0.2)

    def _wait_for(self, what: str, condition: Callable[[], bool], step_s: float = 1.0) -> None:
        scheduler = self.world.scheduler
        deadline_s = scheduler.now_s + PATIENCE_S
        while not condition():
            scheduler.run_for(step_s)
            if scheduler.now_s > deadline_s:
                self.world.violated(f"waited {PATIENCE_S:g} s for {what}; {self._leftovers()}")

    def _read_all(self, client: Store) -> None:
        world = self.world
        for key in self._keys:
            began_s = world.scheduler.now_s
            data = client.get(key)
            world.note("judge", key, None if data is None else int.from_bytes(data[:8], "little"))
            if data is None:
                world.history.missed(key, began_s, world.is_away)
                if world.state.index.find(key, world.scheduler.now_s) is not None:
                    world.violated(f"{key!r} is stored and cannot be read")
            else:
                world.history.read(key, data, began_s)

    def _use_every_key(self, client: Store) -> None:
        world = self.world
        for number, key in enumerate(self._keys):
            if not client.put(key, b"once more"):
                world.violated(f"{key!r} is blocked")
            if number < 2 and client.get(key) != b"once more":
                world.violated(f"{key!r} cannot be used any more")
            if client.remove_many([key], force=True) != [True]:
                world.violated(f"{key!r} cannot be removed")

    def _is_quiet(self) -> bool:
        """Everybody is there, and nothing is under way."""
        world, state = self.world, self.world.state
        if not world.master.is_alive or state is None:
            return False
        if len(state.orders) or state.puts.pending or not all(self._is_mounted(each) for each in world.nodes):
            return False
        return not state.space.of_puts and not state.space.holding_sessions()

    def _is_mounted(self, member: Member) -> bool:
        """By the process that lives, and in use."""
        node, segments = member.program, self.world.state.table_of_segments
        wanted = [] if node is None or not node.is_started else [node.segment]
        if member.name in self.world.disk_nodes:
            wanted += [] if node is None or node.ssd is None else [node.ssd.segment]
        found = [segments.find(each.name, each.incarnation) for each in wanted]
        usable = [each for each in found if each is not None and each.acknowledged and not each.is_away]
        return len(usable) == 1 + (member.name in self.world.disk_nodes)

    def _is_empty(self) -> bool:
        state = self.world.state
        used = [each for each in state.table_of_segments.all() if each.used_nbytes or each.num_replicas]
        logs = [each.program.ssd.log for each in self.world.nodes if each.program.ssd is not None]
        records = sum(log.stats().num_objects for log in logs)
        return not (used or records or len(state.index.table) or state.puts.pending or len(state.orders))

    def _leftovers(self) -> str:
        state = self.world.state
        parts = [f"{each.name}: {each.status}, {each.used_nbytes} bytes" for each in state.table_of_segments.all()]
        parts.append(f"{len(state.index.table)} objects, {len(state.puts.pending)} puts, {len(state.orders)} orders")
        parts.append(f"{len(state.space.of_puts)} abandoned puts, sessions {state.space.holding_sessions()}")
        for each in self.world.nodes:
            if each.program.ssd is not None:
                parts.append(f"{each.program.ssd.log.stats().num_objects} records in {each.name}")
        return "; ".join(parts)

    def _check_members(self) -> None:
        for member in self.world.nodes:
            if member.program.ssd is not None:
                member.program.ssd.log.check_integrity()

    def _end(self) -> None:
        """Every process of this world is gone, every thread free for the next seed."""
        world = self.world
        scheduler = world.scheduler
        scheduler.is_over = True
        for member in (*world.clients, *world.nodes, world.master):
            if member.process is not None:
                scheduler.kill(member.process)
        scheduler.failure = None
        try:
            scheduler.run_for(0.0)
        except Exception:  # noqa: BLE001 - it has been judged already
            scheduler.failure = None


def run_seed(seed: int, keep_log: bool = False, kind: str = "") -> Outcome:
    """Inside sim_patches.simulated(). A seed has another history with each kind of troubles (sim_faults.KINDS)."""
    return Simulation(seed, keep_log, kind).run()
