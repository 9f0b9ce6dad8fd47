"""What goes wrong, when and for how long: chosen by the seed. Each seed has a few kinds of trouble, not all of them.

KINDS are other choices, in which some order of events is frequent that is rare among all troubles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from moonpool.base.errors import MoonpoolError
from moonpool.store.messages import Doubt, HeldItem, Inventory, Segments, Tier

from .sim_scheduler import Process
from .sim_world import Member, World

Strike = Callable[[], None]
STRANGE_EVERY = 10  # seeds, of which one has a process that names strange generations
LOST_GRANTS_EVERY = 3  # storms, of which one has clients that stand still before they write


class Faults:
    """`start_client` brings a client (back) to life."""

    num_keys: Sequence[int] = (4, 12, 30)
    num_clients = (2, 4)  # at least, at most
    master_away_s = 4.0  # at most, after a death

    def __init__(self, world: World, start_client: Callable[[Member], None]) -> None:
        self._world, self._rng = world, world.rng
        self._start_client = start_client
        self.is_over = False
        kinds: dict[str, Strike] = {
            "kill master": self._kill_master,
            "power master": self._power_master,
            "kill node": self._kill_node,
            "power node": self._power_node,
            "kill client": self._kill_client,
            "stop client": self._stop_client,
            "stop node": self._stop_node,
            "stop master": self._stop_master,
            "partition": self._partition,
            "sever": self._sever,
            "spikes": self._spikes,
            "stalls": self._stalls,
            "flip": self._flip,
        }
        self.kinds = self._choose(kinds)
        world.flips = "flip" in self.kinds
        if "stop client" in self.kinds:
            world.before_small_put = self._stop_in_small_put

    def _choose(self, kinds: dict[str, Strike]) -> dict[str, Strike]:
        count = self._rng.choice((0, 1, 2, 3, 4, 6, len(kinds)))
        return {name: kinds[name] for name in self._rng.sample(sorted(kinds), count)}

    def plan(self, duration_s: float) -> None:
        """Troubles from now on, for so long."""
        if self.kinds:
            self._plan(sorted(self.kinds), 0.4, duration_s)
        if self._world.seed % STRANGE_EVERY == STRANGE_EVERY // 2:
            for _ in range(3):
                self._world.scheduler.call_later(self._rng.random() * duration_s, None, self._name_strange_generations)

    def _plan(self, names: list[str], per_s: float, duration_s: float) -> None:
        at_s = 0.0
        while (at_s := at_s + self._rng.expovariate(per_s)) < duration_s:
            self._strike_at(at_s, self._rng.choice(names))

    def _strike_at(self, at_s: float, name: str) -> None:
        self._world.scheduler.call_later(at_s, None, self._strike, name)

    def _strike(self, name: str) -> None:
        if not self.is_over:
            self.kinds[name]()

    def _later(self, most_s: float, action: Callable[..., None], *args: Any) -> None:
        self._world.scheduler.call_later(self._rng.random() * most_s + 0.05, None, action, *args)

    # deaths

    def _kill_master(self) -> None:
        process = self._world.master.process
        if process is not None and process.is_alive:
            self._world.note("kill", process.name)
            self._world.scheduler.kill(process)
            self._later(self.master_away_s, self._world.start_master)

    def _power_master(self) -> None:
        world, process = self._world, self._world.master.process
        if process is None or not process.is_alive:
            return
        world.note("power lost", process.name)
        world.network.lose_power(process)
        world.scheduler.kill(process)
        world.journal_disk.lose_power(self._rng)
        world.history.power_lost(world.journal_disk.synced_s, world.journal_disk.epoch)
        self._later(self.master_away_s, world.start_master)

    def _kill_node(self) -> None:
        member = self._rng.choice(self._world.nodes)
        if member.is_alive and member.process is not None:
            self._world.note("kill", member.process.name)
            self._world.scheduler.kill(member.process)
            self._later(self._rng.choice((2.0, 20.0)), self._world.start_node, member)

    def _power_node(self) -> None:
        """The whole host, with the clients there."""
        world, member = self._world, self._rng.choice(self._world.nodes)
        if not member.is_alive or member.process is None:
            return
        world.note("power lost", member.process.name)
        there = [each for each in world.clients if each.host == member.host and each.is_alive]
        for each in (member, *there):
            assert each.process is not None
            world.network.lose_power(each.process)
            world.scheduler.kill(each.process)
        world.disks.find(f"/disk/{member.name}/")[0].lose_power(self._rng)
        self._later(self._rng.choice((2.0, 20.0)), world.start_node, member)
        for each in there:
            self._later(5.0, self._start_client, each)

    def _kill_client(self) -> None:
        member = self._rng.choice(self._world.clients)
        if member.is_alive and member.process is not None:
            self._world.note("kill", member.process.name)
            self._world.scheduler.kill(member.process)
            self._later(3.0, self._start_client, member)

    # stops

    def _running_client(self) -> Member | None:
        world = self._world
        return next((each for each in world.clients if each.process is world.scheduler.current), None)

    def _stop_client(self) -> None:
        """At any time, or in the middle of a copy."""
        member, most_s = self._rng.choice(self._world.clients), self._rng.choice((2.0, 15.0, 60.0))
        if self._rng.random() < 0.3:
            self._stop(member, most_s)
        elif member.process is not None and member.is_alive:
            self._world.stop_in_copy[member.process] = lambda: self._stop(member, most_s)

    def _stop_in_small_put(self, member: Member) -> None:
        """A client in the middle of writing an object to space that it held before, now and then."""
        if member.process is not None and not self.is_over and self._rng.random() < 0.1:
            most_s = self._rng.choice((2.0, 15.0, 60.0))
            self._world.stop_in_copy[member.process] = lambda: self._stop(member, most_s)

    def _stop_node(self) -> None:
        self._stop(self._rng.choice(self._world.nodes), self._rng.choice((2.0, 20.0)))

    def _stop_master(self) -> None:
        self._stop(self._world.master, self._rng.choice((1.0, 12.0)))

    def _stop(self, member: Member, most_s: float, least_s: float = 0.05) -> None:
        process = member.process
        if process is not None and process.is_alive and not process.is_stopped:
            self._world.note("stop", process.name)
            self._world.scheduler.stop(process)
            scheduler = self._world.scheduler
            delay_s = self._rng.random() * most_s + least_s
            scheduler.call_later(delay_s, None, self.go_on, process, scheduler.now_s)

    def go_on(self, process: Process, since_s: float) -> None:
        if process.is_alive and process.is_stopped:
            self._world.note("go on", process.name)
            process.stopped_s += self._world.scheduler.now_s - since_s
            self._world.scheduler.go_on(process)

    # the network

    def _partition(self) -> None:
        hosts = ["m", *(each.host for each in self._world.nodes), "c"]
        a, b = self._rng.sample(hosts, 2) if self._rng.random() < 0.5 else ("m", self._rng.choice(hosts[1:]))
        self._part(a, b, self._rng.choice((3.0, 15.0)))

    def _part(self, a: str, b: str, most_s: float) -> None:
        self._world.note("partition", a, b)
        self._world.network.partition(a, b)
        self._later(most_s, self._heal, a, b)

    def _heal(self, a: str, b: str) -> None:
        self._world.note("heal", a, b)
        self._world.network.heal(a, b)

    def _sever(self) -> None:
        links = [each for each in self._world.network.links if not each.is_local]
        if links:
            link = self._rng.choice(links)
            self._world.note("sever", link.client.process.name, link.server.process.name)
            self._world.network.sever(link)

    def _spikes(self) -> None:
        self._world.network.spike = 0.1
        self._later(10.0, self._no_spikes)

    def _no_spikes(self) -> None:
        self._world.network.spike = 0.0

    def _stalls(self) -> None:
        self._world.stall = 0.2
        self._later(10.0, self._no_stalls)

    def _no_stalls(self) -> None:
        self._world.stall = 0.0

    # damage

    def _flip(self) -> None:
        """One bit, of an object that is stored where that can be chosen."""
        world, rng = self._world, self._rng
        if not world.master.is_alive or world.state is None:
            return
        table = world.state.index.table
        slots = list(table.slots())
        if not slots:
            return
        slot = rng.choice(slots)
        at = rng.randrange(table.nbytes[slot])
        where = world.state.index.placements(slot)
        if not where:
            return
        place = rng.choice(where)
        world.note("flip", table.keys[slot], place)
        world.history.num_flips += 1
        world.flip(place, at, 1 << rng.randrange(8))

    # strangers

    def _name_strange_generations(self) -> None:
        """A process says of an SSD that it holds what no master, or a later one, has written."""
        world, member = self._world, Member("stranger", "c")
        named = [world.state.generations.last + 2**32 * self._rng.randint(1, 9), 2**63 - 3 - self._rng.randint(0, 9)]
        items = [HeldItem(b"strange", each, 4096, 0, Doubt.SALVAGED) for each in named]  # no master adopts it

        def say() -> None:
            with contextlib.suppress(MoonpoolError), world.make_client()[0] as client:
                for each in client.master.call(Segments()):
                    if each.tier is Tier.SSD:
                        name, incarnation = each.descriptor.name, each.descriptor.incarnation
                        client.master.call(Inventory(name, incarnation, items, False))

        if not self.is_over and world.state is not None:
            world.note("strange generations", *named)
            world.scheduler.start_thread(world.spawn_client(member), say, member.name)

    # the end

    def stop_all(self) -> None:
        """No more troubles; those under way end now."""
        world = self._world
        self.is_over = True
        world.stop_in_copy.clear()
        self._no_spikes()
        self._no_stalls()
        world.call_s = 0.0
        world.network.slow.clear()
        world.network.heal_all()
        for member in (world.master, *world.nodes, *world.clients):
            if member.process is not None and member.process.is_stopped:
                self.go_on(member.process, world.scheduler.now_s)
        world.start_master()
        for member in world.nodes:
            world.start_node(member)


class Storm(Faults):
    """The master dies a few times in quick succession and is soon back each time; little else goes wrong.

    Between a restart and the last node's report the master knows only a part of what its journal has lost. Deaths in
    that time are rare among the troubles of other seeds. Between the bursts there is time to store something.
    """

    master_away_s = 0.5

    def __init__(self, world: World, start_client: Callable[[Member], None]) -> None:
        super().__init__(world, start_client)
        if world.seed % 2:  # the journal loses much that readers still remember, and keys are soon put again
            world.rules |= {"lease_s": 2.5}
            world.sync_s, world.think_s = 1.0, 0.05
        if world.seed % LOST_GRANTS_EVERY == 0:  # the space of most grants is another object's, until it is evicted
            world.rules |= {"lease_s": 0.5}
            world.granules = (12,)
            world.before_write = self._lose_grant

    def _choose(self, kinds: dict[str, Strike]) -> dict[str, Strike]:
        others = ("kill client", "stop client", "stop node", "sever", "spikes")
        names = ["kill master", "power master", *self._rng.sample(others, self._rng.choice((0, 1)))]
        return {"late node": self._late_node} | {name: kinds[name] for name in names}

    def plan(self, duration_s: float) -> None:
        rng, at_s = self._rng, 0.0
        while (at_s := at_s + rng.expovariate(0.4)) < duration_s:
            self._strike_at(at_s, "power master")
            self._strike_at(at_s, "late node")
            for _ in range(rng.randint(1, 3)):
                at_s += 0.3 + rng.random() * 1.5
                self._strike_at(at_s, rng.choice(("kill master", "power master")))
        others = sorted(set(self.kinds) - {"kill master", "late node", "power master"})
        if others:
            self._plan(others, 0.2, duration_s)

    def _lose_grant(self) -> None:
        """A client stands still before it writes. The master loses power, and the grant if its disk has not got it."""
        world, rng = self._world, self._rng
        member = self._running_client()
        if member is not None and not self.is_over and rng.random() < 0.25:
            world.scheduler.call_later(0.0, None, self._strike, "power master")
            self._stop(member, 6.0)
            world.pause()

    def _late_node(self) -> None:
        """The next master hears from it late, or not at all before it dies."""
        self._part("m", self._rng.choice(self._world.nodes).host, 3.0)


# The weights of calls in LateWriters.
_NEVER = dict.fromkeys(("get_into", "exist", "remove", "remove_matching", "pin", "order_about", "ask_why"), 0)
_PUT_MOSTLY = _NEVER | {"put": 48, "get": 4, "view": 0, "view_again_and_again": 0, "close_views": 20}
_VIEW_MOSTLY = _NEVER | {"put": 3, "put_one_by_one": 2, "put_in_pieces": 0, "get": 10, "view": 80}


class LateWriters(Faults):
    """The master forgets what it has granted, and clients write there long after that, while others hold views.

    The pool is one full node with all clients beside it, so that an object has made way for most of what is granted.
    Either the master loses power, with the grants of clients that stand still before they write: the next one has these
    objects again, and the node reports to it late. Or the master forgets the node, which stands still for too long.
    """

    num_keys, num_clients = (30,), (3, 5)
    master_away_s = 0.2

    def __init__(self, world: World, start_client: Callable[[Member], None]) -> None:
        super().__init__(world, start_client)
        world.rules |= {"lease_s": 0.3, "high_watermark": 0.95, "low_watermark": 0.9}
        world.num_nodes, world.granules, world.far_hosts = (1, 1), (24, 40), ()
        world.sync_s, world.snapshot_entries = 1.0, 100_000  # much is lost with power
        world.before_write = self._write_late
        self._late: set[str] = set()  # clients that are to stand still before they write
        self._will_lose_power = False
        self._put_for_now()

    def _choose(self, kinds: dict[str, Strike]) -> dict[str, Strike]:
        own = {"late writers": self._late_writers, "late node": self._late_node, "forgotten node": self._forgotten_node}
        return own | {name: kinds[name] for name in ("power master", "stop node")}

    def plan(self, duration_s: float) -> None:
        for at_s in (1.5, 6.5):
            self._strike_at(at_s, self._rng.choice(("late writers", "late writers", "forgotten node")))

    def _put_for_now(self) -> None:
        self._world.favoured, self._world.think_s = _PUT_MOSTLY, 0.1

    def _view_for(self, seconds: float) -> None:
        self._world.favoured, self._world.think_s = _VIEW_MOSTLY, 0.02
        self._world.scheduler.call_later(seconds, None, self._put_for_now)

    def _late_writers(self) -> None:
        """From now on all but one stand still before they write; soon after the first one the master loses power."""
        reader = self._rng.choice(self._world.clients)
        self._late = {each.name for each in self._world.clients if each is not reader}

    def _write_late(self) -> None:
        world, member = self._world, self._running_client()
        if member is None or self.is_over or member.name not in self._late:
            return
        if not self._will_lose_power:
            self._will_lose_power = True
            world.scheduler.call_later(0.2, None, self._lose_power)
        self._late.discard(member.name)
        self._stop(member, 4.0)
        world.pause()

    def _lose_power(self) -> None:
        self._late.clear()
        self._will_lose_power = False
        self._view_for(4.0)
        self._strike("power master")
        if self._rng.random() < 0.7:
            self._strike("late node")

    def _late_node(self) -> None:
        """The master hears from it late; the clients beside it do not notice."""
        world, process = self._world, self._rng.choice(self._world.nodes).process
        if process is not None:
            world.network.slow[process] = self._rng.choice((0.3, 0.6))
            world.note("slow", process.name, world.network.slow[process])
            world.scheduler.call_later(4.5, None, world.network.slow.pop, process, None)

    def _forgotten_node(self) -> None:
        self._view_for(5.5)
        self._world.scheduler.call_later(0.5, None, self._strike, "stop node")

    def _stop_node(self) -> None:
        """For longer than the master remembers its memory."""
        self._stop(self._rng.choice(self._world.nodes), 1.0, least_s=4.2)


class Busy(Faults):
    """The master is overloaded again and again, so that calls come to their turn when their callers have given up."""

    def _choose(self, kinds: dict[str, Strike]) -> dict[str, Strike]:
        others = ("kill client", "stop client", "stop node", "sever", "spikes", "kill master")
        names = self._rng.sample(others, self._rng.choice((0, 1, 2)))
        return {"overload": self._overload} | {name: kinds[name] for name in names}

    def plan(self, duration_s: float) -> None:
        self._plan(["overload"], 0.4, duration_s)
        others = sorted(set(self.kinds) - {"overload"})
        if others:
            self._plan(others, 0.2, duration_s)

    def _overload(self) -> None:
        """Each call takes the master long, so that others wait in its sockets."""
        self._world.call_s = self._rng.choice((0.05, 0.15, 0.3))
        self._world.note("overload", self._world.call_s)
        self._later(3.0, self._no_overload)

    def _no_overload(self) -> None:
        self._world.note("no overload")
        self._world.call_s = 0.0


# By the option of `python -m tests.store.simulation` that chooses it; without one the first.
KINDS: dict[str, type[Faults]] = {"": Faults, "storm": Storm, "late": LateWriters, "busy": Busy}
