"""Figures of the live system that changes its shape.

    python benchmarks/live.py --json [--only hot|swing]

hot: 8 clients read one prefix of 64 blocks again and again. Two nodes hold the pool, each behind a link of 1 Gbit/s;
the clients' own link is not shaped. Machines are network namespaces; needs root. In the first pool the prefix keeps its
one replica (`--hot-hits 0`). In the second, with the master's defaults, it becomes hot and gets a second replica on the
other node. Both pools are on the same machines and are measured in turns. A client is a process with a Store; each
checks what it reads.

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
from moonpool.store.client import ClientConfig

NUM_BLOCKS = 64
_DRAM_NBYTES = 1 << 30
_HOT_WITHIN_S = 60.0
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


class Client:
    """A process of this file on a machine."""

    def __init__(self, machine: Machine, *arguments: str) -> None:
        command = machine.inside(sys.executable, __file__, "--as-client", *arguments)
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
            self._in_here("put", json.dumps(self._addresses))
            for number in range(self._num_clients):
                arguments = (str(self._here.run_dir), str(self._block_nbytes), json.dumps(self._addresses))
                self.clients.append(Client(self._here, *arguments))
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

    def read(self, pool: str, times: int) -> float:
        """Let all clients read the prefix so often. Return the bytes per second that they got together."""
        began_s = time.monotonic()
        for client in self.clients:
            client.send(pool=pool, times=times)
        wrong = sum(int(client.receive()) for client in self.clients)
        if wrong:
            raise SystemExit(f"{wrong} blocks were wrong")
        return len(self.clients) * times * NUM_BLOCKS * self._block_nbytes / (time.monotonic() - began_s)

    def sent_nbytes(self) -> list[int]:
        """By the link of each node's machine."""
        return [machine.sent_nbytes() for machine in self._nodes]

    def num_hot_replicas(self, pool: str) -> int:
        return int(self._in_here("count", self._addresses[pool]))

    def _in_here(self, *arguments: str) -> str:
        """Run a command of this file on the clients' machine; return what it prints."""
        command = self._here.inside(
            sys.executable, __file__, f"--as-{arguments[0]}", *arguments[1:], str(self._block_nbytes)
        )
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout


def put_main(masters: str, block_nbytes: str) -> None:
    """Store the prefix in each pool, in one batch: it lies on one node."""
    for address in json.loads(masters).values():
        with Store(address) as store:
            failed = [error for error in store.put_many(blocks(int(block_nbytes))) if error is not None]
            if failed:
                raise SystemExit(f"the prefix could not be stored: {failed[0]}")


def count_main(master: str, _block_nbytes: str) -> None:
    with Store(master) as store:
        print(store.stats().counters.get("hot_replicas", 0))


def measure_hot(options: argparse.Namespace) -> Iterator[tuple[str, float, str]]:
    one, two = _PORTS
    rates: dict[str, list[float]] = {one: [], two: []}
    shares: list[float] = []
    with HotPrefixLab(options.clients, options.block_kib << 10, options.rate_mbit) as lab:
        hot_after_s = _make_hot(lab, two)
        for _ in range(options.rounds):
            rates[one].append(lab.read(one, options.times))
            before = lab.sent_nbytes()
            rates[two].append(lab.read(two, options.times))
            sent = [after - earlier for after, earlier in zip(lab.sent_nbytes(), before, strict=True)]
            shares.append(max(sent) / sum(sent))
    case = f"hot prefix, {options.clients} clients, {NUM_BLOCKS} blocks of {options.block_kib} KiB"
    for name, found in rates.items():
        yield f"{case}: {name}", statistics.median(found) / 1e6, "MB/s"
    ratio = statistics.median(after / before for before, after in zip(rates[one], rates[two], strict=True))
    yield f"{case}: two replicas against one", ratio, "x"
    yield f"{case}: share of the busier link with two replicas", statistics.median(shares), ""
    yield f"{case}: until all blocks have two replicas and all clients read both", hot_after_s, "s"


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
        if lab.num_hot_replicas(pool) == NUM_BLOCKS and min(sent) > 0.4 * sum(sent):
            return took_s
        if took_s > _HOT_WITHIN_S:
            raise SystemExit(f"the prefix did not become hot: {lab.num_hot_replicas(pool)} replicas, links sent {sent}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--clients", type=int, default=8, help="processes that read")
    parser.add_argument("--block-kib", type=int, default=512, help="size of a block")
    parser.add_argument("--rate-mbit", type=int, default=1000, help="rate of each node's link")
    parser.add_argument("--times", type=int, default=3, help="how often each client reads the prefix per round")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; medians are reported")
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
    parts: dict[str, Callable[..., None]] = {"--as-client": client_main, "--as-put": put_main, "--as-count": count_main}
    if len(sys.argv) > 1 and sys.argv[1] in parts:
        parts[sys.argv[1]](*sys.argv[2:])
    else:
        main()
