"""Two machines joined by two rails, on one kernel: network namespaces, veth pairs, shaped by tc. Needs root.

    with RailsLab([1000, 250]) as lab:            # Mbit/s of each rail
        lab.transfer(op="read", nbytes=256 << 20)
        with lab.silent(1):                       # packets vanish; nobody is told
            ...

`with lab.moving("read"):` moves bytes until the block ends; lab.carried() tells meanwhile what each rail has carried.

RailsLab([1000, 1000], preferred=1) has an owner whose topology says that rail 1 serves its memory and rail 0 stands in;
the paths in its samples are then in this order.

The owner of a segment runs in one namespace, its reader and writer in the other, both as processes of this file
(`_rails_lab.py owner|client ...`). Used by transfer_rails.py and by tests/transfer/test_two_rails.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from moonpool.base.checksum import crc32c
from moonpool.transfer import (
    Batch,
    MultiPathRemote,
    RemoteSegment,
    SegmentDescriptor,
    TransferConfig,
    TransferEngine,
    TransferOp,
    TransferRequest,
)
from moonpool.transfer.paths.path_load import PathState, PlanConfig
from moonpool.transfer.paths.peer_paths import PathReport

SEGMENT_NBYTES = 64 << 20
_GRANULE_NBYTES = 64 << 10
_REQUEST_NBYTES = 16 << 20
_SAMPLE_S = 0.01
_TIMEOUT_S = 120.0
_numbers = itertools.count()


def missing() -> str | None:
    """Why this machine cannot have such a lab; None if it can."""
    if os.geteuid() != 0:
        return "two rails need root (network namespaces)"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"two rails need {tool}: apt-get install -y iproute2"
    try:
        with RailsLab([1000], processes=False):
            return None
    except subprocess.CalledProcessError as error:
        return f"two rails: {' '.join(error.cmd)}: {error.stderr.strip()}"


class Sample(NamedTuple):
    """Bytes acknowledged on each rail, at a moment of time.monotonic() within the batch of this number."""

    at_s: float
    done_nbytes: list[int]
    batch: int


class Result(NamedTuple):
    nbytes: int
    seconds: float  # spent in transfers
    samples: list[Sample]
    correct: bool

    @property
    def rate(self) -> float:
        return self.nbytes / self.seconds

    @property
    def longest_stall_s(self) -> float:
        """The longest time within a batch in which no byte was acknowledged on any rail. Between two batches the client
        checks what it has read: that takes long on a busy machine, and no byte waits then.
        """
        longest_s, last = 0.0, self.samples[0]
        for sample in self.samples[1:]:
            if sample.batch != last.batch:
                last = sample
                continue
            longest_s = max(longest_s, sample.at_s - last.at_s)
            if sum(sample.done_nbytes) != sum(last.done_nbytes):
                last = sample
        return longest_s

    @property
    def carried_nbytes(self) -> list[int]:
        """Bytes acknowledged on each rail while batches were under way; empty when there is only one."""
        first, last = self.samples[0].done_nbytes, self.samples[-1].done_nbytes
        return [end - begin for begin, end in zip(first, last, strict=True)]

    def first_use_s(self, rail: int, after_s: float) -> float | None:
        """When the rail carried bytes for the first time after that moment."""
        before = max((s.done_nbytes[rail] for s in self.samples if s.at_s <= after_s), default=0)
        return next((s.at_s for s in self.samples if s.at_s > after_s and s.done_nbytes[rail] > before), None)


class Worker:
    """A process of this file in a namespace. It ends when its standard input does."""

    def __init__(self, namespace: str, *arguments: str, into: list[str] | None = None) -> None:
        """`into` is another way into the namespace."""
        command = [*(into or ["ip", "netns", "exec", namespace]), sys.executable, __file__, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, **command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker of the lab ended with {self._process.wait(10)}")
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=20)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class RailsLab:
    """Names are this process's own; everything is removed on exit."""

    def __init__(self, rates_mbit: list[int], *, preferred: int | None = None, processes: bool = True) -> None:
        number = next(_numbers)
        self._owner_ns, self._client_ns = f"mpo{os.getpid()}x{number}", f"mpc{os.getpid()}x{number}"
        self._rates_mbit = rates_mbit
        self._preferred = preferred
        self._processes = processes
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> RailsLab:
        _sweep()
        with contextlib.ExitStack() as undo:
            for namespace in (self._owner_ns, self._client_ns):
                _run("ip", "netns", "add", namespace)
                undo.callback(_run, "ip", "netns", "del", namespace)
            for rail, rate_mbit in enumerate(self._rates_mbit):
                self._add_rail(rail, rate_mbit)
            if self._processes:
                self._start_workers(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def transfer(self, **command: object) -> Result:
        """`op` read or write; `nbytes` or `seconds` of it; `only` one rail (all when it is missing); a rail that says
        nothing for `silence_s` has failed (by default as in the product).
        """
        self.start(**command)
        return self.finish()

    def start(self, **command: object) -> None:
        """Returns when the transfer has begun."""
        self.client.send(**command)
        assert self.client.receive() == "started"
        self._op = command["op"]

    def finish(self) -> Result:
        result = self.client.receive()
        samples = [Sample(*sample) for sample in result["samples"]]
        correct = result["correct"]
        if self._op == "write":
            self.owner.send()
            correct = self.owner.receive() == result["checksum"]
        return Result(result["nbytes"], result["seconds"], samples, correct)

    @contextlib.contextmanager
    def moving(self, op: str, *, batch_nbytes: int = SEGMENT_NBYTES, **command: object) -> Iterator[None]:
        """Bytes move, in batches, until the block ends without an error. Then raise AssertionError if one is wrong."""
        self.start(op=op, batch_nbytes=batch_nbytes, until_told=True, **command)
        try:
            yield
        finally:
            self.client.send(told="stop")
            result = self.finish()
        assert result.correct, f"{op}: wrong bytes"

    def carried(self) -> list[int]:
        """Bytes acknowledged on each rail since moving() began."""
        return [nbytes for nbytes, _ in self._look()]

    def has_failed(self, rail: int) -> bool:
        """Whether the client takes the rail for failed, while moving()."""
        return self._look()[rail][1]

    def _look(self) -> list[tuple[int, bool]]:
        self.client.send(told="look")
        return [(nbytes, has_failed) for nbytes, has_failed in self.client.receive()]

    @contextlib.contextmanager
    def unplugged(self, rail: int) -> Iterator[None]:
        """The owner's end is down; the client's loses its carrier."""
        link = ("ip", "-n", self._owner_ns, "link", "set", f"rail{rail}")
        _run(*link, "down")
        try:
            yield
        finally:
            _run(*link, "up")

    @contextlib.contextmanager
    def silent(self, rail: int) -> Iterator[None]:
        """Packets vanish both ways: they are sent to a hardware address that nobody has. (netem's loss would do the
        same, but not every kernel has it.)
        """
        for namespace, address in self._neighbours(rail):
            entry = ("neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "nud", "permanent")
            _run("ip", "-n", namespace, *entry, "dev", f"rail{rail}")
        try:
            yield
        finally:
            for namespace, address in self._neighbours(rail):
                _run("ip", "-n", namespace, "neigh", "del", address, "dev", f"rail{rail}")

    def fault(self, kind: str, rail: int) -> contextlib.AbstractContextManager[None]:
        return {"unplugged": self.unplugged, "silent": self.silent}[kind](rail)

    def sent_nbytes(self, rail: int) -> int:
        """By the owner's interface, since it was made."""
        return self._counter(rail, "tx")

    def received_nbytes(self, rail: int) -> int:
        return self._counter(rail, "rx")

    def owner_addresses(self, *, own_sysfs: bool) -> list[str]:
        """Where an engine in the owner's namespace listens that finds its rails by itself. Without a /sys of its own it
        sees the machine's, as in some containers.
        """
        into = None if own_sysfs else ["nsenter", f"--net=/run/netns/{self._owner_ns}"]
        with tempfile.TemporaryDirectory() as run_dir:
            worker = Worker(self._owner_ns, "listener", run_dir, into=into)
            try:
                found: list[str] = worker.receive()
                worker.close()
                return found
            finally:
                worker.kill()

    def _counter(self, rail: int, direction: str) -> int:
        command = ["ip", "-j", "-s", "-n", self._owner_ns, "link", "show", "dev", f"rail{rail}"]
        [link] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return int(link["stats64"][direction]["bytes"])

    def _neighbours(self, rail: int) -> list[tuple[str, str]]:
        return [(self._owner_ns, f"10.77.{rail}.2"), (self._client_ns, f"10.77.{rail}.1")]

    def _add_rail(self, rail: int, rate_mbit: int) -> None:
        name = f"rail{rail}"
        _run("ip", "-n", self._owner_ns, "link", "add", name, "type", "veth", "peer", "name", name,
             "netns", self._client_ns)  # fmt: skip
        for namespace, host in ((self._owner_ns, 1), (self._client_ns, 2)):
            _run("ip", "-n", namespace, "addr", "add", f"10.77.{rail}.{host}/24", "dev", name)
            _run("ip", "-n", namespace, "link", "set", name, "up")
            shape = ("tbf", "rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "20ms")
            _run("tc", "-n", namespace, "qdisc", "add", "dev", name, "root", *shape)

    def _start_workers(self, undo: contextlib.ExitStack) -> None:
        run_dir = undo.enter_context(tempfile.TemporaryDirectory())
        hosts = [f"10.77.{rail}.1" for rail in range(len(self._rates_mbit))]
        if self._preferred is None:
            self.owner = Worker(self._owner_ns, "owner", run_dir, *hosts)
        else:
            topology = self._write_topology(Path(run_dir), self._preferred)
            self.owner = Worker(self._owner_ns, "placed_owner", run_dir, topology, *hosts)
        undo.push(_ender(self.owner))
        descriptor = self.owner.receive()
        self.client = Worker(self._client_ns, "client", run_dir, json.dumps(descriptor))
        undo.push(_ender(self.client))

    def _write_topology(self, folder: Path, preferred: int) -> str:
        others = [f"rail{rail}" for rail in range(len(self._rates_mbit)) if rail != preferred]
        choice = {"preferred": [f"rail{preferred}"], "secondary": others}
        file = folder / "topology.json"
        file.write_text(json.dumps({"net": {"cpu:0": choice}}))
        return str(file)


def _ender(worker: Worker) -> Any:
    def end(kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            worker.close()
        finally:
            worker.kill()

    return end


def _sweep() -> None:
    """Removes the namespaces of labs whose process was killed."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for name, pid in re.findall(r"^(mp[oc](\d+)x\d+)\b", listed, re.M):
        if not Path("/proc", pid).exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)  # another may be quicker


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def listener_main(run_dir: str) -> None:
    with TransferEngine(TransferConfig(run_dir=run_dir, shm=False, tcp_host="auto")) as engine:
        say(engine.addresses)
        sys.stdin.read()


def placed_owner_main(run_dir: str, topology_file: str, *hosts: str) -> None:
    own(TransferConfig(run_dir=run_dir, shm=False, tcp_host=hosts[0], tcp_hosts=hosts[1:], topology_file=topology_file))


def owner_main(run_dir: str, *hosts: str) -> None:
    own(TransferConfig(run_dir=run_dir, shm=False, tcp_host=hosts[0], tcp_hosts=hosts[1:]))


def own(config: TransferConfig) -> None:
    """Serves one segment of node 0; answers every line with its checksum."""
    with TransferEngine(config) as engine:
        descriptor = engine.register("pool", nbytes=SEGMENT_NBYTES, location="cpu:0", granule_nbytes=_GRANULE_NBYTES)
        segment = engine.segment("pool")
        segment.memory[:] = np.random.default_rng(1).bytes(SEGMENT_NBYTES)
        print(msgspec.json.encode(descriptor).decode(), flush=True)
        for _ in sys.stdin:
            say(crc32c(segment.memory))


def client_main(run_dir: str, descriptor_json: str) -> None:
    client = _Client(run_dir, msgspec.json.decode(descriptor_json, type=SegmentDescriptor))
    for line in sys.stdin:
        client.obey(**json.loads(line))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ClientConfig(TransferConfig):
    """With a limit of one's own for the silence of a rail: a host that stalls makes all rails silent for a while."""

    silence_s: float

    @property
    def plan(self) -> PlanConfig:
        return dataclasses.replace(super().plan, slice_timeout_s=self.silence_s)


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def _answer_until_stop(remote: RemoteSegment, moving: Future[bool]) -> None:
    """Answers what is asked about the rails. Raises what has ended the transfer."""
    for line in sys.stdin:
        if json.loads(line)["told"] == "stop":
            return
        if moving.done():
            moving.result()
        say([(path.done_nbytes, path.state is not PathState.UP) for path in reports(remote)])


def reports(remote: RemoteSegment) -> Sequence[PathReport]:
    return remote.report() if isinstance(remote, MultiPathRemote) else []


class _Client:
    """Knows at any time what the segment must hold: what it was made with, and then what was written."""

    def __init__(self, run_dir: str, descriptor: SegmentDescriptor) -> None:
        self._run_dir = run_dir
        self._descriptor = descriptor
        self._generations = itertools.count(1)
        self._right = np.frombuffer(bytearray(np.random.default_rng(1).bytes(SEGMENT_NBYTES)), np.uint8)
        self._buffer = np.zeros_like(self._right)
        self._moved, self._busy_s = 0, 0.0  # of the command under way

    def obey(
        self,
        op: str,
        nbytes: int = 0,
        seconds: float = 0.0,
        only: int | None = None,
        batch_nbytes: int = SEGMENT_NBYTES,
        silence_s: float = PlanConfig.slice_timeout_s,
        until_told: bool = False,
    ) -> None:
        config = _ClientConfig(run_dir=self._run_dir, shm=False, tcp_host=None, silence_s=silence_s)
        with TransferEngine(config) as engine:
            remote = engine.open(self._through(only))
            remote.read_into(0, [self._buffer[: 8 << 20]], timeout_s=_TIMEOUT_S)  # speeds of connections that exist
            say("started")
            with _Sampler(remote) as sampler, ThreadPoolExecutor(1) as thread:
                stop = threading.Event()
                is_over = stop.is_set if until_told else lambda: self._moved >= nbytes and self._busy_s >= seconds
                size = min(batch_nbytes, nbytes or batch_nbytes)
                moving = thread.submit(self._transfer, engine, remote, TransferOp(op), size, is_over, sampler)
                if until_told:
                    _answer_until_stop(remote, moving)
                    stop.set()
                correct = moving.result()
        say({"nbytes": self._moved, "seconds": self._busy_s, "correct": correct, "samples": sampler.samples,
             "checksum": crc32c(self._right.data)})  # fmt: skip

    def _through(self, only: int | None) -> SegmentDescriptor:
        """The segment, by all rails or by one."""
        if only is None:
            return self._descriptor
        rails = (*self._descriptor.endpoints, *self._descriptor.secondary)
        return msgspec.structs.replace(self._descriptor, endpoints=(rails[only],), secondary=())

    def _transfer(
        self,
        engine: TransferEngine,
        remote: RemoteSegment,
        op: TransferOp,
        size: int,
        is_over: Callable[[], bool],
        sampler: _Sampler,
    ) -> bool:
        """The beginning of the segment over and over; each write inverts what was there. Whether all was right."""
        self._moved, self._busy_s, correct = 0, 0.0, True
        while not is_over():
            self._buffer[:size] = ~self._right[:size] if op is TransferOp.WRITE else 0
            started_s = time.monotonic()
            with sampler.batch():
                self._submit(engine, remote, op, size).wait()
            self._busy_s += time.monotonic() - started_s
            self._moved += size
            if op is TransferOp.WRITE:
                self._right[:size] = self._buffer[:size]
            correct = correct and bool((self._buffer[:size] == self._right[:size]).all())
        return correct

    def _submit(self, engine: TransferEngine, remote: RemoteSegment, op: TransferOp, nbytes: int) -> Batch:
        generation = next(self._generations)
        requests = [
            TransferRequest(op, remote, at, [self._buffer[at : min(at + _REQUEST_NBYTES, nbytes)]], generation)
            for at in range(0, nbytes, _REQUEST_NBYTES)
        ]
        return engine.submit(requests, timeout_s=_TIMEOUT_S)


class _Sampler:
    """Writes down, again and again while a batch is under way, what each rail has done."""

    def __init__(self, remote: RemoteSegment) -> None:
        self._remote = remote
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._lock = threading.Lock()
        self._batch = 0
        self._under_way = False
        self.samples: list[Sample] = []

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """A batch is under way; sampled at its beginning and its end, too."""
        with self._lock:
            self._batch, self._under_way = self._batch + 1, True
            self._sample()
        yield
        with self._lock:
            self._sample()
            self._under_way = False

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            with self._lock:
                if self._under_way:
                    self._sample()

    def _sample(self) -> None:
        done_nbytes = [path.done_nbytes for path in reports(self._remote)]
        self.samples.append(Sample(time.monotonic(), done_nbytes, self._batch))


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(exist_ok=True)
    roles: dict[str, Callable[..., None]] = {
        "owner": owner_main,
        "placed_owner": placed_owner_main,
        "client": client_main,
        "listener": listener_main,
    }
    roles[sys.argv[1]](*sys.argv[2:])
