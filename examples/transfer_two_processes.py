"""The transfer engine alone, between two processes of one machine: offer memory, find it by name, read, write, tell.

    python examples/transfer_two_processes.py [MASTER]

On two machines nothing changes but the address. There is no server in between: the owner is asked itself. With the
address of a running master, the owner announces its memory there, and the other process needs the names only.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from moonpool.store import MasterDirectory
from moonpool.transfer import Priority, TransferConfig, TransferEngine, TransferOp, TransferRequest

PAGE_NBYTES = 1 << 20
NUM_PAGES = 16


def make_engine(run_dir: str, master: str | None, **settings: Any) -> TransferEngine:
    directory = None if master is None else MasterDirectory(master)  # lives as long as the process
    return TransferEngine(TransferConfig(run_dir=run_dir, **settings), directory=directory)


def own(run_dir: str, master: str | None = None) -> None:
    """The owner: offers its pages, and looks at them when it is told that some were written."""
    pages = np.zeros((NUM_PAGES, PAGE_NBYTES), np.uint8)
    with make_engine(run_dir, master) as engine:
        engine.register("pages", pages)  # memory it has; a tensor, an mmap or a pointer would do as well
        engine.register("notes", nbytes=4096)  # new memory, which processes of this machine share
        engine.segment("notes").memory[:5] = b"hello"
        print(engine.addresses[0], flush=True)
        for message in engine.notifications(timeout_s=30.0):
            numbers = [int(number) for number in message.message.split()]
            sums = [int(pages[number].sum()) // PAGE_NBYTES for number in numbers]
            print(f"the owner was told about {message.segment} {numbers} and found {sums} in them", flush=True)
        sys.stdin.read()  # until the other process has all it wants


async def use(run_dir: str, address: str, master: str | None) -> None:
    """The other process: all of it could be done without await as well."""
    with make_engine(run_dir, master, tcp_host=None) as engine:
        peer = f"@{address}" if master is None else ""
        notes, pages = await engine.opening(f"notes{peer}"), await engine.opening(f"pages{peer}")
        print(f"notes are reached by {notes.transport}, pages by {pages.transport}")
        print("read in place: ", bytes(notes.view(0, 5) or b""))

        written = {3: 30, 5: 50}
        await engine.submit(
            [
                TransferRequest(TransferOp.WRITE, pages, number * PAGE_NBYTES, [np.full(PAGE_NBYTES, byte, np.uint8)])
                for number, byte in written.items()
            ],
            priority=Priority.HANDOFF,
            timeout_s=5.0,
            notify=b"3 5",  # goes when every byte is in its place
        )
        back = bytearray(2 * PAGE_NBYTES)
        await engine.submit([TransferRequest(TransferOp.READ, pages, 3 * PAGE_NBYTES, [back])], timeout_s=5.0)
        print("read back:     ", back[0], back[PAGE_NBYTES])


def main(*master: str) -> None:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as run_dir:
        command = [sys.executable, __file__, "--own", run_dir, *master]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            asyncio.run(use(run_dir, owner.stdout.readline().strip(), *master or [None]))
            print(owner.communicate()[0], end="")


if __name__ == "__main__":
    own(*sys.argv[2:]) if sys.argv[1:2] == ["--own"] else main(*sys.argv[1:2])
