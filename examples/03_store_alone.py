"""The store on its own, from any Python program: objects, views, tensors, layers, events. No torch, no model.

    python examples/03_store_alone.py

A pool of two processes is started first, exactly as you would by hand; with one running already, Store() finds it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from moonpool.base.units import format_nbytes
from moonpool.store import Store


def main() -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-"))
        address = f"unix:{folder}/master.sock"
        stack.enter_context(role("master", "--listen", address, "--data-dir", f"{folder}/data"))
        node = (
            "--name",
            "here",
            "--master",
            address,
            "--dram",
            "64MB",
            "--run-dir",
            f"{folder}/run",
        )
        stack.enter_context(role("node", *node))
        store = stack.enter_context(Store(address))
        use_objects(store)
        use_tensors(store)
        use_layers(store)
        follow_changes(store)


@contextmanager
def role(*arguments: str) -> Iterator[None]:
    """`moonpool master` or `moonpool node` as its own process; ready when this yields."""
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "moonpool", *arguments, "--log-level", "warning", "--ready-fd", str(write_fd)]
    process = subprocess.Popen(command, pass_fds=(write_fd,))
    os.close(write_fd)
    try:
        with open(read_fd) as ready:
            ready.readline()
        yield
    finally:
        process.terminate()
        process.wait(timeout=10)


def use_objects(store: Store) -> None:
    print("put poem:      ", store.put("poem", b"The moon is a pool of light."))
    print("put it again:  ", store.put("poem", b"another text"), "(a key keeps its first value)")
    store.upsert("poem", b"The moon is a pool.")
    print("get poem:      ", store.get("poem"))
    with store.view("poem") as view:
        print("seen in place: ", bytes(view.pieces[0][:8]), "- a copy?", view.is_copy)
    print("many at once:  ", store.get_many(["poem", "prose"]))
    print("why no prose?  ", store.why("prose"))


def use_tensors(store: Store) -> None:
    weights = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
    store.put_tensor("weights", weights)
    seen = store.view_tensor("weights")  # no copy: the node's own memory, kept there while we look
    print("a tensor:      ", seen.dtype, seen.shape, "equal:", np.array_equal(seen, weights))
    print("read-only:     ", not seen.flags.writeable)


def use_layers(store: Store) -> None:
    layers = [bytes([number]) * 100_000 for number in range(4)]
    with store.put_session("block", [len(layer) for layer in layers]) as writing:
        for number, layer in enumerate(layers):  # as a model computes them; visible when all are there
            writing.write(number, layer)
    page = bytearray(100_000)
    with store.get_session("block") as reading:
        reading.read_into(2, page)
    print("layer 2 equal: ", page == layers[2])


def follow_changes(store: Store) -> None:
    with store.events() as events:
        print("the pool has:  ", sorted(key.decode() for key in next(events).stored))
        store.remove("poem", force=True)
        print("then removed:  ", next(events).removed)
    print("why no poem?   ", store.why("poem"))
    stats = store.stats()
    print(f"the pool:       {stats.num_objects} objects, {format_nbytes(stats.used_nbytes)}")


if __name__ == "__main__":
    main()
