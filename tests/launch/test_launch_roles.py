"""The launcher with real processes. Conductors are the smallest real role: no torch, no memory, a socket each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import HANG_S, wait_until

from moonpool.base.cluster import CONDUCTOR_SERVICE
from moonpool.base.errors import PeerLost
from moonpool.base.rpc import BlockingClient
from moonpool.conductor.messages import Status

LAUNCH = """
import asyncio, sys
from pathlib import Path
from moonpool.base.process import Lifeline
from moonpool.launch.plan import Role
from moonpool.launch.launcher import Launcher
folder, second = Path(sys.argv[1]), sys.argv[2]
roles = [
    Role("first", command="conductor", options={"address": f"unix:{folder}/first.sock", "name": "first"}),
    Role("second", command="conductor", options={"address": second, "name": "second"}, after=("first",)),
]
with Lifeline() as lifeline:
    failure = asyncio.run(Launcher(roles, lifeline, lambda seconds: print("complete", flush=True), folder).run())
sys.exit(failure)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mp-") as path:
        yield Path(path)


@contextlib.contextmanager
def launched(folder: Path, second: str) -> Iterator[subprocess.Popen[str]]:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(folder), second],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children: list[psutil.Process] = []
    try:
        yield launcher
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
        launcher.communicate()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def wait_complete(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "complete\n"
    children: list[psutil.Process] = psutil.Process(launcher.pid).children()
    assert len(children) == 3
    assert set(roles_of(children)) == {"first", "second"}
    return children


def words_of(process: psutil.Process) -> list[str]:
    return [word for word in process.cmdline() if word]


def roles_of(children: list[psutil.Process]) -> dict[str, psutil.Process]:
    """Return the processes that are roles, by name; the third one is what they were forked from."""
    command = [sys.executable, "-m", "moonpool", "conductor"]
    commands = [(words_of(child), child) for child in children]
    return {words[words.index("--name") + 1]: child for words, child in commands if words[:4] == command}


def is_gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)  # ended; nobody may be there to collect it
    except psutil.NoSuchProcess:
        return True


def incarnation(address: str) -> int | None:
    """Asks the conductor there; None while it is being started again."""
    client = BlockingClient(address, CONDUCTOR_SERVICE)
    try:
        client.call(Status(), timeout_s=HANG_S)
        assert client.peer is not None
        return client.peer.incarnation
    except PeerLost:
        return None
    finally:
        client.close()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_nothing(folder: Path, signum: signal.Signals) -> None:
    with launched(folder, f"unix:{folder}/second.sock") as launcher:
        children = wait_complete(launcher)
        for child in children:
            assert os.getpgid(child.pid) != os.getpgid(launcher.pid), "children do not hear Ctrl-C themselves"
        launcher.send_signal(signum)
        _, err = launcher.communicate(timeout=HANG_S)  # KILL_AFTER_S at most: test_supervisor.py, in virtual time
        assert launcher.returncode == 0, err
        assert all(is_gone(child) for child in children)
        assert sorted(path.name for path in folder.iterdir()) == ["first.log", "second.log"]


def test_children_of_a_killed_launcher_end_by_themselves(folder: Path) -> None:
    with launched(folder, f"unix:{folder}/second.sock") as launcher:
        children = wait_complete(launcher)
        launcher.kill()
        wait_until(lambda: all(map(is_gone, children)), "the children have ended without their launcher")


def test_a_killed_child_comes_back_at_the_same_address(folder: Path) -> None:
    address = f"unix:{folder}/second.sock"
    with launched(folder, address) as launcher:
        children = wait_complete(launcher)
        before = incarnation(address)
        assert before is not None
        victim = roles_of(children)["second"]
        victim.kill()
        wait_until(lambda: is_gone(victim), "the killed child has ended")
        wait_until(lambda: (incarnation(address) or before) > before, "it is back at its address")
        launcher.terminate()
        _, err = launcher.communicate(timeout=HANG_S)
        assert "second ended (killed by SIGKILL); starting it again in 0.2 s" in err


def test_a_child_whose_socket_was_removed_comes_back_with_a_new_one(folder: Path) -> None:
    address, path = f"unix:{folder}/second.sock", folder / "second.sock"
    with launched(folder, address) as launcher:
        wait_complete(launcher)
        before, other = incarnation(address), incarnation(f"unix:{folder}/first.sock")
        assert before is not None
        path.unlink()
        wait_until(lambda: path.exists() and (incarnation(address) or before) > before, "it is back at its address")
        assert incarnation(f"unix:{folder}/first.sock") == other, "the other one goes on"
        launcher.terminate()
        _, err = launcher.communicate(timeout=HANG_S)
        assert "second ended (a socket of it was removed or replaced); starting it again in 0.2 s" in err
        assert f"the socket {path} was removed or replaced" in (folder / "second.log").read_text()


def test_a_role_comes_back_although_what_it_was_forked_from_is_dead(folder: Path) -> None:
    address = f"unix:{folder}/second.sock"
    with launched(folder, address) as launcher:
        children = wait_complete(launcher)
        before, roles = incarnation(address), roles_of(children)
        assert before is not None
        [template] = [child for child in children if child not in roles.values()]
        assert template.num_threads() == 1, "a fork of several threads has one of them, and the locks of the others"
        template.kill()
        wait_until(lambda: is_gone(template), "the template has ended")
        assert incarnation(address) == before, "the roles go on"
        roles["second"].kill()
        wait_until(lambda: (incarnation(address) or before) > before, "it is back at its address")
        launcher.terminate()
        _, err = launcher.communicate(timeout=HANG_S)
        assert launcher.returncode == 0, err


def test_a_stop_while_a_role_is_being_started_leaves_nothing(folder: Path) -> None:
    with launched(folder, f"unix:{folder}/second.sock") as launcher:
        wait_until(lambda: psutil.Process(launcher.pid).children(), "there is a template, which imports the role")
        [template] = psutil.Process(launcher.pid).children()
        template.suspend()
        launcher.terminate()
        assert launcher.stderr is not None
        assert launcher.stderr.readline() == "moonpool: stopping\n"
        template.resume()
        _, err = launcher.communicate(timeout=HANG_S)
        assert launcher.returncode == 0, err
        assert is_gone(template)
        assert not (folder / "first.sock").exists()


def test_a_child_that_cannot_start_ends_the_launch_with_its_reason(folder: Path) -> None:
    with launched(folder, "nonsense") as launcher:
        out, err = launcher.communicate(timeout=HANG_S)
        assert launcher.returncode == 1
        assert out == ""
        assert err.splitlines()[-1].startswith("second: 'nonsense' is not an address")
        assert not (folder / "first.sock").exists()
