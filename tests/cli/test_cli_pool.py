"""The pool by hand: a real master and a real node, and the commands as typed."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
from waiting import HANG_S

from moonpool.base.cluster import CONDUCTOR_SERVICE, RegisterWorker, WorkerInfo, WorkerRole
from moonpool.base.rpc import AsyncClient
from moonpool.cli.main import main
from moonpool.cli.stat import _as_lines
from moonpool.conductor.service import Conductor, ConductorConfig
from moonpool.store import Store
from moonpool.store.messages import StoreStats

MOONPOOL = [sys.executable, "-m", "moonpool"]
WORKER = WorkerInfo(
    name="p0",
    role=WorkerRole.PREFILL,
    address="unix:/p0",
    incarnation=1,
    identity=b"i",
    model="m",
    block_tokens=64,
    num_pages=101,
    max_num_seqs=8,
    page_nbytes=4096,
)


@contextmanager
def role(*arguments: str) -> Iterator[None]:
    """A role as its own process, ready when this yields."""
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen([*MOONPOOL, *arguments, "--ready-fd", str(write_fd)], pass_fds=(write_fd,))
    os.close(write_fd)
    try:
        with open(read_fd) as reports:
            assert "ready" in json.loads(reports.readline())
        yield
    finally:
        process.terminate()
        process.wait(timeout=HANG_S)


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        address = f"unix:{folder}/master.sock"
        stack.enter_context(role("master", "--listen", address, "--data-dir", str(folder / "data")))
        node = ("--name", "n", "--master-address", address, "--dram-nbytes", "16000000", "--run-dir", str(folder))
        stack.enter_context(role("node", *node))
        yield address


class Ran(NamedTuple):
    returncode: int
    stdout: bytes
    stderr: bytes


def moonpool(master: str, *arguments: str, data: bytes = b"") -> Ran:
    """The command in this process, which is quicker; test_as_a_process does it in one of its own."""
    out, err = io.BytesIO(), io.BytesIO()
    with (
        patch.dict(os.environ, MOONPOOL_MASTER=master),
        patch("sys.stdin", io.TextIOWrapper(io.BytesIO(data))),
        patch("sys.stdout", io.TextIOWrapper(out, write_through=True)),
        patch("sys.stderr", io.TextIOWrapper(err, write_through=True)),
    ):
        try:
            main(arguments)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return Ran(code, out.getvalue(), err.getvalue())


def test_as_a_process(master: str) -> None:
    environment = {**os.environ, "MOONPOOL_MASTER": master}
    put = [*MOONPOOL, "put", "-", "--key", "piped"]
    subprocess.run(put, input=b"by hand", env=environment, timeout=HANG_S, check=True, capture_output=True)
    got = subprocess.run([*MOONPOOL, "get", "piped"], env=environment, timeout=HANG_S, check=True, capture_output=True)
    assert (got.stdout, got.stderr) == (b"by hand", b"")
    moonpool(master, "rm", "piped", "--force")


def test_put_get_why_rm(master: str, tmp_path: Path) -> None:
    data = os.urandom(5_000_000)
    (tmp_path / "weights").write_bytes(data)
    stored = moonpool(master, "put", str(tmp_path / "weights"))
    assert (stored.returncode, stored.stdout, stored.stderr) == (0, b"", b"stored 5 MB as weights\n")
    assert moonpool(master, "get", "weights").stdout == data
    assert moonpool(master, "get", "weights", "--out", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out").read_bytes() == data
    assert b"stored" in moonpool(master, "why", "weights").stdout
    taken = moonpool(master, "put", "-", "--key", "weights", data=b"other")
    assert (taken.returncode, taken.stdout) == (1, b"")
    assert b"already" in taken.stderr
    assert moonpool(master, "put", "-", "--key", "weights", "--replace", data=b"other").returncode == 0
    assert moonpool(master, "get", "weights").stdout == b"other"
    assert moonpool(master, "rm", "weights", "--force").returncode == 0
    gone = moonpool(master, "get", "weights", "--out", str(tmp_path / "out"))
    assert gone.returncode == 1
    assert gone.stderr.startswith(b"moonpool get: 'weights' cannot be read: ")
    assert (tmp_path / "out").read_bytes() == data  # as it was
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "weights"]


def test_files_of_all_kinds(master: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert moonpool(master, "put", str(tmp_path / "empty")).returncode == 0
    assert moonpool(master, "get", "empty").stdout == b""
    assert moonpool(master, "get", "empty", "--out", "/dev/null").returncode == 0
    assert not Path("/dev/null").is_file()
    for arguments, reason in [
        (("put", str(tmp_path / "none")), b"cannot read"),
        (("put", str(tmp_path)), b"cannot read"),
        (("put", "-"), b"--key"),
        (("get", "empty", "--out", str(tmp_path / "none" / "out")), b"cannot write"),
    ]:
        ran = moonpool(master, *arguments)
        assert (ran.returncode, len(ran.stderr.splitlines())) == (1, 1)
        assert reason in ran.stderr
    moonpool(master, "rm", "empty", "--force")


def test_ls_and_rm_of_many(master: str) -> None:
    for key in ("a/1", "a/2", "b/1"):
        moonpool(master, "put", "-", "--key", key, data=b"12345")
    moonpool(master, "put", "-", "--key", "ff00", "--hex", data=b"x")
    assert sorted(moonpool(master, "ls").stdout.decode().split()) == ["a/1", "a/2", "b/1", "hex:ff00"]
    assert sorted(moonpool(master, "ls", "^a/").stdout.split()) == [b"a/1", b"a/2"]
    assert moonpool(master, "ls", "^a/1", "--hex").stdout == b"612f31\n"
    assert b" dram x1 b/1" in moonpool(master, "ls", "-l", "b").stdout
    (listed,) = [json.loads(line) for line in moonpool(master, "ls", "b", "--json").stdout.splitlines()]
    assert (listed["key"], listed["tiers"], listed["num_replicas"]) == ("b/1", ["dram"], 1)
    assert moonpool(master, "get", "hex:ff00").stdout == b"x"
    assert moonpool(master, "ls", "(").stderr.count(b"\n") == 1
    matching = moonpool(master, "rm", "--matching", "^a/")
    assert (matching.returncode, matching.stderr) == (0, b"removed 2 objects\n")
    everything = moonpool(master, "rm", "--all")  # one was just read
    assert everything.returncode == 1
    assert everything.stderr.splitlines()[0] == b"removed 1 objects"
    assert moonpool(master, "rm", "--all", "--force").returncode == 0
    assert moonpool(master, "ls").stdout == b""
    for wrong in (("rm",), ("rm", "key", "--all"), ("rm", "--all", "--matching", "x")):
        assert b"state what to remove" in moonpool(master, *wrong).stderr


def test_tensors_of_a_file(master: str, tmp_path: Path) -> None:
    text = json.dumps({"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"abc")
    ran = moonpool(master, "put", str(tmp_path / "m.safetensors"), "--tensors", "--key", "m/")
    assert (ran.returncode, ran.stderr) == (0, b"stored 1 tensors\n")
    with Store(master) as store:
        assert store.get_tensor("m/w").tolist() == list(b"abc")  # type: ignore[union-attr]


def test_stat(master: str) -> None:
    shown = moonpool(master, "stat").stdout.decode()
    assert "DRAM: " in shown
    assert "  n.dram  ok, " in shown
    assert "journal: ok" in shown
    stats = json.loads(moonpool(master, "stat", "--json").stdout)
    assert stats["segments"][0]["name"] == "n.dram"
    assert stats["tiers"]["dram"]["capacity_nbytes"] == stats["segments"][0]["capacity_nbytes"]
    assert stats["journal"]["durable"] == 1
    assert stats["tasks"] == []
    assert stats["workers"] is None


def test_stat_tells_the_hit_rate_in_words_and_as_a_number(master: str) -> None:
    moonpool(master, "put", "-", "--key", "hit", data=b"1")
    for key in ("hit", "miss"):
        moonpool(master, "get", key)
    stats, shown = json.loads(moonpool(master, "stat", "--json").stdout), moonpool(master, "stat").stdout.decode()
    hits, misses = stats["counters"]["hits"], stats["counters"]["misses"]
    assert hits > 0
    assert stats["hit_rate"] == hits / (hits + misses)
    assert f"hit rate: {stats['hit_rate']:.1%} ({hits:,} of {hits + misses:,} look-ups found their object)" in shown
    assert " = " not in shown, "no raw counters"
    moonpool(master, "rm", "hit", "--force")


def test_stat_tells_of_hot_keys() -> None:
    counters = {"hot_objects": 64, "hot_bytes": 2 * 10**6, "hot_replicas": 70, "hot_dropped": 6, "hot_reads": 1234}
    stats = StoreStats(100, 10**8, 9 * 10**7, (), {**counters, "hot_saved_bytes": 5 * 10**8, "evicted": 3})
    assert _as_lines(stats, [], None, None)[2:] == [
        "hot keys: 64 objects have extra replicas, 2 MB (2.0% of memory)",
        "  since the master started: 70 made, 6 dropped; 1,234 reads took about 500 MB from them",
        "journal: none; a restarted master does not know the objects in memory",
        "since the master started: 3 evicted",
    ]
    none = StoreStats(100, 10**8, 9 * 10**7, (), dict.fromkeys([*counters, "hot_saved_bytes"], 0))
    assert "hot" not in "\n".join(_as_lines(none, [], None, None))


async def test_stat_tells_of_workers(master: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conductor = Conductor(ConductorConfig(address=f"unix:{tmp_path}/c.sock"))
    address = await conductor.start()
    worker = await AsyncClient.connect(address, CONDUCTOR_SERVICE)
    await worker.call(RegisterWorker(info=WORKER))
    shown = (await asyncio.to_thread(moonpool, master, "stat", "--conductor", address)).stdout.decode()
    monkeypatch.setenv("MOONPOOL_CONDUCTOR", address)
    by_environment = (await asyncio.to_thread(moonpool, master, "stat")).stdout.decode()
    worker.close()
    await conductor.close()
    for text in (shown, by_environment):
        assert re.search(r"\n1 worker\n  p0  prefill, 0 running, 0 waiting, \d+ of 101 KV pages free\n", text), text


def test_rm_after_get_says_when_the_lease_ends(master: str) -> None:
    moonpool(master, "put", "-", "--key", "read", data=b"1")
    moonpool(master, "get", "read")
    ran = moonpool(master, "rm", "read")
    assert ran.returncode == 1
    (line,) = ran.stderr.decode().splitlines()
    assert re.search(r"'read' was not removed: .*the lease of its last reader ends in \d+\.\d s", line)
    assert line.endswith("Try again later, or remove it now with --force")
    assert moonpool(master, "rm", "read", "--force").returncode == 0


def test_why_of_a_key_that_was_never_there_fails_and_says_what_to_try(master: str) -> None:
    ran = moonpool(master, "why", "chatcmpl-mistyped")
    assert (ran.returncode, ran.stdout) == (1, b"")
    (line,) = ran.stderr.decode().splitlines()
    assert line.startswith("moonpool why: nothing is known of 'chatcmpl-mistyped'")
    assert "`moonpool ls` lists the keys" in line
    assert moonpool(master, "why", "ff", "--hex").returncode == 1


def test_stat_tells_of_tasks(master: str) -> None:
    with Store(master) as store:
        store.put("nowhere to go", b"1")
        task = store.tasks.drain("n.dram")
        try:
            shown = moonpool(master, "stat").stdout.decode()
            stats = json.loads(moonpool(master, "stat", "--json").stdout)
        finally:
            store.tasks.cancel(task)
    assert f"task {task}: drain n.dram, running, 0 of " in shown
    assert [(each["task_id"], each["state"]) for each in stats["tasks"]] == [(task, "running")]


def test_progress_is_for_terminals(master: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(9_000_000))
    leader, follower = os.openpty()
    command = [*MOONPOOL, "put", str(tmp_path / "file"), "--master", master]
    process = subprocess.Popen(command, stderr=follower, stdin=subprocess.DEVNULL)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while some := os.read(leader, 4096):
            shown += some
    os.close(leader)
    assert process.wait(timeout=HANG_S) == 0
    assert b"put " in shown
    assert b"stored 9 MB as file" in shown
    moonpool(master, "rm", "file", "--force")


def test_keys_in_hexadecimal(master: str) -> None:
    assert moonpool(master, "put", "-", "--key", "00ff", "--hex", data=b"x").returncode == 0
    assert moonpool(master, "get", "00FF", "--hex").stdout == b"x"
    assert moonpool(master, "why", "zz", "--hex").stderr == b"moonpool why: 'zz' is not hexadecimal\n"


def test_no_master_is_one_line(tmp_path: Path) -> None:
    ran = moonpool(f"unix:{tmp_path}/none.sock"[:100], "stat")
    assert ran.returncode == 1
    assert len(ran.stderr.splitlines()) == 1


def test_without_an_address_the_running_service_is_looked_for(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "MOONPOOL_MASTER"}
    environment["XDG_RUNTIME_DIR"] = str(tmp_path)
    ran = subprocess.run([*MOONPOOL, "stat"], env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert ran.returncode == 1
    assert ran.stderr == "moonpool stat: no service runs on this machine; state the pool with --master ADDRESS\n"
