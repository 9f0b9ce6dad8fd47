"""`moonpool chat`: a conversation with a running server, streamed, one turn per line.

Answers go to standard output; prompts and figures (time to first token, cached tokens) to standard error, so it can
be piped. `/exit` or the end of input ends it; Ctrl-C stops the answer that is being given.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from moonpool.base.errors import MoonpoolError, ProtocolError, Unavailable
from moonpool.cli.options import command_from

_PROMPT = "you> "
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class ChatConfig:
    url: str = "http://127.0.0.1:8000"  # of the server, without /v1
    model: str | None = None  # default: the first one the server offers
    system: str | None = None  # what the model is told before the conversation
    max_tokens: int = 512  # per answer
    temperature: float | None = None  # default: the server's
    api_key: str | None = None  # default: the environment's MOONPOOL_API_KEY or OPENAI_API_KEY


@dataclass
class Turn:
    """One answer and what it took. Token counts are None when the server did not say."""

    text: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> str:
        parts = [f"first token {self.ttft_s:.2f} s" if self.ttft_s is not None else "no token"]
        answered = self.usage.get("completion_tokens")
        if answered is not None and self.ttft_s is not None and self.total_s > self.ttft_s:
            parts.append(f"{answered} tokens, {max(0, answered - 1) / (self.total_s - self.ttft_s):.1f}/s")
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            parts.append(f"{cached} of {self.usage.get('prompt_tokens')} prompt tokens cached")
        return " | ".join(parts)


class Conversation:
    """Remembers what was said. Errors of the server and of the network are MoonpoolErrors."""

    def __init__(self, config: ChatConfig) -> None:
        key = config.api_key or os.environ.get("MOONPOOL_API_KEY") or os.environ.get("OPENAI_API_KEY")
        self._config = config
        self._client = httpx.Client(
            base_url=config.url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
            trust_env=False,  # a proxy for the outside world is none for this machine
        )
        self._messages: list[dict[str, str]] = []
        if config.system:
            self._messages.append({"role": "system", "content": config.system})
        self.model = config.model

    def connect(self) -> str:
        """Finds out the model's name; Unavailable when there is no server."""
        if self.model is None:
            try:
                response = self._client.get("/v1/models")
                _raise_for_status(response)
                self.model = str(response.json()["data"][0]["id"])
            except httpx.HTTPError as error:
                raise self._lost(error) from error
            except (ValueError, LookupError, TypeError) as error:
                raise ProtocolError(f"{self._config.url} does not answer like an OpenAI server") from error
        return self.model

    def ask(self, text: str) -> Generator[Turn, None, None]:
        """Yields the growing turn after every piece of text, and whole at the end. Kept only if it gave an answer."""
        question = {"role": "user", "content": text}
        turn, begin_s = Turn(), time.monotonic()
        try:
            for event in self._events([*self._messages, question]):
                turn.usage = event.get("usage") or turn.usage
                piece = _content(event)
                if piece:
                    turn.text += piece
                    if turn.ttft_s is None:
                        turn.ttft_s = time.monotonic() - begin_s
                    yield turn
        finally:
            turn.total_s = time.monotonic() - begin_s
            if turn.text:
                self._messages += [question, {"role": "assistant", "content": turn.text}]
        yield turn

    def _events(self, messages: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self._config.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._config.temperature is not None:
            body["temperature"] = self._config.temperature
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                _raise_for_status(response)
                yield from _server_sent(response)
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    def _lost(self, error: httpx.HTTPError) -> MoonpoolError:
        if isinstance(error, httpx.ConnectError):
            return Unavailable(f"nothing answers at {self._config.url}; start a server with: moonpool serve")
        return Unavailable(f"the connection to {self._config.url} failed: {error or type(error).__name__}")

    def close(self) -> None:
        self._client.close()


def _server_sent(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise Unavailable(str(event["error"].get("message", "the server gave up")))
        yield event


def _content(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def _raise_for_status(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = response.text[:200] or response.reason_phrase
    raise Unavailable(f"the server refused ({response.status_code}): {message}")


def _lines() -> Iterator[str]:
    """What the user says, a line at a time, until /exit or the end of input."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 - importing it gives input() line editing and a history
    while True:
        try:
            line = input(_PROMPT if terminal else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line:
            yield line


def _answer(conversation: Conversation, line: str) -> None:
    shown, turn = 0, Turn()
    try:
        with contextlib.closing(conversation.ask(line)) as turns:
            for turn in turns:
                print(turn.text[shown:], end="", flush=True)
                shown = len(turn.text)
    except KeyboardInterrupt:
        print(" ...", end="")
    print(flush=True)
    print(f"[{turn.figures()}]", file=sys.stderr, flush=True)


def _run(config: ChatConfig) -> None:
    conversation = Conversation(config)
    try:
        model = conversation.connect()
        if sys.stdin.isatty():
            print(f"talking to {model} at {config.url}; /exit ends it", file=sys.stderr)
        for line in _lines():
            try:
                _answer(conversation, line)
            except MoonpoolError as error:
                if not sys.stdin.isatty():
                    raise
                print(f"moonpool chat: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        conversation.close()


command = command_from(_run, ChatConfig)
