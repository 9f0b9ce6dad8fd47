"""kill -9 of clients, nodes and the master at random moments under load.

After every round: nothing acknowledged is lost that was on a disk or on a node that lived; nothing removed or replaced
has come back; every byte is right; no key is blocked, no space is lost; and the journal tells the same as the master.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from severe import LostObject
from store_fleet import MIB, Fleet, open_fleet
from store_load import ABSENT, KEYS_EACH, Ledger, check_ledgers, key_of, read_ledger, wait_acknowledged
from store_nursery import Nursery, Role, open_nursery
from store_values import version_in

from moonpool.store import Store
from moonpool.store.messages import ListObjects, Tier

NUM_CLIENTS = 2
NUM_KEYS = 16
MAX_NBYTES = 60_000
NUMBERS = [client * KEYS_EACH + n for client in range(NUM_CLIENTS) for n in range(NUM_KEYS)]
VICTIMS = [
    ("master",),
    ("n0",),
    ("n1",),
    ("client",),
    ("client", "n0"),
    ("master", "n1"),
    ("client", "master"),
    ("client", "master", "n0", "n1"),
]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with open_nursery() as made:
        yield made


class Siege:
    """A fleet under load, and what must hold of it."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.rng = random.Random(seed)
        self.loads = [self._start_load(number) for number in range(NUM_CLIENTS)]
        self.client = fleet.client()
        self.lost: dict[int, int] = {}  # the version that died with its node, by number

    def _start_load(self, number: int) -> Role:
        load = self.fleet.actor(
            "load",
            ledger=str(self._ledger_path(number)),
            client_number=number,
            num_clients=NUM_CLIENTS,
            num_keys=NUM_KEYS,
            max_nbytes=MAX_NBYTES,
            seed=self.rng.getrandbits(32),
            shm=self.rng.random() < 0.7,
        )
        load.expect("ready")
        load.expect("paused")
        return load

    def _ledger_path(self, number: int) -> Path:
        return self.fleet.folder / f"ledger-{number}"

    def ledgers(self) -> list[Ledger]:
        return [read_ledger(self._ledger_path(number)) for number in range(NUM_CLIENTS)]

    def round(self, victims: tuple[str, ...]) -> None:
        for load in self.loads:
            load.say("go")
        paths = [self._ledger_path(number) for number in range(NUM_CLIENTS)]
        wait_acknowledged(paths, self.rng.randint(11, 60))  # any moment will do
        surveyed_s = time.monotonic()
        safe = self._safe_from(victims)
        unlucky = self.rng.randrange(NUM_CLIENTS)
        roles = [self._role(victim, unlucky) for victim in victims]
        self.rng.shuffle(roles)
        for role in roles:
            role.kill()
        self._bring_back(victims, unlucky)
        for number, load in enumerate(self.loads):
            if "client" not in victims or number != unlucky:
                load.say("pause")
                load.expect("paused")
        self.fleet.wait_ok()
        self.check(safe, surveyed_s, is_all_safe=not {"n0", "n1"} & set(victims))

    def _safe_from(self, victims: tuple[str, ...]) -> dict[bytes, list[str]]:
        """Keys that lie on a disk or on a node that is going to live, and where."""
        doomed = {f"{name}.dram" for name in victims}
        places = self.fleet.places(map(key_of, NUMBERS))
        safe = {key: [each.segment for each in found if each.segment not in doomed] for key, found in places.items()}
        return {key: segments for key, segments in safe.items() if segments}

    def _role(self, victim: str, unlucky: int) -> Role:
        if victim == "client":
            return self.loads[unlucky]
        role = self.fleet.master if victim == "master" else self.fleet.nodes[victim]
        assert role is not None
        return role

    def _bring_back(self, victims: tuple[str, ...], unlucky: int) -> None:
        for victim in sorted(victims, key=("master", "n0", "n1", "client").index):
            if victim == "master":
                self.fleet.start_master()
            elif victim != "client":
                self.fleet.start_node(victim)
        if "client" in victims:
            self.loads[unlucky] = self._start_load(unlucky)

    def check(self, safe: dict[bytes, list[str]], surveyed_s: float, is_all_safe: bool) -> None:
        ledgers = self.ledgers()
        check_ledgers(ledgers)
        self.fleet.wait_settled()
        for number in NUMBERS:
            ledger = ledgers[number // KEYS_EACH]
            found = self._version(self.client, number)
            version, _ = ledger.acknowledged.get(number, (ABSENT, 0.0))
            if found != ABSENT:
                if found not in ledger.allowed(number) or self.lost.get(number) == found:
                    raise LostObject(f"version {found} of {number} has come back")
            elif self.lost.get(number) != version:
                must_be_there = ledger.is_certain(number, time.monotonic() if is_all_safe else surveyed_s)
                if must_be_there and (is_all_safe or key_of(number) in safe):
                    raise LostObject(f"{number} was on {safe.get(key_of(number))}: {self.client.why(key_of(number))}")
                self.lost[number] = version
        self._check_journal()

    @staticmethod
    def _version(client: Store, number: int) -> int:
        """A read that takes longer than its lease is a miss too: it is asked again."""
        key = key_of(number)
        for _ in range(20):
            data = client.get(key)
            if data is not None or not client.exist(key):
                break
        return ABSENT if data is None else version_in(data, number)

    def _check_journal(self) -> None:
        """What the journal says is in order, and is what the master says."""
        restored = self.fleet.restored()
        restored.check_integrity()
        listed = self.fleet.ask(ListObjects(limit=10_000)).objects
        assert {each.key for each in restored.list_objects(None, 0, 10_000, 0.0).objects} == {e.key for e in listed}


def besiege(nursery: Nursery, seed: int, num_rounds: int) -> None:
    with open_fleet(nursery, put_discard_s=0.5, put_release_s=0.6, hot_hits=4, lease_s=0.3) as fleet:
        for name in ("n0", "n1"):
            fleet.start_node(name, dram_nbytes=64 * MIB, ssd_nbytes=64 * MIB, ssd_rest_s=0.5)
        fleet.wait_ok()
        siege = Siege(fleet, seed)
        for number in range(num_rounds):
            siege.round(VICTIMS[number % len(VICTIMS)] if number < len(VICTIMS) else siege.rng.choice(VICTIMS))
        assert sum(ledger.num_acknowledged for ledger in siege.ledgers()) > 10 * num_rounds
        on_disk = [each.num_objects for each in fleet.stats().segments if each.tier is Tier.SSD]
        assert sum(on_disk) > 0, "else nothing was shown about disks"
        for number in NUMBERS:  # no key is blocked
            assert siege.client.remove_many([key_of(number)], force=True) == [True]
            assert siege.client.put(key_of(number), b"free")


@pytest.mark.parametrize("seed", range(2))
def test_kills_under_load(nursery: Nursery, seed: int) -> None:
    besiege(nursery, seed, len(VICTIMS))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 104))
def test_many_kills_under_load(nursery: Nursery, seed: int) -> None:
    besiege(nursery, seed, 50)
