"""What another user of the machine can do to `moonpool serve`: send requests to its API, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from urllib.parse import urlsplit

import psutil
import pytest
from e2e_service import Service

INTRUDER = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)  # nobody
run_dir, pids = sys.argv[1], sys.argv[2:]
def attempt(what, *args):
    try:
        what(*args)
    except OSError:
        return
    print("could", what.__name__, *args)
attempt(os.listdir, run_dir)
for name in ("master", "conductor", "prefill-0", "decode-0"):
    attempt(socket.socket(socket.AF_UNIX).connect, f"{run_dir}/{name}.sock")
for pid in pids:
    attempt(os.listdir, f"/proc/{pid}/fd")
    attempt(lambda path: open(path, "rb").read(), f"/proc/{pid}/mem")
"""


def test_nothing_but_the_api_listens_on_tcp(one_each: Service) -> None:
    listening = {
        (process.name(), connection.laddr.port)
        for process in one_each.family()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {port for _, port in listening} == {urlsplit(one_each.url).port}, listening


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reaches_no_socket_and_no_memory(one_each: Service) -> None:
    command = [sys.executable, "-I", "-c", INTRUDER, str(one_each.run_dir)]
    command += [str(process.pid) for process in one_each.family()]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout == ""
