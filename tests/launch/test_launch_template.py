"""The template process without a launcher: its roles get what was ordered, and end if the order never comes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from waiting import HANG_S

from moonpool.base.forking import SPACE_FOR_COMMAND_LINE, adopting


@contextmanager
def template() -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(HANG_S)
    with theirs:
        command = [sys.executable, "-m", "moonpool.cli.template", str(theirs.fileno()), SPACE_FOR_COMMAND_LINE]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    try:
        yield process, ours
    finally:
        ours.close()
        assert process.wait(HANG_S) == 0, "it ends when the launcher does"


@contextmanager
def adopting_while_another_thread_stops() -> Iterator[None]:
    """Two templates fork at the same time, and the first is done before the second has begun."""
    with ExitStack() as stack:
        with adopting():
            stack.enter_context(adopting())
        yield


def forked(
    there: socket.socket, order: bytes, adopted: Callable[[], AbstractContextManager[None]] = adopting
) -> tuple[int, bytes, bytes]:
    """Return how a conductor ends that gets this order, what it prints, and what it reports."""
    (order_fd, to_order), (output, to_output), (ready, to_ready), (lifeline, hold) = (os.pipe() for _ in range(4))
    socket.send_fds(there, [b"conductor"], [order_fd, to_output, to_ready, lifeline])
    for fd in (order_fd, to_output, to_ready, lifeline):
        os.close(fd)
    assert there.recv(64) == b"loaded"
    with adopted():
        there.send(b"fork")
        pid = int(there.recv(64))
    os.write(to_order, order)
    os.close(to_order)
    with open(output, "rb") as printed, open(ready, "rb") as report:
        said = printed.read(), report.read()
    _, status = os.waitpid(pid, 0)
    os.close(hold)
    return os.waitstatus_to_exitcode(status), *said


def order(*arguments: str, **environment: str) -> bytes:
    return json.dumps({"arguments": ["conductor", *arguments], "environment": {**os.environ, **environment}}).encode()


def test_a_forked_role_has_its_own_arguments_environment_and_output() -> None:
    with template() as (_, there):
        code, printed, report = forked(there, order("--help"))
        assert (code, report) == (0, b"")
        assert b"--policy-name" in printed
        code, printed, report = forked(there, order("--listen", "nonsense"))
        assert code == 1
        assert json.loads(report)["error"].startswith("'nonsense' is not an address")
        code, printed, _ = forked(there, order(MOONPOOL_LOG_LEVEL="LOUD"))
        assert code in (1, 2)
        assert b"LOUD" in printed


def test_roles_forked_from_two_templates_at_once_are_both_adopted() -> None:
    with template() as (_, there):
        code, printed, _ = forked(there, order("--help"), adopting_while_another_thread_stops)
        assert code == 0
        assert b"--policy-name" in printed


def test_a_process_that_the_launcher_does_not_know_of_ends() -> None:
    with template() as (_, there):
        assert forked(there, b"") == (1, b"", b"")


SHOW = """
from moonpool.base.forking import show_command_line
show_command_line({words})
print("shown", flush=True)
input()
"""


@pytest.mark.parametrize(
    ("words", "shown"),
    [("['moonpool', 'worker']", b"moonpool\0worker\0"), ("['moonpool', 'x' * 100_000]", b"moonpool\0xxxxxxxx")],
)
def test_a_command_line_is_shown_as_far_as_it_fits(words: str, shown: bytes) -> None:
    command = [sys.executable, "-c", SHOW.format(words=words), SPACE_FOR_COMMAND_LINE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "shown\n"
        found = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert found.startswith(shown)
        assert found.endswith(b"\0")
        assert Path(f"/proc/{process.pid}/environ").read_bytes().count(b"PATH=") > 0, "what lies behind it is kept"
        process.communicate("\n", timeout=HANG_S)
    assert process.returncode == 0
