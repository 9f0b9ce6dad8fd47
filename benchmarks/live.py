"""Figures of the live system that changes its shape.

    python benchmarks/live.py --json [--only hot|swing]

hot: 8 clients read one prefix of 64 blocks again and again. Two nodes hold the pool, each behind a link of 1 Gbit/s;
the clients' own link is not shaped. Machines are network namespaces; needs root. The pool is full: another client gets
other objects beside them, some more often than others, and puts what it does not find; together these are larger than
the pool. In the first pool the prefix keeps its one replica (`--hot-hits 0`). In the second, with the master's
defaults, it becomes hot and gets a second replica on the other node, in place of other objects. Both pools are on the
same machines and are measured in turns, with the same gets of other objects: their hit rates are compared, too. A
client is a process with a Store; each checks what it reads. In the end no client reads, and the extra replicas go.

swing: roles that follow a load that swings between long prompts and long answers, against every fixed split of four
workers, each held to a slow processor of its own (_live_swing.py). Four phases of 60 s take about 5 minutes for each of
3P1D, 2P2D, 1P3D and elastic; `--splits elastic --phases 12` has more than 20 role changes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from _live_swing import ELASTIC, SPLITS, measure_swing
from _machines_lab import Machine, MachinesLab, missing

from moonpool.bench.report import BenchReport, bench_parser
from moonpool.store import Store
from moonpool.store.client import ClientConfig, Put, PutOptions

NUM_BLOCKS = 64
_DRAM_NBYTES = 1 << 30
_HOT_WITHIN_S = 60.0
_OTHER_NBYTES = 256 << 10
_OTHERS_PART = 1.5  # of the pool's bytes are all other objects together
_SKEW = 0.7  # of the uses of other objects: rank r is used in proportion to r ** -_SKEW
_COOL_WITHIN_S = 60.0
_PORTS = {"one replica": (7700, 7701), "two replicas": (7710, 7711)}  # master, node


def blocks(nbytes: int) -> dict[bytes, bytes]:
    """The prefix: the same in every process."""
    rng = np.random.default_rng(5)
    return {b"block-%d" % number: rng.bytes(nbytes) for number in range(NUM_BLOCKS)}


# -- a client ----------------------------------------------------------------------------------------------------------


def client_main(run_dir: str, block_nbytes: str, masters: str) -> None:
    """Answer each line, {"pool": name, "times": how often to read the prefix}, when the reads are done."""
    expected = blocks(int(block_nbytes))
    buffers = [bytearray(len(value)) for value in expected.values()]
    with contextlib.ExitStack() as stack:
        stores = {
            name: stack.enter_context(Store(address, config=ClientConfig(name="live", retry_s=10.0)))
            for name, address in json.loads(masters).items()
        }
        print("ready", flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            for _ in range(command["times"]):
                sizes = stores[command["pool"]].get_many_into(expected, buffers)
                if sizes != [len(value) for value in expected.values()]:
                    raise SystemExit(f"the prefix could not be read: {sizes}")
            print(json.dumps(list(map(bytes.__eq__, map(bytes, buffers), expected.values())).count(False)), flush=True)


def others_main(masters: str, dram_nbytes: str) -> None:
    """Do the gets of each line, {"pool": name, "seed": number, "gets": count}, and answer with the number of hits.
    What is not found is put. With "gets" 0, put all objects once.
    """
    count = int(_OTHERS_PART * 2 * int(dram_nbytes)) // _OTHER_NBYTES
    weights = np.arange(1, count + 1) ** -_SKEW
    value = np.random.default_rng(6).bytes(_OTHER_NBYTES)
    with contextlib.ExitStack() as stack:
        stores = {name: stack.enter_context(Store(at)) for name, at in json.loads(masters).items()}
        print("ready", flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            store, rng = stores[command["pool"]], np.random.default_rng(command["seed"])
            if not command["gets"]:
                for first in range(0, count, 64):
                    store.put_many({b"other-%d" % number: value for number in range(first, min(first + 64, count))})
            num_hits = 0
            for number in rng.choice(count, command["gets"], p=weights / weights.sum()).tolist():
                found = store.get(b"other-%d" % number)
                num_hits += found is not None
                if found is None:
                    store.put(b"other-%d" % number, value)
                elif found != value:
                    raise SystemExit(f"other-{number} is wrong")
            print(num_hits, flush=True)


class Client:
    """A process of this file on a machine."""

    def __init__(self, machine: Machine, kind: str, *arguments: str) -> None:
        command = machine.inside(sys.executable, __file__, f"--as-{kind}", *arguments)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, **command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def receive(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a client ended with {self._process.wait(10)}")
        return line.strip()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)  # its standard input ends
        self._process.kill()
        self._process.wait()


# -- the lab -----------------------------------------------------------------------------------------------------------


class HotPrefixLab:
    """Two pools on two machines behind shaped links, and clients on a third."""

    def __init__(self, num_clients: int, block_nbytes: int, rate_mbit: int) -> None:
        self._num_clients, self._block_nbytes, self._rate_mbit = num_clients, block_nbytes, rate_mbit
        self._undo = contextlib.ExitStack()
        self._addresses: dict[str, str] = {}
        self.clients: list[Client] = []

    def __enter__(self) -> HotPrefixLab:
        with contextlib.ExitStack() as undo:
            rates = {0: self._rate_mbit, 1: self._rate_mbit}
            *self._nodes, self._here = undo.enter_context(MachinesLab(3, rates_mbit=rates))
            for pool, (master_port, node_port) in _PORTS.items():
                self._start_pool(pool, master_port, node_port)
            masters = json.dumps(self._addresses)
            self._others = Client(self._here, "others", masters, str(_DRAM_NBYTES))
            undo.callback(self._others.close)
            assert self._others.receive() == "ready"
            for pool in _PORTS:
                self._others.send(pool=pool, seed=0, gets=0)
                self._others.receive()
            self._in_here("put", masters)
            for number in range(self._num_clients):
                self.clients.append(
                    Client(self._here, "client", str(self._here.run_dir), str(self._block_nbytes), masters)
                )
                undo.callback(self.clients[number].close)
            for client in self.clients:
                assert client.receive() == "ready"
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _start_pool(self, pool: str, master_port: int, node_port: int) -> None:
        address = self._addresses[pool] = f"tcp:{self._here.address}:{master_port}"
        folder, name = self._here.folder, pool.split()[0]
        rules = ("--hot-hits", "0") if pool == "one replica" else ()
        options = ("--data-dir", str(folder / name), "--listen", address, *rules)
        self._here.start(f"master-{name}", "master", *options).ready()
        for number, machine in enumerate(self._nodes):
            own = ("--name", f"node-{number}", "--master", address, "--dram", str(_DRAM_NBYTES))
            wires = (
                "--run-dir",
                str(machine.run_dir / name),
                "--tcp-host",
                machine.address,
                "--tcp-port",
                str(node_port),
            )
            machine.start(f"node-{name}", "node", *own, *wires).ready()

    def read(self, pool: str, times: int, gets: int = 0, seed: int = 1) -> tuple[float, int]:
        """Let all clients read the prefix so often, beside so many gets of other objects. Return how much of the prefix
        they got together per second, and how many of the gets were hits.
        """
        if gets:
            self._others.send(pool=pool, seed=seed, gets=gets)
        began_s = time.monotonic()
        for client in self.clients:
            client.send(pool=pool, times=times)
        wrong = sum(int(client.receive()) for client in self.clients)
        if wrong:
            raise SystemExit(f"{wrong} blocks were wrong")
        took_s = time.monotonic() - began_s
        hits = int(self._others.receive()) if gets else 0
        return len(self.clients) * times * NUM_BLOCKS * self._block_nbytes / took_s, hits

    def sent_nbytes(self) -> list[int]:
        """By the link of each node's machine."""
        return [machine.sent_nbytes() for machine in self._nodes]

    def counted(self, pool: str) -> dict[str, int]:
        """The counters of the pool's master, and the bytes of its memory: `used` of `capacity`."""
        found: dict[str, int] = json.loads(self._in_here("count", self._addresses[pool]))
        return found

    def _in_here(self, *arguments: str) -> str:
        """Run a command of this file on the clients' machine; return what it prints."""
        command = self._here.inside(
            sys.executable, __file__, f"--as-{arguments[0]}", *arguments[1:], str(self._block_nbytes)
        )
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout


def put_main(masters: str, block_nbytes: str) -> None:
    """Store the prefix in each pool, on the first node."""
    prefix, options = blocks(int(block_nbytes)), PutOptions(preferred=("node-0.dram",))
    parents = [b"", *prefix]
    puts = [
        Put(key, [value], options=options, parent=parent)
        for (key, value), parent in zip(prefix.items(), parents, strict=False)
    ]
    for address in json.loads(masters).values():
        with Store(address) as store:
            failed = [error for error in store.put_objects(puts) if error is not None]
            if failed:
                raise SystemExit(f"the prefix could not be stored: {failed[0]}")


def count_main(master: str, _block_nbytes: str) -> None:
    with Store(master) as store:
        stats = store.stats()
        print(json.dumps({**stats.counters, "used": stats.used_nbytes, "capacity": stats.capacity_nbytes}))


def measure_hot(options: argparse.Namespace) -> Iterator[tuple[str, float, str]]:
    one, two = _PORTS
    rates: dict[str, list[float]] = {one: [], two: []}
    hits: dict[str, int] = {one: 0, two: 0}
    shares: list[float] = []
    with HotPrefixLab(options.clients, options.block_kib << 10, options.rate_mbit) as lab:
        for pool in (one, two):  # so that both have learned which of the other objects are used often
            for seed in range(1000, 1010):
                lab.read(pool, 1, options.gets, seed)  # the prefix, too: it would be evicted
        hot_after_s = _make_hot(lab, two)
        full = [counted["used"] / counted["capacity"] for counted in map(lab.counted, (one, two))]
        for seed in range(1, options.rounds + 1):
            for pool in (one, two):
                if pool == two:  # it cools while the other one is measured
                    _make_hot(lab, two)
                before = lab.sent_nbytes()
                rate, found = lab.read(pool, options.times, options.gets, seed)
                sent = [after - earlier for after, earlier in zip(lab.sent_nbytes(), before, strict=True)]
                rates[pool].append(rate)
                hits[pool] += found
            shares.append(max(sent) / sum(sent))
        counted = lab.counted(two)
        cool_after_s = _wait_until_cool(lab, two)
    case = f"hot prefix, {options.clients} clients, {NUM_BLOCKS} blocks of {options.block_kib} KiB"
    for name, measured in rates.items():
        yield f"{case}: {name}", statistics.median(measured) / 1e6, "MB/s"
    ratio = statistics.median(after / before for before, after in zip(rates[one], rates[two], strict=True))
    yield f"{case}: two replicas against one", ratio, "x"
    yield f"{case}: share of the busier link with two replicas", statistics.median(shares), ""
    gets = options.gets * options.rounds
    for name, count in hits.items():
        yield f"{case}: hit rate of other objects, {name}", count / gets, ""
    yield (
        f"{case}: hit rate of other objects, lost by the second replica",
        100 * (hits[one] - hits[two]) / gets,
        "points",
    )
    yield f"{case}: used part of the pool when it became hot", min(full), ""
    yield f"{case}: extra replicas", counted["hot_bytes"] / 1e6, "MB"
    yield f"{case}: read from them, as the master estimates", counted["hot_saved_bytes"] / 1e6, "MB"
    yield f"{case}: until all blocks have two replicas and all clients read both", hot_after_s, "s"
    yield f"{case}: from the last read until no extra replica is left", cool_after_s, "s"


def _wait_until_cool(lab: HotPrefixLab, pool: str) -> float:
    """Wait until the pool has no extra replica; return how long that took."""
    began_s = time.monotonic()
    while lab.counted(pool)["hot_bytes"]:
        if time.monotonic() - began_s > _COOL_WITHIN_S:
            raise SystemExit(f"extra replicas did not go: {lab.counted(pool)}")
        time.sleep(0.2)
    return time.monotonic() - began_s


def measure(options: argparse.Namespace) -> Iterator[tuple[str, float, str]]:
    if options.only != "swing":
        yield from measure_hot(options)
    if options.only != "hot":
        yield from measure_swing(options.splits, options.phases, options.phase_s, options.seed)


def _make_hot(lab: HotPrefixLab, pool: str) -> float:
    """Read until every block has its second replica and both links carry a fair part; return how long that took."""
    began_s = time.monotonic()
    while True:
        before = lab.sent_nbytes()
        lab.read(pool, 1)
        sent = [after - earlier for after, earlier in zip(lab.sent_nbytes(), before, strict=True)]
        took_s = time.monotonic() - began_s
        counted = lab.counted(pool)
        if counted["hot_objects"] == NUM_BLOCKS and min(sent) > 0.4 * sum(sent):
            return took_s
        if took_s > _HOT_WITHIN_S:
            raise SystemExit(f"the prefix did not become hot: {counted}, links sent {sent}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--clients", type=int, default=8, help="processes that read")
    parser.add_argument("--block-kib", type=int, default=512, help="size of a block")
    parser.add_argument("--rate-mbit", type=int, default=1000, help="rate of each node's link")
    parser.add_argument("--times", type=int, default=3, help="how often each client reads the prefix per round")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; medians are reported")
    parser.add_argument("--gets", type=int, default=600, help="gets of other objects per round")
    parser.add_argument("--only", choices=("hot", "swing"), help="one part; default: both")
    parser.add_argument("--splits", nargs="+", choices=[*SPLITS, ELASTIC], default=[*SPLITS, ELASTIC])
    parser.add_argument("--phases", type=int, default=4, help="of the load that swings")
    parser.add_argument("--phase-s", type=float, default=60.0, help="how long each of them lasts")
    parser.add_argument("--seed", type=int, default=1, help="of that load")
    options = parser.parse_args(arguments)
    reason = None if options.only == "swing" else missing()
    if reason is not None:
        raise SystemExit(reason)
    report = BenchReport.from_options("live", options)
    for case, value, unit in measure(options):
        report.add(case, value, unit)


if __name__ == "__main__":
    parts: dict[str, Callable[..., None]] = {
        "--as-client": client_main,
        "--as-others": others_main,
        "--as-put": put_main,
        "--as-count": count_main,
    }
    if len(sys.argv) > 1 and sys.argv[1] in parts:
        parts[sys.argv[1]](*sys.argv[2:])
    else:
        main()
