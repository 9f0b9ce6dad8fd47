"""The pool by hand: a real master and a real node, and the commands as typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

MOONPOOL = [sys.executable, "-m", "moonpool"]


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
        process.wait(timeout=10)


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-")))
        address = f"unix:{folder}/master.sock"
        stack.enter_context(role("master", "--listen", address, "--data-dir", str(folder / "data")))
        node = ("--name", "n", "--master-address", address, "--dram-nbytes", "16000000", "--run-dir", str(folder))
        stack.enter_context(role("node", *node))
        yield address


def moonpool(master: str, *arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [*MOONPOOL, *arguments]
    return subprocess.run(
        command, input=data, capture_output=True, timeout=60, env={**os.environ, "MOONPOOL_MASTER": master}
    )


def test_put_get_why_rm(master: str, tmp_path: Path) -> None:
    data = os.urandom(5_000_000)
    (tmp_path / "in").write_bytes(data)
    assert moonpool(master, "put", "weights", str(tmp_path / "in")).returncode == 0
    assert moonpool(master, "get", "weights").stdout == data
    assert moonpool(master, "get", "weights", "--out", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out").read_bytes() == data
    assert b"stored" in moonpool(master, "why", "weights").stdout
    taken = moonpool(master, "put", "weights", "-", data=b"other")
    assert (taken.returncode, taken.stdout) == (1, b"")
    assert b"already" in taken.stderr
    assert moonpool(master, "rm", "weights", "--force").returncode == 0
    gone = moonpool(master, "get", "weights")
    assert gone.returncode == 1
    assert gone.stderr.startswith(b"moonpool get: 'weights' cannot be had: ")


def test_stat(master: str) -> None:
    assert b" of " in moonpool(master, "stat").stdout
    stats = json.loads(moonpool(master, "stat", "--json").stdout)
    assert stats["segments"][0]["name"] == "n.dram"


def test_keys_in_hexadecimal(master: str) -> None:
    assert moonpool(master, "put", "00ff", "-", "--hex", data=b"x").returncode == 0
    assert moonpool(master, "get", "00FF", "--hex").stdout == b"x"
    assert moonpool(master, "why", "zz", "--hex").stderr == b"moonpool why: 'zz' is not hexadecimal\n"


def test_no_master_is_one_line(tmp_path: Path) -> None:
    ran = moonpool(f"unix:{tmp_path}/none.sock"[:100], "stat")
    assert ran.returncode == 1
    assert len(ran.stderr.splitlines()) == 1


def test_without_an_address_the_running_service_is_looked_for(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "MOONPOOL_MASTER"}
    environment["XDG_RUNTIME_DIR"] = str(tmp_path)
    ran = subprocess.run([*MOONPOOL, "stat"], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr == "moonpool stat: no service runs on this machine; say which pool with --master ADDRESS\n"
