"""`moonpool chat`, piped, against a small HTTP server that streams like ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S

from moonpool.base.run_dirs import write_url
from moonpool.launch.run_dir import RunDir


class Echo(BaseHTTPRequestHandler):
    """Answers with the number of messages it was sent; refuses the word "refuse"."""

    seen: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "echo-1"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body | {"key": self.headers.get("Authorization")})  # type: ignore[attr-defined]
        said = body["messages"][-1]["content"]
        if said == "refuse":
            self._reply(429, {"error": {"message": "too busy"}})
            return
        self.send_response(200)
        self.end_headers()
        for piece in ("message ", f"{len(body['messages'])}"):
            self._event({"choices": [{"delta": {"content": piece}}]})
        if said == "break":
            self._event({"error": {"message": "a worker died"}})
            return
        details = {"cached_tokens": 64}
        usage = {"prompt_tokens": 80, "completion_tokens": 2, "prompt_tokens_details": details}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as http:
        http.seen = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield http
        finally:
            http.shutdown()
            thread.join()


def chat(server: ThreadingHTTPServer, said: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    command = [sys.executable, "-m", "moonpool", "chat", "--url", url, *arguments]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=HANG_S)


def test_turns_are_remembered_and_measured(server: ThreadingHTTPServer) -> None:
    ran = chat(server, "hello\n\nand again\n/exit\nnever sent\n", "--system", "be brief", "--api-key", "k")
    assert ran.returncode == 0
    assert ran.stdout == "message 2\nmessage 4\n"
    assert ran.stderr.count("64 of 80 prompt tokens cached") == 2
    assert ran.stderr.count("first token ") == 2
    first, second = server.seen  # type: ignore[attr-defined]
    assert first["model"] == "echo-1"
    assert first["key"] == "Bearer k"
    assert second["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "message 2"},
        {"role": "user", "content": "and again"},
    ]


@pytest.mark.parametrize(
    ("said", "line"),
    [("refuse", "moonpool chat: the server refused (429): too busy"), ("break", "moonpool chat: a worker died")],
)
def test_a_failure_is_one_line(server: ThreadingHTTPServer, said: str, line: str) -> None:
    ran = chat(server, said + "\n")
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [line]


def test_no_server_is_one_line(server: ThreadingHTTPServer) -> None:
    ran = chat(server, "x", "--url", "http://127.0.0.1:1")
    assert ran.returncode == 1
    assert ran.stderr == "moonpool chat: nothing answers at http://127.0.0.1:1; start a server with: moonpool serve\n"


def test_commands_never_reach_the_model(server: ThreadingHTTPServer) -> None:
    ran = chat(server, "hello\n/help\n/hlep me\n/new\n//path\n/quit\nnever sent\n")
    assert (ran.returncode, ran.stdout) == (0, "message 1\nmessage 1\n")
    assert "/new      begin a new conversation" in ran.stderr
    assert "there is no command /hlep; /help lists them" in ran.stderr
    assert [body["messages"][-1]["content"] for body in server.seen] == ["hello", "/path"]  # type: ignore[attr-defined]


@contextmanager
def running_services(*urls: str) -> Iterator[dict[str, str]]:
    """Run directories as of services at these URLs; the environment in which `moonpool chat` looks for them."""
    with ExitStack() as stack:
        base = stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-"))
        for url in urls:
            write_url(stack.enter_context(RunDir(Path(base))), url)
        yield {**os.environ, "XDG_RUNTIME_DIR": base}


def test_it_finds_the_service_on_this_machine(server: ThreadingHTTPServer) -> None:
    command = [sys.executable, "-m", "moonpool", "chat"]
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with running_services(url) as environment:
        ran = subprocess.run(command, input="hello\n", capture_output=True, text=True, timeout=HANG_S, env=environment)
    assert (ran.returncode, ran.stdout) == (0, "message 1\n")
    with running_services(url, "http://127.0.0.1:1") as environment:
        ran = subprocess.run(command, input="hello\n", capture_output=True, text=True, timeout=HANG_S, env=environment)
    assert ran.returncode == 1
    assert ran.stderr.startswith("moonpool chat: 2 services run on this machine; choose one with --url: http://")
