"""Clients that stream answers and write down what each saw; as threads of a test (`ask`), or as a process on a machine
of a lab (machines_lab.py), where they stream one answer after another until they are told to stop.

    clients = StreamClients(machine, "http://10.88.0.1:8000", bodies, num_clients=3)
    ...
    seen = clients.stop()

This file is also their process: `stream_clients.py URL BODIES NUM_CLIENTS` writes a line per answer, and ends when its
standard input does. Times are those of time.monotonic(), which all processes of a kernel share.
"""

from __future__ import annotations

import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from machines_lab import Machine

GIVE_UP_S = 120.0  # without a byte: the answer hangs
HANGS = "connection: TimeoutError"  # how the error of such an answer begins


@dataclass
class SeenAnswer:
    """What a client saw of one answer. `error` is None for a whole answer, and otherwise what the front end said, or
    what happened to the connection, which begins with "connection"."""

    number: int
    began_s: float
    connected_s: float | None = None  # None: no front end took the connection
    port: int | None = None  # of the client's end of the connection
    ended_s: float = 0.0
    text: str = ""
    error: str | None = None
    silence_s: float = 0.0  # the longest time without a token, before the first one and before the end included


class StreamClients:
    """`num_clients` of them send the bodies in turn, in one process on that machine."""

    def __init__(self, machine: Machine, url: str, bodies: Sequence[Mapping[str, Any]], num_clients: int) -> None:
        self._process = subprocess.Popen(
            machine.inside(sys.executable, __file__, url, json.dumps(bodies), str(num_clients)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._seen: list[SeenAnswer] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._seen.append(SeenAnswer(**json.loads(line)))

    @property
    def seen(self) -> list[SeenAnswer]:
        """Return the answers that have ended until now."""
        return list(self._seen)

    @property
    def num_seen(self) -> int:
        return len(self._seen)

    def stop(self) -> list[SeenAnswer]:
        """Let each client end its answer; return all answers. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(GIVE_UP_S + 10)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()
        return self._seen


def ask(url: str, number: int, body: Mapping[str, Any]) -> SeenAnswer:
    """Stream one answer."""
    seen = SeenAnswer(number, began_s=time.monotonic())
    last_s = seen.began_s
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=GIVE_UP_S)
    try:
        connection.connect()
        seen.connected_s, seen.port = time.monotonic(), connection.sock.getsockname()[1]
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
        reply = connection.getresponse()
        if reply.status != 200:
            seen.error = f"{reply.status}: {json.loads(reply.read())['error']['message']}"
        while seen.error is None:
            line = reply.readline()
            if not line:
                seen.error = "connection: it ended before the answer"
            if not line.startswith(b"data: "):
                continue
            now_s = time.monotonic()
            seen.silence_s, last_s = max(seen.silence_s, now_s - last_s), now_s
            if line.strip() == b"data: [DONE]":
                break
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                seen.error = f"{event['error']['code']}: {event['error']['message']}"
            else:
                seen.text += event["choices"][0]["text"]
    except (OSError, http.client.HTTPException) as error:
        seen.error = f"connection: {type(error).__name__}: {error}"
    finally:
        connection.close()
    seen.ended_s = time.monotonic()
    seen.silence_s = max(seen.silence_s, seen.ended_s - last_s)
    return seen


def main(url: str, bodies: Sequence[Mapping[str, Any]], num_clients: int) -> None:
    numbers, is_over, lock = itertools.count(), threading.Event(), threading.Lock()

    def keep_asking() -> None:
        while not is_over.is_set():
            number = next(numbers) % len(bodies)
            seen = ask(url, number, bodies[number])
            with lock:
                print(json.dumps(asdict(seen)), flush=True)
            if seen.error is not None:
                is_over.wait(0.2)  # as a client that tries again

    threads = [threading.Thread(target=keep_asking) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    is_over.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
